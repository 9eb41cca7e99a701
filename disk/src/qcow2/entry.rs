//! An L2 entry: what it says of its cluster ("L2 table entry", "Extended L2 Entries").
//!
//! Knows nothing of tables. Keeps: what [`EntryFormat::unsound`] finds no fault with has a place inside the limit, at a
//! cluster of its own.

use std::ops::Range;

use super::cluster::{GuestCluster, HostCluster};
use super::layout::{COMPRESSED, COPIED, OFFSET_MASK, SECTOR, ZERO, entry, index, set_entry};
use crate::{DATA_FILE, FileOffset};

/// Subclusters in a cluster, where entries are extended.
pub const SUBCLUSTERS: u32 = 32;
/// The half of a bitmap that says which subclusters are in the file. The other one says which read as zero.
const ALL_HERE: u64 = 0xffff_ffff;
const ALL_ZERO: u64 = ALL_HERE << SUBCLUSTERS;

/// A decoded L2 entry: the state of its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// In the parent, or zero if there is none.
    Unallocated,
    /// Zero.
    Zero,
    /// Zero, and has a place in the file that holds something else.
    ZeroAllocated {
        /// Offset in the file.
        at: FileOffset,
        /// Nothing else refers to that place.
        copied: bool,
    },
    /// In the file.
    Data {
        /// Offset in the file.
        at: FileOffset,
        /// Nothing else refers to that place: it may be written to.
        copied: bool,
    },
    /// In the file, compressed.
    Compressed {
        /// Where the compressed bytes begin.
        at: FileOffset,
        /// Behind the last sector that they reach into.
        end: FileOffset,
    },
    /// Not the same for all subclusters.
    Mixed {
        /// Offset in the file, if it has a place.
        at: Option<FileOffset>,
        /// Nothing else refers to that place.
        copied: bool,
        /// The state of each subcluster.
        subclusters: Subclusters,
    },
}

/// The bitmap of the subclusters of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subclusters(u64);

/// Some subclusters in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the first.
    pub first: u32,
    /// How many.
    pub count: u32,
}

/// The state of one subcluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subcluster {
    /// In the cluster's place in the file.
    Data,
    /// Zero.
    Zero,
    /// In the parent, or zero if there is none.
    Unallocated,
}

impl Subclusters {
    fn get(self, number: u32) -> Subcluster {
        let bit = |half: u64| half >> number & 1 == 1;
        match (bit(self.0), bit(self.0 >> SUBCLUSTERS)) {
            (_, true) => Subcluster::Zero,
            (true, false) => Subcluster::Data,
            (false, false) => Subcluster::Unallocated,
        }
    }

    /// The subcluster with this number, and how many from it on are like it.
    pub fn run(self, number: u32) -> (Subcluster, u32) {
        let first = self.get(number);
        (first, self.count_from(number, |next| next == first))
    }

    /// How many from this number on are not in the file.
    pub fn absent(self, number: u32) -> u32 {
        self.count_from(number, |next| next != Subcluster::Data)
    }

    fn count_from(self, number: u32, is_one: impl Fn(Subcluster) -> bool) -> u32 {
        let run = (number..SUBCLUSTERS).take_while(|&next| is_one(self.get(next)));
        u32::try_from(run.count()).unwrap_or(SUBCLUSTERS)
    }

    /// The same when a part is in the file.
    fn with(self, part: Part) -> Subclusters {
        let mask = ((1u64 << part.count) - 1) << part.first;
        Subclusters((self.0 | mask) & !(mask << SUBCLUSTERS))
    }
}

impl Entry {
    /// Where in the file it has a place, or begins to have one.
    pub fn place(self) -> Option<FileOffset> {
        match self {
            Entry::Data { at, .. } | Entry::ZeroAllocated { at, .. } | Entry::Compressed { at, .. } => Some(at),
            Entry::Mixed { at, .. } => at,
            Entry::Unallocated | Entry::Zero => None,
        }
    }

    /// The clusters of the file of 2^`bits` bytes that it refers to.
    pub fn places(self, bits: u32) -> Range<HostCluster> {
        let (at, end) = match self {
            Entry::Compressed { at, end } => (at, end),
            _ => self.place().map_or((FileOffset(0), FileOffset(0)), |at| (at, at + 1)),
        };
        HostCluster::of(at, bits)..HostCluster(end.0.div_ceil(1 << bits))
    }

