//! One life of a disk: a workload, requests in flight together, and storage that completes operations in the order of a
//! schedule. After every event a callback may examine what a power loss would leave.
//!
//! Invariants checked:
//! - every request is answered exactly once;
//! - a read finds legal contents (see [`crate::oracle`]); at the end, everything that was touched is read;
//! - requests fail only if a fault was injected;
//! - after a failed sync nothing is durable and no new write is accepted.

mod around;
mod aside;
mod changes;
mod made;
mod new_file;
mod opening;
mod read_back;
mod rebase;
mod steps;
mod takeover;
mod windows;

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::ops::Range;

use disk::{Access, Disk, DiskOffset, FileId, Image, Operation, Options, RedoLog, Request, Span, Status, Token};
use memory::Segments;

use crate::io::{SimIo, Visible};
use crate::link;
use crate::logs::Logs;
use crate::media::Media;
use crate::oracle::{Content, Oracle, Time, WriteToken, parts_of};
use crate::planted::Planted;
use crate::saboteur::{Plot, SabotagedIo, Saboteur};
use crate::schedule::{Pace, Schedule};
use crate::sector::{PART, PARTS, SECTOR, Word, words_of};
use crate::sibling::Sibling;
use crate::subject::{Device, Form, Start, Subject};
use crate::violation::EVENTS_MAX;
pub use crate::violation::Violation;
use crate::workload::Op;
use around::Around;
use changes::Maps;
use opening::Opening;
use steps::ActiveVerb;
pub use takeover::{Death, Next, take_over};
pub use windows::around;

/// After this many file operations the disk drops its caches if it is idle.
const FORGETS: u64 = 5;

/// After this many file operations the files need new stamps, as from time to time in a real process.
const EXPIRES: u64 = 7;

/// Maximum number of operations in a short workload.
const SHORT: usize = 4;

/// The parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The image.
    pub subject: Subject,
    /// A bug to plant.
    pub bug: Option<Planted>,
    /// A fault to inject.
    pub fault: Option<crate::fault::Fault>,
    /// When reads see writes.
    pub visible: Visible,
    /// Maximum number of requests in flight.
    pub depth: usize,
    /// Maximum number of pending file operations: the queue is full beyond.
    pub room: usize,
    /// The number of the first request, which its version carries; each life has its own range.
    pub first: u64,
    /// Capacity of a redo log in bytes of records.
    pub log: usize,
    /// Whether the disk's limits are as low as possible: no memory for its map, one fill at a time, and a round as soon
    /// as two metadata blocks have changed.
    pub tight: bool,
    /// How many regions of a map of changed blocks may have an intent; `None`: there is no map.
    pub intents: Option<usize>,
}

impl Setup {
    fn options(&self) -> Options {
        let intents = self.intents.unwrap_or_default();
        let roomy = Options { requests: self.depth, intents, ..Options::default() };
        if self.tight { Options { dirty_max: 1, map_bytes: 0, trim_bytes: 0, flight_bytes: 0, ..roomy } } else { roomy }
    }
}

/// The result of a run.
#[derive(Clone, Debug)]
pub struct End {
    /// Whether the fault has occurred.
    pub fault_happened: bool,
    /// The visible files of the chain, leaf first.
    pub files: Vec<Media>,
    /// Number of completed file operations.
    pub operations: u64,
}

struct InFlight {
    op: Op,
    operation: Operation,
    submitted: Time,
    /// Whether a sync had failed before its submission.
    broken: bool,
}

/// An event of a run.
enum Event {
    /// Submits the next operation of the workload.
    Begin,
    /// Completes a pending file operation.
    Finish(usize),
    /// Continues the current verb.
    Continue,
}

