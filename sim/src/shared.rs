//! Lays out a qcow2 file with an internal snapshot: clusters that the disk shares with it must be copied before they
//! are changed.
//!
//! Knows the qcow2 specification and nothing about how images are opened. One L2 table is shared as a whole; the
//! snapshot has its own copy of the other, and some of the clusters under the two are shared. Two compressed clusters
//! are in one cluster of the file, which therefore has four references. Version 2 has no allocated zero cluster.
//!
//! Invariant checked ([`lost`]): whatever is done to the disk, the snapshot's content, as found through the snapshot
//! table, is unchanged.

use std::collections::BTreeMap;

use disk::FileOffset;

use crate::cluster::{CLUSTER, CLUSTER_SECTORS};
use crate::compressed::{COMPRESSED, COPIED, PLACE_BITS, TABLE, ZERO, deflated, overwrite, sectors_of};
use crate::media::Media;
use crate::sector::{PARENTS, Sector, Word};

/// Number of clusters of such a file.
pub const USED: u64 = 18;
/// The snapshot's data where the disk was written to since.
const OLDER: u32 = 0xba_5e01;

/// Positions in the file, in clusters: the active L1 table.
const L1: u64 = 3;
const SNAPSHOTS: u64 = 4;
const SNAPSHOT_L1: u64 = 5;
/// The L2 table shared by disk and snapshot, the disk's own, and the snapshot's own.
const SHARED_TABLE: u64 = 6;
const OWN_TABLE: u64 = 7;
const SNAPSHOT_TABLE: u64 = 8;
/// The cluster with compressed data.
const PACKED: u64 = 16;
/// An allocated zero cluster, whose space contains other data.
const HIDDEN: u64 = 17;

/// Which of the two refers to a cluster.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whose {
    Both,
    Disk,
    Snapshot,
}

/// A cluster of the disk with a cluster of the file.
struct Plain {
    cluster: u64,
    place: u64,
    whose: Whose,
}

const fn plain(cluster: u64, place: u64, whose: Whose) -> Plain {
    Plain { cluster, place, whose }
}

/// Under the shared table, at its beginning and end; under the two others, shared and not.
const PLAIN: [Plain; 6] = [
    plain(0, 9, Whose::Both),
    plain(TABLE - 1, 10, Whose::Both),
    plain(TABLE, 11, Whose::Disk),
    plain(TABLE, 12, Whose::Snapshot),
    plain(TABLE + 1, 13, Whose::Both),
    plain(TABLE + 2, 14, Whose::Snapshot),
];
/// Compressed clusters of the disk with the offsets of their data, in one cluster of the file.
const SQUEEZED: [(u64, u64); 2] = [(1, PACKED * CLUSTER), (2, PACKED * CLUSTER + 700)];
/// The zero cluster of the disk.
const ZEROED: u64 = 3;

/// The initial content of the disk. The zero cluster hides the parent; version 2 has none.
pub fn given(version: u32) -> impl Iterator<Item = (u64, Word)> {
    let plain = PLAIN.iter().filter(|plain| plain.whose != Whose::Snapshot).map(|plain| plain.cluster);
    let sectors = plain.chain(SQUEEZED.iter().map(|(cluster, _)| *cluster)).flat_map(sectors_of);
    let zeroes = sectors_of(ZEROED).filter(move |_| version >= 3).map(|sector| (sector, Word::ZERO));
    sectors.map(|sector| (sector, Word::guest(PARENTS, sector))).chain(zeroes)
}

/// The refcount of a cluster of the file.
pub fn count(cluster: u64, version: u32) -> u16 {
    match cluster {
        SHARED_TABLE => 2,
        PACKED => 4,
        HIDDEN if version >= 3 => 2,
        _ if PLAIN.iter().any(|plain| plain.place == cluster && plain.whose == Whose::Both) => 2,
        _ => 1,
    }
}

/// Puts tables and data into a new file.
pub fn put(media: &mut Media, version: u32) {
    let cluster_len = usize::try_from(CLUSTER).unwrap_or(0);
    for cluster in [SNAPSHOTS, SNAPSHOT_L1, SHARED_TABLE, OWN_TABLE, SNAPSHOT_TABLE, 15, PACKED, HIDDEN] {
        media.write(FileOffset(cluster * CLUSTER), &vec![0; cluster_len]);
    }
    put_entries(media, L1, &[(0, SHARED_TABLE * CLUSTER), (1, OWN_TABLE * CLUSTER | COPIED)]);
    put_entries(media, SNAPSHOT_L1, &[(0, SHARED_TABLE * CLUSTER), (1, SNAPSHOT_TABLE * CLUSTER)]);
    overwrite(media, FileOffset(SNAPSHOTS * CLUSTER), &entry(version));
    for Plain { cluster, place, whose } in &PLAIN {
        let written = if *whose == Whose::Snapshot { OLDER } else { PARENTS };
        for (sector, at) in sectors_of(*cluster).zip(sectors_of(*place)) {
            media.set(at, Sector::Word(Word::guest(written, sector)));
        }
        let entry = [(cluster % TABLE, place * CLUSTER | if *whose == Whose::Disk { COPIED } else { 0 })];
        match (cluster / TABLE, whose) {
            (0, _) => put_entries(media, SHARED_TABLE, &entry),
            (_, Whose::Both) => [OWN_TABLE, SNAPSHOT_TABLE].iter().for_each(|table| put_entries(media, *table, &entry)),
            (_, Whose::Disk) => put_entries(media, OWN_TABLE, &entry),
            (_, Whose::Snapshot) => put_entries(media, SNAPSHOT_TABLE, &entry),
        }
    }
    for (cluster, at) in SQUEEZED {
        let bytes = deflated(sectors_of(cluster).map(|sector| Word::guest(PARENTS, sector)));
        let more = (at + u64::try_from(bytes.len()).unwrap_or(0) - 1) / 512 - at / 512;
        overwrite(media, FileOffset(at), &bytes);
        put_entries(media, SHARED_TABLE, &[(cluster, COMPRESSED | more << PLACE_BITS | at)]);
    }
    if version >= 3 {
        media.write(FileOffset(HIDDEN * CLUSTER), &vec![0xc3; cluster_len]);
        put_entries(media, SHARED_TABLE, &[(ZEROED, HIDDEN * CLUSTER | ZERO)]);
    }
}

