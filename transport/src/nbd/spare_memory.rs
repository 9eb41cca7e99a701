//! Memory of answered requests, kept for further requests of the same client.
//!
//! It is not zeroed: it holds data that this client has read or written, and a read replies with data only when all of
//! it has been filled (except by a disk without a file, which leaves memory as it is). Invariants: kept memory is a
//! buffer that nothing else refers to, and refers to nothing else; a connection keeps at most [`KEPT_MAX`] bytes, and
//! one that is idle for a while [`IDLE_MAX`].

use memory::Segments;

/// The maximum number of bytes kept. The kernel clears the pages of other memory one by one.
const KEPT_MAX: usize = 4 << 20;
/// The maximum kept when idle: enough for one request at a time. An idle disk is not woken to free less.
const IDLE_MAX: usize = 64 << 10;

/// The spare memory of one client.
#[derive(Debug, Default)]
pub(super) struct SpareMemory {
    kept: Vec<Segments>,
    bytes: usize,
}

impl SpareMemory {
    /// Page-aligned memory with undefined contents. It is reused only for the same length, as a client's requests
    /// mostly have one length; memory of another one is given up.
    pub(super) fn take(&mut self, len: usize) -> Segments {
        if self.kept.last().is_none_or(|last| last.len() != len) {
            (self.kept, self.bytes) = (Vec::new(), 0);
            return Segments::zeroed(len);
        }
        self.bytes -= len;
        self.kept.pop().unwrap_or_default()
    }

    /// Keeps `memory` if it is a buffer of its own, up to [`KEPT_MAX`] in total.
    pub(super) fn keep(&mut self, mut memory: Segments) {
        let len = memory.len();
        if self.bytes + len <= KEPT_MAX && memory.is_own_buffer() {
            self.bytes += len;
            self.kept.push(memory);
        }
    }

    /// Returns true if an idle client should not keep this amount.
    pub(super) fn exceeds_idle_max(&self) -> bool {
        self.bytes > IDLE_MAX
    }
}

#[cfg(test)]
mod test {
    use memory::PAGE;

    use super::*;

    #[test]
    fn memory_in_use_elsewhere_is_not_kept() {
        let mut spare = SpareMemory::default();
        let memory = Segments::zeroed(PAGE);
        let elsewhere = memory.clone();
        spare.keep(memory);
        assert!(spare.kept.is_empty());
        let base = elsewhere.parts()[0].base();
        spare.keep(elsewhere);
        assert_eq!(spare.take(PAGE).parts()[0].base(), base);
    }

    #[test]
    fn only_whole_buffers_of_the_same_length_are_reused() {
        let mut spare = SpareMemory::default();
        spare.keep(Segments::zeroed(512));
        spare.keep(Segments::zeroed(2 * PAGE).slice(512, PAGE));
        spare.keep(Segments::joined(vec![Segments::zeroed(PAGE)]));
        assert!(spare.kept.is_empty());
        spare.keep(Segments::zeroed(2 * PAGE));
        assert_eq!(spare.take(PAGE).len(), PAGE);
        assert_eq!(spare.bytes, 0, "of another length");
    }

    #[test]
    fn a_client_keeps_a_limited_amount() {
        let mut spare = SpareMemory::default();
        for _ in 0..=KEPT_MAX / PAGE {
            spare.keep(Segments::zeroed(PAGE));
        }
        assert_eq!(spare.bytes, KEPT_MAX);
        assert!(spare.exceeds_idle_max());
    }
}
