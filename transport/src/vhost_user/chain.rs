//! A flattened descriptor chain: the parts that the device reads, those that it writes, and the status byte.
//!
//! It knows nothing about requests. Invariant: walking ends after at most [`MAX_CHAIN`] descriptors, each copied once,
//! and the lists are built from those copies.
//!
//! Specification: virtio 1.2, 2.7.5 (descriptors) and 2.7.5.3 (indirect descriptors).

use memory::GuestAddr;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::message::RegionInfo;
use super::ring::{Broken, Ring};
use super::table::MemoryTable;

/// The maximum number of descriptors in one chain: more than we offer (`seg_max` is 126), and as many as `readv`
/// accepts; drivers may fill an indirect table beyond the size of the queue.
pub const MAX_CHAIN: u16 = 1024;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// One descriptor (virtio 1.2, 2.7.5).
#[repr(C)]
#[derive(Clone, Copy, FromBytes, Immutable, KnownLayout)]
struct Descriptor {
    addr: U64,
    len: U32,
    flags: U16,
    next: U16,
}
const _: () = assert!(size_of::<Descriptor>() == 16);

impl From<u128> for Descriptor {
    #[inline]
    fn from(number: u128) -> Descriptor {
        zerocopy::transmute!(number.to_le_bytes())
    }
}

/// A chain. It is reused to avoid an allocation per request.
#[derive(Default)]
pub struct Chain {
    /// The parts that the device reads.
    pub readable: Vec<(GuestAddr, u32)>,
    /// The parts that the device writes, without the status.
    pub writable: Vec<(GuestAddr, u32)>,
}

impl Chain {
    /// Walks the chain at `head`; returns the address of the status, the last writable byte.
    pub fn fill(&mut self, ring: &Ring, table: &MemoryTable, head: u16) -> Result<GuestAddr, Broken> {
        self.readable.clear();
        self.writable.clear();
        let mut index = head;
        for _ in 0..ring.size().min(MAX_CHAIN) {
            let found = Descriptor::from(ring.descriptor(index)?);
            if found.flags.get() & INDIRECT != 0 {
                // virtio 1.2, 2.7.5.3.1: not both flags; earlier descriptors in the chain are allowed.
                if found.flags.get() & NEXT != 0 {
                    return Err(Broken::BadIndirect(head));
                }
                self.fill_indirect(table, &found, head)?;
                return self.take_status(table, head);
            }
            self.add(&found, head)?;
            if found.flags.get() & NEXT == 0 {
                return self.take_status(table, head);
            }
            index = found.next.get();
        }
        Err(Broken::TooLong(head))
    }

    fn fill_indirect(&mut self, table: &MemoryTable, outer: &Descriptor, head: u16) -> Result<(), Broken> {
        let count = outer.len.get() / 16;
        if outer.len.get() % 16 != 0 || count == 0 {
            return Err(Broken::BadIndirect(head));
        }
        let mut index: u16 = 0;
        for _ in 0..MAX_CHAIN {
            let at = outer.addr.get().checked_add(16 * u64::from(index)).filter(|_| u32::from(index) < count);
            let Some(number) = at.and_then(|at| table.read_u128(GuestAddr(at))) else {
                // Kept for [`Chain::touches`].
                self.readable.push((GuestAddr(outer.addr.get()), outer.len.get()));
                return Err(Broken::BadIndirect(head));
            };
            let found = Descriptor::from(number);
            if found.flags.get() & INDIRECT != 0 {
                return Err(Broken::BadIndirect(head));
            }
            self.add(&found, head)?;
            if found.flags.get() & NEXT == 0 {
                return Ok(());
            }
            index = found.next.get();
        }
        Err(Broken::TooLong(head))
    }

    /// Returns true if a part that was walked and not consumed yet overlaps one of these regions.
    pub fn touches(&self, places: &[RegionInfo]) -> bool {
        let overlaps = |&(addr, len): &(GuestAddr, u32)| {
            let end = addr.0.saturating_add(u64::from(len));
            len > 0 && places.iter().any(|place| addr.0 < place.guest.saturating_add(place.len) && place.guest < end)
        };
        self.readable.iter().chain(&self.writable).any(overlaps)
    }

    fn add(&mut self, found: &Descriptor, head: u16) -> Result<(), Broken> {
        let part = (GuestAddr(found.addr.get()), found.len.get());
        if found.flags.get() & WRITE != 0 {
            self.writable.push(part);
        } else if self.writable.is_empty() {
            self.readable.push(part);
        } else {
            // virtio 1.2, 2.7.4.2: readable parts come first.
            return Err(Broken::WrongOrder(head));
        }
        Ok(())
    }

    /// Removes the last writable byte from the list (virtio 1.2, 5.2.6: the status is the final byte).
    fn take_status(&mut self, table: &MemoryTable, head: u16) -> Result<GuestAddr, Broken> {
        while let Some((addr, len)) = self.writable.pop() {
            let Some(rest) = len.checked_sub(1) else { continue };
            let status = addr.0.checked_add(u64::from(rest)).map(GuestAddr).filter(|&at| table.has(at));
            if rest > 0 || status.is_none() {
                self.writable.push((addr, rest.max(1)));
            }
            return status.ok_or(Broken::NoStatus(head));
        }
        Err(Broken::NoStatus(head))
    }
}
