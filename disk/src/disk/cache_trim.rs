//! Memory that a disk gives back when it has not been used for a while: what it knows of where bytes live can be loaded
//! again.
//!
//! Knows nothing of time: whoever serves the disk says when. Keeps: what is not durable, or about to change, stays.

use super::Disk;
use crate::format::Format;

impl<F: Format> Disk<F> {
    /// Whether so much memory was taken since [`Disk::drop_caches`] that a disk at rest should give some back. After little, a guest
    /// that does something small from time to time finds things as it has left them, and nobody is woken for it.
    pub fn is_trim_due(&self) -> bool {
        self.cached_bytes > self.options.cache_trim_bytes
    }

    /// Forgets what can be loaded again.
    pub fn drop_caches(&mut self) {
        self.cached_bytes = 0;
        self.map.clear();
        for layer in &mut self.layers {
            layer.format.drop_caches();
        }
    }
}
