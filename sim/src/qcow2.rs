//! Lays out new qcow2 files without the code under test, with small clusters, so that short workloads reach every
//! table.
//!
//! Knows the qcow2 specification and nothing about how images are created or opened.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use disk::FileOffset;

use crate::cluster::{CLUSTER, CLUSTER_SECTORS, COUNTED, L1_AT};
use crate::compressed;
use crate::media::{Media, Unwritten};
use crate::sector::SECTOR;
use crate::shared;
use crate::subclusters;

/// Incompatible feature bit "External data file bit".
const EXTERNAL_DATA: u64 = 1 << 2;
/// Offset of the parent's name.
const NAME_AT: u64 = 1024;

/// The properties of a new file.
#[derive(Clone, Copy, Debug)]
pub struct Spec<'a> {
    /// Size of the disk in sectors.
    pub sectors: u64,
    /// The name of the parent, if there is one.
    pub parent: Option<&'a str>,
    /// The version: 2 or 3.
    pub version: u32,
    /// Number of clusters at the beginning of the file that are counted as used; those not needed by tables are leaked.
    pub used: u64,
    /// The initial content.
    pub holds: Holds,
}

/// The initial content of a new file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// An empty disk.
    Nothing,
    /// Compressed clusters ([`compressed`]).
    Compressed,
    /// A disk with an internal snapshot ([`shared`]).
    Snapshot,
    /// Extended L2 entries ([`subclusters`]).
    Subclusters,
    /// An empty disk whose data will be in a data file.
    DataFile,
    /// As `DataFile`, with extended L2 entries.
    SubclustersInDataFile,
}

impl Holds {
    /// Number of clusters of such a file.
    fn used(self) -> u64 {
        match self {
            Holds::Nothing | Holds::DataFile | Holds::SubclustersInDataFile => 4,
            Holds::Compressed => compressed::USED,
            Holds::Snapshot => shared::USED,
            Holds::Subclusters => subclusters::USED,
        }
    }

    /// Size of such a file in bytes, unless it is on a device.
    pub fn bytes(self) -> u64 {
        self.used() * self.sizes().0
    }

    /// Sizes in bytes of a cluster and of an L2 entry.
    fn sizes(self) -> (u64, u64) {
        match self {
            Holds::Subclusters | Holds::SubclustersInDataFile => (subclusters::CLUSTER, 16),
            Holds::Nothing | Holds::Compressed | Holds::Snapshot | Holds::DataFile => (CLUSTER, 8),
        }
    }
}

/// Lays out the file: header, refcount table, refcount block and L1 table, one cluster each.
pub fn create(spec: &Spec<'_>, tail: Unwritten) -> Media {
    let mut media = Media::empty(tail);
    let used = spec.used.max(spec.holds.used()).min(COUNTED);
    let (cluster, _) = spec.holds.sizes();
    let cluster_of = |bytes: &[u8]| padded(bytes, cluster);
    media.set_len(used * cluster);
    media.write(FileOffset(0), &header(spec));
    media.write(FileOffset(cluster), &cluster_of(&(2 * cluster).to_be_bytes()));
    let count = |cluster| match spec.holds {
        Holds::Nothing | Holds::Subclusters | Holds::DataFile | Holds::SubclustersInDataFile => 1,
        Holds::Compressed => compressed::count(cluster),
        Holds::Snapshot => shared::count(cluster, spec.version),
    };
    let counts: Vec<u8> = (0..used).flat_map(|cluster| count(cluster).to_be_bytes()).collect();
    media.write(FileOffset(2 * cluster), &cluster_of(&counts));
    media.write(FileOffset(3 * cluster), &cluster_of(&[]));
    match spec.holds {
        Holds::Nothing => {}
        Holds::DataFile | Holds::SubclustersInDataFile => media.add_data_file(),
        Holds::Compressed => compressed::put(&mut media, L1_AT),
        Holds::Snapshot => shared::put(&mut media, spec.version),
        Holds::Subclusters => subclusters::put(&mut media),
    }
    media
}

