//! The slab of operations in flight, sized once.
//!
//! Invariant: an operation stays in its slot, at the same address, from [`Flights::board`] until the
//! [`Flights::settle`] that ends it.

use disk::{FileDone, FileId, FileOp};

use crate::bounce::BouncePool;
use crate::flight::{Flight, Step, Terms};

/// The number of a slot, which the kernel carries as the name of a request.
pub(crate) type Slot = u32;

/// All operations in flight of one engine.
pub(crate) struct Flights {
    slots: Box<[Option<Flight>]>,
    free: Vec<Slot>,
    pool: BouncePool,
}

/// What a result has led to.
#[derive(Debug)]
pub(crate) enum Settled {
    /// The operation has ended and its slot is free.
    Done(FileDone),
    /// The next step is to be submitted.
    Again,
}

impl Flights {
    /// Room for `depth` operations.
    pub(crate) fn new(depth: Slot) -> Flights {
        let slots = (0..depth).map(|_| None).collect();
        Flights { slots, free: (0..depth).rev().collect(), pool: BouncePool::default() }
    }

    /// Takes `op` in, or hands it back when there is no room.
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `disk::Io::push`")]
    pub(crate) fn board(&mut self, op: FileOp, terms: Terms) -> Result<Slot, FileOp> {
        let Some(slot) = self.free.pop() else { return Err(op) };
        let flight = Flight::new(op, terms, &mut self.pool);
        match usize::try_from(slot).ok().and_then(|slot| self.slots.get_mut(slot)) {
            Some(place) => *place = Some(flight),
            None => unreachable!("the free list holds numbers of slots"),
        }
        Ok(slot)
    }

    /// The operation in `slot`, which must be one in flight.
    pub(crate) fn get(&self, slot: Slot) -> &Flight {
        match usize::try_from(slot).ok().and_then(|slot| self.slots.get(slot)) {
            Some(Some(flight)) => flight,
            _ => unreachable!("slot {slot} has nothing in flight"),
        }
    }

    /// What to submit for `slot`.
    pub(crate) fn step(&self, slot: Slot) -> (FileId, Step<'_>) {
        let flight = self.get(slot);
        (flight.op().file, flight.step())
    }

    /// Whether an operation on `file` is in flight.
    pub(crate) fn uses(&self, file: FileId) -> bool {
        self.slots.iter().flatten().any(|flight| flight.op().file == file)
    }

    /// Takes the kernel's result for `slot`.
    pub(crate) fn settle(&mut self, slot: Slot, result: i32) -> Settled {
        let place = match usize::try_from(slot).ok().and_then(|slot| self.slots.get_mut(slot)) {
            Some(place) => place,
            None => unreachable!("a result for slot {slot}, which does not exist"),
        };
        let Some(flight) = place else { unreachable!("a result for slot {slot}, which has nothing in flight") };
        // Where it lies: a flight is large, and most end here.
        let Some(result) = flight.settle(result, &mut self.pool) else { return Settled::Again };
        let Some(ended) = place.take() else { unreachable!("it was there a moment ago") };
        self.free.push(slot);
        Settled::Done(FileDone { op: ended.into_op(), result })
    }
}
