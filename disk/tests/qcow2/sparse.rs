//! A file of any length that is empty almost everywhere, and counts what is read from it.

use std::collections::BTreeMap;

use disk::{FileOffset, ReadFault, Source};

/// The file.
pub struct Sparse {
    pub len: u64,
    pub read: u64,
    words: BTreeMap<u64, u64>,
}

impl Sparse {
    /// A file with these 64-bit words at these offsets.
    pub fn new(len: u64, words: impl IntoIterator<Item = (u64, u64)>) -> Sparse {
        Sparse { len, read: 0, words: words.into_iter().collect() }
    }
}

impl Source for Sparse {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let at = at.0;
        let len = u64::try_from(bytes.len()).unwrap();
        assert!(at + len <= self.len);
        self.read += len;
        bytes.fill(0);
        for (&place, word) in self.words.range(at.saturating_sub(7)..at + len) {
            for (byte, value) in (place..).zip(word.to_be_bytes()) {
                if (at..at + len).contains(&byte) {
                    bytes[usize::try_from(byte - at).unwrap()] = value;
                }
            }
        }
        Ok(())
    }
}

/// The words of a header of version 3, with clusters of 64 KiB, a disk of 1 GiB, a first-level table in cluster 2 and a
/// refcount table in cluster 1.
pub fn header(l1_entries: u64) -> Vec<(u64, u64)> {
    vec![
        (0, 0x5146_49fb << 32 | 3),
        (16, 16),
        (24, 1 << 30),
        (32, l1_entries),
        (40, 0x2_0000),
        (48, 0x1_0000),
        (56, 1 << 32),
        (96, 4 << 32 | 104),
    ]
}
