//! What an administrator does to the chain while its guest runs: one thing at a time, in steps between which
//! anything may happen.
//!
//! Knows the order in which the disk is asked, as the jobs of the disk process ask it, and which chains may be opened
//! after a power loss meanwhile.

use disk::{
    Access, FileId, Format, Image, ImageError, ImageErrorKind, MergeState, Operation, RedoLog, Request, Span, Status,
    Token,
};
use memory::Segments;

use super::{Run, Violation};
use crate::planted::Planted;
use crate::saboteur::{SabotagedIo, Saboteur};
use crate::sector::SECTOR;
use crate::subject::{Form, Subject};
use crate::workload::Step;

/// The flush that makes a growth durable: no guest's requests are so many.
pub(super) const GROWTH: Token = Token(u64::MAX);

/// Something that is being done, and how far it has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chore {
    /// A change is wanted; requests are to be held back.
    Wanted(Change),
    /// Requests are held back; what is in flight ends.
    Held(Change),
    /// The last round before the change.
    Syncing(Change),
    /// The layers that are merged become as large as the first of them, from the top down, each durably before the next
    /// (`durable`: the last that did): whenever the power is lost, none is smaller than the one below it.
    Evening { from: usize, into: usize, durable: bool },
    /// A merge goes from chunk to chunk.
    Merging,
    /// There is a new leaf; the old one, this, becomes durable.
    Closing(FileId),
    /// The disk is larger; that becomes durable, and then the guest is told.
    Telling,
}

/// What is done while nothing is in flight and, but for a new leaf, everything durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A new file becomes the leaf.
    Switch(FileId),
    /// The disk becomes larger.
    Grow,
    /// The layers from the first to the second, which are to be merged into the second, are opened for writing.
    BeginMerge(usize, usize),
    /// The layers that were merged are empty and go.
    EndMerge,
}

impl Run {
    /// Whether a step can begin: one thing is done at a time, and only a merge can be cancelled.
    pub(super) fn can_begin(&self, step: Step) -> bool {
        self.chore.is_none_or(|chore| step == Step::Cancel && chore == Chore::Merging)
    }

    /// Whether the disk is about to become larger.
    pub(super) fn is_growing(&self) -> bool {
        let change = match self.chore {
            Some(Chore::Wanted(change) | Chore::Held(change) | Chore::Syncing(change)) => Some(change),
            Some(Chore::Telling) => Some(Change::Grow),
            _ => None,
        };
        change == Some(Change::Grow)
    }

    /// Begins a step.
    pub(super) fn begin(&mut self, step: Step, subject: &Subject) -> Result<(), Violation> {
        // What a merge has left behind is removed before anything else is done.
        self.chains.truncate(1);
        let layers = self.chains.first().map_or(0, Vec::len);
        let merged = step.merged(layers);
        let failed = self.disk.merge().map(|merge| (merge.from, merge.into));
        if merged.is_none() || merged != failed {
            // One that has failed is not gone on with.
            self.disk.cancel_merge();
        }
        self.chore = match step {
            Step::Snapshot => Some(Chore::Wanted(Change::Switch(self.new_leaf(subject)?))),
            Step::Grow => Some(Chore::Wanted(Change::Grow)),
            Step::Merge | Step::MergeBelow | Step::MergeAll | Step::Cancel => {
                merged.map(|(from, into)| Chore::Wanted(Change::BeginMerge(from, into)))
            }
        };
        Ok(())
    }

    /// A new file, whole and durable from the moment at which it has its name.
    fn new_leaf(&mut self, subject: &Subject) -> Result<FileId, Violation> {
        let chain = self.chains.swap_remove(0);
        let made = subject.kind.leaf_on(self.form(chain.first()));
        let media = subject.create(made, chain.len(), self.disk.geometry().len / SECTOR).map_err(Violation::Open)?;
        let file = self.io.add(media);
        self.forms.push(made.form());
        // The rule after a power loss is one sentence: if the new file is there, it is the leaf. Before the switch
        // the other one is as good.
        let longer = [&[file], chain.as_slice()].concat();
        self.chains = vec![chain, longer];
        Ok(file)
    }

    fn form(&self, file: Option<&FileId>) -> Form {
        file.and_then(|file| self.forms.get(usize::from(file.0))).copied().unwrap_or(Form::Raw)
    }

