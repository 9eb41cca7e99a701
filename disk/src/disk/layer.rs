//! One image of a chain: its format, its redo log, and what is known of its file.
//!
//! Knows nothing of the other layers. Keeps: the changes of its last process come before its own, in what is loaded and
//! in what a round writes; nothing is logged before the file has the stamp that the log names.

use crate::format::{Format, Mapping, MetaBlock, MetaWrite, Wait};
use crate::redo::RedoLog;
use crate::{FileId, FileOffset, Span};

/// One image of the chain, and the number of its file.
#[derive(Debug)]
pub struct Layer<F> {
    /// The file, as the engine knows it.
    pub file: FileId,
    /// The image's format, which maps its bytes.
    pub format: F,
    /// The redo log, for the next process.
    pub(super) log: Option<RedoLog>,
    pub(super) stamping: Stamping,
    pub(super) upkeep: Upkeep,
    /// It is open for writing, but no longer written to.
    pub(super) frozen: bool,
    /// It will be frozen when it is durable.
    pub(super) closing: bool,
}

/// Whether the file has the stamp that what is logged next follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stamping {
    /// Not since the last round began, or the image was opened.
    Due,
    /// Something is to be logged that waits for it.
    Wanted,
    /// It is being written.
    UnderWay,
    /// It has.
    Done,
}

/// The outcome of logging changes. A layer depends on the greatest of those below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Logged {
    /// All of them are logged, and all before them.
    All,
    /// They are logged when the file has a new stamp.
    Waits,
    /// Some are not, and will not be.
    Gap,
}

/// State of the background work for a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upkeep {
    /// Something was written since the last round began, or may have been before the image was opened.
    pub unsynced: bool,
    /// Changed metadata blocks that a failed round has left.
    dirty_left: usize,
    /// Bytes of the redo log that a failed round has left.
    log_left: u64,
    /// How far the reclaiming of leaked space has come.
    pub reclaim: Reclaim,
}

impl Upkeep {
    /// Of a layer that has just been opened.
    pub fn new(read_only: bool) -> Upkeep {
        let reclaim = if read_only { Reclaim::Done } else { Reclaim::Start };
        Upkeep { unsynced: !read_only, dirty_left: 0, log_left: 0, reclaim }
    }
}

/// How far the reclaiming of leaked space has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reclaim {
    /// Not begun. Metadata that was read at open may be in a cache only, left by a process that was killed. It is
    /// synced before space is reused that it no longer refers to.
    Start,
    /// That sync is under way. No round begins meanwhile: the kernel reports a failure to one of two concurrent syncs
    /// only, and the other must not be taken for a success.
    Syncing,
    /// A deallocation is under way.
    Busy,
    /// There is nothing more to reclaim.
    Done,
}

/// Metadata to be loaded, by file.
pub(super) type Missing = Vec<(FileId, MetaBlock)>;

impl<F: Format> Layer<F> {
    pub(super) fn new(file: FileId, format: F) -> Layer<F> {
        let upkeep = Upkeep::new(format.geometry().read_only);
        Layer { file, format, log: None, stamping: Stamping::Due, upkeep, frozen: false, closing: false }
    }

    /// Bytes of the disk that the image has.
    pub(super) fn len(&self) -> u64 {
        self.format.geometry().len
    }

    /// Whether a power loss could lose something.
    pub(super) fn is_dirty(&self) -> bool {
        self.upkeep.unsynced || self.format.dirty() > 0 || self.owes()
    }

