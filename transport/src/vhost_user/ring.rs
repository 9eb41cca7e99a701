//! A split virtqueue: takes heads of descriptor chains, writes used elements, and decides about notifications.
//!
//! It knows nothing about the meaning of a chain. Invariant: each field owned by the driver is read once per use, and
//! any contents lead to a value or a [`Broken`], in bounded time.
//!
//! Specification: virtio 1.2, 2.7 "Split Virtqueues".

use std::sync::atomic::{Ordering, fence};

use memory::{GuestAddr, Shared, Window};

use super::dirty_log::{Unlogged, UsedLog};
use super::inflight::RecordError;
use super::kill_point;
use super::message::VringAddr;
use super::table::MemoryTable;

/// The largest split ring (virtio 1.2, 2.7: "maximum Queue Size value is 32768").
pub const MAX_SIZE: u16 = 32768;

/// virtio 1.2, 2.7.6: the driver needs no interrupts (only without event indices).
const AVAIL_NO_INTERRUPT: u16 = 1;
/// virtio 1.2, 2.7.8: the device needs no notifications (only without event indices).
const USED_NO_NOTIFY: u16 = 1;

const FLAGS_AT: usize = 0;
const INDEX_AT: usize = 2;
const ENTRIES_AT: usize = 4;
const DESCRIPTOR_LEN: usize = 16;
const USED_LEN: usize = 8;

/// A protocol violation by the driver; the ring is no longer served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More requests made available than the ring has slots.
    #[error("the available index jumped from {from} to {to} in a ring of {size}")]
    IndexJump {
        /// The index up to which requests were taken.
        from: u16,
        /// The index written by the driver.
        to: u16,
        /// Slots in the ring.
        size: u16,
    },
    /// A head outside the descriptor table.
    #[error("descriptor {0} is outside of the descriptor table")]
    NoSuchDescriptor(u16),
    /// A chain that was made available again while in progress.
    #[error("the chain at descriptor {0} was made available a second time")]
    InUse(u16),
    /// A chain that is a loop or too long.
    #[error("the chain at descriptor {0} is a loop or longer than allowed")]
    TooLong(u16),
    /// A nested indirect table, one combined with `next`, an empty one, or one of an invalid size.
    #[error("the chain at descriptor {0} has a bad indirect table")]
    BadIndirect(u16),
    /// A readable descriptor after a writable one.
    #[error("the chain at descriptor {0} has its parts in the wrong order")]
    WrongOrder(u16),
    /// A chain without a byte for the status.
    #[error("the chain at descriptor {0} has no place for the status")]
    NoStatus(u16),
    /// The ring's memory is not accessible.
    #[error("the ring cannot be accessed")]
    OutOfBounds,
    /// The front-end's record of requests in flight does not fit this ring.
    #[error("the record of requests in flight is damaged: {0}")]
    Inflight(RecordError),
    /// A write to guest memory that the dirty log does not cover. The front-end is disconnected.
    #[error("the dirty log has no bit for guest memory at {:#x}", .0.0)]
    Unlogged(GuestAddr),
}

impl From<Unlogged> for Broken {
    fn from(Unlogged(addr): Unlogged) -> Broken {
        Broken::Unlogged(addr)
    }
}

/// One ring that is being served.
pub struct Ring {
    size: u16,
    /// Maps an index to its slot: sizes are powers of two.
    mask: u16,
    desc: Shared,
    avail: Shared,
    used: Shared,
    event_idx: bool,
    at: RingPosition,
    /// Notifications were requested from the driver.
    wants_kick: bool,
    /// The log of writes to the used ring.
    log: Option<UsedLog>,
}

/// The position of a ring, which is kept while its memory is removed.
#[derive(Clone, Copy)]
pub struct RingPosition {
    /// The index of the next available entry to read.
    next_avail: u16,
    /// The available index as last read.
    seen_avail: u16,
    /// The index of the next used element.
    next_used: u16,
    /// The used index visible to the driver.
    published: u16,
    /// No interrupt was sent yet, so the driver may be waiting for one that an earlier process has not sent.
    fresh: bool,
}

