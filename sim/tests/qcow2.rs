//! Short versions of what `cargo xtask simulate --format qcow2` does at length.
//!
//! Invariants checked: those of `sim::run`, `sim::crash` and `sim::flat`; and that the explorer finds what it must.
#![allow(missing_docs, reason = "nobody imports a test")]

mod search;

use search::{assert_nothing_found, subjects_of};
use sim::explore::{self, Bound};
use sim::flat;
use sim::io::{Fault, FaultKind};
use sim::media::Unwritten;
use sim::schedule::Pace;
use sim::subject::{Kind, Made, Subject};

/// Scope: every workload of up to two operations, in the order of each pace. Compressed clusters are left to the
/// command and to random workloads, for their time.
#[test]
fn no_short_workload_loses_what_was_flushed() {
    let bound = Bound { ops: 2, interferences: [1, 0, 0] };
    let subjects: Vec<_> = subjects_of("qcow2").into_iter().filter(|subject| !subject.kind.is_packed()).collect();
    assert_nothing_found(explore::exhaustive(&subjects, bound, None, 2, &|_, _| true));
}

/// Scope: seeds 0 to 30, 12 operations each.
#[test]
fn no_random_workload_loses_what_was_flushed() {
    assert_nothing_found(explore::random(&subjects_of("qcow2"), 0..30, 12, 2, &|_, _| true));
}

/// Scope: all that are of qcow2, in at most 100 000 states each.
#[test]
fn every_planted_bug_is_found() {
    search::assert_planted_are_found("qcow2");
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
