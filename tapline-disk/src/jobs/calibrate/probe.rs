//! Puts a load on storage: keeps its number of requests in flight for a while, shaped by a policy.
//!
//! It uses the same engine and shaping as a served disk, so the results apply to one.

use std::time::{Duration, Instant};

use control::ImageName;
use device::{Load, Pattern, Policy};
use disk::size::{in_memory, on_disk};
use disk::{Action, FileDone, FileId, FileOffset, FileOp, Io, OpId, ShapePolicy, Until};
use fastrand::Rng;
use memory::Segments;
use uring::Engine;

use crate::process::failure::Failure;
use crate::process::signals::Signal;

/// The byte that is written: not zero, because some storage does not store zeroes.
pub const BYTE: u8 = 0x54;

/// The storage to measure.
pub struct Probe<'a> {
    engine: Engine,
    name: &'a ImageName,
    /// Its size in bytes.
    len: u64,
    /// The duration of each measurement.
    pub each: Duration,
    stop: Signal,
    /// The number of the last request.
    last: u64,
    random: Rng,
    done: Vec<FileDone>,
}

impl Probe<'_> {
    /// Measures the first file of an engine.
    pub fn new(engine: Engine, name: &ImageName, len: u64, stop: Signal) -> Probe<'_> {
        let (each, random) = (Duration::ZERO, Rng::with_seed(1));
        Probe { engine, name, len, each, stop, last: 0, random, done: Vec::new() }
    }

    /// Returns the bytes per second that a load transfers under a policy.
    pub fn measure(&mut self, load: Load, policy: Policy) -> Result<u64, Failure> {
        self.engine.set_shape(ShapePolicy { split: policy.split, merge: policy.merge });
        let bytes = vec![BYTE; in_memory(load.size)];
        // Each slot has its own memory, and one request at a time.
        let memories: Vec<Segments> = (0..load.depth).map(|_| Segments::copy_of(&bytes)).collect();
        let mut free: Vec<usize> = (0..load.depth).collect();
        let (begun, mut moved) = (Instant::now(), 0);
        let mut refused = None;
        loop {
            let continues = begun.elapsed() < self.each;
            while refused.is_none() && (continues || moved == 0) {
                let Some((slot, memory)) = free.pop().and_then(|slot| Some((slot, memories.get(slot)?))) else { break };
                let op = self.op(load, slot, memory.clone());
                refused = self.engine.push(op).err();
            }
            if !continues && free.len() == load.depth {
                break;
            }
            moved += self.reap(load, &mut free)?;
            refused = refused.and_then(|op| self.engine.push(op).err());
        }
        let took = begun.elapsed().as_nanos().max(1);
        Ok(u64::try_from(u128::from(moved) * 1_000_000_000 / took).unwrap_or(u64::MAX))
    }

    /// Waits for requests to complete; returns their bytes.
    fn reap(&mut self, load: Load, free: &mut Vec<usize>) -> Result<u64, Failure> {
        let tried = || format!("{} {}", if load.write { "write next to" } else { "read" }, self.name);
        self.engine.reap(Until::Any, &mut self.done).map_err(|error| Failure::new(tried(), error))?;
        let mut moved = 0;
        let mut failed = None;
        for FileDone { op, result } in self.done.drain(..) {
            free.push(in_memory(op.id.0));
            match result {
                Ok(()) => moved += load.size,
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            return Err(Failure::new(tried(), error).advise("see the kernel log for the reason"));
        }
        match self.stop.take() {
            true => Err(Failure::new(format!("measure the storage of {}", self.name), "stopped by a signal")
                .advise("nothing was kept; run the command again")),
            false => Ok(moved),
        }
    }

    fn op(&mut self, load: Load, slot: usize, memory: Segments) -> FileOp {
        let count = (self.len / load.size).max(1);
        self.last = match load.pattern {
            Pattern::Sequential => (self.last + 1) % count,
            Pattern::Random => self.random.u64(..count),
        };
        let at = FileOffset(self.last * load.size);
        let action = match load.write {
            true => Action::Write { at, from: memory },
            false => Action::Read { at, into: memory },
        };
        FileOp { id: OpId(on_disk(slot)), file: FileId(0), action }
    }
}
