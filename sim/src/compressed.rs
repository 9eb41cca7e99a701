//! Lays out parts of qcow2 files that other programs write and Tapline does not: compressed clusters, and a zero
//! cluster that is allocated.
//!
//! Knows the qcow2 specification and RFC 1951, and nothing about how images are opened. Two compressed clusters share a
//! cluster of the file with the beginning of a third, which ends in the next one: freeing one of them must not affect
//! the others.

use disk::FileOffset;

use crate::cluster::{CLUSTER, CLUSTER_SECTORS};
use crate::media::Media;
use crate::sector::{PARENTS, SECTOR_LEN, Sector, Word};
use crate::theme::BLOCK;

/// Clusters of such a file: the four that every file has, two L2 tables, two with compressed data, and one that is not
/// read.
pub const USED: u64 = 9;
/// Clusters of the disk per L2 table.
pub const TABLE: u64 = CLUSTER / 8;
/// The L2 tables and the clusters that they refer to, as clusters of the file.
const TABLES: [u64; 2] = [4, 5];
const SHARED: u64 = 6;
const HIDDEN: u64 = 8;
/// Flag of an entry: nothing else refers to its cluster.
pub const COPIED: u64 = 1 << 63;
/// Flag of an entry: the cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// Flag of an entry: the cluster reads as zero.
pub const ZERO: u64 = 1;
/// Bits of the offset of compressed data: 70 minus cluster_bits ("Compressed Clusters Descriptor").
pub const PLACE_BITS: u32 = 70 - CLUSTER.trailing_zeros();

/// Compressed clusters of the disk, with the offsets of their data in the file.
const PACKED: [(u64, u64); 3] =
    [(0, SHARED * CLUSTER), (1, SHARED * CLUSTER + 700), (TABLE - 1, (SHARED + 1) * CLUSTER - 20)];

/// The content of a disk on such a file.
pub fn given() -> impl Iterator<Item = (u64, Word)> {
    let sectors = PACKED.into_iter().flat_map(|(cluster, _)| sectors_of(cluster));
    // The last block's first cluster is zero and hides the parent.
    let zeroes = sectors_of(BLOCK / CLUSTER_SECTORS).map(|sector| (sector, Word::ZERO));
    sectors.map(|sector| (sector, Word::guest(PARENTS, sector))).chain(zeroes)
}

/// The refcount of a cluster of the file.
pub fn count(cluster: u64) -> u16 {
    if cluster == SHARED { 3 } else { 1 }
}

/// The sectors of a cluster of the disk.
pub fn sectors_of(cluster: u64) -> std::ops::Range<u64> {
    cluster * CLUSTER_SECTORS..(cluster + 1) * CLUSTER_SECTORS
}

/// Puts the tables and data into a new file whose L1 table at `l1_at` is empty.
pub fn put(media: &mut Media, l1_at: FileOffset) {
    let l1: Vec<u8> = TABLES.iter().flat_map(|table| (table * CLUSTER | COPIED).to_be_bytes()).collect();
    overwrite(media, l1_at, &l1);
    for table in TABLES {
        media.write(FileOffset(table * CLUSTER), &vec![0; usize::try_from(CLUSTER).unwrap_or(0)]);
    }
    let rubbish: Vec<u8> = (0..2 * CLUSTER).map(|_| 0xc3).collect();
    media.write(FileOffset(SHARED * CLUSTER), &rubbish);
    for (cluster, at) in PACKED {
        let bytes = deflated(sectors_of(cluster).map(|sector| Word::guest(PARENTS, sector)));
        let end = at + u64::try_from(bytes.len()).unwrap_or(0);
        let more = (end - 1) / 512 - at / 512;
        overwrite(media, FileOffset(at), &bytes);
        overwrite(
            media,
            FileOffset(TABLES[0] * CLUSTER + cluster * 8),
            &(COMPRESSED | more << PLACE_BITS | at).to_be_bytes(),
        );
    }
    overwrite(media, FileOffset(TABLES[1] * CLUSTER), &(HIDDEN * CLUSTER | COPIED | ZERO).to_be_bytes());
    media.write(FileOffset(HIDDEN * CLUSTER), &rubbish[..usize::try_from(CLUSTER).unwrap_or(0)]);
}

/// Writes bytes that need not be whole sectors.
pub fn overwrite(media: &mut Media, at: FileOffset, bytes: &[u8]) {
    let first = at.align_down(512);
    let end = (at + u64::try_from(bytes.len()).unwrap_or(0)).align_up(512);
    let mut sectors = media.read(first / 512, (end - first) / 512);
    let from = usize::try_from(at - first).unwrap_or(0);
    sectors[from..from + bytes.len()].copy_from_slice(bytes);
    media.write(first, &sectors);
}

/// Compresses sectors of one repeated word into a deflate stream: one block of fixed codes, in which each sector is
/// eight literal bytes and two copies of them.
pub fn deflated(words: impl Iterator<Item = Word>) -> Vec<u8> {
    let mut bits = Bits::default();
    // The last block, with fixed codes.
    bits.number(0b011, 3);
    for word in words {
        let mut sector = [0; SECTOR_LEN];
        Sector::Word(word).copy_to(&mut sector);
        sector[..8].iter().for_each(|&byte| bits.literal(byte));
        // Length 258 is code 285; length 246 is code 284 with 5 extra bits for the excess over 227. Distance 8 is code
        // 5 with one extra bit, for the excess over 7.
        bits.code(0b1100_0101, 8);
        bits.distance();
        bits.code(0b1100_0100, 8);
        bits.number(246 - 227, 5);
        bits.distance();
    }
    // The end-of-block code.
    bits.code(0, 7);
    bits.bytes()
}

/// A bit stream; the first bit of each byte is the lowest.
#[derive(Default)]
struct Bits(Vec<bool>);

impl Bits {
    /// Appends a number, lowest bit first.
    fn number(&mut self, number: u16, len: u32) {
        self.0.extend((0..len).map(|bit| number >> bit & 1 == 1));
    }

    /// Appends a code, highest bit first.
    fn code(&mut self, code: u16, len: u32) {
        self.0.extend((0..len).rev().map(|bit| code >> bit & 1 == 1));
    }

    fn literal(&mut self, byte: u8) {
        match u16::from(byte) {
            byte @ 0..144 => self.code(0b0011_0000 + byte, 8),
            byte => self.code(0b1_1001_0000 + byte - 144, 9),
        }
    }

    fn distance(&mut self) {
        self.code(5, 5);
        self.number(1, 1);
    }

    fn bytes(&self) -> Vec<u8> {
        let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, &bit| byte << 1 | u8::from(bit));
        self.0.chunks(8).map(byte).collect()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::crash::read_back;
    use crate::explore::prepare;
    use crate::media::Unwritten;
    use crate::sector::Words;
    use crate::subject::{Kind, Subject, damage};

    #[test]
    fn a_file_with_compressed_clusters_is_sound_and_reads_as_what_was_packed() {
        let subject = Subject::new(Kind::CompressedQcow2, Unwritten::Stale);
        let start = prepare(&subject).unwrap();
        let found = read_back(&subject, start.clone(), &[0..8, 1020..1028]);

        assert_eq!(found, given().map(|(sector, word)| (sector, Words::whole(word))).collect());
        assert_eq!(damage(&mut start.files[0].clone(), start.forms[0]), None);
    }
}
