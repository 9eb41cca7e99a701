//! Freeing the caches of an idle disk: what it knows of where bytes live can be loaded again.
//!
//! Knows nothing of time: the caller decides when a disk is idle. Keeps: what is not durable, or about to change,
//! stays.

use super::Disk;
use crate::format::Format;

impl<F: Format> Disk<F> {
    /// Whether so much was cached since [`Disk::drop_caches`] that an idle disk should free it. A guest that does
    /// little from time to time keeps its caches, and nothing wakes up for them.
    pub fn is_trim_due(&self) -> bool {
        self.cached_bytes > self.options.trim_bytes
    }

    /// Drops everything that can be loaded again.
    pub fn drop_caches(&mut self) {
        self.cached_bytes = 0;
        self.map.clear();
        for layer in &mut self.layers {
            layer.format.drop_caches();
        }
    }
}
