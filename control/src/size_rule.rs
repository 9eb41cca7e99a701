//! Rules for the sizes of transfers of a disk.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::size::{Size, readable};

/// A rule for splitting or for merging transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SizeRule {
    /// Transfers are not changed.
    #[default]
    None,
    /// Size in bytes of pieces, or maximum size of merged transfers; a power of two.
    Bytes(u64),
    /// The size in the policy that was measured on the storage.
    Auto,
}

/// Smaller pieces are pages in parts, and larger ones are no different from whole requests.
const BYTES: std::ops::RangeInclusive<u64> = 4 << 10..=16 << 20;

impl SizeRule {
    /// The size of a rule that has one.
    pub fn bytes(self) -> Option<u64> {
        if let SizeRule::Bytes(bytes) = self { Some(bytes) } else { None }
    }

    /// Whether a rule may have this size.
    pub fn is_allowed(bytes: u64) -> bool {
        bytes.is_power_of_two() && BYTES.contains(&bytes)
    }
}

impl FromStr for SizeRule {
    type Err = String;

    fn from_str(word: &str) -> Result<SizeRule, String> {
        match (word, word.parse()) {
            ("none" | "off", _) => Ok(SizeRule::None),
            ("auto", _) => Ok(SizeRule::Auto),
            (_, Ok(Size(bytes))) if SizeRule::is_allowed(bytes) => Ok(SizeRule::Bytes(bytes)),
            _ => Err(format!("'{word}' is not none, auto or a power of two from 4K to 16M")),
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
        match rule {
            SizeRule::None => "none".into(),
            SizeRule::Bytes(bytes) => bytes.to_string(),
            SizeRule::Auto => "auto".into(),
        }
    }
}

impl fmt::Display for SizeRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeRule::None => f.write_str("none"),
            SizeRule::Bytes(bytes) => f.write_str(&readable(*bytes)),
            SizeRule::Auto => f.write_str("auto"),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_rule_is_a_word_or_a_power_of_two() {
        let rules = ["none", "off", "auto", "16K", "4096"].map(|word| word.parse::<SizeRule>().unwrap());
        let [none, off, auto, sixteen, page] = rules;
        assert_eq!((none, off, auto), (SizeRule::None, SizeRule::None, SizeRule::Auto));
        assert_eq!((sixteen, page), (SizeRule::Bytes(16 << 10), SizeRule::Bytes(4096)));
        for word in ["", "2K", "12K", "32M", "on", "0"] {
            assert!(word.parse::<SizeRule>().unwrap_err().contains("power of two"), "{word}");
        }
    }

    #[test]
    fn a_rule_is_the_same_after_it_was_a_word() {
        for rule in [SizeRule::None, SizeRule::Auto, SizeRule::Bytes(1 << 20)] {
            let word = serde_json::to_string(&rule).unwrap();
            assert_eq!(serde_json::from_str::<SizeRule>(&word).unwrap(), rule, "{word}");
        }
    }
}