    /// The cluster of the file that is its place, unless it is compressed.
    pub fn cluster_place(self) -> Option<FileOffset> {
        self.place().filter(|_| !matches!(self, Entry::Compressed { .. }))
    }

    /// The same entry when a part of its cluster is in the file, at a place that is its own.
    pub fn with(self, at: FileOffset, part: Part) -> Entry {
        let before = match self {
            Entry::Zero | Entry::ZeroAllocated { .. } => Subclusters(ALL_ZERO),
            Entry::Mixed { subclusters, .. } => subclusters,
            Entry::Unallocated => Subclusters(0),
            Entry::Data { .. } | Entry::Compressed { .. } => Subclusters(ALL_HERE),
        };
        match before.with(part) {
            Subclusters(ALL_HERE) => Entry::Data { at, copied: true },
            subclusters => Entry::Mixed { at: Some(at), copied: true, subclusters },
        }
    }

    /// Whether it has a cluster of the file for itself.
    pub fn is_copied(self) -> bool {
        match self {
            Entry::Data { copied, .. } | Entry::ZeroAllocated { copied, .. } | Entry::Mixed { copied, .. } => copied,
            Entry::Unallocated | Entry::Zero | Entry::Compressed { .. } => false,
        }
    }
}

/// An entry as it stands in a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawEntry {
    /// The part that every entry has: a place and flags.
    pub descriptor: u64,
    /// "Subcluster Allocation Bitmap"; zero where entries are not extended.
    pub bitmap: u64,
}

impl RawEntry {
    /// Whether nothing was ever written here.
    pub fn is_empty(self) -> bool {
        self.descriptor == 0 && self.bitmap == 0
    }
}

/// How the entries of an image stand in its L2 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryFormat {
    /// Bytes of a cluster, as a power of two.
    pub cluster_bits: u32,
    /// Each entry has a bitmap of subclusters.
    pub extended: bool,
    /// Places are in an external data file: at [`DATA_FILE`] and behind.
    pub external: bool,
}

