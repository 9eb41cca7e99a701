//! The layers of a disk, and how they change while the disk lives: a leaf on top, a layer opened otherwise, layers taken
//! off, a larger leaf.
//!
//! Knows nothing of why. Keeps: the layers change only while nothing is in flight, so that no operation under way was
//! begun on another chain than it ends on; and where it matters only when all of them are durable.
//!
//! Whoever changes the chain holds requests back, has a round make durable what there is, changes, and lets go:
//!
//! 1. [`Disk::hold`]. What is in flight ends ([`Disk::is_quiet`]); what comes waits.
//! 2. [`Disk::sync`], until [`Disk::is_clean`].
//! 3. The change, which takes constant time but for [`Disk::pop_to`].
//! 4. [`Disk::release`].

use super::flush::{Reclaim, Upkeep};
use super::{Disk, LAYERS_MAX};
use crate::chain_map::ChainMap;
use crate::format::Format;
use crate::redo::RedoLog;
use crate::{FileId, Geometry, ImageError, ImageErrorKind, Io};

/// One image of the chain, and the number of its file.
#[derive(Debug)]
pub struct Layer<F> {
    /// The file, as the engine knows it.
    pub file: FileId,
    /// What is in it.
    pub format: F,
    /// What the next process will have to know of it.
    pub(super) log: Option<RedoLog>,
    pub(super) upkeep: Upkeep,
    /// It could be written, and is not.
    pub(super) frozen: bool,
    /// It will be when it is durable.
    pub(super) closing: bool,
}

impl<F: Format> Layer<F> {
    pub(super) fn new(file: FileId, format: F) -> Layer<F> {
        let upkeep = Upkeep::new(format.geometry().read_only);
        Layer { file, format, log: None, upkeep, frozen: false, closing: false }
    }

    /// Whether a power loss could take something away.
    pub(super) fn is_dirty(&self) -> bool {
        self.upkeep.unsynced || self.format.dirty() > 0 || self.owes()
    }

    /// Whether what the last process has left is not durable yet.
    pub(super) fn owes(&self) -> bool {
        self.log.as_ref().is_some_and(|log| log.owed().is_some())
    }
}

impl<F: Format> Disk<F> {
    /// From now on new requests wait; those in flight end.
    pub fn hold(&mut self) {
        self.quiesced = true;
        self.withdraw_merge_chunk();
    }

    /// Lets the requests go that were held back.
    pub fn release<I: Io>(&mut self, io: &mut I) {
        self.quiesced = false;
        self.begin_reclaim(io);
        self.reclaim_more(io);
        self.ended = true;
        self.start_waiting(io);
    }

    /// Whether requests are held back.
    pub fn is_held(&self) -> bool {
        self.quiesced
    }

    /// Whether nothing is in flight but requests that wait, no file operation either.
    pub fn is_quiet(&self) -> bool {
        self.active.len() == 0 && self.ops.len() == 0
    }

