//! Lanes: threads that do transfers for the thread that owns an engine, each with its own backend on the same files.
//!
//! Most of the cost of a request is its submission to the kernel, so submission is what lanes share. Everything else
//! stays with the owner, and an operation is complete when the owner reaps it: the disk above sees one engine. Syncs
//! and deallocations go through the owner's backend as well. A sync covers the writes completed by any backend: all
//! use the same open file description, so no write error is missed.
//!
//! **Distribution.** Operations go to the lane with the smallest backlog, a few at a time, so that lanes submit batches
//! too. If all have a large backlog, the owner does them itself. It also does the first of a batch itself while no lane
//! is busy: with few concurrent requests a disk is as fast as without lanes.
//!
//! **Waking.** Each thread sleeps only in its own backend ([`Bell`]).
//!
//! **Files.** The owner assigns ids and sends each change to the lanes, which apply it in the order of their queues.
//! The owner waits for that: no lane has a removed file open.
//!
//! A lane that cannot be started, or cannot apply a change, is ended; its operations are done by others. If the backend
//! of a lane fails, the engine fails.
//!
//! Invariants: an operation is in one backend, or in the queue to or from one lane; a lane never has more operations
//! than its depth, so queues are never full.

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
use crate::sync::WakeEvent;
use crate::{EngineError, ImageFile, thread};
pub(crate) use faults::Faults;
pub(crate) use lane::BELL;
use lane::{FromLane, LaneChange, LaneEnds, LaneShared, LaneStart, ToLane};

/// The maximum number of operations of one lane.
const DEPTH: usize = 128;

/// Queue entries in addition to operations: one change, as the owner waits for it before the next, and the stop.
const CHANGES: usize = 2;

/// Consecutive operations that go to one lane before another is chosen.
const RUN: u32 = 8;

/// Operations at the start of a batch that the owner does itself while no lane is busy: passing an operation on and
/// being woken for its result costs several times as much as doing a few, and takes longer.
const OWNER_RUN: u32 = 4;

/// A lane with this number of queued operations gets no more.
const BACKLOG_MAX: usize = 16;

/// Results taken from one lane at a time: the first are answered while there is still work in flight.
const RESULTS: usize = 8;

/// Sufficient for the frames of an engine, in a debug build as well.
const STACK: usize = 256 << 10;

/// The owner's side of a lane.
struct LaneHandle {
    to: Producer<ToLane>,
    from: Consumer<FromLane>,
    replies: Receiver<Result<(), EngineError>>,
    shared: Arc<LaneShared>,
    thread: JoinHandle<()>,
    /// Operations without a result.
    outstanding: usize,
    /// Set if something was pushed since its bell was rung.
    pushed: bool,
    /// It gets no more operations, and ends when none is outstanding.
    ending: bool,
    /// Operations since its start.
    count: u64,
}

impl LaneHandle {
    fn has_begun(&self) -> bool {
        matches!(self.shared.begun.get(), Some(Ok(_)))
    }

    fn has_room(&self) -> bool {
        !self.ending && self.outstanding < DEPTH
    }
}

/// All lanes of an engine.
pub(crate) struct Lanes {
    lanes: Vec<LaneHandle>,
    /// Wakes the owner.
    owner: Arc<Bell>,
    /// The lane that gets the next operations; `None`: the owner's backend.
    chosen: Option<usize>,
    /// Operations left before another choice.
    run: u32,
    /// Set if the next choice is the first of a batch.
    is_first: bool,
    /// Set if lanes also get the first operations of a batch.
    are_preferred: bool,
    /// Operations in lanes, by file.
    on_file: [usize; FILES_MAX],
    /// Operations handed back by lanes for which the owner's backend had no room.
    returned: VecDeque<FileOp>,
    /// Threads of ended lanes, which may still have files open.
    ending_threads: Vec<JoinHandle<()>>,
    /// Why lanes have failed.
    failures: Vec<String>,
    faults: Faults,
}

