//! An engine that does less than it reports, and the instructions that formats with bugs give it.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Span, Until};

use crate::io::SimIo;

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

impl Io for SabotagedIo<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if !matches!(op.action, Action::SyncData) {
            return self.io.push(op);
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
