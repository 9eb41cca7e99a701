//! The image of a disk: its initial contents, and the check of its changed sectors.
//!
//! It knows nothing about rings.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Size of every image: the RAM disks that the script creates.
pub const LEN: u64 = 8 << 20;

pub const SECTORS: u64 = LEN / 512;

/// A block device with a different number in every sector.
pub struct Image {
    pub path: PathBuf,
}

/// The initial contents of a sector.
pub fn sector(number: u64) -> [u8; 512] {
    let word = (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    std::array::from_fn(|at| word[at % 8])
}

/// The initial contents of a range of sectors.
pub fn sectors(range: Range<u64>) -> Vec<u8> {
    range.flat_map(sector).collect()
}

impl Image {
    pub fn filled(path: &Path) -> Image {
        let mut file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all(&sectors(0..SECTORS)).unwrap();
        file.sync_all().unwrap();
        Image { path: path.to_owned() }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        File::open(&self.path).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len() as u64, LEN);
        bytes
    }

    pub fn bytes_of(&self, range: Range<u64>) -> Vec<u8> {
        self.bytes()[range.start as usize * 512..range.end as usize * 512].to_vec()
    }

    /// Asserts that every sector outside `written` has its initial contents.
    pub fn assert_only_written(&self, written: &[Range<u64>]) {
        let bytes = self.bytes();
        let changed = (0..SECTORS).zip(bytes.chunks(512)).filter(|(number, bytes)| *bytes != sector(*number));
        let wrong: Vec<u64> = changed
            .map(|(number, _)| number)
            .filter(|number| !written.iter().any(|range| range.contains(number)))
            .collect();
        assert!(wrong.is_empty(), "sectors {:?}… have changed, {} of them", &wrong[..wrong.len().min(8)], wrong.len());
    }
}