struct Run {
    setup: Setup,
    bug: Option<Planted>,
    io: SimIo,
    plot: Plot,
    /// Dropped only when every request is answered, and leaked if a violation ends the run earlier, because a request
    /// that is dropped panics.
    disk: ManuallyDrop<Disk<Saboteur<Image>>>,
    oracle: Oracle,
    logs: Logs,
    /// The format of each file, by its number.
    forms: Vec<Form>,
    /// The chains that must be legal after a power loss, leaf first; the first is the one that is served.
    chains: Vec<Vec<FileId>>,
    /// Other chains that share layers with it.
    siblings: Vec<Sibling>,
    /// The verb in progress.
    verb: Option<ActiveVerb>,
    /// Whether the verb has failed so that only another process could continue.
    is_over: bool,
    /// Size of the disk in sectors as reported to the guest.
    guest_sectors: u64,
    in_flight: BTreeMap<u64, InFlight>,
    /// Partial writes that a planted bug intercepts.
    around: BTreeMap<u64, Around>,
    next: u64,
    operations: u64,
    /// Whether the disk does not fit on its device.
    is_small: bool,
    /// Whether the disk is made to drop its caches.
    forgets: bool,
    maps: Maps,
}

/// The state of a life, as seen by the callback after an event.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// The storage.
    pub io: &'a SimIo,
    /// The format of each file, by its number.
    pub forms: &'a [Form],
    /// The chains that must be legal after a power loss, leaf first.
    pub chains: &'a [Vec<FileId>],
    /// Other chains that share layers.
    pub siblings: &'a [Sibling],
    /// The legal contents of the disk.
    pub oracle: &'a Oracle,
    /// The redo logs, which outlive the process.
    pub logs: &'a Logs,
    /// The maps of changed blocks.
    pub tracked: &'a [crate::changes::Tracked],
}

/// Called after every event.
pub type Watch<'a> = dyn FnMut(&Sight<'_>) -> Result<(), Violation> + 'a;

/// Runs a workload to its end.
pub fn run(
    setup: &Setup,
    start: &Start,
    workload: &[Op],
    schedule: &mut Schedule,
    watch: &mut Watch<'_>,
) -> Result<End, Violation> {
    let mut run = Run::new(setup, start)?;
    // In a short workload little is cached, and reading it again adds events at which a crash is examined.
    run.forgets = workload.len() > SHORT;
    let mut waiting = workload.iter().copied();
    let mut upcoming = waiting.next();
    for _ in 0..EVENTS_MAX {
        upcoming = upcoming.filter(|_| !run.is_over);
        let begins = upcoming.is_some_and(|op| run.can_begin_op(op, setup.depth));
        let goes_on = run.can_proceed();
        let pending = run.io.pending();
        let count = pending + usize::from(begins) + usize::from(goes_on);
        if count == 0 {
            // A queue that was full has room now.
            if run.retry() {
                continue;
            }
            return run.end(upcoming, workload);
        }
        let picked = schedule.pick(count);
        match event(schedule.pace(), picked, pending, begins, goes_on) {
            Event::Begin => {
                let op = std::mem::replace(&mut upcoming, waiting.next());
                if let Some(op) = op {
                    run.begin_op(op, &setup.subject);
                }
            }
            Event::Finish(which) => run.finish(which),
            Event::Continue => run.proceed(&setup.subject, watch)?,
        }
        run.answers()?;
        run.drop_logs_early();
        watch(&run.sight())?;
    }
    Err(Violation::Endless)
}

/// The event for the `picked`th choice. The first depends on the pace; the others are ordered by age.
fn event(pace: Pace, picked: usize, pending: usize, begins: bool, goes_on: bool) -> Event {
    let (begins, goes_on) = (usize::from(begins), usize::from(goes_on));
    match pace {
        Pace::Serial if picked < pending => Event::Finish(picked),
        Pace::Serial if picked < pending + goes_on => Event::Continue,
        Pace::Serial => Event::Begin,
        Pace::Eager | Pace::Newest if picked < begins => Event::Begin,
        Pace::Eager if picked < begins + pending => Event::Finish(picked - begins),
        Pace::Eager => Event::Continue,
        Pace::Steps if picked < goes_on => Event::Continue,
        Pace::Steps if picked < goes_on + pending => Event::Finish(picked - goes_on),
        Pace::Steps => Event::Begin,
        Pace::Newest if picked < begins + goes_on => Event::Continue,
        Pace::Newest => Event::Finish((begins + goes_on + pending).saturating_sub(picked + 1)),
    }
}

