//! Memory that a disk gives back when it has not been used for a while: what it knows of where bytes live can be learned
//! again.
//!
//! Knows nothing of time: whoever serves the disk says when. Keeps: what is not durable, or about to change, stays.

use super::Disk;
use crate::format::Format;

impl<F: Format> Disk<F> {
    /// Whether so much memory was taken since [`Disk::drop_caches`] that a disk at rest should give some back. After little, a guest
    /// that does something small from time to time finds things as it has left them, and nobody is woken for it.
    pub fn has_taken_much(&self) -> bool {
        self.taken > self.options.rest_bytes
    }

    /// Forgets what can be learned again.
    pub fn drop_caches(&mut self) {
        self.taken = 0;
        self.fold.clear();
        for layer in &mut self.layers {
            layer.format.drop_caches();
        }
    }
}
