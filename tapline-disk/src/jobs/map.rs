//! `image map`: lists which ranges of the disk contain data, and which read as zeroes without being stored.

use control::size::readable;
use disk::{DiskOffset, ExtentKind, Span};
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::presence::Presence;
use crate::jobs::runner::Runner;
use crate::jobs::stream::extents;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::Map;

/// The bytes of the disk that are queried at once.
const WINDOW: u64 = 1 << 30;

/// A range of the disk. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct Line {
    /// Offset of the first byte.
    pub start: u64,
    /// The length in bytes.
    pub length: u64,
    /// Whether the range is stored; otherwise it reads as zeroes.
    pub data: bool,
}

/// Runs `image map`.
pub fn run(files: &Files, map: &Map) -> Result<Exit, Failure> {
    let options = access::shared(access::options(map.access, false), map.sharing);
    let layers = Layers::open(files, &map.image, &map.parents, options).map_err(access::advise)?;
    if map.image.format.is_read_only() {
        let whole = Span { at: DiskOffset(0), len: layers.geometry().map_or(0, |geometry| geometry.len) };
        // Fails if data is missing to which the tables refer.
        Presence::of(files, &map.image, options)?.runs(whole)?;
    }
    let mut runner = Runner::new(layers, access::engine(map.access))?;
    let lines = whole_disk(&mut runner)?;
    if map.json {
        output::json(&lines)?;
        return Ok(Exit::Done);
    }
    let mut text = format!("{:>16} {:>16}  KIND\n", "START", "LENGTH");
    for line in &lines {
        let kind = if line.data { "data" } else { "hole" };
        text.push_str(&format!("{:>16} {:>16}  {kind}\n", line.start, line.length));
    }
    let stored = lines.iter().filter(|line| line.data).map(|line| line.length).sum();
    text.push_str(&format!("{} of {} hold data\n", readable(stored), readable(runner.geometry().len)));
    output::print(&text)?;
    Ok(Exit::Done)
}

/// Returns all ranges of a disk, ascending.
pub fn whole_disk(runner: &mut Runner) -> Result<Vec<Line>, Failure> {
    let len = runner.geometry().len;
    let mut lines: Vec<Line> = Vec::new();
    let (mut at, end) = (DiskOffset(0), DiskOffset(len));
    while at < end {
        let window = Span { at, len: WINDOW.min(end - at) };
        for (span, kind) in extents(runner, window)? {
            join(&mut lines, span, kind == ExtentKind::Data);
        }
        at = window.end();
    }
    Ok(lines)
}

/// Adds a range, merged with the last one if both are of one kind.
fn join(lines: &mut Vec<Line>, span: Span, data: bool) {
    match lines.last_mut() {
        Some(last) if last.data == data => last.length += span.len,
        _ => lines.push(Line { start: span.at.0, length: span.len, data }),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn adjacent_ranges_of_one_kind_are_one_line() {
        let mut lines = Vec::new();
        for (at, data) in [(0, true), (512, true), (1024, false), (1536, true)] {
            join(&mut lines, Span { at: DiskOffset(at), len: 512 }, data);
        }
        let found: Vec<(u64, u64, bool)> = lines.iter().map(|line| (line.start, line.length, line.data)).collect();
        assert_eq!(found, [(0, 1024, true), (1024, 512, false), (1536, 512, true)]);
    }
}
