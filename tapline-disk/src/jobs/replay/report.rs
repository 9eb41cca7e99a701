//! The report of a replay, for people and as JSON: recorded and replayed latencies.

use std::collections::BTreeMap;
use std::fmt::Write;

use ::stats::{Kind, float};
use arguments::{Replay, Speed};
use control::size::readable;
use serde::Serialize;

use super::{LeftOut, Outcome, Replayed, Workload};
use crate::process::failure::Failure;
use crate::process::output;

/// Requests issued later than this after their time are late.
const LATE_NS: u64 = 1_000_000;
/// If a larger percentage of requests is late, the times of the recording were not kept.
const LATE_PERCENT: usize = 1;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Summary<'a> {
    image: String,
    recording: String,
    speed: String,
    /// The number of completed requests.
    requests: usize,
    /// The maximum number of requests in flight.
    in_flight_max: usize,
    /// Whether a signal ended it before all requests were issued.
    stopped_early: bool,
    left_out: LeftOut,
    /// The time from the first request to the last as recorded, and from the first to the last completion now.
    recorded_seconds: f64,
    seconds: f64,
    /// The delays of requests after their times; `None` at `max`.
    lateness: Option<Lateness>,
    groups: &'a [Group],
}

/// Delays in nanoseconds.
#[derive(Debug, PartialEq, Serialize)]
struct Lateness {
    p50_ns: u64,
    p99_ns: u64,
    max_ns: u64,
    /// The number of requests issued more than a millisecond late.
    late: usize,
    /// Whether that is so large that the times of the recording were not kept.
    is_behind: bool,
}

/// Requests of one kind and size.
#[derive(Debug, PartialEq, Serialize)]
struct Group {
    operation: &'static str,
    size: u64,
    count: usize,
    recorded: Latency,
    replayed: Latency,
}

/// Latencies in nanoseconds.
#[derive(Debug, PartialEq, Serialize)]
struct Latency {
    mean_ns: f64,
    p50_ns: u64,
    p99_ns: u64,
}

/// Prints the report.
pub fn report(replay: &Replay, workload: &Workload, outcome: &Outcome) -> Result<(), Failure> {
    let Outcome { took, replayed, in_flight_max, stopped } = outcome;
    let groups = groups(workload, replayed);
    let last = workload.requests.last().map_or(0, |one| one.at_ns);
    let summary = Summary {
        image: replay.image.to_string(),
        recording: replay.recording.display().to_string(),
        speed: replay.speed.to_string(),
        requests: replayed.len(),
        in_flight_max: *in_flight_max,
        stopped_early: *stopped,
        left_out: workload.left_out,
        recorded_seconds: float(last) / 1e9,
        seconds: took.as_secs_f64(),
        lateness: (replay.speed != Speed::Max).then(|| lateness(replayed)),
        groups: &groups,
    };
    if replay.json { output::json(&summary) } else { output::print(&text(&summary)) }
}

fn groups(workload: &Workload, replayed: &[Replayed]) -> Vec<Group> {
    let mut groups: BTreeMap<(Kind, u64), (Vec<u64>, Vec<u64>)> = BTreeMap::new();
    for one in replayed {
        if let Some(recorded) = workload.requests.get(one.number) {
            let (before, now) = groups.entry((recorded.kind, recorded.size)).or_default();
            before.push(recorded.took_ns);
            now.push(one.took);
        }
    }
    let group = |((kind, size), (before, now)): ((Kind, u64), (Vec<u64>, Vec<u64>))| Group {
        operation: kind.name(),
        size,
        count: now.len(),
        recorded: Latency::of(before),
        replayed: Latency::of(now),
    };
    groups.into_iter().map(group).collect()
}

impl Latency {
    fn of(mut all: Vec<u64>) -> Latency {
        all.sort_unstable();
        let sum: f64 = all.iter().map(|ns| float(*ns)).sum();
        let mean_ns = sum / float(all.len() as u64).max(1.0);
        Latency { mean_ns, p50_ns: percentile(&all, 50), p99_ns: percentile(&all, 99) }
    }
}

fn lateness(replayed: &[Replayed]) -> Lateness {
    let mut all: Vec<u64> = replayed.iter().map(|one| one.late).collect();
    all.sort_unstable();
    let late = all.iter().filter(|ns| **ns > LATE_NS).count();
    let is_behind = late * 100 > all.len() * LATE_PERCENT;
    Lateness {
        p50_ns: percentile(&all, 50),
        p99_ns: percentile(&all, 99),
        max_ns: percentile(&all, 100),
        late,
        is_behind,
    }
}

/// Returns a percentile of sorted numbers.
fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let number = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(number).copied().unwrap_or(0)
}

