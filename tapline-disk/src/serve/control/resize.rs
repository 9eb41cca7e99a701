//! `resize`: enlarges the disk and notifies its guest.
//!
//! A raw file, or a data file, is extended first, while nothing beyond its old end is accessed; other formats grow by a
//! change of their metadata. *If killed in between:* the disk has either the old size or the new one. The answer comes
//! when the new size is durable.

use serde_json::{Value, json};

use super::blocking_task::BlockingTask;
use super::refusal::{Kind, Refusal};
use super::work::{Quiesce, Work};
use crate::libvhd::Behind;

/// A resize under way.
#[derive(Debug)]
pub struct Resize {
    size: u64,
    stage: Stage,
    /// As it was at the beginning.
    behind: Behind,
}

#[derive(Debug)]
enum Stage {
    Lengthening(BlockingTask<Result<(), Refusal>>),
    Holding(Quiesce),
    /// The new size becomes durable, by a flush behind those of the guest;
    Flushing,
    /// or by a round, while a client has requests held.
    Syncing,
    Over,
}

impl Resize {
    /// Begins.
    pub fn begin(size: u64, work: &mut Work<'_>) -> Result<Resize, Refusal> {
        work.must_be_writable()?;
        let (len, block) = (work.geometry.len, u64::from(work.geometry.block));
        let cannot = |what: String, advice: String| Err(Refusal::new(Kind::Unsupported, what).advise(advice));
        if size < len {
            let what = format!("cannot shrink the disk from {len} bytes to {size}: data beyond that would be lost");
            return cannot(what, "copy the data to a smaller disk from inside the guest".into());
        }
        if size % block != 0 {
            let what = format!("{size} bytes is not a multiple of the block size, {block} bytes");
            let next = size.checked_next_multiple_of(block).unwrap_or(len);
            return cannot(what, format!("the next possible size is {next} bytes"));
        }
        let lengthening = if work.has_flat_data(0)? { work.lengthen(0, size)? } else { None };
        let stage = lengthening.map_or(Stage::Holding(Quiesce::default()), Stage::Lengthening);
        Ok(Resize { size, stage, behind: work.behind() })
    }

    /// Goes on; the answer but for the pause, when it has come to its end.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Value>, Refusal> {
        loop {
            match std::mem::replace(&mut self.stage, Stage::Over) {
                Stage::Lengthening(blocking_task) => match work.fetch(blocking_task) {
                    Ok(lengthened) => {
                        lengthened?;
                        work.lengthened(0)?;
                        self.stage = Stage::Holding(Quiesce::default());
                    }
                    Err(blocking_task) => return self.wait(Stage::Lengthening(blocking_task)),
                },
                Stage::Holding(mut hold) => {
                    if !hold.advance(work)? {
                        return self.wait(Stage::Holding(hold));
                    }
                    work.disk.grow(self.size)?;
                    if work.paused {
                        // Requests of our own wait with the others; a round does not.
                        work.disk.sync(work.engine);
                        self.stage = Stage::Syncing;
                    } else {
                        work.let_go();
                        work.begin_flush();
                        self.stage = Stage::Flushing;
                    }
                }
                Stage::Flushing => match work.is_flushed().map_err(may_grow_yet)? {
                    true => return Ok(Some(self.told(work))),
                    false => return self.wait(Stage::Flushing),
                },
                Stage::Syncing => match work.is_synced().map_err(may_grow_yet)? {
                    true => return Ok(Some(self.told(work))),
                    false => return self.wait(Stage::Syncing),
                },
                Stage::Over => return Ok(None),
            }
        }
    }

    fn wait(&mut self, stage: Stage) -> Result<Option<Value>, Refusal> {
        self.stage = stage;
        Ok(None)
    }

    /// Notifies the guest when the size is durable, and not earlier, because it may use the new space at once.
    fn told(&self, work: &mut Work<'_>) -> Value {
        work.behind().tell_since(&self.behind);
        work.resized();
        json!({ "size": work.geometry.len })
    }

    /// Rolls back, except for the image's growth, which the guest is not notified of and which becomes durable with the
    /// next round. A raw file that was extended stays so, with zeroes beyond the disk's end.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        work.let_go();
    }
}

/// The image has grown and is not durable: a later round may make it so.
fn may_grow_yet(refusal: Refusal) -> Refusal {
    let what = "the guest still sees the old size; if the image has become durable, the disk has the new size when it is next \
         started";
    refusal.advise(format!("fix the storage and retry: {what}"))
}
