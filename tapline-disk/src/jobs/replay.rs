//! `image replay`: issues the requests of a recording to another disk, at their recorded times.
//!
//! It knows a recording (`tapline trace --record`), image, engine and storage, without a guest and its transport. The
//! recording has no data: writes replace the contents of the disk, so replaying them must be requested explicitly.
//! Invariant: a request is never issued before its time, and late requests are reported.

mod report;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileTypeExt;
use std::time::{Duration, Instant};

use ::stats::{Kind as RequestKind, Recorded, read_recording};
use arguments::{Replay, Speed};
use control::Kind;
use control::pace::clock;
use control::size::readable;
use disk::size::in_memory;
use disk::{DiskOffset, Geometry, Operation, Span, Token};
use memory::Segments;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::progress::Progress;
use crate::jobs::runner::{Answer, Runner};
use crate::process::failure::{Exit, Failure};
use crate::process::log::say;
use crate::process::signals::Signal;

/// Limits for requests in flight and their bytes: a disk that is much slower than the recorded one must not use all
/// memory.
const IN_FLIGHT_MAX: usize = 512;
const BYTES_MAX: u64 = 512 << 20;
/// The largest read or write: larger than any transport's.
const SIZE_MAX: u64 = 64 << 20;
/// The byte that is written: not zero, because some storage does not store zeroes.
const WRITTEN: u8 = 0x54;
/// The interval at which signals are checked while no request is due.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A longer wait for the next request is announced.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// The requests to replay.
struct Workload {
    requests: Vec<Recorded>,
    /// For each request, how many of them were in flight when it arrived, including itself.
    depths: Vec<usize>,
    left_out: LeftOut,
    /// The highest end of all recorded requests.
    end: u64,
}

/// Requests that are not replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
struct LeftOut {
    /// Writes, discards and writes of zeroes, without `--write`.
    writes: u64,
    /// Requests that failed when they were recorded.
    failed: u64,
    /// Requests that the recording lacks.
    lost: u64,
}

/// How a request was replayed, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replayed {
    /// The number of the request in the workload.
    number: usize,
    took: u64,
    /// The delay after its time with which it was issued.
    late: u64,
}

/// The outcome of a replay.
struct Outcome {
    took: Duration,
    replayed: Vec<Replayed>,
    /// The maximum number of requests in flight.
    in_flight_max: usize,
    /// Whether a signal ended it before all requests were issued.
    stopped: bool,
}

/// Runs the job. A signal ends it early, with the result so far.
pub fn run(files: &Files, replay: &Replay) -> Result<Exit, Failure> {
    // Until there is something to report, a signal kills the process: the recording may be a pipe, or hang.
    let workload = load(replay)?;
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    if replay.write {
        replay.confirm.ask(&format!("overwrite {} with what was recorded", replay.image))?;
    }
    let options = access::options(replay.access, replay.write);
    let layers = Layers::open(files, &replay.image, &replay.parents, options)?;
    let runner = Runner::new(layers, access::engine(replay.access))?;
    check_fits(replay, &workload, runner.geometry())?;
    let progress = Progress::new(files, "replaying", workload.requests.iter().map(|one| one.size).sum());
    let begun = Instant::now();
    let mut issuer = Issuer::new(runner, &workload, replay.speed, begun, progress);
    let stopped = issuer.issue_all(&mut stop)?;
    let took = begun.elapsed();
    if replay.write {
        issuer.runner.flush()?;
    }
    let Issuer { progress, replayed, in_flight_max, .. } = issuer;
    progress.finish();
    report::report(replay, &workload, &Outcome { took, replayed, in_flight_max, stopped })?;
    Ok(Exit::Done)
}

/// Reads the recording.
fn load(replay: &Replay) -> Result<Workload, Failure> {
    let tried = || format!("replay {}", replay.recording.display());
    let is_pipe = replay.recording.metadata().is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe {
        say(format_args!("{} is a pipe: waiting for a recording until its writer ends", replay.recording.display()));
    }
    let file = File::open(&replay.recording).map_err(|error| Failure::new(tried(), error))?;
    let (all, lost) =
        read_recording(&mut BufReader::with_capacity(1 << 20, file)).map_err(|error| Failure::new(tried(), error))?;
    let mut workload = workload_of(all, replay.write);
    workload.left_out.lost = lost;
    if workload.requests.is_empty() {
        let why = match workload.left_out.writes {
            0 => "it has no requests that were done",
            _ => "it has only requests that change the disk",
        };
        return Err(Failure::new(tried(), why)
            .of_kind(Kind::Invalid)
            .advise("with --write they are replayed, and what the disk holds is lost"));
    }
    Ok(workload)
}

