//! The same tests with transfers that are split and merged on their way to the storage.
//!
//! Invariants checked: those of `sim::run` and `sim::crash`.
#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::{assert_nothing_found, seeds, some, subjects_of};
use sim::explore::{self, Bound};
use sim::planted::Planted;
use sim::sector::SECTOR;
use sim::subject::{Kind, Subject};

/// Pieces of a sector; all adjacent transfers merged; and both, up to some sectors.
const SHAPES: [(Option<u64>, Option<u64>); 3] =
    [(Some(SECTOR), None), (None, Some(64 * SECTOR)), (Some(2 * SECTOR), Some(2 * SECTOR))];

fn shaped(subjects: &[Subject]) -> Vec<Subject> {
    SHAPES.iter().flat_map(|(split, merge)| subjects.iter().map(|one| one.shaped(*split, *merge))).collect()
}

fn all() -> Vec<Subject> {
    shaped(&explore::subjects(&[Kind::Raw, Kind::Used, Kind::Qcow2]))
}

fn short(ops: u32, subjects: &[Subject]) {
    let bound = Bound { ops, interferences: [1, 0, 0] };
    assert_nothing_found(explore::exhaustive(subjects, bound, None, 2, &|_, _| true));
}

/// Scope: every workload of one operation with one deviation in the order, on raw images, VHDs and qcow2.
#[test]
fn no_workload_of_one_operation_loses_what_was_flushed() {
    short(1, &all());
}

/// Scope: the same, and those of two operations without deviation; by day, on some of the images.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_workload_of_two_operations_loses_what_was_flushed() {
    short(2, &some(all()));
}

/// Scope: seeds 0 to 60, by day to 20, 16 operations each, on images of each format.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_random_workload_loses_what_was_flushed() {
    for format in ["raw", "vhd", "qcow2", "chain"] {
        assert_nothing_found(explore::random(&shaped(&subjects_of(format)), seeds(60), 16, 2, &|_, _| true));
    }
}

/// Scope: each operation of some workloads fails in each way; by day, on some of the images.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_fault_affects_only_its_request() {
    assert_nothing_found(explore::every_fault(&some(all()), 2, &|_, _| true));
}

#[test]
fn planted_bugs_in_splitting_and_merging_are_found() {
    for bug in [Planted::SplitAnsweredEarly, Planted::FailedPartHidden] {
        let found = explore::hunt(bug, 100_000);
        assert!(found.failure.is_some(), "{bug} was not found in {} states", found.counts.states);
    }
}
