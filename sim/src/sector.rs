//! The content of one 512-byte sector, small enough to keep millions of them.
//!
//! A simulated guest writes one 64-bit word repeatedly: the word names the writer, so that a sector that is read shows
//! which version of which sector it is. A partial write leaves several words in a sector. Metadata is kept byte for
//! byte.
//!
//! Invariant: two contents are equal exactly when their bytes are.

use std::hash::Hasher;
use std::sync::Arc;

use memory::Segments;
use rustc_hash::FxHasher;

/// Bytes in a sector.
pub const SECTOR: u64 = 512;
/// The same as a length of memory.
pub const SECTOR_LEN: usize = 512;
/// Parts of a sector that a guest can write separately.
pub const PARTS: u64 = 4;
/// The same as a length of a list.
const PARTS_LEN: usize = 4;
/// Bytes in a part.
pub const PART: u64 = SECTOR / PARTS;
/// The same as a length of memory.
const PART_LEN: usize = SECTOR_LEN / PARTS_LEN;

/// One sector's bytes.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Sector {
    /// This word, little-endian, 64 times.
    Word(Word),
    /// Any other content.
    Bytes(Arc<[u8; SECTOR_LEN]>),
}

/// A word that fills a sector; its top byte identifies the kind of writer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Word(pub u64);

const GUEST: u8 = 0xd5;
const TRASH: u8 = 0x7a;
const STALE: u8 = 0x5b;

/// The version number of a parent's data.
pub const PARENTS: u32 = 0xba_5e00;

impl Word {
    /// The content that was never written, or was discarded.
    pub const ZERO: Word = Word(0);

    /// The guest's data for version `version` of virtual sector `sector`.
    pub fn guest(version: u32, sector: u64) -> Word {
        Word(tagged(GUEST, (u64::from(version) << 32) | (sector & 0xffff_ffff)))
    }

    /// The content of `sector` of a file before it belonged to the file: arbitrary, different for each sector.
    pub fn stale(sector: u64) -> Word {
        Word(tagged(STALE, mix(sector)))
    }

    /// The content that a power loss during a write of `self` may leave; `None` unless it is guest data.
    pub fn trashed(self) -> Option<Word> {
        (self.tag() == GUEST).then(|| Word(tagged(TRASH, self.0)))
    }

    fn tag(self) -> u8 {
        self.0.to_be_bytes()[0]
    }
}

impl std::fmt::Debug for Word {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (version, sector) = ((self.0 >> 32) & 0xff_ffff, self.0 & 0xffff_ffff);
        match self.tag() {
            0 if self.0 == 0 => write!(f, "zero"),
            GUEST if version == u64::from(PARENTS) => write!(f, "the parent's sector {sector}"),
            GUEST => write!(f, "version {version} of sector {sector}"),
            TRASH => write!(f, "trashed version {version} of sector {sector}"),
            STALE => write!(f, "stale bytes"),
            _ => write!(f, "unknown bytes {:#018x}", self.0),
        }
    }
}

/// The content of a sector as seen by a reader: the word of each of its parts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Words(pub [Word; PARTS_LEN]);

impl Words {
    /// The content that was never written, or was discarded.
    pub const ZERO: Words = Words::whole(Word::ZERO);

    /// The same word in all parts.
    pub const fn whole(word: Word) -> Words {
        Words([word; PARTS_LEN])
    }

    /// The word of all parts, if they are equal.
    pub fn one(self) -> Option<Word> {
        let Words([first, ..]) = self;
        (self == Words::whole(first)).then_some(first)
    }

    /// The words of a sector. Parts that do not consist of one word are represented by a unique one.
    pub fn of(sector: &Sector) -> Words {
        let part = |bytes: &[u8]| match bytes.first_chunk::<8>() {
            Some(first) if bytes[8..] == bytes[..PART_LEN - 8] => Word(u64::from_le_bytes(*first)),
            _ => Word(u64::MAX),
        };
        match sector {
            Sector::Word(word) => Words::whole(*word),
            Sector::Bytes(bytes) => {
                let mut words = Words::ZERO;
                words.0.iter_mut().zip(bytes.chunks(PART_LEN)).for_each(|(word, bytes)| *word = part(bytes));
                words
            }
        }
    }
}

