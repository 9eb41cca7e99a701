//! What an image may show: after the death of its process, and after a power loss.
//!
//! Knows nothing of how an image is read.

use crate::content::{Content, Range};

/// Both.
#[derive(Clone, Debug, Default)]
pub struct Oracle {
    /// All that was answered.
    pub live: Content,
    /// What was flushed, or anything later.
    pub lossy: Content,
}

/// How what was read differs.
#[derive(Clone, Debug)]
pub enum Wrong {
    /// Answered writes are missing, as after a power loss.
    Lost(String),
    /// Neither that.
    Foreign(String),
}

impl Oracle {
    /// An image at rest.
    pub fn at_rest(content: Content) -> Oracle {
        Oracle { lossy: content.clone(), live: content }
    }

    /// A write that was answered; with stamp 0 zeroes.
    pub fn set(&mut self, range: Range, stamp: u64) {
        self.live.set(range, stamp);
        self.lossy.set_perhaps(range, stamp);
    }

    /// The same, and it is durable.
    pub fn set_durably(&mut self, range: Range, stamp: u64) {
        self.live.set(range, stamp);
        self.lossy.set(range, stamp);
    }

    /// A write that was not answered, or a discard.
    pub fn set_perhaps(&mut self, range: Range, stamp: u64) {
        self.live.set_perhaps(range, stamp);
        self.lossy.set_perhaps(range, stamp);
    }

    /// A flush was answered while nothing was under way.
    pub fn flushed(&mut self) {
        self.lossy = self.live.clone();
    }

    /// There was a power loss, or all that is left is as after one.
    pub fn lose(&mut self) {
        self.live = self.lossy.clone();
    }

    /// Holds what was read against it; what was open is settled.
    pub fn see(&mut self, bytes: &[u8]) -> Result<(), Wrong> {
        let mut live = self.live.clone();
        match live.see(0, bytes) {
            Ok(()) => {
                self.live = live;
                Ok(())
            }
            Err(why) if self.lossy.clone().see(0, bytes).is_ok() => Err(Wrong::Lost(why)),
            Err(why) => Err(Wrong::Foreign(why)),
        }
    }
}
