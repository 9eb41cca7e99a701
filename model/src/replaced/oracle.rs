//! The content that an image may show after the death of its process and after a power loss.
//!
//! Knows nothing about how an image is read.

use crate::content::{Content, Range};

/// The expected content of an image.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// The content with all answered writes.
    pub live: Content,
    /// The content after a power loss: flushed writes, and possibly later ones.
    pub lossy: Content,
}

/// How the bytes read differ from both.
#[derive(Clone, Debug)]
pub enum Mismatch {
    /// Answered writes are missing, as after a power loss.
    Lost(String),
    /// The bytes match neither.
    Foreign(String),
}

impl Oracle {
    /// The oracle of an image at rest.
    pub fn at_rest(content: Content) -> Oracle {
        Oracle { lossy: content.clone(), live: content }
    }

    /// Records a write that was answered; stamp 0 is zeroes.
    pub fn set(&mut self, range: Range, stamp: u64) {
        self.live.set(range, stamp);
        self.lossy.set_perhaps(range, stamp);
    }

    /// Records a write that was answered and is durable.
    pub fn set_durably(&mut self, range: Range, stamp: u64) {
        self.live.set(range, stamp);
        self.lossy.set(range, stamp);
    }

    /// Records a write that was not answered, or a discard.
    pub fn set_perhaps(&mut self, range: Range, stamp: u64) {
        self.live.set_perhaps(range, stamp);
        self.lossy.set_perhaps(range, stamp);
    }

    /// Records that a flush was answered while no request was in flight.
    pub fn flushed(&mut self) {
        self.lossy = self.live.clone();
    }

    /// Records a power loss, or an equivalent loss.
    pub fn lose(&mut self) {
        self.live = self.lossy.clone();
    }

    /// Compares bytes that were read; uncertain units are settled by them.
    pub fn check_read(&mut self, bytes: &[u8]) -> Result<(), Mismatch> {
        let mut live = self.live.clone();
        match live.check_read(0, bytes) {
            Ok(()) => {
                self.live = live;
                Ok(())
            }
            Err(why) if self.lossy.clone().check_read(0, bytes).is_ok() => Err(Mismatch::Lost(why)),
            Err(why) => Err(Mismatch::Foreign(why)),
        }
    }
}
