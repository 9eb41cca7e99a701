//! Carries out a plan on the disk of this process: for each [`plan::Step`], how it is done here.
//!
//! It knows nothing about clients or answers. The order of the steps is the plan's, and explored as it is
//! (`sim/src/run/steps.rs`). Nothing here blocks: work that may wait for storage is a [`BlockingTask`].
//!
//! With `--handed` a new file has its final name before it is created here. *If killed while it is created:* it is not
//! an image, and the disk was never switched to it: it may be removed.

use std::time::Duration;

use control::ImageName;
use disk::Format;
use plan::{Plan, Step};

use super::access::{self, Lowered, Raised, ReopenedLayer};
use super::blocking_task::BlockingTask;
use super::child::{Child, NewFile, Wanted};
use super::copying::Copying;
use super::merged::{self, Sources};
use super::pop::pop_to;
use super::reflink;
use super::work::{Lengthening, Quiesce, Work};
use crate::process::failure::Failure;
use crate::process::log::say;

/// A verb that is carried out.
#[derive(Debug)]
pub struct Driver {
    plan: Plan,
    phase: Phase,
    hands: Hands,
    /// The first step that has failed, and why.
    failed: Option<(Step, Failure)>,
}

/// What steps hand to later ones.
#[derive(Debug, Default)]
struct Hands {
    /// What the new file is called.
    to: Option<ImageName>,
    /// The new file, until it is the leaf, or all is done.
    new: Option<NewFile>,
    /// The layer that it is a child of.
    below: usize,
    /// The same file, open as the disk's own.
    child: Option<Box<Child>>,
    /// The time that making the new file took, and making it durable.
    took: (Duration, Duration),
    /// What removes the files of merged layers.
    remove_sources: Option<RemoveSources>,
    /// Layers whose files were opened for writing,
    opened: Vec<ReopenedLayer>,
    /// which have forgotten their parents' times.
    raised: Vec<Raised>,
    copying: Option<Copying>,
    /// The copying has begun.
    copies: bool,
    /// Requests were held.
    held: bool,
    sources: Sources,
    /// Their files are gone.
    removed: bool,
}

/// Removes files that are no longer needed.
struct RemoveSources(Box<dyn FnOnce() -> Result<(), Failure> + Send>);

/// How far a step has come.
#[derive(Debug)]
enum Phase {
    /// It is to be begun.
    Due,
    Quiescing(Quiesce),
    /// A flush of our own is under way.
    Flushing,
    /// A round is.
    Syncing,
    Background(BlockingTask<Result<Done, Failure>>),
    Lengthening(Lengthening),
}

/// What a background task has done.
#[derive(Debug)]
enum Done {
    New(NewFile),
    Child(NewFile, Box<Child>),
    Reopened(Lowered),
    Opened(Result<Vec<ReopenedLayer>, (Failure, Lowered)>),
    Forgotten(Result<Vec<Raised>, (Failure, Lowered)>),
    Removed(bool),
}

impl Driver {
    /// A verb that has not begun.
    pub fn new(plan: Plan) -> Driver {
        Driver { plan, phase: Phase::Due, hands: Hands::default(), failed: None }
    }

    /// The same for a verb that makes a file.
    pub fn making(to: &ImageName, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.hands.to = Some(to.clone());
        driver
    }

    /// The same for a verb that removes the files of merged layers.
    pub fn removing(remove: impl FnOnce() -> Result<(), Failure> + Send + 'static, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.hands.remove_sources = Some(RemoveSources(Box::new(remove)));
        driver
    }

    /// Goes on as far as it can without waiting; whether it has come to its end. If a step has failed, what can be
    /// taken back was taken back then.
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

    /// The same for a merge.
    pub fn copying(copying: Copying, plan: Plan) -> Driver {
        let mut driver = Driver::new(plan);
        driver.hands.copying = Some(copying);
        driver
    }

    /// The step that it is at.
    pub fn step(&self) -> Option<Step> {
        self.plan.step()
    }

    /// How far a merge has copied.
    pub fn progress(&self) -> &Copying {
        let Some(copying) = &self.hands.copying else { unreachable!("this is no merge") };
        copying
    }

    /// The same, to be told something.
    pub fn progress_mut(&mut self) -> &mut Copying {
        let Some(copying) = &mut self.hands.copying else { unreachable!("this is no merge") };
        copying
    }

