//! Executes a plan on the disk of this process: defines for each [`plan::Step`] how it is done here.
//!
//! It knows nothing about clients or answers. The order of the steps comes from the plan, which is explored
//! exhaustively (`sim/src/run/steps.rs`). Nothing here blocks: work that may wait for storage is a [`BlockingTask`].
//!
//! With `--handed` a new file has its final name before it is created here. *If killed while it is created:* it is not
//! an image, and the disk has never used it: it may be removed.

mod maps;
mod writable;

pub use maps::not_tracked;

use std::time::Duration;

use control::ImageName;
use disk::Format;
use disk::changes::ChangeMap;
use plan::{Plan, Step};

use super::access::{self, Lowered, Raised, ReopenedLayer};
use super::blocking_task::BlockingTask;
use super::child::{Child, NewChild, NewFile};
use super::copying::Copying;
use super::merged::{self, Sources};
use super::pop::pop_to;
use super::reflink;
use super::work::{Lengthening, Quiesce, Work};
use crate::image::tracking::OpenMap;
use crate::process::failure::Failure;
use crate::process::log::say;

/// A verb that is being executed.
#[derive(Debug)]
pub struct Driver {
    plan: Plan,
    phase: Phase,
    results: StepResults,
    /// The first step that has failed, and why.
    failed: Option<(Step, Failure)>,
}

/// The results of steps that later steps need.
#[derive(Debug, Default)]
struct StepResults {
    /// The name of the new file.
    to: Option<ImageName>,
    /// The new file, until it is the leaf or the verb has ended.
    new: Option<NewFile>,
    /// The depth of its parent.
    below: usize,
    /// The same file, opened for the disk.
    child: Option<Box<Child>>,
    /// The time for creating the new file, and for making it durable.
    took: (Duration, Duration),
    /// Removes the files of merged layers.
    remove_sources: Option<RemoveSources>,
    /// Layers whose files were opened for writing.
    opened: Vec<ReopenedLayer>,
    /// Layers that have also dropped their parents' modification times.
    raised: Vec<Raised>,
    copying: Option<Copying>,
    /// Whether copying has begun.
    copies: bool,
    /// Whether requests were held.
    held: bool,
    sources: Sources,
    /// Whether the files of the sources were removed.
    removed: bool,
    map: maps::NewMap,
}

/// A function that removes files which are no longer needed.
struct RemoveSources(Box<dyn FnOnce() -> Result<(), Failure> + Send>);

/// The state of the current step.
#[derive(Debug)]
enum Phase {
    /// It has not begun.
    Due,
    Quiescing(Quiesce),
    /// A flush by this process is in flight.
    Flushing,
    /// The disk is being synced.
    Syncing,
    /// The map of changed blocks is being extended or ended.
    Mapping,
    Background(BlockingTask<Result<Done, Failure>>),
    Lengthening(Lengthening),
}

/// The result of a background task.
#[derive(Debug)]
enum Done {
    New(NewFile),
    Created(NewFile, Option<Box<OpenMap>>),
    Child(NewFile, Box<Child>),
    Reopened(Lowered),
    Opened(Result<Vec<ReopenedLayer>, (Failure, Lowered)>),
    Forgotten(Result<Vec<Raised>, (Failure, Lowered)>),
    Removed(bool),
    Map(Box<OpenMap>),
    Marked,
}

impl Driver {
    /// Makes a driver for a plan.
    pub fn new(plan: Plan) -> Driver {
        Driver { plan, phase: Phase::Due, results: StepResults::default(), failed: None }
    }

    /// Makes a driver for a verb that creates a file.
    pub fn making(to: &ImageName, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.results.to = Some(to.clone());
        driver
    }

    /// Makes a driver for a verb that removes the files of merged layers.
    pub fn removing(remove: impl FnOnce() -> Result<(), Failure> + Send + 'static, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.results.remove_sources = Some(RemoveSources(Box::new(remove)));
        driver
    }

