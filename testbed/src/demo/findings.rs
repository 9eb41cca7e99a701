//! The findings of a run: claims that hold, and figures of the disk under load.
//!
//! A claim that does not hold ends the run and is not recorded here.

use std::fmt::{self, Display};
use std::time::Duration;

use crate::guest::{GuestError, Transcript};
use crate::tapline::Statistics;

/// The guest's counters of its disk at some time, from its /proc/diskstats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuestCounters {
    uptime_ms: u64,
    reads: u64,
    sectors_read: u64,
    writes: u64,
    sectors_written: u64,
    /// Total milliseconds that requests have spent between the guest's block layer and their completion.
    in_queue_ms: u64,
}

impl GuestCounters {
    /// Parses the output of the guest's `statistics` step.
    pub fn parse(said: &str) -> Option<Self> {
        let mut words = said.split_whitespace();
        let uptime_ms = milliseconds(words.next()?)?;
        let mut number = || words.next()?.parse().ok();
        Some(Self {
            uptime_ms,
            reads: number()?,
            sectors_read: number()?,
            writes: number()?,
            sectors_written: number()?,
            in_queue_ms: number()?,
        })
    }
}

/// Parses seconds such as `12.34` into milliseconds.
fn milliseconds(seconds: &str) -> Option<u64> {
    let (whole, hundredths) = seconds.split_once('.')?;
    let hundredths = (hundredths.len() == 2).then_some(hundredths)?;
    whole.parse::<u64>().ok()?.checked_mul(1000)?.checked_add(hundredths.parse::<u64>().ok()? * 10)
}

/// The disk under a load, as seen by the guest and by the disk process.
#[derive(Debug)]
pub struct Load {
    pub iops: u64,
    /// Throughput in tenths of a megabyte per second.
    pub megabytes_tenths: u64,
    pub guest_queue: f64,
    pub tapline_queue: f64,
}

impl Load {
    /// The load between two readings; `None` if no time passed or a counter ran backwards.
    pub fn between(guest: (&GuestCounters, &GuestCounters), tapline: (&Statistics, &Statistics)) -> Option<Self> {
        let (begin, end) = guest;
        let elapsed_ms = end.uptime_ms.checked_sub(begin.uptime_ms).filter(|&elapsed| elapsed > 0)?;
        let requests = (end.reads.checked_sub(begin.reads)?).checked_add(end.writes.checked_sub(begin.writes)?)?;
        let sectors = end.sectors_read.checked_sub(begin.sectors_read)?;
        let sectors = sectors.checked_add(end.sectors_written.checked_sub(begin.sectors_written)?)?;
        let bytes = sectors.checked_mul(512)?;
        let in_queue = Duration::from_millis(end.in_queue_ms.checked_sub(begin.in_queue_ms)?);
        let (before, after) = tapline;
        let in_process = after.time_in_process().checked_sub(before.time_in_process())?;
        let observed = Duration::from_nanos(after.elapsed_ns.checked_sub(before.elapsed_ns).filter(|&ns| ns > 0)?);
        Some(Self {
            iops: requests.checked_mul(1000)? / elapsed_ms,
            // bytes per millisecond are thousandths of a megabyte per second
            megabytes_tenths: bytes / elapsed_ms / 100,
            guest_queue: in_queue.div_duration_f64(Duration::from_millis(elapsed_ms)),
            tapline_queue: in_process.div_duration_f64(observed),
        })
    }
}

/// Bytes of the image file that are allocated on the host's file system.
#[derive(Debug, Default)]
pub struct Space {
    pub virtual_size: u64,
    pub used_before_trim: u64,
    pub used_after_trim: u64,
}

#[derive(Default)]
pub struct Findings {
    pub space: Space,
    pub load: Option<Load>,
    /// Pauses of snapshots under load, in microseconds.
    pub pauses_us: Vec<u64>,
    /// Bytes copied by a merge under load.
    pub copied: u64,
    pub claims: Vec<String>,
}

impl Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut row = |name: &str, value: String| writeln!(f, "  {name:<42}{value:>14}");
        if self.space.virtual_size > 0 {
            row("virtual size", mebibytes(self.space.virtual_size))?;
            row("really used, before trim", mebibytes(self.space.used_before_trim))?;
            row("really used, after trim", mebibytes(self.space.used_after_trim))?;
        }
        if let Some(load) = &self.load {
            row("random 4 KiB in the guest, IOPS", load.iops.to_string())?;
            let megabytes = format!("{}.{}", load.megabytes_tenths / 10, load.megabytes_tenths % 10);
            row("random 4 KiB in the guest, MB/s", megabytes)?;
            row("average queue at the guest (diskstats)", format!("{:.1}", load.guest_queue))?;
            row("average queue at Tapline (time in process)", format!("{:.1}", load.tapline_queue))?;
        }
        if let Some(longest) = self.pauses_us.iter().max() {
            row("pause of a live snapshot, the longer one", format!("{}.{} ms", longest / 1000, longest / 100 % 10))?;
            row("copied by the merge of the live leaf", mebibytes(self.copied))?;
        }
        writeln!(f, "\n  verified:")?;
        self.claims.iter().try_for_each(|claim| writeln!(f, "  ok  {claim}"))
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{}.{} MiB", bytes >> 20, ((bytes & 0xf_ffff) * 10) >> 20)
}

/// The guest's counters under `key`.
pub fn counters(transcript: &Transcript, key: &'static str) -> Result<Option<GuestCounters>, GuestError> {
    transcript.value(key).map(GuestCounters::parse)
}

#[cfg(test)]
mod test {
    use super::*;

    fn tapline(sum_ns: u64, elapsed_ns: u64) -> Statistics {
        let kind = |sum_ns| format!(r#"{{"count":1,"bytes":1,"sum_ns":{sum_ns}}}"#);
        let (some, none) = (kind(sum_ns), kind(0));
        let line = format!(
            r#"{{"reads":{some},"writes":{none},"flushes":{none},"discards":{none},"elapsed_ns":{elapsed_ns}}}"#
        );
        serde_json::from_str(&line).unwrap()
    }

    #[test]
    fn the_average_queue_is_time_in_queue_by_time() {
        let begin = GuestCounters::parse("10.00 100 800 50 400 1000").unwrap();
        let end = GuestCounters::parse("12.00 1100 8800 1050 8400 17000").unwrap();

        let load = Load::between((&begin, &end), (&tapline(0, 1_000), &tapline(12_000, 3_000))).unwrap();

        assert_eq!(load.iops, 1000);
        assert_eq!(load.megabytes_tenths, 40);
        assert!((load.guest_queue - 8.0).abs() < 1e-9);
        assert!((load.tapline_queue - 6.0).abs() < 1e-9);
    }

    #[test]
    fn counters_that_run_backwards_are_no_load() {
        let begin = GuestCounters::parse("10.00 100 800 50 400 1000").unwrap();
        let end = GuestCounters::parse("12.00 99 800 50 400 1000").unwrap();

        assert!(Load::between((&begin, &end), (&tapline(0, 1), &tapline(1, 2))).is_none());
    }

    #[test]
    fn invalid_counters_are_refused() {
        assert_eq!(GuestCounters::parse("10.0 1 2 3 4 5"), None);
        assert_eq!(GuestCounters::parse("10.00 1 2 3 4"), None);
    }

    #[test]
    fn sizes_are_shown_in_mebibytes() {
        assert_eq!(mebibytes(4 << 30), "4096.0 MiB");
        assert_eq!(mebibytes((3 << 20) + (1 << 19)), "3.5 MiB");
    }
}
