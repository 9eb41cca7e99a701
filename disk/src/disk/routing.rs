//! Where the guest's writes go, and when readers see what was written.
//!
//! Knows layers and chunks; knows nothing of how a write or a chunk of a merge is done. Writes go to the leaf. Only
//! while the leaf is being merged (`merge`) they go to one of two layers, by chunk.
//!
//! # A merge of the leaf
//!
//! A chunk is undecided, the leaf's, or merged. Its first write or its merge decides, once; it becomes merged only
//! while nothing in flight overlaps it.
//!
//! - *A write to the leaf is in flight when the chunk's merge begins:* the merge waits for it, and copies it.
//! - *A write comes while the chunk is being merged:* it waits, is routed afterwards, and goes to the target. It cannot
//!   overtake the copy.
//! - *Two writes to one chunk* go to the same layer, so that its format sees both where they share a cluster.
//! - *A write from before the merge is in an undecided chunk,* with its commit in the leaf still to come: the chunk is
//!   the leaf's. So are the later chunks of that write.
//! - *A write to an undecided chunk of which no source has anything allocated:* there is nothing to copy, and nothing
//!   hides the write. The chunk is merged, the write goes to the target, and its fill is read as a reader would: from
//!   the target and below.
//! - *A merge that fails or is cancelled* decides no more chunks. The merged ones stay the target's until nothing at
//!   all is in flight: a write to the leaf would copy a cluster from the target to which another write is under way.
//!   Then the whole disk is the leaf's again, and a new merge starts with nothing decided.
//! - *A write for which the target has no space:* the merge has failed. The write is not answered. It starts over when
//!   nothing at all is in flight, and new requests wait for that. The whole disk is the leaf's then, which may have the
//!   space, as it would have had without the merge.
//! - *A fill of a write to the leaf*, with the leaf not among the sources, stays inside the chunk of its write, so the
//!   chunk's merge waits for it as for the write.

use super::active::Requests;
use super::chain::Chain;
use super::layer::Missing;
use crate::chain_map::{CHUNK, ChainMap, Location};
use crate::format::{Committed, Format};
use crate::size::in_memory;
use crate::{DiskOffset, FileId, Span};

/// Bytes that are routed at once: the largest block of a VHD, so that a discard of a whole block is seen as such.
const ALIKE_MAX: u64 = 16 << 20;

/// Where writes go.
#[derive(Debug, Default)]
pub(super) struct WriteRouting {
    /// With the leaf being merged; otherwise all go to the leaf.
    by_chunk: Option<ByChunk>,
    /// How often a merge has begun to decide.
    epoch: u64,
}

/// The decisions about the chunks.
#[derive(Debug)]
struct ByChunk {
    /// The depth of the target. All layers above it are sources.
    into: usize,
    target: FileId,
    /// Bytes of the disk.
    len: u64,
    /// Chunks are still being decided.
    decides: bool,
    merged: Bits,
    leafs: Bits,
}

/// A bit for each chunk.
#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(count: u64) -> Bits {
        Bits(vec![0; in_memory(count.div_ceil(64))])
    }

    fn has(&self, bit: u64) -> bool {
        self.0.get(in_memory(bit / 64)).is_some_and(|word| word & (1 << (bit % 64)) != 0)
    }

    fn set(&mut self, bit: u64) {
        let Some(word) = self.0.get_mut(in_memory(bit / 64)) else { unreachable!("bit {bit} is behind the end") };
        *word |= 1 << (bit % 64);
    }
}

impl ByChunk {
    /// Whether the chunk around a byte is merged, if that is decided.
    fn of(&self, at: DiskOffset) -> Option<bool> {
        let chunk = at / CHUNK;
        if self.merged.has(chunk) { Some(true) } else { self.leafs.has(chunk).then_some(false) }
    }

    fn decide(&mut self, at: DiskOffset, merged: bool) {
        if merged { self.merged.set(at / CHUNK) } else { self.leafs.set(at / CHUNK) }
    }

    /// Whether a chunk can be merged by a write to it: there is nothing to copy.
    fn is_empty<F: Format>(&self, chunk: Span, chain: &mut Chain<F>) -> Result<bool, Missing> {
        // A target that is still to grow has no space behind its end.
        if !self.decides || chain.at(self.into).len() < self.len {
            return Ok(false);
        }
        let Some(inside) = chunk.intersection(Span { at: DiskOffset(0), len: self.len }) else {
            unreachable!("chunk {chunk:?} is behind the end of a merge of {} bytes", self.len)
        };
        Ok(chain.allocated(0..self.into, inside)?.is_empty())
    }
}

impl WriteRouting {
    /// The leaf and other layers are to be merged into the one at depth `into`: nothing is decided.
    pub fn begin_merge(&mut self, into: usize, target: FileId, len: u64) {
        let chunks = len.div_ceil(CHUNK);
        let (merged, leafs) = (Bits::new(chunks), Bits::new(chunks));
        self.by_chunk = Some(ByChunk { into, target, len, decides: true, merged, leafs });
        self.epoch += 1;
    }

