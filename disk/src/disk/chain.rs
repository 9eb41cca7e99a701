//! The layers of a disk as one: what they show together, and what is true of all of them.
//!
//! Knows nothing of requests and operations. Keeps: a layer changes only when the changes of its last process are
//! durable, and what it has changed is logged before the answer; layers are logged and sealed at one moment, the
//! deepest first; after a failed sync the chain is broken for good.

use std::ops::Range;

use super::layer::{Layer, Logged, Missing, Reclaim, Stamping};
use crate::chain_map::{Location, Run, append};
use crate::format::{Format, Mapping, MetaWrite, Wait};
use crate::redo::RedoLog;
use crate::round::Part;
use crate::{DiskOffset, FileId, FileRange, Geometry, ImageError, ImageErrorKind, Span};

/// Why something cannot be done yet, or at all.
pub(super) enum Obstacle {
    /// The layer of this file has refused for now, or for good.
    Layer(FileId, Wait),
    /// The map needs this metadata.
    Chunk(Missing),
    /// The layer has changes of its last process that are not durable yet.
    Owed,
}

/// Bytes that some layers have, and not only those below them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocated {
    pub span: Span,
    /// They say that these are zero.
    pub zero: bool,
}

/// The layers of a disk.
#[derive(Debug)]
pub(super) struct Chain<F> {
    /// Leaf first.
    layers: Vec<Layer<F>>,
    /// The geometry that the guest sees.
    geometry: Geometry,
    /// The layers that can be written to, leaf first.
    writers: Vec<usize>,
    /// The file of the leaf, if each byte of the disk lives there at the same offset.
    flat: Option<FileId>,
    broken: bool,
    /// Some layer has a redo log.
    logs: bool,
    /// A format may have changed since the last entry in its log, or a log has a gap.
    log_due: bool,
}

impl<F: Format> Chain<F> {
    /// A chain of at least one layer, whose guest sees `geometry`.
    pub fn new(layers: Vec<Layer<F>>, geometry: Geometry) -> Chain<F> {
        let (writers, flat) = (Vec::new(), None);
        let mut chain = Chain { layers, geometry, writers, flat, broken: false, logs: false, log_due: false };
        chain.changed();
        chain
    }

    /// Size and limits, as the guest sees them.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Tells the guest something else.
    pub fn set_geometry(&mut self, geometry: Geometry) {
        self.geometry = geometry;
    }

    /// The disk is as large as its leaf.
    pub fn leaf_grown(&mut self) {
        let grown = self.at(0).format.geometry();
        self.geometry = Geometry { len: grown.len, chs: grown.chs, ..self.geometry };
    }

    /// The layers, leaf first.
    pub fn layers(&self) -> &[Layer<F>] {
        &self.layers
    }

    /// The same, to be changed; [`Chain::changed`] follows where one was opened, frozen or taken off.
    pub fn layers_mut(&mut self) -> &mut Vec<Layer<F>> {
        &mut self.layers
    }

    /// Updates which layers are written to, and whether a map is needed at all.
    pub fn changed(&mut self) {
        let writable =
            |(depth, layer): (usize, &Layer<F>)| (!layer.frozen && !layer.format.geometry().read_only).then_some(depth);
        self.writers = self.layers.iter().enumerate().filter_map(writable).collect();
        self.flat = self.layers.first().filter(|leaf| leaf.format.is_flat()).map(|leaf| leaf.file);
    }

    /// The layer of a file. Layers do not change while operations are in flight, so each operation finds its own.
    pub fn of(&mut self, file: FileId) -> &mut Layer<F> {
        let Some(layer) = self.layers.iter_mut().find(|layer| layer.file == file) else {
            unreachable!("file {} is no layer of the chain", file.0)
        };
        layer
    }

    /// The format of the layer of a file.
    pub fn format_of(&mut self, file: FileId) -> &mut F {
        &mut self.of(file).format
    }

    /// The depth of the layer of a file.
    pub fn depth_of(&self, file: FileId) -> usize {
        let Some(depth) = self.layers.iter().position(|layer| layer.file == file) else {
            unreachable!("file {} is no layer of the chain", file.0)
        };
        depth
    }

    /// The layer at a depth that the chain is known to have.
    pub fn at(&self, depth: usize) -> &Layer<F> {
        let Some(layer) = self.layers.get(depth) else { unreachable!("the chain has no layer {depth}") };
        layer
    }

    /// The same, mutably.
    pub fn at_mut(&mut self, depth: usize) -> &mut Layer<F> {
        let Some(layer) = self.layers.get_mut(depth) else { unreachable!("the chain has no layer {depth}") };
        layer
    }

