//! Names of objects.
//!
//! Only lower-case letters, digits, dashes and slashes: no two names differ only in case, none leaves its directory,
//! and none is changed by a file server. Every name but `format` and those of the log contains a random id, so it is
//! never given out twice.

use std::fmt;

use crate::id::Id;

/// The name of an object.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// Prefixes by which objects are listed.
pub mod prefix {
    /// Packs of chunks.
    pub const PACKS: &str = "packs/";
    /// Indices of backups.
    pub const BACKUPS: &str = "backups/";
    /// Entries of the log.
    pub const LOG: &str = "log/";
    /// What killed writers left; only stores that write under temporary names have any.
    pub const TEMPORARY: &str = "tmp/";
}

/// Digits of the number of a log entry: names sort as their numbers do.
const LOG_DIGITS: usize = 20;

impl Name {
    /// Checks a name that was read from a store; `None` if it is not one of ours.
    pub fn parse(text: &str) -> Option<Name> {
        let is_part = |part: &str| {
            !part.is_empty()
                && part.len() <= 64
                && part.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
        };
        (text.len() <= 200 && text.split('/').all(is_part)).then(|| Name(text.to_owned()))
    }

    /// The object that makes a directory or bucket a target.
    pub fn format() -> Name {
        Name("format".to_owned())
    }

    pub(crate) fn pack(id: Id) -> Name {
        let id = id.to_string();
        // 256 directories: one of them holds 2500 packs of a target of 10 TB.
        Name(format!("{}{}/{id}", prefix::PACKS, id.get(..2).unwrap_or_default()))
    }

    pub(crate) fn backup(id: Id) -> Name {
        Name(format!("{}{id}", prefix::BACKUPS))
    }

    /// An entry of the log of a target: an interrupted creation of another target leaves nothing that could be taken
    /// for one.
    pub(crate) fn log(target: Id, number: u64) -> Name {
        Name(format!("{}{target}/{number:0LOG_DIGITS$}", prefix::LOG))
    }

    /// Says that the entry of this number and id is in the log, not of a host that appended to a past state.
    pub(crate) fn log_mark(target: Id, number: u64, entry: Id) -> Name {
        Name(format!("{}-{entry}", Name::log(target, number)))
    }

    /// A name for what is deleted again.
    pub fn temporary(id: Id) -> Name {
        Name(format!("{}{id}", prefix::TEMPORARY))
    }

    /// Whether it can be of a pack of ours. Files of others next to ours are not touched.
    pub fn is_pack(&self) -> bool {
        let id = self.0.rsplit_once('/').and_then(|(_, id)| Id::parse(id));
        id.is_some_and(|id| Name::pack(id) == *self)
    }

    /// The number of an entry of the log of this target.
    pub(crate) fn log_number(&self, target: Id) -> Option<u64> {
        let (_, digits) = self.0.rsplit_once('/')?;
        digits.parse().ok().filter(|&number| Name::log(target, number) == *self)
    }

    /// The number and the id of the entry that a mark of the log of this target is for.
    pub(crate) fn log_marked(&self, target: Id) -> Option<(u64, Id)> {
        let (entry, id) = self.0.rsplit_once('-')?;
        Some((Name(entry.to_owned()).log_number(target)?, Id::parse(id)?))
    }

    /// Whether it can be of a log, of any target.
    pub fn is_of_log(&self) -> bool {
        let target = self.0.strip_prefix(prefix::LOG).and_then(|rest| Id::parse(rest.split_once('/')?.0));
        target.is_some_and(|target| self.log_number(target).is_some() || self.log_marked(target).is_some())
    }

    /// Whether it can be of a temporary file of ours.
    pub fn is_temporary(&self) -> bool {
        self.0.strip_prefix(prefix::TEMPORARY).and_then(Id::parse).is_some()
    }

    /// The id of an index.
    pub(crate) fn backup_id(&self) -> Option<Id> {
        Id::parse(self.0.strip_prefix(prefix::BACKUPS)?)
    }

    /// The directory of the object; empty for the root.
    pub(crate) fn directory(&self) -> &str {
        self.0.rsplit_once('/').map_or("", |(directory, _)| directory)
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl serde::Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> serde::Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Name::parse(&text).ok_or_else(|| serde::de::Error::custom("not the name of an object"))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn names_of_others_and_ways_out_are_refused() {
        for bad in ["", "/", "a/", "/a", "a//b", "../a", "a/..", "A", "a.b", ".nfs0001", "a\0", "lost+found"] {
            assert_eq!(Name::parse(bad), None, "{bad:?}");
        }
        let id = Id::from_bytes([7; 16]);
        for good in [Name::format(), Name::pack(id), Name::backup(id), Name::log(id, 3), Name::temporary(id)] {
            assert_eq!(Name::parse(good.as_str()), Some(good));
        }
        assert!(Name::pack(id).is_pack() && !Name::backup(id).is_pack());
        for other in ["packs/07", "packs/aa/07070707070707070707070707070707", "packs/07/other", "backups/packs/07"] {
            assert!(!Name::parse(other).unwrap().is_pack(), "{other}");
        }
        assert_eq!(Name::log(id, 77).log_number(id), Some(77));
        assert_eq!(Name::log(id, 77).log_number(Id::from_bytes([8; 16])), None);
        assert_eq!(Name::log_mark(id, 77, id).log_marked(id), Some((77, id)));
        assert_eq!(Name::log_mark(id, 77, id).log_number(id), None);
        assert_eq!(Name::parse("log/12").and_then(|name| name.log_number(id)), None);
    }
}
