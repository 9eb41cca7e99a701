//! What an administrator does to the chain while its guest runs: the plans of the disk process, one at a time, in
//! steps between which anything may happen.
//!
//! Knows how each step is done to a disk and to storage of the simulator, and which chains may be opened after a power
//! loss meanwhile. The order of the steps is the plan's.

use disk::{
    Access, Action, Disk, DiskOffset, FileDone, FileId, Format, Image, ImageError, ImageErrorKind, MergeState,
    Operation, Options, RedoLog, Request, Span, Status, Token,
};
use memory::Segments;
use plan::{Layer, Merge, Plan};

use super::aside::{self, Aside};
use super::made::New;
use super::{Run, Violation, Watch};
use crate::link;
use crate::saboteur::{SabotagedIo, Saboteur, order};
use crate::sector::SECTOR;
use crate::subject::{Form, Subject};
use crate::workload::Step;

/// The flush of a verb: no guest's requests are so many.
pub(super) const FLUSH: Token = Token(u64::MAX);

/// A verb that is being carried out.
pub(super) struct Verb {
    pub(super) asked: Step,
    plan: Plan,
    pub(super) phase: Phase,
    /// The new file.
    pub(super) new: Option<New>,
    /// The new parent.
    pub(super) parent: Option<FileId>,
    /// Layers whose files were opened for writing, and which the disk does not use so yet.
    opened: Vec<(usize, FileId)>,
    /// Whether a step has failed.
    pub(super) has_failed: bool,
}

/// How far a step has come.
pub(super) enum Phase {
    /// It is to be begun.
    Due,
    /// Requests are held; what is in flight ends.
    Draining,
    /// A round is under way.
    Syncing,
    /// A flush is.
    Flushing,
    /// It has ended.
    Flushed(Status),
    /// The parents of the layers from this one of the opened ones on are to be forgotten; that of this one becomes
    /// durable.
    Forgetting(usize, Box<Disk<Image>>),
    /// So many writes of what is copied up are under way; whether one has failed.
    CopyingUp(usize, bool),
    /// All steps are done, and the disk comes to rest.
    Ending,
}

/// How a step has ended, if it has.
pub(super) enum Ended {
    Well,
    Badly,
    NotYet,
}

impl Verb {
    fn new(asked: Step, plan: Plan) -> Verb {
        Verb { asked, plan, phase: Phase::Due, new: None, parent: None, opened: Vec::new(), has_failed: false }
    }

    /// The step that it is at.
    pub(super) fn step(&self) -> Option<plan::Step> {
        self.plan.step()
    }
}

impl Run {
    /// Whether a verb can begin: one thing is done at a time, and only a merge can be cancelled.
    pub(super) fn can_begin(&self, step: Step) -> bool {
        if step.is_offline() {
            return self.verb.is_none() && self.in_flight.is_empty() && self.disk.is_quiet();
        }
        self.verb.as_ref().is_none_or(|verb| step == Step::Cancel && verb.plan.step() == Some(plan::Step::CopyAll))
    }

    /// Whether the disk is about to become larger.
    pub(super) fn is_growing(&self) -> bool {
        self.verb.as_ref().is_some_and(|verb| verb.asked == Step::Grow)
    }

