//! Loading the chain map chunk by chunk, and waiting for the metadata that this takes.
//!
//! Knows nothing of what is done with the bytes. Keeps: a block of metadata is read once for all who wait for it.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use super::{Disk, Layer, Missing, Obstacle, Op, Parked, Ready};
use crate::chain_map::{ChainMap, Location, Run, append};
use crate::format::{Format, Mapping, MetaBlock, Wait};
use crate::size::in_memory;
use crate::{Action, FileDone, Io, Span, Status};

/// Chunks loaded at once: enough to keep the storage busy, since each may load a bitmap of every layer.
const LOADING_MAX: usize = 16;
/// Loads for one chunk, per layer, after which it is loaded alone. Formats cache what was loaded, and chunks that are
/// loaded side by side can evict each other's blocks without end if the caches are small. One chunk alone always
/// finishes, for a format keeps at least what one chunk takes.
const LOADS_MAX: usize = 16;
/// Damaged chunks that are remembered.
const DAMAGED_MAX: usize = 256;
/// Bytes of a damaged chunk that are mapped together.
const PAGE: u64 = 4096;

/// Chunks that are being loaded, and what waits for its turn.
#[derive(Debug, Default)]
pub(super) struct MapLoader {
    under_way: Vec<ChunkLoad>,
    /// The chunk that is loaded alone.
    alone: Option<u64>,
    waiting: VecDeque<Parked>,
    /// Chunks that cannot be loaded as a whole, the oldest first. Their sound parts are still found, page by page.
    damaged: VecDeque<u64>,
}

#[derive(Debug)]
struct ChunkLoad {
    chunk: u64,
    /// Loads that were begun for it.
    loads: usize,
}

impl MapLoader {
    /// Whether nothing is being loaded.
    #[cfg(test)]
    pub(super) fn is_over(&self) -> bool {
        self.under_way.is_empty() && self.alone.is_none() && self.waiting.is_empty()
    }

    /// Whether a chunk may be loaded now. If not, it is taken off the list.
    fn admit(&mut self, chunk: u64) -> bool {
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

    /// Counts loads for a chunk.
    fn loading(&mut self, chunk: u64, loads: usize, loads_max: usize) {
        let Some(load) = self.under_way.iter_mut().find(|load| load.chunk == chunk) else { return };
        load.loads += loads;
        if load.loads > loads_max {
            self.alone.get_or_insert(chunk);
        }
    }

    /// Records that a chunk cannot be loaded as a whole. Returns whether that is new.
    fn found_damaged(&mut self, chunk: u64) -> bool {
        if self.damaged.contains(&chunk) {
            return false;
        }
        if self.damaged.len() == DAMAGED_MAX {
            self.damaged.pop_front();
        }
        self.damaged.push_back(chunk);
        true
    }

    /// Ends the load of a chunk, if there is one.
    fn end(&mut self, chunk: u64) {
        self.under_way.retain(|load| load.chunk != chunk);
        self.alone.take_if(|alone| *alone == chunk);
    }

    /// The next one whose turn it is.
    pub(super) fn next(&mut self) -> Option<Parked> {
        let room = self.alone.is_none() && self.under_way.len() < LOADING_MAX;
        if room { self.waiting.pop_front() } else { None }
    }
}

impl<F: Format> Disk<F> {
    /// Where byte `at` lives, and for how many bytes. `Err` names metadata to be loaded first.
    pub(super) fn resolve(&mut self, at: u64) -> Result<(Location, u64), Missing> {
        if let Some(found) = self.map.lookup(at) {
            return Ok(found);
        }
        let chunk = ChainMap::chunk_of(at);
        let damaged = self.map_loader.damaged.contains(&chunk.at);
        let wanted = if damaged { Span { at: at / PAGE * PAGE, len: PAGE } } else { chunk };
        let inside = wanted.intersection(Span { at: 0, len: self.geometry.len }).unwrap_or(wanted);
        let runs = map_span(&mut self.layers, inside)?;
        let Some(run) = runs.iter().find(|run| at < run.span.end()) else {
            unreachable!("the walk covers the span without gaps")
        };
        let found = (run.place.advanced(at - run.span.at), run.span.end() - at);
        if !damaged {
            self.map.insert(chunk, &runs);
            self.cached_bytes += size_of_val(runs.as_slice());
        }
        Ok(found)
    }

