//! Storage below the model's back-end: it completes late and in any order, fails, is full, and what becomes of its
//! operations when the process dies that has begun them is any of both.
//!
//! Knows nothing of rings. Invariant: an operation touches a disk's bytes once, when it is decided how it ends; the
//! memory of a request is read or written then and not before.

use disk::{Operation, Request, Status};

use super::SECTORS;
use super::guest::content;

/// How an operation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Well.
    Done,
    /// With an I/O error. Of a write all may be there all the same, or nothing.
    Failed { applied: bool },
    /// Without space, and nothing is there.
    Full,
}

/// What becomes of operations under way when their process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// None is done.
    Lost,
    /// All are.
    Done,
    /// By the bits of a number, from the oldest on.
    Mixed(u64),
}

impl Fate {
    /// Whether the operation at this place among those under way is done.
    pub fn is_done(self, place: usize) -> bool {
        match self {
            Fate::Lost => false,
            Fate::Done => true,
            Fate::Mixed(bits) => bits >> (place % 64) & 1 == 1,
        }
    }
}

/// The disk.
pub struct Storage {
    pub sectors: [Vec<u8>; SECTORS],
    /// Versions that are there, and those that a flush has made durable.
    there: [u64; SECTORS],
    pub durable: [u64; SECTORS],
}

impl Storage {
    pub fn new() -> Storage {
        let sectors = std::array::from_fn(|sector| content(sector as u64, 0));
        Storage { sectors, there: [0; SECTORS], durable: [0; SECTORS] }
    }

    /// Ends an operation, which gives its sector this version if it writes.
    pub fn end(&mut self, request: &Request, version: u64, end: End) -> Status {
        let done = end == End::Done;
        if done || end == (End::Failed { applied: true }) {
            self.apply(request, version, done);
        }
        match end {
            End::Done => Status::Done,
            End::Failed { .. } => Status::Failed,
            End::Full => Status::NoSpace,
        }
    }

    fn apply(&mut self, request: &Request, version: u64, done: bool) {
        let sector = (request.span().at / 512) as usize;
        match request.operation() {
            // What a failed read has filled is anybody's guess.
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
            // A failed flush has made nothing durable that one could rely on.
            _ if done => self.durable = self.there,
            _ => {}
        }
    }
}
