//! What callgrind has counted, by the part of the disk process that the source is of.
//!
//! Calls are inlined, so functions say little; but each cost belongs to a line of a file, also of an inlined one.
//! Format: the manual of valgrind, "Callgrind Format Specification".

use std::collections::HashMap;

/// Parts of a request's way, by the crates that do them; all else (the standard library, the C library) is the last.
pub const PARTS: [&str; 6] = ["rings", "disk", "storage", "loop", "statistics", "libraries"];

/// The crate of that name.
pub const DISK: usize = 1;
/// The last of them.
const LIBRARIES: usize = PARTS.len() - 1;

/// Instructions of each part.
pub type Counts = [u64; PARTS.len()];

/// The part that a source file belongs to.
fn part(file: &str) -> usize {
    let of = |names: &[&str]| names.iter().any(|name| file.contains(name));
    match file {
        _ if file.contains("/rustc/") || file.contains("/.cargo/registry/") => LIBRARIES,
        _ if of(&["transport/src/", "memory/src/"]) => 0,
        _ if of(&["tapline-disk/src/"]) => 3,
        _ if of(&["stats/src/", "probe/src/"]) => 4,
        _ if of(&["uring/src/"]) => 2,
        _ if of(&["disk/src/"]) => DISK,
        _ => LIBRARIES,
    }
}

/// Sums the costs up by parts.
pub fn by_parts(text: &str) -> Counts {
    let mut counts = Counts::default();
    let mut names: HashMap<&str, usize> = HashMap::new();
    // The file of the function, and the one that the present lines are of.
    let (mut own, mut present) = (LIBRARIES, LIBRARIES);
    let mut is_call = false;
    for line in text.lines() {
        if let Some((key @ ("fl" | "fi" | "fe"), name)) = line.split_once('=') {
            let part = named(name, &mut names);
            if key == "fl" {
                own = part;
            }
            // What is inlined of a library is the cost of those who have called it: the lines before.
            if key == "fl" || part != LIBRARIES {
                present = part;
            }
        } else if let Some(("cfl" | "cfi", name)) = line.split_once('=') {
            // The file of a function that is called; its name may be written here for the first time.
            named(name, &mut names);
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
        None => names.get(name).copied().unwrap_or(LIBRARIES),
    }
}
