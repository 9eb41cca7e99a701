//! What image jobs tell the daemon that has passed them their files, apart from errors. How far a long job is comes in
//! a line of its own on stderr, and results on stdout.

use serde::{Deserialize, Serialize};

/// Bytes of the disk that a job has gone through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// What the job does, for people.
    #[serde(default)]
    pub doing: String,
    /// So many bytes.
    pub done: u64,
    /// Of so many.
    pub len: u64,
}

impl Progress {
    /// The fraction of it that is done.
    #[allow(clippy::cast_precision_loss, reason = "for people, who see hundredths")]
    pub fn part(&self) -> f64 {
        if self.len == 0 { 0.0 } else { self.done as f64 / self.len as f64 }
    }
}

/// The result of `image merge … --is-done`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IsDone {
    /// Whether there is nothing to merge any more.
    pub done: bool,
}