impl RingPosition {
    /// The index of the next available entry, at which a successor continues.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// The number of used elements that are not visible to the driver.
    pub fn unpublished(&self) -> u16 {
        self.next_used.wrapping_sub(self.published)
    }
}

impl Ring {
    /// The ring at `place`, continued at index `base`. `None` if it is not within the table or not aligned as required
    /// by virtio 1.2, 2.7.
    pub fn new(table: &MemoryTable, place: &VringAddr, size: u16, base: u16, event_idx: bool) -> Option<Ring> {
        let (_, _, used) = parts(table, place, size)?;
        // We continue at the used index last visible to the driver; `base` is the corresponding index of the other
        // ring.
        let used = used.load_u16(INDEX_AT)?;
        let at = RingPosition { next_avail: base, seen_avail: base, next_used: used, published: used, fresh: true };
        Ring::resume(table, place, size, at, event_idx)
    }

    /// The ring at `place`, continued at position `at`. `None` as for [`Ring::new`].
    pub fn resume(
        table: &MemoryTable,
        place: &VringAddr,
        size: u16,
        at: RingPosition,
        event_idx: bool,
    ) -> Option<Ring> {
        let (desc, avail, used) = parts(table, place, size)?;
        avail.load_u16(INDEX_AT)?;
        let mask = size.checked_sub(1)?;
        let mut ring = Ring { size, mask, desc, avail, used, event_idx, at, wants_kick: true, log: None };
        // Fails only if the write cannot be logged; there is no log yet, and `set_log` will log this write.
        ring.suppress_kicks().ok();
        Some(ring)
    }

    /// Sets the log of writes to the used ring. All of the ring is logged at once: it may have been written to before
    /// there was a log, or by a process that was killed before it logged the write.
    pub fn set_log(&mut self, log: Option<UsedLog>) -> Result<(), Broken> {
        self.log = log;
        #[cfg(test)]
        if kill_point::is_planted(kill_point::Bug::UsedRingNotLoggedAtStart) {
            return Ok(());
        }
        self.log_used(0, self.used.len())
    }

    /// Logs a write to the used ring.
    #[inline]
    fn log_used(&self, at: usize, len: usize) -> Result<(), Broken> {
        match &self.log {
            None => Ok(()),
            Some(log) => Ok(log.mark(at, len)?),
        }
    }

    /// The current position.
    pub fn position(&self) -> RingPosition {
        self.at
    }

    /// The index of the next used element.
    pub fn used(&self) -> u16 {
        self.at.next_used
    }

    /// The number of requests made available and not answered, according to the driver.
    pub fn unanswered(&self) -> Option<u16> {
        Some(self.avail.load_u16(INDEX_AT)?.wrapping_sub(self.at.next_used))
    }

    /// Continues at another index. Called before any chain is taken.
    pub fn continue_at(&mut self, next: u16) {
        (self.at.next_avail, self.at.seen_avail) = (next, next);
    }

    /// Moves the ring to another memory table, or to other addresses.
    pub fn move_to(&mut self, table: &MemoryTable, place: &VringAddr) -> Option<()> {
        (self.desc, self.avail, self.used) = parts(table, place, self.size)?;
        Some(())
    }

    /// The number of slots.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Takes the next available chain; returns its head.
    pub fn pop(&mut self) -> Result<Option<u16>, Broken> {
        if self.at.next_avail == self.at.seen_avail && !self.read_available()? {
            return Ok(None);
        }
        let entry = usize::from(self.at.next_avail & self.mask);
        let head = self.avail.load_u16(ENTRIES_AT + 2 * entry).ok_or(Broken::OutOfBounds)?;
        if head >= self.size {
            return Err(Broken::NoSuchDescriptor(head));
        }
        self.at.next_avail = self.at.next_avail.wrapping_add(1);
        if self.wants_kick {
            self.suppress_kicks()?;
        }
        Ok(Some(head))
    }

