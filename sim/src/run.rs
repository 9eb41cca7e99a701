//! One life of a disk: a workload, requests in flight together, and storage that answers in the order of a
//! schedule. After every event somebody may look at what a power loss would leave.
//!
//! Invariants checked:
//! - every request is answered exactly once;
//! - a read finds what is legal (see [`crate::oracle`]); when all is done, everything that was touched is read;
//! - nothing fails unless a fault was injected;
//! - after a failed sync nothing is durable and no new write is accepted.

mod around;
mod aside;
mod made;
mod new_file;
mod opening;
mod rebase;
mod steps;
mod takeover;
mod violation;
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
use crate::oracle::{Content, Moment, Oracle, WriteToken, parts_of};
use crate::planted::Planted;
use crate::saboteur::{Plot, SabotagedIo, Saboteur};
use crate::schedule::{Pace, Schedule};
use crate::sector::{PART, PARTS, SECTOR, Word, words_of};
use crate::sibling::Sibling;
use crate::subject::{Device, Form, Start, Subject};
use crate::workload::{Op, Sectors};
use around::Around;
use opening::Opening;
use steps::Verb;
pub use takeover::{Death, Next, take_over};
pub use violation::Violation;
pub use windows::around;

/// More events than any workload has: a run that goes on is one that never ends.
const EVENTS_MAX: usize = 200_000;

/// After each so many file operations the disk forgets all that it can, if it is at rest.
const FORGETS: u64 = 5;

/// After each so many file operations the files need new stamps, as from time to time under whoever serves the disk.
const EXPIRES: u64 = 7;

/// Operations of workloads of which all are explored.
const SHORT: usize = 4;

/// What stays the same during a run.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The image.
    pub subject: Subject,
    /// A bug to plant.
    pub bug: Option<Planted>,
    /// What goes wrong.
    pub fault: Option<crate::fault::Fault>,
    /// When reads see writes.
    pub visible: Visible,
    /// Requests in flight at once, at most.
    pub depth: usize,
    /// File operations pending at once, at most: beyond, the queue is full.
    pub room: usize,
    /// The number of the first request, which its version carries: what an earlier life wrote has smaller ones.
    pub first: u64,
    /// Bytes of a redo log for records.
    pub log: usize,
    /// Whether the disk's own limits are as low as they can be: no memory for its map, one fill at a time, and a round
    /// as soon as two blocks of metadata have changed.
    pub tight: bool,
}

impl Setup {
    fn options(&self) -> Options {
        let roomy = Options { requests: self.depth, ..Options::default() };
        if self.tight { Options { dirty_max: 1, map_bytes: 0, trim_bytes: 0, flight_bytes: 0, ..roomy } } else { roomy }
    }
}

/// How a run ended.
#[derive(Clone, Debug)]
pub struct End {
    /// Whether the fault happened.
    pub fault_happened: bool,
    /// The files of the chain as a reader finds them, leaf first.
    pub files: Vec<Media>,
    /// File operations finished.
    pub operations: u64,
}

struct InFlight {
    op: Op,
    operation: Operation,
    submitted: Moment,
    /// Whether a sync had failed already when it was submitted.
    broken: bool,
}

/// What can happen next.
enum Event {
    /// The next operation of the workload begins.
    Begin,
    /// A file operation ends.
    Finish(usize),
    /// What is being done to the chain goes on.
    GoOn,
}

struct Run {
    setup: Setup,
    bug: Option<Planted>,
    io: SimIo,
    plot: Plot,
    /// Dropped only when every request is answered, and leaked when a violation ends the run before: a request
    /// that vanishes panics, as it should.
    disk: ManuallyDrop<Disk<Saboteur<Image>>>,
    oracle: Oracle,
    logs: Logs,
    /// How each file is to be understood, by its number.
    forms: Vec<Form>,
    /// The chains of which each must be right after a power loss, leaf first; the first is the one that is served.
    chains: Vec<Vec<FileId>>,
    /// The chains beside it that share layers with it.
    siblings: Vec<Sibling>,
    /// What is being done to the chain.
    verb: Option<Verb>,
    /// Whether that has failed where only another process could go on.
    is_over: bool,
    /// The disk's sectors, as the guest was told.
    told: u64,
    in_flight: BTreeMap<u64, InFlight>,
    /// Writes of parts that a planted bug keeps from the disk.
    around: BTreeMap<u64, Around>,
    next: u64,
    operations: u64,
    /// Whether the disk does not fit on its device.
    is_small: bool,
    /// Whether the disk is made to forget.
    forgets: bool,
}

/// What there is to see of a life at one moment.
#[derive(Clone, Copy)]
pub struct Sight<'a> {
    /// The storage.
    pub io: &'a SimIo,
    /// How each file is to be understood, by its number.
    pub forms: &'a [Form],
    /// The chains of which each must be right after a power loss, leaf first.
    pub chains: &'a [Vec<FileId>],
    /// The chains beside it.
    pub siblings: &'a [Sibling],
    /// What may be found.
    pub oracle: &'a Oracle,
    /// What outlives the process.
    pub logs: &'a Logs,
}

/// Who looks after every event.
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
    // In a short workload little is known that could be forgotten, and all that is read again is one more moment to
    // crash at.
    run.forgets = workload.len() > SHORT;
    let mut waiting = workload.iter().copied();
    let mut upcoming = waiting.next();
    for _ in 0..EVENTS_MAX {
        upcoming = upcoming.filter(|_| !run.is_over);
        let begins = upcoming.is_some_and(|op| run.can_begin_op(op, setup.depth));
        let goes_on = run.can_go_on();
        let pending = run.io.pending();
        let count = pending + usize::from(begins) + usize::from(goes_on);
        if count == 0 {
            // An engine that was full once has room now.
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
            Event::GoOn => run.go_on(&setup.subject, watch)?,
        }
        run.answers()?;
        run.drop_logs_early();
        watch(&run.sight())?;
    }
    Err(Violation::Endless)
}