impl std::fmt::Debug for Words {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.one() {
            Some(word) => word.fmt(f),
            None => f.debug_list().entries(self.0).finish(),
        }
    }
}

fn tagged(tag: u8, low: u64) -> u64 {
    (u64::from(tag) << 56) | (low & 0x00ff_ffff_ffff_ffff)
}

/// Mixes the bits of a number (the finalizer of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

impl Sector {
    /// A sector of zeros.
    pub const ZERO: Sector = Sector::Word(Word::ZERO);

    /// The content of 512 bytes.
    pub fn of(bytes: &[u8; SECTOR_LEN]) -> Sector {
        match bytes.first_chunk::<8>() {
            // Equal to itself shifted by eight bytes, so the same eight bytes repeat.
            Some(first) if bytes[8..] == bytes[..SECTOR_LEN - 8] => Sector::Word(Word(u64::from_le_bytes(*first))),
            _ => Sector::Bytes(Arc::new(*bytes)),
        }
    }

    /// Copies the content to `bytes`.
    pub fn copy_to(&self, bytes: &mut [u8; SECTOR_LEN]) {
        match self {
            Sector::Word(Word::ZERO) => bytes.fill(0),
            Sector::Word(word) => {
                for place in bytes.chunks_exact_mut(8) {
                    place.copy_from_slice(&word.0.to_le_bytes());
                }
            }
            Sector::Bytes(held) => bytes.copy_from_slice(&**held),
        }
    }

    /// A digest of the content, to compare many of them at once.
    pub fn digest(&self) -> u64 {
        match self {
            Sector::Word(word) => mix(word.0),
            Sector::Bytes(held) => {
                let mut hasher = FxHasher::default();
                hasher.write(held.as_slice());
                mix(hasher.finish())
            }
        }
    }
}

impl std::fmt::Debug for Sector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Sector::Word(word) => word.fmt(f),
            Sector::Bytes(held) => write!(f, "metadata {:02x?}…", &held[..8]),
        }
    }
}

/// The words of a guest's memory, sector by sector.
pub fn words_of(memory: &Segments) -> Vec<Words> {
    sectors_of(&memory.to_vec()).map(|sector| Words::of(&sector)).collect()
}

/// Splits whole sectors into contents.
pub fn sectors_of(bytes: &[u8]) -> impl Iterator<Item = Sector> + '_ {
    bytes.chunks(SECTOR_LEN).map(|chunk| {
        let mut whole = [0; SECTOR_LEN];
        whole[..chunk.len()].copy_from_slice(chunk);
        Sector::of(&whole)
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_sector_is_read_as_written() {
        let mut odd = [7u8; SECTOR_LEN];
        odd[511] = 8;
        for bytes in [[0u8; SECTOR_LEN], [7u8; SECTOR_LEN], odd] {
            let mut back = [1u8; SECTOR_LEN];
            Sector::of(&bytes).copy_to(&mut back);
            assert_eq!(back, bytes);
        }
        assert!(matches!(Sector::of(&odd), Sector::Bytes(_)));
    }

    #[test]
    fn a_guests_sector_names_its_version() {
        let word = Word::guest(3, 70000);
        let mut bytes = [0; SECTOR_LEN];
        Sector::Word(word).copy_to(&mut bytes);
        assert_eq!(Sector::of(&bytes), Sector::Word(word));
        assert_eq!(format!("{word:?}"), "version 3 of sector 70000");
        assert_ne!(word.trashed(), Some(word));
        assert_eq!(Word::ZERO.trashed(), None);
    }

    #[test]
    fn each_part_of_a_sector_has_its_word() {
        let mut bytes = [0; SECTOR_LEN];
        Sector::Word(Word::guest(3, 1)).copy_to(&mut bytes);
        assert_eq!(Words::of(&Sector::of(&bytes)).one(), Some(Word::guest(3, 1)));
        bytes[128..256].fill(0);
        bytes[300] = 1;
        let [first, second, third, last] = Words::of(&Sector::of(&bytes)).0;
        assert_eq!((first, second), (Word::guest(3, 1), Word::ZERO));
        assert_eq!((third, last), (Word(u64::MAX), Word::guest(3, 1)));
    }
}