fn workload_of(mut requests: Vec<Recorded>, write: bool) -> Workload {
    let mut left_out = LeftOut::default();
    let mut end = 0;
    requests.retain(|one| {
        // A request beyond the end of its disk has failed.
        if !one.done {
            left_out.failed += 1;
            return false;
        }
        end = end.max(one.offset.saturating_add(one.size));
        let keep = write || !operation(one.kind).is_write();
        left_out.writes += u64::from(!keep);
        keep
    });
    let depths = depths(&requests);
    Workload { requests, depths, left_out, end }
}

/// Returns for each request how many were in flight when it arrived, including itself.
fn depths(requests: &[Recorded]) -> Vec<usize> {
    let mut ends = BinaryHeap::new();
    let depth_of = |one: &Recorded| {
        while ends.peek().is_some_and(|Reverse(end)| *end <= one.at_ns) {
            ends.pop();
        }
        ends.push(Reverse(one.at_ns.saturating_add(one.took_ns)));
        ends.len()
    };
    requests.iter().map(depth_of).collect()
}

fn operation(kind: RequestKind) -> Operation {
    match kind {
        RequestKind::Read => Operation::Read,
        RequestKind::Write => Operation::Write { durable: false },
        RequestKind::Flush => Operation::Flush,
        RequestKind::Discard => Operation::Discard,
        RequestKind::WriteZeroes => Operation::WriteZeroes { free: true, durable: false },
    }
}

/// Checks that the disk can execute all requests, before any is issued.
fn check_fits(replay: &Replay, workload: &Workload, geometry: Geometry) -> Result<(), Failure> {
    let refuse = |why: String| {
        let tried = format!("replay {} on {}", replay.recording.display(), replay.image);
        Failure::new(tried, why).of_kind(Kind::Invalid)
    };
    if workload.end > geometry.len {
        let (end, len) = (workload.end, geometry.len);
        return Err(refuse(format!("it has requests up to {end} bytes, and the disk has {len} bytes")).advise(
            format!("use an image of {} or more", readable(end.checked_next_multiple_of(1 << 20).unwrap_or(end))),
        ));
    }
    let block = u64::from(geometry.block);
    for (number, one) in workload.requests.iter().enumerate() {
        let Recorded { offset, size, kind, .. } = *one;
        let what = || format!("request {} of {size} bytes at {offset}", number + 1);
        if offset % block != 0 || size % block != 0 {
            return Err(refuse(format!("{} is not aligned to the disk's blocks of {block} bytes", what())));
        }
        if size > SIZE_MAX && matches!(kind, RequestKind::Read | RequestKind::Write) {
            return Err(refuse(format!("{} is larger than {}", what(), readable(SIZE_MAX))));
        }
    }
    Ok(())
}

/// Issues requests and receives their completions.
struct Issuer<'a> {
    runner: Runner,
    workload: &'a Workload,
    speed: Speed,
    begun: Instant,
    progress: Progress,
    /// Unused memory, by kind and size of its requests.
    free: HashMap<(RequestKind, u64), Vec<Segments>>,
    /// For each request in flight, when it was issued, and its memory.
    in_flight: HashMap<usize, (Instant, Segments)>,
    bytes_in_flight: u64,
    in_flight_max: usize,
    replayed: Vec<Replayed>,
}

