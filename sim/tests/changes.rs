//! Maps of changed blocks: what a power loss leaves of them.

#![allow(missing_docs, reason = "nobody imports a test")]

#[allow(dead_code, reason = "each test uses its part")]
mod search;

use search::assert_sound_with;
use sim::fault::{Fault, FaultKind};
use sim::media::Unwritten;
use sim::schedule::Pace;
use sim::subject::{Kind, Subject};

/// Requests of all kinds in more regions than may have intents, so that these are given up and wanted again.
const REGIONS: &str = "w0+2 w1024+1 w2048+2 d0+128 z70+4 p1+2 f W1030+1";

#[test]
fn a_map_names_what_has_changed_whatever_a_power_loss_leaves() {
    for kind in [Kind::Raw, Kind::UsedChild] {
        for pace in Pace::ALL {
            let subject = Subject::new(kind, Unwritten::Stale);
            assert_sound_with(subject, REGIONS, pace, |setup| setup.intents = Some(2));
        }
    }
}

#[test]
fn a_map_is_extended_before_its_disk_and_switched_with_its_leaf() {
    let texts = [
        (Kind::GrowingRaw, "w0+2 grow W2557+2 f"),
        (Kind::Qcow2, "w0+2 grow W2557+2 f"),
        (Kind::Qcow2OnQcow2, "w0+2 snapshot w1+2 f snapshot w4000+1 f"),
        (Kind::VhdOnVhd, "w0+2 snapshot w1+1 revert w2+1 f"),
    ];
    for (kind, text) in texts {
        for pace in [Pace::Serial, Pace::Eager] {
            assert_sound_with(Subject::new(kind, Unwritten::Stale), text, pace, |setup| setup.intents = Some(2));
        }
    }
}

#[test]
fn a_guest_does_not_notice_that_its_map_cannot_be_written() {
    for kind in [FaultKind::Failed, FaultKind::NoSpace, FaultKind::Full] {
        for nth in 1..16 {
            let subject = Subject::new(Kind::Raw, Unwritten::Zeroes);
            let fault = Some(Fault { kind, nth });
            assert_sound_with(subject, "w0+2 w1024+1 f w2048+2 w3+1 f", Pace::Eager, |setup| {
                (setup.fault, setup.intents) = (fault, Some(2));
            });
        }
    }
}
