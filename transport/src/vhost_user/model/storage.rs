//! The storage below the model's back-end: it completes late and in any order, fails, or is full; and operations in
//! flight when their process dies may be performed or not.
//!
//! It knows nothing about rings. Invariant: an operation accesses the disk's bytes once, when its outcome is decided;
//! the memory of a request is read or written then and not earlier.

use disk::{Operation, Request, Status};

use super::SECTORS;
use super::guest::content;

/// How an operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Successfully.
    Done,
    /// With an I/O error. A write may have happened completely all the same, or not at all.
    Failed { applied: bool },
    /// Without space; nothing was written.
    Full,
}

/// The outcome of operations in flight when their process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashOutcome {
    /// None is performed.
    Lost,
    /// All are performed.
    Done,
    /// According to the bits of a number, starting with the oldest.
    Mixed(u64),
}

impl CrashOutcome {
    /// Whether the operation at this position among those in flight is performed.
    pub fn is_done(self, place: usize) -> bool {
        match self {
            CrashOutcome::Lost => false,
            CrashOutcome::Done => true,
            CrashOutcome::Mixed(bits) => bits >> (place % 64) & 1 == 1,
        }
    }
}

/// The disk.
pub struct Storage {
    pub sectors: [Vec<u8>; SECTORS],
    /// Current versions, and those that a flush has made durable.
    there: [u64; SECTORS],
    pub durable: [u64; SECTORS],
}

impl Storage {
    pub fn new() -> Storage {
        let sectors = std::array::from_fn(|sector| content(sector as u64, 0));
        Storage { sectors, there: [0; SECTORS], durable: [0; SECTORS] }
    }

    /// Ends an operation, which gives its sector this version if it writes.
    pub fn end(&mut self, request: &Request, version: u64, end: Outcome) -> Status {
        let done = end == Outcome::Done;
        if done || end == (Outcome::Failed { applied: true }) {
            self.apply(request, version, done);
        }
        match end {
            Outcome::Done => Status::Done,
            Outcome::Failed { .. } => Status::Failed,
            Outcome::Full => Status::NoSpace,
        }
    }

    fn apply(&mut self, request: &Request, version: u64, done: bool) {
        let sector = (request.span().at / 512) as usize;
        match request.operation() {
            // The memory of a failed read has arbitrary contents.
            Operation::Read if !done => request.memory().copy_from(&[0x5a; 512]),
            Operation::Read => request.memory().copy_from(&self.sectors[sector]),
            Operation::Write { .. } => {
                self.sectors[sector] = request.memory().to_vec();
                self.there[sector] = version;
            }
            Operation::WriteZeroes { .. } => {
                self.sectors[sector] = vec![0; 512];
                self.there[sector] = version;
            }
            // A failed flush has made nothing reliably durable.
            _ if done => self.durable = self.there,
            _ => {}
        }
    }
}