    /// How many of the first bytes of `span` one layer provides, and which: 1 for the leaf, 0 for none. `Err` names
    /// metadata to be loaded first.
    pub(super) fn depth(&mut self, span: Span) -> Result<(u64, u32), Missing> {
        let (mut len, mut found, mut missing) = (span.len, 0, Missing::new());
        for (depth, layer) in (1..).zip(&mut self.layers) {
            let inside = Span { at: 0, len: layer.format.geometry().len };
            // The zeroes behind the end of a layer count as its own, as they do for QEMU: they hide what is below.
            let Some(part) = (Span { at: span.at, len }).intersection(inside) else {
                found = depth;
                break;
            };
            let (place, part) = layer.look_up(part, &mut missing);
            len = part.len;
            if !matches!(place, Mapping::Parent { .. }) {
                found = depth;
                break;
            }
        }
        if missing.is_empty() { Ok((len, found)) } else { Err(missing) }
    }

    /// Parks what needs a chunk whose metadata is missing. Few chunks are loaded at once, so that they do not evict
    /// each other's metadata.
    pub(super) fn park_for_map<I: Io>(&mut self, parked: Parked, missing: Missing, io: &mut I) {
        let chunk = ChainMap::chunk_of(parked.at()).at;
        if self.map_loader.admit(chunk) {
            let before = self.loads.len();
            self.park(parked, missing, io);
            let begun = self.loads.len() - before;
            self.map_loader.loading(chunk, begun, self.layers.len() * LOADS_MAX);
        } else {
            self.set_aside(parked);
            self.map_loader.waiting.push_back(parked);
        }
    }

    /// Counts what is parked as a part of its request. A fill is one already.
    pub(super) fn set_aside(&mut self, parked: Parked) {
        if let Parked::Request { number, .. } = parked {
            self.part_begun(number);
        }
    }

    /// Has what was parked go on.
    pub(super) fn unpark(&mut self, parked: Parked) {
        self.ready.push_back(match parked {
            Parked::Request { number, rest } => Ready::Request { number, rest },
            Parked::Fill { fill, .. } => Ready::Fill { fill },
        });
    }

    /// Fails what was parked: the metadata cannot be loaded.
    fn fail_parked<I: Io>(&mut self, parked: Parked, io: &mut I) {
        match parked {
            Parked::Request { number, .. } => self.part_ended(number, Status::Failed),
            Parked::Fill { fill, .. } => self.fill_read(fill, Status::Failed, io),
        }
    }

    /// What waited for metadata around byte `at` has gone on. Ends the load of its chunk, so that the next one has its
    /// turn, unless more of it is awaited.
    pub(super) fn load_ended(&mut self, at: u64) {
        let chunk = ChainMap::chunk_of(at).at;
        // It is known now, or failed, or was known and forgotten again since the request went on behind it.
        if self.map.lookup(at).is_some() || !self.is_awaited(chunk) {
            self.map_loader.end(chunk);
        }
    }

    /// Parks the rest of a request until the obstacle is gone, or fails it.
    pub(super) fn wait_for<I: Io>(&mut self, number: u32, rest: Span, obstacle: Obstacle, io: &mut I) {
        let parked = Parked::Request { number, rest };
        match obstacle {
            Obstacle::Chunk(missing) => self.park_for_map(parked, missing, io),
            Obstacle::Owed | Obstacle::Layer(_, Wait::Round) => self.wait_for_round(parked),
            Obstacle::Layer(file, Wait::Load(block)) => {
                self.park(parked, vec![(file, block)], io);
            }
            Obstacle::Layer(file, Wait::Busy(ticket)) => {
                self.set_aside(parked);
                self.busy.entry((file, ticket)).or_default().push(parked);
            }
            Obstacle::Layer(file, Wait::Damaged(_)) => {
                self.met_damage(file, rest);
                self.fail(number, Status::Failed);
            }
            Obstacle::Layer(file, Wait::NoSpace) => {
                self.retry_without_merge(number, file);
                self.active.get_mut(number).request.at_limit = true;
                self.fail(number, Status::NoSpace);
            }
        }
    }