impl EntryFormat {
    /// Bytes of an entry.
    pub fn size(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Entries of a table, which fills a cluster.
    pub fn in_table(self) -> u64 {
        (1 << self.cluster_bits) / self.size()
    }

    /// Bytes of the disk that a table is about.
    pub fn reach(self) -> u64 {
        self.in_table() * (1 << self.cluster_bits)
    }

    /// The subcluster of a byte of a cluster.
    pub fn subcluster_of(self, byte: u64) -> u32 {
        u32::try_from(byte / self.subcluster()).unwrap_or(SUBCLUSTERS)
    }

    /// The subclusters of `len` bytes from byte `from` of a cluster on.
    pub fn part_of(self, from: u64, len: u64) -> Part {
        let first = self.subcluster_of(from);
        let last = self.subcluster_of(from + len - 1);
        Part { first, count: last - first + 1 }
    }

    /// The bytes of a cluster that a part of it has: where they begin, and how many.
    pub fn bytes_of(self, part: Part) -> (u64, u64) {
        (self.start_of(part.first), self.start_of(part.count))
    }

    /// The byte of a cluster at which a subcluster begins.
    pub fn start_of(self, subcluster: u32) -> u64 {
        self.subcluster() * u64::from(subcluster)
    }

    fn subcluster(self) -> u64 {
        (1 << self.cluster_bits) / u64::from(SUBCLUSTERS)
    }

    /// An entry of a table.
    pub fn read(self, table: &[u8], number: usize) -> RawEntry {
        let word = self.word(number);
        let bitmap = if self.extended { entry(table, word + 1) } else { 0 };
        RawEntry { descriptor: entry(table, word), bitmap }
    }

    /// Sets an entry of a table.
    pub fn write(self, table: &mut [u8], number: usize, raw: RawEntry) {
        let word = self.word(number);
        set_entry(table, word, raw.descriptor);
        if self.extended {
            set_entry(table, word + 1, raw.bitmap);
        }
    }

    /// The bytes of an entry.
    pub fn bytes(self, raw: RawEntry) -> Vec<u8> {
        let mut bytes = vec![0; index(self.size())];
        self.write(&mut bytes, 0, raw);
        bytes
    }

    /// The entries of a table or of a piece of one, each with the number of the 64-bit word that is its descriptor.
    pub fn entries(self, table: &[u8]) -> impl Iterator<Item = (usize, RawEntry)> {
        let count = table.len() / index(self.size());
        (0..count).map(move |number| (self.word(number), self.read(table, number)))
    }

    fn word(self, number: usize) -> usize {
        number * index(self.size() / 8)
    }

    /// Decodes an entry.
    pub fn decode(self, raw: RawEntry) -> Entry {
        let RawEntry { descriptor, bitmap } = raw;
        if descriptor & COMPRESSED != 0 {
            // "Compressed Clusters Descriptor": an offset of `x` bits, above it the additional sectors. There are no
            // subclusters, and the bitmap is not looked at.
            let x = 70u32 - self.cluster_bits;
            let at = FileOffset(descriptor & ((1u64 << x) - 1));
            let sectors = ((descriptor & !(COPIED | COMPRESSED)) >> x) + 1;
            return Entry::Compressed { at, end: at.align_down(SECTOR) + sectors * SECTOR };
        }
        let (place, copied) = self.place_of(descriptor);
        let zero = if self.extended { bitmap == ALL_ZERO } else { descriptor & ZERO != 0 };
        let here = !self.extended || bitmap == ALL_HERE;
        match (place, zero) {
            (None, true) => Entry::Zero,
            (None, false) if bitmap == 0 => Entry::Unallocated,
            (None, false) => Entry::Mixed { at: None, copied: false, subclusters: Subclusters(bitmap) },
            // Nothing is lost with a place that cannot be. Who repairs finds it in the descriptor.
            (Some(at), true) if at % (1 << self.cluster_bits) != 0 => Entry::Zero,
            (Some(at), true) => Entry::ZeroAllocated { at, copied },
            (Some(at), false) if here => Entry::Data { at, copied },
            (Some(at), false) => Entry::Mixed { at: Some(at), copied, subclusters: Subclusters(bitmap) },
        }
    }

    /// The place that a descriptor names, if it names one, and whether the cluster has it for itself. In a data file
    /// that is always so, and offset 0 is a place where the descriptor is marked as copied ("Standard Cluster
    /// Descriptor").
    fn place_of(self, descriptor: u64) -> (Option<FileOffset>, bool) {
        let (at, copied) = (descriptor & OFFSET_MASK, descriptor & COPIED != 0);
        match self.external {
            true => ((at != 0 || copied).then_some(DATA_FILE + at), true),
            false => ((at != 0).then_some(FileOffset(at)), copied),
        }
    }

    /// The only place that a cluster of the disk may have in an external data file.
    pub fn own_place(self, cluster: GuestCluster) -> FileOffset {
        DATA_FILE + cluster.start(self.cluster_bits).0
    }

    /// An entry as it is to stand in a table.
    pub fn encode(self, entry: Entry) -> RawEntry {
        let marked = |at: FileOffset, copied| (at.0 & !DATA_FILE.0) | if copied { COPIED } else { 0 };
        let (descriptor, bitmap) = match entry {
            Entry::Unallocated => (0, 0),
            Entry::Zero => (0, ALL_ZERO),
            Entry::ZeroAllocated { at, copied } => (marked(at, copied), ALL_ZERO),
            Entry::Data { at, copied } => (marked(at, copied), ALL_HERE),
            Entry::Mixed { at, copied, subclusters } => (marked(at.unwrap_or_default(), copied), subclusters.0),
            Entry::Compressed { at, end } => {
                let more = (end - at.align_down(SECTOR)) / SECTOR - 1;
                (COMPRESSED | at.0 | more << (70 - self.cluster_bits), 0)
            }
        };
        if self.extended {
            return RawEntry { descriptor, bitmap };
        }
        RawEntry { descriptor: descriptor | if bitmap == ALL_ZERO { ZERO } else { 0 }, bitmap: 0 }
    }

    /// The malformed word in the entry of a cluster, of an image where nothing lies at or behind `limit`: its offset in
    /// the entry, and its value. `zeroes`: version 2 does not know clusters that read as zero. A mark "copied" that is
    /// missing, or where none belongs, makes no entry unsound: it costs time.
    pub fn unsound(self, raw: RawEntry, cluster: GuestCluster, limit: FileOffset, zeroes: bool) -> Option<(u64, u64)> {
        let entry = self.decode(raw);
        let descriptor = match entry {
            Entry::Compressed { .. } if self.external => false,
            Entry::Compressed { at, end } => at.0 > 0 && at < limit && end - SECTOR < limit,
            _ => {
                let inside = entry.place().is_none_or(|at| match self.external {
                    true => at == self.own_place(cluster),
                    false => at % (1 << self.cluster_bits) == 0 && at < limit,
                });
                inside && raw.descriptor & self.reserved(zeroes) == 0
            }
        };
        match entry {
            _ if !descriptor => Some((0, raw.descriptor)),
            Entry::Mixed { at, .. } if !is_possible(raw.bitmap, at.is_some()) => Some((8, raw.bitmap)),
            _ => None,
        }
    }

    /// Whether an entry reads as zero and names a place that cannot be, which does no harm.
    pub fn is_misplaced_zero(self, raw: RawEntry) -> bool {
        self.decode(raw) == Entry::Zero && raw.descriptor & OFFSET_MASK != 0
    }

    /// Bits of the descriptor of a cluster that is not compressed which have to be zero.
    pub fn reserved(self, zeroes: bool) -> u64 {
        let zero = if zeroes && !self.extended { ZERO } else { 0 };
        !(COPIED | COMPRESSED | OFFSET_MASK | zero)
    }
}

/// Whether a bitmap makes sense: no subcluster both reads as zero and is in the file, and none is where there is no
/// place.
pub fn is_possible(bitmap: u64, placed: bool) -> bool {
    let (here, zero) = (bitmap & ALL_HERE, bitmap >> SUBCLUSTERS);
    here & zero == 0 && (placed || here == 0)
}

#[cfg(test)]
mod test {
    use super::*;

