//! The ledger of a check: for every cluster of the file, how often something refers to it.
//!
//! Knows nothing of tables or of what the image itself claims. It takes two and a half bytes for each cluster that
//! is referred to, in chunks of 4096: 40 MiB for a full disk of 1 TiB at 64 KiB, 640 MiB at 16 TiB. A count stops at
//! 65535.

use std::cell::Cell;
use std::collections::BTreeMap;

use crate::{ImageError, ImageErrorKind};

/// Clusters in a chunk.
const CHUNK: usize = 4096;
/// The same, of cluster numbers.
const WIDTH: u64 = 4096;
/// Chunks at most: what a full disk of 24 TiB at 64 KiB takes, 1 GiB. A sparse file with references all over it must
/// not take more.
const CHUNKS_MAX: usize = 100_000;

/// What a reference is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A second-level table of the active disk.
    Table,
    /// A cluster of the active disk.
    Data,
    /// Anything else: a structure that has its clusters for itself, a compressed cluster, something of a snapshot.
    Other,
}

/// Something that cannot be so in the active disk alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clash {
    /// Two places have the same cluster.
    Shared,
    /// The cluster is a second-level table and data at once.
    TableAndData,
}

/// One bit for each cluster of a chunk.
type Bits = [u64; CHUNK / 64];

struct Chunk {
    counts: [u16; CHUNK],
    tables: Bits,
    data: Bits,
    shared: Bits,
    single: Bits,
}

/// How often something refers to each cluster of a file.
pub struct Ledger {
    /// In the order in which they were needed.
    chunks: Vec<Box<Chunk>>,
    chunks_max: usize,
    /// Chunk numbers, and where those chunks are.
    places: BTreeMap<u64, usize>,
    /// The one asked for last: clusters that follow each other are mostly asked for in turn.
    last: Cell<Option<(u64, usize)>>,
}

impl Default for Ledger {
    fn default() -> Ledger {
        Ledger { chunks: Vec::new(), chunks_max: CHUNKS_MAX, places: BTreeMap::new(), last: Cell::new(None) }
    }
}

fn split(cluster: u64) -> (u64, usize) {
    (cluster / WIDTH, usize::try_from(cluster % WIDTH).unwrap_or(0))
}

fn bit(bits: &Bits, index: usize) -> bool {
    bits.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
}

fn raise(bits: &mut Bits, index: usize) {
    if let Some(word) = bits.get_mut(index / 64) {
        *word |= 1 << (index % 64);
    }
}

impl Ledger {
    /// Where a count stops.
    pub const COUNT_MAX: u64 = 65535;

    /// One reference more.
    pub fn count(&mut self, cluster: u64, role: Role) -> Result<Option<Clash>, ImageError> {
        let (number, index) = split(cluster);
        if self.place(number).is_none() {
            self.add(number)?;
        }
        let Some(chunk) = self.chunk_mut(number) else { return Ok(None) };
        if let Some(count) = chunk.counts.get_mut(index) {
            *count = count.saturating_add(1);
        }
        let (table, data) = (bit(&chunk.tables, index), bit(&chunk.data, index));
        let clash = match role {
            Role::Other => None,
            Role::Table if data => Some(Clash::TableAndData),
            Role::Data if table => Some(Clash::TableAndData),
            Role::Table | Role::Data if table || data => Some(Clash::Shared),
            Role::Table | Role::Data => None,
        };
        match role {
            Role::Table => raise(&mut chunk.tables, index),
            Role::Data => raise(&mut chunk.data, index),
            Role::Other => {}
        }
        if clash == Some(Clash::Shared) {
            raise(&mut chunk.shared, index);
        }
        Ok(clash)
    }

    /// Takes one reference back.
    pub fn discount(&mut self, cluster: u64) {
        let (number, index) = split(cluster);
        if let Some(count) = self.chunk_mut(number).and_then(|chunk| chunk.counts.get_mut(index)) {
            *count = count.saturating_sub(1);
        }
    }

    /// How many references there are.
    pub fn references(&self, cluster: u64) -> u64 {
        let (number, index) = split(cluster);
        self.chunk(number).and_then(|chunk| chunk.counts.get(index)).map_or(0, |&count| count.into())
    }

    /// Whether a cluster is a second-level table of the active disk.
    pub fn is_table(&self, cluster: u64) -> bool {
        self.bit(cluster, |chunk| &chunk.tables)
    }

    /// Whether two places of the active disk have this cluster.
    pub fn is_shared(&self, cluster: u64) -> bool {
        self.bit(cluster, |chunk| &chunk.shared)
    }

