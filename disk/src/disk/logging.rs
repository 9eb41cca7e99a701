//! The redo logs of the layers: what is logged when, and what an earlier process has left in them.
//!
//! Knows nothing of a log's format. Keeps: changes are logged before the request that caused them is answered, the
//! deepest layer first, as a round makes them durable; a layer changes only when the changes of its last process are
//! durable.

use super::Disk;
use super::chain::Layer;
use crate::format::{Format, MetaBlock, MetaWrite};
use crate::redo::RedoLog;
use crate::{FileId, ImageError, ImageErrorKind};

impl<F: Format> Disk<F> {
    /// Gives a layer its redo log, through which its image was opened ([`RedoLog::patched`]). Before the first request,
    /// or right after the call that added the layer. A layer that is only read has one where a sync of it has failed:
    /// what was not written to it never will be, and is read from the log.
    pub fn set_log(&mut self, file: FileId, log: RedoLog) -> Result<(), ImageError> {
        let failed = log.has_failed();
        let wants_one = |layer: &&mut Layer<F>| failed || !layer.format.geometry().read_only;
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

    /// The redo log of a layer, if it has one.
    pub fn log(&self, file: FileId) -> Option<&RedoLog> {
        self.layers.iter().find(|layer| layer.file == file).and_then(|layer| layer.log.as_ref())
    }

    /// The redo log of the leaf, if it has one.
    #[inline]
    pub fn leaf_log(&self) -> Option<&RedoLog> {
        self.layers.first().and_then(|layer| layer.log.as_ref())
    }

    /// Records the time at which this process works on its images, for the next one that opens them.
    pub fn seen(&self, now: u64) {
        self.layers.iter().filter_map(|layer| layer.log.as_ref()).for_each(|log| log.seen(now));
    }

    /// Whether there is a log.
    pub fn is_logged(&self) -> bool {
        self.logs
    }

    /// Whether some layer has changes of its last process that are not durable yet.
    pub fn owes(&self) -> bool {
        self.logs && self.layers.iter().any(Layer::owes)
    }

    /// To be called before a format is asked for something that may change it.
    pub(super) fn may_change(&mut self) {
        self.log_due = self.logs;
    }

    /// Logs what has changed. Returns whether all of it, and all before it, is logged: if not, the change must be
    /// durable before its request is answered.
    pub(super) fn log_changes(&mut self) -> bool {
        let mut gap = false;
        for depth in self.writers.clone().into_iter().rev() {
            gap |= self.layer_at_mut(depth).log_changes(gap);
        }
        self.log_due = gap;
        !gap
    }

    /// A sync has failed. The kernel may have marked the lost pages clean, so a later sync that succeeds proves
    /// nothing, not in another process either. Nothing above that layer may become durable any more, because it may
    /// have freed what was lost below. The upper logs are marked first, in case this process dies in between.
    pub(super) fn sync_failed(&mut self, file: FileId) {
        self.broken = true;
        let depth = self.depth_of(file);
        let logs = self.layers.iter_mut().take(depth + 1).filter_map(|layer| layer.log.as_mut());
        logs.for_each(RedoLog::sync_failed);
    }
}

impl<F: Format> Layer<F> {
    /// Logs what has changed in this layer. Returns whether its log has a gap; `below`: whether one of a layer below
    /// has.
    fn log_changes(&mut self, below: bool) -> bool {
        let Some(log) = &mut self.log else { return below };
        let changes = self.format.records();
        if !changes.is_empty() {
            log.append(changes, below);
        }
        log.has_gap()
    }

    /// Whether the log is so full that a round should begin before requests have to wait for one.
    pub(super) fn is_log_full(&self) -> bool {
        let full = |log: &RedoLog| log.used().saturating_sub(self.upkeep.log_left) > log.capacity() / 2;
        self.log.as_ref().is_some_and(full)
    }

    /// Begins a round. The changes of the last process come first, for the format does not know of them.
    pub(super) fn seal(&mut self) -> Vec<Vec<MetaWrite>> {
        let mut batches = Vec::new();
        if let Some(log) = &mut self.log {
            log.seal();
            batches.extend_from_slice(log.owed().map(|owed| owed.batches()).unwrap_or_default());
        }
        batches.append(&mut self.format.seal());
        batches
    }

    /// Ends a round.
    pub(super) fn settled(&mut self, durable: bool) {
        self.format.settled(durable);
        if let Some(log) = &mut self.log {
            log.settle(durable, !self.upkeep.unsynced);
            self.upkeep.log_left = if durable { 0 } else { log.used() };
        }
    }

    /// Hands loaded metadata to the format, with the changes of the last process applied. Returns whether it makes
    /// sense.
    pub(super) fn load(&mut self, block: MetaBlock, mut bytes: Vec<u8>) -> bool {
        if let Some(owed) = self.log.as_ref().and_then(RedoLog::owed) {
            owed.patch(block.at, &mut bytes);
        }
        self.format.load(block, &bytes).is_ok()
    }
}
