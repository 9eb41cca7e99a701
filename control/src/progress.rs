//! Output of image jobs for a daemon that has passed them their files: progress lines on stderr, results on stdout.

use serde::{Deserialize, Serialize};

/// Progress of a job over a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Name of the operation, for people.
    #[serde(default)]
    pub doing: String,
    /// Bytes processed so far.
    pub done: u64,
    /// Total number of bytes to process.
    pub len: u64,
}

impl Progress {
    /// Completed fraction, from 0 to 1.
    #[allow(clippy::cast_precision_loss, reason = "for people, who see hundredths")]
    pub fn part(&self) -> f64 {
        if self.len == 0 { 0.0 } else { self.done as f64 / self.len as f64 }
    }
}

/// The result of `image merge … --is-done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsDone {
    /// Whether the merge is already complete.
    pub done: bool,
}