    /// Continues a merge that had stopped. Returns whether its decisions about chunks are still known.
    pub fn resume_merge(&mut self) -> bool {
        self.by_chunk.as_mut().map(|by_chunk| by_chunk.decides = true).is_some()
    }

    /// No more chunks are decided.
    pub fn stop_merge(&mut self) {
        if let Some(by_chunk) = &mut self.by_chunk {
            by_chunk.decides = false;
        }
    }

    /// All is the leaf's again. Only with nothing in flight.
    pub fn end_merge(&mut self) {
        self.by_chunk = None;
    }

    /// Whether all writes go to the leaf.
    #[inline(always)]
    pub fn is_to_leaf(&self) -> bool {
        self.by_chunk.is_none()
    }

    /// The layer that writes may go to besides the leaf.
    pub fn target(&self) -> Option<FileId> {
        self.by_chunk.as_ref().map(|by_chunk| by_chunk.target)
    }

    /// Names the requests that begin now, as opposed to those that began before a merge.
    #[inline(always)]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Whether the chunk around a byte is merged.
    pub fn is_merged(&self, at: DiskOffset) -> bool {
        self.by_chunk.as_ref().is_some_and(|by_chunk| by_chunk.of(at) == Some(true))
    }

    /// The chunk around a byte is merged now. Nothing in flight overlaps it.
    pub fn chunk_merged(&mut self, at: DiskOffset) {
        if let Some(by_chunk) = &mut self.by_chunk {
            by_chunk.decide(at, true);
        }
    }

    /// The file that a write to the first bytes of `span` goes to, and which these are. Decides the chunk of the first
    /// byte, if it is not decided yet. `Err` names metadata to be loaded first.
    pub fn route<F: Format>(
        &mut self,
        span: Span,
        chain: &mut Chain<F>,
        requests: &Requests,
    ) -> Result<(FileId, Span), Missing> {
        let Some(by_chunk) = &mut self.by_chunk else { return Ok((chain.leaf(), span)) };
        let chunk = ChainMap::chunk_of(span.at);
        let merged = match by_chunk.of(chunk.at) {
            Some(merged) => merged,
            None => {
                let merged = !requests.is_written_since_before(self.epoch, chunk) && by_chunk.is_empty(chunk, chain)?;
                by_chunk.decide(chunk.at, merged);
                merged
            }
        };
        let limit = span.end().min(span.at + ALIKE_MAX);
        let mut end = chunk.end();
        while end < limit && by_chunk.of(end) == Some(merged) {
            end += CHUNK;
        }
        let span = Span { at: span.at, len: end.min(limit) - span.at };
        Ok((if merged { by_chunk.target } else { chain.leaf() }, span))
    }

    /// Publishes a mapping: readers see what was written to `file`, which is the leaf or not.
    pub fn publish(&self, file: FileId, is_leaf: bool, placed: Committed, map: &mut ChainMap) {
        let Committed { span, at: place } = placed;
        if is_leaf {
            return map.overlay(span, Location::Data { file, at: place });
        }
        // Below the leaf only where nothing can hide it: in a merged chunk. A mapping may be larger than what was
        // written; elsewhere the map is loaded again.
        let mut begin = span.at;
        while begin < span.end() {
            let chunk = ChainMap::chunk_of(begin);
            let Some(part) = chunk.intersection(span) else { unreachable!("{begin} is in {span:?} and in its chunk") };
            if self.is_merged(begin) {
                map.overlay(part, Location::Data { file, at: place + (begin - span.at) });
            } else {
                map.forget(begin);
            }
            begin = chunk.end();
        }
    }
}

#[cfg(test)]
mod test {
    use memory::Segments;

    use super::super::active::Active;
    use super::super::layer::Layer;
    use super::super::test::clusters::{CLUSTER, Clusters};
    use super::*;
    use crate::{FileOffset, MetaBlock, Operation, Request, Token};

    const LEAF: FileId = FileId(0);
    const TARGET: FileId = FileId(1);
    const LEN: u64 = 4 * CHUNK;

    /// A leaf that has something in its second chunk, and the target of its merge. All their metadata is loaded.
    fn chain() -> Chain<Clusters> {
        let mut leaf = Clusters::new(LEN);
        leaf.put(&mut Vec::new(), CHUNK / CLUSTER, 7);
        let geometry = leaf.geometry();
        let layers = [(LEAF, leaf), (TARGET, Clusters::new(LEN))];
        let mut chain = Chain::new(layers.map(|(file, layer)| Layer::new(file, layer)).into(), geometry);
        while let Err(missing) = chain.allocated(0..2, Span { at: DiskOffset(0), len: LEN }) {
            for (file, block) in missing {
                chain.of(file).load(block, vec![0; 512]);
            }
        }
        chain
    }

