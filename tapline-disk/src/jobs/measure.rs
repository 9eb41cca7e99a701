//! `image measure`: computes the file size of a new image with the contents of another one.
//!
//! It queries which ranges contain data and reads none of it: stored zeroes count as data here, and `image convert`
//! leaves them out. The result is therefore an upper bound.

use control::size::{Size, readable};
use control::{FormatName, ImageName};
use disk::{qcow2, vhd};
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::create::{self, Layout};
use crate::jobs::convert::plan_for;
use crate::jobs::map::{Line, whole_disk};
use crate::jobs::runner::Runner;
use crate::process::failure::{Exit, Failure, explain};
use crate::process::output;
use arguments::Measure;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Measured {
    source: Option<String>,
    format: FormatName,
    /// The size of the disk, and the data in it, in bytes.
    size: u64,
    data: u64,
    /// The file size after a conversion, and when all of the disk has been written, in bytes.
    required: u64,
    fully_allocated: u64,
}

/// Runs `image measure`.
pub fn run(files: &Files, measure: &Measure) -> Result<Exit, Failure> {
    let (size, lines) = match (&measure.source, measure.size) {
        (Some(source), _) => runs_of(files, measure, source)?,
        (None, size) => (size.map_or(0, |Size(size)| size), Vec::new()),
    };
    let target = ImageName { format: measure.format, path: "NEW".into(), data_file: None };
    let plan = plan_for(&target, size, measure.fixed, measure.block_size, measure.cluster_size)?;
    let layout = create::layout(&target, &plan)?;
    let all = [Line { start: 0, length: size, data: true }];
    let len = |lines: &[Line]| len_of(&layout, size, lines).map_err(|error| explain(&target, error));
    let measured = Measured {
        source: measure.source.as_ref().map(ImageName::to_string),
        format: measure.format,
        size,
        data: lines.iter().filter(|line| line.data).map(|line| line.length).sum(),
        required: len(&lines)?,
        fully_allocated: len(&all)?,
    };
    report(measure, &measured)
}

fn runs_of(files: &Files, measure: &Measure, source: &ImageName) -> Result<(u64, Vec<Line>), Failure> {
    let options = access::shared(access::options(measure.access, false), measure.sharing);
    let layers = Layers::open(files, source, &measure.parents, options).map_err(access::advise)?;
    let mut runner = Runner::new(layers, access::engine(measure.access))?;
    let lines = whole_disk(&mut runner)?;
    Ok((runner.geometry().len, lines))
}

/// Returns the file size of a new image with data in these ranges.
fn len_of(layout: &Layout, size: u64, lines: &[Line]) -> Result<u64, disk::ImageError> {
    match layout {
        Layout::Raw => Ok(size),
        Layout::Vhd(spec) => vhd::measure(spec, units(lines, spec.block_size.into())),
        Layout::Qcow2(spec) => {
            let cluster = u64::from(spec.cluster_size);
            qcow2::measure(spec, units(lines, cluster), units(lines, cluster * (cluster / 8)))
        }
    }
}

/// Returns how many units of `unit` bytes contain data.
fn units(lines: &[Line], unit: u64) -> u64 {
    let (mut count, mut counted) = (0, 0);
    for line in lines.iter().filter(|line| line.data && line.length > 0) {
        let (first, behind) = (line.start / unit, (line.start + line.length).div_ceil(unit));
        count += behind - first.max(counted).min(behind);
        counted = behind;
    }
    count
}

fn report(measure: &Measure, found: &Measured) -> Result<Exit, Failure> {
    if measure.json {
        output::json(found)?;
        return Ok(Exit::Done);
    }
    let row = |name: &str, bytes: u64| format!("{name:<17}{} ({bytes} bytes)\n", readable(bytes));
    output::print(&format!(
        "{}{}{}{}",
        row("size", found.size),
        row("data", found.data),
        row("required", found.required),
        row("fully allocated", found.fully_allocated)
    ))?;
    Ok(Exit::Done)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_unit_counts_once_however_many_runs_are_in_it() {
        let run = |start, length, data| Line { start, length, data };
        let lines = [run(0, 1, true), run(1, 5, false), run(6, 2, true), run(8, 16, true), run(24, 8, false)];
        assert_eq!(units(&lines, 8), 3);
        assert_eq!(units(&lines, 4), 6);
        assert_eq!(units(&[run(3, 2, true)], 4), 2);
        assert_eq!(units(&[run(0, 100, false)], 4), 0);
    }
}
