//! Short versions of `cargo xtask simulate --format qcow2`.
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
use sim::subject::{Kind, LARGE, LayerType, Subject};

/// Scope: every workload of up to two operations, in the order of each pace. Compressed clusters are left to the
/// command and to random workloads, to save time.
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
        assert_eq!(flat::compare(7, LayerType::Qcow2, tail, 6, 150).map(|done| done >= 900), Ok(true));
    }
}

/// Workloads that found a bug in the past.
#[test]
fn bugs_found_in_the_past_are_fixed() {
    // Zeroes waited for a failed write, while another one was in flight in the same cluster.
    let subject = Subject::new(Kind::Qcow2, Unwritten::Zeroes);
    for nth in 1..8 {
        let fault = Fault { kind: FaultKind::Failed, nth };
        search::assert_sound(subject, "w2048+1 Z2048+2 w2050+1", Pace::Eager, Some(fault));
    }
}

/// A process with a full redo log dies in a round, after freeing a cluster: entries written again from the log must
/// refer to clusters that are counted again.
#[test]
fn a_rewritten_entry_refers_to_a_counted_cluster() {
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
