//! Whether maps of changed blocks are those that a daemon has recorded, and name all changes of their intervals.
//!
//! The daemon sends with each map what is to show that ([`control::tracking::Proof`]); it looks into no map, and this
//! process reads no marks. It knows the maps, and nothing about who is to read them. Invariant: in any doubt the maps
//! are refused.

use control::Kind;
use control::tracking::{ExpectedMap, Proof};
use disk::changes::{ChangeMap, FileState};

use crate::files::mark::hex;
use crate::image::tracking;
use crate::process::failure::Failure;

/// Why a map that was not closed is not taken for complete: whether a redo log fits is examined when its disk is
/// plugged.
const KILLED: &str = "the process that recorded in it last was killed, and the disk was not plugged since";

/// Fails unless the maps are those that a daemon has recorded, and name all changes of their intervals. `image` is the
/// state of the image at the end of the last interval, if this process has it locked: it counts in place of the state
/// that the daemon saw, after which another program may have written to the image.
pub fn check(maps: &[ChangeMap], expected: &[ExpectedMap], image: Option<FileState>) -> Result<(), Failure> {
    if maps.len() != expected.len() {
        return Err(Failure::of(Kind::Invalid, "as many maps must be expected as there are"));
    }
    for (map, expected) in maps.iter().zip(expected) {
        if let Some(why) = why_unexpected(map, expected, image) {
            return Err(Failure::new(format!("use the map of changed blocks {}", expected.map), why)
                .of_kind(Kind::State)
                .advise("make a full backup"));
        }
    }
    Ok(())
}

fn why_unexpected(map: &ChangeMap, expected: &ExpectedMap, image: Option<FileState>) -> Option<String> {
    if hex(&map.id()) != expected.map {
        return Some(format!("its file has map {}", hex(&map.id())));
    }
    let continues = map.continues().map(|id| hex(&id));
    if expected.continues.is_some() && continues != expected.continues {
        return Some(format!("it continues {}", continues.as_deref().unwrap_or("no map")));
    }
    let session = hex(&map.session());
    match &expected.proof {
        Proof::Sealed(_) if map.is_sealed() => None,
        Proof::Sealed(Some(mark)) if mark.map == expected.map && mark.sessions.contains(&session) => None,
        Proof::Sealed(_) => Some("it is not complete, and nothing shows that its file is not an older copy".into()),
        Proof::Served(served) => (*served != session || map.is_sealed())
            .then(|| "its file is not the one in which the running disk records changes".into()),
        Proof::Image(mark, seen) => {
            let seen = FileState { changed: (seen.seconds, seen.nanoseconds), len: seen.len };
            let killed = || map.closed().is_none().then(|| KILLED.to_owned());
            tracking::mismatch(map, 0, (mark, true), Some(image.unwrap_or(seen))).or_else(killed)
        }
    }
}
