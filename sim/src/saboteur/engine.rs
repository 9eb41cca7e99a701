//! An engine that does less than it says, and what the formats with bugs tell it behind the disk's back.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Span, Until};

use crate::io::SimIo;

/// What becomes of a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyncFate {
    /// It does what it says.
    Honest,
    /// It does nothing.
    Hollow,
    /// It does what it says, for all files.
    ForAll,
}

/// What formats and engine agree upon.
#[derive(Debug, Default)]
pub struct Agreed {
    /// For each file, what becomes of the syncs of the round under way.
    pub syncs: BTreeMap<FileId, VecDeque<SyncFate>>,
    /// What a merge has forgotten in the leaf, and what was written there since.
    pub forgotten: Vec<Span>,
    /// The same.
    pub regrown: Vec<Span>,
    /// The file whose syncs do nothing any more.
    pub deaf: Option<FileId>,
    /// Files whose logs are dropped as soon as a round is sealed.
    pub dropped: Vec<FileId>,
}

/// The same, shared by all that are in it.
pub type Plot = Rc<RefCell<Agreed>>;

/// An engine that does nothing for some syncs.
pub struct SabotagedIo<'a> {
    /// The honest engine.
    pub io: &'a mut SimIo,
    /// Which syncs.
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