    const PLAIN: EntryFormat = EntryFormat { cluster_bits: 16, extended: false, external: false };
    const EXTENDED: EntryFormat = EntryFormat { extended: true, ..PLAIN };
    const EXTERNAL: EntryFormat = EntryFormat { external: true, ..PLAIN };

    fn plain(descriptor: u64) -> RawEntry {
        RawEntry { descriptor, bitmap: 0 }
    }

    #[test]
    fn a_compressed_cluster_reaches_to_the_end_of_its_last_sector() {
        // 64 KiB: x is 54. From byte 327 680 + 100, one additional sector.
        let raw = plain(COMPRESSED | (1 << 54) | 327_780);
        assert_eq!(PLAIN.decode(raw), Entry::Compressed { at: FileOffset(327_780), end: FileOffset(327_680 + 1024) });
        assert_eq!(EXTENDED.decode(raw), PLAIN.decode(raw));
        assert_eq!(PLAIN.encode(PLAIN.decode(raw)), raw);
    }

    #[test]
    fn what_is_written_reads_back() {
        let data = |copied| Entry::Data { at: FileOffset(1 << 40), copied };
        let zero = |copied| Entry::ZeroAllocated { at: FileOffset(65536), copied };
        let parts = |at| Entry::Mixed { at, copied: at.is_some(), subclusters: Subclusters(0b1010 << 32) };
        for format in [PLAIN, EXTENDED] {
            let mut entries = vec![Entry::Unallocated, Entry::Zero, data(true), data(false), zero(true), zero(false)];
            if format.extended {
                entries.extend([parts(None), parts(Some(FileOffset(65536)))]);
            }
            let mut table = vec![0; 256];
            for (number, entry) in entries.into_iter().enumerate() {
                let raw = format.encode(entry);
                format.write(&mut table, number, raw);
                assert_eq!(format.decode(format.read(&table, number)), entry);
                assert_eq!(format.unsound(raw, GuestCluster(0), FileOffset(1 << 50), true), None);
            }
        }
    }

    #[test]
    fn reserved_bits_and_strange_places_are_not_sound() {
        let at = 3 << 16;
        let is_sound =
            |descriptor, limit, zeroes| PLAIN.unsound(plain(descriptor), GuestCluster(0), limit, zeroes).is_none();
        assert!(is_sound(at | COPIED, FileOffset(4 << 16), true));
        assert!(!is_sound(at | COPIED, FileOffset(3 << 16), true), "behind the end");
        assert!(!is_sound(at | COPIED | 2, FileOffset(4 << 16), true), "a reserved bit");
        assert!(!is_sound((at + 512) | COPIED, FileOffset(4 << 16), true), "between clusters");
        assert!(is_sound(at, FileOffset(4 << 16), true), "shared");
        assert!(
            is_sound(at | ZERO, FileOffset(4 << 16), true) && !is_sound(at | ZERO, FileOffset(4 << 16), false),
            "version 2"
        );
    }

