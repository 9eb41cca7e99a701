//! The result of a calibration: the transfer sizes that suit a storage device, and the measurements.
//!
//! It knows neither how they are measured nor where they are stored. Invariant: names and meanings are part of the
//! interface: of policy files, of the output of `calibrate --json`, and of the records of a daemon.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::SizeRule;
use crate::answer::PolicyNote;
use crate::size::readable;

/// The version of the format.
pub const CALIBRATION_VERSION: u32 = 1;

/// A policy, and the measurements that it is based on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Version of the format, [`CALIBRATION_VERSION`].
    pub version: u32,
    /// Storage that was measured.
    pub device: Storage,
    /// Time of the measurement.
    pub measured: String,
    /// Version of the program.
    pub program: String,
    /// Kernel version.
    pub kernel: String,
    /// Operation that was measured: `read` or `write`.
    pub operation: String,
    /// The policy.
    pub policy: Sizes,
    /// Average throughput with the policy relative to that without: 1.1 is 10 % more.
    pub gain: f64,
    /// The lowest of these ratios.
    pub worst: f64,
    /// All measurements.
    pub points: Vec<Measured>,
}

/// Identity of a storage device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// Unique identifier.
    pub id: String,
    /// Name for people.
    pub name: String,
}

/// Transfer sizes of a policy in bytes; `null` leaves transfers unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Size of the pieces that larger transfers are split into.
    pub split: Option<u64>,
    /// Maximum size of merged adjacent transfers.
    pub merge: Option<u64>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Size of a request in bytes.
    pub size: u64,
    /// Number of requests in flight.
    pub depth: usize,
    /// Whether the requests were sequential, not random.
    pub sequential: bool,
    /// Policy that was applied.
    #[serde(flatten)]
    pub policy: Sizes,
    /// Throughput.
    pub bytes_per_second: u64,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Parses JSON, the form on a command line.
impl FromStr for Storage {
    type Err = serde_json::Error;

    fn from_str(word: &str) -> Result<Storage, serde_json::Error> {
        serde_json::from_str(word)
    }
}

impl Sizes {
    /// Returns a size that no policy may have, if there is one.
    pub fn not_allowed(&self) -> Option<u64> {
        [self.split, self.merge].into_iter().flatten().find(|size| !SizeRule::is_allowed(*size))
    }
}

impl Calibration {
    /// Creates the description for a disk that follows the policy in `file`.
    pub fn note(&self, file: String) -> PolicyNote {
        PolicyNote {
            file,
            repository: None,
            device: self.device.to_string(),
            measured: self.measured.clone(),
            kernel: self.kernel.clone(),
            split: self.policy.split,
            merge: self.policy.merge,
            why: self.why(),
        }
    }

    /// Explains the policy, for people.
    pub fn why(&self) -> String {
        let percent = |share: f64| format!("{:.0} %", share.abs() * 100.0);
        let count = self.points.len();
        match (self.policy.split, self.policy.merge) {
            (None, None) => {
                format!("of {count} measurements none showed a gain that costs no other load more than 3 %")
            }
            (split, merge) => {
                let split = split.map(|piece| format!("pieces of {}", readable(piece)));
                let merge = merge.map(|most| format!("merging up to {}", readable(most)));
                let what = split.into_iter().chain(merge).collect::<Vec<_>>().join(" and ");
                let worst = match self.worst < 1.0 {
                    true => format!("the worst loses {}", percent(1.0 - self.worst)),
                    false => "none loses anything".to_owned(),
                };
                format!("in {count} measurements {what} gained {} on average; {worst}", percent(self.gain - 1.0))
            }
        }
    }
}
