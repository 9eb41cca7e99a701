//! Formats measurements for people.

use std::fmt::Write;
use std::path::Path;

use control::ImageName;
use control::calibration::{Calibration, Measured, Sizes};
use control::size::readable;
use disk::size::on_disk;

use crate::process::output::printable;

const ALONE: Sizes = Sizes { split: None, merge: None };

/// Formats the tables, the policy and its reason.
pub fn of(name: &ImageName, found: &Calibration, kept: Option<&Path>) -> String {
    let mut out = String::new();
    let operation = &found.operation;
    let mut line = |text: &str| writeln!(out, "{text}").unwrap_or_default();
    line(&format!("{name} is on {}; {operation}s in MiB/s", printable(&found.device.to_string())));
    let (constant, swept) = found.points.split_at(constant_count(&found.points));
    line("\n512 KiB in flight, anywhere:");
    for point in constant {
        line(&format!("  {:>4} x {:<8} {:>8}", point.depth, readable(point.size), speed(point.bytes_per_second)));
    }
    for (title, sequential) in [("split into pieces, anywhere", false), ("merged, one behind the other", true)] {
        line(&format!("\n{title}:"));
        let points: Vec<&Measured> = swept.iter().filter(|point| point.sequential == sequential).collect();
        for load in points.chunk_by(|one, other| (one.size, one.depth) == (other.size, other.depth)) {
            line(&row(load, sequential));
        }
    }
    let Sizes { split, merge } = found.policy;
    let split = split.map_or_else(|| "none".to_owned(), readable);
    let merge = merge.map_or_else(|| "off".to_owned(), readable);
    line(&format!("\npolicy: split {split}, merge {merge}: {}", found.why()));
    match kept {
        Some(path) => line(&format!("kept in {0}; use it: tapline serve {name} --io-policy {0} ...", path.display())),
        None => line("not kept: add --policy FILE"),
    }
    out
}

/// Returns how many measurements, from the first, are of loads with the same bytes in flight.
fn constant_count(points: &[Measured]) -> usize {
    let in_flight = |point: &Measured| on_disk(point.depth) * point.size;
    let first = points.first().map_or(0, in_flight);
    let same = |point: &&Measured| in_flight(point) == first && point.policy == ALONE && !point.sequential;
    // Each size occurs once; the next group begins with a larger one.
    let mut last = 0;
    points.iter().take_while(same).take_while(|point| std::mem::replace(&mut last, point.size) < point.size).count()
}

/// Formats the results of a load without a policy and with each one tried.
fn row(load: &[&Measured], sequential: bool) -> String {
    let Some(first) = load.first() else { return String::new() };
    let mut text = format!("  {:>4} x {:<8} {:>8}", first.depth, readable(first.size), speed(first.bytes_per_second));
    for point in load.iter().skip(1) {
        let size = if sequential { point.policy.merge } else { point.policy.split };
        let size = size.map(readable).unwrap_or_default();
        write!(text, "  {size}: {}", speed(point.bytes_per_second)).unwrap_or_default();
    }
    text
}

/// Formats a speed in MiB per second.
fn speed(bytes_per_second: u64) -> String {
    let tenths = bytes_per_second.saturating_mul(10) >> 20;
    match tenths {
        0..1000 => format!("{}.{}", tenths / 10, tenths % 10),
        _ => (tenths / 10).to_string(),
    }
}