    /// Whether changes of its last process are not durable yet.
    pub(super) fn owes(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.owed().is_some())
    }

    /// Whether enough has changed that a round should begin before requests have to wait for one. Changes left by a
    /// failed round are written again when a request requires it or when as much again has changed, not at once and
    /// without end.
    pub(super) fn is_much_dirty(&self, dirty_max: usize) -> bool {
        let is_log_full = |log: &RedoLog| log.used().saturating_sub(self.upkeep.log_left) > log.capacity() / 2;
        self.format.dirty().saturating_sub(self.upkeep.dirty_left) > dirty_max
            || self.log.as_ref().is_some_and(is_log_full)
    }

    /// Records that the file was written to, or deallocated in, since its last sync.
    pub(super) fn touched(&mut self) {
        if !self.upkeep.unsynced {
            self.upkeep.unsynced = true;
            if let Some(log) = &mut self.log {
                log.touched();
            }
        }
    }

    /// Records that a place in the file was written up to here.
    pub(super) fn reaches(&mut self, end: FileOffset) {
        if let Some(log) = &mut self.log {
            log.reaches(end);
        }
    }

    /// Where the layer has the first bytes of `span`, and which those are. Missing metadata counts as nothing
    /// allocated, so that the walk continues below and finds what else is missing; the result is then of no use.
    pub(super) fn look_up(&mut self, span: Span, missing: &mut Missing) -> (Mapping, Span) {
        let place = match self.format.map(span) {
            Ok(place) => place,
            Err(Wait::Load(block)) => {
                missing.push((self.file, block));
                Mapping::Parent { len: span.len }
            }
            Err(Wait::Busy(_) | Wait::Round | Wait::NoSpace | Wait::Damaged(_)) => {
                unreachable!("a lookup takes no space")
            }
        };
        (place, Span { at: span.at, len: place.len().min(span.len).max(512) })
    }

    /// Hands loaded metadata to the format, with the changes of the last process applied. Returns whether it makes
    /// sense.
    pub(super) fn load(&mut self, block: MetaBlock, mut bytes: Vec<u8>) -> bool {
        if let Some(owed) = self.log.as_ref().and_then(RedoLog::owed) {
            owed.patch(block.at, &mut bytes);
        }
        self.format.load(block, &bytes).is_ok()
    }

    /// Lets the layer forget all of `span`.
    pub(super) fn forget(&mut self, span: Span) -> Result<(), Wait> {
        let mut at = span.at;
        while at < span.end() {
            let len = self.format.forget(span.tail_from(at))?;
            at += len.max(512);
        }
        Ok(())
    }

    /// Logs what has changed in this layer, if the file has the stamp for it; `below`: what became of the changes in
    /// the layers below.
    pub(super) fn log_changes(&mut self, below: Logged) -> Logged {
        let Some(log) = &mut self.log else { return below };
        let changes = self.format.records();
        if !changes.is_empty() {
            let can_wait = below != Logged::Gap && log.appends() && !changes.is_incomplete();
            if can_wait && (below == Logged::Waits || self.stamping != Stamping::Done) {
                if self.stamping == Stamping::Due {
                    self.stamping = Stamping::Wanted;
                }
                return Logged::Waits;
            }
            log.append(changes, below == Logged::Gap);
        }
        if log.has_gap() { Logged::Gap } else { Logged::All }
    }

    /// Begins to give the file a new stamp, if that is wanted. Returns the write; if there is none, what was to be
    /// logged is not.
    pub(super) fn begin_stamp(&mut self) -> Option<MetaWrite> {
        if self.stamping != Stamping::Wanted {
            return None;
        }
        self.stamping = Stamping::Due;
        let Some(log) = &mut self.log else { unreachable!("a stamp is wanted for a log") };
        let write = log.new_stamp().and_then(|stamp| self.format.set_stamp(stamp));
        if write.is_some() {
            log.begin_stamp();
            self.stamping = Stamping::UnderWay;
        } else {
            log.leave_gap();
        }
        write
    }

    /// The write of the stamp has ended. If it has failed, the file may have the new stamp or the one before.
    pub(super) fn stamp_ended(&mut self, written: bool) {
        let Some(log) = &mut self.log else { unreachable!("a stamp was written for a log") };
        if written {
            log.end_stamp();
            self.stamping = Stamping::Done;
        } else {
            log.leave_gap();
            self.stamping = Stamping::Due;
        }
    }

    /// The file gets a new stamp before the next change is logged.
    pub(super) fn expire_stamp(&mut self) {
        if self.stamping == Stamping::Done {
            self.stamping = Stamping::Due;
        }
    }

    /// Removes the stamp with the next round. Only while the layer is clean.
    pub(super) fn clear_stamp(&mut self) {
        self.stamping = Stamping::Due;
        self.format.clear_stamp();
    }

    /// Begins a round. The changes of the last process come first, for the format does not know of them.
    pub(super) fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        self.upkeep.unsynced = false;
        let mut batches = Vec::new();
        assert!(self.stamping != Stamping::UnderWay, "a round begins while a stamp is being written");
        self.stamping = Stamping::Due;
        if let Some(log) = &mut self.log {
            log.seal();
            batches.extend_from_slice(log.owed().map(|owed| owed.batches()).unwrap_or_default());
        }
        batches.append(&mut self.format.seal());
        batches
    }

    /// Ends a round. Returns whether the layer has grown with it.
    pub(super) fn settled(&mut self, durable: bool) -> bool {
        let before = self.len();
        self.format.settled(durable);
        if let Some(log) = &mut self.log {
            log.settle(durable, !self.upkeep.unsynced);
            self.upkeep.log_left = if durable { 0 } else { log.used() };
        }
        self.upkeep.dirty_left = if durable { 0 } else { self.format.dirty() };
        // The round may not even have come to this layer.
        self.upkeep.unsynced |= !durable;
        self.len() != before
    }
}
