//! Short versions of `cargo xtask simulate`.
//!
//! Invariants checked: those of `sim::run`, `sim::crash` and `sim::flat`.
#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::{assert_nothing_found, subjects_of};
use sim::crash::Explorer;
use sim::explore::{self, Bound, Case};
use sim::flat;
use sim::media::Unwritten;
use sim::planted::Planted;
use sim::schedule::{Pace, Schedule};
use sim::subject::{Kind, LayerType, Subject};

/// Scope: every workload of up to two operations, with one deviation in the order.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_short_workload_loses_what_was_flushed() {
    let bound = Bound { ops: 2, interferences: [1, 0, 0] };
    assert_nothing_found(explore::exhaustive(&subjects_of("vhd"), bound, None, 2, &|_, _| true));
}

/// Scope: raw images, growing or not, every workload of up to two operations.
#[test]
fn a_raw_image_keeps_its_promises_too() {
    for kind in [Kind::Raw, Kind::GrowingRaw] {
        let bound = Bound::of_ops(2, kind.theme());
        assert_nothing_found(explore::exhaustive(&explore::subjects(&[kind]), bound, None, 2, &|_, _| true));
    }
}

/// Scope: each operation of four workloads fails in each way, on a dynamic and a differencing image.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_fault_affects_only_its_request() {
    let subjects = [Subject::new(Kind::Used, Unwritten::Stale), Subject::new(Kind::UsedChild, Unwritten::Zeroes)];
    assert_nothing_found(explore::every_fault(&subjects, 2, &|_, _| true));
}

#[test]
fn a_failure_is_reproduced_by_its_description() {
    let found = explore::hunt(Planted::EarlyReuse, 100_000).failure.expect("it is found");
    let described: Schedule = found.case.schedule.to_string().parse().expect("it is a schedule");
    let mut case = Case { schedule: described, ..(*found.case).clone() };

    let start = explore::prepare(&case.setup.subject).expect("it opens");
    let again = explore::explore(&mut Explorer::broad(), &start, &mut case).expect_err("it fails again");

    assert_eq!(again.case.to_string(), found.case.to_string());
}

#[test]
fn a_failure_is_shrunk() {
    let found = explore::hunt(Planted::EarlyReuse, 100_000).failure.expect("it is found");
    let before = found.case.workload.len();
    let small = sim::shrink::shrink(found);
    assert!(small.case.workload.len() < before, "{}", small.case);
}

#[test]
fn a_chain_of_layers_is_an_array_of_bytes() {
    for tail in [Unwritten::Zeroes, Unwritten::Stale] {
        assert_eq!(flat::compare(7, LayerType::Vhd, tail, 8, 200).map(|done| done >= 1600), Ok(true));
    }
}

/// Workloads that found a bug in the past.
#[test]
fn bugs_found_in_the_past_are_fixed() {
    // The place of the block that the disk's end cuts off was called clean when only the part inside the disk had
    // been deallocated: another block then showed stale bytes.
    let once = [
        (Kind::Dynamic, Unwritten::Stale, "w2557+3 z2048+512 f W1021+3"),
        (Kind::Used, Unwritten::Stale, "z2048+512 f W1023+2"),
    ];
    for ((kind, tail, text), pace) in once.iter().flat_map(|found| Pace::ALL.map(|pace| (*found, pace))) {
        search::assert_sound(Subject::new(kind, tail), text, pace, None);
    }
}
