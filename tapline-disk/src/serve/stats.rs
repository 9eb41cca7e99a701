//! I/O statistics of a served disk: in its page of shared memory, and as one line of JSON.
//!
//! The page contains everything ([`::stats`]); this module defines what a request of the disk is there. Requests in
//! flight count up to now. Invariant: the successor continues counting, from the page if it has that, else from the
//! counters that are passed.

use std::fs::File;
use std::io;
use std::path::Path;

use ::stats::{Clock, Count, Kind, Outcome, Page, Slot, Spent};
use control::answer::{self, Condition};
use disk::{Operation, Request, ShapeCounts, Span, Status, Times};
use probe::probe_lazy;
use serde::{Deserialize, Serialize};

use crate::serve::polling;

/// The I/O statistics of a served disk.
pub struct Stats {
    clock: Clock,
    /// The start of counting, in nanoseconds of the clock.
    started: u64,
    /// The counters of earlier processes, unless they are in the page.
    before: Counters,
    page: Page,
    /// The number of requests received.
    come: u64,
    /// The transfers split and merged by this process that the page has already counted.
    shaped: ShapeCounts,
}

/// The counters, as passed to the successor of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Nanoseconds since the start; other times are relative to that.
    elapsed_ns: u64,
    reads: KindCounters,
    writes: KindCounters,
    flushes: KindCounters,
    discards: KindCounters,
    /// Loop iterations, and sleeps in them.
    rounds: u64,
    sleeps: u64,
    /// How many times memory was released because the disk was idle.
    rests: u64,
    /// Polls before sleeping that have found something, and that have not.
    polls: (u64, u64),
    /// Total nanoseconds of polling.
    polled_ns: u64,
    /// The polling settings, which the successor keeps.
    pub polling: Option<polling::Settings>,
    /// The maximum number of threads, if it was set, which the successor keeps too.
    pub threads: Option<usize>,
    /// Requests failed because they had killed processes.
    pub fatal: u64,
    /// Whether they are in the statistics page as well.
    in_page: bool,
}

/// Counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct KindCounters {
    come: u64,
    answered: u64,
    bytes: u64,
    /// Sums of nanoseconds since the start: the difference is the total duration of completed requests.
    come_ns: u128,
    answered_ns: u128,
}

impl Stats {
    /// Makes statistics in `page` that continue the counters of earlier processes.
    pub fn resumed(counters: Counters, clock: Clock, page: Page) -> Stats {
        // If the clock did not run meanwhile, the durations of requests stay right, because they are differences.
        let started = ::stats::monotonic().saturating_sub(counters.elapsed_ns);
        let before = if counters.in_page && page.is_continued() { Counters::default() } else { counters };
        Stats { clock, started, before, page, come: 0, shaped: ShapeCounts::default() }
    }

    /// Returns all statistics for the successor. `shared`: it receives the page as well.
    pub fn counters(&self, shared: bool) -> Counters {
        let now = ::stats::monotonic();
        let kind = |kinds: &[Kind], before: KindCounters| {
            kinds.iter().fold(before, |sum, kind| self.counters_of(*kind, now).with(sum))
        };
        let count = |count, before: u64| before + self.page.counted(count);
        let before = &self.before;
        Counters {
            elapsed_ns: now.saturating_sub(self.started),
            reads: kind(&[Kind::Read], before.reads),
            writes: kind(&[Kind::Write], before.writes),
            flushes: kind(&[Kind::Flush], before.flushes),
            discards: kind(&[Kind::Discard, Kind::WriteZeroes], before.discards),
            rounds: count(Count::Rounds, before.rounds),
            sleeps: count(Count::Sleeps, before.sleeps),
            rests: count(Count::Rests, before.rests),
            polls: (count(Count::PollsHit, before.polls.0), count(Count::PollsMissed, before.polls.1)),
            polled_ns: count(Count::PolledTime, before.polled_ns),
            polling: before.polling,
            threads: before.threads,
            fatal: before.fatal,
            in_page: shared,
        }
    }