    /// Whether the chore can go on.
    pub(super) fn can_go_on(&self) -> bool {
        self.chore.is_some_and(|chore| match chore {
            Chore::Wanted(_) => true,
            Chore::Held(_) => self.disk.is_quiet(),
            Chore::Syncing(_) => !self.disk.is_syncing() && self.disk.is_quiet(),
            Chore::Merging => self.disk.merge().is_none_or(|merge| !merge.busy),
            Chore::Closing(file) => self.disk.is_frozen(file) || !self.disk.is_syncing(),
            Chore::Telling => false,
            Chore::Evening { durable, .. } => durable,
        })
    }

    /// Takes the next step of the chore.
    pub(super) fn go_on(&mut self, subject: &Subject) -> Result<(), Violation> {
        let Some(chore) = self.chore else { return Ok(()) };
        let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
        self.chore = match chore {
            Chore::Wanted(change) => {
                self.disk.quiesce();
                Some(Chore::Held(change))
            }
            Chore::Held(Change::Switch(file)) => {
                let closing = self.switch(file, subject)?;
                let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
                self.disk.resume(&mut io);
                self.disk.sync(&mut io);
                closing
            }
            Chore::Closing(file) => return self.close(file),
            Chore::Telling => Some(Chore::Telling),
            Chore::Held(change) => {
                self.disk.sync(&mut io);
                Some(Chore::Syncing(change))
            }
            Chore::Syncing(change) => {
                let next = self.change(change, subject)?;
                self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                if let Some(Chore::Telling | Chore::Evening { .. }) = next {
                    self.flush_growth();
                }
                next
            }
            Chore::Evening { from, into, .. } => Some(self.even(from, into)?),
            Chore::Merging => match self.disk.merge().map(|merge| merge.state) {
                Some(MergeState::Running) => {
                    self.disk.step_merge(&mut io);
                    Some(Chore::Merging)
                }
                Some(MergeState::Copied) => Some(Chore::Wanted(Change::EndMerge)),
                // It can be begun again.
                Some(MergeState::Failed(_)) if self.io.fault_happened() => None,
                state => return Err(Violation::Step(format!("the merge is {state:?}"))),
            },
        };
        Ok(())
    }

    /// Everything is durable, or cannot be; what is to be done next.
    fn change(&mut self, change: Change, subject: &Subject) -> Result<Option<Chore>, Violation> {
        if !self.disk.is_clean() {
            // The new file, if any, is removed.
            self.chains.truncate(1);
            let unclean = || Violation::Step("a round leaves something that is not durable".into());
            return if self.io.fault_happened() { Ok(None) } else { Err(unclean()) };
        }
        match change {
            Change::Switch(file) => return self.switch(file, subject),
            Change::Grow => return self.grow(subject),
            Change::BeginMerge(from, into) => {
                self.open_merged(from, into, subject)?;
                return Ok(Some(Chore::Evening { from, into, durable: false }));
            }
            // A write that was still under way has found no space in the target: the merge can be begun again.
            Change::EndMerge if self.has_merge_failed() && self.io.fault_happened() => {}
            Change::EndMerge => self.end_merge()?,
        }
        Ok(None)
    }

    /// Makes the new file the leaf, whatever is durable.
    fn switch(&mut self, file: FileId, subject: &Subject) -> Result<Option<Chore>, Violation> {
        if self.disk.is_broken() {
            // The new file is removed.
            self.chains.truncate(1);
            return Ok(None);
        }
        let old = self.chains.swap_remove(0).first().copied();
        if self.bug == Some(Planted::SnapshotWithoutRound) {
            self.plot.borrow_mut().deaf = old;
        }
        let (leaf, log) = self.open(file, 0, subject)?;
        self.disk.push_leaf(file, leaf).map_err(refused)?;
        self.disk.set_log(file, log).map_err(refused)?;
        self.disk.freeze(1).map_err(refused)?;
        Ok(old.map(Chore::Closing))
    }

    /// A round has ended, with which the old leaf should be closed for writing.
    fn close(&mut self, file: FileId) -> Result<(), Violation> {
        self.chore = None;
        if self.disk.is_frozen(file) {
            self.io.let_write(file, false);
            self.logs.close(file);
        } else if !self.io.fault_happened() {
            return Err(Violation::Step("the old leaf does not become durable".into()));
        }
        Ok(())
    }

    /// Makes the disk larger, once.
    fn grow(&mut self, subject: &Subject) -> Result<Option<Chore>, Violation> {
        match self.disk.grow(subject.kind.grown() * SECTOR) {
            // Not every format can.
            Err(error) if error.kind == ImageErrorKind::Unsupported => Ok(None),
            grown => {
                self.lengthen(0);
                grown.map_err(refused).map(|()| Some(Chore::Telling))
            }
        }
    }

