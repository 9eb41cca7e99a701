//! An object that is read at any offset, in blocks that are kept for a while: the metadata of an image is read again
//! and again, and compressed clusters are much smaller than what is worth a request.
//!
//! Invariants: a block is requested once while it is kept, also if several threads need it; at most [`BLOCKS_MAX`]
//! blocks are kept, apart from those that are being read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::HttpError;
use crate::object::{FIRST, Object};

/// The size of a block: long enough that the time of a request does not matter, short enough for a table that is read
/// alone.
const BLOCK: u64 = FIRST;
/// Blocks that are kept: what a disk is read ahead by, and as many for metadata.
const BLOCKS_MAX: usize = 64;

/// A block.
#[derive(Debug)]
enum Block {
    /// Being read by a thread.
    Requested,
    /// Its bytes, and when it was last used.
    Here(Arc<[u8]>, u64),
}

#[derive(Debug, Default)]
struct Blocks {
    by_number: HashMap<u64, Block>,
    /// Counts uses.
    now: u64,
}

/// An object with its blocks. Several threads may read it.
#[derive(Debug)]
pub struct Reader {
    object: Object,
    blocks: Mutex<Blocks>,
    /// Signalled when a block is no longer being read.
    arrived: Condvar,
}

impl Reader {
    /// Reads an object whose first bytes are known already.
    pub fn new(object: Object, first: Vec<u8>) -> Reader {
        let mut blocks = Blocks::default();
        blocks.by_number.insert(0, Block::Here(first.into(), 0));
        Reader { object, blocks: Mutex::new(blocks), arrived: Condvar::new() }
    }

    /// The object that is read.
    pub fn object(&self) -> &Object {
        &self.object
    }

    /// Reads bytes within the object.
    pub fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<(), HttpError> {
        let (mut at, mut left) = (at, bytes);
        while !left.is_empty() {
            let block = self.block(at / BLOCK)?;
            let from = usize::try_from(at % BLOCK).unwrap_or(usize::MAX);
            let found = block.get(from..).unwrap_or_default();
            let len = found.len().min(left.len());
            let (now, later) = left.split_at_mut(len);
            now.copy_from_slice(found.get(..len).unwrap_or_default());
            if len == 0 {
                unreachable!("callers read within the object");
            }
            at += u64::try_from(len).unwrap_or(u64::MAX);
            left = later;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn block(&self, number: u64) -> Result<Arc<[u8]>, HttpError> {
        let mut blocks = self.lock();
        loop {
            blocks.now += 1;
            let now = blocks.now;
            match blocks.by_number.get_mut(&number) {
                None => break,
                Some(Block::Here(bytes, used)) => {
                    *used = now;
                    return Ok(Arc::clone(bytes));
                }
                Some(Block::Requested) => {
                    blocks = self.arrived.wait(blocks).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
        blocks.by_number.insert(number, Block::Requested);
        drop(blocks);
        let read = self.object.read(self.range(number)).map(Arc::<[u8]>::from);
        let mut blocks = self.lock();
        blocks.by_number.remove(&number);
        if let Ok(bytes) = &read {
            let now = blocks.now;
            blocks.by_number.insert(number, Block::Here(Arc::clone(bytes), now));
            blocks.shrink();
        }
        drop(blocks);
        self.arrived.notify_all();
        read
    }

    fn range(&self, number: u64) -> Range<u64> {
        let start = number.saturating_mul(BLOCK);
        start..start.saturating_add(BLOCK).min(self.object.size())
    }
}

impl Blocks {
    /// Drops the block that has not been used for the longest time, if there are too many.
    fn shrink(&mut self) {
        let kept = || {
            self.by_number.iter().filter_map(|(number, block)| match block {
                Block::Here(_, used) => Some((*used, *number)),
                Block::Requested => None,
            })
        };
        if kept().count() > BLOCKS_MAX {
            if let Some((_, oldest)) = kept().min() {
                self.by_number.remove(&oldest);
            }
        }
    }
}
