//! `revert`: reverts the disk to what it was when a layer was its leaf. No client may be connected.
//!
//! A new empty leaf on that layer is created as for a snapshot; then the layers above are removed from the chain, and
//! the new leaf is added ([`plan::revert`]). Their files stay, and the answer lists them.

use control::answer::{self, Answer};
use control::{Kind, ask};

use super::driver::Driver;
use super::pop::must_have_no_peers;
use super::work::Work;
use crate::process::failure::Failure;

/// A revert in progress.
#[derive(Debug)]
pub struct Revert {
    asked: ask::Revert,
    driver: Driver,
    unused: Vec<String>,
}

impl Revert {
    /// Checks the request and starts the revert.
    pub fn begin(asked: ask::Revert, work: &mut Work<'_>) -> Result<Revert, Failure> {
        work.must_be_writable()?;
        must_have_no_peers(work)?;
        work.name(asked.to)?;
        if asked.to == 0 {
            let what = "layer 0 is already the disk's current state";
            return Err(Failure::of(Kind::Invalid, what).advise("choose a lower layer; the verb layers lists them"));
        }
        work.must_be_closed(asked.to)?;
        let unused = work.names().into_iter().take(asked.to).collect();
        Ok(Revert { driver: Driver::making(&asked.leaf, plan::revert(asked.to)), asked, unused })
    }

    /// Advances the revert; returns the answer at its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let (leaf, unused) = (self.asked.leaf.to_string(), self.unused.clone());
        Ok(Some(answer::Revert { leaf, layers: work.names(), unused }.into()))
    }
}