impl Lanes {
    /// Creates an empty set of lanes for the owner of this backend.
    pub(crate) fn new(backend: &mut Backend) -> Result<Lanes, EngineError> {
        let event = WakeEvent::new().map_err(|cause| EngineError::failed("create an eventfd", cause))?;
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
            returned: VecDeque::new(),
            ending_threads: Vec::new(),
            failures: Vec::new(),
            faults: Faults::default(),
        })
    }

    /// Injects faults into lanes that are started from now on.
    #[cfg(test)]
    pub(crate) fn set_faults(&mut self, faults: Faults) {
        self.faults = faults;
    }

    /// Starts one more lane, with the files and registered memory of this backend. It accepts operations once it has
    /// opened its own backend.
    pub(crate) fn start(&mut self, backend: &Backend) -> Result<(), EngineError> {
        let event = WakeEvent::new().map_err(|cause| EngineError::failed("create an eventfd", cause))?;
        let shared = Arc::new(LaneShared { bell: Bell::new(event), begun: OnceLock::new(), failed: OnceLock::new() });
        let (to, from_owner) = spsc::queue(DEPTH + CHANGES);
        let (to_owner, from) = spsc::queue(DEPTH);
        let (replies_of, replies) = channel();
        let ends = LaneEnds {
            from_owner,
            to_owner,
            replies: replies_of,
            shared: shared.clone(),
            owner: self.owner.clone(),
            faults: self.faults.clone(),
        };
        let files = (0..).map(FileId).take(FILES_MAX).filter_map(|id| Some((id, backend.file(id)?.shared())));
        let start =
            LaneStart { kind: backend.kind(), depth: DEPTH, files: files.collect(), memory: backend.registered() };
        let started = match self.faults.step() {
            Ok(()) => thread::spawn("lane", STACK, move || ends.run(start)),
            Err(errno) => Err(io::Error::from_raw_os_error(errno)),
        };
        let thread = started.map_err(|cause| EngineError::failed("start a thread", cause))?;
        let handle =
            LaneHandle { to, from, replies, shared, thread, outstanding: 0, pushed: false, ending: false, count: 0 };
        self.lanes.push(handle);
        Ok(())
    }

    /// Passes every transfer to a lane if one has room.
    pub(crate) fn prefer(&mut self) {
        self.are_preferred = true;
    }

    /// Waits until each lane accepts operations or has failed.
    pub(crate) fn wait_until_begun(&mut self) {
        self.change(|| LaneChange::Nothing);
    }

    /// Ends one lane once it has nothing in flight.
    pub(crate) fn end_one(&mut self) {
        if let Some(lane) = self.lanes.iter_mut().rfind(|lane| !lane.ending) {
            lane.ending = true;
        }
        self.run = 0;
        self.stop_drained();
    }

    /// The number of lanes, not counting those that are ending.
    pub(crate) fn count(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.ending).count()
    }

    /// Returns true if all lanes and their threads have ended, and nothing of theirs is left to process.
    pub(crate) fn have_ended(&mut self) -> bool {
        self.ending_threads.retain(|thread| !thread.is_finished());
        self.lanes.is_empty() && self.ending_threads.is_empty() && self.returned.is_empty() && self.failures.is_empty()
    }

    /// The number of operations passed to each lane since its start.
    pub(crate) fn operations(&self) -> Vec<u64> {
        self.lanes.iter().filter(|lane| !lane.ending).map(|lane| lane.count).collect()
    }

    /// The total CPU time of the lanes.
    pub(crate) fn time(&self) -> Duration {
        let clock = |lane: &LaneHandle| lane.shared.begun.get()?.as_ref().ok().copied()??.time();
        self.lanes.iter().filter_map(clock).sum()
    }

    /// Returns why a lane has failed, once for each.
    pub(crate) fn take_failure(&mut self) -> Option<String> {
        self.failures.pop()
    }

    /// Returns true if an operation on this file is in a lane.
    pub(crate) fn uses(&self, file: FileId) -> bool {
        self.on_file.get(usize::from(file.0)).is_some_and(|&count| count > 0)
            || self.returned.iter().any(|op| op.file == file)
    }

    /// Makes a file of the owner's backend, new or replaced, available to the lanes under its id.
    pub(crate) fn put(&mut self, id: FileId, file: &ImageFile) {
        self.change(|| LaneChange::Put(id, Box::new(file.shared())));
    }

    /// Closes a file that was removed from the owner's backend.
    pub(crate) fn remove(&mut self, id: FileId) {
        self.change(|| LaneChange::Remove(id));
    }

    /// Registers a buffer of the owner's backend with the lanes.
    pub(crate) fn register_memory(&mut self, buffer: &Arc<Buffer>) {
        self.change(|| LaneChange::Register(buffer.clone()));
    }

    /// Unregisters a buffer from the lanes.
    pub(crate) fn forget_memory(&mut self, buffer: &Arc<Buffer>) {
        self.change(|| LaneChange::Forget(buffer.clone()));
    }

    /// Applies a change in all lanes, and waits for them. They wait for storage no longer than the owner would in their
    /// place: while Linux AIO submits.
    fn change(&mut self, make: impl Fn() -> LaneChange) {
        for thread in self.ending_threads.drain(..) {
            // A panic of the thread has been reported already.
            thread.join().unwrap_or_default();
        }
        for lane in &mut self.lanes {
            lane.send_and_wake(ToLane::Change(make()));
        }
        for lane in &mut self.lanes {
            // Without a reply its thread has panicked.
            let replied = lane.replies.recv().unwrap_or_else(|_| Err(panicked()));
            if let Err(error) = replied {
                if !std::mem::replace(&mut lane.ending, true) {
                    self.failures.push(describe(&error));
                }
            }
        }
        self.run = 0;
        self.stop_drained();
    }

    /// Stops the ending lanes that have nothing in flight.
    fn stop_drained(&mut self) {
        for index in (0..self.lanes.len()).rev() {
            if self.lanes.get(index).is_some_and(|lane| lane.ending && lane.outstanding == 0) {
                let mut lane = self.lanes.swap_remove(index);
                lane.send_and_wake(ToLane::Stop);
                self.ending_threads.push(lane.thread);
                self.run = 0;
            }
        }
    }

    /// [`Io::push`], to a lane or to the owner's backend.
    #[inline]
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub(crate) fn push(&mut self, op: FileOp, backend: &mut Backend) -> Result<(), FileOp> {
        let is_transfer = matches!(op.action, Action::Read { .. } | Action::Write { .. });
        if !is_transfer || !self.returned.is_empty() {
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

    /// [`Io::reap`], from all lanes and from the owner's backend.
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

    /// The lane for the next operation; `None`: the owner's backend.
    #[inline]
    fn choose(&mut self) -> Option<&mut LaneHandle> {
        if self.run == 0 {
            self.begin_run();
        }
        self.run -= 1;
        self.lanes.get_mut(self.chosen?).filter(|lane| lane.has_room())
    }

    fn begin_run(&mut self) {
        let is_first = std::mem::replace(&mut self.is_first, false);
        if is_first && !self.are_preferred && self.lanes.iter().all(|lane| lane.outstanding == 0) {
            (self.chosen, self.run) = (None, OWNER_RUN);
            return;
        }
        let lanes = self.lanes.iter().zip(0..).filter(|(lane, _)| lane.has_room() && lane.has_begun());
        let backlogs = lanes.map(|(lane, index)| (lane.to.backlog(), lane.outstanding, index));
        let least = backlogs.min().filter(|&(backlog, ..)| backlog < BACKLOG_MAX);
        self.chosen = least.map(|(.., index)| index);
        self.run = RUN;
    }

    /// Wakes the lanes with new operations.
    fn ring_bells(&mut self) {
        for lane in self.lanes.iter_mut().filter(|lane| lane.pushed) {
            lane.pushed = false;
            lane.shared.bell.ring();
        }
        (self.run, self.is_first) = (0, true);
    }

    /// Takes results from the lanes.
    fn collect(&mut self, backend: &mut Backend, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let mut any_drained = false;
        for lane in &mut self.lanes {
            for _ in 0..RESULTS {
                let Some(result) = lane.from.pop() else { break };
                lane.outstanding -= 1;
                let file = match &result {
                    FromLane::Done(FileDone { op, .. }) | FromLane::Returned(op) => op.file,
                };
                if let Some(count) = self.on_file.get_mut(usize::from(file.0)) {
                    *count -= 1;
                }
                match result {
                    FromLane::Done(one) => done.push(one),
                    FromLane::Returned(op) => self.returned.push_back(op),
                }
            }
            if let Some(&EngineFailed { what, errno }) = lane.shared.failed.get() {
                return Err(EngineFailed { what, errno });
            }
            if let (false, Some(Err(refused))) = (lane.ending, lane.shared.begun.get()) {
                lane.ending = true;
                self.failures.push(describe(refused));
            }
            any_drained |= lane.ending && lane.outstanding == 0;
        }
        if any_drained {
            self.stop_drained();
        }
        while let Some(op) = self.returned.pop_front() {
            if let Err(op) = backend.push(op) {
                self.returned.push_front(op);
                break;
            }
        }
        Ok(())
    }

    /// Returns true if the owner may sleep: no lane has a result for it.
    fn may_sleep(&mut self) -> bool {
        let (owner, lanes) = (&self.owner, &mut self.lanes);
        owner.may_sleep(|| lanes.iter_mut().any(|lane| !lane.from.is_empty() || lane.shared.failed.get().is_some()))
    }
}

/// The text of an error with its causes and the remedy.
fn describe(error: &EngineError) -> String {
    let causes = std::iter::successors(std::error::Error::source(error), |cause| cause.source());
    let remedy = error.remedy().map_or_else(String::new, |remedy| format!("; {remedy}"));
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}")) + &remedy
}

fn panicked() -> EngineError {
    EngineError::failed("continue with a lane", io::Error::other("its thread has panicked"))
}

impl LaneHandle {
    fn push(&mut self, op: FileOp) {
        self.outstanding += 1;
        self.count += 1;
        self.pushed = true;
        self.send(ToLane::Op(op));
    }

    fn send_and_wake(&mut self, message: ToLane) {
        self.send(message);
        self.shared.bell.ring();
    }

    fn send(&mut self, message: ToLane) {
        if self.to.push(message).is_err() {
            unreachable!("the queue has room for all operations of a lane and a change");
        }
    }
}

impl Drop for Lanes {
    /// Waits for the threads, and thereby for their requests in the kernel.
    fn drop(&mut self) {
        for mut lane in self.lanes.drain(..) {
            lane.send_and_wake(ToLane::Stop);
            self.ending_threads.push(lane.thread);
        }
        for thread in self.ending_threads.drain(..) {
            thread.join().unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod test;
