//! Short versions of what `cargo xtask simulate --format qcow2` does at length.
//!
//! Invariants checked: those of `sim::run`, `sim::crash` and `sim::flat`.
#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::{assert_nothing_found, subjects_of};
use sim::explore::{self, Bound};
use sim::fault::{Fault, FaultKind};
use sim::flat;
use sim::media::Unwritten;
use sim::schedule::Pace;
use sim::sector::SECTOR;
use sim::subject::{Kind, LARGE, Made, Subject};

/// Scope: every workload of up to two operations, in the order of each pace. Compressed clusters are left to the
/// command and to random workloads, for their time.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_short_workload_loses_what_was_flushed() {
    let bound = Bound { ops: 2, interferences: [1, 0, 0] };
    let subjects: Vec<_> = subjects_of("qcow2").into_iter().filter(|subject| !subject.kind.is_packed()).collect();
    assert_nothing_found(explore::exhaustive(&subjects, bound, None, 2, &|_, _| true));
}

#[test]
fn a_chain_of_layers_is_an_array_of_bytes() {
    for tail in [Unwritten::Zeroes, Unwritten::Stale] {
        assert_eq!(flat::compare(7, Made::Qcow2, tail, 6, 150).map(|done| done >= 900), Ok(true));
    }
}

/// Workloads that found a bug once.
#[test]
fn what_was_found_once_is_not_found_again() {
    // Zeroes waited for a write that had failed, while another one was under way in the same cluster.
    let subject = Subject::new(Kind::Qcow2, Unwritten::Zeroes);
    for nth in 1..8 {
        let fault = Fault { kind: FaultKind::Failed, nth };
        search::assert_sound(subject, "w2048+1 Z2048+2 w2050+1", Pace::Eager, Some(fault));
    }
}

/// A full redo log, and a process that dies in a round, when what it has freed is no longer counted: what is written
/// again from the log refers to clusters that are counted once more.
#[test]
fn an_entry_that_is_written_again_refers_to_what_is_counted() {
    let once = [
        (Kind::CompressedChildQcow2, Unwritten::Zeroes, SECTOR, "w1024+1 d1024+1024"),
        (Kind::SubclusterChildQcow2, Unwritten::Stale, LARGE, "w2+2 w8+3 d0+1024"),
    ];
    for (kind, tail, unit, text) in once {
        let subject = Subject { unit, ..Subject::new(kind, tail) };
        search::assert_sound_with(subject, text, Pace::Serial, |setup| (setup.log, setup.depth) = (400, 4));
    }
}

/// Zeroes that cross from one cluster to the next, in some subclusters of both.
#[test]
fn zeroes_in_a_new_place_are_in_the_file() {
    let subject = Subject::new(Kind::SubclusterChildQcow2, Unwritten::Zeroes);
    search::assert_sound(subject, "Z1918+4", Pace::Serial, None);
}
