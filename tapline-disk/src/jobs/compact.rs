//! `image compact`: rewrites an image next to itself without gaps and leaks, then replaces the original.
//!
//! Only the file's own data is copied, unit by unit, not that of its parents. Identity, parent, allocation unit and
//! modification time are kept, so that parents and children still match. If killed at any moment, the name refers
//! either to the complete old image or to the complete new one ([`Target`]).

use std::os::unix::fs::MetadataExt;

use control::size::readable;
use control::{ImageName, Kind};
use disk::qcow2::Compression;
use disk::size::{in_memory, on_disk};
use disk::{DiskOffset, Format, Image, Operation, Span, Token};
use memory::Segments;
use serde::Serialize;
use uring::OpenOptions;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::create::{Allocation, Identity, Plan, Target, unit_of};
use crate::image::mtime::Time;
use crate::image::presence::{ExtentSource, Presence};
use crate::image::progress::Progress;
use crate::jobs::runner::Runner;
use crate::jobs::stream::{grid, stored_runs};
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use crate::process::signals::Signal;
use arguments::Compact;

/// The bytes of the disk whose allocation is looked up at once.
const WINDOW: u64 = 1 << 30;
/// The number of pieces read, and then written, at once.
const AHEAD: usize = 16;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Compacted {
    image: String,
    /// The allocated size of the file in bytes.
    before: u64,
    after: u64,
}

/// Runs `image compact`.
pub fn run(files: &Files, compact: &Compact) -> Result<Exit, Failure> {
    let name = &compact.image;
    if name.data_file.is_some() {
        let why = "it cannot have gaps: its clusters are in a data file, each at its guest offset";
        return Err(Failure::new(format!("compact {name}"), why).of_kind(Kind::Invalid));
    }
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    // Opened for writing once, to repair what a crash has left before it is copied.
    let plan = plan(name, &Layers::open_alone(files, name, access::options(compact.access, true))?)?;
    let (before, time) = (allocated(name)?, Time::of(files, name)?);
    let target = Target::create(files, name, &plan, true)?;
    // The target holds the lock of the old file.
    let source = OpenOptions { lock: false, ..access::options(compact.access, false) };
    let engine = access::engine(compact.access);
    let mut copy = Copy {
        presence: Presence::of(files, name, source)?,
        source: Runner::new(Layers::open_alone(files, name, source)?, engine)?,
        target: Runner::new(Layers::open_alone(files, target.name(), access::options(compact.access, true))?, engine)?,
        on_parent: matches!(plan.allocation, Allocation::Child(_)),
        stop: &mut stop,
    };
    copy.run(name)?;
    drop(copy);
    time.apply_to(target.name())?;
    target.keep()?;
    report(compact, Compacted { image: name.to_string(), before, after: allocated(name)? })
}

/// Returns the properties of an empty image that replaces this one.
fn plan(name: &ImageName, layers: &Layers) -> Result<Plan, Failure> {
    let tried = || format!("compact {name}");
    let Some(image) = layers.images.first() else { return Err(Failure::new(tried(), "it has no layer")) };
    let marks = match image {
        Image::Vhd(vhd) if vhd.info().hidden => Some("it is marked hidden (an inner node of a chain) by the Xen tools"),
        Image::Vhd(vhd) if vhd.info().saved => Some("it belongs to a suspended guest"),
        Image::Qcow2(qcow2) if qcow2.info().snapshots > 0 => Some("it has internal snapshots"),
        _ => None,
    };
    if let Some(mark) = marks {
        return Err(Failure::new(tried(), format!("{mark}, which would be lost")));
    }
    let created = match image {
        Image::Vhd(vhd) if vhd.info().block_size.is_some() => Some(vhd.info().created),
        Image::Qcow2(_) => None,
        Image::Vhd(_) | Image::Raw(_) | Image::Foreign(_) => {
            return Err(Failure::new(tried(), "it is fully allocated, so there is nothing to compact")
                .advise("have the guest discard unused blocks (fstrim), or convert it to a thin image"));
        }
    };
    Ok(Plan {
        len: image.geometry().len,
        allocation: image.link().map_or(Allocation::Thin, Allocation::Child),
        unit: unit_of(image),
        compression: Compression::default(),
        identity: Some(Identity { uuid: image.identity(), created }),
    })
}