    /// The file of the leaf.
    pub fn leaf(&self) -> FileId {
        self.at(0).file
    }

    /// The file of the leaf, if each byte of the disk lives there at the same offset.
    pub fn flat(&self) -> Option<FileId> {
        self.flat
    }

    /// The layers that can be written to, leaf first.
    pub fn writers(&self) -> impl DoubleEndedIterator<Item = &Layer<F>> {
        self.writers.iter().map(|&depth| self.at(depth))
    }

    /// Does something with each layer that can be written to, the deepest first.
    pub fn for_writers_upwards(&mut self, mut what: impl FnMut(&mut Layer<F>)) {
        for index in (0..self.writers.len()).rev() {
            let Some(&depth) = self.writers.get(index) else { unreachable!("the list of writers has become shorter") };
            what(self.at_mut(depth));
        }
    }

    /// Whether a sync has failed. Then nothing is written any more until the image is opened again.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// A sync has failed. The kernel may have marked the lost pages clean, so a later sync that succeeds proves
    /// nothing, not in another process either. Nothing above that layer may become durable any more, because it may
    /// have freed what was lost below. The upper logs are marked first, in case this process dies in between.
    pub fn sync_failed(&mut self, file: FileId) {
        self.broken = true;
        let depth = self.depth_of(file);
        let logs = self.layers.iter_mut().take(depth + 1).filter_map(|layer| layer.log.as_mut());
        logs.for_each(RedoLog::sync_failed);
    }

    /// Gives a layer its redo log. A layer that is only read has one where its last process has left something to be
    /// written: that is read from the log, and not written by this disk.
    pub fn set_log(&mut self, file: FileId, log: RedoLog) -> Result<(), ImageError> {
        let failed = log.has_failed();
        let is_read = failed || log.owed().is_some();
        let wants_one = |layer: &&mut Layer<F>| is_read || !layer.format.geometry().read_only;
        let Some(layer) = self.layers.iter_mut().find(|layer| layer.file == file).filter(wants_one) else {
            let what = format!("file {} is no layer that is open for writing: it needs no redo log", file.0);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        };
        layer.format.collect_records();
        let log = layer.log.insert(log);
        if layer.upkeep.unsynced {
            log.touched();
        }
        self.logs = true;
        self.broken |= failed;
        Ok(())
    }

    /// Whether there is a log.
    pub fn is_logged(&self) -> bool {
        self.logs
    }

    /// Whether some layer that is written to has changes of its last process that are not durable yet.
    pub fn owes(&self) -> bool {
        self.logs && self.writers().any(Layer::owes)
    }

    /// To be called before any call of a format that may change it.
    pub fn may_change(&mut self) {
        self.log_due = self.logs;
    }

    /// Whether there may be something to log.
    pub fn is_log_due(&self) -> bool {
        self.log_due
    }

    /// Logs what has changed. What is left out must be durable before its request is answered. If one layer waits for
    /// its stamp, so does the whole, even where another one has a gap: a round would take its changes unlogged.
    pub fn log_changes(&mut self) -> Logged {
        let (mut below, mut waits) = (Logged::All, false);
        self.for_writers_upwards(|layer| {
            let logged = layer.log_changes(below);
            waits |= logged == Logged::Waits;
            below = below.max(logged);
        });
        self.log_due = below != Logged::All;
        if waits { Logged::Waits } else { below }
    }

    /// The writes of the stamps that are wanted.
    pub fn begin_stamps(&mut self) -> Vec<(FileId, MetaWrite)> {
        let mut writes = Vec::new();
        self.for_writers_upwards(|layer| {
            if let Some(write) = layer.begin_stamp() {
                layer.touched();
                writes.push((layer.file, write));
            }
        });
        writes
    }

    /// Whether the stamp of some file is being written.
    pub fn is_stamping(&self) -> bool {
        self.logs && self.writers().any(|layer| layer.stamping == Stamping::UnderWay)
    }

    /// Seals all layers that were written to, at one moment; the deepest comes first. What has changed in them is
    /// logged, or is left out.
    pub fn seal(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        self.for_writers_upwards(|layer| {
            if layer.is_dirty() {
                parts.push(Part { file: layer.file, batches: layer.seal() });
            }
        });
        parts
    }

    /// Leaked space of each layer whose reclaiming is at `from`, which it leaves for `to`; where there is none it is
    /// done.
    pub fn reclaim_next(&mut self, from: Reclaim, to: Reclaim) -> Vec<(FileId, FileRange)> {
        let mut found = Vec::new();
        self.for_writers_upwards(|layer| {
            if layer.upkeep.reclaim == from && !layer.closing {
                let leaked = layer.format.reclaim();
                layer.upkeep.reclaim = if leaked.is_some() { to } else { Reclaim::Done };
                found.extend(leaked.map(|range| (layer.file, range)));
            }
        });
        found
    }