    /// Whether a merge has begun to copy.
    pub fn has_begun_to_copy(&self) -> bool {
        self.hands.copies
    }

    /// Whether requests were held so far.
    pub fn has_held(&self) -> bool {
        self.hands.held
    }

    /// The layers that were merged.
    pub fn sources(&self) -> &Sources {
        &self.hands.sources
    }

    /// Whether their files were removed.
    pub fn has_removed(&self) -> bool {
        self.hands.removed
    }

    /// The time that making the new file took, and making it durable.
    pub fn took(&self) -> (Duration, Duration) {
        self.hands.took
    }

    /// The step that has failed.
    pub fn failed_at(&self) -> Option<Step> {
        self.failed.as_ref().map(|(step, _)| *step)
    }

    /// One step, as far as it comes; whether it is done.
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
            Step::RemoveNew => self.remove_new(),
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
                self.hands.copies = true;
            }
            Step::CancelMerge => work.disk.cancel_merge(),
            Step::EndMerge => self.hands.sources = merged::end(work)?,
            Step::LinkParent { child } => merged::link(child, work)?,
            Step::CopyUp | Step::RemoveParentLink | Step::SyncParents => unreachable!("no served disk is rebased"),
        }
        Ok(true)
    }

    /// What a background task has done, if it is back; `begin` begins it.
    fn background<W>(
        &mut self,
        work: &mut Work<'_>,
        begin: impl FnOnce(&mut Hands, &mut Work<'_>) -> Result<W, Failure>,
    ) -> Result<Option<Done>, Failure>
    where
        W: FnOnce() -> Result<Done, Failure> + Send + 'static,
    {
        let task = match std::mem::replace(&mut self.phase, Phase::Due) {
            Phase::Background(task) => task,
            _ => {
                let task = begin(&mut self.hands, work)?;
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
        self.hands.below = of;
        let created = self.background(work, |hands, work| {
            let wanted = Wanted::on(work, of, hands.to(), live)?;
            Ok(move || wanted.make().map(Done::New))
        });
        self.keep_for_later(created?)
    }

    /// One step of the new file, which is removed if that fails.
    fn change_new(
        &mut self,
        step: impl FnOnce(NewFile) -> Result<NewFile, Failure> + Send + 'static,
        work: &mut Work<'_>,
    ) -> Result<bool, Failure> {
        let changed = self.background(work, |hands, _| {
            let new = hands.take_new();
            Ok(move || step(new).map(Done::New))
        });
        self.keep_for_later(changed?)
    }

    fn keep_for_later(&mut self, done: Option<Done>) -> Result<bool, Failure> {
        let Some(Done::New(new)) = done else { return Ok(false) };
        self.hands.new = Some(new);
        Ok(true)
    }

    fn open_child(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let opened = self.background(work, |hands, work| {
            let (new, options) = (hands.take_new(), work.options()?);
            Ok(move || new.open(options).map(|(new, child)| Done::Child(new, Box::new(child))))
        });
        let Some(Done::Child(new, child)) = opened? else { return Ok(false) };
        self.hands.new = Some(new);
        child.fits_on(work.image(self.hands.below)?)?;
        self.hands.child = Some(child);
        Ok(true)
    }

    /// The new file is not used: it would be taken for the leaf.
    fn remove_new(&mut self) {
        self.hands.child = None;
        self.hands.new = None;
    }

    /// It stays, whatever fails from here on.
    fn keep_new(&mut self) {
        if let Some(new) = self.hands.new.take() {
            self.hands.took = new.keep();
        }
    }

    /// The disk stands still: the new file becomes its leaf.
    fn push_leaf(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        let Some(child) = self.hands.child.take() else { unreachable!("no file was created") };
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
        let made = self.background(work, |hands, work| {
            let (files, from, to) = (work.files.clone(), work.name(0)?, hands.to().clone());
            Ok(move || reflink::make(&files, &from, &to).map(Done::New))
        });
        self.keep_for_later(made?)
    }

    fn share_blocks(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let shared = self.background(work, |hands, work| {
            let (from, new) = (work.file(0)?.1.try_clone()?, hands.take_new());
            Ok(move || reflink::share(&from, new, "copy the disk").map(Done::New))
        });
        self.keep_for_later(shared?)
    }

    /// Holds requests until nothing is under way, or everything is durable as well.
    fn hold(&mut self, durable: bool, work: &mut Work<'_>) -> Result<bool, Failure> {
        let mut quiesce = match self.phase {
            Phase::Quiescing(quiesce) => quiesce,
            _ => Quiesce::default(),
        };
        self.hands.held = true;
        let held = if durable { quiesce.advance(work) } else { quiesce.is_quiet(work) };
        self.phase = Phase::Quiescing(quiesce);
        held
    }

    /// By a flush behind those of the guest; by a round, while a client has requests held, which would hold a flush of
    /// our own, too.
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

    /// A round makes the layers durable that are closed for writing, or cannot.
    fn await_closed(&mut self, work: &mut Work<'_>) -> bool {
        if !matches!(self.phase, Phase::Syncing) {
            work.disk.sync(work.engine);
            self.phase = Phase::Syncing;
        }
        let layers = work.disk.layers().iter().skip(1);
        let mut written = layers.filter(|layer| work.engine.file(layer.file).is_some_and(|file| file.options().write));
        written.all(|layer| work.disk.is_frozen(layer.file)) || !work.disk.is_syncing()
    }

    /// Opens the layers for reading only that are closed for writing and durable. The verb is done in either case, and
    /// nothing may make it look otherwise.
    fn reopen_read_only(&mut self, work: &mut Work<'_>) -> bool {
        let reopened = self.background(work, |hands, work| {
            let (closed, open): (Vec<_>, Vec<_>) =
                access::open(work)?.into_iter().partition(|layer| work.disk.is_frozen(layer.id()));
            for layer in open {
                say(format_args!("{} stays locked for writing: it could not be made durable", layer.path().display()));
            }
            // Those that the disk does not use were only to be.
            let (opened, raised) = (std::mem::take(&mut hands.opened), std::mem::take(&mut hands.raised));
            Ok(move || {
                let unused = access::take_back(raised).into_iter().chain(access::lower(opened));
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
        let removed = self.background(work, |hands, work| {
            let (files, remove) = (work.files.clone(), hands.remove_sources.take());
            let mut sources = hands.sources.take();
            Ok(move || match remove {
                Some(RemoveSources(remove)) => remove().map(|()| Done::Removed(true)),
                None => Ok(Done::Removed(sources.remove(&files))),
            })
        });
        let Some(Done::Removed(removed)) = removed? else { return Ok(false) };
        self.hands.removed = removed;
        Ok(true)
    }

    fn open_for_writing(&mut self, last: usize, work: &mut Work<'_>) -> Result<bool, Failure> {
        let opened = self.background(work, |_, work| {
            let closed = access::closed(work, last)?;
            Ok(move || Ok(Done::Opened(access::raise(closed))))
        });
        let Some(Done::Opened(opened)) = opened? else { return Ok(false) };
        self.hands.opened = all_or_none(opened, work)?;
        Ok(true)
    }

    fn forget_parents(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let forgotten = self.background(work, |hands, _| {
            let opened = std::mem::take(&mut hands.opened);
            Ok(move || Ok(Done::Forgotten(access::forget_parents(opened))))
        });
        let Some(Done::Forgotten(forgotten)) = forgotten? else { return Ok(false) };
        self.hands.raised = all_or_none(forgotten, work)?;
        Ok(true)
    }

    /// Nothing is in flight: the disk uses the files that were opened for writing.
    fn use_writable(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        for layer in std::mem::take(&mut self.hands.raised) {
            work.engine.replace(layer.id, layer.file)?;
            work.disk.reopen(layer.depth, layer.image)?;
            if let Some(log) = layer.log {
                work.disk.set_log(layer.id, log)?;
            }
        }
        Ok(())
    }
}

impl Hands {
    fn to(&self) -> &ImageName {
        let Some(to) = &self.to else { unreachable!("the verb makes no file") };
        to
    }

    fn take_new(&mut self) -> NewFile {
        let Some(new) = self.new.take() else { unreachable!("no file was created") };
        new
    }
}

/// Layers that were opened for writing; where that failed, they are all as they were.
fn all_or_none<T>(opened: Result<Vec<T>, (Failure, Lowered)>, work: &mut Work<'_>) -> Result<Vec<T>, Failure> {
    opened.map_err(|(refusal, lowered)| {
        access::put_back(lowered, work);
        refusal
    })
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
