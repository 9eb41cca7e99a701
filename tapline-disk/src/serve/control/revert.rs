//! `revert`: reverts the disk to what it was when a layer was its leaf. No client may be connected.
//!
//! A new empty leaf on that layer is created as for a snapshot; then the layers above are removed from the chain, and
//! the new leaf added. Their files stay, and the answer lists them. *If killed before the switch:* the old chain is as
//! it was, with an additional unused file. *After:* the new leaf on the layer.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::blocking_task::BlockingTask;
use super::child::{Child, Wanted, remove};
use super::protocol;
use super::refusal::{Kind, Refusal};
use super::work::{Quiesce, Work};
use crate::log::say;

/// A revert under way.
#[derive(Debug)]
pub struct Revert {
    asked: protocol::Revert,
    stage: Stage,
    /// The new file, as long as it is not the leaf.
    made: Option<PathBuf>,
}

#[derive(Debug)]
enum Stage {
    Making(BlockingTask<Result<Child, Refusal>>),
    Holding(Box<Child>, Quiesce),
    Over,
}

impl Revert {
    /// Begins.
    pub fn begin(asked: protocol::Revert, work: &mut Work<'_>) -> Result<Revert, Refusal> {
        work.must_be_writable()?;
        nobody_connected(work)?;
        work.name(asked.to)?;
        if asked.to == 0 {
            let what = "layer 0 is already the disk's current state";
            return Err(Refusal::new(Kind::Invalid, what).advise("choose a lower layer; the verb layers lists them"));
        }
        let wanted = Wanted::on(work, asked.to, &asked.leaf, false)?;
        let stage = Stage::Making(work.send(move || wanted.make())?);
        Ok(Revert { asked, stage, made: None })
    }

    /// Goes on; the answer, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Making(blocking_task) => match work.fetch(blocking_task) {
                    Ok(child) => {
                        let child = child?;
                        self.made = Some(self.asked.leaf.path().to_owned());
                        child.fits_on(work.image(self.asked.to)?)?;
                        self.stage = Stage::Holding(Box::new(child), Quiesce::default());
                    }
                    Err(blocking_task) => {
                        self.stage = Stage::Making(blocking_task);
                        return Ok(None);
                    }
                },
                Stage::Holding(child, mut hold) => {
                    if !hold.advance(work)? {
                        self.stage = Stage::Holding(child, hold);
                        return Ok(None);
                    }
                    return self.switch(*child, work).map(Some);
                }
                Stage::Over => return Ok(None),
            }
        }
    }

    /// The disk stands still.
    fn switch(&mut self, child: Child, work: &mut Work<'_>) -> Result<Value, Refusal> {
        // Somebody may have come since it was asked.
        nobody_connected(work)?;
        nothing_asked(work)?;
        let unused: Vec<String> = work.names().into_iter().take(self.asked.to).collect();
        let new = work.engine.add(child.file)?;
        let popped = match work.disk.pop_to(self.asked.to) {
            Ok(popped) => popped,
            Err(error) => {
                work.engine.remove(new)?;
                return Err(error.into());
            }
        };
        work.disk.push_leaf(new, child.image)?;
        child.log.map_or(Ok(()), |log| work.disk.set_log(new, log))?;
        self.made = None;
        for layer in popped {
            if let Err(error) = work.engine.remove(layer.file) {
                say(format_args!("an unused file could not be closed: {error}"));
            }
        }
        work.resized();
        work.let_go();
        Ok(json!({ "leaf": self.asked.leaf.to_string(), "layers": work.names(), "unused": unused }))
    }

    /// Takes back what has happened so far.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        work.let_go();
        if let Some(path) = self.made.take() {
            remove(&path);
        }
    }
}

/// What a guest has in its caches would not fit what it reads from now on.
fn nobody_connected(work: &Work<'_>) -> Result<(), Refusal> {
    match work.server.peers() {
        0 => Ok(()),
        1 => Err(connected("a guest or a client is connected".into())),
        peers => Err(connected(format!("{peers} clients are connected"))),
    }
}

/// Requests of a disconnected client belong to the current state of the disk, and are carried out when requests are
/// released again.
fn nothing_asked(work: &Work<'_>) -> Result<(), Refusal> {
    match work.disk.in_flight() {
        0 => Ok(()),
        1 => Err(connected("a request from a disconnected client has not completed yet".into())),
        count => Err(connected(format!("{count} requests from disconnected clients have not completed yet"))),
    }
}

fn connected(what: String) -> Refusal {
    Refusal::new(Kind::Connected, format!("cannot revert the disk: {what}"))
        .advise("shut the guest down or disconnect it, then retry")
}