impl<'a> Issuer<'a> {
    fn new(runner: Runner, workload: &'a Workload, speed: Speed, begun: Instant, progress: Progress) -> Issuer<'a> {
        let (free, in_flight) = (HashMap::new(), HashMap::new());
        let replayed = Vec::with_capacity(workload.requests.len());
        Issuer {
            runner,
            workload,
            speed,
            begun,
            progress,
            free,
            in_flight,
            bytes_in_flight: 0,
            in_flight_max: 0,
            replayed,
        }
    }

    /// Issues all requests, each at its time, and waits for their completion. Returns whether a signal has ended it
    /// early.
    fn issue_all(&mut self, stop: &mut Signal) -> Result<bool, Failure> {
        let workload = self.workload;
        for (number, (one, depth)) in workload.requests.iter().zip(&workload.depths).enumerate() {
            let due = self.due(one);
            let wait = due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
            if wait > LONG_WAIT {
                say(format_args!(
                    "request {} of {} is due in {}; --speed replays faster",
                    number + 1,
                    workload.requests.len(),
                    clock(wait.as_secs())
                ));
            }
            while !self.may_issue(one, *depth, due) {
                if stop.take() {
                    self.wait_for_all()?;
                    return Ok(true);
                }
                self.wait_briefly(due)?;
            }
            self.issue(number, one)?;
        }
        self.wait_for_all()?;
        Ok(false)
    }

    /// Returns when a request must be issued; `None` means as soon as possible.
    fn due(&self, one: &Recorded) -> Option<Instant> {
        match self.speed {
            Speed::Times(times) => Some(self.begun + Duration::from_nanos(one.at_ns / u64::from(times.get()))),
            Speed::Max => None,
        }
    }

    fn has_room(&self, one: &Recorded, depth: usize) -> bool {
        let depth_max = if self.speed == Speed::Max { depth.min(IN_FLIGHT_MAX) } else { IN_FLIGHT_MAX };
        let in_flight = self.in_flight.len();
        in_flight == 0 || in_flight < depth_max && self.bytes_in_flight + one.size <= BYTES_MAX
    }

    fn may_issue(&self, one: &Recorded, depth: usize, due: Option<Instant>) -> bool {
        self.has_room(one, depth) && due.is_none_or(|due| due <= Instant::now())
    }

    fn issue(&mut self, number: usize, one: &Recorded) -> Result<(), Failure> {
        let memory = match one.kind {
            RequestKind::Read | RequestKind::Write => self.memory(one),
            RequestKind::Flush | RequestKind::Discard | RequestKind::WriteZeroes => Segments::empty(),
        };
        let span = Span { at: DiskOffset(one.offset), len: one.size };
        let now = Instant::now();
        let late = self.due(one).map_or(0, |due| nanoseconds(now.saturating_duration_since(due)));
        self.runner.submit(operation(one.kind), span, memory.clone(), Token(number as u64))?;
        self.in_flight.insert(number, (now, memory));
        self.in_flight_max = self.in_flight_max.max(self.in_flight.len());
        self.bytes_in_flight += one.size;
        self.replayed.push(Replayed { number, took: 0, late });
        // This submits it to the kernel, and collects completions now instead of with the next request.
        while let Some((token, answer)) = self.runner.wait_until(now)? {
            self.complete(token, answer)?;
        }
        Ok(())
    }

    fn memory(&mut self, one: &Recorded) -> Segments {
        let free = self.free.entry((one.kind, one.size)).or_default();
        free.pop().unwrap_or_else(|| Segments::copy_of(&vec![WRITTEN; in_memory(one.size)]))
    }

    /// Waits for a completion: no longer than until `due`, nor than [`LOOK_EVERY`].
    fn wait_briefly(&mut self, due: Option<Instant>) -> Result<(), Failure> {
        let look = Instant::now() + LOOK_EVERY;
        // A late request waits for others to complete.
        let until = due.filter(|due| *due > Instant::now()).map_or(look, |due| due.min(look));
        match self.runner.wait_until(until)? {
            Some((token, answer)) => self.complete(token, answer),
            None => Ok(()),
        }
    }

    fn wait_for_all(&mut self) -> Result<(), Failure> {
        while !self.in_flight.is_empty() {
            let (token, answer) = self.runner.wait_for_any()?;
            self.complete(token, answer)?;
        }
        Ok(())
    }

    fn complete(&mut self, Token(number): Token, answer: Result<Answer, Failure>) -> Result<(), Failure> {
        let now = Instant::now();
        answer?;
        let number = in_memory(number);
        let (Some((issued, memory)), Some(one)) = (self.in_flight.remove(&number), self.workload.requests.get(number))
        else {
            return Ok(());
        };
        // Requests are issued in their order, starting with the first.
        if let Some(replayed) = self.replayed.get_mut(number) {
            replayed.took = nanoseconds(now.duration_since(issued));
        }
        self.bytes_in_flight -= one.size;
        if !memory.is_empty() {
            self.free.entry((one.kind, one.size)).or_default().push(memory);
        }
        self.progress.advance(one.size);
        Ok(())
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    fn recorded(at_ns: u64, kind: RequestKind, took_ns: u64) -> Recorded {
        Recorded { at_ns, kind, done: true, offset: at_ns * 512, size: 512, took_ns }
    }

    #[test]
    fn the_depth_counts_the_requests_in_flight_at_an_arrival() {
        let requests = [(0, 10), (5, 10), (9, 1), (10, 5), (14, 100), (15, 1), (500, 1)];
        let requests = requests.map(|(at, took)| recorded(at, RequestKind::Read, took));
        assert_eq!(depths(&requests), [1, 2, 3, 2, 3, 2, 1]);
        assert_eq!(depths(&[]), Vec::<usize>::new());
    }

    #[test]
    fn requests_that_change_the_disk_are_left_out_unless_requested() {
        let all = || {
            let mut all: Vec<Recorded> = (0..).zip(RequestKind::ALL).map(|(at, kind)| recorded(at, kind, 1)).collect();
            let beyond = Recorded { done: false, offset: u64::MAX - 512, ..recorded(9, RequestKind::Read, 1) };
            all.push(beyond);
            all
        };
        let kinds = |workload: &Workload| workload.requests.iter().map(|one| one.kind).collect::<Vec<_>>();
        let workload = workload_of(all(), false);
        assert_eq!(kinds(&workload), [RequestKind::Read, RequestKind::Flush]);
        assert_eq!((workload.left_out, workload.end), (LeftOut { writes: 3, failed: 1, lost: 0 }, 5 * 512));
        let workload = workload_of(all(), true);
        assert_eq!((kinds(&workload), workload.left_out.writes), (RequestKind::ALL.to_vec(), 0));
    }
}
