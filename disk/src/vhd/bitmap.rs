//! The sector bitmap of one block: which of its sectors have been written. Most significant bit first
//! ("Block Allocation Table and Data Blocks").

/// One bit for each sector of a block, padded to whole sectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    bits: Box<[u8]>,
    sectors: u32,
}

impl Bitmap {
    /// A bitmap for `sectors` sectors in `len` bytes, all of them set or none.
    pub fn filled(sectors: u32, len: usize, set: bool) -> Bitmap {
        Bitmap { bits: vec![if set { 0xff } else { 0 }; len].into_boxed_slice(), sectors }
    }

    /// A bitmap as it stands in a file.
    pub fn from_bytes(sectors: u32, bytes: &[u8]) -> Bitmap {
        Bitmap { bits: bytes.into(), sectors }
    }

    /// As it stands in a file.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bits
    }

    fn get(&self, sector: u32) -> bool {
        let byte = usize::try_from(sector / 8).ok().and_then(|at| self.bits.get(at));
        byte.is_some_and(|byte| byte & (0x80 >> (sector % 8)) != 0)
    }

    /// Whether `sector` is set, and how many sectors from there on are like it, at most `count`.
    pub fn run(&self, sector: u32, count: u32) -> (bool, u32) {
        let limit = (sector + count).min(self.sectors);
        let set = self.get(sector);
        let whole = if set { 0xff } else { 0 };
        let mut at = sector;
        while at < limit {
            let byte = usize::try_from(at / 8).ok().and_then(|at| self.bits.get(at).copied());
            if at % 8 == 0 && limit - at >= 8 && byte == Some(whole) {
                at += 8;
            } else if self.get(at) == set {
                at += 1;
            } else {
                break;
            }
        }
        (set, at - sector)
    }

    /// Whether all of `count` sectors from `sector` on are set.
    pub fn all(&self, sector: u32, count: u32) -> bool {
        self.run(sector, count) == (true, count)
    }

    /// Whether every sector is set.
    pub fn is_full(&self) -> bool {
        self.all(0, self.sectors)
    }

    /// Whether no sector is set.
    pub fn is_empty(&self) -> bool {
        self.run(0, self.sectors) == (false, self.sectors)
    }

    /// Sets `count` sectors from `sector` on. Whether that changed anything.
    pub fn set(&mut self, sector: u32, count: u32) -> bool {
        let mut changed = false;
        for at in sector..(sector + count).min(self.sectors) {
            if let Some(byte) = usize::try_from(at / 8).ok().and_then(|at| self.bits.get_mut(at)) {
                let bit = 0x80 >> (at % 8);
                changed |= *byte & bit == 0;
                *byte |= bit;
            }
        }
        changed
    }

    /// Clears `count` sectors from `sector` on. Whether that changed anything.
    pub fn clear(&mut self, sector: u32, count: u32) -> bool {
        let mut changed = false;
        for at in sector..(sector + count).min(self.sectors) {
            if let Some(byte) = usize::try_from(at / 8).ok().and_then(|at| self.bits.get_mut(at)) {
                let bit = 0x80 >> (at % 8);
                changed |= *byte & bit != 0;
                *byte &= !bit;
            }
        }
        changed
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn first_sector_is_the_highest_bit() {
        let mut bitmap = Bitmap::filled(1024, 512, false);
        assert!(bitmap.set(0, 1) && bitmap.set(9, 2));
        assert_eq!(&bitmap.as_bytes()[..2], &[0x80, 0x60]);
        assert!(!bitmap.set(9, 2));
    }

    #[test]
    fn what_is_cleared_is_set_no_more() {
        let mut bitmap = Bitmap::filled(1024, 512, true);
        assert!(bitmap.clear(8, 9));
        assert_eq!(&bitmap.as_bytes()[..4], &[0xff, 0x00, 0x7f, 0xff]);
        assert!(!bitmap.clear(8, 9));
        assert!(!bitmap.is_empty());
        assert!(bitmap.clear(0, 4096));
        assert!(bitmap.is_empty());
    }

    #[test]
    fn runs_end_where_the_bit_changes_or_the_block_does() {
        let mut bitmap = Bitmap::filled(1024, 512, false);
        bitmap.set(3, 100);
        assert_eq!(bitmap.run(0, 1024), (false, 3));
        assert_eq!(bitmap.run(3, 1024), (true, 100));
        assert_eq!(bitmap.run(50, 10), (true, 10));
        assert_eq!(bitmap.run(103, 4096), (false, 921));
        assert!(!bitmap.is_full());
        assert!(Bitmap::filled(1024, 512, true).is_full());
    }
}
