//! The slab of operations in flight, with a fixed size.
//!
//! Invariant: an operation stays in its slot, at the same address, from [`FlightSlab::submit`] until the
//! [`FlightSlab::settle`] that ends it.

use disk::{Action, FileDone, FileId, FileOp};

use crate::bounce::BouncePool;
use crate::flight::{Flight, IoConstraints, IoStep};
use crate::nowait_backoff::Transfer;

/// The number of a slot, which the kernel carries as a request's user data.
pub(crate) type Slot = u32;

/// All operations in flight of one engine.
pub(crate) struct FlightSlab {
    slots: Box<[Flight]>,
    free: Vec<Slot>,
    pool: BouncePool,
}

/// The outcome of processing a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The operation has ended and its slot is free.
    Done,
    /// The next step must be submitted.
    Resubmit,
}

impl FlightSlab {
    /// A slab for `depth` operations.
    pub(crate) fn new(depth: Slot) -> FlightSlab {
        let slots = (0..depth).map(|_| Flight::empty()).collect();
        FlightSlab { slots, free: (0..depth).rev().collect(), pool: BouncePool::default() }
    }

    /// Takes in `op`, or hands it back if the slab is full.
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `disk::Io::push`")]
    #[inline(always)]
    pub(crate) fn submit(&mut self, op: FileOp, constraints: IoConstraints) -> Result<Slot, FileOp> {
        let Some(slot) = self.free.pop() else { return Err(op) };
        match usize::try_from(slot).ok().and_then(|slot| self.slots.get_mut(slot)) {
            Some(place) => place.begin(op, constraints, &mut self.pool),
            None => unreachable!("the free list holds numbers of slots"),
        }
        Ok(slot)
    }

    /// The operation in `slot`, which must be in flight.
    #[inline]
    fn get(&self, slot: Slot) -> (&FileOp, &Flight) {
        let place = usize::try_from(slot).ok().and_then(|slot| self.slots.get(slot));
        match place.and_then(|flight| Some((flight.op()?, flight))) {
            Some(found) => found,
            None => unreachable!("slot {slot} has nothing in flight"),
        }
    }

    /// The next request to submit for `slot`.
    #[inline]
    pub(crate) fn step(&self, slot: Slot) -> (FileId, IoStep<'_>) {
        let (op, flight) = self.get(slot);
        (op.file, flight.step())
    }

    /// The file of the operation in `slot`, and whether it is a write.
    pub(crate) fn transfer(&self, slot: Slot) -> Transfer {
        let (op, _) = self.get(slot);
        (op.file, matches!(op.action, Action::Write { .. }))
    }

    /// Whether an operation on `file` is in flight.
    pub(crate) fn uses(&self, file: FileId) -> bool {
        self.slots.iter().filter_map(Flight::op).any(|op| op.file == file)
    }

    /// Processes the kernel's result for `slot`; a finished operation goes to `done`.
    #[inline(always)]
    pub(crate) fn settle(&mut self, slot: Slot, result: i32, done: &mut Vec<FileDone>) -> Settled {
        let Some(flight) = usize::try_from(slot).ok().and_then(|slot| self.slots.get_mut(slot)) else {
            unreachable!("a result for slot {slot}, which does not exist")
        };
        let Some(result) = flight.settle(result, &mut self.pool) else { return Settled::Resubmit };
        done.push(FileDone { op: flight.end(), result });
        self.free.push(slot);
        Settled::Done
    }
}