    /// Begins a verb.
    pub(super) fn begin(&mut self, step: Step, subject: &Subject) {
        if let Some(verb) = self.verb.as_mut().filter(|_| step == Step::Cancel) {
            verb.plan.fail();
            return;
        }
        // What a merge has left is removed before anything else is done.
        self.chains.truncate(1);
        if step.changes_layers() {
            self.siblings.clear();
        }
        let layers: Vec<Layer> = (0..self.disk.layers().len()).map(|depth| self.layer(depth)).collect();
        let plan = match step {
            // As by the disk process: a disk that accepts no writes is not changed.
            _ if self.disk.is_broken() => None,
            Step::Snapshot => Some(plan::snapshot()),
            Step::Rebase => self.can_relink().then(plan::rebase),
            Step::Flatten => (self.can_relink() && layers.len() > 1).then(plan::flatten),
            Step::Relink => (self.can_relink() && layers.len() > 1).then(plan::relink),
            Step::Clone => self.is_closed(1).then(|| plan::clone(1)),
            Step::Copy => self.can_copy().then(plan::copy),
            Step::Revert => self.is_closed(1).then(|| plan::revert(1)),
            Step::Grow => plan::resize(subject.kind.grown() * SECTOR, &layers).ok(),
            Step::Merge | Step::MergeBelow | Step::MergeAll | Step::Cancel => {
                // The leaf's file stays, as for an administrator who removes it later.
                let merge = |(from, into)| plan::merge(&Merge { from, into, layers: &layers, delete: from > 0 });
                step.merged(layers.len()).and_then(|merged| merge(merged).ok())
            }
        };
        let plan = plan.map(|plan| order::plant(plan, self.bug));
        self.verb = plan.map(|plan| Verb::new(step, plan));
    }

    /// Removes what a process that has died has left of a merge, which its leaf says has ended.
    pub(super) fn finish_merge(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        let plan = order::plant(plan::finish_merge(true), self.bug);
        self.verb = Some(Verb::new(Step::MergeBelow, plan));
        self.end_of_verb(subject, watch)
    }

    /// Begins a verb, unless this disk cannot do it, and waits for its end.
    pub(super) fn do_verb(&mut self, step: Step, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        self.begin(step, subject);
        self.end_of_verb(subject, watch)
    }

    fn end_of_verb(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        while let Some(verb) = &self.verb {
            let step = verb.plan.step();
            match self.can_go_on() {
                true => self.go_on(subject, watch)?,
                false if self.io.pending() > 0 || self.retry() => self.finish(0),
                false => return Err(Violation::Step(format!("{step:?} never ends, after a process that has died"))),
            }
            self.answers()?;
            watch(&self.sight())?;
        }
        Ok(())
    }

    pub(super) fn layer(&self, depth: usize) -> Layer {
        let len = self.disk.layers().get(depth).map_or(0, |layer| layer.format.geometry().len);
        let raw = self.form(self.file_at(depth)) == Form::Raw;
        Layer { len, flat: raw, raw }
    }

    pub(super) fn file_at(&self, depth: usize) -> Option<FileId> {
        self.chains.first().and_then(|chain| chain.get(depth)).copied()
    }

    pub(super) fn form(&self, file: Option<FileId>) -> Form {
        file.and_then(|file| self.forms.get(usize::from(file.0))).copied().unwrap_or(Form::Raw)
    }

    /// Whether the verb can go on.
    pub(super) fn can_go_on(&self) -> bool {
        let Some(verb) = &self.verb else { return false };
        match (&verb.phase, verb.plan.step()) {
            (Phase::Due, Some(plan::Step::CopyAll)) => self.disk.merge().is_none_or(|merge| !merge.busy),
            (Phase::Syncing, Some(plan::Step::AwaitClosed)) => self.are_closed() || !self.disk.is_syncing(),
            (Phase::Due | Phase::Flushed(_), _) => true,
            (Phase::CopyingUp(left, _), _) => *left == 0,
            (Phase::Draining | Phase::Ending, _) => self.disk.is_quiet(),
            (Phase::Syncing, _) => !self.disk.is_syncing() && self.disk.is_quiet(),
            (Phase::Forgetting(_, aside), _) => !aside.is_syncing() && aside.is_quiet(),
            (Phase::Flushing, _) => false,
        }
    }

    /// Goes on until a step has to wait. `watch` looks after each of them.
    pub(super) fn go_on(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        while let Some(mut verb) = self.verb.take() {
            let Some(step) = verb.plan.step() else { return self.end_verb(verb) };
            match self.carry_out(step, &mut verb, subject)? {
                Ended::NotYet => {
                    self.verb = Some(verb);
                    break;
                }
                Ended::Well => verb.plan.done(),
                Ended::Badly if self.io.fault_happened() => {
                    verb.plan.fail();
                    verb.has_failed = true;
                }
                Ended::Badly => return Err(Violation::Step(format!("{step:?} has failed"))),
            }
            verb.phase = Phase::Due;
            self.verb = Some(verb);
            watch(&self.sight())?;
        }
        Ok(())
    }

