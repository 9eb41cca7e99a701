//! A bounded queue from one thread to one other, without locks.
//!
//! Invariants: positions only grow; the places from `head` up to `tail` have a value and belong to the consumer, all
//! others are empty and belong to the producer. Each end is a value that only one thread can have, and is used through
//! `&mut`: there is one producer and one consumer.
//!
//! `tests/loom` has its tests, in every order that the memory model allows.

use super::sync::{Arc, AtomicUsize, Ordering, Place};

/// A position on a cache line of its own, and of the line that processors fetch along with it.
#[repr(align(128))]
struct Position(AtomicUsize);

struct Shared<T> {
    places: Box<[Place<Option<T>>]>,
    /// Values that were taken.
    head: Position,
    /// Values that were pushed.
    tail: Position,
}

// SAFETY: a place is used by the thread to which it belongs (the invariant of this file), and passes to the other one
// with a release of the position, which that one acquires. Values move between the threads, so they must be `Send`.
unsafe impl<T: Send> Sync for Shared<T> {}
// SAFETY: as above: what is left is dropped by the last of the two.
unsafe impl<T: Send> Send for Shared<T> {}

/// The end that pushes.
pub(crate) struct Producer<T> {
    shared: Arc<Shared<T>>,
    tail: usize,
    /// Where the consumer was when the queue last seemed full.
    head: usize,
}

/// The end that pops.
pub(crate) struct Consumer<T> {
    shared: Arc<Shared<T>>,
    head: usize,
    /// Where the producer was when the queue last seemed empty.
    tail: usize,
}

/// A queue with room for `capacity` values.
pub(crate) fn queue<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let places = (0..capacity.next_power_of_two()).map(|_| Place::default()).collect();
    let shared = Shared { places, head: Position(AtomicUsize::new(0)), tail: Position(AtomicUsize::new(0)) };
    let shared = Arc::new(shared);
    (Producer { shared: shared.clone(), tail: 0, head: 0 }, Consumer { shared, head: 0, tail: 0 })
}

impl<T> Shared<T> {
    /// The place of a position.
    #[inline(always)]
    fn place(&self, position: usize) -> &Place<Option<T>> {
        match self.places.get(position & (self.places.len() - 1)) {
            Some(place) => place,
            None => unreachable!("the number of places is a power of two"),
        }
    }
}

impl<T> Producer<T> {
    /// Adds a value, or hands it back if the queue is full.
    #[inline]
    pub(crate) fn push(&mut self, value: T) -> Result<(), T> {
        let room = self.shared.places.len();
        if self.tail.wrapping_sub(self.head) == room {
            // What the consumer did with the place before comes before what is done with it here.
            self.head = self.shared.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head) == room {
                return Err(value);
            }
        }
        // SAFETY: the place is at `tail`, and the queue is not full: it is empty and belongs to the producer.
        self.shared.place(self.tail).with_mut(|place| unsafe { place.write(Some(value)) });
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// How many values have not been taken yet.
    pub(crate) fn backlog(&self) -> usize {
        self.tail.wrapping_sub(self.shared.head.0.load(Ordering::Relaxed))
    }
}

impl<T> Consumer<T> {
    /// Takes the oldest value.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        // SAFETY: the place is before `tail`: it has a value and belongs to the consumer.
        let value = self.shared.place(self.head).with_mut(|place| unsafe { (*place).take() });
        self.head = self.head.wrapping_add(1);
        self.shared.head.0.store(self.head, Ordering::Release);
        value
    }

    /// Whether there is nothing to take.
    #[inline]
    pub(crate) fn is_empty(&mut self) -> bool {
        if self.head == self.tail {
            // What the producer has put into the place comes before what is done with it here.
            self.tail = self.shared.tail.0.load(Ordering::Acquire);
        }
        self.head == self.tail
    }
}
