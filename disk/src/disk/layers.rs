//! The layers of a disk, and how they change while it lives: a new leaf, a layer opened for another access, layers
//! taken off, a larger leaf.
//!
//! Knows nothing of why. Keeps: the layers change only while nothing is in flight, so that no operation begins on one
//! chain and ends on another; and, where it matters, only when all of them are durable.
//!
//! To change the chain:
//!
//! 1. [`Disk::quiesce`]. Requests in flight end ([`Disk::is_quiet`]); new ones wait.
//! 2. [`Disk::sync`], until [`Disk::is_clean`].
//! 3. The change. It takes constant time, except for [`Disk::pop_to`].
//! 4. [`Disk::resume`].

use super::layer::{Layer, Reclaim, Upkeep};
use super::{Disk, LAYERS_MAX};
use crate::format::Format;
use crate::redo::RedoLog;
use crate::{FileId, Geometry, ImageError, ImageErrorKind, Io, Request, Token};

impl<F: Format> Disk<F> {
    /// Quiesces the disk: new requests wait, those in flight end.
    pub fn quiesce(&mut self) {
        self.overlap.quiesce();
        self.withdraw_merge_chunk();
    }

    /// Lets the waiting requests go.
    pub fn resume<I: Io>(&mut self, io: &mut I) {
        self.overlap.resume();
        self.begin_reclaim(io);
        self.reclaim_more(io);
        self.record_changes(io);
        self.work_all(io);
    }

    /// Nothing depends any more on whether something else has changed an image before it was opened
    /// ([`RedoLog::forget_void`]).
    pub fn forget_void_logs(&self) {
        self.layers().iter().filter_map(|layer| layer.log.as_ref()).for_each(RedoLog::forget_void);
    }

    /// Gives a layer its redo log, through which its image was opened ([`RedoLog::patched`]). Before the first request,
    /// or right after the call that added the layer. A layer that is only read has one where its last process has left
    /// something to be written: it is read from there.
    pub fn set_log(&mut self, file: FileId, log: RedoLog) -> Result<(), ImageError> {
        self.chain.set_log(file, log)
    }

    /// The redo log of a layer, if it has one.
    pub fn log(&self, file: FileId) -> Option<&RedoLog> {
        self.layers().iter().find(|layer| layer.file == file).and_then(|layer| layer.log.as_ref())
    }

    /// The redo log of the leaf, if it has one.
    #[inline]
    pub fn leaf_log(&self) -> Option<&RedoLog> {
        self.layers().first().and_then(|layer| layer.log.as_ref())
    }

    /// Whether there is a log.
    pub fn is_logged(&self) -> bool {
        self.chain.is_logged()
    }

    /// Whether some layer has changes of its last process that are not durable yet.
    pub fn owes(&self) -> bool {
        self.chain.owes()
    }

    /// Takes out those waiting requests of a quiesced disk that `wanted` names. Nothing of them was begun, and nothing
    /// will be.
    pub fn take_waiting(&mut self, wanted: impl Fn(Token) -> bool) -> Vec<Request> {
        self.overlap.take_waiting(wanted)
    }

    /// Whether the disk is quiesced.
    pub fn is_quiesced(&self) -> bool {
        self.overlap.is_quiesced()
    }

    /// Whether no request is under way, but for those that wait, and no file operation either.
    pub fn is_quiet(&self) -> bool {
        self.active.len() == 0 && self.ops.len() == 0
    }