impl Run {
    fn new(setup: &Setup, start: &Start) -> Result<Run, Violation> {
        let mut io = SimIo::new(start.files.clone(), setup.subject.unit, setup.visible, setup.room, setup.fault);
        io.plant(setup.bug);
        io.shape(setup.subject.shape);
        let chain = (0..).map(FileId).zip(&start.forms).map(|(file, _)| file).collect();
        let (logs, oracle) = (Logs::new(setup.log, setup.bug, setup.first), Oracle::new(start.base.clone()));
        Run::on(setup, io, (logs, Opening::ALONE), start.forms.clone(), oracle, vec![chain])?.with_map(start)
    }

    /// A run with a disk on the first of these chains, leaf first.
    fn on(
        setup: &Setup,
        io: SimIo,
        (mut logs, opening): (Logs, Opening<'_>),
        forms: Vec<Form>,
        oracle: Oracle,
        chains: Vec<Vec<FileId>>,
    ) -> Result<Run, Violation> {
        let plot = Plot::default();
        let chain = chains[0].clone();
        let mut files = io.contents(&chain);
        let len = files.first().map_or(0, Media::len);
        let (mut layers, mut opened) = (Vec::new(), Vec::new());
        for ((id, file), form) in chain.iter().zip(&mut files).zip(&forms) {
            let access = opening.access(*id, layers.len());
            let log = opening.reads_log(*id, access, &logs).then(|| logs.open(*id, file));
            let log = log.transpose().map_err(Violation::Open)?;
            let is_needed = |log: &RedoLog| access == Access::ReadWrite || log.has_failed() || log.owed().is_some();
            let log = log.filter(is_needed);
            let image = match &log {
                Some(log) => setup.subject.open_one(&mut log.patched(file), *form, access),
                None => setup.subject.open_one(file, *form, access),
            };
            layers.push(image.map_err(Violation::Open)?);
            opened.extend(log.map(|log| (*id, log)));
        }
        link::check(&layers, &files).map_err(Violation::Unfit)?;
        let sabotage = |(layer, image)| {
            let file = FileId(u8::try_from(layer).unwrap_or(u8::MAX));
            Saboteur::new(image, setup.bug, plot.clone(), (file, layer), len)
        };
        let layers = layers.into_iter().enumerate().map(sabotage).collect();
        let options = setup.options();
        let mut disk = Disk::new(layers, options).map_err(Violation::Open)?;
        for (id, log) in opened {
            disk.set_log(id, log).map_err(Violation::Open)?;
        }
        for depth in (1..chain.len()).filter(|depth| opening.access(chain[*depth], *depth) == Access::ReadWrite) {
            disk.close_when_durable(depth);
        }
        let disk = ManuallyDrop::new(disk);
        let (in_flight, next) = (BTreeMap::new(), setup.first);
        let (bug, guest_sectors) = (setup.bug, disk.geometry().len / SECTOR);
        Ok(Run {
            setup: *setup,
            bug,
            io,
            plot,
            disk,
            oracle,
            logs,
            forms,
            chains,
            siblings: Vec::new(),
            verb: None,
            is_over: false,
            guest_sectors,
            in_flight,
            around: BTreeMap::new(),
            next,
            operations: 0,
            is_small: setup.subject.device != Device::Roomy,
            forgets: false,
            maps: Maps::default(),
        })
    }

    fn sight(&self) -> Sight<'_> {
        let Run { io, forms, chains, siblings, oracle, logs, maps, .. } = self;
        Sight { io, forms, chains, siblings, oracle, logs, tracked: &maps.tracked }
    }

