//! `image replay`: asks a disk for what another disk was asked for, at the times at which that was.
//!
//! It knows a recording (`tapline trace --record`), image, engine and storage, without a guest and its transport. The
//! recording has no data: writes replace what the disk holds, and are only replayed where that was asked for by name.
//! Invariant: a request is never issued before its time, and what was issued late is in the report.

mod report;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileTypeExt;
use std::time::{Duration, Instant};

use ::stats::{Kind as Asked, Recorded, read_recording};
use arguments::{Replay, Speed};
use control::Kind;
use control::size::readable;
use disk::{DiskOffset, Geometry, Operation, Span, Token};
use memory::Segments;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::progress::{Progress, clock};
use crate::jobs::runner::{Answer, Runner};
use crate::process::failure::{Exit, Failure};
use crate::process::log::say;
use crate::process::signals::Signal;

/// Requests in flight at most, and their bytes: a disk that is much slower than the recorded one must not take all
/// memory.
const IN_FLIGHT_MAX: usize = 512;
const BYTES_MAX: u64 = 512 << 20;
/// The largest read or write: more than any transport takes.
const SIZE_MAX: u64 = 64 << 20;
/// What is written: not zero, which some storage does not store.
const WRITTEN: u8 = 0x54;
/// How often a signal is looked for while nothing is due.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// A longer wait for the next request is announced.
const LONG_WAIT: Duration = Duration::from_secs(10);

/// What is to be replayed.
struct Plan {
    requests: Vec<Recorded>,
    /// How many of these were in flight when each came, itself included.
    depths: Vec<usize>,
    left_out: LeftOut,
    /// The end of the highest request of all that were recorded.
    end: u64,
}

/// Requests that are not replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
struct LeftOut {
    /// Writes, discards and writes of zeroes, without `--write`.
    writes: u64,
    /// Those that failed when they were recorded.
    failed: u64,
    /// Those that the recording lacks.
    lost: u64,
}

/// How a request was replayed, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Replayed {
    /// Its number in the plan.
    number: usize,
    took: u64,
    /// How long after its time it was issued.
    late: u64,
}

/// What came of a replay.
struct Ended {
    took: Duration,
    replayed: Vec<Replayed>,
    /// Requests in flight at most.
    in_flight_max: usize,
    /// A signal ended it before all were issued.
    stopped: bool,
}

/// Runs the job. A signal ends it early, with the result so far.
pub fn run(files: &Files, replay: &Replay) -> Result<Exit, Failure> {
    // Until there is something to report, a signal ends it at once: the recording may be a pipe, or hang.
    let plan = plan(replay)?;
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    if replay.write {
        replay.confirm.ask(&format!("overwrite {} with what was recorded", replay.image))?;
    }
    let options = access::options(replay.access, replay.write);
    let layers = Layers::open(files, &replay.image, &replay.parents, options)?;
    let runner = Runner::new(layers, access::engine(replay.access))?;
    fits(replay, &plan, runner.geometry())?;
    let progress = Progress::new(files, "replaying", plan.requests.iter().map(|one| one.size).sum());
    let begun = Instant::now();
    let mut issuer = Issuer::new(runner, &plan, replay.speed, begun, progress);
    let stopped = issuer.issue_all(&mut stop)?;
    let took = begun.elapsed();
    if replay.write {
        issuer.runner.flush()?;
    }
    let Issuer { progress, replayed, in_flight_max, .. } = issuer;
    progress.finish();
    report::report(replay, &plan, &Ended { took, replayed, in_flight_max, stopped })?;
    Ok(Exit::Done)
}

/// Reads the recording.
fn plan(replay: &Replay) -> Result<Plan, Failure> {
    let tried = || format!("replay {}", replay.recording.display());
    let is_pipe = replay.recording.metadata().is_ok_and(|found| found.file_type().is_fifo());
    if is_pipe {
        say(format_args!("{} is a pipe: waiting for a recording until its writer ends", replay.recording.display()));
    }
    let file = File::open(&replay.recording).map_err(|error| Failure::new(tried(), error))?;
    let (all, lost) =
        read_recording(&mut BufReader::with_capacity(1 << 20, file)).map_err(|error| Failure::new(tried(), error))?;
    let mut plan = plan_of(all, replay.write);
    plan.left_out.lost = lost;
    if plan.requests.is_empty() {
        let why = match plan.left_out.writes {
            0 => "it has no requests that were done",
            _ => "it has only requests that change the disk",
        };
        return Err(Failure::new(tried(), why)
            .of_kind(Kind::Invalid)
            .advise("with --write they are replayed, and what the disk holds is lost"));
    }
    Ok(plan)
}

