//! Maps of changed blocks: the mark in an image, and the messages by which a daemon has its disk process record
//! changes.
//!
//! A disk process of a daemon may work for another user than the owner of the image, whose attributes it can neither
//! read nor write; the daemon looks into no map. So the daemon reads and writes marks, the process reads and writes
//! maps, and they agree over the socket that is the standard input of the process, before it serves
//! (docs/decisions/0065):
//!
//! 1. The process has opened and locked all files: [`FromDisk::Locked`].
//! 2. The daemon sends the map and the mark that it has found: [`ToDisk::Continue`]. The process refuses the map
//!    ([`FromDisk::Refused`]), or answers with its session ([`FromDisk::Verified`]). Then the daemon marks the image
//!    with that session and a new one, durably, and sends the new one ([`ToDisk::Session`]).
//! 3. For a new map the daemon has marked the image with it, durably: [`ToDisk::Begin`].
//! 4. The process has made the session of the map durable, and records changes: [`FromDisk::Recording`]. The daemon
//!    removes the old session from the mark.
//!
//! A snapshot of a disk that is not served ends the interval of a map as well: the process that makes the new image
//! verifies the map in the same way, and gets the next one ([`ToDisk::Begin`]), which continues it.
//!
//! Whenever this is interrupted, the mark has the session of the map, and no other map can have the new session.
//!
//! It knows neither files nor sockets. Ids of maps and sessions are 32 hexadecimal digits, drawn at random.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The name of the extended attribute that is the mark.
pub const MARK: &str = "user.tapline.changes";
/// The maximum length of a mark: some sessions, a map, and a file's id.
pub const MARK_MAX: usize = 1024;

/// The mark in an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The map.
    pub map: String,
    /// The id of the file that was marked, as its writer determines it.
    pub file: String,
    /// The sessions of the map, one of which it has.
    pub sessions: Vec<String>,
}

impl Mark {
    /// Parses the value of the attribute. A mark of an unknown form names no map.
    pub fn parse(text: &[u8]) -> Mark {
        let text = String::from_utf8_lossy(text);
        let words: Vec<&str> = text.split(' ').collect();
        match words.as_slice() {
            ["1", map, file, sessions] => {
                let sessions = sessions.split(',').map(str::to_owned).collect();
                Mark { map: (*map).into(), file: (*file).into(), sessions }
            }
            _ => Mark { map: String::new(), file: String::new(), sessions: Vec::new() },
        }
    }
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "1 {} {} {}", self.map, self.file, self.sessions.join(","))
    }
}

/// The state of an image's file, which every later write to it changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileState {
    /// The time of its last change (ctime), in seconds.
    pub seconds: i64,
    /// The nanoseconds of that time.
    pub nanoseconds: u32,
    /// Its length in bytes.
    pub len: u64,
}

/// A map to be begun in an empty file, for which the image is marked already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewMap {
    /// Its id.
    pub map: String,
    /// The session in which it is trusted.
    pub session: String,
}

/// A message of a disk process to its daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FromDisk {
    /// All files are open and locked. Nothing was written to the image that its earlier process had not recorded.
    Locked,
    /// The map cannot be used, for this reason.
    Refused(String),
    /// The map belongs to the image, all changes were recorded in it, and it has this session.
    Verified(String),
    /// Changes are recorded in the map with this id; its session is durable.
    Recording(String),
}

/// A message of a daemon to its disk process. With [`ToDisk::Continue`] and [`ToDisk::Begin`] comes the file of the
/// map, open for writing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ToDisk {
    /// Verify a map, and continue it.
    Continue {
        /// The path of its file.
        path: PathBuf,
        /// The mark that the image has.
        mark: Mark,
        /// The state of the image's file.
        state: FileState,
    },
    /// Continue the map that was verified in this session.
    Session(String),
    /// Begin a new map.
    Begin {
        /// The path of its empty file.
        path: PathBuf,
        /// Its ids.
        new: NewMap,
    },
    /// Serve without a map.
    Unrecorded,
}

/// A map of those that `image changes` joins, as a daemon has recorded it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpectedMap {
    /// Its id.
    pub map: String,
    /// The id of the map that it continues, if that is known.
    pub continues: Option<String>,
    /// What shows that it names all changes of its interval.
    pub proof: Proof,
}

/// The maps of an `image changes`, the oldest first; on its command line in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedMaps(pub Vec<ExpectedMap>);

impl std::str::FromStr for ExpectedMaps {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<ExpectedMaps, serde_json::Error> {
        serde_json::from_str(text)
    }
}

/// What shows that a map names all changes of its interval.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proof {
    /// Its interval has ended with a snapshot: it is sealed. If the process was killed before that, the image of the
    /// snapshot may have this mark.
    Sealed(Option<Mark>),
    /// A running disk records changes in it, in this session.
    Served(String),
    /// The image of the disk, which is not running, has this mark and this state.
    Image(Mark, FileState),
}

/// The answer of `image changes` in JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListedChanges {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a block.
    pub block: u32,
    /// Ids of the maps, the oldest first.
    pub maps: Vec<String>,
    /// Bytes that may have changed.
    pub changed: u64,
    /// The ranges that may have changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranges: Option<Vec<ChangedRange>>,
    /// The bitmap of XenAPI, in place of the ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bitmap: Option<String>,
}

/// A range of a disk that may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangedRange {
    /// Its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_mark_is_read_as_it_was_written() {
        let mark = Mark { map: "aa".into(), file: "bb".into(), sessions: vec!["cc".into(), "dd".into()] };
        assert_eq!(Mark::parse(mark.to_string().as_bytes()), mark);
    }

    #[test]
    fn a_mark_of_an_unknown_form_names_no_map() {
        for text in [&b"2 aa bb cc"[..], b"", b"1 aa bb", b"1 aa bb cc dd", b"\xff"] {
            assert_eq!(Mark::parse(text), Mark { map: String::new(), file: String::new(), sessions: Vec::new() });
        }
    }
}