    fn can_begin_op(&self, op: Op, depth: usize) -> bool {
        match op {
            Op::Chain(step) => self.can_begin(step),
            // A guest uses sectors after the old end only when it was notified of them.
            _ if self.is_offline() => false,
            _ => self.in_flight.len() < depth && (op.is_inside(self.guest_sectors) || !self.is_growing()),
        }
    }

    fn begin_op(&mut self, op: Op, subject: &Subject) {
        match op.within(self.guest_sectors).map(|op| (op, op.operation())) {
            Some((Op::Chain(step), _)) => self.begin(step, subject),
            Some((op, Some(operation))) => self.submit(op, operation),
            _ => {}
        }
    }

    fn submit(&mut self, op: Op, operation: Operation) {
        let number = self.next;
        self.next += 1;
        let parts = op.parts();
        let submitted = self.oracle.tick();
        let version = u32::try_from(number).unwrap_or(u32::MAX);
        let memory = match op {
            Op::Write(..) | Op::Patch(..) => guest_memory(version, parts.range()),
            Op::Read(..) | Op::ReadParts(..) => Segments::zeroed(usize::try_from(parts.count * PART).unwrap_or(0)),
            _ => Segments::empty(),
        };
        let content = match op {
            Op::Write(..) | Op::Patch(..) => Some(Content::Guest(version)),
            Op::Zero(..) | Op::ZeroKept(..) | Op::ZeroParts(..) => Some(Content::Zero),
            Op::Discard(..) => Some(Content::PerhapsZero),
            Op::Read(..) | Op::ReadParts(..) | Op::Flush | Op::Chain(..) => None,
        };
        if let Some(content) = content {
            self.oracle.submit_parts(WriteToken(number), submitted, parts.range(), content);
            self.touch(op.sectors().range());
        }
        self.in_flight.insert(number, InFlight { op, operation, submitted, broken: self.io.sync_failed() });
        if matches!(op, Op::Patch(..)) && self.writes_around(number, parts, &memory, op.is_durable()) {
            return;
        }
        let span = Span { at: DiskOffset(parts.at * PART), len: parts.count * PART };
        let request = Request::of_bytes(operation, span, memory, Token(number), &self.disk.geometry());
        let request = match request {
            Ok(request) => request,
            Err(status) => panic!("the workload asks for {op}, which the disk does not have: {status:?}"),
        };
        self.disk.submit(request, &mut SabotagedIo { io: &mut self.io, plot: &self.plot });
    }

    fn finish(&mut self, which: usize) {
        self.operations += 1;
        if self.operations % EXPIRES == 0 {
            self.disk.expire_stamps();
        }
        let ended = self.io.finish(which);
        let ended = self.settle_maps(ended);
        let ended: Vec<_> = ended.into_iter().filter_map(|done| self.settle_aside(done)).collect();
        let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
        ended.into_iter().for_each(|done| self.disk.settle(done, &mut io));
        self.disk.retry(&mut io);
        self.retry_aside();
        // Only at rest, as in the real process; otherwise a request that needs much metadata would load it repeatedly
        // and never end.
        if self.forgets && self.operations % FORGETS == 0 && self.disk.is_idle() {
            self.disk.drop_caches();
        }
    }

    /// Drops logs as a planted bug does when a round is sealed.
    fn drop_logs_early(&mut self) {
        for file in std::mem::take(&mut self.plot.borrow_mut().dropped) {
            self.logs.drop_until(file, self.logs.head(file));
        }
    }

