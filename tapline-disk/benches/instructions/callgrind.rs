//! Sums up the instructions counted by callgrind, by part of the disk process.
//!
//! Calls are inlined, so functions mean little; but each cost belongs to a source line, also that of an inlined
//! function.
//! Format: the manual of valgrind, "Callgrind Format Specification".

use std::collections::HashMap;

/// The parts of a request's path, by the crates that execute them; all else (the standard library, the C library) is
/// last.
pub const PARTS: [&str; 6] = ["rings", "disk", "storage", "loop", "statistics", "libraries"];

/// The index of the crate `disk`.
pub const DISK: usize = 1;
/// The index of the last part.
const LIBRARIES: usize = PARTS.len() - 1;

/// The instructions of each part.
pub type Counts = [u64; PARTS.len()];

/// Returns the part of a source file.
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

/// Sums up the costs by part.
pub fn by_parts(text: &str) -> Counts {
    let mut counts = Counts::default();
    let mut names: HashMap<&str, usize> = HashMap::new();
    // The file of the function, and that of the current lines.
    let (mut own, mut present) = (LIBRARIES, LIBRARIES);
    let mut is_call = false;
    for line in text.lines() {
        if let Some((key @ ("fl" | "fi" | "fe"), name)) = line.split_once('=') {
            let part = named(name, &mut names);
            if key == "fl" {
                own = part;
            }
            // Inlined code of a library is attributed to its caller: the lines before.
            if key == "fl" || part != LIBRARIES {
                present = part;
            }
        } else if let Some(("cfl" | "cfi", name)) = line.split_once('=') {
            // The file of a called function; its name may be defined here.
            named(name, &mut names);
        } else if line.starts_with("fn=") {
            present = own;
        } else if line.starts_with("calls=") {
            // The next line is the cost of the call, which is counted in the callee.
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

/// Resolves a name, which is written in full once: `(7) /a/file`, and `(7)` from then on.
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
