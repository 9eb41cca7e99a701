//! Carries out the verbs of an administrator while the guest runs: the plans of the disk process, in steps between
//! which any event may happen.
//!
//! Carries out each step on a disk and on simulated storage, and records which chains may be opened after a power loss
//! meanwhile. The order of the steps is defined by the plan.

use disk::{
    Access, Action, Disk, DiskOffset, FileDone, FileId, Format, Image, ImageError, ImageErrorKind, MergeState,
    Operation, Options, RedoLog, Request, Span, Status, Token,
};
use memory::Segments;
use plan::{Layer, Merge, Plan};

use super::aside::{self, Aside};
use super::made::NewFile;
use super::{Run, Violation, Watch};
use crate::link;
use crate::saboteur::{SabotagedIo, Saboteur, order};
use crate::sector::SECTOR;
use crate::subject::{Form, Subject};
use crate::workload::Step;

/// The token of a verb's flush; requests of the guest have smaller ones.
pub(super) const FLUSH: Token = Token(u64::MAX);

/// A verb in progress.
pub(super) struct ActiveVerb {
    pub(super) asked: Step,
    plan: Plan,
    pub(super) phase: Phase,
    /// The new file, if the verb creates one.
    pub(super) new: Option<NewFile>,
    /// The new parent, if the verb creates one.
    pub(super) parent: Option<FileId>,
    /// Layers whose files were opened for writing but are not yet used so by the disk.
    opened: Vec<(usize, FileId)>,
    /// Whether a step has failed.
    pub(super) has_failed: bool,
}

/// The progress of a step.
pub(super) enum Phase {
    /// Not begun.
    Due,
    /// The map of changed blocks is being extended, or ended.
    Mapping,
    /// Requests are held until those in flight have ended.
    Draining,
    /// A round is in progress.
    Syncing,
    /// A flush is in progress.
    Flushing,
    /// The flush has ended.
    Flushed(Status),
    /// Parent links of the opened layers are being reset, from the one with this index on; that of this layer is
    /// becoming durable.
    Forgetting(usize, Box<Disk<Image>>),
    /// This many writes that copy up are in flight; whether one has failed.
    CopyingUp(usize, bool),
    /// All steps are done, and the disk becomes idle.
    Ending,
}

/// The result of a step, if it has ended.
pub(super) enum Ended {
    Well,
    Badly,
    NotYet,
}

impl ActiveVerb {
    fn new(asked: Step, plan: Plan) -> ActiveVerb {
        ActiveVerb { asked, plan, phase: Phase::Due, new: None, parent: None, opened: Vec::new(), has_failed: false }
    }

    /// The current step.
    pub(super) fn step(&self) -> Option<plan::Step> {
        self.plan.step()
    }
}

impl Run {
    /// Whether a verb can begin: only one is in progress at a time, and only a merge can be cancelled.
    pub(super) fn can_begin(&self, step: Step) -> bool {
        if step.is_offline() {
            return self.verb.is_none() && self.in_flight.is_empty() && self.disk.is_quiet();
        }
        self.verb.as_ref().is_none_or(|verb| step == Step::Cancel && verb.plan.step() == Some(plan::Step::CopyAll))
    }

    /// Whether the disk is about to grow.
    pub(super) fn is_growing(&self) -> bool {
        self.verb.as_ref().is_some_and(|verb| verb.asked == Step::Grow)
    }

