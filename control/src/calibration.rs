//! What a calibration has found: which sizes of transfers suit some storage, and all that was measured.
//!
//! It knows neither how that was measured nor where it is kept. Invariant: names and meanings are part of the
//! interface: of a policy file, of the output of `calibrate --json`, and of what a daemon records of a repository.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::SizeRule;
use crate::answer::PolicyNote;
use crate::size::readable;

/// The version of this format.
pub const CALIBRATION_VERSION: u32 = 1;

/// A policy, and the measurements that it follows from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// [`CALIBRATION_VERSION`].
    pub version: u32,
    /// What it was measured on.
    pub device: Storage,
    /// When.
    pub measured: String,
    /// By which version of the program, on which kernel.
    pub program: String,
    /// The same.
    pub kernel: String,
    /// `read` or `write`.
    pub operation: String,
    /// What is done to the sizes of transfers.
    pub policy: Sizes,
    /// What loads gain by that on average, and what the worst is left with: 1.1 is a tenth more.
    pub gain: f64,
    /// The same.
    pub worst: f64,
    /// All that was measured.
    pub points: Vec<Measured>,
}

/// Which storage something is on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// What tells it from all other storage.
    pub id: String,
    /// What people call it.
    pub name: String,
}

/// Sizes in bytes; `null` where nothing is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Larger transfers are split into pieces of so many.
    pub split: Option<u64>,
    /// Adjacent ones are merged up to so many.
    pub merge: Option<u64>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes of a request.
    pub size: u64,
    /// Requests in flight.
    pub depth: usize,
    /// Whether they were one behind the other, and not anywhere.
    pub sequential: bool,
    /// What was done to them.
    #[serde(flatten)]
    pub policy: Sizes,
    /// How fast they were.
    pub bytes_per_second: u64,
}

impl fmt::Display for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// As JSON, which is how it goes on a command line.
impl FromStr for Storage {
    type Err = serde_json::Error;

    fn from_str(word: &str) -> Result<Storage, serde_json::Error> {
        serde_json::from_str(word)
    }
}

impl Sizes {
    /// A size that no policy may have, if one of them is.
    pub fn not_allowed(&self) -> Option<u64> {
        [self.split, self.merge].into_iter().flatten().find(|size| !SizeRule::is_allowed(*size))
    }
}

impl Calibration {
    /// What a disk that follows it says of it. `file` is where it is.
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

    /// Why the policy is what it is, for people.
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
