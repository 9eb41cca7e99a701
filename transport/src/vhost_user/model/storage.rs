//! The storage below the model's back-end: it completes operations late and in any order, fails, or is full. Operations
//! in flight when their process dies may or may not be performed.
//!
//! It knows nothing about rings. Invariant: an operation accesses the disk and the memory of its request once, when its
//! outcome is decided.

use disk::{Operation, Request, Status};

use super::SECTORS;
use super::guest::content;

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationOutcome {
    /// It succeeds.
    Done,
    /// It fails with an I/O error. If `applied`, a write has happened completely nevertheless, otherwise not at all.
    Failed { applied: bool },
    /// It fails for lack of space; nothing was written.
    Full,
}

/// The outcome of operations in flight when their process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashOutcome {
    /// None is performed.
    Lost,
    /// All are performed.
    Done,
    /// Operations with a set bit in this number are performed. The lowest bit is that of the oldest operation.
    Mixed(u64),
}

impl CrashOutcome {
    /// Returns true if the operation at this position among those in flight is performed.
    pub fn is_done(self, place: usize) -> bool {
        match self {
            CrashOutcome::Lost => false,
            CrashOutcome::Done => true,
            CrashOutcome::Mixed(bits) => bits >> (place % 64) & 1 == 1,
        }
    }
}

/// The contents of the disk.
pub struct Storage {
    pub sectors: [Vec<u8>; SECTORS],
    /// Current versions.
    current: [u64; SECTORS],
    /// Versions that a flush has made durable.
    pub durable: [u64; SECTORS],
}

impl Storage {
    pub fn new() -> Storage {
        let sectors = std::array::from_fn(|sector| content(sector as u64, 0));
        Storage { sectors, current: [0; SECTORS], durable: [0; SECTORS] }
    }

    /// Ends an operation with this outcome. A write gives its sector this version.
    pub fn end(&mut self, request: &Request, version: u64, end: OperationOutcome) -> Status {
        let done = end == OperationOutcome::Done;
        if done || end == (OperationOutcome::Failed { applied: true }) {
            self.apply(request, version, done);
        }
        match end {
            OperationOutcome::Done => Status::Done,
            OperationOutcome::Failed { .. } => Status::Failed,
            OperationOutcome::Full => Status::NoSpace,
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
                self.current[sector] = version;
            }
            Operation::WriteZeroes { .. } => {
                self.sectors[sector] = vec![0; 512];
                self.current[sector] = version;
            }
            // A failed flush makes nothing reliably durable.
            _ if done => self.durable = self.current,
            _ => {}
        }
    }
}
