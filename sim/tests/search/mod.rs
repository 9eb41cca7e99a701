//! What the tests of every format demand of a search: that it looks at something and finds nothing. That it finds what
//! is planted is a step of the gate of its own.
//!
//! Knows nothing of what the formats' workloads are about; each format's own file says that.

use std::ops::Range;

use sim::crash::Explorer;
use sim::explore::{self, Case, Outcome};
use sim::fault::Fault;
use sim::run::Setup;
use sim::schedule::{Pace, Schedule};
use sim::subject::{Kind, Subject};
use sim::workload;

/// Whether all is to be explored, as `make test-long` does in a night; others explore a part.
fn is_night() -> bool {
    std::env::var_os("TAPLINE_NIGHT").is_some()
}

/// Seeds of random workloads: all of a night's, or the first third.
pub fn seeds(night: u64) -> Range<u64> {
    0..if is_night() { night } else { night / 3 }
}

/// Images: all of a night's, or one of every four, on each kind of storage in turn: the two of an image are neighbours.
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

/// A search that has looked at something found nothing.
pub fn assert_nothing_found(outcome: Outcome) {
    if let Some(failure) = outcome.failure {
        panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
    }
    assert!(outcome.counts.states > 100, "hardly anything was looked at: {:?}", outcome.counts);
}

/// One workload loses nothing at this pace, with this fault.
pub fn assert_sound(subject: Subject, text: &str, pace: Pace, fault: Option<Fault>) {
    assert_sound_with(subject, text, pace, |setup| setup.fault = fault);
}

/// One workload loses nothing at this pace, in a setup that is changed in this way.
pub fn assert_sound_with(subject: Subject, text: &str, pace: Pace, change: impl FnOnce(&mut Setup)) {
    let ops = workload::parse(text).expect("it is a workload");
    let start = explore::prepare(&subject).expect("it opens");
    let mut case = Case::new(subject, ops, Schedule::undisturbed(pace));
    change(&mut case.setup);
    if let Err(failure) = explore::explore(&mut Explorer::default(), &start, &mut case) {
        panic!("{failure}\nagain: cargo xtask simulate {}", failure.case);
    }
}