    /// Begins a verb on the chain.
    pub(super) fn begin(&mut self, step: Step, subject: &Subject) {
        if let Some(verb) = self.verb.as_mut().filter(|_| step == Step::Cancel) {
            verb.plan.fail();
            return;
        }
        // Files left by a merge are removed before anything else is done.
        self.chains.truncate(1);
        if step.changes_layers() {
            self.siblings.clear();
        }
        let layers: Vec<Layer> = (0..self.disk.layers().len()).map(|depth| self.layer(depth)).collect();
        let plan = match step {
            // As in the disk process: a disk that accepts no writes is not changed.
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
                // The leaf's file is kept, as if an administrator removes it later.
                let merge = |(from, into)| plan::merge(&Merge { from, into, layers: &layers, delete: from > 0 });
                step.merged(layers.len()).and_then(|merged| merge(merged).ok())
            }
        };
        let plan = plan.map(|plan| order::plant(plan, self.bug));
        self.verb = plan.map(|plan| ActiveVerb::new(step, plan));
    }

    /// Removes the files of a merge by a process that has died, if the leaf records that the merge has ended.
    pub(super) fn finish_merge(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        let plan = order::plant(plan::finish_merge(true), self.bug);
        self.verb = Some(ActiveVerb::new(Step::MergeBelow, plan));
        self.end_of_verb(subject, watch)
    }

    /// Begins a verb and waits for its end, unless the disk does not support it.
    pub(super) fn do_verb(&mut self, step: Step, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        self.begin(step, subject);
        self.end_of_verb(subject, watch)
    }

    fn end_of_verb(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
        while let Some(verb) = &self.verb {
            let step = verb.plan.step();
            match self.can_proceed() {
                true => self.proceed(subject, watch)?,
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

    /// Whether the verb can continue.
    pub(super) fn can_proceed(&self) -> bool {
        let Some(verb) = &self.verb else { return false };
        match (&verb.phase, verb.plan.step()) {
            (Phase::Due, Some(plan::Step::CopyAll)) => self.disk.merge().is_none_or(|merge| !merge.busy),
            (Phase::Syncing, Some(plan::Step::AwaitClosed)) => self.are_closed() || !self.disk.is_syncing(),
            (Phase::Due | Phase::Flushed(_), _) => true,
            (Phase::CopyingUp(left, _), _) => *left == 0,
            (Phase::Mapping, _) => self.disk.is_map_settled(),
            (Phase::Draining | Phase::Ending, _) => self.disk.is_quiet(),
            (Phase::Syncing, _) => !self.disk.is_syncing() && self.disk.is_quiet(),
            (Phase::Forgetting(_, aside), _) => !aside.is_syncing() && aside.is_quiet(),
            (Phase::Flushing, _) => false,
        }
    }

    /// Continues until a step has to wait. `watch` is called after each step.
    pub(super) fn proceed(&mut self, subject: &Subject, watch: &mut Watch<'_>) -> Result<(), Violation> {
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

    fn carry_out(&mut self, step: plan::Step, verb: &mut ActiveVerb, subject: &Subject) -> Result<Ended, Violation> {
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
            ExtendMap { len } => return self.extend_map(len, &mut verb.phase),
            EndMap => return self.end_map(&mut verb.phase),
            SwitchMap => self.switch_map(&verb.new_file().below.clone(), subject)?,
            CreateMap | RemoveMap | MarkImage => unreachable!("a map is begun before the first request"),
            CreateChild { of, live } => verb.new = Some(self.create_child(of, live, subject)?),
            SyncNew => self.sync_new(verb),
            NameNew => self.name_new(verb, subject)?,
            SyncName => verb.new_mut().make_name_durable(),
            RemoveNew => self.remove_new(verb),
            RemoveSources => self.chains.truncate(1),
            // The disk is given the file when that becomes its leaf.
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
            Announce => self.guest_sectors = self.disk.geometry().len / SECTOR,
            BeginMerge { from, into } => self.disk.begin_merge(from, into).map_err(refused)?,
            CancelMerge => self.disk.cancel_merge(),
            // A write in flight may have found no space in the target.
            EndMerge if self.has_merge_failed() => return Ok(Ended::Badly),
            EndMerge => self.end_merge()?,
            LinkParent { .. } if verb.asked.is_move() => {
                let new = self.new_parent(verb, subject)?;
                self.set_parent(Some(new), subject)?;
            }
            LinkParent { child } => self.link_parent(child)?,
            RemoveParentLink => self.set_parent(None, subject)?,
            CreateCopy => verb.new = Some(self.create_copy()),
            ShareBlocks => self.share_blocks(verb),
        }
        Ok(Ended::Well)
    }

    /// Holds requests until nothing is in flight and, with `durable`, until everything is durable.
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

    /// Makes all changes durable by a flush, among those of the guest.
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

    /// Handles the response to that flush.
    pub(super) fn flushed(&mut self, status: Status) {
        let Some(verb) = &mut self.verb else { unreachable!("a flush belongs to a verb") };
        verb.phase = Phase::Flushed(status);
    }

    /// Waits for a round that makes the layers durable that are closed for writing.
    fn await_closed(&mut self, phase: &mut Phase) -> Ended {
        match phase {
            Phase::Due => {
                self.disk.sync(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                *phase = Phase::Syncing;
                Ended::NotYet
            }
            // A layer that cannot be made durable stays open for writing.
            _ if self.are_closed() || self.io.fault_happened() => Ended::Well,
            _ => Ended::Badly,
        }
    }

    fn are_closed(&self) -> bool {
        let below = self.chains.first().into_iter().flatten().skip(1);
        below.filter(|file| self.io.is_writable(**file)).all(|file| self.disk.is_frozen(*file))
    }

    /// The link that a child records for a layer, with the time of its last change if that is final.
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

    fn reopen_read_only(&mut self, verb: &mut ActiveVerb) {
        // Layers that the disk does not use yet were only going to be used.
        for (_, file) in std::mem::take(&mut verb.opened) {
            self.io.set_writable(file, false);
        }
        for file in self.chains.first().into_iter().flatten().skip(1) {
            if self.io.is_writable(*file) && self.disk.is_frozen(*file) {
                self.io.set_writable(*file, false);
                self.logs.close(*file);
            }
        }
    }

    /// Records the final time of the leaf's parent, which is no longer written to.
    fn record_parent_time(&mut self) -> Result<(), Violation> {
        self.switch_map_late()?;
        let Some(parent) = self.file_at(1).filter(|file| !self.io.is_writable(*file)) else { return Ok(()) };
        let modified = self.io.modified(parent);
        self.relink(0, |link| link.modified.is_none().then_some(disk::Link { modified: Some(modified), ..link }))
    }

    /// Changes the parent link of a layer, if it has one.
    fn relink(&mut self, depth: usize, change: impl FnOnce(disk::Link) -> Option<disk::Link>) -> Result<(), Violation> {
        let layer = self.disk.layer_mut(depth).map_err(refused)?;
        link::change(layer.inner_mut(), change).map(drop).map_err(refused)
    }

    fn read_only_down_to(&self, last: usize) -> Vec<(usize, FileId)> {
        let chain = self.chains.first().into_iter().flatten().copied().enumerate().take(last + 1);
        chain.filter(|(_, file)| !self.io.is_writable(*file)).collect()
    }

    /// Removes from the links of the opened layers, one after the other, what is about to change in their parents.
    fn forget_parents(&mut self, verb: &mut ActiveVerb, subject: &Subject) -> Result<Ended, Violation> {
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
            self.io.set_writable(file, true);
            aside.sync(&mut Aside { io: &mut self.io, file });
            verb.phase = Phase::Forgetting(nth, Box::new(aside));
            return Ok(Ended::NotYet);
        }
        Ok(Ended::Well)
    }

    /// Passes the completion of an auxiliary disk's operation on; returns others.
    pub(super) fn settle_aside(&mut self, done: FileDone) -> Option<FileDone> {
        if !aside::is_aside(&done.op) {
            return Some(done);
        }
        let Some(ActiveVerb { phase: Phase::Forgetting(_, aside), .. }) = &mut self.verb else {
            unreachable!("{:?} belongs to nobody", done.op)
        };
        if done.result.is_err() && matches!(done.op.action, Action::SyncData) {
            self.io.excuse_failed_sync();
        }
        let file = done.op.file;
        aside.settle(aside::own(done), &mut Aside { io: &mut self.io, file });
        None
    }

    /// Lets an auxiliary disk resubmit refused operations.
    pub(super) fn retry_aside(&mut self) {
        let Some(ActiveVerb { phase: Phase::Forgetting(nth, aside), opened, .. }) = &mut self.verb else { return };
        let Some(&(_, file)) = opened.get(*nth) else { unreachable!("the disk beside is of an opened layer") };
        aside.retry(&mut Aside { io: &mut self.io, file });
    }

    /// Lets the disk use the files that were opened for writing.
    fn use_writable(&mut self, opened: Vec<(usize, FileId)>, subject: &Subject) -> Result<(), Violation> {
        for (depth, file) in opened {
            let (image, log) = self.open(file, depth, subject)?;
            self.disk.reopen(depth, image).map_err(refused)?;
            self.disk.set_log(file, log).map_err(refused)?;
            self.io.set_writable(file, true);
        }
        Ok(())
    }

    /// Makes the disk larger, once.
    fn grow(&mut self, len: u64) -> Result<Ended, Violation> {
        match self.disk.grow(len) {
            // Not every format can grow.
            Err(error) if error.kind == ImageErrorKind::Unsupported => {
                self.disk.resume(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
                Ok(Ended::Well)
            }
            grown => grown.map(|()| Ended::Well).map_err(refused),
        }
    }

    /// Extends a raw file, whose length is only adjusted when it is opened.
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

    /// Removes the sources, which hold no data any more, from the chain. Their files still exist, so both chains are
    /// legal.
    fn end_merge(&mut self) -> Result<(), Violation> {
        let sources = self.disk.end_merge().map_err(refused)?;
        let old = self.chains.swap_remove(0);
        for layer in &sources {
            self.io.set_writable(layer.file, false);
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

    /// Opens a file for writing, for a layer at this depth.
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