    fn flush_growth(&mut self) {
        let span = Span { at: 0, len: 0 };
        let flush = Request::new(Operation::Flush, span, Segments::empty(), GROWTH, &self.disk.geometry());
        let Ok(flush) = flush else { unreachable!("a flush is about no sector") };
        self.disk.submit(flush, &mut SabotagedIo { io: &mut self.io, plot: &self.plot });
    }

    /// The larger size is durable, and the guest may use it, or the next layer follows; or it cannot be.
    pub(super) fn grown(&mut self, status: Status) -> Result<(), Violation> {
        if status != Status::Done {
            self.chore = None;
            let op = || "the flush of a growth".into();
            return if self.io.fault_happened() { Ok(()) } else { Err(Violation::Status { op: op(), status }) };
        }
        self.chore = match self.chore.take() {
            Some(Chore::Evening { from, into, .. }) => Some(Chore::Evening { from, into, durable: true }),
            _ => {
                self.told = self.disk.geometry().len / SECTOR;
                None
            }
        };
        Ok(())
    }

    /// A raw file is as long as what it holds, and nobody but who opens it sees to that.
    fn lengthen(&mut self, depth: usize) {
        let Some(len) = self.disk.layers().get(depth).map(|layer| layer.format.geometry().len) else { return };
        let file = self.chains.first().and_then(|chain| chain.get(depth)).copied();
        if let Some(file) = file.filter(|file| self.form(Some(file)) == Form::Raw) {
            self.io.extend(file, len);
        }
    }

    /// Opens what takes part in a merge for writing.
    fn open_merged(&mut self, from: usize, into: usize, subject: &Subject) -> Result<(), Violation> {
        // One that has failed goes on: its layers are open for writing already.
        let opened = if self.disk.merge().is_none() { from.max(1)..into + 1 } else { 0..0 };
        for depth in opened {
            let Some(file) = self.chains.first().and_then(|chain| chain.get(depth)).copied() else { continue };
            let (image, log) = self.open(file, depth, subject)?;
            self.disk.reopen(depth, image).map_err(refused)?;
            self.disk.set_log(file, log).map_err(refused)?;
            self.io.let_write(file, true);
        }
        Ok(())
    }

    /// Makes the next layer as large as the first of them; when all are, the merge begins. A raw target is as large as
    /// its file is long, and comes last.
    fn even(&mut self, from: usize, into: usize) -> Result<Chore, Violation> {
        let len_of = |depth: usize| self.disk.layers().get(depth).map_or(0, |layer| layer.format.geometry().len);
        let (wanted, is_raw) = (len_of(from), |depth| self.form(self.chains[0].get(depth)) == Form::Raw);
        let short = (from..into + 1).find(|depth| len_of(*depth) < wanted && !is_raw(*depth));
        if let Some(depth) = short {
            self.disk.grow_layer(depth, wanted).map_err(refused)?;
            self.flush_growth();
            return Ok(Chore::Evening { from, into, durable: false });
        }
        let copied = self.disk.merge().is_some_and(|merge| merge.state == MergeState::Copied);
        // If all is copied, only its last round has failed.
        if !copied {
            self.disk.begin_merge(from, into).map_err(refused)?;
            self.lengthen(into);
        }
        Ok(Chore::Merging)
    }

    fn has_merge_failed(&self) -> bool {
        self.disk.merge().is_some_and(|merge| matches!(merge.state, MergeState::Failed(_)))
    }

    /// Takes the sources, which hold nothing any more, off the chain. Their files are still there: both chains are
    /// right.
    fn end_merge(&mut self) -> Result<(), Violation> {
        let sources = self.disk.end_merge().map_err(refused)?;
        let old = self.chains.swap_remove(0);
        for layer in &sources {
            self.io.let_write(layer.file, false);
            self.logs.close(layer.file);
        }
        let rest = old.iter().copied().filter(|file| sources.iter().all(|layer| layer.file != *file)).collect();
        self.chains = vec![rest, old];
        Ok(())
    }

    /// Opens a file as it is now for writing, to stand so deep in the chain.
    fn open(&mut self, file: FileId, depth: usize, subject: &Subject) -> Result<(Saboteur<Image>, RedoLog), Violation> {
        let mut media = self.io.file(file).visible().clone();
        let log = self.logs.open(file, &mut media).map_err(Violation::Open)?;
        let form = self.form(Some(&file));
        let image = subject.open_one(&mut log.patched(&mut media), form, Access::ReadWrite).map_err(Violation::Open)?;
        Ok((Saboteur::new(image, self.bug, self.plot.clone(), (file, depth), media.len()), log))
    }
}

fn refused(error: ImageError) -> Violation {
    Violation::Step(error.to_string())
}
