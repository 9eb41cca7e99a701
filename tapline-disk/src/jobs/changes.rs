//! `image changes`: lists the ranges of a disk that may have changed, by its maps of changed blocks.
//!
//! Whether a map can be trusted is in [`tracking`].

use std::path::Path;

use control::size::readable;
use control::tracking::{ChangedRange, ExpectedMap, ExpectedMaps, ListedChanges, Proof};
use control::{ImageName, Kind};
use disk::changes::ChangeMap;

use crate::files::Files;
use crate::files::mark::hex;
use crate::image::tracking::{self, LOOK};
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::{Changes, ChangesFormat};

/// Runs `image changes`.
pub fn run(files: &Files, changes: &Changes) -> Result<Exit, Failure> {
    let maps: Vec<ChangeMap> = changes.maps.iter().map(|path| tracking::look(files, path)).collect::<Result<_, _>>()?;
    let ids = maps.iter().map(|map| hex(&map.id())).collect();
    if let Some(ExpectedMaps(expected)) = &changes.expect {
        check_expected(&maps, expected)?;
    }
    // That they are of other disks or in another order is the better reason, which comes first.
    let are_sealed = match &changes.expect {
        Some(_) => Ok(()),
        None => tracking::must_be_sealed(&changes.maps, &maps),
    };
    if let (Some(image), Some((path, map))) = (&changes.image, changes.maps.last().zip(maps.last())) {
        check(files, image, path, map)?;
    }
    let all = tracking::join(maps)?;
    are_sealed?;
    let (is_xapi, ranges) = (changes.format == Some(ChangesFormat::Xapi), || {
        all.extents().map(|span| ChangedRange { start: span.at.0, length: span.len }).collect::<Vec<_>>()
    });
    if changes.json {
        let changed = all.extents().map(|span| span.len).sum();
        let (ranges, bitmap) = if is_xapi { (None, Some(all.to_xapi())) } else { (Some(ranges()), None) };
        let (size, block) = (all.len(), all.block());
        output::json(&ListedChanges { size, block, maps: ids, changed, ranges, bitmap })?;
        return Ok(Exit::Done);
    }
    if is_xapi {
        output::print(&format!("{}\n", all.to_xapi()))?;
        return Ok(Exit::Done);
    }
    let ranges = ranges();
    let changed = ranges.iter().map(|range| range.length).sum();
    let mut text = format!("{:>16} {:>16}\n", "START", "LENGTH");
    for range in &ranges {
        text.push_str(&format!("{:>16} {:>16}\n", range.start, range.length));
    }
    text.push_str(&format!("{} of {} may have changed\n", readable(changed), readable(all.len())));
    match all.suspects() + all.damaged() {
        0 => {}
        regions => text.push_str(&format!(
            "{regions} regions of 4 MiB count as changed throughout: a map is in use, or its process was killed\n"
        )),
    }
    output::print(&text)?;
    Ok(Exit::Done)
}

/// Fails unless all writes to the image since the map was begun are known to be recorded in it.
fn check(files: &Files, image: &ImageName, path: &Path, map: &ChangeMap) -> Result<(), Failure> {
    let file = files.open(image.path(), LOOK).map_err(Failure::said)?;
    tracking::must_be_of(files, image, &file, 0, (path, map))
}

/// Why a map that was not closed is not taken for complete: whether a redo log fits is examined when its disk is
/// plugged.
const KILLED: &str = "the process that recorded in it last was killed, and the disk was not plugged since";

/// Fails unless the maps are those that a daemon has recorded, and name all changes of their intervals.
fn check_expected(maps: &[ChangeMap], expected: &[ExpectedMap]) -> Result<(), Failure> {
    if maps.len() != expected.len() {
        return Err(Failure::of(Kind::Invalid, "as many maps must be expected as there are"));
    }
    for (map, expected) in maps.iter().zip(expected) {
        if let Some(why) = why_unexpected(map, expected) {
            return Err(Failure::new(format!("use the map of changed blocks {}", expected.map), why)
                .of_kind(Kind::State)
                .advise("make a full backup"));
        }
    }
    Ok(())
}

/// Returns why a map is not the one that a daemon has recorded, or does not name all changes of its interval.
pub fn why_unexpected(map: &ChangeMap, expected: &ExpectedMap) -> Option<String> {
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
        Proof::Image(mark, state) => {
            let state = disk::changes::FileState { changed: (state.seconds, state.nanoseconds), len: state.len };
            let killed = || map.closed().is_none().then(|| KILLED.to_owned());
            tracking::mismatch(map, 0, (mark, true), Some(state)).or_else(killed)
        }
    }
}
