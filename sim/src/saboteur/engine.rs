//! An engine that does less than it reports, and the instructions that formats with bugs give it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, OpId, Span, Until};
use memory::Segments;

use super::pages;
use crate::io::SimIo;
use crate::planted::Planted;

/// The fate of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncFate {
    /// It has its effect.
    Honest,
    /// It has no effect.
    Hollow,
    /// It has its effect on all files.
    ForAll,
}

/// Instructions of formats to the engine.
#[derive(Debug, Default)]
pub struct Instructions {
    /// For each file, the fates of the syncs of the current round.
    pub syncs: BTreeMap<FileId, VecDeque<SyncFate>>,
    /// Ranges that a merge has dropped in the leaf.
    pub forgotten: Vec<Span>,
    /// Ranges written there since.
    pub regrown: Vec<Span>,
    /// The file whose syncs have no effect any more.
    pub deaf: Option<FileId>,
    /// Files whose logs are dropped as soon as a round is sealed.
    pub dropped: Vec<FileId>,
    /// The maps of changed blocks, and the bug planted there.
    pub maps: Vec<FileId>,
    /// See `maps`.
    pub map_bug: Option<Planted>,
    /// Writes of maps that are answered and wait until the guest has written.
    held: Vec<FileOp>,
}

/// The instructions, shared by formats and engine.
pub type Plot = Rc<RefCell<Instructions>>;

/// An engine whose syncs may have no effect.
pub struct SabotagedIo<'a> {
    /// The correct engine.
    pub io: &'a mut SimIo,
    /// The fates of the syncs.
    pub plot: &'a Plot,
}

/// The id of a write that was answered before.
pub const ANSWERED: OpId = OpId(1 << 57);

impl SabotagedIo<'_> {
    /// Pushes an operation on a map of changed blocks, as a planted bug does.
    #[allow(clippy::result_large_err, reason = "as `Io::push`")]
    fn push_to_map(&mut self, op: FileOp) -> Result<(), FileOp> {
        let bug = self.plot.borrow().map_bug;
        match (bug, op.action) {
            (Some(Planted::IntentNotSynced), Action::SyncData) => {
                self.io.push_hollow_sync(FileOp { action: Action::SyncData, ..op });
                Ok(())
            }
            (Some(bug), Action::Write { at, from }) if is_held(bug, at, &from) => {
                let late = FileOp { id: ANSWERED, file: op.file, action: Action::Write { at, from } };
                self.plot.borrow_mut().held.push(late);
                self.io.push_hollow_sync(FileOp { action: Action::SyncData, ..op });
                Ok(())
            }
            (Some(Planted::BitsLostWithIntent), Action::Write { at, from }) if !pages::is_header(at) => {
                let mut bytes = from.to_vec();
                pages::without_new_bits(at, &mut bytes, self.io.file(op.file).visible());
                let from = Segments::copy_of(&bytes);
                self.io.push(FileOp { action: Action::Write { at, from }, ..op })
            }
            (_, action) => self.io.push(FileOp { action, ..op }),
        }
    }
}

/// Whether the bug answers a write of a map before it is done.
fn is_held(bug: Planted, at: FileOffset, from: &Segments) -> bool {
    match bug {
        Planted::IntentAfterData => !pages::is_header(at),
        Planted::MapResizedLate => pages::is_size(at, &from.to_vec()),
        _ => false,
    }
}

impl Io for SabotagedIo<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.plot.borrow().maps.contains(&op.file) {
            return self.push_to_map(op);
        }
        if !matches!(op.action, Action::SyncData) {
            let is_write = matches!(op.action, Action::Write { .. });
            self.io.push(op)?;
            let held = if is_write { std::mem::take(&mut self.plot.borrow_mut().held) } else { Vec::new() };
            return held.into_iter().try_for_each(|op| self.io.push(op));
        }
        let mut plot = self.plot.borrow_mut();
        let agreed = plot.syncs.get_mut(&op.file).and_then(VecDeque::pop_front);
        let deaf = plot.deaf == Some(op.file);
        match if deaf { Some(SyncFate::Hollow) } else { agreed } {
            Some(SyncFate::Hollow) => {
                self.io.push_hollow_sync(op);
                Ok(())
            }
            Some(SyncFate::ForAll) => {
                self.io.push_sync_for_all(op);
                Ok(())
            }
            Some(SyncFate::Honest) | None => self.io.push(op),
        }
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.io.reap(until, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.io.allocated(file, at, len)
    }
}
