//! Lanes: threads that do transfers for the thread that owns an engine, each with a backend of its own on the same
//! files.
//!
//! Submitting an operation is most of what a request costs, and is the kernel's; so that is what is spread. Everything
//! else stays with the owner, and an operation is complete when the owner reaps it: for the disk above there is one
//! engine. Syncs and deallocations stay with the owner's backend as well. A sync covers what has completed, wherever
//! that was done: all backends have the same open file description, so that none misses a write error.
//!
//! **Spreading.** Operations go to the lane that is least behind, a few at a time, so that lanes submit batches too. If
//! all are behind, the owner does them itself; and the first of a batch, while no lane has anything: a disk with few
//! requests at once is as fast as without lanes.
//!
//! **Waking.** Nothing sleeps but in its own backend ([`Bell`]).
//!
//! **Files.** The owner decides on ids, and tells each lane, which applies the change in the order of its queue. The
//! owner waits for that: a file that was removed is not open in any lane.
//!
//! A lane that cannot be started, or cannot follow a change, is let go of, and what it had goes on without it. A lane
//! whose engine has failed is the failure of the engine.
//!
//! Invariants: an operation is in one backend, or in the queue to or from one lane; a lane never has more than its
//! depth, so that queues are never full.

mod faults;
mod lane;

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use disk::{Action, EngineFailed, FileDone, FileId, FileOp, Io, Until};
use memory::Buffer;

use crate::backend::Backend;
use crate::bell::Bell;
use crate::file_table::FILES_MAX;
use crate::spsc::{self, Consumer, Producer};
use crate::sync::Event;
use crate::{EngineError, ImageFile, thread};
pub(crate) use faults::Faults;
pub(crate) use lane::BELL;
use lane::{Change, Ends, FromLane, Shared, Start, ToLane};

/// Operations that one lane has at most.
const DEPTH: usize = 128;

/// Changes and the stop come in addition to operations; the owner waits for a change before the next.
const CHANGES: usize = 2;

/// Operations that go to one lane before another one is chosen.
const RUN: u32 = 8;

/// The first operations of a batch that the owner does itself while lanes have nothing: to pass one on and to be woken
/// for its result costs several times as much as a few operations do, and takes longer.
const OWN: u32 = 4;

/// A lane with so many operations that it has not even taken in is behind.
const BEHIND: usize = 16;

/// Results that are taken from one lane in one look: the first are answered while there is still work in flight.
const RESULTS: usize = 8;

/// What the frames of an engine need, in a build for tests as well.
const STACK: usize = 256 << 10;

/// A lane, as the owner sees it.
struct Handle {
    to: Producer<ToLane>,
    from: Consumer<FromLane>,
    replies: Receiver<Result<(), EngineError>>,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
    /// Operations that have not come back.
    outstanding: usize,
    /// Something was pushed since its bell was rung.
    pushed: bool,
    /// It gets no more operations, and ends when it has none.
    ending: bool,
    /// Operations that it got.
    count: u64,
}

impl Handle {
    fn has_begun(&self) -> bool {
        matches!(self.shared.begun.get(), Some(Ok(_)))
    }

    fn has_room(&self) -> bool {
        !self.ending && self.outstanding < DEPTH
    }
}

/// All lanes of an engine.
pub(crate) struct Lanes {
    lanes: Vec<Handle>,
    /// Wakes the owner.
    owner: Arc<Bell>,
    /// Which lane gets operations, and how many before another choice; `None`: the owner.
    chosen: Option<usize>,
    run: u32,
    /// Whether the next choice is the first since the last look.
    is_first: bool,
    /// Whether lanes get the first operations of a batch, too.
    are_preferred: bool,
    /// Operations in lanes, by file.
    on_file: [usize; FILES_MAX],
    /// What lanes have handed back and the owner's backend had no room for.
    back: VecDeque<FileOp>,
    /// Threads that have nothing more to do, but may still have files open.
    leaving: Vec<JoinHandle<()>>,
    /// Why lanes were let go of.
    troubles: Vec<String>,
    faults: Faults,
}

