//! `image convert`: copies a disk into a new image. Holes and stored zeroes become holes.
//!
//! One thread reads ahead ([`Stream`]) while this one writes, with many requests in flight on both sides. The target is
//! flushed before it gets its final name, and removed if the command fails or is interrupted.
//!
//! Source and target can be standard input and output ([`input`], [`output`]).

mod compressed;
mod input;
mod output;
mod source;

use control::size::{Size, readable};
use control::{FormatName, ImageName, Kind};
use disk::qcow2::Compression;
use disk::size::on_disk;
use disk::{Operation, Span, Token};
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::create::{self, Allocation, Layout, Plan, Target};
use crate::image::libvhd;
use crate::image::progress::Progress;
use crate::jobs::compare::first_difference;
use crate::jobs::create::{check_unit, unit};
use crate::jobs::fetch;
use crate::jobs::runner::Runner;
use crate::jobs::stream::{Chunk, Stream, join, stored_runs};
use crate::process::failure::{Exit, Failure};
use crate::process::log::say;
use crate::process::output as printed;
use crate::process::signals::Signal;
use arguments::{Compress, Convert};

use output::Output;
use source::Source;

/// The maximum number of writes in flight.
const AHEAD: usize = 16;
/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Converted {
    source: String,
    target: String,
    size: u64,
    written: u64,
    /// The compressed size of the written bytes, if compression was requested.
    compressed: Option<u64>,
    verified: bool,
    /// Ranges that could not be read, and are zeroes in the target.
    lost: Vec<Lost>,
}

/// A range of the disk.
#[derive(Serialize)]
struct Lost {
    at: u64,
    len: u64,
}

/// The maximum number of ranges listed for people.
const LISTED: usize = 20;

/// Runs `image convert`.
pub fn run(files: &Files, convert: &Convert) -> Result<Exit, Failure> {
    if convert.target.url().is_some() {
        let failure = Failure::new(format!("write to {}", convert.target), "objects at HTTP servers are only read");
        return Err(failure.advise("convert to a file, and upload that").of_kind(Kind::Invalid));
    }
    match &convert.checksum {
        None => convert_source(files, convert, &convert.source),
        Some(checksum) => {
            fetch::before_conversion(files, convert, checksum, |local| convert_source(files, local, &convert.source))
        }
    }
}

/// Converts; `shown` is the source in the report.
fn convert_source(files: &Files, convert: &Convert, shown: &ImageName) -> Result<Exit, Failure> {
    check_streams(files, convert)?;
    if convert.target.is_stream() {
        return to_output(files, convert);
    }
    let mut stop = Some(Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?);
    create::must_differ(files, &convert.target, std::iter::once(&convert.source).chain(&convert.parents.names))?;
    let source = Source::open(files, convert, &mut stop)?;
    let (len, block) = (source.len, source.block);
    let plan = plan(convert, len)?;
    let target = Target::create_anywhere(files, &convert.target, &plan, convert.force)?;
    let copied = match create::layout(target.name(), &plan)? {
        Layout::Qcow2(spec) if convert.compress.is_some() => {
            compressed::copy(files, convert, source, target.name(), &spec, &mut stop)?
        }
        _ => copy(files, convert, source, target.name(), &mut stop)?,
    };
    if convert.verify {
        verify(files, convert, target.name(), &mut stop)?;
    }
    target.keep()?;
    libvhd::note_block_size(&convert.target, unit(&convert.target, convert.block_size)?);
    note_sector_size(convert, block, copied.block);
    report(convert, shown, len, &copied)
}

/// Converts to standard output. A signal simply kills the process: there is nothing to remove.
fn to_output(files: &Files, convert: &Convert) -> Result<Exit, Failure> {
    let mut output = Output::open(&convert.target)?;
    let source = Source::open(files, convert, &mut None)?;
    let (len, block) = (source.len, source.block);
    let image = create::lay_out(&convert.target, &plan(convert, len)?)?;
    let mut progress = Progress::new(files, "converting", len);
    let mut copied = Copied { written: image.len, compressed: None, lost: Vec::new(), block: 512 };
    for chunk in source.chunks(convert, &mut None) {
        let chunk = chunk?;
        output.write(&chunk)?;
        chunk.lost.iter().for_each(|&span| join(&mut copied.lost, span));
        progress.advance(chunk.span.len);
    }
    output.finish(len, &image)?;
    progress.finish();
    say(summary(convert, &convert.source, len, &copied).trim_end());
    note_sector_size(convert, block, copied.block);
    Ok(copied.exit())
}