fn put_entries(media: &mut Media, table: u64, entries: &[(u64, u64)]) {
    for (number, entry) in entries {
        overwrite(media, FileOffset(table * CLUSTER + number * 8), &entry.to_be_bytes());
    }
}

/// The entry of the snapshot table. The size of the disk is included if the version requires it.
fn entry(version: u32) -> Vec<u8> {
    let mut entry = Vec::new();
    entry.extend((SNAPSHOT_L1 * CLUSTER).to_be_bytes());
    entry.extend(2u32.to_be_bytes());
    entry.extend([0, 1, 0, 4]);
    entry.extend([0; 16]);
    entry.extend(0u32.to_be_bytes());
    entry.extend(if version >= 3 { 16u32 } else { 0 }.to_be_bytes());
    if version >= 3 {
        entry.extend(0u64.to_be_bytes());
        entry.extend((2 * TABLE * CLUSTER).to_be_bytes());
    }
    entry.extend(b"1kept");
    entry
}

/// The content of a cluster in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterContent {
    /// The cluster reads as zero.
    Zero,
    /// The data of the cluster, decompressed if necessary.
    Bytes(Vec<u8>),
}

/// Returns the clusters of the internal snapshot in a file; an empty map if the file has no snapshot.
pub fn shown(media: &Media) -> BTreeMap<u64, ClusterContent> {
    let words = |at: u64, len: u64| {
        let bytes = media.read(at / 512, len / 512);
        let words = bytes.chunks_exact(8).map(|word| word.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte)));
        words.collect::<Vec<u64>>()
    };
    let mut found = BTreeMap::new();
    let header = words(0, 512);
    if header[7] & 0xffff_ffff == 0 {
        return found;
    }
    let l1 = words(words(header[8], 512)[0], 512);
    let tables = l1.into_iter().take(2).map(|entry| entry & PLACE).zip(0..);
    for (l2, table) in tables.filter(|(l2, _)| *l2 != 0) {
        for (raw, number) in words(l2, CLUSTER).into_iter().zip(0..).filter(|(raw, _)| *raw != 0) {
            let shown = if raw & COMPRESSED != 0 {
                let at = raw & ((1 << PLACE_BITS) - 1);
                ClusterContent::Bytes(media.read(at / 512, ((raw & !COMPRESSED) >> PLACE_BITS) + 1))
            } else if raw & ZERO != 0 {
                ClusterContent::Zero
            } else {
                ClusterContent::Bytes(media.read((raw & PLACE) / 512, CLUSTER_SECTORS))
            };
            found.insert(table * TABLE + number, shown);
        }
    }
    found
}

/// Bits of an entry with the offset in the file.
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;

#[cfg(test)]
mod test {
    use super::*;
    use crate::crash::read_back;
    use crate::explore::prepare;
    use crate::media::Unwritten;
    use crate::qcow2::lost_of_snapshot;
    use crate::sector::Words;
    use crate::subject::{Kind, Subject, damage};

    #[test]
    fn a_file_with_a_snapshot_is_sound_and_both_read_as_they_should() {
        for (kind, version) in [(Kind::SharedQcow2, 3), (Kind::OldSharedQcow2, 2)] {
            let subject = Subject::new(kind, Unwritten::Stale);
            let start = prepare(&subject).unwrap();
            let found = read_back(&subject, start.clone(), &[0..16, 1016..1040]);

            let disk: BTreeMap<u64, Word> = given(version).collect();
            let held = |sector: u64| disk.get(&sector).copied().unwrap_or(Word::ZERO);
            assert!(found.iter().all(|(sector, word)| *word == Words::whole(held(*sector))), "{found:?}");
            assert_eq!(damage(&mut start.files[0].clone(), start.forms[0]), None);
            assert_eq!(lost_of_snapshot(&start.files[0], version), None);
            assert_eq!(shown(&start.files[0]).len(), if version == 3 { 8 } else { 7 });
        }
    }

    #[test]
    fn a_changed_snapshot_is_detected() {
        let start = prepare(&Subject::new(Kind::SharedQcow2, Unwritten::Zeroes)).unwrap();
        for place in [9, 12, PACKED, SHARED_TABLE, SNAPSHOT_TABLE, SNAPSHOT_L1] {
            let mut media = start.files[0].clone();
            media.write(FileOffset(place * CLUSTER), &[0x77; 512]);
            assert!(lost_of_snapshot(&media, 3).is_some(), "{place}");
        }
        let mut media = start.files[0].clone();
        media.write(FileOffset(11 * CLUSTER), &[0x77; 512]);
        assert_eq!(lost_of_snapshot(&media, 3), None, "that is the disk's");
    }
}