    /// Sets how many transfers this process has split and merged; returns the totals since the page began.
    pub fn shaped(&mut self, now: ShapeCounts) -> ShapeCounts {
        let before = std::mem::replace(&mut self.shaped, now);
        if now != before {
            self.page.count(Count::Splits, now.splits - before.splits);
            self.page.count(Count::Merges, now.merges - before.merges);
            self.page.count(Count::Redone, now.redone - before.redone);
        }
        let counted = |count| self.page.counted(count);
        ShapeCounts { splits: counted(Count::Splits), merges: counted(Count::Merges), redone: counted(Count::Redone) }
    }

    fn counters_of(&self, kind: Kind, now: u64) -> KindCounters {
        let (answered, bytes, sum) = self.page.totals(kind);
        let (in_flight, ages) = self.page.in_flight(kind, now);
        // The sum of the arrival times of requests in flight: their number times now, minus their ages.
        let ages = u128::from(ages);
        let come_ns = (u128::from(in_flight) * u128::from(now.saturating_sub(self.started))).saturating_sub(ages);
        KindCounters { come: answered + in_flight, answered, bytes, come_ns, answered_ns: u128::from(sum) }
    }

    /// Returns the time in nanoseconds of CLOCK_MONOTONIC.
    #[inline(always)]
    pub fn now(&mut self) -> u64 {
        self.clock.now()
    }

    /// Returns when counting began, by the same clock.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Returns the number of requests received so far.
    pub fn come(&self) -> u64 {
        self.come
    }

    /// Counts a request that was popped at this time; its waiting time is already set.
    #[inline(always)]
    pub fn came(&mut self, request: &mut Request, at: u64) {
        request.taken = at;
        let Some(kind) = kind_of(request.operation()) else { return };
        self.come += 1;
        let Span { at: offset, len } = request.span();
        request.slot = self.page.came(kind, at, offset.0, len).0;
        probe_lazy!(tapline, taken, request.slot, kind, offset.0, len);
    }

    /// Records that an operation of the request in this slot is submitted to the kernel.
    #[inline(always)]
    pub fn submitted(&self, slot: u16, at: u64) {
        probe_lazy!(tapline, submitted, slot);
        self.page.submitted(Slot(slot), at);
    }

    /// Returns the page.
    #[inline(always)]
    pub fn page(&mut self) -> &mut Page {
        &mut self.page
    }

    /// Counts the completion of a request. All requests before [`Stats::published`] have the same completion time.
    #[inline(always)]
    pub fn answered(&mut self, request: &Request, status: Status, times: &Times, at: u64) {
        let Some(kind) = kind_of(request.operation()) else { return };
        let spent = Spent {
            seen: request.taken.saturating_sub(u64::from(request.waited)),
            taken: request.taken,
            begun: times.begun,
            ended: times.ended,
            split: times.split,
            queue: times.queue,
        };
        let (Span { at: offset, len }, outcome) = (request.span(), outcome_of(status));
        probe_lazy!(tapline, answered, request.slot, kind, offset.0, len, outcome);
        self.page.ended(kind, Slot(request.slot), len, outcome, &spent, at);
    }

    /// Called when the completions have been published to the peers.
    #[inline(always)]
    pub fn published(&mut self) {
        if self.page.is_due() {
            let now = self.now();
            self.page.publish_batch(now);
        }
    }

    /// Uncounts a request that was returned to its peer.
    pub fn given_back(&mut self, request: &Request) {
        if kind_of(request.operation()).is_some() {
            self.come -= 1;
            self.page.given_back(Slot(request.slot));
        }
    }

    /// Counts a loop iteration. `slept`: it has waited for something to happen.
    #[inline(always)]
    pub fn round(&mut self, slept: bool) {
        self.page.count(Count::Rounds, 1);
        self.page.count(Count::Sleeps, u64::from(slept));
    }

    /// Counts a poll that took `ns`. `hit`: it has found something.
    pub fn polled(&mut self, hit: bool, ns: u64) {
        self.page.count(if hit { Count::PollsHit } else { Count::PollsMissed }, 1);
        self.page.count(Count::PolledTime, ns);
    }

    /// Returns the polls that have found something, those that have not, and their nanoseconds.
    pub fn polls(&self) -> (u64, u64, u64) {
        let Counters { polls, polled_ns, .. } = self.counters(false);
        (polls.0, polls.1, polled_ns)
    }

