//! `image changes`: lists the ranges of a disk that may have changed, by its maps of changed blocks.
//!
//! Whether a map can be trusted is in [`tracking`].

use std::path::Path;

use control::ImageName;
use control::size::readable;
use disk::changes::ChangeMap;
use serde::Serialize;

use crate::files::Files;
use crate::files::mark::hex;
use crate::image::tracking::{self, LOOK};
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::{Changes, ChangesFormat};

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
    let maps: Vec<ChangeMap> = changes.maps.iter().map(|path| tracking::look(files, path)).collect::<Result<_, _>>()?;
    let ids = maps.iter().map(|map| hex(&map.id())).collect();
    if let (Some(image), Some((path, map))) = (&changes.image, changes.maps.last().zip(maps.last())) {
        check(files, image, path, map)?;
    }
    let all = tracking::join(maps)?;
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

/// Fails unless all writes to the image since the map was begun are known to be recorded in it.
fn check(files: &Files, image: &ImageName, path: &Path, map: &ChangeMap) -> Result<(), Failure> {
    let file = files.open(image.path(), LOOK).map_err(Failure::said)?;
    tracking::must_be_of(image, &file, 0, path, map)
}