/// Rejects what cannot be done with standard input or output.
fn check_streams(files: &Files, convert: &Convert) -> Result<(), Failure> {
    let Convert { source, target, .. } = convert;
    let refuse = |why: &str, advice: &str| {
        let failure = Failure::new(format!("convert {source} to {target}"), why);
        Err(failure.advise(advice).of_kind(Kind::Invalid))
    };
    if source.is_stream() && source.format != FormatName::Raw {
        return refuse("standard input is read in order, which only a raw disk can be", "save it in a file first");
    }
    if source.is_stream() && (!convert.parents.names.is_empty() || convert.salvage) {
        return refuse("a raw disk on standard input has no parents and is read once", "omit --parent and --salvage");
    }
    let sequential = target.format == FormatName::Raw || target.format == FormatName::Vhd && convert.fixed;
    if target.is_stream() && !sequential {
        let why = "its metadata stands in front of the data, and is known only behind it";
        return refuse(why, "use raw:-, or vhd:- with --fixed, or convert to a file");
    }
    if target.is_stream() && convert.json {
        return refuse("standard output is for the disk", "omit --json; the exit code tells how it ended");
    }
    if convert.verify && (source.is_stream() || target.is_stream()) {
        return refuse("a stream cannot be read again", "omit --verify");
    }
    match (source.is_stream() || target.is_stream()) && files.are_handed() {
        true => refuse("standard input is the socket through which files are handed over", "hand over a file"),
        false => Ok(()),
    }
}

fn plan(convert: &Convert, len: u64) -> Result<Plan, Failure> {
    let plan = plan_for(&convert.target, len, convert.fixed, convert.block_size, convert.cluster_size)?;
    if convert.compress.is_some() && convert.target.format != FormatName::Qcow2 {
        let failure = Failure::new(format!("create {}", convert.target), "only qcow2 images have compressed clusters");
        return Err(failure.advise("omit --compress, or convert to qcow2").of_kind(Kind::Invalid));
    }
    let compression = match convert.compress {
        Some(Compress::Zstd) => Compression::Zstd,
        Some(Compress::Zlib) | None => Compression::Deflate,
    };
    Ok(Plan { compression, ..plan })
}

/// Returns the properties of a new image for a disk of `len` bytes.
pub fn plan_for(
    target: &ImageName,
    len: u64,
    fixed: bool,
    block_size: Option<Size>,
    cluster_size: Option<Size>,
) -> Result<Plan, Failure> {
    check_unit(target, block_size, cluster_size)?;
    let unit = unit(target, block_size.or(cluster_size))?;
    if fixed && target.format == FormatName::Qcow2 {
        let failure = Failure::new(format!("create {target}"), "a qcow2 image is always thin");
        return Err(failure.advise("omit --fixed").of_kind(Kind::Invalid));
    }
    let allocation = if fixed { Allocation::Fixed } else { Allocation::Thin };
    Ok(Plan { len, allocation, unit, compression: Compression::default(), identity: None })
}

/// The result of a copy.
struct Copied {
    /// The number of bytes written to the new disk.
    written: u64,
    /// Their compressed size, if compression was requested.
    compressed: Option<u64>,
    /// The ranges that could not be read, ascending.
    lost: Vec<Span>,
    /// The default logical block size for guests of the new image.
    block: u32,
}

/// Logs a note if guests of the new image would have another logical block size than those of the old one, and so would
/// not find its partitions: no format that we write records it.
fn note_sector_size(convert: &Convert, old: Option<u32>, new: u32) {
    let Convert { source, target, .. } = convert;
    if let Some(old) = old.filter(|&old| old != new) {
        say(format_args!(
            "{source} has sectors of {old} bytes, which {target} cannot record: serve it with --logical-block-size \
             {old}, or its guest does not find the partitions"
        ));
    }
}

impl Copied {
    fn exit(&self) -> Exit {
        if self.lost.is_empty() { Exit::Done } else { Exit::Damaged }
    }
}

/// Copies everything that can be read.
fn copy(
    files: &Files,
    convert: &Convert,
    source: Source,
    target: &ImageName,
    stop: &mut Option<Signal>,
) -> Result<Copied, Failure> {
    let mut progress = Progress::new(files, "converting", source.len);
    let target = Layers::open_alone(files, target, access::options(convert.access, true))?;
    let block = target.block();
    let mut writer = Writer { runner: Runner::new(target, access::engine(convert.access))?, written: 0 };
    let mut lost = Vec::new();
    for piece in source.chunks(convert, stop) {
        let piece = piece?;
        writer.write(&piece)?;
        piece.lost.iter().for_each(|&span| join(&mut lost, span));
        progress.advance(piece.span.len);
    }
    writer.finish()?;
    progress.finish();
    Ok(Copied { written: writer.written, compressed: None, lost, block })
}