fn plan_of(mut requests: Vec<Recorded>, write: bool) -> Plan {
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
    Plan { requests, depths, left_out, end }
}

/// How many of the requests were in flight when each came, itself included.
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

fn operation(kind: Asked) -> Operation {
    match kind {
        Asked::Read => Operation::Read,
        Asked::Write => Operation::Write { durable: false },
        Asked::Flush => Operation::Flush,
        Asked::Discard => Operation::Discard,
        Asked::WriteZeroes => Operation::WriteZeroes { free: true, durable: false },
    }
}

/// Refuses a disk that cannot be asked for all of it, before it is asked for anything.
fn fits(replay: &Replay, plan: &Plan, geometry: Geometry) -> Result<(), Failure> {
    let refuse = |why: String| {
        let tried = format!("replay {} on {}", replay.recording.display(), replay.image);
        Failure::new(tried, why).of_kind(Kind::Invalid)
    };
    if plan.end > geometry.len {
        let (end, len) = (plan.end, geometry.len);
        return Err(refuse(format!("it has requests up to {end} bytes, and the disk has {len} bytes")).advise(
            format!("use an image of {} or more", readable(end.checked_next_multiple_of(1 << 20).unwrap_or(end))),
        ));
    }
    let block = u64::from(geometry.block);
    for (number, one) in plan.requests.iter().enumerate() {
        let Recorded { offset, size, kind, .. } = *one;
        let what = || format!("request {} of {size} bytes at {offset}", number + 1);
        if offset % block != 0 || size % block != 0 {
            return Err(refuse(format!("{} is not aligned to the disk's blocks of {block} bytes", what())));
        }
        if size > SIZE_MAX && matches!(kind, Asked::Read | Asked::Write) {
            return Err(refuse(format!("{} is larger than {}", what(), readable(SIZE_MAX))));
        }
    }
    Ok(())
}

/// Issues requests and takes their answers.
struct Issuer<'a> {
    runner: Runner,
    plan: &'a Plan,
    speed: Speed,
    begun: Instant,
    progress: Progress,
    /// Memory that no request uses, by what it is for.
    free: HashMap<(Asked, u64), Vec<Segments>>,
    /// When each open request was issued, and its memory.
    open: HashMap<usize, (Instant, Segments)>,
    bytes_open: u64,
    in_flight_max: usize,
    replayed: Vec<Replayed>,
}