    /// Notes that the image counts one reference to a cluster, which is what lets an entry be marked as copied.
    pub fn set_single(&mut self, cluster: u64) {
        let (number, index) = split(cluster);
        if let Some(chunk) = self.chunk_mut(number) {
            raise(&mut chunk.single, index);
        }
    }

    /// What [`Ledger::set_single`] noted.
    pub fn is_single(&self, cluster: u64) -> bool {
        self.bit(cluster, |chunk| &chunk.single)
    }

    /// The first cluster behind all that is referred to.
    pub fn end(&self) -> u64 {
        let in_use = |chunk: &Chunk| chunk.counts.iter().rposition(|&count| count > 0);
        let chunks = self.places.iter().rev().filter_map(|(&number, &place)| Some((number, self.chunks.get(place)?)));
        let last = chunks.filter_map(|(number, chunk)| Some((number, in_use(chunk)?))).next();
        last.map_or(0, |(number, index)| {
            let index = u64::try_from(index).unwrap_or(0);
            number.saturating_mul(WIDTH).saturating_add(index).saturating_add(1)
        })
    }

    /// The first cluster from `cluster` on that is referred to.
    pub fn next_in_use(&self, cluster: u64) -> Option<u64> {
        let (first, index) = split(cluster);
        self.places.range(first..).find_map(|(&number, &place)| {
            let chunk = self.chunks.get(place)?;
            let skip = if number == first { index } else { 0 };
            let found = chunk.counts.iter().skip(skip).position(|&count| count > 0)?;
            Some(number.saturating_mul(WIDTH).saturating_add(u64::try_from(skip + found).unwrap_or(0)))
        })
    }

    fn bit(&self, cluster: u64, of: impl Fn(&Chunk) -> &Bits) -> bool {
        let (number, index) = split(cluster);
        self.chunk(number).is_some_and(|chunk| bit(of(chunk), index))
    }

    fn add(&mut self, number: u64) -> Result<(), ImageError> {
        if self.chunks.len() >= self.chunks_max {
            let what = "its clusters are too many, or too far apart, to be counted in 1 GiB of memory";
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        let empty = [0; CHUNK / 64];
        self.places.insert(number, self.chunks.len());
        let chunk = Chunk { counts: [0; CHUNK], tables: empty, data: empty, shared: empty, single: empty };
        self.chunks.push(Box::new(chunk));
        Ok(())
    }

    fn place(&self, number: u64) -> Option<usize> {
        match self.last.get() {
            Some((last, place)) if last == number => Some(place),
            _ => {
                let place = *self.places.get(&number)?;
                self.last.set(Some((number, place)));
                Some(place)
            }
        }
    }

    fn chunk(&self, number: u64) -> Option<&Chunk> {
        self.chunks.get(self.place(number)?).map(Box::as_ref)
    }

    fn chunk_mut(&mut self, number: u64) -> Option<&mut Chunk> {
        let place = self.place(number)?;
        self.chunks.get_mut(place).map(Box::as_mut)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn references_are_counted_over_chunks() {
        let mut ledger = Ledger::default();
        ledger.count(0, Role::Other).unwrap();
        ledger.count(4095, Role::Data).unwrap();
        ledger.count(4096, Role::Data).unwrap();
        ledger.count(4096, Role::Other).unwrap();
        assert_eq!([0, 1, 4095, 4096, 9999].map(|cluster| ledger.references(cluster)), [1, 0, 1, 2, 0]);
        assert_eq!(ledger.end(), 4097);
        assert_eq!([0, 1, 4096, 4097].map(|from| ledger.next_in_use(from)), [Some(0), Some(4095), Some(4096), None]);
        ledger.discount(4096);
        ledger.discount(4096);
        assert_eq!(ledger.end(), 4096);
    }

    #[test]
    fn two_places_of_the_disk_with_one_cluster_are_seen() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.count(7, Role::Data), Ok(None));
        assert_eq!(ledger.count(7, Role::Other), Ok(None));
        assert!(!ledger.is_shared(7));
        assert_eq!(ledger.count(7, Role::Data), Ok(Some(Clash::Shared)));
        assert!(ledger.is_shared(7));
        assert_eq!(ledger.count(7, Role::Table), Ok(Some(Clash::TableAndData)));
    }

    #[test]
    fn a_count_stops_at_its_end() {
        let mut ledger = Ledger::default();
        for _ in 0..70_000 {
            ledger.count(1, Role::Other).unwrap();
        }
        assert_eq!(ledger.references(1), 65535);
    }

    #[test]
    fn references_all_over_a_sparse_file_do_not_take_all_memory() {
        let mut ledger = Ledger { chunks_max: 10, ..Ledger::default() };
        let refused = (0..100).find(|&step| ledger.count(step * 5000, Role::Data).is_err());
        assert_eq!(refused, Some(10));
    }
}