struct Writer {
    runner: Runner,
    written: u64,
}

impl Writer {
    /// Writes the data of a chunk. Zeroes are left out: the target is new, and reads as zeroes where nothing is
    /// written.
    fn write(&mut self, piece: &Chunk) -> Result<(), Failure> {
        let Some(bytes) = &piece.bytes else { return Ok(()) };
        for (from, memory) in stored_runs(bytes) {
            let span = Span { at: piece.span.at + on_disk(from), len: on_disk(memory.len()) };
            self.runner.submit(Operation::Write { durable: false }, span, memory, Token(span.at.0))?;
            self.written += span.len;
            while self.runner.in_flight() > AHEAD {
                self.runner.wait()?;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), Failure> {
        self.runner.flush()
    }
}

fn verify(files: &Files, convert: &Convert, target: &ImageName, stop: &mut Option<Signal>) -> Result<(), Failure> {
    let engine = access::engine(convert.access);
    let target = Layers::open_alone(files, target, access::options(convert.access, false))?;
    let source = Source::open(files, convert, stop)?;
    let len = source.len;
    match first_difference(files, "verifying", len, source.chunks(convert, stop), Stream::of(target, engine))? {
        None => Ok(()),
        Some(at) => Err(Failure::new(
            format!("verify {}", convert.target),
            format!("it differs from {} at byte {at} of the disk", convert.source),
        )
        .advise(format!("{}; check the storage of both images", fate(&convert.target)))),
    }
}

fn report(convert: &Convert, source: &ImageName, size: u64, copied: &Copied) -> Result<Exit, Failure> {
    if convert.json {
        let (source, target) = (source.to_string(), convert.target.to_string());
        let lost = copied.lost.iter().map(|span| Lost { at: span.at.0, len: span.len }).collect();
        let (written, compressed, verified) = (copied.written, copied.compressed, convert.verify);
        printed::json(&Converted { source, target, size, written, compressed, verified, lost })?;
    } else {
        printed::print(&summary(convert, source, size, copied))?;
    }
    Ok(copied.exit())
}

fn summary(convert: &Convert, source: &ImageName, size: u64, copied: &Copied) -> String {
    let target = &convert.target;
    let verified = if convert.verify { ", verified" } else { "" };
    let (size, written) = (readable(size), readable(copied.written));
    let compressed = copied.compressed.map(|bytes| format!(", compressed to {}", readable(bytes))).unwrap_or_default();
    let lost = lost_lines(&source.to_string(), &copied.lost);
    format!("converted {source} to {target}: {size}, {written} written{compressed}{verified}\n{lost}")
}

fn lost_lines(source: &str, lost: &[Span]) -> String {
    if lost.is_empty() {
        return String::new();
    }
    let bytes = lost.iter().map(|span| span.len).sum();
    let ranges: String =
        lost.iter().take(LISTED).map(|span| format!("  bytes {} to {}\n", span.at, span.end() - 1)).collect();
    let more = match lost.len().saturating_sub(LISTED) {
        0 => String::new(),
        more => format!("  and {more} more; --json lists all\n"),
    };
    format!("{} of {source} could not be read, and are zeroes in the target:\n{ranges}{more}", readable(bytes))
}

/// Fails if a signal was received. This is called before each chunk, so that the target is removed as after any other
/// failure.
fn check_signal(convert: &Convert, stop: &mut Option<Signal>) -> Result<(), Failure> {
    if !stop.as_mut().is_some_and(Signal::take) {
        return Ok(());
    }
    let tried = format!("convert {} to {}", convert.source, convert.target);
    Err(Failure::new(tried, "interrupted by a signal").advise(fate(&convert.target)))
}

/// What has become of a target that was not completed, for people.
fn fate(target: &ImageName) -> &'static str {
    if target.uri().is_some() { "the export holds no complete copy" } else { "the unfinished target has been removed" }
}

/// Returns the offset of the first byte that is not zero.
fn first_data(bytes: &[u8]) -> Option<u64> {
    bytes.iter().position(|&byte| byte != 0).and_then(|at| u64::try_from(at).ok())
}

/// Explains that the new disk would be too small for the data.
fn would_lose(convert: &Convert, len: u64, at: u64) -> Failure {
    let tried = format!("convert {} to a disk of {len} bytes", convert.source);
    Failure::new(tried, format!("there is data behind that, at byte {at} of the disk")).advise(
        "shrink the guest's file systems and partitions first, or give a larger --size; a GPT keeps a copy of itself in \
         the last sectors, which `sgdisk --zap` or a partition editor moves",
    )
}
