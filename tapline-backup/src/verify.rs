//! `backup verify`: what is damaged on a target, and which backups that costs.

use arguments::backup::BackupVerify;
use backup::{BackupDamage, Verified};
use control::printable;
use control::size::readable;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::list::fields;
use crate::output::{print, print_json, time};
use crate::progress::Progress;
use crate::target;

/// Ranges of a backup that are listed for people.
const SHOWN: usize = 8;

/// Runs the command.
pub fn run(verify: &BackupVerify) -> Result<Exit, Failure> {
    let opened = target::open(&verify.at)?;
    let progress = Progress::new("verifying", opened.packed()?, verify.at.json);
    let threads = target::threads(verify.threads);
    let verified = progress.during(|control| opened.target.verify(threads, control))?;
    if verify.at.json {
        print_json(&json!({
            "backups": verified.backups,
            "packs": verified.packs,
            "bytes": verified.bytes,
            "clean": verified.is_clean(),
            "damaged": verified.damaged.iter().map(|(name, what)| json!({ "object": name, "damage": what }))
                .collect::<Vec<_>>(),
            "lost": verified.lost.iter().map(lost).collect::<Vec<_>>(),
        }))?;
    } else {
        print(&report(&verified))?;
    }
    Ok(if verified.is_clean() { Exit::Done } else { Exit::Damaged })
}

fn lost(damage: &BackupDamage) -> serde_json::Value {
    let mut lost = fields(&damage.record);
    let ranges = damage.ranges.iter().map(|range| json!({ "start": range.start, "length": range.end - range.start }));
    if let Some(lost) = lost.as_object_mut() {
        lost.insert("ranges".to_owned(), ranges.collect());
    }
    lost
}

fn report(verified: &Verified) -> String {
    let mut text = String::new();
    for (name, what) in &verified.damaged {
        text.push_str(&format!("damaged: {name}: {what}\n"));
    }
    for BackupDamage { record, ranges } in &verified.lost {
        let len: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        let (name, time) = (printable(&record.label), time(record.time));
        text.push_str(&format!("lost: {} of backup {} of {name}, {time}:\n", readable(len), record.id));
        for range in ranges.iter().take(SHOWN) {
            text.push_str(&format!("  {} bytes at {}\n", range.end - range.start, range.start));
        }
        if let Some(more) = ranges.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            text.push_str(&format!("  and {more} more ranges (--json lists all)\n"));
        }
    }
    let (backups, packs, read) = (verified.backups, verified.packs, readable(verified.bytes));
    text.push_str(&match (verified.is_clean(), verified.lost.len()) {
        (true, _) => format!("clean: {backups} backups, {read} in {packs} packs\n"),
        (false, 0) => {
            format!("damaged, but each of {backups} backups can be restored; prune removes what is not needed\n")
        }
        (false, lost) => format!(
            "{lost} of {backups} backups cannot be restored in full; back up their disks now with --repair: what the \
             disks still have of the lost data comes back in all backups\n"
        ),
    });
    text
}