fn text(summary: &Summary<'_>) -> String {
    let Summary { image, recording, speed, requests, recorded_seconds, seconds, .. } = summary;
    let mut out = String::new();
    // Writing to a string cannot fail.
    let mut line = |text: String| writeln!(out, "{text}").unwrap_or_default();
    line(format!(
        "{recording} on {image}: {requests} requests at speed {speed} in {seconds:.2} s, recorded in \
         {recorded_seconds:.2} s"
    ));
    line(format!(
        "{:12} {:>8} {:>8} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "OPERATION", "SIZE", "COUNT", "REC.MEAN", "REC.P50", "REC.P99", "MEAN", "P50", "P99"
    ));
    for Group { operation, size, count, recorded, replayed } in summary.groups {
        let us = |Latency { mean_ns, p50_ns, p99_ns }: &Latency| {
            let all = [*mean_ns, float(*p50_ns), float(*p99_ns)].map(|ns| format!("{:>9.1}", ns / 1000.0));
            all.join(" ")
        };
        line(format!("{operation:12} {:>8} {count:>8} {} {}", readable(*size), us(recorded), us(replayed)));
    }
    line("microseconds; REC: as recorded, with the time in the ring, which a replay does not have".into());
    if let Some(Lateness { p99_ns, max_ns, late, is_behind, .. }) = &summary.lateness {
        let (p99, max) = (float(*p99_ns) / 1000.0, float(*max_ns) / 1000.0);
        let figures = format!("99 % were issued within {p99:.1} µs of their time, all within {max:.1} µs");
        line(match is_behind {
            false => figures,
            true => format!("BEHIND: {late} requests were issued more than 1 ms after their time; {figures}"),
        });
    }
    let LeftOut { writes, failed, lost } = summary.left_out;
    if writes > 0 {
        line(format!(
            "left out: {writes} requests that change the disk; --write replays them, and overwrites its data"
        ));
    }
    if failed > 0 {
        line(format!("left out: {failed} requests that had failed when they were recorded"));
    }
    if lost > 0 {
        line(format!("missing: {lost} requests, which came faster than they could be recorded"));
    }
    if summary.stopped_early {
        line("stopped early: the requests after these were not issued".into());
    }
    out
}

#[cfg(test)]
mod test {
    use ::stats::Recorded;

    use super::super::workload_of;
    use super::*;

    fn replayed(number: usize, took: u64, late: u64) -> Replayed {
        Replayed { number, took, late }
    }

    #[test]
    fn requests_are_compared_by_kind_and_size() {
        let recorded = |at_ns, kind, size, took_ns| Recorded { at_ns, kind, done: true, offset: 0, size, took_ns };
        let workload = workload_of(
            vec![
                recorded(0, Kind::Write, 512, 100),
                recorded(1, Kind::Read, 512, 200),
                recorded(2, Kind::Read, 512, 400),
                recorded(3, Kind::Read, 4096, 7),
            ],
            true,
        );
        // The last one was not issued.
        let found = groups(&workload, &[replayed(0, 10, 0), replayed(1, 20, 0), replayed(2, 30, 0)]);
        let latency = |mean_ns, p50_ns, p99_ns| Latency { mean_ns, p50_ns, p99_ns };
        let group = |operation, count, recorded, replayed| Group { operation, size: 512, count, recorded, replayed };
        assert_eq!(
            found,
            [
                group("read", 2, latency(300.0, 200, 400), latency(25.0, 20, 30)),
                group("write", 1, latency(100.0, 100, 100), latency(10.0, 10, 10)),
            ]
        );
    }

    #[test]
    fn a_replay_is_behind_if_over_one_percent_is_a_millisecond_late() {
        let of = |late: usize| {
            let all: Vec<Replayed> =
                (0..200).map(|number| replayed(number, 1, if number < late { LATE_NS + 1 } else { LATE_NS })).collect();
            lateness(&all)
        };
        assert_eq!(
            of(2),
            Lateness { p50_ns: LATE_NS, p99_ns: LATE_NS, max_ns: LATE_NS + 1, late: 2, is_behind: false }
        );
        assert!(of(3).is_behind);
        assert!(!lateness(&[]).is_behind);
    }

    #[test]
    fn the_report_shows_left_out_requests_and_lateness() {
        let left_out = LeftOut { writes: 3, failed: 2, lost: 1 };
        let lateness = Lateness { p50_ns: 0, p99_ns: 5_000_000, max_ns: 6_000_000, late: 9, is_behind: true };
        let latency = || Latency { mean_ns: 1500.0, p50_ns: 1000, p99_ns: 2000 };
        let groups = [Group { operation: "read", size: 4096, count: 10, recorded: latency(), replayed: latency() }];
        let summary = Summary {
            image: "raw:a".into(),
            recording: "web".into(),
            speed: "2".into(),
            requests: 10,
            in_flight_max: 3,
            stopped_early: true,
            left_out,
            recorded_seconds: 2.0,
            seconds: 1.0,
            lateness: Some(lateness),
            groups: &groups,
        };
        let expected = "\
web on raw:a: 10 requests at speed 2 in 1.00 s, recorded in 2.00 s
OPERATION        SIZE    COUNT  REC.MEAN   REC.P50   REC.P99      MEAN       P50       P99
read            4 KiB       10       1.5       1.0       2.0       1.5       1.0       2.0
microseconds; REC: as recorded, with the time in the ring, which a replay does not have
BEHIND: 9 requests were issued more than 1 ms after their time; 99 % were issued within 5000.0 µs of their time, all within 6000.0 µs
left out: 3 requests that change the disk; --write replays them, and overwrites its data
left out: 2 requests that had failed when they were recorded
missing: 1 requests, which came faster than they could be recorded
stopped early: the requests after these were not issued
";
        assert_eq!(text(&summary), expected);
    }
}
