//! `image convert`: copies a disk into a new image. Holes and stored zeroes become holes.
//!
//! One thread reads ahead ([`Stream`]) while this one writes, with many requests in flight on both sides. The target is
//! flushed before the command ends, and removed if the command fails or is interrupted.

use control::size::readable;
use control::{FormatName, ImageName, Kind};
use disk::{Operation, Span, Token};
use serde::Serialize;

use crate::access;
use crate::failure::{Exit, Failure};
use crate::files::Files;
use crate::jobs::compare::first_difference;
use crate::jobs::create::{check_unit, unit};
use crate::layers::Layers;
use crate::libvhd;
use crate::output;
use crate::progress::Progress;
use crate::runner::Runner;
use crate::signals::Signal;
use crate::stream::{Chunk, Stream, Unreadable, join, stored_runs};
use crate::target::{self, Plan, Shape, Target};
use arguments::Convert;

/// Writes in flight at most.
const AHEAD: usize = 16;
/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Converted {
    source: String,
    target: String,
    size: u64,
    written: u64,
    verified: bool,
    /// Bytes that could not be read, and are zeroes in the target.
    lost: Vec<Lost>,
}

/// A range of the disk.
#[derive(Serialize)]
struct Lost {
    at: u64,
    len: u64,
}

/// Ranges that are listed for people.
const LISTED: usize = 20;

/// Runs the job.
pub fn run(files: &Files, convert: &Convert) -> Result<Exit, Failure> {
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    target::must_differ(files, &convert.target, std::iter::once(&convert.source).chain(&convert.parents.names))?;
    let source = open_source(files, convert)?;
    let len = source.geometry().map_or(0, |geometry| geometry.len);
    let target = Target::create_anywhere(files, &convert.target, &plan(convert, len)?, convert.force)?;
    let Copied { written, lost } = copy(files, convert, source, target.name(), &mut stop)?;
    if convert.verify {
        verify(files, convert, target.name(), &mut stop)?;
    }
    target.keep()?;
    libvhd::tell_of_block_size(&convert.target, unit(&convert.target, convert.block_size)?);
    report(convert, len, written, &lost)
}

fn open_source(files: &Files, convert: &Convert) -> Result<Layers, Failure> {
    Layers::open(files, &convert.source, &convert.parents, access::options(convert.access, false))
}

fn plan(convert: &Convert, len: u64) -> Result<Plan, Failure> {
    check_unit(&convert.target, convert.block_size, convert.cluster_size)?;
    let unit = unit(&convert.target, convert.block_size.or(convert.cluster_size))?;
    if convert.fixed && convert.target.format == FormatName::Qcow2 {
        let failure = Failure::new(format!("create {}", convert.target), "a qcow2 image is always thin");
        return Err(failure.advise("omit --fixed").of_kind(Kind::Invalid));
    }
    let shape = if convert.fixed { Shape::Fixed } else { Shape::Thin };
    Ok(Plan { len, shape, unit, identity: None })
}

/// What became of a copy.
struct Copied {
    /// Bytes that had to be written.
    written: u64,
    /// What could not be read, ascending.
    lost: Vec<Span>,
}

/// Copies everything that can be read.
fn copy(
    files: &Files,
    convert: &Convert,
    source: Layers,
    target: &ImageName,
    stop: &mut Signal,
) -> Result<Copied, Failure> {
    let len = source.geometry().map_or(0, |geometry| geometry.len);
    let target = Layers::open_alone(files, target, access::options(convert.access, true))?;
    let mut writer = Writer { runner: Runner::new(target, access::engine(convert.access))?, written: 0 };
    let mut progress = Progress::new(files, "converting", len);
    let mut lost = Vec::new();
    let unreadable = if convert.salvage { Unreadable::IsLost } else { Unreadable::Fails };
    for piece in Stream::with(source, access::engine(convert.access), unreadable) {
        let piece = piece?;
        writer.write(&piece)?;
        piece.lost.iter().for_each(|&span| join(&mut lost, span));
        go_on(convert, stop)?;
        progress.advance(piece.span.len);
    }
    writer.finish()?;
    progress.finish();
    Ok(Copied { written: writer.written, lost })
}

/// An error if a signal was received. This is checked after each chunk, so that the target is removed as after any
/// other failure.
fn go_on(convert: &Convert, stop: &mut Signal) -> Result<(), Failure> {
    if !stop.take() {
        return Ok(());
    }
    let tried = format!("convert {} to {}", convert.source, convert.target);
    Err(Failure::new(tried, "interrupted by a signal").advise("the unfinished target has been removed"))
}

struct Writer {
    runner: Runner,
    written: u64,
}

impl Writer {
    /// Writes what of a piece is not zero: the target is new, and reads as zero where nothing is written.
    fn write(&mut self, piece: &Chunk) -> Result<(), Failure> {
        let Some(bytes) = &piece.bytes else { return Ok(()) };
        for (from, memory) in stored_runs(bytes) {
            let span = Span { at: piece.span.at + bytes_u64(from), len: bytes_u64(memory.len()) };
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

fn verify(files: &Files, convert: &Convert, target: &ImageName, stop: &mut Signal) -> Result<(), Failure> {
    let engine = access::engine(convert.access);
    let target = Layers::open_alone(files, target, access::options(convert.access, false))?;
    let len = target.geometry().map_or(0, |geometry| geometry.len);
    let source = Stream::of(open_source(files, convert)?, engine);
    let source = source.map(|piece| go_on(convert, stop).and(piece));
    match first_difference(files, "verifying", len, source, Stream::of(target, engine))? {
        None => Ok(()),
        Some(at) => Err(Failure::new(
            format!("verify {}", convert.target),
            format!("it differs from {} at byte {at} of the disk", convert.source),
        )
        .advise("the target has been removed; check the storage of both images")),
    }
}

fn report(convert: &Convert, size: u64, written: u64, lost: &[Span]) -> Result<Exit, Failure> {
    let (source, target) = (convert.source.to_string(), convert.target.to_string());
    if convert.json {
        let lost = lost.iter().map(|span| Lost { at: span.at.0, len: span.len }).collect();
        output::json(&Converted { source, target, size, written, verified: convert.verify, lost })?;
    } else {
        let verified = if convert.verify { ", verified" } else { "" };
        let (size, written) = (readable(size), readable(written));
        let mut text = format!("converted {source} to {target}: {size}, {written} written{verified}\n");
        text.push_str(&lost_in_words(&source, lost));
        output::print(&text)?;
    }
    Ok(if lost.is_empty() { Exit::Done } else { Exit::Damaged })
}

fn lost_in_words(source: &str, lost: &[Span]) -> String {
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

fn bytes_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
