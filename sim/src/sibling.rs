//! A chain that shares layers with the guest's: a clone of one of them, or the old chain after a revert.
//!
//! It is never written to, so its content is the same at all times, also after power losses.

use disk::FileId;

use crate::oracle::{Legal, Oracle};
use crate::sector::mix;

/// A chain with its expected content.
#[derive(Clone, Debug)]
pub struct Sibling {
    /// The files of the chain, leaf first.
    pub chain: Vec<FileId>,
    /// The expected content, which is durable.
    shows: Oracle,
}

impl Sibling {
    /// A chain with the content of a disk whose requests were all answered and are durable.
    pub fn new(chain: Vec<FileId>, mut shows: Oracle) -> Sibling {
        let now = shows.tick();
        shows.flushed(now);
        Sibling { chain, shows }
    }

    /// The expected content of a disk that is served from the chain.
    pub fn into_shown(self) -> Oracle {
        self.shows
    }

    /// The legal contents after a power loss.
    pub fn legal(&self) -> Legal<'_> {
        self.shows.after_crash()
    }

    /// A digest of the chain and its content.
    pub fn digest(&self) -> u64 {
        self.chain.iter().fold(self.legal().digest(), |sum, file| mix(sum ^ u64::from(file.0)))
    }
}
