//! Operations for which the engine had no room, in the order in which they came.

use std::collections::VecDeque;

use crate::io::{FileId, FileOp, Io};

/// They go before everything that comes after them.
#[derive(Debug, Default)]
pub struct Backlog(VecDeque<FileOp>);

impl Backlog {
    /// Whether there are none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether one of them is on `file`.
    pub fn uses(&self, file: FileId) -> bool {
        self.0.iter().any(|op| op.file == file)
    }

    /// Hands an operation to the engine, behind those that are here.
    #[inline(always)]
    pub fn push(&mut self, op: FileOp, io: &mut impl Io) {
        if !self.0.is_empty() {
            self.0.push_back(op);
        } else if let Err(op) = io.push(op) {
            self.0.push_back(op);
        }
    }

    /// Puts an operation behind all others.
    pub fn add(&mut self, op: FileOp) {
        self.0.push_back(op);
    }

    /// Takes the last one back.
    pub fn take_last(&mut self) -> Option<FileOp> {
        self.0.pop_back()
    }

    /// Hands the engine what it has room for now.
    pub fn retry(&mut self, io: &mut impl Io) {
        while let Some(op) = self.0.pop_front() {
            if let Err(op) = io.push(op) {
                self.0.push_front(op);
                return;
            }
        }
    }
}