    /// Puts an empty leaf of the disk's size on top of the chain, in a file whose number no other layer has. Only while
    /// the disk is quiesced and nothing is in flight. What was written to the old leaf need not be durable yet: each
    /// round takes the layers from the deepest up, so nothing in the new leaf is durable before it.
    pub fn push_leaf(&mut self, file: FileId, leaf: F) -> Result<(), ImageError> {
        self.require_quiet("a leaf cannot be put on the chain")?;
        let geometry = leaf.geometry();
        if self.layers().len() >= LAYERS_MAX {
            let what =
                format!("the chain has {} layers already, and no more than {LAYERS_MAX} are allowed", LAYERS_MAX);
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        if self.layers().iter().any(|layer| layer.file == file) {
            let what = format!("file {} is a layer of the chain already", file.0);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        if geometry.len != self.geometry().len {
            let what = format!("the new leaf has {} bytes, the disk {}", geometry.len, self.geometry().len);
            return Err(ImageError::new(ImageErrorKind::Mismatch, what));
        }
        self.check_block(geometry, "the new leaf")?;
        self.chain.layers_mut().insert(0, Layer::new(file, leaf));
        self.chain.set_geometry(Geometry { read_only: geometry.read_only, ..self.geometry() });
        self.layers_changed();
        Ok(())
    }

    /// Closes a layer below the leaf for writing: no space in it is reclaimed, and after the round that makes it
    /// durable no other round touches it ([`Disk::is_frozen`]), until it is opened for another access. Only while the
    /// disk is quiesced and nothing is in flight.
    pub fn freeze(&mut self, depth: usize) -> Result<(), ImageError> {
        self.require_quiet("a layer cannot be closed for writing")?;
        let Some(layer) = self.chain.layers_mut().get_mut(depth) else { return Err(no_layer(depth)) };
        layer.closing = true;
        layer.upkeep.reclaim = Reclaim::Done;
        self.freeze_if_durable(depth);
        Ok(())
    }

    /// The same for a layer that was opened for writing only because its last process has left something to be
    /// written, before the first request. A flush is answered only when that is durable.
    pub fn close_when_durable(&mut self, depth: usize) {
        if let Some(layer) = self.chain.layers_mut().get_mut(depth).filter(|_| depth > 0) {
            layer.closing = true;
            layer.upkeep.reclaim = Reclaim::Done;
        }
    }

    /// A sync of a layer's file has failed that was not the disk's own: the disk is broken as after one of its own.
    pub fn sync_failed(&mut self, file: FileId) {
        self.chain.sync_failed(file);
    }

    /// Whether a layer was closed for writing and is durable.
    pub fn is_frozen(&self, file: FileId) -> bool {
        self.layers().iter().any(|layer| layer.file == file && layer.frozen)
    }

    pub(super) fn freeze_if_durable(&mut self, depth: usize) {
        let layer = self.chain.at_mut(depth);
        if layer.closing && !layer.is_dirty() {
            layer.frozen = true;
            layer.log = None;
            layer.upkeep = Upkeep::new(true);
            self.layers_changed();
        }
    }

    /// Replaces a layer's image by the same file opened for another access. Only while the disk is quiesced, nothing is
    /// in flight and the layer is durable.
    pub fn reopen(&mut self, depth: usize, format: F) -> Result<(), ImageError> {
        self.require_quiet("a layer cannot be opened for another access")?;
        let new = format.geometry();
        let broken = self.is_broken();
        let Some(layer) = self.chain.layers_mut().get_mut(depth) else { return Err(no_layer(depth)) };
        if broken || layer.is_dirty() {
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
            self.chain.set_geometry(Geometry { read_only: new.read_only, ..self.geometry() });
        }
        self.layers_changed();
        Ok(())
    }

    /// Takes off the layers above `depth`, which becomes the leaf, and returns them. Only while the disk is quiesced
    /// and nothing is in flight: what those layers hold is no longer the disk's, durable or not.
    pub fn pop_to(&mut self, depth: usize) -> Result<Vec<Layer<F>>, ImageError> {
        self.require_quiet("layers cannot be taken off the chain")?;
        self.require_no_map("layers cannot be taken off the chain")?;
        let Some(leaf) = self.layers().get(depth) else { return Err(no_layer(depth)) };
        // The guest keeps the sector size that was reported to it.
        self.chain.set_geometry(Geometry { block: self.geometry().block, ..leaf.format.geometry() });
        self.map.reset(self.geometry().len);
        let popped: Vec<Layer<F>> = self.chain.layers_mut().drain(..depth).collect();
        popped.iter().for_each(|layer| self.compressed.closed(layer.file));
        self.layers_changed();
        Ok(popped)
    }

    /// Grows the leaf, and with it the disk; the new part reads as zero. Durable with the next round; where a format
    /// grows no earlier (a fixed VHD), neither does the disk. Only while the disk is quiesced and nothing is in flight.
    pub fn grow(&mut self, len: u64) -> Result<(), ImageError> {
        self.require_quiet("the disk cannot be made larger")?;
        self.require_nothing_owed(0)?;
        if len < self.geometry().len {
            let what = format!("a disk of {} bytes cannot be made smaller, to {len}", self.geometry().len);
            return Err(ImageError::new(ImageErrorKind::OutOfLimits, what));
        }
        self.check_hidden(0, len)?;
        self.check_map_reaches(len)?;
        self.chain.may_change();
        let Some(leaf) = self.chain.layers_mut().first_mut() else { return Err(no_layer(0)) };
        leaf.format.grow(len)?;
        self.leaf_grown();
        Ok(())
    }

    /// Grows a layer that is to be merged; the new part reads as zero. Durable with the next round; a format may grow
    /// no earlier. The guest may keep using the disk meanwhile.
    pub fn grow_layer(&mut self, depth: usize, len: u64) -> Result<(), ImageError> {
        self.check_hidden(depth, len)?;
        self.require_nothing_owed(depth)?;
        self.chain.may_change();
        let Some(layer) = self.chain.layers_mut().get_mut(depth) else { return Err(no_layer(depth)) };
        layer.format.grow(len)?;
        let file = layer.file;
        // A write behind its old end may change no metadata: a cluster that reaches there is allocated already.
        self.layer_grown(file);
        Ok(())
    }

    /// The disk is as large as its leaf.
    fn leaf_grown(&mut self) {
        self.chain.leaf_grown();
        self.map.known_mut().grow(self.chain.geometry().len);
    }

    /// A layer has grown. The map's entries for what lies behind its old end are void.
    pub(super) fn layer_grown(&mut self, file: FileId) {
        if file == self.chain.leaf() {
            self.leaf_grown();
        }
        self.map.reset(self.geometry().len);
    }

    /// Checks that growing a layer to `len` bytes exposes nothing of the layer below that its old end hides.
    pub(super) fn check_hidden(&self, depth: usize, len: u64) -> Result<(), ImageError> {
        let len_of = |depth: usize| self.layers().get(depth).map(|layer| layer.format.geometry().len);
        let (Some(old), Some(below)) = (len_of(depth), len_of(depth + 1)) else { return Ok(()) };
        if len <= old || below <= old {
            return Ok(());
        }
        let what = format!(
            "layer {depth} has {old} bytes and the one below it {below}: growing it would expose what it hides"
        );
        Err(ImageError::new(ImageErrorKind::Mismatch, what))
    }

    /// The image of a layer, for changes that affect neither where bytes live nor how many there are. Refused while
    /// changes of its last process are not durable.
    pub fn layer_mut(&mut self, depth: usize) -> Result<&mut F, ImageError> {
        self.require_nothing_owed(depth)?;
        self.chain.may_change();
        let layer = self.chain.layers_mut().get_mut(depth).ok_or_else(|| no_layer(depth))?;
        Ok(&mut layer.format)
    }

    /// Layers were opened, frozen or taken off.
    pub(super) fn layers_changed(&mut self) {
        self.chain.changed();
        self.reclaim_due = true;
    }

    /// Refuses a layer on storage with larger blocks than those reported to the guest: it cannot take its requests.
    pub(super) fn check_block(&self, geometry: Geometry, name: &str) -> Result<(), ImageError> {
        if geometry.block <= self.geometry().block {
            return Ok(());
        }
        let what = format!("{name} lies on storage with {}-byte blocks, too coarse for the disk", geometry.block);
        Err(ImageError::new(ImageErrorKind::Unsupported, what))
    }

    /// Checks the requirements for ending a merge.
    pub(super) fn require_clean(&self, what: &str) -> Result<(), ImageError> {
        self.require_standstill(what)?;
        if self.is_clean() { Ok(()) } else { Err(refused(what, "not everything is durable")) }
    }

    /// A layer changes only when the changes of its last process are durable.
    pub(super) fn require_nothing_owed(&self, depth: usize) -> Result<(), ImageError> {
        match self.layers().get(depth).is_some_and(Layer::owes) {
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
        if !self.is_quiesced() {
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
