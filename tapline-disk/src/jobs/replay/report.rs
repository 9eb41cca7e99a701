//! What a replay has shown, for people and as JSON: how long requests took when they were recorded, and now.

use std::collections::BTreeMap;
use std::fmt::Write;

use ::stats::{Kind, float};
use arguments::{Replay, Speed};
use control::size::readable;
use serde::Serialize;

use super::{Ended, LeftOut, Plan, Replayed};
use crate::process::failure::Failure;
use crate::process::output;

/// Requests that were issued so long after their time are late.
const LATE_NS: u64 = 1_000_000;
/// If more of a hundred are, the times of the recording were not kept.
const LATE_PERCENT: usize = 1;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Told<'a> {
    image: String,
    recording: String,
    speed: String,
    /// Requests that were answered.
    requests: usize,
    /// So many of them were in flight at most.
    in_flight_max: usize,
    /// A signal ended it before all were issued.
    stopped_early: bool,
    left_out: LeftOut,
    /// From the first request to the last as recorded, and from the first to the last answer now.
    recorded_seconds: f64,
    seconds: f64,
    /// How long after their time requests were issued; none at `max`.
    lateness: Option<Lateness>,
    groups: &'a [Group],
}

/// In nanoseconds.
#[derive(Debug, PartialEq, Serialize)]
struct Lateness {
    p50_ns: u64,
    p99_ns: u64,
    max_ns: u64,
    /// Requests that were issued more than a millisecond late.
    late: usize,
    /// So many were that the times of the recording were not kept.
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

/// In nanoseconds.
#[derive(Debug, PartialEq, Serialize)]
struct Latency {
    mean_ns: f64,
    p50_ns: u64,
    p99_ns: u64,
}

/// Prints the report.
pub fn report(replay: &Replay, plan: &Plan, ended: &Ended) -> Result<(), Failure> {
    let Ended { took, replayed, in_flight_max, stopped } = ended;
    let groups = groups(plan, replayed);
    let last = plan.requests.last().map_or(0, |one| one.at_ns);
    let told = Told {
        image: replay.image.to_string(),
        recording: replay.recording.display().to_string(),
        speed: replay.speed.to_string(),
        requests: replayed.len(),
        in_flight_max: *in_flight_max,
        stopped_early: *stopped,
        left_out: plan.left_out,
        recorded_seconds: float(last) / 1e9,
        seconds: took.as_secs_f64(),
        lateness: (replay.speed != Speed::Max).then(|| lateness(replayed)),
        groups: &groups,
    };
    if replay.json { output::json(&told) } else { output::print(&text(&told)) }
}

fn groups(plan: &Plan, replayed: &[Replayed]) -> Vec<Group> {
    let mut groups: BTreeMap<(Kind, u64), (Vec<u64>, Vec<u64>)> = BTreeMap::new();
    for one in replayed {
        if let Some(recorded) = plan.requests.get(one.number) {
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
        Latency { mean_ns, p50_ns: rank(&all, 50), p99_ns: rank(&all, 99) }
    }
}

fn lateness(replayed: &[Replayed]) -> Lateness {
    let mut all: Vec<u64> = replayed.iter().map(|one| one.late).collect();
    all.sort_unstable();
    let late = all.iter().filter(|ns| **ns > LATE_NS).count();
    let is_behind = late * 100 > all.len() * LATE_PERCENT;
    Lateness { p50_ns: rank(&all, 50), p99_ns: rank(&all, 99), max_ns: rank(&all, 100), late, is_behind }
}

/// What so many percent of the sorted numbers do not exceed.
fn rank(sorted: &[u64], percent: usize) -> u64 {
    let number = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(number).copied().unwrap_or(0)
}

fn text(told: &Told<'_>) -> String {
    let Told { image, recording, speed, requests, recorded_seconds, seconds, .. } = told;
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
    for Group { operation, size, count, recorded, replayed } in told.groups {
        let us = |Latency { mean_ns, p50_ns, p99_ns }: &Latency| {
            let all = [*mean_ns, float(*p50_ns), float(*p99_ns)].map(|ns| format!("{:>9.1}", ns / 1000.0));
            all.join(" ")
        };
        line(format!("{operation:12} {:>8} {count:>8} {} {}", readable(*size), us(recorded), us(replayed)));
    }
    line("microseconds; REC: as recorded, with the time in the ring, which a replay does not have".into());
    if let Some(Lateness { p99_ns, max_ns, late, is_behind, .. }) = &told.lateness {
        let (p99, max) = (float(*p99_ns) / 1000.0, float(*max_ns) / 1000.0);
        let figures = format!("99 % were issued within {p99:.1} µs of their time, all within {max:.1} µs");
        line(match is_behind {
            false => figures,
            true => format!("BEHIND: {late} requests were issued more than 1 ms after their time; {figures}"),
        });
    }
    let LeftOut { writes, failed, lost } = told.left_out;
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
    if told.stopped_early {
        line("stopped early: the requests after these were not issued".into());
    }
    out
}

#[cfg(test)]
mod test {
    use ::stats::Recorded;

    use super::super::plan_of;
    use super::*;

    fn replayed(number: usize, took: u64, late: u64) -> Replayed {
        Replayed { number, took, late }
    }

    #[test]
    fn requests_are_compared_by_kind_and_size() {
        let recorded = |at_ns, kind, size, took_ns| Recorded { at_ns, kind, done: true, offset: 0, size, took_ns };
        let plan = plan_of(
            vec![
                recorded(0, Kind::Write, 512, 100),
                recorded(1, Kind::Read, 512, 200),
                recorded(2, Kind::Read, 512, 400),
                recorded(3, Kind::Read, 4096, 7),
            ],
            true,
        );
        // The last one was not issued.
        let found = groups(&plan, &[replayed(0, 10, 0), replayed(1, 20, 0), replayed(2, 30, 0)]);
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
    fn a_replay_is_behind_if_more_than_one_in_a_hundred_is_a_millisecond_late() {
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
    fn the_report_says_what_was_left_out_and_that_it_was_behind() {
        let left_out = LeftOut { writes: 3, failed: 2, lost: 1 };
        let lateness = Lateness { p50_ns: 0, p99_ns: 5_000_000, max_ns: 6_000_000, late: 9, is_behind: true };
        let latency = || Latency { mean_ns: 1500.0, p50_ns: 1000, p99_ns: 2000 };
        let groups = [Group { operation: "read", size: 4096, count: 10, recorded: latency(), replayed: latency() }];
        let told = Told {
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
        assert_eq!(text(&told), expected);
    }
}
