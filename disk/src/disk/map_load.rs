//! Metadata that is loaded, and what waits for it.
//!
//! Knows nothing of what is done with the metadata. Keeps: a block of metadata is read once for all who wait for it;
//! few chunks of the map are loaded at once, so that they do not evict each other's metadata, and each is loaded in the
//! end.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use super::layer::Missing;
use super::queue::Parked;
use crate::chain_map::ChainMap;
use crate::format::MetaBlock;
use crate::{DiskOffset, FileId, FileOffset};

/// Chunks loaded at once: enough to keep the storage busy, since each may load a bitmap of every layer.
const LOADING_MAX: usize = 16;
/// Loads for one chunk, per layer, after which it is loaded alone. Formats cache what was loaded, and chunks that are
/// loaded side by side can evict each other's blocks without end if the caches are small. One chunk alone always
/// finishes, for a format keeps at least what one chunk takes.
const LOADS_MAX: usize = 16;

/// Loads under way, chunks that are being loaded, and what waits for its turn.
#[derive(Debug, Default)]
pub(super) struct MapLoader {
    /// The operations that wait for each block, by its file and its offset there.
    loads: FxHashMap<(FileId, FileOffset), Vec<Parked>>,
    under_way: Vec<ChunkLoad>,
    /// The chunk that is loaded alone.
    /// By where it begins, as those under way.
    alone: Option<DiskOffset>,
    waiting: VecDeque<Parked>,
}

#[derive(Debug)]
struct ChunkLoad {
    chunk: DiskOffset,
    /// Loads that were begun for it.
    loads: usize,
}

impl MapLoader {
    /// Whether nothing is being loaded.
    #[cfg(test)]
    pub fn is_over(&self) -> bool {
        self.loads.is_empty() && self.under_way.is_empty() && self.alone.is_none() && self.waiting.is_empty()
    }

    /// Parks what needs a chunk whose metadata is missing. Returns what is to be read now.
    pub fn park_for_chunk(&mut self, parked: Parked, missing: Missing, layers: usize) -> Missing {
        let chunk = ChainMap::chunk_of(parked.at()).at;
        if !self.admit(chunk) {
            self.waiting.push_back(parked);
            return Missing::new();
        }
        let begun = self.park(parked, missing);
        let Some(load) = self.under_way.iter_mut().find(|load| load.chunk == chunk) else {
            unreachable!("chunk {chunk} was admitted")
        };
        load.loads += begun.len();
        if load.loads > layers * LOADS_MAX {
            self.alone.get_or_insert(chunk);
        }
        begun
    }

    /// Parks something until the missing metadata is loaded. All of it is requested at once, and the parked operation
    /// waits for the last block: by then most others have come, and the layers need not be walked for each. Returns
    /// what is to be read now.
    pub fn park(&mut self, parked: Parked, mut missing: Missing) -> Missing {
        let Some(&(file, MetaBlock { at, .. })) = missing.last() else { unreachable!("nothing is missing") };
        // One load for all who wait: a second one could bring older bytes than the first.
        missing.retain(|(file, block)| match self.loads.entry((*file, block.at)) {
            Entry::Vacant(place) => {
                place.insert(Vec::new());
                true
            }
            Entry::Occupied(_) => false,
        });
        self.loads.entry((file, at)).or_default().push(parked);
        missing
    }

    /// A block was read: what has waited for it. [`MapLoader::went_on`] follows for each.
    pub fn loaded(&mut self, file: FileId, block: MetaBlock) -> Vec<Parked> {
        let Some(parked) = self.loads.remove(&(file, block.at)) else {
            unreachable!("no request waits for {block:?} of file {}", file.0)
        };
        parked
    }

