//! `image changes`: lists the ranges of a disk that may have changed, by its maps of changed blocks.
//!
//! Maps are read without a lock, also while a process writes them: each sector of a map names all changes up to when it
//! is read, and one that is read while it is written counts as changed throughout.

use std::path::Path;

use control::size::readable;
use control::{ImageName, Kind};
use disk::changes::ChangeMap;
use serde::Serialize;
use uring::{Cache, OpenOptions};

use crate::files::Files;
use crate::files::mark::{self, hex};
use crate::image::tracking;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::{Changes, ChangesFormat};

/// Reading without a lock.
const LOOK: OpenOptions = OpenOptions { write: false, cache: Cache::Writeback, lock: false };

/// A range that may have changed. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Range {
    start: u64,
    length: u64,
}

/// The answer in JSON.
#[derive(Serialize)]
struct Listed {
    size: u64,
    block: u32,
    /// Ids of the maps, the oldest first.
    maps: Vec<String>,
    changed: u64,
    ranges: Vec<Range>,
}

/// Runs `image changes`.
pub fn run(files: &Files, changes: &Changes) -> Result<Exit, Failure> {
    let maps: Vec<ChangeMap> = changes.maps.iter().map(|path| read(files, path)).collect::<Result<_, _>>()?;
    let ids = maps.iter().map(|map| hex(&map.id())).collect();
    if let (Some(image), Some((path, map))) = (&changes.image, changes.maps.last().zip(maps.last())) {
        check(files, image, path, map)?;
    }
    let all = ChangeMap::union(maps).map_err(|error| {
        Failure::new("join the maps of changed blocks", error)
            .of_kind(Kind::Invalid)
            .advise("give the maps of successive snapshots of one disk, the oldest first, without a gap")
    })?;
    if changes.format == Some(ChangesFormat::Xapi) {
        output::print(&format!("{}\n", all.to_xapi()))?;
        return Ok(Exit::Done);
    }
    let ranges: Vec<Range> = all.extents().map(|span| Range { start: span.at.0, length: span.len }).collect();
    let changed = ranges.iter().map(|range| range.length).sum();
    if changes.json {
        output::json(&Listed { size: all.len(), block: all.block(), maps: ids, changed, ranges })?;
        return Ok(Exit::Done);
    }
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

fn read(files: &Files, path: &Path) -> Result<ChangeMap, Failure> {
    let mut file = files.open(path, LOOK).map_err(Failure::said)?;
    tracking::read(path, &mut file)
}

/// Fails unless all writes to the image since the map was begun are known to be recorded in it.
fn check(files: &Files, image: &ImageName, path: &Path, map: &ChangeMap) -> Result<(), Failure> {
    let file = files.open(image.path(), LOOK).map_err(Failure::said)?;
    let tried = || format!("use the map of changed blocks {} for {image}", path.display());
    let failed = |error: std::io::Error| Failure::new(tried(), error);
    let state = mark::state(&file).map_err(failed)?;
    match tracking::distrust(map, 0, &file, Some(state)).map_err(failed)? {
        None => Ok(()),
        Some(why) => Err(Failure::new(tried(), why)
            .of_kind(Kind::State)
            .advise("make a full backup, and start a new map: serve --track with the name of a new file")),
    }
}
