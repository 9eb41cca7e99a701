//! `trace`: where the time of a disk's requests goes, stage by stage.
//!
//! The disk's process keeps the stages of each request in its statistics page for a while, and this reads them. It asks
//! the process over its control socket; no image is opened, and no data is seen. Invariant: what was lost, since
//! requests came faster than they were read, is told.

mod chrome;
mod group;
mod svg;
mod table;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use control::{Error, Kind, answer, ask};
use signal_hook::consts::{SIGINT, SIGTERM};
use stats::{Reader, Record, write_recording};

use crate::disk;
use crate::failure::Failure;
use crate::output::{print_local, say};
use crate::place::{self, Place};
use crate::session::How;
use group::Group;

/// How often records are read: a page keeps 32,768 of them.
const READ_EVERY: Duration = Duration::from_millis(20);

/// How long the process may take to respond.
const TO_ANSWER: Duration = Duration::from_secs(3);

/// `trace`.
#[derive(Debug, clap::Args)]
pub struct Trace {
    /// A control socket (`serve --control`), or a VBD of the daemon on this host: UUID prefix, VM/vda, or the disk's
    /// name
    #[arg(value_name = "DISK")]
    disk: String,
    /// Duration in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// The first seconds, which are shown by themselves and not among the rest
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    warm_up: u32,
    /// Draw the stages of each kind and size of request as bars
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write each request for chrome://tracing or ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    chrome: Option<PathBuf>,
    /// Write when each request came, its kind, place and size, and how long it took, for `tapline image replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// What was traced.
#[derive(Debug, Default)]
struct Traced {
    records: Vec<Record>,
    /// Requests of which there is no record: they were overwritten before they were read.
    lost: u64,
    /// How often the trace was ended by somebody else, and begun again.
    interrupted: u32,
    /// Whether it ended early, by a signal.
    stopped: bool,
}

/// Runs the command.
pub fn run(trace: &Trace, how: How) -> Result<(), Failure> {
    if trace.warm_up >= trace.seconds {
        let why = format!("a warm-up of {} s leaves nothing of {} s", trace.warm_up, trace.seconds);
        return Err(Error::cannot("trace a disk", why).of_kind(Kind::Invalid).into());
    }
    let json = how.json;
    // Before anything is traced: a result that cannot be kept is not worth waiting for.
    let files = [&trace.svg, &trace.chrome, &trace.record].map(|path| path.as_deref().map(create).transpose());
    let [svg, chrome, record] = files;
    let (svg, chrome, record) = (svg?, chrome?, record?);
    let place = place::find(&trace.disk, how)?;
    let traced = gather(trace, &place)?;
    let begun = traced.records.iter().map(|record| record.seen).min().unwrap_or(0);
    let warm = begun.saturating_add(u64::from(trace.warm_up) * 1_000_000_000);
    let is_warm_up = |record: &&Record| record.seen < warm;
    let groups = Group::of(traced.records.iter().filter(|record| !is_warm_up(record)));
    let warm_up: Vec<&Record> = traced.records.iter().filter(is_warm_up).collect();
    if let Some(file) = svg {
        write(file, &trace.svg, |out| svg::write(out, &groups))?;
    }
    if let Some(file) = chrome {
        write(file, &trace.chrome, |out| chrome::write(out, &traced.records))?;
    }
    if let Some(file) = record {
        write(file, &trace.record, |out| write_recording(out, &traced.records, traced.lost))?;
    }
    if json {
        return Ok(print_local(&table::json(&groups, &warm_up, traced.lost))?);
    }
    if traced.stopped {
        say("tapline: stopped early; the result is of the requests until then\n");
    }
    print_local(&table::text(&groups, &warm_up, traced.lost))?;
    if traced.interrupted > 0 {
        let times = traced.interrupted;
        say(&format!(
            "tapline: the trace was interrupted {times} times, by another trace or an upgrade: requests are missing\n"
        ));
    }
    Ok(())
}

/// Traces, and reads what there is until it ends.
fn gather(trace: &Trace, place: &Place) -> Result<Traced, Error> {
    let failed = |why| place.unreadable(why);
    let reader = place.open().map_err(failed)?;
    let asked = begin(place, trace.seconds)?;
    let until = Instant::now() + Duration::from_secs(trace.seconds.into());
    // Interrupted, it keeps what it has; a second time it ends at once.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let failed = |error| Error::cannot("handle signals", error);
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop)).map_err(failed)?;
        signal_hook::flag::register(signal, Arc::clone(&stop)).map_err(failed)?;
    }
    let (mut traced, mut next) = (Traced::default(), asked.next);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        std::thread::sleep(READ_EVERY.min(left));
        for record in reader.records(next).map_err(failed)? {
            traced.lost += record.number - next;
            next = record.number + 1;
            traced.records.push(record);
        }
        traced.stopped = stop.load(Ordering::Relaxed);
        if left.is_zero() || traced.stopped {
            break;
        }
        let seconds = u32::try_from(left.as_secs()).unwrap_or(0);
        if seconds > 0 && !is_traced(&reader) {
            // Another trace has ended, or another process serves the disk now.
            traced.interrupted += 1;
            let asked = begin(place, seconds)?;
            next = next.max(asked.next);
        }
    }
    // It would end by itself with the next request; its memory is given back now. A disk that has ended has no trace.
    if let Err(error) = begin(place, 0) {
        say(&format!("tapline: the trace was not ended: {error}\n"));
    }
    Ok(traced)
}

/// Has requests traced for some time, or no longer.
fn begin(place: &Place, seconds: u32) -> Result<answer::Trace, Error> {
    disk::ask_within(&place.control, ask::Trace { seconds }, TO_ANSWER)?.ok_or_else(|| {
        let why = format!("its process has not responded for {} s", TO_ANSWER.as_secs());
        Error::cannot("trace the disk", why).advise("tapline explain shows whether it is stuck")
    })
}

/// Whether requests are being traced. What cannot be read for a moment is.
fn is_traced(reader: &Reader) -> bool {
    reader.traced().is_ok_and(|(_, until)| until.is_some())
}

fn create(path: &Path) -> Result<File, Error> {
    File::create(path).map_err(|error| Error::cannot(format!("create {}", path.display()), error))
}

fn write(
    file: File,
    path: &Option<PathBuf>,
    fill: impl FnOnce(&mut dyn Write) -> std::io::Result<()>,
) -> Result<(), Error> {
    let mut out = BufWriter::new(file);
    fill(&mut out).and_then(|()| out.flush()).map_err(|error| {
        let path = path.as_deref().unwrap_or(Path::new(""));
        Error::cannot(format!("write {}", path.display()), error)
    })
}
