//! When the thread of a disk polls for work before it sleeps, in requests and answers.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Upper limit of the polling time before a sleep, in microseconds.
pub const POLLING_MAX_US: u64 = 10_000;

/// When a disk's thread polls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PollingMode {
    /// Never: it sleeps at once.
    Off,
    /// While that is worthwhile, and others do not want the processors.
    #[default]
    Adaptive,
    /// For the maximum time before each sleep.
    On,
}

impl fmt::Display for PollingMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PollingMode::Off => "off",
            PollingMode::Adaptive => "adaptive",
            PollingMode::On => "on",
        })
    }
}
