//! `image measure`: how large the file of a new image would be, with the contents of another one.
//!
//! It asks which ranges hold data and reads none of it: zeroes that are stored count as data here, and `image convert`
//! leaves them out. So the answer is what a conversion takes, or more.

use control::size::{Size, readable};
use control::{FormatName, ImageName};
use disk::{qcow2, vhd};
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::create::{self, Laid};
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
    /// Bytes of the disk, and those of them that hold data.
    size: u64,
    data: u64,
    /// Bytes of the file after a conversion, and when all of the disk has been written.
    required: u64,
    fully_allocated: u64,
}

/// Runs the job.
pub fn run(files: &Files, measure: &Measure) -> Result<Exit, Failure> {
    let (size, lines) = match (&measure.source, measure.size) {
        (Some(source), _) => runs_of(files, measure, source)?,
        (None, size) => (size.map_or(0, |Size(size)| size), Vec::new()),
    };
    let target = ImageName { format: measure.format, path: "NEW".into(), data_file: None };
    let plan = plan_for(&target, size, measure.fixed, measure.block_size, measure.cluster_size)?;
    let laid = create::lay_out_as(&target, &plan)?;
    let all = [Line { start: 0, length: size, data: true }];
    let len = |lines: &[Line]| len_of(&laid, size, lines).map_err(|error| explain(&target, error));
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

/// Bytes of the file of a new image with data in these runs.
fn len_of(laid: &Laid, size: u64, lines: &[Line]) -> Result<u64, disk::ImageError> {
    match laid {
        Laid::Raw => Ok(size),
        Laid::Vhd(spec) => vhd::measure(spec, units(lines, spec.block_size.into())),
        Laid::Qcow2(spec) => {
            let cluster = u64::from(spec.cluster_size);
            qcow2::measure(spec, units(lines, cluster), units(lines, cluster * (cluster / 8)))
        }
    }
}

/// How many units of so many bytes hold data.
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
