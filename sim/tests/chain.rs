//! Short versions of `cargo xtask simulate --format chain`: snapshots and merges under a guest.
//!
//! Invariants checked: those of `sim::run` and `sim::crash`.
#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::{assert_nothing_found, some, subjects_of};
use sim::crash::Explorer;
use sim::explore::{self, Bound, Case};
use sim::fault::{Fault, FaultKind};
use sim::io::Visible;
use sim::media::Unwritten;
use sim::planted::Planted;
use sim::schedule::{Pace, Schedule};
use sim::subject::{Kind, Subject};
use sim::workload;

/// Scope: every workload of up to two operations with a verb among them, in the order of each pace; by day, on some of
/// the images. Compressed clusters are left to the command and to random workloads, to save time.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn no_step_loses_what_was_flushed() {
    let bound = Bound { ops: 2, interferences: [0, 0, 0] };
    let subjects: Vec<_> = subjects_of("chain").into_iter().filter(|subject| !subject.kind.is_packed()).collect();
    assert_nothing_found(explore::exhaustive(&some(subjects), bound, None, 2, &|_, _| true));
}

/// Scope: each operation of five workloads fails in each way, in a chain of two VHDs.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_verb_can_be_repeated_after_a_fault() {
    let subjects = [Subject::new(Kind::VhdOnVhd, Unwritten::Zeroes)];
    assert_nothing_found(explore::every_fault(&subjects, 2, &|_, _| true));
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_merge_leaves_the_target_alone_with_the_right_content() {
    for subject in subjects_of("chain") {
        let start = explore::prepare(&subject).expect("it opens");
        let ops = workload::parse("w0+3 merge w4095+2 f").expect("it is a workload");
        let mut case = Case::new(subject, ops, Schedule::undisturbed(Pace::Serial));
        let end = explore::explore(&mut Explorer::broad(), &start, &mut case).expect("nothing is found");
        assert_eq!(end.files.len(), start.files.len() - 1, "{case}");
    }
}

/// Explores workloads on these chains, at two paces; each ends with this number of layers.
fn assert_explored(kinds: &[Kind], workloads: &[(&str, usize)]) {
    for &kind in kinds {
        let subject = Subject::new(kind, Unwritten::Zeroes);
        let start = explore::prepare(&subject).expect("it opens");
        for (&(text, layers), pace) in
            workloads.iter().flat_map(|work| [Pace::Serial, Pace::Steps].map(|pace| (work, pace)))
        {
            let ops = workload::parse(text).expect("it is a workload");
            let mut case = Case::new(subject, ops, Schedule::undisturbed(pace));
            let end = explore::explore(&mut Explorer::broad(), &start, &mut case);
            let end = end.unwrap_or_else(|failure| panic!("{failure}\nagain: cargo xtask simulate {}", failure.case));
            assert_eq!(end.files.len(), layers, "{case}");
        }
    }
}

/// Scope: leaves of both formats that can record another parent, at two paces.
#[test]
fn a_leaf_that_is_moved_keeps_its_content() {
    let kinds = [Kind::VhdOnVhd, Kind::SubclustersOnQcow2];
    let workloads = [
        ("w0+3 rebase w4095+2 f", 2),
        ("w0+3 flatten w4095+2 d0+1024 f", 1),
        ("grow flatten W4605+2 rebase r0+8", 2),
        ("rebase snapshot w0+3 merge f", 2),
        ("w0+3 relink w4095+2 f flatten", 1),
    ];
    assert_explored(&kinds, &workloads);
}

/// Scope: chains of both formats, at two paces.
#[test]
fn chains_left_by_a_clone_or_a_revert_keep_their_content() {
    let kinds = [Kind::VhdOnVhd, Kind::Qcow2OnQcow2, Kind::VhdOnRaw];
    let workloads = [
        ("w0+3 clone W4095+2 f", 2),
        ("W0+3 w8+1 revert w4095+2 f", 2),
        ("snapshot w0+3 clone f revert w1+1 clone f", 3),
    ];
    assert_explored(&kinds, &workloads);
}

/// Workloads that found a bug in the past.
#[test]
fn bugs_found_in_the_past_are_fixed() {
    let once = [
        // A new table referred to a new block before the file was extended for it.
        "grow merge",
        // The second of two layers could not be opened for writing.
        "snapshot w0+3 merge-all W4095+2",
        "snapshot w0+3 merge-below w1+1 f",
    ];
    for (text, pace) in once.iter().flat_map(|text| Pace::ALL.map(|pace| (text, pace))) {
        search::assert_sound(Subject::new(Kind::VhdOnVhd, Unwritten::Zeroes), text, pace, None);
    }
}

/// Data that a merge has brought into a layer whose sync has failed is not freed above it by a later process.
#[test]
fn nothing_is_freed_above_a_failed_sync_by_the_next_process() {
    let fault = |nth| Some(Fault { kind: FaultKind::Failed, nth });
    for (pace, nth) in [(Pace::Serial, 22), (Pace::Eager, 23), (Pace::Newest, 23)] {
        let subject = Subject::new(Kind::VhdOnVhd, Unwritten::Zeroes);
        search::assert_sound(subject, "W0+2 merge f snapshot f", pace, fault(nth));
    }
}

/// With a redo log without room nothing is pending, and the next process finds leaked space.
#[test]
fn nothing_is_deallocated_behind_a_failed_sync_by_the_next_process() {
    let subject = Subject::new(Kind::VhdOnVhd, Unwritten::Zeroes);
    search::assert_sound_with(subject, "w0+2 grow merge f snapshot w4600+3 f", Pace::Serial, |setup| {
        (setup.log, setup.fault) = (16, Some(Fault { kind: FaultKind::Failed, nth: 50 }));
    });
}

/// With a redo log without room, changes of a killed process are in the file or not, and nothing is pending.
#[test]
fn no_block_takes_the_place_of_one_that_a_killed_merge_has_freed() {
    let subject = Subject::new(Kind::VhdOnVhd, Unwritten::Stale);
    search::assert_sound_with(subject, "r4107+2 w3072+1 f merge", Pace::Serial, |setup| {
        (setup.log, setup.room, setup.depth) = (512, 3, 2);
        setup.visible = Visible::AtCompletion;
    });
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn two_writes_around_the_beginning_of_a_merge_agree() {
    let outcome = explore::around_a_beginning(None, 2, &|_, _| true);
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert!(outcome.counts.runs > 100, "{:?}", outcome.counts);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_bug_at_the_beginning_of_a_merge_is_found() {
    let outcome = explore::around_a_beginning(Some(Planted::TargetNotShown), 2, &|_, _| true);
    assert!(outcome.failure.is_some(), "{:?}", outcome.counts);
}
