//! Where the bytes of the disk live: the chain map, loaded as it is asked.
//!
//! Knows nothing of who asks and of waiting. Keeps: a damaged part of a chunk does not make the rest of it unreadable.

use std::collections::VecDeque;

use super::chain::Chain;
use super::layer::Missing;
use crate::chain_map::{ChainMap, Location};
use crate::format::Format;
use crate::{DiskOffset, Span};

/// Damaged chunks that are remembered.
const DAMAGED_MAX: usize = 256;
/// Bytes of a damaged chunk that are mapped together.
const PAGE: u64 = 4096;

/// What is known of where bytes live.
#[derive(Debug)]
pub(super) struct DiskMap {
    known: ChainMap,
    /// Bytes of memory that it may take.
    budget: usize,
    /// Chunks that cannot be loaded as a whole, the oldest first. Their sound parts are still found, page by page.
    damaged: VecDeque<DiskOffset>,
    /// Bytes of metadata cached since the caches were last dropped.
    cached_bytes: usize,
}

impl DiskMap {
    /// Of a disk of `len` bytes.
    pub fn new(len: u64, budget: usize) -> DiskMap {
        DiskMap { known: ChainMap::new(len, budget), budget, damaged: VecDeque::new(), cached_bytes: 0 }
    }

    /// Where byte `at` lives, and for how many bytes, if that is known.
    #[inline(always)]
    pub fn lookup(&self, at: DiskOffset) -> Option<(Location, u64)> {
        self.known.lookup(at)
    }

    /// Where byte `at` lives, and for how many bytes. `Err` names metadata to be loaded first.
    pub fn resolve<F: Format>(&mut self, at: DiskOffset, chain: &mut Chain<F>) -> Result<(Location, u64), Missing> {
        if let Some(found) = self.known.lookup(at) {
            return Ok(found);
        }
        let chunk = ChainMap::chunk_of(at);
        let damaged = self.damaged.contains(&chunk.at);
        let wanted = if damaged { Span { at: at.align_down(PAGE), len: PAGE } } else { chunk };
        let inside = wanted.intersection(Span { at: DiskOffset(0), len: chain.geometry().len }).unwrap_or(wanted);
        let runs = chain.map(0, inside)?;
        let Some(run) = runs.iter().find(|run| at < run.span.end()) else {
            unreachable!("the walk covers the span without gaps")
        };
        let found = (run.place.advanced(at - run.span.at), run.span.end() - at);
        if !damaged {
            self.known.insert(chunk, &runs);
            self.cached_bytes += size_of_val(runs.as_slice());
        }
        Ok(found)
    }

    /// Extends a run of which `len` bytes are known into the following chunks, up to `left` bytes.
    pub fn coalesce(&self, at: DiskOffset, place: Location, mut len: u64, left: u64) -> u64 {
        while len < left {
            let next = self.known.lookup(at + len);
            match next.filter(|&(next, _)| next == place.advanced(len)) {
                Some((_, more)) => len = (len + more).min(left),
                None => break,
            }
        }
        len
    }

    /// The known mappings, to be changed with those of the layers.
    pub fn known_mut(&mut self) -> &mut ChainMap {
        &mut self.known
    }

    /// Forgets the chunk around a byte.
    pub fn forget(&mut self, at: DiskOffset) {
        self.known.forget(at);
    }

    /// Forgets everything, for the layers show something else.
    pub fn reset(&mut self, len: u64) {
        self.known = ChainMap::new(len, self.budget);
    }

    /// Metadata of the chunk around a byte makes no sense. Returns whether that is new: then what waits looks again.
    pub fn met_damage(&mut self, at: DiskOffset) -> bool {
        let chunk = ChainMap::chunk_of(at).at;
        if self.damaged.contains(&chunk) {
            return false;
        }
        if self.damaged.len() == DAMAGED_MAX {
            self.damaged.pop_front();
        }
        self.damaged.push_back(chunk);
        true
    }

    /// So many bytes of metadata were loaded, or written and kept.
    pub fn cached(&mut self, bytes: usize) {
        self.cached_bytes += bytes;
    }

    /// Bytes of metadata cached since [`DiskMap::clear`].
    pub fn cached_bytes(&self) -> usize {
        self.cached_bytes
    }

    /// Drops all that can be loaded again.
    pub fn clear(&mut self) {
        self.cached_bytes = 0;
        self.known.clear();
    }
}

#[cfg(test)]
mod test {
    use super::super::layer::Layer;
    use super::super::test::clusters::{CLUSTER, Clusters};
    use super::*;
    use crate::FileId;
    use crate::chain_map::CHUNK;

    const LEN: u64 = 2 * CHUNK;

    /// A leaf that has its first cluster, on an empty base, with all metadata loaded.
    fn chain() -> Chain<Clusters> {
        let mut leaf = Clusters::new(LEN);
        leaf.put(&mut Vec::new(), 0, 7);
        let geometry = leaf.geometry();
        let layers = [(FileId(0), leaf), (FileId(1), Clusters::new(LEN))];
        Chain::new(layers.map(|(file, layer)| Layer::new(file, layer)).into(), geometry)
    }

    fn resolve(map: &mut DiskMap, chain: &mut Chain<Clusters>, at: u64) -> (Location, u64) {
        loop {
            match map.resolve(DiskOffset(at), chain) {
                Ok(found) => return found,
                Err(missing) => {
                    for (file, block) in missing {
                        assert!(chain.of(file).load(block, vec![0; 512]));
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_resolved_is_known_until_it_is_forgotten() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        assert!(map.lookup(DiskOffset(0)).is_none() && map.resolve(DiskOffset(0), &mut chain).is_err());
        let (place, len) = resolve(&mut map, &mut chain, 512);
        assert!(place.is_in(FileId(0)) && len == CLUSTER - 512);
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), Some((Location::Zero, CHUNK - CLUSTER)));
        assert!(map.cached_bytes() > 0);
        map.forget(DiskOffset(0));
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), None);
    }

    #[test]
    fn runs_that_continue_in_the_next_chunk_are_one() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        let len = resolve(&mut map, &mut chain, CLUSTER).1;
        assert_eq!(map.coalesce(DiskOffset(CLUSTER), Location::Zero, len, CHUNK), len, "the next chunk is not known");
        resolve(&mut map, &mut chain, CHUNK);
        assert_eq!(map.coalesce(DiskOffset(CLUSTER), Location::Zero, len, CHUNK), CHUNK);
    }

    #[test]
    fn a_damaged_chunk_is_mapped_page_by_page_and_not_kept() {
        let (mut map, mut chain) = (DiskMap::new(LEN, 1 << 20), chain());
        assert!(map.met_damage(DiskOffset(CLUSTER)) && !map.met_damage(DiskOffset(0)), "the same chunk");
        assert_eq!(resolve(&mut map, &mut chain, CLUSTER + 512), (Location::Zero, PAGE - 512));
        assert_eq!(map.lookup(DiskOffset(CLUSTER)), None);
    }
}
