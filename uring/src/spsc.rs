//! A bounded lock-free queue between two threads: a single producer and a single consumer.
//!
//! Invariants: positions only grow; the places from `head` up to `tail` have a value and belong to the consumer, all
//! others are empty and belong to the producer. Each end is a value that cannot be cloned and is used through `&mut`:
//! there is one producer and one consumer.
//!
//! `tests/loom` tests it under every interleaving that the memory model allows.

use super::sync::{Arc, AtomicUsize, Ordering, Place};

/// A position, alone in a pair of cache lines, as processors prefetch the adjacent line.
#[repr(align(128))]
struct Position(AtomicUsize);

struct SharedQueue<T> {
    places: Box<[Place<Option<T>>]>,
    /// The number of values popped so far.
    head: Position,
    /// The number of values pushed so far.
    tail: Position,
}

// SAFETY: a place is used only by the thread to which it belongs (the invariant of this file), and passes to the other
// with a release store of the position, which the other acquires. Values move between the threads, so they must be
// `Send`.
unsafe impl<T: Send> Sync for SharedQueue<T> {}
// SAFETY: as above; remaining values are dropped by the thread that drops the last end.
unsafe impl<T: Send> Send for SharedQueue<T> {}

/// The end that pushes.
pub(crate) struct Producer<T> {
    shared: Arc<SharedQueue<T>>,
    tail: usize,
    /// The consumer's position when the queue last seemed full.
    head: usize,
}

/// The end that pops.
pub(crate) struct Consumer<T> {
    shared: Arc<SharedQueue<T>>,
    head: usize,
    /// The producer's position when the queue last seemed empty.
    tail: usize,
}

/// A queue with room for at least `capacity` values.
pub(crate) fn queue<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let places = (0..capacity.next_power_of_two()).map(|_| Place::default()).collect();
    let shared = SharedQueue { places, head: Position(AtomicUsize::new(0)), tail: Position(AtomicUsize::new(0)) };
    let shared = Arc::new(shared);
    (Producer { shared: shared.clone(), tail: 0, head: 0 }, Consumer { shared, head: 0, tail: 0 })
}

impl<T> SharedQueue<T> {
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
            // Acquire: the consumer has finished with the place before it is written here.
            self.head = self.shared.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head) == room {
                return Err(value);
            }
        }
        // SAFETY: the place is at `tail` and the queue is not full: the place is empty and belongs to the producer.
        self.shared.place(self.tail).with_mut(|place| unsafe { place.write(Some(value)) });
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// The number of values not yet popped.
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

    #[inline]
    pub(crate) fn is_empty(&mut self) -> bool {
        if self.head == self.tail {
            // Acquire: the producer has filled the place before it is read here.
            self.tail = self.shared.tail.0.load(Ordering::Acquire);
        }
        self.head == self.tail
    }
}
