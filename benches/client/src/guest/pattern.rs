//! The content of disks: a function of the writer, the offset, and the number of the write.
//!
//! Every word depends on its offset, so that data of another disk, offset or write is recognized.

use std::io::{self, Write};

/// Size of every disk in bytes.
pub const SIZE: u64 = 64 << 20;

/// Size of the beginning of the golden image with data; the rest is empty.
pub const FULL: u64 = 32 << 20;

/// Size of a write in bytes.
pub const BLOCK: usize = 4096;

/// Offset at which real guests report their progress: after the golden image's data, and after the writes here.
pub const MARKER_AT: u64 = 48 << 20;

/// The content at an offset after `generation` writes; with zero, the golden image's.
pub fn fill(bytes: &mut [u8], at: u64, seed: u64, generation: u32) {
    for (word, place) in bytes.chunks_exact_mut(8).zip((at..).step_by(8)) {
        let value = match generation {
            0 if place >= FULL => 0,
            0 => mix(place),
            _ => mix(seed.wrapping_mul(0x1_0000_0001).wrapping_add(u64::from(generation)) ^ place.rotate_left(32)),
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Writes the golden image up to [`FULL`].
pub fn golden(to: &mut impl Write) -> io::Result<()> {
    let mut bytes = vec![0; 1 << 20];
    for at in (0..FULL).step_by(bytes.len()) {
        fill(&mut bytes, at, 0, 0);
        to.write_all(&bytes)?;
    }
    to.flush()
}

/// A block that consists of a repeated line.
pub fn lines(line: &str) -> Vec<u8> {
    format!("{line}\n").into_bytes().into_iter().cycle().take(BLOCK).collect()
}

/// The finalizer of SplitMix64, which mixes a word.
pub fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod test {
    use super::*;

    fn filled(at: u64, seed: u64, generation: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        fill(&mut bytes, at, seed, generation);
        bytes
    }

    #[test]
    fn content_depends_on_disk_offset_and_generation() {
        let one = filled(8192, 1, 1);
        for other in [filled(12288, 1, 1), filled(8192, 2, 1), filled(8192, 1, 2), filled(8192, 1, 0)] {
            assert!(one != other);
        }
        assert!(filled(8192, 1, 0) == filled(8192, 2, 0));
        assert_eq!(filled(FULL, 1, 0), vec![0; BLOCK]);
        assert_eq!(&lines("ab")[..7], b"ab\nab\na");
    }
}
