//! What callgrind has counted, by the part of the disk process that the source is of.
//!
//! Calls are inlined, so functions say little; but each cost belongs to a line of a file, also of an inlined one.
//! Format: the manual of valgrind, "Callgrind Format Specification".

use std::collections::HashMap;

/// Parts of a request's way, by the crates that do them; all else (the standard library, the C library) is the last.
pub const PARTS: [&str; 6] = ["rings", "disk", "storage", "loop", "statistics", "libraries"];

/// Instructions of each part.
pub type Counts = [u64; PARTS.len()];

/// The part that a source file belongs to.
fn part(file: &str) -> usize {
    let of = |names: &[&str]| names.iter().any(|name| file.contains(name));
    match file {
        _ if file.contains("/rustc/") || file.contains("/.cargo/registry/") => 5,
        _ if of(&["transport/src/", "memory/src/"]) => 0,
        _ if of(&["tapline-disk/src/"]) => 3,
        _ if of(&["stats/src/", "probe/src/"]) => 4,
        _ if of(&["uring/src/"]) => 2,
        _ if of(&["disk/src/"]) => 1,
        _ => 5,
    }
}

/// Sums the costs up by parts.
pub fn by_parts(text: &str) -> Counts {
    let mut counts = Counts::default();
    let mut names: HashMap<&str, usize> = HashMap::new();
    // The file of the function, and the one that the present lines are of.
    let (mut own, mut present) = (PARTS.len() - 1, PARTS.len() - 1);
    let mut is_call = false;
    for line in text.lines() {
        if let Some((key @ ("fl" | "fi" | "fe"), name)) = line.split_once('=') {
            present = named(name, &mut names);
            if key == "fl" {
                own = present;
            }
        } else if line.starts_with("fn=") {
            present = own;
        } else if line.starts_with("calls=") {
            // The next line is what the call has cost, which is counted where it is spent.
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let cost = line.split(' ').nth(1).and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
            if !std::mem::take(&mut is_call) {
                counts[present] += cost;
            }
        }
    }
    counts
}

/// Names are written once: `(7) /a/file`, and `(7)` from then on.
fn named<'a>(name: &'a str, names: &mut HashMap<&'a str, usize>) -> usize {
    match name.split_once(' ') {
        Some((number, file)) => {
            let part = part(file);
            names.insert(number, part);
            part
        }
        None => names.get(name).copied().unwrap_or(PARTS.len() - 1),
    }
}