    /// Puts a leaf on top of the chain, empty and of the disk's size, in a file of a number that no other layer has. Only
    /// while requests are held back and nothing is in flight. What was written to the old leaf need not be durable yet:
    /// each round takes the layers from the deepest up, so nothing in the new leaf is durable before it.
    pub fn push_leaf(&mut self, file: FileId, leaf: F) -> Result<(), ImageError> {
        self.require_quiet("a leaf cannot be put on the chain")?;
        let geometry = leaf.geometry();
        if self.layers.len() >= LAYERS_MAX {
            let what =
                format!("the chain has {} layers already, and no more than {LAYERS_MAX} are allowed", LAYERS_MAX);
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        if self.layers.iter().any(|layer| layer.file == file) {
            let what = format!("file {} is a layer of the chain already", file.0);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        if geometry.len != self.geometry.len {
            let what = format!("the new leaf has {} bytes, the disk {}", geometry.len, self.geometry.len);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        self.check_block(geometry, "the new leaf")?;
        self.layers.insert(0, Layer::new(file, leaf));
        self.geometry.read_only = geometry.read_only;
        self.layers_changed();
        Ok(())
    }

    /// A layer below the leaf is not written to any more: no space in it is reclaimed, and after the round that makes it
    /// durable no other speaks of it ([`Disk::is_frozen`]). It stays so until it is opened for another access. Only while
    /// requests are held back and nothing is in flight.
    pub fn freeze(&mut self, depth: usize) -> Result<(), ImageError> {
        self.require_quiet("a layer cannot be closed for writing")?;
        let Some(layer) = self.layers.get_mut(depth) else { return Err(no_layer(depth)) };
        layer.closing = true;
        layer.upkeep.reclaim = Reclaim::Done;
        self.freeze_if_durable(depth);
        Ok(())
    }

    /// Whether a layer was closed for writing, and all of it is durable.
    pub fn is_frozen(&self, file: FileId) -> bool {
        self.layers.iter().any(|layer| layer.file == file && layer.frozen)
    }

    pub(super) fn freeze_if_durable(&mut self, depth: usize) {
        let layer = self.layer_at_mut(depth);
        if layer.closing && !layer.is_dirty() {
            layer.frozen = true;
            layer.log = None;
            layer.upkeep = Upkeep::new(true);
            self.layers_changed();
        }
    }

    /// Replaces what is known of a layer's file by what the same file says when it is opened for another access. Only
    /// while requests are held back, nothing is in flight and the layer durable.
    pub fn reopen(&mut self, depth: usize, format: F) -> Result<(), ImageError> {
        self.require_quiet("a layer cannot be opened for another access")?;
        let new = format.geometry();
        let Some(layer) = self.layers.get_mut(depth) else { return Err(no_layer(depth)) };
        if self.broken || layer.is_dirty() {
            let what =
                format!("layer {depth} cannot be opened for another access while not everything in it is durable");
            return Err(ImageError::new(ImageErrorKind::Unsupported, what));
        }
        let old = layer.format.geometry();
        if new.len != old.len || new.block != old.block {
            let what = format!(
                "layer {depth} has {} bytes in blocks of {}, but was opened again with {} in blocks of {}",
                old.len, old.block, new.len, new.block
            );
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        *layer = Layer::new(layer.file, format);
        if depth == 0 {
            self.geometry.read_only = new.read_only;
        }
        self.layers_changed();
        Ok(())
    }

    /// Takes the layers above `depth` off, which becomes the leaf, and hands them back. Only while requests are held back
    /// and nothing is in flight: what those layers hold is no longer the disk's, durable or not.
    pub fn pop_to(&mut self, depth: usize) -> Result<Vec<Layer<F>>, ImageError> {
        self.require_quiet("layers cannot be cached_bytes off the chain")?;
        let Some(leaf) = self.layers.get(depth) else { return Err(no_layer(depth)) };
        // What a guest was told of its sectors stays.
        self.geometry = Geometry { block: self.geometry.block, ..leaf.format.geometry() };
        self.map = ChainMap::new(self.geometry.len, self.options.map_bytes);
        let popped: Vec<Layer<F>> = self.layers.drain(..depth).collect();
        popped.iter().for_each(|layer| self.compressed.closed(layer.file));
        self.layers_changed();
        Ok(popped)
    }

    /// Makes the leaf, and with it the disk, larger; what is new reads as zero. Durable with the next round, and where a
    /// format grows no earlier (a fixed VHD) the disk does neither. Only while requests are held back and nothing is in
    /// flight.
    pub fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        self.require_quiet("the disk cannot be made larger")?;
        self.require_nothing_owed(0)?;
        if len < self.geometry.len {
            let what = format!("a disk of {} bytes cannot be made smaller, to {len}", self.geometry.len);
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        self.check_hidden(0, len)?;
        self.may_change();
        let Some(leaf) = self.layers.first_mut() else { return Err(no_layer(0)) };
        leaf.format.grow(len)?;
        self.leaf_grown();
        Ok(())
    }

    /// Makes a layer that is to be merged larger; what is new reads as zero. Durable with the next round, and where a format
    /// grows no earlier it does neither. The guest may go on meanwhile.
    pub fn grow_layer(&mut self, depth: usize, len: u64) -> Result<(), ImageError> {
        self.check_hidden(depth, len)?;
        self.require_nothing_owed(depth)?;
        self.may_change();
        let Some(layer) = self.layers.get_mut(depth) else { return Err(no_layer(depth)) };
        layer.format.grow(len)?;
        let file = layer.file;
        // A write behind its old end may change no metadata: where a cluster reaches there, it has a place already.
        self.layer_grown(file);
        Ok(())
    }

    /// The disk is as large as the leaf.
    fn leaf_grown(&mut self) {
        let grown = self.layer_at(0).format.geometry();
        self.geometry = Geometry { len: grown.len, chs: grown.chs, ..self.geometry };
        self.map.grow(grown.len);
    }

    /// A layer's image has become larger. What was known of where bytes behind its old end live is void.
    pub(super) fn layer_grown(&mut self, file: FileId) {
        if file == self.leaf_file() {
            self.leaf_grown();
        }
        self.map = ChainMap::new(self.geometry.len, self.options.map_bytes);
    }

    /// A layer that becomes `len` bytes long must not bring to light what it hides of the one below by being shorter.
    pub(super) fn check_hidden(&self, depth: usize, len: u64) -> Result<(), ImageError> {
        let len_of = |depth: usize| self.layers.get(depth).map(|layer| layer.format.geometry().len);
        let (Some(old), Some(below)) = (len_of(depth), len_of(depth + 1)) else { return Ok(()) };
        if len <= old || below <= old {
            return Ok(());
        }
        let what = format!(
            "layer {depth} has {old} bytes and the one below it {below}: if it were larger, what it hides would come to light"
        );
        Err(ImageError::new(ImageErrorKind::Mismatch, what))
    }

    /// The image of a layer, to be changed in a way that does not concern where bytes live, nor how many there are.
    pub fn layer_mut(&mut self, depth: usize) -> Option<&mut F> {
        self.may_change();
        self.layers.get_mut(depth).map(|layer| &mut layer.format)
    }

    /// The layer of a file. The layers stay while operations are in flight, so each of these finds its own.
    pub(super) fn layer_of(&mut self, file: FileId) -> &mut Layer<F> {
        let Some(layer) = self.layers.iter_mut().find(|layer| layer.file == file) else {
            unreachable!("file {} is no layer of the chain", file.0)
        };
        layer
    }

    /// The depth of the layer of a file.
    pub(super) fn depth_of(&self, file: FileId) -> usize {
        let Some(depth) = self.layers.iter().position(|layer| layer.file == file) else {
            unreachable!("file {} is no layer of the chain", file.0)
        };
        depth
    }

    /// The layer at a depth that the chain is known to have.
    pub(super) fn layer_at(&self, depth: usize) -> &Layer<F> {
        let Some(layer) = self.layers.get(depth) else { unreachable!("the chain has no layer {depth}") };
        layer
    }

    /// The same, to be changed.
    pub(super) fn layer_at_mut(&mut self, depth: usize) -> &mut Layer<F> {
        let Some(layer) = self.layers.get_mut(depth) else { unreachable!("the chain has no layer {depth}") };
        layer
    }

    /// Something was written to the file, or deallocated in it, that no sync has covered.
    pub(super) fn touched(&mut self, file: FileId) {
        let layer = self.layer_of(file);
        if !layer.upkeep.unsynced {
            layer.upkeep.unsynced = true;
            if let Some(log) = &mut layer.log {
                log.touched();
            }
        }
    }

    /// Takes note of which layers can be written to, and of whether bytes have to be looked for.
    pub(super) fn layers_changed(&mut self) {
        let writable =
            |(depth, layer): (usize, &Layer<F>)| (!layer.frozen && !layer.format.geometry().read_only).then_some(depth);
        self.writers = self.layers.iter().enumerate().filter_map(writable).collect();
        self.reclaim_due = true;
        self.flat = self.layers.first().filter(|leaf| leaf.format.is_flat()).map(|leaf| leaf.file);
    }

    /// A layer that lies on coarser storage than the disk promises its guest cannot take the guest's requests.
    pub(super) fn check_block(&self, geometry: Geometry, name: &str) -> Result<(), ImageError> {
        if geometry.block <= self.geometry.block {
            return Ok(());
        }
        let what = format!("{name} lies on storage with {}-byte blocks, too coarse for the disk", geometry.block);
        Err(ImageError::new(ImageErrorKind::Unsupported, what))
    }

    /// What the end of a merge needs.
    pub(super) fn require_clean(&self, what: &str) -> Result<(), ImageError> {
        self.require_standstill(what)?;
        if self.is_clean() { Ok(()) } else { Err(refused(what, "not everything is durable")) }
    }

    /// What every other change of the chain needs.
    /// A layer changes only when what its last process has left is durable.
    pub(super) fn require_nothing_owed(&self, depth: usize) -> Result<(), ImageError> {
        match self.layers.get(depth).is_some_and(Layer::owes) {
            true => {
                let what =
                    format!("layer {depth} has changes of its last process that are not durable yet; flush first");
                Err(ImageError::new(ImageErrorKind::Unsupported, what))
            }
            false => Ok(()),
        }
    }

    fn require_quiet(&self, what: &str) -> Result<(), ImageError> {
        if self.merge.is_some() {
            return Err(refused(what, "layers are being merged"));
        }
        self.require_standstill(what)
    }

    fn require_standstill(&self, what: &str) -> Result<(), ImageError> {
        if !self.quiesced {
            return Err(refused(what, "requests are not held back"));
        }
        if self.is_quiet() { Ok(()) } else { Err(refused(what, "operations are in flight")) }
    }
}

fn refused(what: &str, obstacle: &str) -> ImageError {
    ImageError::new(ImageErrorKind::Unsupported, format!("{what} while {obstacle}"))
}

fn no_layer(depth: usize) -> ImageError {
    ImageError::new(ImageErrorKind::OutOfLimits, format!("there is no layer {depth}"))
}