/// What the `picked`th choice is. The first depends on the pace; the others follow by age.
fn event(pace: Pace, picked: usize, pending: usize, begins: bool, goes_on: bool) -> Event {
    let (begins, goes_on) = (usize::from(begins), usize::from(goes_on));
    match pace {
        Pace::Serial if picked < pending => Event::Finish(picked),
        Pace::Serial if picked < pending + goes_on => Event::GoOn,
        Pace::Serial => Event::Begin,
        Pace::Eager | Pace::Newest if picked < begins => Event::Begin,
        Pace::Eager if picked < begins + pending => Event::Finish(picked - begins),
        Pace::Eager => Event::GoOn,
        Pace::Steps if picked < goes_on => Event::GoOn,
        Pace::Steps if picked < goes_on + pending => Event::Finish(picked - goes_on),
        Pace::Steps => Event::Begin,
        Pace::Newest if picked < begins + goes_on => Event::GoOn,
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
        Run::on(setup, io, (logs, Opening::ALONE), start.forms.clone(), oracle, vec![chain])
    }

    /// A disk on the first of these chains, leaf first.
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
        let (bug, told) = (setup.bug, disk.geometry().len / SECTOR);
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
            told,
            in_flight,
            around: BTreeMap::new(),
            next,
            operations: 0,
            is_small: setup.subject.device != Device::Roomy,
            forgets: false,
        })
    }

    fn sight(&self) -> Sight<'_> {
        let Run { io, forms, chains, siblings, oracle, logs, .. } = self;
        Sight { io, forms, chains, siblings, oracle, logs }
    }

    fn can_begin_op(&self, op: Op, depth: usize) -> bool {
        match op {
            Op::Chain(step) => self.can_begin(step),
            // A guest asks for what is behind the end when it has been told that there is something.
            _ if self.is_offline() => false,
            _ => self.in_flight.len() < depth && (op.is_inside(self.told) || !self.is_growing()),
        }
    }

    fn begin_op(&mut self, op: Op, subject: &Subject) {
        match op.within(self.told).map(|op| (op, op.operation())) {
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
        let ended: Vec<_> = ended.into_iter().filter_map(|done| self.settle_aside(done)).collect();
        let mut io = SabotagedIo { io: &mut self.io, plot: &self.plot };
        ended.into_iter().for_each(|done| self.disk.settle(done, &mut io));
        self.disk.retry(&mut io);
        self.retry_aside();
        // At rest, as by whoever serves it: else what needs much metadata would learn it again and again, and never be
        // done.
        if self.forgets && self.operations % FORGETS == 0 && self.disk.is_idle() {
            self.disk.drop_caches();
        }
    }

    /// What a planted bug does when a round is sealed.
    fn drop_logs_early(&mut self) {
        for file in std::mem::take(&mut self.plot.borrow_mut().dropped) {
            self.logs.drop_until(file, self.logs.head(file));
        }
    }

    /// Lets the disk push again what was handed back; whether that gave the storage something to do.
    fn retry(&mut self) -> bool {
        self.disk.retry(&mut SabotagedIo { io: &mut self.io, plot: &self.plot });
        self.retry_aside();
        self.io.retry();
        self.io.pending() > 0
    }

    fn answers(&mut self) -> Result<(), Violation> {
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

    fn judge_read(&self, op: Op, memory: &Segments, submitted: Moment) -> Result<(), Violation> {
        let (sectors, parts) = (op.sectors(), op.parts().range());
        // The bytes in front of the first part that was asked for, in its sector, were not.
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
        // Advice may be declined.
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
            let step = self.verb.as_ref().and_then(Verb::step);
            return Err(Violation::Step(format!("{step:?} never ends")));
        }
        if !self.in_flight.is_empty() || self.disk.in_flight() > 0 {
            return Err(Violation::Unanswered(self.in_flight.len()));
        }
        self.look_back(workload)?;
        let Run { io, disk, operations, chains, .. } = self;
        drop(ManuallyDrop::into_inner(disk));
        let files = chains.first().map(|chain| io.contents(chain)).unwrap_or_default();
        Ok(End { fault_happened: io.fault_happened(), files, operations })
    }
}

impl Run {
    /// Reads once more around everything that was asked for. A power loss shows what the files hold; this, what the
    /// disk believes of them.
    fn look_back(&mut self, workload: &[Op]) -> Result<(), Violation> {
        let touched = workload.iter().filter(|op| op.sectors().count > 0);
        let borders = touched.flat_map(|op| [op.sectors().range().start, op.sectors().range().end]);
        for window in around(borders, self.told) {
            let sectors = Sectors { at: window.start, count: window.end - window.start };
            self.submit(Op::Read(sectors), Operation::Read);
            while self.io.pending() > 0 || self.retry() {
                self.finish(0);
            }
        }
        self.answers()?;
        if self.in_flight.is_empty() { Ok(()) } else { Err(Violation::Unanswered(self.in_flight.len())) }
    }
}

/// What a guest writes as one version of some parts of sectors.
fn guest_memory(version: u32, parts: Range<u64>) -> Segments {
    let words = usize::try_from(PART / 8).unwrap_or(0);
    let part = |part: u64| Word::guest(version, part / PARTS).0.to_le_bytes().repeat(words);
    Segments::copy_of(&parts.flat_map(part).collect::<Vec<u8>>())
}
