//! Writes under way to places that readers do not see yet.

use rustc_hash::FxHashMap;

use super::layout::{Block, FileSector};
use super::space::Slot;
use crate::format::{Ticket, Wait};

/// Sectors of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// The block.
    pub block: Block,
    /// Its first sector that is written.
    pub from: u32,
    /// How many are.
    pub count: u32,
}

/// Reservations, by ticket, and the slots of blocks that are not in the table yet. Any number of blocks may be
/// on their way at once, each with any number of writes.
#[derive(Debug, Default)]
pub struct Pending {
    last: u64,
    writes: FxHashMap<Ticket, Write>,
    /// How many of them each block has.
    count: FxHashMap<Block, u32>,
    slots: FxHashMap<Block, Slot>,
}

impl Pending {
    /// The slot that a new block is to have: the one it was given before, or one from `take`.
    pub fn slot(&mut self, block: Block, take: impl FnOnce() -> Result<Slot, Wait>) -> Result<Slot, Wait> {
        if let Some(&slot) = self.slots.get(&block) {
            return Ok(slot);
        }
        let slot = take()?;
        self.slots.insert(block, slot);
        Ok(slot)
    }

    /// Begins a write.
    pub fn begin(&mut self, write: Write) -> Ticket {
        self.last = self.last.wrapping_add(1);
        let ticket = Ticket(self.last);
        self.writes.insert(ticket, write);
        let count = self.count.entry(write.block).or_default();
        *count += 1;
        ticket
    }

    /// Ends a write, well or not.
    pub fn end(&mut self, ticket: Ticket) -> Write {
        let Some(write) = self.writes.remove(&ticket) else { unreachable!("{ticket:?} has ended before") };
        let Some(count) = self.count.get_mut(&write.block) else { unreachable!("{ticket:?} was not counted") };
        *count -= 1;
        if *count == 0 {
            self.count.remove(&write.block);
        }
        write
    }

    /// The slot of a new block, which is now in the table.
    pub fn claim(&mut self, block: Block) -> Option<Slot> {
        self.slots.remove(&block)
    }

    /// The slots of all blocks that are not in the table yet.
    pub fn slots(&self) -> impl Iterator<Item = FileSector> + '_ {
        self.slots.values().map(|slot| slot.sector)
    }

    /// Whether a write to the block is under way.
    pub fn busy(&self, block: Block) -> bool {
        self.count.contains_key(&block)
    }

    /// The slot of a new block that no write is under way to any more.
    pub fn drop_if_idle(&mut self, block: Block) -> Option<Slot> {
        if self.busy(block) { None } else { self.slots.remove(&block) }
    }
}
