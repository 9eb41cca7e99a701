//! The figures of a successful run.

use std::fmt::{self, Display};
use std::time::Duration;

use vm::qemu::version::Version;

use super::trial::Lived;

pub struct Report {
    pub version: Version,
    pub took: Duration,
    pub lived: Lived,
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<62}{value:>18}");
        let Lived { records, rounds, verified_kib, longest, deeds, done, .. } = &self.lived;
        row("QEMU", self.version.to_string())?;
        row("seconds", self.took.as_secs().to_string())?;
        row("the process was killed", deeds.kills.to_string())?;
        row("another process took its place", deeds.upgrades.to_string())?;
        row("  while it opened its image", deeds.opening.to_string())?;
        row("  while the guest was not connected, or about to be", deeds.connecting.to_string())?;
        row("  in a merge", deeds.in_merge.to_string())?;
        row("  in a snapshot", deeds.in_snapshot.to_string())?;
        row(
            "the next one had the guest, with a record of its requests",
            format!("{}, {}", self.lived.back.len(), self.lived.recorded),
        )?;
        row("merges done, of which repeated", format!("{}, {}", done.merges, done.again))?;
        row("snapshots done", done.snapshots.to_string())?;
        row("rounds that fio wrote and verified", rounds.to_string())?;
        row("MiB verified", (verified_kib >> 10).to_string())?;
        row("records fsynced, and found", records.announced.to_string())?;
        row("longest answer, by fio in the guest", seconds(*longest))?;
        let mut back = self.lived.back.clone();
        back.sort_unstable();
        if let (Some(middle), Some(last)) = (back.get(back.len() / 2), back.last()) {
            row(
                "from a kill until the rings ran again: median, most",
                format!("{}, {}", seconds(*middle), seconds(*last)),
            )?;
        }
        let mut upgraded = self.lived.upgraded.clone();
        upgraded.sort_unstable();
        if let (Some(middle), Some(last)) = (upgraded.get(upgraded.len() / 2), upgraded.last()) {
            row(
                "requests waited while another process took over: median, most",
                format!("{}, {}", seconds(*middle), seconds(*last)),
            )?;
        }
        for (deeds, name) in [(0, "nothing happened"), (1, "one moment")] {
            let mut pauses = self.pauses(|number| number == deeds);
            pauses.sort_unstable();
            let [middle, last] = [pauses.len() / 2, pauses.len().saturating_sub(1)].map(|at| pauses.get(at).copied());
            if let (Some(middle), Some(last)) = (middle, last) {
                let name = format!("longest from record to record, {name}: median, most");
                row(&name, format!("{}, {}", seconds(middle), seconds(last)))?;
            }
        }
        if let Some(last) = self.pauses(|number| number > 1).into_iter().max() {
            row("the same where it happened again before the guest went on", seconds(last))?;
        }
        Ok(())
    }
}

impl Report {
    fn pauses(&self, of: impl Fn(u64) -> bool) -> Vec<Duration> {
        self.lived.pauses.iter().filter(|(deeds, _)| of(*deeds)).map(|&(_, longest)| longest).collect()
    }
}

fn seconds(time: Duration) -> String {
    format!("{:.3} s", time.as_secs_f64())
}