    /// Lets the disk resubmit refused operations; returns whether that gave the storage something to do.
    fn retry(&mut self) -> bool {
        self.disk.retry(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        self.retry_aside();
        self.io.retry();
        self.io.pending() > 0
    }

    fn answers(&mut self) -> Result<(), Violation> {
        self.watch_map()?;
        while let Some((request, status)) = self.disk.answer() {
            let memory = request.asked_memory();
            let Token(number) = request.retire();
            if Token(number) == steps::FLUSH {
                self.flushed(status);
                continue;
            }
            if Token(number) == rebase::COPY {
                self.copied_up(status);
                continue;
            }
            let Some((number, status)) = self.read_around(number, status) else { continue };
            let asked = self.in_flight.remove(&number).ok_or(Violation::Twice(number))?;
            self.judge_status(&asked, status)?;
            let now = self.oracle.tick();
            let done = status == Status::Done;
            match asked.op {
                Op::Flush if done => self.oracle.flushed(asked.submitted),
                op @ (Op::Read(_) | Op::ReadParts(_)) if done => self.judge_read(op, &memory, asked.submitted)?,
                op if asked.operation.is_write() => {
                    self.oracle.answer(WriteToken(number), now, done, op.is_durable());
                }
                _ => {}
            }
        }
        if self.in_flight.is_empty() {
            self.oracle.settle();
        }
        Ok(())
    }

    fn judge_read(&self, op: Op, memory: &Segments, submitted: Time) -> Result<(), Violation> {
        let (sectors, parts) = (op.sectors(), op.parts().range());
        // The requested data begins at its first part, not at the beginning of the sector.
        let bytes = usize::try_from((parts.start - sectors.at * PARTS) * PART).unwrap_or(0);
        let memory = Segments::joined(vec![Segments::zeroed(bytes), memory.clone()]);
        for (sector, found) in sectors.range().zip(words_of(&memory)) {
            let asked = parts_of(sector, parts.start, parts.end);
            self.oracle.check_read(sector, (found, asked), submitted).map_err(Violation::Read)?;
        }
        Ok(())
    }

    fn judge_status(&self, asked: &InFlight, status: Status) -> Result<(), Violation> {
        let op = || asked.op.to_string();
        let done = status == Status::Done;
        // A discard may be declined.
        let declined = status == Status::Unsupported && matches!(asked.operation, Operation::Discard);
        let is_full = status == Status::NoSpace && self.is_small && !matches!(asked.op, Op::Flush | Op::Read(_));
        if !self.io.fault_happened() && !done && !declined && !is_full {
            return Err(Violation::Status { op: op(), status });
        }
        let too_late = asked.broken && asked.operation.is_write() && status != Status::Refused;
        let not_durable = self.io.sync_failed() && asked.op.is_durable() && done;
        if too_late || not_durable {
            return Err(Violation::NotRefused { op: op(), status });
        }
        Ok(())
    }

    fn end(mut self, upcoming: Option<Op>, workload: &[Op]) -> Result<End, Violation> {
        if self.verb.is_some() || upcoming.is_some() {
            let step = self.verb.as_ref().and_then(ActiveVerb::step);
            return Err(Violation::Step(format!("{step:?} never ends")));
        }
        if !self.in_flight.is_empty() || self.disk.in_flight() > 0 {
            return Err(Violation::Unanswered(self.in_flight.len()));
        }
        self.read_all_back(workload)?;
        self.close_map()?;
        let Run { io, disk, operations, chains, .. } = self;
        drop(ManuallyDrop::into_inner(disk));
        let files = chains.first().map(|chain| io.contents(chain)).unwrap_or_default();
        Ok(End { fault_happened: io.fault_happened(), files, operations })
    }
}

/// The guest's data for a version of some parts of sectors.
fn guest_memory(version: u32, parts: Range<u64>) -> Segments {
    let words = usize::try_from(PART / 8).unwrap_or(0);
    let part = |part: u64| Word::guest(version, part / PARTS).0.to_le_bytes().repeat(words);
    Segments::copy_of(&parts.flat_map(part).collect::<Vec<u8>>())
}
