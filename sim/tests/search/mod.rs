//! Requirements that the tests of every format share: a search examines something and finds nothing. That it finds
//! planted bugs is tested by a separate step of the gate.
//!
//! Knows nothing about the workloads of the formats; each format's own file defines them.

use std::ops::Range;

use sim::crash::Explorer;
use sim::explore::{self, Case, Outcome};
use sim::fault::Fault;
use sim::run::Setup;
use sim::schedule::{Pace, Schedule};
use sim::subject::{Kind, Subject};
use sim::workload;

/// Whether everything is to be explored, as by `make test-long` at night; otherwise a part.
fn is_night() -> bool {
    std::env::var_os("TAPLINE_NIGHT").is_some()
}

/// Seeds of random workloads: all of a night's, or the first third.
pub fn seeds(night: u64) -> Range<u64> {
    0..if is_night() { night } else { night / 3 }
}

/// Images: all of a night's, or one of every four. Neighbours are one image on two kinds of storage; the selection
/// alternates between these.
pub fn some(night: Vec<Subject>) -> Vec<Subject> {
    if is_night() {
        return night;
    }
    let fours = night.chunks(4).enumerate();
    fours.filter_map(|(number, four)| four.get(number % 2)).copied().collect()
}

/// All images of a format, on both kinds of storage.
pub fn subjects_of(format: &str) -> Vec<Subject> {
    explore::subjects(Kind::of_format(format).expect("there is such a format"))
}

/// Checks that a search has examined something and found nothing.
pub fn assert_nothing_found(outcome: Outcome) {
    if let Some(failure) = outcome.failure {
        panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
    }
    assert!(outcome.counts.states > 100, "hardly anything was looked at: {:?}", outcome.counts);
}

/// Checks that a workload is sound at this pace, with this fault.
pub fn assert_sound(subject: Subject, text: &str, pace: Pace, fault: Option<Fault>) {
    assert_sound_with(subject, text, pace, |setup| setup.fault = fault);
}

/// Checks that a workload is sound at this pace, with a changed setup.
pub fn assert_sound_with(subject: Subject, text: &str, pace: Pace, change: impl FnOnce(&mut Setup)) {
    let ops = workload::parse(text).expect("it is a workload");
    let start = explore::prepare(&subject).expect("it opens");
    let mut case = Case::new(subject, ops, Schedule::undisturbed(pace));
    change(&mut case.setup);
    if let Err(failure) = explore::explore(&mut Explorer::default(), &start, &mut case) {
        panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
    }
}