    /// Calls the format of the layer of `file`; the error says what the caller has to wait for.
    pub fn ask<T>(&mut self, file: FileId, question: impl FnOnce(&mut F) -> Result<T, Wait>) -> Result<T, Obstacle> {
        self.may_change();
        let layer = self.of(file);
        if layer.owes() {
            return Err(Obstacle::Owed);
        }
        question(&mut layer.format).map_err(|wait| Obstacle::Layer(file, wait))
    }

    /// Where the bytes of `span` live, as the layer at `depth` shows them. `Err` names metadata to be loaded first.
    pub fn map(&mut self, depth: usize, span: Span) -> Result<Vec<Run>, Missing> {
        let Some(layers) = self.layers.get_mut(depth..) else { unreachable!("the chain has no layer {depth}") };
        let (mut runs, mut missing) = (Vec::new(), Missing::new());
        walk(layers, span, &mut runs, &mut missing);
        if missing.is_empty() { Ok(runs) } else { Err(missing) }
    }

    /// The same of the whole disk, if the leaf alone tells: it has all bytes of `span`, or there is no layer below, and
    /// nothing has to be loaded. Looks no further than to the first byte that it has not.
    pub fn map_of_leaf(&mut self, span: Span) -> Option<Vec<Run>> {
        let Some((leaf, below)) = self.layers.split_first_mut() else { unreachable!("a chain has a leaf") };
        if span.end() > DiskOffset(leaf.len()) {
            return None;
        }
        let (mut runs, mut missing) = (Vec::new(), Missing::new());
        let mut at = span.at;
        while at < span.end() {
            let (place, part) = leaf.look_up(span.tail_from(at), &mut missing);
            if !missing.is_empty() {
                return None;
            }
            let place = location(leaf.file, place).or(below.is_empty().then_some(Location::Zero))?;
            append(&mut runs, Run { span: part, place });
            at = part.end();
        }
        Some(runs)
    }

