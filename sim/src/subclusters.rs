//! A qcow2 file with extended L2 entries, made by hand: clusters of which some subclusters are in the file, some read
//! as zero and some are in the parent, with and without a place.
//!
//! Knows the qcow2 specification and nothing of how our images are opened. A subcluster is a sector here, as small as
//! it can be.

use disk::{FileOffset, MetaWrite};

use crate::compressed::{COPIED, overwrite};
use crate::media::Media;
use crate::sector::{PARENTS, SECTOR, Sector, Word};
use crate::theme::BLOCK;

/// Bytes of a cluster: the smallest whose subclusters have a sector each.
pub const CLUSTER: u64 = 32 * SECTOR;
/// Clusters of a file that holds it: four that every file has, an L2 table, and three of data.
pub const USED: u64 = 8;
/// Feature bit of such a file: "Extended L2 Entries".
pub const FEATURE: u64 = 1 << 4;

/// Clusters of the file: the L1 table and the L2 table.
const L1: u64 = 3;
const L2: u64 = 4;

/// A cluster of the disk: its place in the file, if it has one, and a letter for each of its first subclusters: `d`
/// data, `z` zero, `.` in the parent, as all the others are.
struct Cluster {
    number: u64,
    place: Option<u64>,
    subclusters: &'static str,
}

/// Those that the workloads touch: the first, and those on both sides of two blocks' borders.
const CLUSTERS: [Cluster; 4] = [
    Cluster { number: 0, place: Some(5), subclusters: "dzdd.dz" },
    Cluster { number: BLOCK / 32 - 1, place: None, subclusters: "zz.............................z" },
    Cluster { number: BLOCK / 32, place: Some(6), subclusters: "" },
    Cluster { number: 2 * BLOCK / 32, place: Some(7), subclusters: "zzd.zzzz" },
];

impl Cluster {
    /// Sectors of the disk of which something is said, and what is.
    fn said(&self) -> impl Iterator<Item = (u64, char)> {
        let first = self.number * 32;
        (first..).zip(self.subclusters.chars()).filter(|(_, said)| *said != '.')
    }

    fn bitmap(&self) -> u64 {
        self.said().fold(0, |bitmap, (sector, said)| bitmap | 1 << (sector % 32 + if said == 'z' { 32 } else { 0 }))
    }
}

/// What a disk holds that stands on such a file; zeroes among it hide what is below.
pub fn given() -> impl Iterator<Item = (u64, Word)> {
    let said = CLUSTERS.iter().flat_map(Cluster::said);
    said.map(|(sector, said)| (sector, if said == 'z' { Word::ZERO } else { Word::guest(PARENTS, sector) }))
}

/// Puts it into a new file, whose L1 table names no tables yet. Places hold rubbish where a bitmap does not say `data`.
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
        for (sector, _) in cluster.said().filter(|(_, said)| *said == 'd') {
            media.set(place * 32 + sector % 32, Sector::Word(Word::guest(PARENTS, sector)));
        }
    }
}

/// A write to the L2 table has every cluster that has a place in the file as a whole.
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
