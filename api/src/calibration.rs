//! Sizes of transfers that suit the storage of a repository: measured, or set.

use std::fmt;
use std::str::FromStr;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};
use uuid::Uuid;

use crate::{Code, Problem, Sr};

/// How the sizes of transfers are changed, in one direction: `none`, a power of two from 4096 to 16777216 in bytes, or
/// `auto`, which is the size of the policy that was measured on the storage, and `none` without a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SizeRule {
    /// Nothing.
    None,
    /// Size in bytes.
    Bytes(u64),
    /// The size that the policy of the storage has.
    #[default]
    Auto,
}

/// Smaller pieces are pages in parts, and larger ones are no different from whole requests.
const BYTES: std::ops::RangeInclusive<u64> = 4 << 10..=16 << 20;

impl FromStr for SizeRule {
    type Err = String;

    fn from_str(word: &str) -> Result<SizeRule, String> {
        match (word, word.parse::<u64>()) {
            ("none", _) => Ok(SizeRule::None),
            ("auto", _) => Ok(SizeRule::Auto),
            (_, Ok(bytes)) if bytes.is_power_of_two() && BYTES.contains(&bytes) => Ok(SizeRule::Bytes(bytes)),
            _ => Err(format!("'{word}' is not none, auto or a power of two from 4096 to 16777216")),
        }
    }
}

impl TryFrom<String> for SizeRule {
    type Error = String;

    fn try_from(word: String) -> Result<SizeRule, String> {
        word.parse()
    }
}

impl From<SizeRule> for String {
    fn from(rule: SizeRule) -> String {
        rule.to_string()
    }
}

impl fmt::Display for SizeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeRule::None => f.write_str("none"),
            SizeRule::Bytes(bytes) => bytes.fmt(f),
            SizeRule::Auto => f.write_str("auto"),
        }
    }
}

impl PartialSchema for SizeRule {
    fn schema() -> RefOr<Schema> {
        let text = ObjectBuilder::new().schema_type(Type::String).pattern(Some("^(none|auto|[1-9][0-9]{3,7})$"));
        let says = "What is done to the sizes of transfers: none, a power of two from 4096 to 16777216 in bytes, or \
                    auto, which is what the policy says that was measured on the storage.";
        text.description(Some(says)).into()
    }
}

impl ToSchema for SizeRule {}

/// The identity of a storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Storage {
    /// Distinguishes it from all other storage: identities of the device that the kernel knows, and its size.
    pub id: String,
    /// A name for people.
    pub name: String,
}

/// The accesses of a calibration to the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum CalibrationOperation {
    /// It only read.
    Read,
    /// It wrote to a file of its own.
    Write,
}

/// Sizes of transfers that were found by measuring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SrPolicy {
    /// The storage that it was measured on. It is not used on any other.
    pub device: Storage,
    /// When it was measured.
    pub measured: Timestamp,
    /// The accesses with which it was measured.
    pub operation: CalibrationOperation,
    /// Larger transfers are split into pieces of this size in bytes; absent if transfers are not split.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<u64>,
    /// Adjacent transfers are merged up to this size in bytes; absent if transfers are not merged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<u64>,
    /// The mean gain of loads: 1.1 is a tenth more throughput.
    pub gain: f64,
    /// The gain of the load that gains least; less than 1 is a loss.
    pub worst: f64,
    /// Why the policy is what it is, for people.
    pub why: String,
    /// The version of the disk process that measured.
    pub program: String,
    /// The version of the kernel.
    pub kernel: String,
}

/// A policy, and all that was measured for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SrCalibration {
    /// The policy.
    pub policy: SrPolicy,
    /// The measurements.
    pub points: Vec<SrMeasured>,
}

/// The throughput of one load under one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SrMeasured {
    /// Bytes of a request.
    pub size: u64,
    /// Requests in flight.
    pub depth: u64,
    /// Whether they were sequential; otherwise they were at random offsets.
    pub sequential: bool,
    /// The size in bytes of the pieces that they were split into; absent if they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<u64>,
    /// The size in bytes up to which they were merged; absent if they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub merge: Option<u64>,
    /// The measured throughput.
    pub bytes_per_second: u64,
}

/// Measures which sizes of transfers suit a repository's storage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SrCalibrate {
    /// Only read, and do that although disks of the repository are in use. Otherwise a file is written to that the
    /// daemon creates for that, and none may be.
    #[serde(default)]
    pub read_only: bool,
    /// The VDI whose image file is read; by default the largest one that is full of data. Only with `read_only`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vdi: Option<Uuid>,
    /// For how long, about. 45 by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 3600)]
    pub seconds: Option<u32>,
}

/// The result of a calibration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SrCalibrated {
    /// The repository.
    pub uuid: Uuid,
    /// What was found.
    pub policy: SrPolicy,
}

impl Sr {
    /// The policy if it is used; or why it is not, although there is one.
    pub fn policy_in_force(&self) -> Result<Option<&SrPolicy>, Problem> {
        let Some(policy) = &self.policy else { return Ok(None) };
        let now = self.variant.as_ref().and_then(|variant| variant.device.as_ref());
        let on = match now {
            Some(device) if device.id == policy.device.id => return Ok(Some(policy)),
            Some(device) => format!("the repository is on {}", device.name),
            None => "it is not known what the repository is on".to_owned(),
        };
        let what =
            format!("the policy of the repository {} was measured on {}, and {on}", self.uuid, policy.device.name);
        Err(Problem::new(Code::State, what).advise("measure that with 'tapline sr calibrate', or forget the policy"))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_rule_is_a_word_or_a_power_of_two() {
        for rule in [SizeRule::None, SizeRule::Auto, SizeRule::Bytes(4096), SizeRule::Bytes(16 << 20)] {
            let word = serde_json::to_string(&rule).unwrap();
            assert_eq!(serde_json::from_str::<SizeRule>(&word).unwrap(), rule, "{word}");
        }
        for word in ["", "off", "4K", "2048", "12288", "33554432"] {
            assert!(word.parse::<SizeRule>().unwrap_err().contains("power of two"), "{word}");
        }
    }
}