    fn carry_out(&mut self, step: plan::Step, verb: &mut Verb, subject: &Subject) -> Result<Ended, Violation> {
        use plan::Step::*;
        match step {
            Hold => return Ok(self.hold(&mut verb.phase, false)),
            HoldDurable => return Ok(self.hold(&mut verb.phase, true)),
            MakeDurable => return Ok(self.make_durable(&mut verb.phase)),
            AwaitClosed => return Ok(self.await_closed(&mut verb.phase)),
            ForgetParents => return self.forget_parents(verb, subject),
            CopyAll => return Ok(self.copy_more()),
            CopyUp => return self.copy_up(verb, subject),
            Grow { len } => return self.grow(len),
            CreateChild { of, live } => verb.new = Some(self.create_child(of, live, subject)?),
            SyncNew => self.sync_new(verb),
            NameNew => self.name_new(verb, subject)?,
            SyncName => verb.new_mut().make_name_durable(),
            RemoveNew => self.remove_new(verb),
            RemoveSources => self.chains.truncate(1),
            // What the disk would open it is given when the file becomes its leaf.
            OpenChild => {}
            PopTo { depth } => self.pop_to(depth)?,
            SyncParents => self.sync_parents(verb, subject)?,
            Release => self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot }),
            PushLeaf => self.push_leaf(verb, subject)?,
            CloseForWriting => self.close_for_writing()?,
            ReopenReadOnly => self.reopen_read_only(verb),
            RecordParentTime => self.record_parent_time()?,
            OpenForWriting { last } => verb.opened = self.read_only_down_to(last),
            ForgetParent => self.relink(0, link::forgotten)?,
            UseWritable => self.use_writable(std::mem::take(&mut verb.opened), subject)?,
            GrowLayer { depth, len } => self.disk.grow_layer(depth, len).map_err(refused)?,
            Lengthen { depth, len } => self.lengthen(depth, len),
            Announce => self.told = self.disk.geometry().len / SECTOR,
            BeginMerge { from, into } => self.disk.begin_merge(from, into).map_err(refused)?,
            CancelMerge => self.disk.cancel_merge(),
            // A write that was still under way may have found no space in the target.
            EndMerge if self.has_merge_failed() => return Ok(Ended::Badly),
            EndMerge => self.end_merge()?,
            LinkParent { .. } if verb.asked.is_move() => {
                let new = self.new_parent(verb, subject)?;
                self.stand_on(Some(new), subject)?;
            }
            LinkParent { child } => self.link_parent(child)?,
            RemoveParentLink => self.stand_on(None, subject)?,
            CreateCopy => verb.new = Some(self.create_copy()),
            ShareBlocks => self.share_blocks(verb),
        }
        Ok(Ended::Well)
    }

    /// Holds requests until nothing is in flight, or everything durable as well.
    fn hold(&mut self, phase: &mut Phase, durable: bool) -> Ended {
        match phase {
            Phase::Due => {
                self.disk.quiesce();
                *phase = Phase::Draining;
                Ended::NotYet
            }
            _ if self.disk.is_broken() => Ended::Badly,
            Phase::Draining if durable && !self.disk.is_clean() => {
                self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                *phase = Phase::Syncing;
                Ended::NotYet
            }
            _ if durable && !self.disk.is_clean() => Ended::Badly,
            _ => Ended::Well,
        }
    }

    /// Makes durable what has changed, by a flush among those of the guest.
    fn make_durable(&mut self, phase: &mut Phase) -> Ended {
        match phase {
            Phase::Flushed(Status::Done) => Ended::Well,
            Phase::Flushed(_) => Ended::Badly,
            _ => {
                *phase = Phase::Flushing;
                let span = Span { at: DiskOffset(0), len: 0 };
                let flush = Request::new(Operation::Flush, span, Segments::empty(), FLUSH, &self.disk.geometry());
                let Ok(flush) = flush else { unreachable!("a flush is about no sector") };
                self.disk.submit(flush, &mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                Ended::NotYet
            }
        }
    }

    /// That flush was answered.
    pub(super) fn flushed(&mut self, status: Status) {
        let Some(verb) = &mut self.verb else { unreachable!("a flush belongs to a verb") };
        verb.phase = Phase::Flushed(status);
    }

    /// A round makes the layers durable that are closed for writing.
    fn await_closed(&mut self, phase: &mut Phase) -> Ended {
        match phase {
            Phase::Due => {
                self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                *phase = Phase::Syncing;
                Ended::NotYet
            }
            // One that cannot be made durable stays open for writing.
            _ if self.are_closed() || self.io.fault_happened() => Ended::Well,
            _ => Ended::Badly,
        }
    }

    fn are_closed(&self) -> bool {
        let below = self.chains.first().into_iter().flatten().skip(1);
        below.filter(|file| self.io.is_writable(**file)).all(|file| self.disk.is_frozen(*file))
    }

    /// What a child records of a layer; the time of its last change if that is final.
    pub(super) fn parent_of(&mut self, file: Option<FileId>, depth: usize, is_final: bool) -> disk::Link {
        let Some(file) = file else { unreachable!("the chain has no layer {depth}") };
        let Some(layer) = self.disk.layers().get(depth) else { unreachable!("the disk has no layer {depth}") };
        let modified = is_final.then(|| self.io.modified(file));
        link::to(layer.format.inner(), file, modified)
    }

    fn close_for_writing(&mut self) -> Result<(), Violation> {
        for depth in 1..self.disk.layers().len() {
            if self.disk.layers().get(depth).is_some_and(|layer| !layer.format.geometry().read_only) {
                self.disk.freeze(depth).map_err(refused)?;
            }
        }
        Ok(())
    }

    fn reopen_read_only(&mut self, verb: &mut Verb) {
        // Those that the disk does not use were only to be.
        for (_, file) in std::mem::take(&mut verb.opened) {
            self.io.let_write(file, false);
        }
        for file in self.chains.first().into_iter().flatten().skip(1) {
            if self.io.is_writable(*file) && self.disk.is_frozen(*file) {
                self.io.let_write(*file, false);
                self.logs.close(*file);
            }
        }
    }

    /// The leaf's parent is not written to any more.
    fn record_parent_time(&mut self) -> Result<(), Violation> {
        let Some(parent) = self.file_at(1).filter(|file| !self.io.is_writable(*file)) else { return Ok(()) };
        let modified = self.io.modified(parent);
        self.relink(0, |link| link.modified.is_none().then_some(disk::Link { modified: Some(modified), ..link }))
    }

    /// Has a layer record something else of its parent, if it has one.
    fn relink(&mut self, depth: usize, change: impl FnOnce(disk::Link) -> Option<disk::Link>) -> Result<(), Violation> {
        let layer = self.disk.layer_mut(depth).map_err(refused)?;
        link::change(layer.inner_mut(), change).map(drop).map_err(refused)
    }

    fn read_only_down_to(&self, last: usize) -> Vec<(usize, FileId)> {
        let chain = self.chains.first().into_iter().flatten().copied().enumerate().take(last + 1);
        chain.filter(|(_, file)| !self.io.is_writable(*file)).collect()
    }

    /// Has the layers that were opened forget what is about to change of their parents, one after the other.
    fn forget_parents(&mut self, verb: &mut Verb, subject: &Subject) -> Result<Ended, Violation> {
        let next = match std::mem::replace(&mut verb.phase, Phase::Due) {
            Phase::Forgetting(_, aside) if !aside.is_clean() => return Ok(Ended::Badly),
            Phase::Forgetting(nth, _) => nth + 1,
            _ => 0,
        };
        for (nth, &(_, file)) in verb.opened.iter().enumerate().skip(next) {
            let mut media = self.io.file(file).visible().clone();
            let image = subject.open_one(&mut media, self.form(Some(file)), Access::ReadWrite);
            let mut image = image.map_err(Violation::Open)?;
            if !link::change(&mut image, link::forgotten).map_err(refused)? {
                continue;
            }
            let mut aside = Disk::new(vec![image], Options::default()).map_err(refused)?;
            self.io.let_write(file, true);
            aside.sync(&mut Aside { io: &mut self.io, file });
            verb.phase = Phase::Forgetting(nth, Box::new(aside));
            return Ok(Ended::NotYet);
        }
        Ok(Ended::Well)
    }

    /// Whether an operation that has ended is of a disk beside the guest's; then that goes on.
    pub(super) fn settle_aside(&mut self, done: FileDone) -> Option<FileDone> {
        if !aside::is_aside(&done.op) {
            return Some(done);
        }
        let Some(Verb { phase: Phase::Forgetting(_, aside), .. }) = &mut self.verb else {
            unreachable!("{:?} belongs to nobody", done.op)
        };
        if done.result.is_err() && matches!(done.op.action, Action::SyncData) {
            self.io.excuse_failed_sync();
        }
        let file = done.op.file;
        aside.settle(aside::own(done), &mut Aside { io: &mut self.io, file });
        None
    }

    /// Lets a disk beside the guest's push again what was handed back.
    pub(super) fn retry_aside(&mut self) {
        let Some(Verb { phase: Phase::Forgetting(nth, aside), opened, .. }) = &mut self.verb else { return };
        let Some(&(_, file)) = opened.get(*nth) else { unreachable!("the disk beside is of an opened layer") };
        aside.retry(&mut Aside { io: &mut self.io, file });
    }

    /// The disk uses the files that were opened for writing.
    fn use_writable(&mut self, opened: Vec<(usize, FileId)>, subject: &Subject) -> Result<(), Violation> {
        for (depth, file) in opened {
            let (image, log) = self.open(file, depth, subject)?;
            self.disk.reopen(depth, image).map_err(refused)?;
            self.disk.set_log(file, log).map_err(refused)?;
            self.io.let_write(file, true);
        }
        Ok(())
    }

    /// Makes the disk larger, once.
    fn grow(&mut self, len: u64) -> Result<Ended, Violation> {
        match self.disk.grow(len) {
            // Not every format can.
            Err(error) if error.kind == ImageErrorKind::Unsupported => {
                self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                Ok(Ended::Well)
            }
            grown => grown.map(|()| Ended::Well).map_err(refused),
        }
    }

    /// A raw file is as long as what it holds, and nobody but who opens it sees to that.
    fn lengthen(&mut self, depth: usize, len: u64) {
        if let Some(file) = self.file_at(depth).filter(|file| self.form(Some(*file)) == Form::Raw) {
            self.io.extend(file, len);
        }
    }

    fn copy_more(&mut self) -> Ended {
        match self.disk.merge().map(|merge| merge.state) {
            Some(MergeState::Running) => {
                self.disk.step_merge(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                Ended::NotYet
            }
            Some(MergeState::Copied) => Ended::Well,
            _ => Ended::Badly,
        }
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

    fn link_parent(&mut self, child: usize) -> Result<(), Violation> {
        let target = self.parent_of(self.file_at(child + 1), child + 1, false);
        self.relink(child, |_| Some(target))
    }

    /// Opens a file as it is now for writing, to stand so deep in the chain.
    pub(super) fn open(
        &mut self,
        file: FileId,
        depth: usize,
        subject: &Subject,
    ) -> Result<(Saboteur<Image>, RedoLog), Violation> {
        let mut media = self.io.file(file).visible().clone();
        let log = self.logs.open(file, &mut media).map_err(Violation::Open)?;
        let form = self.form(Some(file));
        let image = subject.open_one(&mut log.patched(&mut media), form, Access::ReadWrite).map_err(Violation::Open)?;
        Ok((Saboteur::new(image, self.bug, self.plot.clone(), (file, depth), media.len()), log))
    }
}

pub(super) fn refused(error: ImageError) -> Violation {
    Violation::Step(error.to_string())
}