/// Returns the bytes allocated to a file: stat(2) counts in units of 512, whatever the file system's block size.
fn allocated(name: &ImageName) -> Result<u64, Failure> {
    let metadata = std::fs::metadata(name.path()).map_err(|error| Failure::new(format!("examine {name}"), error))?;
    Ok(metadata.blocks().saturating_mul(512))
}

/// A copy in progress.
struct Copy<'a> {
    presence: Presence,
    /// The old file without its parents.
    source: Runner,
    /// The new file.
    target: Runner,
    on_parent: bool,
    stop: &'a mut Signal,
}

impl Copy<'_> {
    fn run(&mut self, name: &ImageName) -> Result<(), Failure> {
        let len = self.source.geometry().len;
        let mut progress = Progress::new(self.source.from(), "compacting", len);
        let (mut at, end) = (DiskOffset(0), DiskOffset(len));
        while at < end {
            let window = Span { at, len: WINDOW.min(end - at) };
            for (span, holds) in self.presence.runs(window)? {
                match holds {
                    ExtentSource::Data => self.data(name, span)?,
                    // Without a parent, unallocated ranges read as zeroes.
                    ExtentSource::Zero if self.on_parent => self.zero(span)?,
                    ExtentSource::Zero | ExtentSource::Parent => {}
                }
                progress.reach(span.end().0);
            }
            at = window.end();
        }
        self.target.flush()?;
        progress.finish();
        Ok(())
    }

    fn data(&mut self, name: &ImageName, run: Span) -> Result<(), Failure> {
        let pieces: Vec<Span> = grid(run).collect();
        for batch in pieces.chunks(AHEAD) {
            if self.stop.take() {
                return Err(Failure::new(format!("compact {name}"), "interrupted by a signal")
                    .advise("the image is unchanged; the unfinished new image has been removed"));
            }
            let mut read = Vec::new();
            for &span in batch {
                let memory = Segments::zeroed(in_memory(span.len));
                self.source.submit(Operation::Read, span, memory.clone(), Token(span.at.0))?;
                read.push((span, memory));
            }
            self.source.wait_for_all()?;
            for (span, memory) in &read {
                self.write(*span, memory)?;
            }
            self.target.wait_for_all()?;
        }
        Ok(())
    }

    /// Writes a piece. Without a parent, stored zeroes are left out. On a parent they must hide its data: they are
    /// allocated, then discarded.
    fn write(&mut self, span: Span, memory: &Segments) -> Result<(), Failure> {
        let stored = stored_runs(memory);
        let part = |from: usize, len: usize| Span { at: span.at + on_disk(from), len: on_disk(len) };
        let write = Operation::Write { durable: false };
        if !self.on_parent {
            for (from, memory) in stored {
                let span = part(from, memory.len());
                self.target.submit(write, span, memory, Token(span.at.0))?;
            }
            return Ok(());
        }
        self.target.submit(write, span, memory.clone(), Token(span.at.0))?;
        let mut end = 0;
        let behind = (memory.len(), 0);
        for (from, len) in stored.iter().map(|(from, run)| (*from, run.len())).chain([behind]) {
            if from > end {
                // The disk holds this back until the write has completed.
                let hole = part(end, from - end);
                self.target.submit(Operation::Discard, hole, Segments::empty(), Token(hole.at.0))?;
            }
            end = from + len;
        }
        Ok(())
    }

    fn zero(&mut self, span: Span) -> Result<(), Failure> {
        let zero = Operation::WriteZeroes { free: true, durable: false };
        self.target.submit(zero, span, Segments::empty(), Token(span.at.0))?;
        self.target.wait_for_all()
    }
}

fn report(compact: &Compact, compacted: Compacted) -> Result<Exit, Failure> {
    if compact.json {
        output::json(&compacted)?;
    } else {
        let Compacted { image, before, after } = &compacted;
        output::print(&format!("{image} now takes {}, before {}\n", readable(*after), readable(*before)))?;
    }
    Ok(Exit::Done)
}
