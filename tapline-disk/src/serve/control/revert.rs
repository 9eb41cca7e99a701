//! `revert`: reverts the disk to what it was when a layer was its leaf. No client may be connected.
//!
//! A new empty leaf on that layer is created as for a snapshot; then the layers above are removed from the chain, and
//! the new leaf added ([`plan::revert`]). Their files stay, and the answer lists them.

use control::answer::{self, Answer};
use control::{Kind, ask};

use super::driver::Driver;
use super::work::Work;
use crate::process::failure::Failure;
use crate::process::log::say;

/// A revert under way.
#[derive(Debug)]
pub struct Revert {
    asked: ask::Revert,
    driver: Driver,
    unused: Vec<String>,
}

impl Revert {
    /// Begins.
    pub fn begin(asked: ask::Revert, work: &mut Work<'_>) -> Result<Revert, Failure> {
        work.must_be_writable()?;
        nobody_connected(work)?;
        work.name(asked.to)?;
        if asked.to == 0 {
            let what = "layer 0 is already the disk's current state";
            return Err(Failure::of(Kind::Invalid, what).advise("choose a lower layer; the verb layers lists them"));
        }
        work.must_be_closed(asked.to)?;
        let unused = work.names().into_iter().take(asked.to).collect();
        Ok(Revert { driver: Driver::making(&asked.leaf, plan::revert(asked.to)), asked, unused })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        if !self.driver.advance(work)? {
            return Ok(None);
        }
        let (leaf, unused) = (self.asked.leaf.to_string(), self.unused.clone());
        Ok(Some(answer::Revert { leaf, layers: work.names(), unused }.into()))
    }
}

/// The layers above `depth` leave the chain of a disk that stands still.
pub fn pop_to(depth: usize, work: &mut Work<'_>) -> Result<(), Failure> {
    // Somebody may have come since it was asked.
    nobody_connected(work)?;
    nothing_asked(work)?;
    for layer in work.disk.pop_to(depth)? {
        if let Err(error) = work.engine.remove(layer.file) {
            say(format_args!("an unused file could not be closed: {error}"));
        }
    }
    Ok(())
}

/// What a guest has in its caches would not fit what it reads from now on.
fn nobody_connected(work: &Work<'_>) -> Result<(), Failure> {
    match work.server.peers() {
        0 => Ok(()),
        1 => Err(connected("a guest or a client is connected".into())),
        peers => Err(connected(format!("{peers} clients are connected"))),
    }
}

/// Requests of a disconnected client belong to the current state of the disk, and are carried out when requests are
/// released again.
fn nothing_asked(work: &Work<'_>) -> Result<(), Failure> {
    match work.disk.in_flight() {
        0 => Ok(()),
        1 => Err(connected("a request from a disconnected client has not completed yet".into())),
        count => Err(connected(format!("{count} requests from disconnected clients have not completed yet"))),
    }
}

fn connected(what: String) -> Failure {
    Failure::of(Kind::Connected, format!("cannot revert the disk: {what}"))
        .advise("shut the guest down or disconnect it, then retry")
}