    fn merge() -> WriteRouting {
        let mut routing = WriteRouting::default();
        routing.begin_merge(1, TARGET, LEN);
        routing
    }

    fn to(routing: &mut WriteRouting, chunk: u64, len: u64) -> (FileId, u64) {
        let span = Span { at: DiskOffset(chunk * CHUNK + CLUSTER), len };
        let (file, routed) = routing.route(span, &mut chain(), &Requests::with_capacity(0)).expect("all is loaded");
        assert_eq!(routed.at, span.at);
        (file, routed.len)
    }

    #[test]
    fn all_is_the_leafs_without_a_merge() {
        assert_eq!(to(&mut WriteRouting::default(), 0, LEN - CLUSTER), (LEAF, LEN - CLUSTER));
    }

    #[test]
    fn a_chunk_is_decided_once_by_what_the_sources_have_of_it() {
        let mut routing = merge();
        assert_eq!(to(&mut routing, 0, CHUNK), (TARGET, CHUNK - CLUSTER), "up to the next, which is not decided");
        assert_eq!(to(&mut routing, 1, 512), (LEAF, 512));
        assert_eq!(to(&mut routing, 2, 512), (TARGET, 512));
        routing.chunk_merged(DiskOffset(3 * CHUNK));
        assert_eq!(to(&mut routing, 2, 2 * CHUNK - CLUSTER), (TARGET, 2 * CHUNK - CLUSTER), "together");
    }

    #[test]
    fn a_merge_that_has_stopped_decides_no_more_and_keeps_what_is_decided() {
        let mut routing = merge();
        assert_eq!(to(&mut routing, 0, 512).0, TARGET);
        routing.stop_merge();
        assert_eq!([0, 2].map(|chunk| to(&mut routing, chunk, 512).0), [TARGET, LEAF]);
        routing.end_merge();
        assert_eq!(to(&mut routing, 0, 512).0, LEAF);
        assert!(!routing.resume_merge(), "nothing is decided any more");
    }

    #[test]
    fn a_write_from_before_the_merge_keeps_its_chunk_with_the_leaf() {
        let mut routing = WriteRouting::default();
        let mut requests = Requests::with_capacity(1);
        let (memory, span) = (Segments::zeroed(512), Span { at: DiskOffset(0), len: 512 });
        let write = Operation::Write { durable: false };
        let request = Request::new(write, span, memory, Token(1), &chain().geometry()).unwrap();
        let number = requests.insert(Active::new(request, routing.epoch()));
        routing.begin_merge(1, TARGET, LEN);
        let routed = [0, 2].map(|chunk| {
            let span = Span { at: DiskOffset(chunk * CHUNK), len: 512 };
            routing.route(span, &mut chain(), &requests).map(|(file, _)| file)
        });
        assert_eq!(routed, [Ok(LEAF), Ok(TARGET)]);
        requests.end(number);
        requests.answer().unwrap().0.retire();
    }

    #[test]
    fn metadata_that_decides_is_loaded_first() {
        let geometry = Clusters::new(LEN).geometry();
        let layers = [LEAF, TARGET].map(|file| Layer::new(file, Clusters::new(LEN)));
        let mut chain = Chain::new(layers.into(), geometry);
        let routed = merge().route(Span { at: DiskOffset(0), len: 512 }, &mut chain, &Requests::with_capacity(0));
        let missing = routed.expect_err("nothing is loaded");
        assert_eq!(missing.first(), Some(&(LEAF, MetaBlock { at: FileOffset(0), len: 512 })));
    }

    #[test]
    fn readers_see_the_target_where_nothing_hides_it() {
        let mut routing = merge();
        routing.chunk_merged(DiskOffset(0));
        let mut map = ChainMap::new(LEN, 1 << 20);
        for chunk in [0, 1] {
            let span = Span { at: DiskOffset(chunk * CHUNK), len: CHUNK };
            map.insert(span, &[crate::chain_map::Run { span, place: Location::Zero }]);
        }
        let placed = Committed { span: Span { at: DiskOffset(CHUNK - 512), len: 1024 }, at: FileOffset(4096) };
        routing.publish(TARGET, false, placed, &mut map);
        assert_eq!(
            map.lookup(DiskOffset(CHUNK - 512)),
            Some((Location::Data { file: TARGET, at: FileOffset(4096) }, 512))
        );
        assert_eq!(map.lookup(DiskOffset(CHUNK)), None, "it is not merged: the map asks the layers again");
        routing.publish(LEAF, true, placed, &mut map);
        assert_eq!(
            map.lookup(DiskOffset(CHUNK - 512)),
            Some((Location::Data { file: LEAF, at: FileOffset(4096) }, 512))
        );
    }
}