impl<'a> Issuer<'a> {
    fn new(runner: Runner, plan: &'a Plan, speed: Speed, begun: Instant, progress: Progress) -> Issuer<'a> {
        let (free, open) = (HashMap::new(), HashMap::new());
        let replayed = Vec::with_capacity(plan.requests.len());
        Issuer { runner, plan, speed, begun, progress, free, open, bytes_open: 0, in_flight_max: 0, replayed }
    }

    /// Issues all requests, each at its time, and waits for their answers. Whether a signal has ended it early.
    fn issue_all(&mut self, stop: &mut Signal) -> Result<bool, Failure> {
        let plan = self.plan;
        for (number, (one, depth)) in plan.requests.iter().zip(&plan.depths).enumerate() {
            let due = self.due(one);
            let wait = due.map_or(Duration::ZERO, |due| due.saturating_duration_since(Instant::now()));
            if wait > LONG_WAIT {
                say(format_args!(
                    "request {} of {} is due in {}; --speed replays faster",
                    number + 1,
                    plan.requests.len(),
                    clock(wait.as_secs())
                ));
            }
            while !self.may_issue(one, *depth, due) {
                if stop.take() {
                    self.wait_for_all()?;
                    return Ok(true);
                }
                self.take_answer(due)?;
            }
            self.issue(number, one)?;
        }
        self.wait_for_all()?;
        Ok(false)
    }

    /// When a request is to be issued; `None`: as soon as it can be.
    fn due(&self, one: &Recorded) -> Option<Instant> {
        match self.speed {
            Speed::Times(times) => Some(self.begun + Duration::from_nanos(one.at_ns / u64::from(times.get()))),
            Speed::Max => None,
        }
    }

    fn has_room(&self, one: &Recorded, depth: usize) -> bool {
        let depth_max = if self.speed == Speed::Max { depth.min(IN_FLIGHT_MAX) } else { IN_FLIGHT_MAX };
        let open = self.open.len();
        open == 0 || open < depth_max && self.bytes_open + one.size <= BYTES_MAX
    }

    fn may_issue(&self, one: &Recorded, depth: usize, due: Option<Instant>) -> bool {
        self.has_room(one, depth) && due.is_none_or(|due| due <= Instant::now())
    }

    fn issue(&mut self, number: usize, one: &Recorded) -> Result<(), Failure> {
        let memory = match one.kind {
            Asked::Read | Asked::Write => self.memory(one),
            Asked::Flush | Asked::Discard | Asked::WriteZeroes => Segments::empty(),
        };
        let span = Span { at: DiskOffset(one.offset), len: one.size };
        let now = Instant::now();
        let late = self.due(one).map_or(0, |due| nanoseconds(now.saturating_duration_since(due)));
        self.runner.submit(operation(one.kind), span, memory.clone(), Token(number as u64))?;
        self.open.insert(number, (now, memory));
        self.in_flight_max = self.in_flight_max.max(self.open.len());
        self.bytes_open += one.size;
        self.replayed.push(Replayed { number, took: 0, late });
        // It is given to the kernel now, and what has ended is not left to wait for the next one.
        while let Some((token, answer)) = self.runner.wait_until(now)? {
            self.answered(token, answer)?;
        }
        Ok(())
    }

    fn memory(&mut self, one: &Recorded) -> Segments {
        let free = self.free.entry((one.kind, one.size)).or_default();
        free.pop().unwrap_or_else(|| Segments::copy_of(&vec![WRITTEN; usize::try_from(one.size).unwrap_or(0)]))
    }

    /// Takes an answer, or waits for a moment: no longer than until `due`.
    fn take_answer(&mut self, due: Option<Instant>) -> Result<(), Failure> {
        let look = Instant::now() + LOOK_EVERY;
        // Behind its time it waits for room.
        let until = due.filter(|due| *due > Instant::now()).map_or(look, |due| due.min(look));
        match self.runner.wait_until(until)? {
            Some((token, answer)) => self.answered(token, answer),
            None => Ok(()),
        }
    }

    fn wait_for_all(&mut self) -> Result<(), Failure> {
        while !self.open.is_empty() {
            let (token, answer) = self.runner.wait_for_any()?;
            self.answered(token, answer)?;
        }
        Ok(())
    }

    fn answered(&mut self, Token(number): Token, answer: Result<Answer, Failure>) -> Result<(), Failure> {
        let now = Instant::now();
        answer?;
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        let (Some((issued, memory)), Some(one)) = (self.open.remove(&number), self.plan.requests.get(number)) else {
            return Ok(());
        };
        // They are issued in their order, from the first on.
        if let Some(replayed) = self.replayed.get_mut(number) {
            replayed.took = nanoseconds(now.duration_since(issued));
        }
        self.bytes_open -= one.size;
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

    fn recorded(at_ns: u64, kind: Asked, took_ns: u64) -> Recorded {
        Recorded { at_ns, kind, done: true, offset: at_ns * 512, size: 512, took_ns }
    }

    #[test]
    fn the_depth_of_a_request_is_how_many_were_in_flight_with_it() {
        let requests = [(0, 10), (5, 10), (9, 1), (10, 5), (14, 100), (15, 1), (500, 1)];
        let requests = requests.map(|(at, took)| recorded(at, Asked::Read, took));
        assert_eq!(depths(&requests), [1, 2, 3, 2, 3, 2, 1]);
        assert_eq!(depths(&[]), Vec::<usize>::new());
    }

    #[test]
    fn what_changes_the_disk_is_left_out_unless_asked_for() {
        let all = || {
            let mut all: Vec<Recorded> = (0..).zip(Asked::ALL).map(|(at, kind)| recorded(at, kind, 1)).collect();
            let beyond = Recorded { done: false, offset: u64::MAX - 512, ..recorded(9, Asked::Read, 1) };
            all.push(beyond);
            all
        };
        let kinds = |plan: &Plan| plan.requests.iter().map(|one| one.kind).collect::<Vec<_>>();
        let plan = plan_of(all(), false);
        assert_eq!(kinds(&plan), [Asked::Read, Asked::Flush]);
        assert_eq!((plan.left_out, plan.end), (LeftOut { writes: 3, failed: 1, lost: 0 }, 5 * 512));
        let plan = plan_of(all(), true);
        assert_eq!((kinds(&plan), plan.left_out.writes), (Asked::ALL.to_vec(), 0));
    }
}