    /// Continues without waiting; returns whether the plan has ended. If a step has failed, the steps that can be
    /// undone have been undone then.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        while let Some(step) = self.plan.step() {
            match self.carry_out(step, work) {
                Ok(false) => return Ok(false),
                Ok(true) => self.plan.done(),
                Err(refusal) => {
                    self.plan.fail();
                    self.failed.get_or_insert((step, refusal));
                }
            }
            self.phase = Phase::Due;
        }
        if let Some((_, refusal)) = &self.failed {
            return Err(refusal.clone());
        }
        self.keep_new();
        Ok(true)
    }

    /// Makes a driver for a merge.
    pub fn copying(copying: Copying, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.results.copying = Some(copying);
        driver
    }

    /// Returns the current step.
    pub fn step(&self) -> Option<Step> {
        self.plan.step()
    }

    /// Returns the copying of a merge.
    pub fn progress(&self) -> &Copying {
        let Some(copying) = &self.results.copying else { unreachable!("this is no merge") };
        copying
    }

    /// Returns the copying of a merge, to pause or cancel it.
    pub fn progress_mut(&mut self) -> &mut Copying {
        let Some(copying) = &mut self.results.copying else { unreachable!("this is no merge") };
        copying
    }

    /// Returns whether a merge has begun to copy.
    pub fn has_begun_to_copy(&self) -> bool {
        self.results.copies
    }

    /// Returns whether requests have been held.
    pub fn has_held(&self) -> bool {
        self.results.held
    }

    /// Returns the merged layers.
    pub fn sources(&self) -> &Sources {
        &self.results.sources
    }

    /// Returns whether their files were removed.
    pub fn has_removed(&self) -> bool {
        self.results.removed
    }

    /// Returns the time for creating the new file, and for making it durable.
    pub fn took(&self) -> (Duration, Duration) {
        self.results.took
    }

    /// Returns the first step that has failed.
    pub fn failed_at(&self) -> Option<Step> {
        self.failed.as_ref().map(|(step, _)| *step)
    }

    /// Executes a step, as far as possible without waiting; returns whether it is done.
    fn carry_out(&mut self, step: Step, work: &mut Work<'_>) -> Result<bool, Failure> {
        match step {
            Step::CreateChild { of, live } => return self.create_child(of, live, work),
            Step::CreateCopy => return self.create_copy(work),
            Step::ShareBlocks => return self.share_blocks(work),
            Step::SyncNew => return self.change_new(NewFile::sync, work),
            Step::NameNew => return self.change_new(NewFile::give_name, work),
            Step::SyncName => return self.change_new(NewFile::sync_name, work),
            Step::OpenChild => return self.open_child(work),
            Step::Hold | Step::HoldDurable => return self.hold(step == Step::HoldDurable, work),
            Step::MakeDurable => return self.make_durable(work),
            Step::AwaitClosed => return Ok(self.await_closed(work)),
            Step::ReopenReadOnly => return Ok(self.reopen_read_only(work)),
            Step::Lengthen { depth, len } => return self.lengthen(depth, len, work),
            Step::RemoveSources => return self.remove_sources(work),
            Step::ExtendMap { len } => return self.extend_map(len, work),
            Step::EndMap => return self.end_map(work),
            Step::CreateMap => return self.create_map(work),
            Step::MarkImage => return self.mark_image(work),
            Step::RemoveMap => self.remove_map(work),
            Step::SwitchMap => self.switch_map(work)?,
            Step::RemoveNew => {
                self.remove_new();
                self.remove_map(work);
            }
            Step::PushLeaf => self.push_leaf(work)?,
            Step::PopTo { depth } => pop_to(depth, work)?,
            Step::CloseForWriting => close_for_writing(work)?,
            Step::Release => work.let_go(),
            Step::RecordParentTime => work.record_time_of_parent(),
            Step::Grow { len } => work.disk.grow(len)?,
            Step::Announce => work.resized(),
            Step::OpenForWriting { last } => return self.open_for_writing(last, work),
            Step::ForgetParents => return self.forget_parents(work),
            Step::CopyAll => return self.progress_mut().advance(work),
            Step::ForgetParent => drop(access::forget(work.disk.layer_mut(0)?)?),
            Step::UseWritable => self.use_writable(work)?,
            Step::GrowLayer { depth, len } => work.disk.grow_layer(depth, len)?,
            Step::BeginMerge { from, into } => {
                work.disk.begin_merge(from, into)?;
                self.results.copies = true;
            }
            Step::CancelMerge => work.disk.cancel_merge(),
            Step::EndMerge => self.results.sources = merged::end(work)?,
            Step::LinkParent { child } => merged::link(child, work)?,
            Step::CopyUp | Step::RemoveParentLink | Step::SyncParents => unreachable!("no served disk is rebased"),
        }
        Ok(true)
    }

    /// Returns the result of the background task of a step, if it has ended; `begin` starts the task.
    fn background<W>(
        &mut self,
        work: &mut Work<'_>,
        begin: impl FnOnce(&mut StepResults, &mut Work<'_>) -> Result<W, Failure>,
    ) -> Result<Option<Done>, Failure>
    where
        W: FnOnce() -> Result<Done, Failure> + Send + 'static,
    {
        let task = match std::mem::replace(&mut self.phase, Phase::Due) {
            Phase::Background(task) => task,
            _ => {
                let task = begin(&mut self.results, work)?;
                work.send(task)?
            }
        };
        match work.fetch(task) {
            Ok(done) => done.map(Some),
            Err(task) => {
                self.phase = Phase::Background(task);
                Ok(None)
            }
        }
    }

    fn create_child(&mut self, of: usize, live: bool, work: &mut Work<'_>) -> Result<bool, Failure> {
        self.results.below = of;
        let created = self.background(work, |results, work| {
            let child = NewChild::on(work, of, results.to(), live)?;
            // Only a snapshot is taken of a live layer; other children are not written to by this disk.
            let map = if live { maps::ForChild::of(results, work)? } else { maps::ForChild::default() };
            Ok(move || {
                let mut new = child.make()?;
                let map = map.make(new.file_mut())?;
                Ok(Done::Created(new, map.map(Box::new)))
            })
        });
        let Some(Done::Created(new, map)) = created? else { return Ok(false) };
        self.results.new = Some(new);
        self.results.map.made(map);
        Ok(true)
    }

    /// Executes a step on the new file, which is removed if that fails.
    fn change_new(
        &mut self,
        step: impl FnOnce(NewFile) -> Result<NewFile, Failure> + Send + 'static,
        work: &mut Work<'_>,
    ) -> Result<bool, Failure> {
        let changed = self.background(work, |results, _| {
            let new = results.take_new();
            Ok(move || step(new).map(Done::New))
        });
        self.keep_for_later(changed?)
    }

    fn keep_for_later(&mut self, done: Option<Done>) -> Result<bool, Failure> {
        let Some(Done::New(new)) = done else { return Ok(false) };
        self.results.new = Some(new);
        Ok(true)
    }

    fn open_child(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let opened = self.background(work, |results, work| {
            let (new, options) = (results.take_new(), work.options()?);
            Ok(move || new.open(options).map(|(new, child)| Done::Child(new, Box::new(child))))
        });
        let Some(Done::Child(new, child)) = opened? else { return Ok(false) };
        self.results.new = Some(new);
        child.fits_on(work.image(self.results.below)?)?;
        self.results.child = Some(child);
        Ok(true)
    }

    /// Removes the new file, which would otherwise be mistaken for the leaf.
    fn remove_new(&mut self) {
        self.results.child = None;
        self.results.new = None;
    }

    /// Keeps the new file, even if later steps fail.
    fn keep_new(&mut self) {
        if let Some(new) = self.results.new.take() {
            self.results.took = new.keep();
        }
    }

    /// Makes the new file the leaf of the quiesced disk.
    fn push_leaf(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        let Some(child) = self.results.child.take() else { unreachable!("no file was created") };
        let Child { file, image, log } = *child;
        let new = work.engine.add(file)?;
        if let Err(error) = work.disk.push_leaf(new, image) {
            work.engine.remove(new)?;
            return Err(error.into());
        }
        self.keep_new();
        if let Some(log) = log {
            work.disk.set_log(new, log)?;
        }
        Ok(())
    }

    fn create_copy(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let made = self.background(work, |results, work| {
            let (files, from, to) = (work.files.clone(), work.name(0)?, results.to().clone());
            Ok(move || reflink::make(&files, &from, &to).map(Done::New))
        });
        self.keep_for_later(made?)
    }

    fn share_blocks(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let shared = self.background(work, |results, work| {
            let (from, new) = (work.file(0)?.1.try_clone()?, results.take_new());
            Ok(move || reflink::share(&from, new, "copy the disk").map(Done::New))
        });
        self.keep_for_later(shared?)
    }

    /// Holds requests until nothing is in flight, or everything is durable as well.
    fn hold(&mut self, durable: bool, work: &mut Work<'_>) -> Result<bool, Failure> {
        let mut quiesce = match self.phase {
            Phase::Quiescing(quiesce) => quiesce,
            _ => Quiesce::default(),
        };
        self.results.held = true;
        let held = if durable { quiesce.advance(work) } else { quiesce.is_quiet(work) };
        self.phase = Phase::Quiescing(quiesce);
        held
    }

    /// Makes everything durable: by a flush behind those of the guest, or while a client holds requests, which would
    /// hold a flush too, by a sync of the disk.
    fn make_durable(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        match self.phase {
            Phase::Flushing => work.is_flushed(),
            Phase::Syncing => work.is_synced(),
            _ if work.paused => {
                work.disk.sync(work.engine);
                self.phase = Phase::Syncing;
                work.is_synced()
            }
            _ => {
                work.begin_flush();
                self.phase = Phase::Flushing;
                work.is_flushed()
            }
        }
    }

    /// Waits until the layers that are closed for writing are durable, or cannot be made so.
    fn await_closed(&mut self, work: &mut Work<'_>) -> bool {
        if !matches!(self.phase, Phase::Syncing) {
            work.disk.sync(work.engine);
            self.phase = Phase::Syncing;
        }
        let layers = work.disk.layers().iter().skip(1);
        let mut written = layers.filter(|layer| work.engine.file(layer.file).is_some_and(|file| file.options().write));
        written.all(|layer| work.disk.is_frozen(layer.file)) || !work.disk.is_syncing()
    }

    /// Reopens the layers read-only that are closed for writing and durable. The verb succeeds in either case, so
    /// failures are only logged.
    fn reopen_read_only(&mut self, work: &mut Work<'_>) -> bool {
        let reopened = self.background(work, |results, work| {
            let (closed, open): (Vec<_>, Vec<_>) =
                access::open(work)?.into_iter().partition(|layer| work.disk.is_frozen(layer.id()));
            for layer in open {
                say(format_args!("{} stays locked for writing: it could not be made durable", layer.path().display()));
            }
            // These were opened for the disk, but are not used.
            let (opened, raised) = (std::mem::take(&mut results.opened), std::mem::take(&mut results.raised));
            let over = work.changes.kept(work.disk).and(work.disk.map()).and_then(ChangeMap::continues);
            Ok(move || {
                access::end_marks(&closed, over);
                let unused = access::reopen_read_only(raised).into_iter().chain(access::lower(opened));
                Ok(Done::Reopened(unused.chain(access::lower(closed)).collect()))
            })
        });
        match reopened {
            Ok(Some(Done::Reopened(lowered))) => access::put_back(lowered, work),
            Ok(_) => return false,
            Err(refusal) => say(format_args!("the layers below the leaf stay locked for writing: {}", refusal.what())),
        }
        true
    }

    fn lengthen(&mut self, depth: usize, len: u64, work: &mut Work<'_>) -> Result<bool, Failure> {
        let task = match std::mem::replace(&mut self.phase, Phase::Due) {
            Phase::Lengthening(task) => task,
            _ => match work.lengthen(depth, len)? {
                Some(task) => task,
                None => return Ok(true),
            },
        };
        match work.fetch(task) {
            Ok(ended) => work.lengthened(depth, len, ended).map(|()| true),
            Err(task) => {
                self.phase = Phase::Lengthening(task);
                Ok(false)
            }
        }
    }

    fn remove_sources(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let removed = self.background(work, |results, work| {
            let (files, remove) = (work.files.clone(), results.remove_sources.take());
            let mut sources = results.sources.take();
            Ok(move || match remove {
                Some(RemoveSources(remove)) => remove().map(|()| Done::Removed(true)),
                None => Ok(Done::Removed(sources.remove(&files))),
            })
        });
        let Some(Done::Removed(removed)) = removed? else { return Ok(false) };
        self.results.removed = removed;
        Ok(true)
    }
}

impl StepResults {
    fn to(&self) -> &ImageName {
        let Some(to) = &self.to else { unreachable!("the verb makes no file") };
        to
    }

    fn take_new(&mut self) -> NewFile {
        let Some(new) = self.new.take() else { unreachable!("no file was created") };
        new
    }
}

fn close_for_writing(work: &mut Work<'_>) -> Result<(), Failure> {
    for depth in 1..work.disk.layers().len() {
        if !work.image(depth)?.geometry().read_only {
            work.disk.freeze(depth)?;
        }
    }
    Ok(())
}

impl std::fmt::Debug for RemoveSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("RemoveSources")
    }
}