    /// Counts a request that a limit of the disk has held for `held` nanoseconds.
    pub fn throttled(&mut self, held: u64) {
        self.page.count(Count::Throttled, 1);
        self.page.count(Count::ThrottledNs, held);
    }

    /// Counts a request that the disk's share of its storage has held for `held` nanoseconds.
    pub fn shared(&mut self, held: u64) {
        self.page.count(Count::Shared, 1);
        self.page.count(Count::SharedNs, held);
    }

    /// Returns the number of requests held by limits since the page began, and their total nanoseconds.
    pub fn all_throttled(&self) -> (u64, u64) {
        (self.page.counted(Count::Throttled), self.page.counted(Count::ThrottledNs))
    }

    /// Returns the number of requests held by the disk's share since the page began, and their total nanoseconds.
    pub fn all_shared(&self) -> (u64, u64) {
        (self.page.counted(Count::Shared), self.page.counted(Count::SharedNs))
    }

    /// Counts a release of memory while the disk was idle.
    pub fn memory_given_back(&mut self) {
        self.page.count(Count::Rests, 1);
    }

    /// Formats all statistics as one line without a terminator.
    pub fn line(&self, condition: Condition, lanes: Vec<u64>) -> String {
        serde_json::to_string(&answer::Stats { lanes, ..self.reply(condition) })
            .unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// Returns all statistics so far.
    pub fn reply(&self, condition: Condition) -> answer::Stats {
        let Counters { elapsed_ns: now, reads, writes, flushes, discards, rounds, sleeps, rests, polls, .. } =
            self.counters(false);
        answer::Stats {
            elapsed_ns: now,
            reads: reads.reply(now),
            writes: writes.reply(now),
            flushes: flushes.reply(now),
            discards: discards.reply(now),
            rounds,
            sleeps,
            rests,
            polls_hit: polls.0,
            polls_missed: polls.1,
            lanes: Vec::new(),
            condition,
        }
    }
}

impl Counters {
    /// Uncounts a request that arrived at `came_at`, in nanoseconds since the start, and was returned to its peer.
    pub fn given_back(&mut self, operation: Operation, came_at: u64) {
        let kind = match kind_of(operation) {
            Some(Kind::Read) => &mut self.reads,
            Some(Kind::Write) => &mut self.writes,
            Some(Kind::Flush) => &mut self.flushes,
            Some(Kind::Discard | Kind::WriteZeroes) => &mut self.discards,
            None => return,
        };
        kind.come -= 1;
        kind.come_ns = kind.come_ns.saturating_sub(u128::from(came_at));
    }
}

impl KindCounters {
    fn with(self, other: KindCounters) -> KindCounters {
        KindCounters {
            come: self.come + other.come,
            answered: self.answered + other.answered,
            bytes: self.bytes + other.bytes,
            come_ns: self.come_ns + other.come_ns,
            answered_ns: self.answered_ns + other.answered_ns,
        }
    }