impl Lanes {
    /// No lanes yet, for the owner of this backend.
    pub(crate) fn new(backend: &mut Backend) -> Result<Lanes, EngineError> {
        let event = Event::new().map_err(|cause| EngineError::failed("create an eventfd", cause))?;
        let watched = backend.watch(event.as_fd(), false, BELL);
        watched.map_err(|cause| EngineError::failed("watch for results of lanes", cause))?;
        Ok(Lanes {
            lanes: Vec::new(),
            owner: Arc::new(Bell::new(event)),
            chosen: None,
            run: 0,
            is_first: true,
            are_preferred: false,
            on_file: [0; FILES_MAX],
            back: VecDeque::new(),
            leaving: Vec::new(),
            troubles: Vec::new(),
            faults: Faults::default(),
        })
    }

    /// Has lanes that are started from now on fail at some step.
    #[cfg(test)]
    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Starts one more lane, with the files and the memory of this backend. It takes operations when it has opened its
    /// own.
    pub(crate) fn start(&mut self, backend: &Backend) -> Result<(), EngineError> {
        let event = Event::new().map_err(|cause| EngineError::failed("create an eventfd", cause))?;
        let shared = Arc::new(Shared { bell: Bell::new(event), begun: OnceLock::new(), failed: OnceLock::new() });
        let (to, from_owner) = spsc::queue(DEPTH + CHANGES);
        let (to_owner, from) = spsc::queue(DEPTH);
        let (replies_of, replies) = channel();
        let ends = Ends {
            from_owner,
            to_owner,
            replies: replies_of,
            shared: shared.clone(),
            owner: self.owner.clone(),
            faults: self.faults.clone(),
        };
        let files = (0..).map(FileId).take(FILES_MAX).filter_map(|id| Some((id, backend.file(id)?.shared())));
        let start = Start { kind: backend.kind(), depth: DEPTH, files: files.collect(), memory: backend.registered() };
        let started = match self.faults.step() {
            Ok(()) => thread::spawn("lane", STACK, move || ends.run(start)),
            Err(errno) => Err(io::Error::from_raw_os_error(errno)),
        };
        let thread = started.map_err(|cause| EngineError::failed("start a thread", cause))?;
        let handle =
            Handle { to, from, replies, shared, thread, outstanding: 0, pushed: false, ending: false, count: 0 };
        self.lanes.push(handle);
        Ok(())
    }

    /// Has lanes get all that they can.
    pub(crate) fn prefer(&mut self) {
        self.are_preferred = true;
    }

    /// Waits until each lane takes operations, or cannot.
    pub(crate) fn wait_until_begun(&mut self) {
        self.change(|| Change::Nothing);
    }

    /// Ends one lane, when it has nothing in flight any more.
    pub(crate) fn end_one(&mut self) {
        if let Some(lane) = self.lanes.iter_mut().rfind(|lane| !lane.ending) {
            lane.ending = true;
        }
        self.run = 0;
        self.let_go();
    }

