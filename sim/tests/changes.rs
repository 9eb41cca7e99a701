//! Maps of changed blocks: what a power loss leaves of them.

mod search;

use search::{assert_nothing_found, assert_sound_with, subjects_of};
use sim::explore;
use sim::fault::{Fault, FaultKind};
use sim::media::Unwritten;
use sim::schedule::Pace;
use sim::subject::{Kind, Subject};

/// Requests of all kinds in more regions than may have intents, so that these are given up and wanted again.
const REGIONS: &str = "w0+2 w1024+1 w2048+2 f w3+1 d0+128 z70+4 w2300+1 p1+2 W1030+1 w0+4 f";

#[test]
fn a_map_names_what_has_changed_whatever_a_power_loss_leaves() {
    let kinds = [Kind::Raw, Kind::Dynamic, Kind::UsedChild, Kind::UsedQcow2];
    for kind in kinds {
        for pace in Pace::ALL {
            for intents in [2, 1024] {
                let subject = Subject::new(kind, Unwritten::Stale);
                assert_sound_with(subject, REGIONS, pace, |setup| setup.intents = Some(intents));
            }
        }
    }
}

#[test]
fn a_map_is_extended_before_its_disk_and_switched_with_its_leaf() {
    let texts = [
        (Kind::GrowingRaw, "w0+2 grow W2557+2 w263166+2 f w3+1"),
        (Kind::Qcow2, "w0+2 grow W2557+2 w263166+2 f w3+1"),
        (Kind::Qcow2OnQcow2, "w0+2 snapshot w1+2 w2000+1 f snapshot w4000+1 merge w0+1 f"),
        (Kind::VhdOnVhd, "w0+2 snapshot w1+2 w2000+1 grow f w4605+2 snapshot w4000+1 f"),
        (Kind::VhdOnVhd, "w0+2 snapshot w1+1 revert w2+1 f"),
    ];
    for (kind, text) in texts {
        for pace in Pace::ALL {
            for tail in [Unwritten::Zeroes, Unwritten::Stale] {
                assert_sound_with(Subject::new(kind, tail), text, pace, |setup| setup.intents = Some(2));
            }
        }
    }
}

#[test]
fn a_guest_does_not_notice_that_its_map_cannot_be_written() {
    for kind in [FaultKind::Failed, FaultKind::NoSpace, FaultKind::Full] {
        for nth in 1..24 {
            let subject = Subject::new(Kind::Raw, Unwritten::Zeroes);
            let fault = Some(Fault { kind, nth });
            assert_sound_with(subject, "w0+2 w1024+1 f w2048+2 w3+1 f", Pace::Eager, |setup| {
                (setup.fault, setup.intents) = (fault, Some(2));
            });
        }
    }
}

#[test]
fn random_workloads_with_maps_are_sound() {
    let subjects: Vec<Subject> = ["raw", "vhd", "qcow2", "chain"].into_iter().flat_map(subjects_of).collect();
    assert_nothing_found(explore::random(&subjects, search::seeds(1200), 24, 2, &|_, _| true));
}

#[test]
#[ignore = "the gate looks for all planted bugs"]
fn planted_bugs_of_maps_are_found() {
    use sim::planted::Planted;
    for bug in Planted::all().filter(|bug| bug.is_about_changes()) {
        let outcome = explore::hunt(bug, 100_000);
        println!("{bug}: {:?} after {}", outcome.failure.as_ref().map(ToString::to_string), outcome.counts.states);
        assert!(outcome.failure.is_some(), "{bug} is not found");
    }
}
