//! Damage to a qcow2 image, byte by byte.

use std::ops::Range;

/// The bytes of an image with refcounts of 16 bits.
pub struct Bytes(pub Vec<u8>);

/// "The refcount is one."
pub const COPIED: u64 = 1 << 63;

impl Bytes {
    pub fn u64(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.0[range(at, 8)].try_into().unwrap())
    }

    pub fn set_u64(&mut self, at: u64, value: u64) {
        self.0[range(at, 8)].copy_from_slice(&value.to_be_bytes());
    }

    fn u32(&self, at: u64) -> u32 {
        u32::from_be_bytes(self.0[range(at, 4)].try_into().unwrap())
    }

    pub fn cluster(&self) -> u64 {
        1 << self.u32(20)
    }

    pub fn len(&self) -> u64 {
        u64::try_from(self.0.len()).unwrap()
    }

    /// Where the first-level entry `index` is.
    pub fn l1(&self, index: u64) -> u64 {
        self.u64(40) + 8 * index
    }

    /// Bytes of a second-level entry: with subclusters it is as long again.
    fn l2_entry(&self) -> u64 {
        const EXTENDED: u64 = 1 << 4;
        if self.u64(72) & EXTENDED == 0 { 8 } else { 16 }
    }

    /// Where the second-level entry for a cluster of the disk is.
    pub fn l2(&self, cluster: u64) -> u64 {
        let per_table = self.cluster() / self.l2_entry();
        let table = self.u64(self.l1(cluster / per_table)) & 0x00ff_ffff_ffff_fe00;
        assert_ne!(table, 0);
        table + self.l2_entry() * (cluster % per_table)
    }

    /// The place of a cluster of the disk.
    pub fn place(&self, cluster: u64) -> u64 {
        self.u64(self.l2(cluster)) & 0x00ff_ffff_ffff_fe00
    }

    /// Where the refcount table is.
    pub fn refcount_table(&self) -> u64 {
        self.u64(48)
    }

    /// Where the first block of refcounts is.
    pub fn refcount_block(&self) -> u64 {
        self.u64(self.refcount_table())
    }

    pub fn refcount(&self, at: u64) -> u16 {
        let place = self.refcount_block() + at / self.cluster() * 2;
        u16::from_be_bytes(self.0[range(place, 2)].try_into().unwrap())
    }

    pub fn set_refcount(&mut self, at: u64, value: u16) {
        let place = self.refcount_block() + at / self.cluster() * 2;
        self.0[range(place, 2)].copy_from_slice(&value.to_be_bytes());
    }

    /// Sets or clears bits of a 64-bit field.
    pub fn flip(&mut self, at: u64, bits: u64) {
        self.set_u64(at, self.u64(at) ^ bits);
    }

    pub fn zero(&mut self, at: u64, len: u64) {
        self.0[range(at, len)].fill(0);
    }
}

fn range(at: u64, len: u64) -> Range<usize> {
    let at = usize::try_from(at).unwrap();
    at..at + usize::try_from(len).unwrap()
}