    /// How many there are, without those that are to end.
    pub(crate) fn count(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.ending).count()
    }

    /// Whether nothing is left of them.
    pub(crate) fn are_over(&mut self) -> bool {
        self.leaving.retain(|thread| !thread.is_finished());
        self.lanes.is_empty() && self.leaving.is_empty() && self.back.is_empty() && self.troubles.is_empty()
    }

    /// How many operations each has got.
    pub(crate) fn operations(&self) -> Vec<u64> {
        self.lanes.iter().filter(|lane| !lane.ending).map(|lane| lane.count).collect()
    }

    /// The processor time of all of them together.
    pub(crate) fn time(&self) -> Duration {
        let clock = |lane: &Handle| lane.shared.begun.get()?.as_ref().ok().copied()??.time();
        self.lanes.iter().filter_map(clock).sum()
    }

    /// Why one was let go of, if that was not asked for.
    pub(crate) fn take_trouble(&mut self) -> Option<String> {
        self.troubles.pop()
    }

    /// Whether an operation on this file is with a lane.
    pub(crate) fn uses(&self, file: FileId) -> bool {
        self.on_file.get(usize::from(file.0)).is_some_and(|&count| count > 0)
            || self.back.iter().any(|op| op.file == file)
    }

    /// The owner's backend has this file under this id now.
    pub(crate) fn put(&mut self, id: FileId, file: &ImageFile) {
        self.change(|| Change::Put(id, Box::new(file.shared())));
    }

    /// The owner's backend has no such file any more.
    pub(crate) fn remove(&mut self, id: FileId) {
        self.change(|| Change::Remove(id));
    }

    /// Has lanes register a buffer that the owner's backend has registered.
    pub(crate) fn register_memory(&mut self, buffer: &Arc<Buffer>) {
        self.change(|| Change::Register(buffer.clone()));
    }

    /// Has them unregister it.
    pub(crate) fn forget_memory(&mut self, buffer: &Arc<Buffer>) {
        self.change(|| Change::Forget(buffer.clone()));
    }

    /// Has all lanes apply a change, and waits for them. They wait for storage no more than the owner itself would in
    /// their place: while Linux AIO submits.
    fn change(&mut self, make: impl Fn() -> Change) {
        for thread in self.leaving.drain(..) {
            // It has nothing more to do, and a panic of it has been reported.
            thread.join().unwrap_or_default();
        }
        for lane in &mut self.lanes {
            lane.tell(ToLane::Change(make()));
        }
        for lane in &mut self.lanes {
            // Without a reply its thread has panicked.
            let replied = lane.replies.recv().unwrap_or_else(|_| Err(panicked()));
            if let Err(trouble) = replied {
                if !std::mem::replace(&mut lane.ending, true) {
                    self.troubles.push(in_words(&trouble));
                }
            }
        }
        self.run = 0;
        self.let_go();
    }

    /// Lets lanes go that are to end and have nothing in flight.
    fn let_go(&mut self) {
        for index in (0..self.lanes.len()).rev() {
            if self.lanes.get(index).is_some_and(|lane| lane.ending && lane.outstanding == 0) {
                let mut lane = self.lanes.swap_remove(index);
                lane.tell(ToLane::Stop);
                self.leaving.push(lane.thread);
                self.run = 0;
            }
        }
    }

    /// As [`Io::push`], to a lane or to the owner's backend.
    #[inline]
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub(crate) fn push(&mut self, op: FileOp, backend: &mut Backend) -> Result<(), FileOp> {
        let is_transfer = matches!(op.action, Action::Read { .. } | Action::Write { .. });
        if !is_transfer || !self.back.is_empty() {
            return backend.push(op);
        }
        let file = usize::from(op.file.0);
        let Some(lane) = self.choose() else { return backend.push(op) };
        lane.push(op);
        if let Some(count) = self.on_file.get_mut(file) {
            *count += 1;
        }
        Ok(())
    }

    /// As [`Io::reap`], of all lanes and of the owner's backend.
    pub(crate) fn reap(
        &mut self,
        until: Until,
        backend: &mut Backend,
        done: &mut Vec<FileDone>,
    ) -> Result<(), EngineFailed> {
        let before = done.len();
        self.ring_bells();
        if until == Until::Any {
            self.collect(backend, done)?;
        }
        let sleeps = until == Until::Any && done.len() == before && self.may_sleep();
        let reaped = backend.reap(if sleeps { Until::Any } else { Until::Now }, done);
        if sleeps {
            self.owner.awake();
        }
        backend.ignore_ready(BELL);
        reaped?;
        self.collect(backend, done)
    }

    /// The lane for the next operation, if one is to do it.
    #[inline]
    fn choose(&mut self) -> Option<&mut Handle> {
        if self.run == 0 {
            self.begin_run();
        }
        self.run -= 1;
        self.lanes.get_mut(self.chosen?).filter(|lane| lane.has_room())
    }

    fn begin_run(&mut self) {
        let is_first = std::mem::replace(&mut self.is_first, false);
        if is_first && !self.are_preferred && self.lanes.iter().all(|lane| lane.outstanding == 0) {
            (self.chosen, self.run) = (None, OWN);
            return;
        }
        let lanes = self.lanes.iter().zip(0..).filter(|(lane, _)| lane.has_room() && lane.has_begun());
        let backlogs = lanes.map(|(lane, index)| (lane.to.backlog(), lane.outstanding, index));
        let least = backlogs.min().filter(|&(backlog, ..)| backlog < BEHIND);
        self.chosen = least.map(|(.., index)| index);
        self.run = RUN;
    }

    /// Wakes lanes that have got something.
    fn ring_bells(&mut self) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.pushed) {
            lane.pushed = false;
            lane.shared.bell.ring();
        }
        (self.run, self.is_first) = (0, true);
    }

    /// Takes what lanes have done.
    fn collect(&mut self, backend: &mut Backend, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let mut lets_go = false;
        for lane in &mut self.lanes {
            for _ in 0..RESULTS {
                let Some(result) = lane.from.pop() else { break };
                lane.outstanding -= 1;
                let file = match &result {
                    FromLane::Done(FileDone { op, .. }) | FromLane::Back(op) => op.file,
                };
                if let Some(count) = self.on_file.get_mut(usize::from(file.0)) {
                    *count -= 1;
                }
                match result {
                    FromLane::Done(one) => done.push(one),
                    FromLane::Back(op) => self.back.push_back(op),
                }
            }
            if let Some(&EngineFailed { what, errno }) = lane.shared.failed.get() {
                return Err(EngineFailed { what, errno });
            }
            if let (false, Some(Err(refused))) = (lane.ending, lane.shared.begun.get()) {
                lane.ending = true;
                self.troubles.push(in_words(refused));
            }
            lets_go |= lane.ending && lane.outstanding == 0;
        }
        if lets_go {
            self.let_go();
        }
        while let Some(op) = self.back.pop_front() {
            if let Err(op) = backend.push(op) {
                self.back.push_front(op);
                break;
            }
        }
        Ok(())
    }

    /// Whether the owner may sleep: no lane has a result for it.
    fn may_sleep(&mut self) -> bool {
        let (owner, lanes) = (&self.owner, &mut self.lanes);
        owner.may_sleep(|| lanes.iter_mut().any(|lane| !lane.from.is_empty() || lane.shared.failed.get().is_some()))
    }
}

/// An error with its causes, and what can be done about it.
fn in_words(error: &EngineError) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let remedy = error.remedy().map_or_else(String::new, |remedy| format!("; {remedy}"));
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")) + &remedy
}

fn panicked() -> EngineError {
    EngineError::failed("go on with a lane", io::Error::other("its thread has panicked"))
}

impl Handle {
    fn push(&mut self, op: FileOp) {
        self.outstanding += 1;
        self.count += 1;
        self.pushed = true;
        self.send(ToLane::Op(op));
    }

    fn tell(&mut self, what: ToLane) {
        self.send(what);
        self.shared.bell.ring();
    }

    fn send(&mut self, what: ToLane) {
        if self.to.push(what).is_err() {
            unreachable!("there is room for what a lane may have at once");
        }
    }
}

impl Drop for Lanes {
    /// Waits for the threads, and with that for what they have in the kernel.
    fn drop(&mut self) {
        for mut lane in self.lanes.drain(..) {
            lane.tell(ToLane::Stop);
            self.leaving.push(lane.thread);
        }
        for thread in self.leaving.drain(..) {
            thread.join().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod test;