    /// Prefetches for the next chains while the current one is processed: the descriptor of the one after the next, and
    /// the memory to which the first descriptor of the next points. Values read here are hints, and read again later.
    #[inline]
    pub fn prefetch_next(&self, table: &MemoryTable) {
        let ahead = self.at.seen_avail.wrapping_sub(self.at.next_avail);
        let descriptor = |after: u16| {
            let entry = usize::from(self.at.next_avail.wrapping_add(after) & self.mask);
            self.avail.load_u16(ENTRIES_AT + 2 * entry).map(|head| DESCRIPTOR_LEN * usize::from(head))
        };
        if ahead > 1 {
            descriptor(1).iter().for_each(|&at| self.desc.prefetch(at));
        }
        if ahead > 0 {
            // A descriptor begins with its address.
            let first = descriptor(0).and_then(|at| self.desc.read::<8>(at)).map(u64::from_le_bytes);
            first.iter().for_each(|&address| table.prefetch(GuestAddr(address)));
        }
    }

    /// Reads the available index; returns true if there are new chains. The load is ordered before reads of data that
    /// the driver has written before the index.
    fn read_available(&mut self) -> Result<bool, Broken> {
        let to = self.avail.load_u16(INDEX_AT).ok_or(Broken::OutOfBounds)?;
        if to.wrapping_sub(self.at.next_avail) > self.size {
            return Err(Broken::IndexJump { from: self.at.next_avail, to, size: self.size });
        }
        self.at.seen_avail = to;
        Ok(to != self.at.next_avail)
    }

    /// A copy of descriptor `index` of the table: its bytes as a little-endian number.
    #[inline]
    pub fn descriptor(&self, index: u16) -> Result<u128, Broken> {
        if index >= self.size {
            return Err(Broken::NoSuchDescriptor(index));
        }
        self.desc.read_u128(DESCRIPTOR_LEN * usize::from(index)).ok_or(Broken::OutOfBounds)
    }

    /// Writes a used element, which is not visible to the driver before `publish`.
    pub fn push_used(&mut self, head: u16, written: u32) -> Result<(), Broken> {
        let entry = usize::from(self.at.next_used & self.mask);
        if kill_point::is_alive() {
            let place = self.used.window::<USED_LEN, 4>(ENTRIES_AT + USED_LEN * entry);
            let put = |place: Window<'_, USED_LEN, 4>| {
                place.store_u32(0, u32::from(head))?;
                place.store_u32(4, written)
            };
            place.and_then(put).ok_or(Broken::OutOfBounds)?;
        }
        self.log_used(ENTRIES_AT + USED_LEN * entry, USED_LEN)?;
        self.at.next_used = self.at.next_used.wrapping_add(1);
        Ok(())
    }

    /// Makes all used elements visible to the driver. Returns `true` if it must be interrupted.
    pub fn publish(&mut self) -> Result<bool, Broken> {
        let (old, new) = (self.at.published, self.at.next_used);
        if old == new {
            return Ok(false);
        }
        if kill_point::is_alive() {
            self.used.store_u16(INDEX_AT, new).ok_or(Broken::OutOfBounds)?;
        }
        self.at.published = new;
        self.log_used(INDEX_AT, 2)?;
        // virtio 1.2, 2.7.7.2: the index must be visible before we check whether an interrupt is wanted, or both sides
        // could miss each other.
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = self.avail.load_u16(ENTRIES_AT + 2 * usize::from(self.size)).ok_or(Broken::OutOfBounds)?;
            has_crossed(event, old, new)
        } else {
            let flags = self.avail.load_u16(FLAGS_AT).ok_or(Broken::OutOfBounds)?;
            flags & AVAIL_NO_INTERRUPT == 0
        };
        Ok(std::mem::take(&mut self.at.fresh) || wanted)
    }

    /// Requests a notification for the next request. A full barrier and [`Ring::is_empty`] must follow.
    pub fn request_kicks(&mut self) -> Result<(), Broken> {
        self.wants_kick = true;
        let (at, value) = if self.event_idx { (self.avail_event_at(), self.at.next_avail) } else { (FLAGS_AT, 0) };
        self.used.store_u16(at, value).ok_or(Broken::OutOfBounds)?;
        self.log_used(at, 2)
    }

    /// Returns true if all available chains were taken.
    pub fn is_empty(&mut self) -> Result<bool, Broken> {
        Ok(self.at.next_avail == self.at.seen_avail && !self.read_available()?)
    }

    /// Stops requesting notifications. With event indices there is nothing to do: the driver has passed the requested
    /// index, and will not cross it again for 65,536 requests.
    fn suppress_kicks(&mut self) -> Result<(), Broken> {
        self.wants_kick = false;
        if self.event_idx {
            return Ok(());
        }
        if self.used.store_u16(FLAGS_AT, USED_NO_NOTIFY).is_none() {
            // The driver notifies more often than necessary, which is harmless.
            self.wants_kick = true;
        }
        self.log_used(FLAGS_AT, 2)
    }

    fn avail_event_at(&self) -> usize {
        ENTRIES_AT + USED_LEN * usize::from(self.size)
    }
}