    /// How many of the first bytes of `span` one layer provides, and which: 1 for the leaf, 0 for none. `Err` names
    /// metadata to be loaded first.
    pub fn provider(&mut self, span: Span) -> Result<(u64, u32), Missing> {
        let (mut len, mut found, mut missing) = (span.len, 0, Missing::new());
        for (depth, layer) in (1..).zip(&mut self.layers) {
            let inside = Span { at: DiskOffset(0), len: layer.len() };
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

    /// The parts of `span` that the layers of these depths have allocated. `Err` names metadata to be loaded first.
    pub fn allocated(&mut self, depths: Range<usize>, span: Span) -> Result<Vec<Allocated>, Missing> {
        let Some(layers) = self.layers.get_mut(depths.clone()) else { unreachable!("{depths:?} are no layers") };
        let (mut allocated, mut missing) = (Vec::new(), Missing::new());
        collect_allocated(layers, span, &mut allocated, &mut missing);
        if missing.is_empty() { Ok(allocated) } else { Err(missing) }
    }
}

/// Maps `span` of `layers`, from the first down, into `runs`.
fn walk<F: Format>(layers: &mut [Layer<F>], span: Span, runs: &mut Vec<Run>, missing: &mut Missing) {
    let Some((layer, below)) = layers.split_first_mut() else {
        // Below the base there is nothing.
        return append(runs, Run { span, place: Location::Zero });
    };
    let file = layer.file;
    let mut at = span.at;
    while at < span.end() {
        let rest = span.tail_from(at);
        // Behind the end of a layer that is smaller than the one above there is zero, whatever is below.
        let Some(inside) = rest.intersection(Span { at: DiskOffset(0), len: layer.len() }) else {
            return append(runs, Run { span: rest, place: Location::Zero });
        };
        let (place, part) = layer.look_up(inside, missing);
        at = part.end();
        let Some(place) = location(file, place) else {
            walk(below, part, runs, missing);
            continue;
        };
        append(runs, Run { span: part, place });
    }
}

/// Where bytes live that the layer of `file` maps there; `None` where it leaves them to the layers below.
fn location(file: FileId, place: Mapping) -> Option<Location> {
    match place {
        Mapping::Data { at, .. } => Some(Location::Data { file, at }),
        Mapping::Compressed { .. } => Some(Location::Compressed { file }),
        Mapping::Shared { at, .. } => Some(Location::Shared { file, at }),
        Mapping::Damaged { .. } | Mapping::Missing { .. } => Some(Location::Damaged { file }),
        Mapping::Zero { .. } => Some(Location::Zero),
        Mapping::Parent { .. } => None,
    }
}

/// Collects what `layers` have allocated of `span`, from the first down.
fn collect_allocated<F: Format>(
    layers: &mut [Layer<F>],
    span: Span,
    allocated: &mut Vec<Allocated>,
    missing: &mut Missing,
) {
    let Some((layer, below)) = layers.split_first_mut() else { return };
    let mut at = span.at;
    while at < span.end() {
        let (place, part) = layer.look_up(span.tail_from(at), missing);
        at = part.end();
        match place {
            Mapping::Parent { .. } => collect_allocated(below, part, allocated, missing),
            Mapping::Zero { .. } => join(allocated, Allocated { span: part, zero: true }),
            // A damaged part fails the copy, and so is not forgotten.
            Mapping::Data { .. }
            | Mapping::Compressed { .. }
            | Mapping::Shared { .. }
            | Mapping::Damaged { .. }
            | Mapping::Missing { .. } => {
                join(allocated, Allocated { span: part, zero: false });
            }
        }
    }
}

fn join(allocated: &mut Vec<Allocated>, new: Allocated) {
    match allocated.last_mut() {
        Some(last) if last.zero == new.zero && last.span.end() == new.span.at => {
            last.span.len += new.span.len;
        }
        _ => allocated.push(new),
    }
}

#[cfg(test)]
mod test {
    use super::super::test::clusters::{CLUSTER, Clusters, Entry};
    use super::*;
    use crate::FileOffset;

    /// Three layers, the uppermost and the lowest of which can be written to; all metadata is loaded.
    fn chain() -> Chain<Clusters> {
        let layers = (0..3).map(|file| {
            let mut layer = Clusters::new(4 * CLUSTER);
            layer.read_only = file == 1;
            let mut layer = Layer::new(FileId(file), layer);
            assert!(layer.load(crate::MetaBlock { at: FileOffset(0), len: 512 }, vec![0; 512]));
            layer
        });
        let layers: Vec<_> = layers.collect();
        let geometry = layers[0].format.geometry();
        Chain::new(layers, geometry)
    }

    #[test]
    fn the_deepest_layer_is_sealed_first_and_what_is_durable_not_at_all() {
        let mut chain = chain();
        let files = |parts: Vec<Part>| parts.iter().map(|part| part.file.0).collect::<Vec<_>>();
        assert_eq!(files(chain.seal()), [2, 0], "what was written before they were opened may be in a cache only");
        [0, 2].into_iter().for_each(|file| assert!(!chain.of(FileId(file)).settled(true)));
        assert!(!chain.writers().any(Layer::is_dirty));
        chain.of(FileId(0)).touched();
        assert_eq!(files(chain.seal()), [0]);
        chain.of(FileId(0)).settled(false);
        assert!(chain.of(FileId(0)).is_dirty(), "a round that has failed leaves it so");
    }

    #[test]
    fn a_chain_shows_what_the_uppermost_layer_has() {
        let mut chain = chain();
        for (depth, cluster, entry) in [(0, 1, Entry::Zero), (1, 1, Entry::Data(512)), (2, 2, Entry::Data(1024))] {
            chain.at_mut(depth).format.table[cluster] = entry;
        }
        let span = Span { at: DiskOffset(0), len: 4 * CLUSTER };
        let shown = |runs: Vec<Run>| runs.into_iter().map(|run| (run.span.at / CLUSTER, run.place)).collect::<Vec<_>>();
        let two = Location::Data { file: FileId(2), at: FileOffset(1024) };
        assert_eq!(shown(chain.map(0, span).unwrap()), [(0, Location::Zero), (2, two), (3, Location::Zero)]);
        let one = Location::Data { file: FileId(1), at: FileOffset(512) };
        let below = [(0, Location::Zero), (1, one), (2, two), (3, Location::Zero)];
        assert_eq!(shown(chain.map(1, span).unwrap()), below);
        let cluster = |cluster: u64| Span { at: DiskOffset(cluster * CLUSTER), len: CLUSTER };
        let providers = [0, 1, 2].map(|n| chain.provider(cluster(n)).unwrap());
        assert_eq!(providers, [(CLUSTER, 0), (CLUSTER, 1), (CLUSTER, 3)]);
        let allocated = chain.allocated(0..2, span).unwrap();
        assert_eq!(allocated, [Allocated { span: cluster(1), zero: true }]);
    }

    #[test]
    fn a_failed_sync_breaks_the_chain_for_good() {
        let mut chain = chain();
        chain.sync_failed(FileId(2));
        chain.of(FileId(2)).settled(true);
        assert!(chain.is_broken());
    }
}
