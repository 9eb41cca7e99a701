//! Short versions of what `cargo xtask simulate --format qcow2` does at length.
//!
//! Invariants checked: those of `sim::run`, `sim::crash` and `sim::flat`; and that the explorer finds what it must.
#![allow(missing_docs, reason = "nobody imports a test")]

use sim::crash::Explorer;
use sim::explore::{self, Bound, Case, Outcome};
use sim::flat;
use sim::io::{Fault, FaultKind};
use sim::media::Unwritten;
use sim::planted::Planted;
use sim::schedule::{Pace, Schedule};
use sim::subject::{Kind, Made, Subject};
use sim::workload;

fn qcow2() -> Vec<Subject> {
    explore::subjects(Kind::of_format("qcow2").expect("there is such a format"))
}

fn assert_nothing_found(outcome: Outcome) {
    if let Some(failure) = outcome.failure {
        panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
    }
    assert!(outcome.counts.states > 100, "hardly anything was looked at: {:?}", outcome.counts);
}

/// Scope: every workload of up to two operations, in the order of each pace.
#[test]
fn no_short_workload_loses_what_was_flushed() {
    let bound = Bound { ops: 2, interferences: [1, 0, 0] };
    assert_nothing_found(explore::exhaustive(&qcow2(), bound, None, 2, &|_, _| true));
}

/// Scope: seeds 0 to 30, 12 operations each.
#[test]
fn no_random_workload_loses_what_was_flushed() {
    assert_nothing_found(explore::random(&qcow2(), 0..30, 12, 2, &|_, _| true));
}

/// Scope: all that are of qcow2, in at most 100 000 states each.
#[test]
fn every_planted_bug_is_found() {
    let missed: Vec<String> = Planted::all()
        .filter(|bug| bug.format() == "qcow2")
        .filter(|bug| explore::hunt(*bug, 100_000).failure.is_none())
        .map(|bug| bug.to_string())
        .collect();
    assert_eq!(missed, Vec::<String>::new());
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
    let ops = workload::parse("w2048+1 Z2048+2 w2050+1").expect("it is a workload");
    let subject = Subject::new(Kind::Qcow2, Unwritten::Zeroes);
    let start = explore::prepare(&subject).expect("it opens");
    for nth in 1..8 {
        let mut case = Case::new(subject, ops.clone(), Schedule::undisturbed(Pace::Eager));
        case.setup.fault = Some(Fault { kind: FaultKind::Failed, nth });
        if let Err(failure) = explore::explore(&mut Explorer::default(), &start, &mut case) {
            panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
        }
    }
}