    #[test]
    fn a_cluster_that_reads_as_zero_needs_no_place() {
        let raw = plain(COPIED | 0x50200 | ZERO);
        assert_eq!(
            (PLAIN.decode(raw), PLAIN.unsound(raw, GuestCluster(0), FileOffset(4 << 16), true)),
            (Entry::Zero, None)
        );
        assert!(PLAIN.is_misplaced_zero(raw) && !PLAIN.is_misplaced_zero(plain(ZERO)));
        assert!(PLAIN.unsound(raw, GuestCluster(0), FileOffset(4 << 16), false).is_some(), "version 2");
    }

    #[test]
    fn in_a_data_file_every_cluster_has_the_place_of_its_own_and_no_other() {
        let at = |cluster: u64| DATA_FILE + (cluster << 16);
        assert_eq!(EXTERNAL.decode(plain(0)), Entry::Unallocated);
        assert_eq!(EXTERNAL.decode(plain(COPIED)), Entry::Data { at: at(0), copied: true });
        assert_eq!(EXTERNAL.decode(plain(3 << 16)), Entry::Data { at: at(3), copied: true }, "whatever the mark says");
        for cluster in [0, 3] {
            let raw = EXTERNAL.encode(Entry::Data { at: at(cluster), copied: true });
            assert_eq!(raw, plain(COPIED | cluster << 16));
            assert_eq!(
                EXTERNAL.unsound(raw, GuestCluster(cluster), FileOffset(0), true),
                None,
                "however long the image is"
            );
            assert_eq!(
                EXTERNAL.unsound(raw, GuestCluster(cluster + 1), FileOffset(1 << 50), true),
                Some((0, raw.descriptor))
            );
        }
        let far = GuestCluster((DATA_FILE.0 >> 16) + 3);
        assert!(EXTERNAL.unsound(plain(COPIED | 3 << 16), far, FileOffset(0), true).is_some(), "no place of its own");
        assert!(EXTERNAL.unsound(plain(COMPRESSED | 65536), GuestCluster(1), FileOffset(1 << 50), true).is_some());
    }

    #[test]
    fn a_bitmap_tells_of_each_subcluster() {
        let raw = RawEntry { descriptor: 65536 | COPIED, bitmap: 0b0111 | 0b1000 << SUBCLUSTERS };
        let Entry::Mixed { at: Some(FileOffset(65536)), copied: true, subclusters } = EXTENDED.decode(raw) else {
            panic!()
        };
        assert_eq!(subclusters.run(1), (Subcluster::Data, 2));
        assert_eq!(subclusters.run(3), (Subcluster::Zero, 1));
        assert_eq!(subclusters.run(4), (Subcluster::Unallocated, 28));
    }

    #[test]
    fn a_part_that_is_written_leaves_the_others_what_they_are() {
        let part = Part { first: 2, count: 2 };
        let Entry::Mixed { at: Some(FileOffset(65536)), copied: true, subclusters } =
            Entry::Zero.with(FileOffset(65536), part)
        else {
            panic!()
        };
        assert_eq!((subclusters.run(0), subclusters.run(2)), ((Subcluster::Zero, 2), (Subcluster::Data, 2)));
        let entry =
            Entry::Unallocated.with(FileOffset(65536), part).with(FileOffset(65536), Part { first: 0, count: 2 });
        assert_eq!(EXTENDED.encode(entry).bitmap, 0b1111);
        assert_eq!(
            entry.with(FileOffset(65536), Part { first: 4, count: 28 }),
            Entry::Data { at: FileOffset(65536), copied: true }
        );
    }

    #[test]
    fn a_bitmap_that_cannot_be_is_named_where_it_stands() {
        let fault = |descriptor, bitmap| {
            EXTENDED.unsound(RawEntry { descriptor, bitmap }, GuestCluster(0), FileOffset(1 << 20), true)
        };
        assert_eq!(fault(65536, 1 | 1 << 32), Some((8, 1 | 1 << 32)), "zero and in the file");
        assert_eq!(fault(0, 1), Some((8, 1)), "in the file, and without a place");
        assert_eq!(fault(65537, 1), Some((0, 65537)), "the bit for zeroes is the bitmap's");
        assert_eq!(fault(65536, 1 | 2 << 32), None);
    }
}
