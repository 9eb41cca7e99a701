//! When a disk's thread looks for more work before it sleeps: asked for, and in the answer what is in force.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The longest time that it polls before it sleeps, in microseconds.
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