/// Returns true if an index has passed `event` on its way from `old` to `new` (virtio 1.2, 2.7.10, `vring_need_event`).
fn has_crossed(event: u16, old: u16, new: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Returns true if a ring is within the table and properly aligned.
pub fn is_reachable(table: &MemoryTable, place: &VringAddr, size: u16) -> bool {
    parts(table, place, size).is_some()
}

/// The three parts of a ring, including the event indices.
fn parts(table: &MemoryTable, place: &VringAddr, size: u16) -> Option<(Shared, Shared, Shared)> {
    let count = usize::from(size);
    let aligned = place.desc % 16 == 0 && place.avail % 2 == 0 && place.used % 4 == 0;
    if !aligned || !size.is_power_of_two() {
        return None;
    }
    let desc = table.ring(place.desc, DESCRIPTOR_LEN * count)?;
    let avail = table.ring(place.avail, ENTRIES_AT + 2 * count + 2)?;
    let used = table.ring(place.used, ENTRIES_AT + USED_LEN * count + 2)?;
    Some((desc, avail, used))
}

#[cfg(test)]
mod test {
    use std::os::fd::OwnedFd;

    use memory::GuestAddr;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::super::message::RegionInfo;
    use super::*;

    const SIZE: u16 = 8;
    const AVAIL: u64 = 0x400;
    const USED: u64 = 0x800;

    fn table() -> MemoryTable {
        let file: OwnedFd = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 4096).unwrap();
        MemoryTable::of(vec![(RegionInfo { guest: 0, len: 4096, peer: 0, offset: 0 }, file)]).unwrap()
    }

    fn place() -> VringAddr {
        VringAddr { queue: 0, flags: 0, desc: 0, used: USED, avail: AVAIL, log: 0 }
    }

    fn put(table: &MemoryTable, at: u64, value: u16) {
        let [low, high] = value.to_le_bytes();
        table.write_byte(GuestAddr(at), low).unwrap();
        table.write_byte(GuestAddr(at + 1), high).unwrap();
    }

    fn get(table: &MemoryTable, at: u64) -> u16 {
        u16::from_le_bytes(table.read(GuestAddr(at)).unwrap())
    }

    /// A ring whose two indices are both `base`.
    fn ring_at(table: &MemoryTable, base: u16, event_idx: bool) -> Ring {
        put(table, AVAIL + 2, base);
        put(table, USED + 2, base);
        Ring::new(table, &place(), SIZE, base, event_idx).unwrap()
    }

    #[test]
    fn an_event_is_crossed_exactly_when_it_is_within_the_advance() {
        // Every event around every short step at every start: this covers all wrap-arounds.
        for old in (0..=u16::MAX).step_by(257).chain([u16::MAX - 3, u16::MAX]) {
            for step in 0..=9 {
                for ahead in 0..=12 {
                    let (event, new) = (old.wrapping_add(ahead), old.wrapping_add(step));
                    assert_eq!(has_crossed(event, old, new), ahead < step, "{event} between {old} and {new}");
                }
                assert!(!has_crossed(old.wrapping_sub(1), old, old.wrapping_add(step)), "an earlier event");
            }
        }
    }

    #[test]
    fn indices_wrap_around() {
        let table = table();
        let mut ring = ring_at(&table, u16::MAX - 1, false);
        for (index, head) in [(u16::MAX - 1, 3), (u16::MAX, 5), (0, 7)] {
            put(&table, AVAIL + 4 + 2 * u64::from(index % SIZE), head);
            put(&table, AVAIL + 2, index.wrapping_add(1));
            assert_eq!(ring.pop(), Ok(Some(head)));
            ring.push_used(head, 1).unwrap();
        }
        assert_eq!(ring.pop(), Ok(None));
        assert_eq!(ring.publish(), Ok(true));
        assert_eq!(get(&table, USED + 2), 1);
        assert_eq!(ring.position().next_avail(), 1);
    }

    #[test]
    fn a_jump_of_the_available_index_breaks_the_ring() {
        let table = table();
        let mut ring = ring_at(&table, 100, false);
        put(&table, AVAIL + 2, 100 + SIZE);
        assert!(ring.pop().unwrap().is_some(), "a full ring is not a jump");
        let mut ring = ring_at(&table, 100, false);
        put(&table, AVAIL + 2, 101 + SIZE);
        assert_eq!(ring.pop(), Err(Broken::IndexJump { from: 100, to: 109, size: SIZE }));
        put(&table, AVAIL + 2, 99);
        assert_eq!(ring.pop(), Err(Broken::IndexJump { from: 100, to: 99, size: SIZE }));
    }

    #[test]
    fn the_driver_is_interrupted_when_its_event_is_passed() {
        let table = table();
        let used_event = AVAIL + 4 + 2 * u64::from(SIZE);
        let mut ring = ring_at(&table, 0, true);
        put(&table, used_event, 1000);
        ring.push_used(0, 1).unwrap();
        assert_eq!(ring.publish(), Ok(true), "always the first time");
        ring.push_used(1, 1).unwrap();
        assert_eq!(ring.publish(), Ok(false));
        put(&table, used_event, 3);
        ring.push_used(2, 1).unwrap();
        assert_eq!(ring.publish(), Ok(false));
        ring.push_used(3, 1).unwrap();
        assert_eq!(ring.publish(), Ok(true));
        assert_eq!(ring.publish(), Ok(false), "there is nothing to publish");
    }

    #[test]
    fn kicks_are_requested_only_before_sleeping() {
        let table = table();
        let mut ring = ring_at(&table, 0, false);
        assert_eq!(get(&table, USED), USED_NO_NOTIFY);
        ring.request_kicks().unwrap();
        assert_eq!(get(&table, USED), 0);
        put(&table, AVAIL + 2, 1);
        assert_eq!(ring.is_empty(), Ok(false));
        ring.pop().unwrap().unwrap();
        assert_eq!(get(&table, USED), USED_NO_NOTIFY);

        let mut ring = ring_at(&table, 7, true);
        ring.request_kicks().unwrap();
        assert_eq!(get(&table, USED + 4 + 8 * u64::from(SIZE)), 7, "avail_event");
    }

    #[test]
    fn a_ring_outside_memory_or_unaligned_is_none() {
        let table = table();
        let refused = |place: VringAddr| Ring::new(&table, &place, SIZE, 0, true).is_none();
        assert!(!refused(place()));
        assert!(refused(VringAddr { desc: 8, ..place() }));
        assert!(refused(VringAddr { avail: AVAIL + 1, ..place() }));
        assert!(refused(VringAddr { used: USED + 2, ..place() }));
        assert!(refused(VringAddr { used: 4096 - 64, ..place() }), "the event index is past the end");
        assert!(refused(VringAddr { desc: u64::MAX - 15, ..place() }));
        assert!(Ring::new(&table, &place(), 0, 0, true).is_none());
        assert!(Ring::new(&table, &place(), 6, 0, true).is_none());
    }
}
