//! The same tests on storage with sectors of 4096 bytes, which are the smallest write and atomic.
//!
//! Invariants checked: those of `sim::run` and `sim::crash`; and that only whole sectors are read and written.
#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::{assert_nothing_found, seeds, some, subjects_of};
use sim::explore::{self, Bound};
use sim::subject::{Kind, Subject};

fn large(subjects: &[Subject]) -> Vec<Subject> {
    subjects.iter().copied().filter_map(Subject::on_large_sectors).collect()
}

/// Scope: every workload of one operation with two deviations in the order, on raw images and VHDs; with one on qcow2.
#[test]
fn no_short_workload_loses_what_was_flushed() {
    let vhds = [subjects_of("vhd"), explore::subjects(&[Kind::Raw, Kind::GrowingRaw])].concat();
    for (subjects, deviations) in [(vhds, 2), (explore::subjects(&[Kind::Qcow2, Kind::UsedQcow2]), 1)] {
        let bound = Bound { ops: 1, interferences: [deviations, 0, 0] };
        assert_nothing_found(explore::exhaustive(&large(&subjects), bound, None, 2, &|_, _| true));
    }
}

/// Scope: seeds 0 to 40, by day to 13, 16 operations each, on images of each format.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_random_workload_loses_what_was_flushed() {
    for format in ["vhd", "qcow2", "chain"] {
        assert_nothing_found(explore::random(&large(&subjects_of(format)), seeds(40), 16, 2, &|_, _| true));
    }
}

/// Scope: each operation of some workloads fails in each way; by day, on some of the images.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_fault_affects_only_its_request() {
    let kinds = [Kind::Raw, Kind::Used, Kind::Qcow2];
    assert_nothing_found(explore::every_fault(&some(large(&explore::subjects(&kinds))), 2, &|_, _| true));
}