fn padded(bytes: &[u8], len: u64) -> Vec<u8> {
    let mut padded = bytes.to_vec();
    padded.resize(usize::try_from(len).unwrap_or(0), 0);
    padded
}

fn header(spec: &Spec<'_>) -> Vec<u8> {
    let (cluster, entry) = spec.holds.sizes();
    let l1_entries = (spec.sectors * SECTOR).div_ceil(cluster * cluster / entry);
    let features = match spec.holds {
        Holds::Subclusters => subclusters::FEATURE,
        Holds::DataFile => EXTERNAL_DATA,
        Holds::SubclustersInDataFile => subclusters::FEATURE | EXTERNAL_DATA,
        Holds::Nothing | Holds::Compressed | Holds::Snapshot => 0,
    };
    let name = spec.parent.unwrap_or_default();
    let name_len = u64::try_from(name.len()).unwrap_or(0);
    // Offset, length and value of each field that is not zero.
    let (snapshots, snapshots_at) = if spec.holds == Holds::Snapshot { (1, 4 * CLUSTER) } else { (0, 0) };
    let fields: [(usize, usize, u64); 15] = [
        (0, 4, 0x5146_49fb),
        (4, 4, spec.version.into()),
        (8, 8, if name.is_empty() { 0 } else { NAME_AT }),
        (16, 4, name_len),
        (20, 4, u64::from(cluster.trailing_zeros())),
        (24, 8, spec.sectors * SECTOR),
        (36, 4, l1_entries),
        (40, 8, 3 * cluster),
        (48, 8, cluster),
        (56, 4, 1),
        (60, 4, snapshots),
        (64, 8, snapshots_at),
        (72, 8, features),
        (96, 4, 4),
        (100, 4, 104),
    ];
    let mut header = padded(&[], cluster);
    // The header of version 2 ends before the last three.
    for (at, len, value) in fields.into_iter().filter(|(at, ..)| spec.version >= 3 || *at < 72) {
        header[at..at + len].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    }
    let name_at = usize::try_from(NAME_AT).unwrap_or(0);
    header[name_at..name_at + name.len()].copy_from_slice(name.as_bytes());
    header
}

/// The first difference between the internal snapshot of a file and its initial content.
pub fn lost_of_snapshot(media: &Media, version: u32) -> Option<String> {
    static EXPECTED: [OnceLock<BTreeMap<u64, shared::ClusterContent>>; 2] = [const { OnceLock::new() }; 2];
    let cell = &EXPECTED[usize::from(version >= 3)];
    let expected = cell.get_or_init(|| {
        let spec = Spec {
            sectors: 2 * compressed::TABLE * CLUSTER_SECTORS,
            parent: None,
            version,
            used: 0,
            holds: Holds::Snapshot,
        };
        shared::shown(&create(&spec, Unwritten::Zeroes))
    });
    let found = shared::shown(media);
    if found == *expected {
        return None;
    }
    let other =
        expected.iter().find(|(cluster, shown)| found.get(cluster) != Some(*shown)).map(|(cluster, _)| *cluster);
    let other = other.or_else(|| found.keys().find(|cluster| !expected.contains_key(cluster)).copied());
    Some(format!("the snapshot has changed, first in cluster {}", other.unwrap_or(0)))
}

#[cfg(test)]
mod test {
    use super::*;
    use disk::Source;

    #[test]
    fn the_header_stands_where_the_specification_says() {
        let spec = Spec { sectors: 4608, parent: Some("base"), version: 3, used: 0, holds: Holds::Nothing };
        let mut media = create(&spec, Unwritten::Zeroes);
        let mut bytes = [0; 104];
        media.read_at(FileOffset(0), &mut bytes).unwrap();
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(number(0), 0x5146_49fb_0000_0003);
        assert_eq!((number(8), number(16)), (1024, 0x0000_0004_0000_000b));
        assert_eq!((number(24), number(32)), (4608 * 512, 5));
        assert_eq!((number(40), number(48), number(56)), (3 * CLUSTER, CLUSTER, 1 << 32));
        assert_eq!(number(96), 0x0000_0004_0000_0068);
        assert_eq!(media.len(), 4 * CLUSTER);
    }
}