    /// Parks something until the missing metadata is loaded. All of it is asked for at once, and the last block waited
    /// for: by then most others have come, and the layers need not be walked for each.
    pub(super) fn park<I: Io>(&mut self, parked: Parked, missing: Missing, io: &mut I) {
        let Some(&last) = missing.last() else { unreachable!("nothing is missing") };
        self.set_aside(parked);
        for (file, block) in missing {
            // One load for all who wait: a second one could bring older bytes than the first.
            if let Entry::Vacant(place) = self.loads.entry((file, block.at)) {
                place.insert(Vec::new());
                let into = memory::Segments::zeroed(in_memory(block.len.into()));
                self.push(Op::Load { block }, file, Action::Read { at: block.at, into }, io);
            }
        }
        self.loads.entry((last.0, last.1.at)).or_default().push(parked);
    }

    pub(super) fn loaded<I: Io>(&mut self, block: MetaBlock, done: FileDone, io: &mut I) {
        let file = done.op.file;
        self.cached_bytes += in_memory(block.len.into());
        let parked = self.loads.remove(&(file, block.at)).unwrap_or_default();
        let sound = match (done.result, done.op.action) {
            (Ok(()), Action::Read { into, .. }) => self.layer_of(file).load(block, into.to_vec()),
            _ => false,
        };
        for parked in parked {
            let chunk = ChainMap::chunk_of(parked.at()).at;
            // The block may concern another part of the chunk than was asked for.
            if sound || self.map_loader.found_damaged(chunk) {
                self.unpark(parked);
            } else {
                self.fail_parked(parked, io);
            }
            self.ready.push_back(Ready::Loaded { at: parked.at() });
        }
    }

    /// Whether something waits for metadata of this chunk.
    pub(super) fn is_awaited(&self, chunk: u64) -> bool {
        self.loads.values().flatten().any(|parked| ChainMap::chunk_of(parked.at()).at == chunk)
    }
}

impl<F: Format> Layer<F> {
    /// Where the layer has the first bytes of `span`, and which those are. Missing metadata counts as nothing
    /// allocated, so that the walk continues below and finds what else is missing; the result is then of no use.
    pub(super) fn look_up(&mut self, span: Span, missing: &mut Missing) -> (Mapping, Span) {
        let place = match self.format.map(span) {
            Ok(place) => place,
            Err(Wait::Load(block)) => {
                missing.push((self.file, block));
                Mapping::Parent { len: span.len }
            }
            Err(Wait::Busy(_) | Wait::Round | Wait::NoSpace | Wait::Damaged(_)) => {
                unreachable!("a lookup takes no space")
            }
        };
        (place, Span { at: span.at, len: place.len().min(span.len).max(512) })
    }
}

/// Where the bytes of `span` live, as the first of `layers` shows them.
pub(super) fn map_span<F: Format>(layers: &mut [Layer<F>], span: Span) -> Result<Vec<Run>, Missing> {
    let (mut runs, mut missing) = (Vec::new(), Missing::new());
    walk(layers, span, &mut runs, &mut missing);
    if missing.is_empty() { Ok(runs) } else { Err(missing) }
}

/// Maps `span` of `layers`, from the first down, into `runs`.
fn walk<F: Format>(layers: &mut [Layer<F>], span: Span, runs: &mut Vec<Run>, missing: &mut Missing) {
    let Some((layer, below)) = layers.split_first_mut() else {
        // Below the base there is nothing.
        return append(runs, Run { span, place: Location::Zero });
    };
    let mut at = span.at;
    while at < span.end() {
        let rest = span.tail_from(at);
        // Behind the end of a layer that is smaller than the one above there is zero, whatever is below.
        let size = layer.format.geometry().len;
        if at >= size {
            return append(runs, Run { span: rest, place: Location::Zero });
        }
        let rest = Span { at, len: rest.len.min(size - at) };
        let (place, part) = layer.look_up(rest, missing);
        match place {
            Mapping::Data { at, .. } => {
                append(runs, Run { span: part, place: Location::Data { file: layer.file, at } })
            }
            Mapping::Compressed { .. } => {
                append(runs, Run { span: part, place: Location::Compressed { file: layer.file } })
            }
            Mapping::Shared { at, .. } => {
                append(runs, Run { span: part, place: Location::Shared { file: layer.file, at } })
            }
            Mapping::Damaged { .. } => append(runs, Run { span: part, place: Location::Damaged { file: layer.file } }),
            Mapping::Zero { .. } => append(runs, Run { span: part, place: Location::Zero }),
            Mapping::Parent { .. } => walk(below, part, runs, missing),
        }
        at = part.end();
    }
}
