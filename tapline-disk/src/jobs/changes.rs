//! `image changes`: lists the ranges of a disk that may have changed, by its maps of changed blocks.
//!
//! Whether a map can be trusted is in [`tracking`], and in [`expected_maps`] for a daemon.

use std::path::Path;

use control::ImageName;
use control::size::readable;
use control::tracking::{ChangedRange, ExpectedMaps, ListedChanges};
use disk::changes::ChangeMap;

use crate::files::Files;
use crate::files::mark::hex;
use crate::image::expected_maps;
use crate::image::tracking::{self, LOOK};
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::{Changes, ChangesFormat};

/// Runs `image changes`.
pub fn run(files: &Files, changes: &Changes) -> Result<Exit, Failure> {
    let maps: Vec<ChangeMap> = changes.maps.iter().map(|path| tracking::look(files, path)).collect::<Result<_, _>>()?;
    let ids = maps.iter().map(|map| hex(&map.id())).collect();
    if let Some(ExpectedMaps(expected)) = &changes.expect {
        expected_maps::check(&maps, expected, None)?;
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
    let is_xapi = changes.format == Some(ChangesFormat::Xapi);
    let ranges = || all.extents().map(|span| ChangedRange { start: span.at.0, length: span.len }).collect::<Vec<_>>();
    if changes.json {
        let changed = all.extents().map(|span| span.len).sum();
        let (ranges, bitmap) = match changes.format {
            None => (Some(ranges()), None),
            Some(ChangesFormat::Xapi) => (None, Some(all.to_xapi())),
            Some(ChangesFormat::Total) => (None, None),
        };
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
