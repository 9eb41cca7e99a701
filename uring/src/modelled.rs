//! An engine without I/O that completes operations after the time that a given device would take: for finding settings
//! for storage that is not available.
//!
//! Completion times come from a model ([`device::Device`]); until then the thread waits as with the io_uring engine. As
//! with [`crate::Null`], reads leave the memory as it is, and nothing is stored.
//!
//! Invariant: no operation completes before its time, and each completes once.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use device::{Device, Preset};
use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};

use crate::engine::slots;
use crate::{EngineError, ImageFile, Uring};

/// The last part of a wait is spent spinning: on most machines a sleep ends this much too late.
const SPIN: Duration = Duration::from_micros(30);

/// An engine over a model of a device.
pub struct Modelled {
    /// Waits for watched descriptors, and holds the files by id.
    pub(crate) wait: Uring,
    preset: Preset,
    device: Device,
    opened: Instant,
    in_flight: BinaryHeap<TimedOp>,
    depth: usize,
    /// Operations so far.
    count: u64,
    /// The maximum duration of the next sleep.
    sleep_limit: Option<Duration>,
}

/// An operation and its completion time. In the heap, the earliest is the greatest.
struct TimedOp {
    /// In nanoseconds since the engine was opened.
    due: u64,
    number: u64,
    op: FileOp,
}

impl Modelled {
    /// An engine for up to `depth` concurrent operations on `files`, which it never touches.
    pub fn open(preset: Preset, files: Vec<ImageFile>, depth: usize) -> Result<Modelled, EngineError> {
        slots(depth)?;
        Ok(Modelled {
            wait: Uring::open(files, 1)?,
            preset,
            device: Device::new(preset.spec()),
            opened: Instant::now(),
            in_flight: BinaryHeap::with_capacity(depth),
            depth,
            count: 0,
            sleep_limit: None,
        })
    }

    /// The kind of device that is modelled.
    pub fn preset(&self) -> Preset {
        self.preset
    }

    /// Limits the next sleep in [`Io::reap`], which then may return with no completion.
    pub fn limit_sleep(&mut self, most: Duration) {
        self.sleep_limit = Some(most);
    }

    /// Removes a file that has nothing in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.in_flight.iter().any(|timed| timed.op.file == id) {
            return Err(EngineError::FileBusy(id));
        }
        self.wait.remove(id)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Completes the operations that are due; returns the time until the next one is.
    fn take_due(&mut self, done: &mut Vec<FileDone>) -> Option<Duration> {
        let now = self.now();
        while let Some(next) = self.in_flight.peek() {
            if next.due > now {
                return Some(Duration::from_nanos(next.due - now));
            }
            done.extend(self.in_flight.pop().map(|TimedOp { op, .. }| FileDone { op, result: Ok(()) }));
        }
        None
    }
}

impl Io for Modelled {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.in_flight.len() >= self.depth {
            return Err(op);
        }
        let now = self.now();
        let due = match &op.action {
            Action::Read { at, into: memory } | Action::Write { at, from: memory } => {
                self.device.transfer(now, at.0, u64::try_from(memory.len()).unwrap_or(u64::MAX))
            }
            Action::SyncData => self.device.sync(now),
            Action::Deallocate { .. } => self.device.note(now),
        };
        self.count += 1;
        self.in_flight.push(TimedOp { due, number: self.count, op });
        Ok(())
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        let next = self.take_due(done);
        if until == Until::Now || done.len() > before {
            return self.wait.reap(Until::Now, done);
        }
        // It may return with nothing; the caller reaps again.
        let spins = next.is_some_and(|left| left <= SPIN);
        let sleep = next.map(|left| left.saturating_sub(SPIN));
        let limit = [sleep, self.sleep_limit.take()].into_iter().flatten().min();
        if spins {
            std::hint::spin_loop();
            self.wait.reap(Until::Now, done)?;
        } else {
            limit.into_iter().for_each(|limit| self.wait.limit_sleep(limit));
            self.wait.reap(Until::Any, done)?;
        }
        self.take_due(done);
        Ok(())
    }

    fn allocated(&mut self, _: FileId, _: FileOffset, len: u64) -> Allocation {
        Allocation::Data(len)
    }
}

impl PartialEq for TimedOp {
    fn eq(&self, other: &TimedOp) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for TimedOp {}

impl PartialOrd for TimedOp {
    fn partial_cmp(&self, other: &TimedOp) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for TimedOp {
    fn cmp(&self, other: &TimedOp) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}