    /// An operation that waited for metadata around byte `at` has continued. Ends the load of its chunk, so that the
    /// next one has its turn, unless the chunk is not known (`is_known`) and more of it is awaited.
    pub fn went_on(&mut self, at: DiskOffset, is_known: bool) {
        let chunk = ChainMap::chunk_of(at).at;
        // It is known now, or failed, or was known and forgotten again since the request continued behind it.
        if is_known || !self.is_awaited(chunk) {
            self.under_way.retain(|load| load.chunk != chunk);
            self.alone.take_if(|alone| *alone == chunk);
        }
    }

    /// The next one whose turn it is.
    pub fn next(&mut self) -> Option<Parked> {
        let room = self.alone.is_none() && self.under_way.len() < LOADING_MAX;
        if room { self.waiting.pop_front() } else { None }
    }

    /// Whether a chunk may be loaded now. If not, it is taken off the list.
    fn admit(&mut self, chunk: DiskOffset) -> bool {
        if self.alone.is_some_and(|alone| alone != chunk) {
            self.under_way.retain(|load| load.chunk != chunk);
            return false;
        }
        if self.under_way.iter().any(|load| load.chunk == chunk) {
            return true;
        }
        let admitted = self.under_way.len() < LOADING_MAX;
        if admitted {
            self.under_way.push(ChunkLoad { chunk, loads: 0 });
        }
        admitted
    }

    /// Whether something waits for metadata of this chunk.
    fn is_awaited(&self, chunk: DiskOffset) -> bool {
        self.loads.values().flatten().any(|parked| ChainMap::chunk_of(parked.at()).at == chunk)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::Span;
    use crate::chain_map::CHUNK;

    const FILE: FileId = FileId(0);

    fn parked(chunk: u64) -> Parked {
        Parked::Request { number: 0, rest: Span { at: DiskOffset(chunk * CHUNK), len: 512 } }
    }

    fn block(at: u64) -> MetaBlock {
        MetaBlock { at: FileOffset(at), len: 512 }
    }

    #[test]
    fn a_block_is_read_once_for_all_who_wait_for_it() {
        let mut loader = MapLoader::default();
        assert_eq!(loader.park(parked(0), vec![(FILE, block(512)), (FILE, block(0))]).len(), 2);
        assert_eq!(loader.park(parked(1), vec![(FILE, block(0))]), []);
        assert_eq!(loader.loaded(FILE, block(512)), [], "the last one is waited for");
        assert_eq!(loader.loaded(FILE, block(0)), [parked(0), parked(1)]);
        assert!(loader.is_over());
    }

    #[test]
    fn few_chunks_are_loaded_at_once_and_the_next_has_its_turn_when_one_is_known() {
        let mut loader = MapLoader::default();
        let chunks = 0..LOADING_MAX as u64;
        for chunk in chunks.clone() {
            assert_eq!(loader.park_for_chunk(parked(chunk), vec![(FILE, block(chunk * 512))], 1).len(), 1);
        }
        let late = parked(chunks.end);
        assert_eq!(loader.park_for_chunk(late, vec![(FILE, block(chunks.end * 512))], 1), []);
        assert_eq!(loader.next(), None);
        assert_eq!(loader.loaded(FILE, block(0)), [parked(0)]);
        loader.went_on(DiskOffset(0), true);
        assert_eq!((loader.next(), loader.next()), (Some(late), None));
    }

    #[test]
    fn a_chunk_for_which_too_much_is_loaded_is_loaded_alone() {
        let mut loader = MapLoader::default();
        loader.park_for_chunk(parked(1), vec![(FILE, block(1 << 30))], 1);
        for load in 0..=LOADS_MAX as u64 {
            assert_eq!(loader.park_for_chunk(parked(0), vec![(FILE, block(load * 512))], 1).len(), 1);
            assert_eq!(loader.loaded(FILE, block(load * 512)), [parked(0)]);
        }
        assert_eq!(loader.loaded(FILE, block(1 << 30)), [parked(1)]);
        assert_eq!(loader.park_for_chunk(parked(1), vec![(FILE, block(1 << 30))], 1), [], "another one waits");
        loader.went_on(DiskOffset(0), true);
        assert_eq!(loader.next(), Some(parked(1)));
    }
}