    fn reply(&self, now: u64) -> answer::Counters {
        let in_flight = self.come - self.answered;
        let until_now = u128::from(in_flight) * u128::from(now);
        let sum = (self.answered_ns + until_now).saturating_sub(self.come_ns);
        answer::Counters { count: self.answered, bytes: self.bytes, sum_ns: narrow(sum), in_flight }
    }
}

fn kind_of(operation: Operation) -> Option<Kind> {
    match operation {
        Operation::Read => Some(Kind::Read),
        Operation::Write { .. } | Operation::Patch { .. } => Some(Kind::Write),
        Operation::Flush => Some(Kind::Flush),
        Operation::Discard => Some(Kind::Discard),
        Operation::WriteZeroes { .. } => Some(Kind::WriteZeroes),
        Operation::Extents { .. } => None,
    }
}

fn outcome_of(status: Status) -> Outcome {
    match status {
        Status::Done => Outcome::Done,
        Status::Failed => Outcome::Failed,
        Status::NoSpace => Outcome::NoSpace,
        Status::Refused => Outcome::Refused,
        Status::Unsupported => Outcome::Unsupported,
    }
}

/// Opens the file to which lines are appended. It is reopened for each line, so that it may be rotated.
pub fn open_file(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

fn narrow(ns: u128) -> u64 {
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use disk::{DiskOffset, Geometry, Token};
    use memory::Segments;

    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };

    fn stats(counters: Counters) -> Stats {
        Stats::resumed(counters, Clock::new(), Page::anonymous().unwrap())
    }

    fn request(operation: Operation, len: usize) -> Request {
        let memory = if operation == Operation::Flush { Segments::empty() } else { Segments::zeroed(len) };
        let span = Span { at: DiskOffset(0), len: u64::try_from(len).unwrap() };
        Request::new(operation, span, memory, Token(1), &GEOMETRY).unwrap()
    }

    /// Serves a request of that kind in `ns`.
    fn serve(stats: &mut Stats, operation: Operation, len: usize, ns: u64) {
        let mut request = request(operation, len);
        let now = stats.now();
        stats.came(&mut request, now);
        stats.answered(&request, Status::Done, &Times::default(), now + ns);
        stats.page().publish_batch(now + ns);
        request.retire();
    }

    #[test]
    fn requests_in_flight_count_up_to_now() {
        let mut stats = stats(Counters::default());
        let mut flush = request(Operation::Flush, 0);
        let came = stats.now();
        stats.came(&mut flush, came);
        let flushes = stats.reply(Condition::default()).flushes;
        assert_eq!((flushes.count, flushes.in_flight), (0, 1));
        assert!(flushes.sum_ns > 0 && flushes.sum_ns <= ::stats::monotonic() - came);
        stats.given_back(&flush);
        flush.retire();
        assert_eq!((stats.come(), stats.reply(Condition::default()).flushes), (0, answer::Counters::default()));
    }

    #[test]
    fn the_next_process_continues_the_counters() {
        let mut first = stats(Counters::default());
        serve(&mut first, Operation::Read, 4096, 3000);
        first.round(true);
        first.polled(true, 3000);
        let counters = first.counters(false);
        let passed = serde_json::to_string(&counters).unwrap();
        let mut next = stats(serde_json::from_str(&passed).unwrap());
        assert!(next.now() - next.started() >= counters.elapsed_ns);
        serve(&mut next, Operation::Read, 512, 1000);
        next.round(false);
        next.polled(false, 4000);
        let all = next.reply(Condition::default());
        assert_eq!((all.reads.count, all.reads.bytes, all.reads.sum_ns), (2, 4608, 4000));
        assert_eq!((all.rounds, all.sleeps, all.polls_hit, all.polls_missed), (2, 1, 1, 1));
        assert_eq!(next.polls(), (1, 1, 7000));
    }

    #[test]
    fn counters_that_are_in_the_page_are_counted_once() {
        let file = tempfile::tempfile().unwrap();
        let page = || Page::begin(file.try_clone().unwrap(), ::stats::Source::Kernel, "{}").unwrap();
        let mut first = Stats::resumed(Counters::default(), Clock::new(), page());
        serve(&mut first, Operation::Read, 4096, 3000);
        let (shared, alone) = (first.counters(true), first.counters(false));
        drop(first);
        for (counters, count) in [(shared, 1), (alone, 2)] {
            let next = Stats::resumed(counters, Clock::new(), page());
            assert_eq!(next.reply(Condition::default()).reads.count, count);
        }
        let fresh = Stats::resumed(shared, Clock::new(), Page::anonymous().unwrap());
        assert_eq!(fresh.reply(Condition::default()).reads.count, 1, "the page was not there");
    }

    #[test]
    fn the_line_is_json_with_every_kind() {
        let mut stats = stats(Counters::default());
        serve(&mut stats, Operation::Write { durable: true }, 4096, 4);
        let line: serde_json::Value =
            serde_json::from_str(&stats.line(Condition { waiting: 2, ..Condition::default() }, Vec::new())).unwrap();
        assert_eq!(line["writes"]["bytes"], 4096);
        assert_eq!(line["writes"]["sum_ns"], 4);
        assert_eq!(line["reads"]["count"], 0);
        assert_eq!((&line["broken"], &line["waiting"]), (&false.into(), &2.into()));
    }
}
