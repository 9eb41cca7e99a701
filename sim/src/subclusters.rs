//! Lays out a qcow2 file with extended L2 entries: clusters of which some subclusters are data, some read as zero and
//! some are in the parent, with and without allocated space.
//!
//! Knows the qcow2 specification and nothing about how images are opened. A subcluster is a sector here, the smallest
//! possible size.

use disk::{FileOffset, MetaWrite};

use crate::compressed::{COPIED, overwrite};
use crate::media::Media;
use crate::sector::{PARENTS, SECTOR, Sector, Word};
use crate::theme::BLOCK;

/// Size of a cluster in bytes: the smallest, with subclusters of one sector.
pub const CLUSTER: u64 = 32 * SECTOR;
/// Number of clusters of such a file: the four that every file has, an L2 table, and three with data.
pub const USED: u64 = 8;
/// The incompatible feature bit "Extended L2 Entries".
pub const FEATURE: u64 = 1 << 4;

/// Positions in the file, in clusters: the L1 table and the L2 table.
const L1: u64 = 3;
const L2: u64 = 4;

/// A cluster of the disk: its cluster in the file, if allocated, and a letter for each of its first subclusters: `d`
/// data, `z` zero, `.` in the parent, as all others are.
struct Cluster {
    number: u64,
    place: Option<u64>,
    subclusters: &'static str,
}

/// Clusters that the workloads touch: the first, and those on both sides of two block borders.
const CLUSTERS: [Cluster; 4] = [
    Cluster { number: 0, place: Some(5), subclusters: "dzdd.dz" },
    Cluster { number: BLOCK / 32 - 1, place: None, subclusters: "zz.............................z" },
    Cluster { number: BLOCK / 32, place: Some(6), subclusters: "" },
    Cluster { number: 2 * BLOCK / 32, place: Some(7), subclusters: "zzd.zzzz" },
];

impl Cluster {
    /// The sectors of the disk with a letter, and the letters.
    fn letters(&self) -> impl Iterator<Item = (u64, char)> {
        let first = self.number * 32;
        (first..).zip(self.subclusters.chars()).filter(|(_, letters)| *letters != '.')
    }

    fn bitmap(&self) -> u64 {
        self.letters()
            .fold(0, |bitmap, (sector, letters)| bitmap | 1 << (sector % 32 + if letters == 'z' { 32 } else { 0 }))
    }
}

/// The content of a disk on such a file; zeroes in it hide the parent.
pub fn given() -> impl Iterator<Item = (u64, Word)> {
    let letters = CLUSTERS.iter().flat_map(Cluster::letters);
    letters.map(|(sector, letters)| (sector, if letters == 'z' { Word::ZERO } else { Word::guest(PARENTS, sector) }))
}

/// Puts the L2 table and data into a new file whose L1 table is empty. Allocated space contains rubbish unless it is
/// data.
pub fn put(media: &mut Media) {
    overwrite(media, FileOffset(L1 * CLUSTER), &(L2 * CLUSTER | COPIED).to_be_bytes());
    let cluster_len = usize::try_from(CLUSTER).unwrap_or(0);
    media.write(FileOffset(L2 * CLUSTER), &vec![0; cluster_len]);
    for cluster in &CLUSTERS {
        let descriptor = cluster.place.map_or(0, |place| place * CLUSTER | COPIED);
        let entry = [descriptor.to_be_bytes(), cluster.bitmap().to_be_bytes()].concat();
        overwrite(media, FileOffset(L2 * CLUSTER + cluster.number * 16), &entry);
        let Some(place) = cluster.place else { continue };
        media.write(FileOffset(place * CLUSTER), &vec![0xc3; cluster_len]);
        for (sector, _) in cluster.letters().filter(|(_, letters)| *letters == 'd') {
            media.set(place * 32 + sector % 32, Sector::Word(Word::guest(PARENTS, sector)));
        }
    }
}

/// Changes a write to the L2 table so that every allocated cluster is allocated as a whole.
pub fn round(write: &mut MetaWrite) {
    if !(L2 * CLUSTER..(L2 + 1) * CLUSTER).contains(&write.at.0) {
        return;
    }
    for entry in write.bytes.chunks_exact_mut(16).filter(|entry| entry[..8] != [0; 8]) {
        entry[8..].copy_from_slice(&0xffff_ffffu64.to_be_bytes());
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
    fn a_file_with_subclusters_is_sound_and_reads_as_its_bitmaps_say() {
        for kind in [Kind::SubclusterQcow2, Kind::SubclusterChildQcow2] {
            let subject = Subject::new(kind, Unwritten::Stale);
            let start = prepare(&subject).unwrap();
            let found = read_back(&subject, start.clone(), &[0..32, 992..1056, 2048..2080]);

            let held = |sector: u64| start.base.get(&sector).copied().unwrap_or(Words::whole(Word::ZERO));
            assert!(found.iter().all(|(sector, words)| *words == held(*sector)), "{kind}: {found:?}");
            for (sector, word) in given() {
                assert_eq!(held(sector), Words::whole(word), "{kind}: sector {sector}");
            }
            assert_eq!(damage(&mut start.files[0].clone(), start.forms[0]), None);
        }
    }
}
