//! A chain beside the guest's, which has layers in common with it: a clone of one of them, or what a revert has left.
//!
//! Knows nothing of how it came to be. Nobody writes to it: it shows the same at every moment, power loss or not.

use disk::FileId;

use crate::oracle::{Legal, Oracle};
use crate::sector::mix;

/// A chain, and what it shows.
#[derive(Clone, Debug)]
pub struct Sibling {
    /// Its files, leaf first.
    pub chain: Vec<FileId>,
    /// What it shows: durably, if it was answered.
    shows: Oracle,
}

impl Sibling {
    /// A chain that shows what a disk showed whose requests were all answered, and are durable.
    pub fn new(chain: Vec<FileId>, mut shows: Oracle) -> Sibling {
        let now = shows.tick();
        shows.flushed(now);
        Sibling { chain, shows }
    }

    /// What a disk has to show that is served from it.
    pub fn into_shown(self) -> Oracle {
        self.shows
    }

    /// What may be found in it after a power loss.
    pub fn legal(&self) -> Legal<'_> {
        self.shows.after_crash()
    }

    /// A number that stands for it.
    pub fn digest(&self) -> u64 {
        self.chain.iter().fold(self.legal().digest(), |sum, file| mix(sum ^ u64::from(file.0)))
    }
}
