//! The engine that takes as long as a device of a kind would, and does nothing else: for trying what suits storage that
//! is not here.
//!
//! When an operation ends follows from the model alone ([`device::Device`]); in between the thread waits, as it does
//! with the io_uring engine. As with [`crate::Null`], reads leave the memory as it is, and nothing is stored.
//!
//! Invariant: no operation ends before its time, and each ends once.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use device::{Device, Preset};
use disk::{Action, Allocation, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};

use crate::engine::slots;
use crate::{EngineError, ImageFile, Uring};

/// A sleep ends so much too late on most machines: what is due earlier is waited for awake.
const AWAKE: Duration = Duration::from_micros(30);

/// An engine over a model of a device.
pub struct Modelled {
    /// For waiting, and to keep the files under their numbers.
    pub(crate) wait: Uring,
    preset: Preset,
    device: Device,
    begun: Instant,
    under_way: BinaryHeap<Timed>,
    depth: usize,
    /// Operations so far.
    count: u64,
    /// How long the next sleep may take.
    sleep_limit: Option<Duration>,
}

/// An operation, and when it ends. The first of them is the greatest.
struct Timed {
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
            begun: Instant::now(),
            under_way: BinaryHeap::with_capacity(depth),
            depth,
            count: 0,
            sleep_limit: None,
        })
    }

    /// What it is a model of.
    pub fn preset(&self) -> Preset {
        self.preset
    }

    /// The next sleep takes no longer than this; it may end with nothing.
    pub fn limit_sleep(&mut self, most: Duration) {
        self.sleep_limit = Some(most);
    }

    /// Removes a file that has nothing in flight.
    pub fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        if self.under_way.iter().any(|timed| timed.op.file == id) {
            return Err(EngineError::FileBusy(id));
        }
        self.wait.remove(id)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Takes what is due; the time until the next one, if there is one.
    fn take_due(&mut self, done: &mut Vec<FileDone>) -> Option<Duration> {
        let now = self.now();
        while let Some(next) = self.under_way.peek() {
            if next.due > now {
                return Some(Duration::from_nanos(next.due - now));
            }
            done.extend(self.under_way.pop().map(|Timed { op, .. }| FileDone { op, result: Ok(()) }));
        }
        None
    }
}

impl Io for Modelled {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.under_way.len() >= self.depth {
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
        self.under_way.push(Timed { due, number: self.count, op });
        Ok(())
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let before = done.len();
        let next = self.take_due(done);
        if until == Until::Now || done.len() > before {
            return self.wait.reap(Until::Now, done);
        }
        // It may end with nothing: then there is another one, and nothing was missed.
        let awake = next.is_some_and(|left| left <= AWAKE);
        let sleep = next.map(|left| left.saturating_sub(AWAKE));
        let limit = [sleep, self.sleep_limit.take()].into_iter().flatten().min();
        if awake {
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

impl PartialEq for Timed {
    fn eq(&self, other: &Timed) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Timed) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Timed) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}
