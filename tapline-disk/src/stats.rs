//! I/O statistics of a served disk, as one line of JSON.
//!
//! The time of requests is measured by Little's law: the sum of their completion times minus the sum of their arrival
//! times is the sum of their durations, so no request need be remembered. The result is exact when nothing is in
//! flight, and is corrected for what is.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use control::answer::{self, Condition};
use disk::Operation;
use serde::{Deserialize, Serialize};

/// The I/O statistics of a served disk.
pub struct Stats {
    started: Instant,
    counters: Counters,
}

/// The counters, as a process hands them to the one that takes its place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Nanoseconds since the start, where times are counted from.
    elapsed_ns: u64,
    reads: Kind,
    writes: Kind,
    flushes: Kind,
    discards: Kind,
    /// Rounds of the loop, and how often it slept: how hard it works for a request.
    rounds: u64,
    sleeps: u64,
    /// How many times memory was released because the disk was idle.
    rests: u64,
    /// Looks for more work before sleeping that have found some, and that have not.
    polls: (u64, u64),
    /// Requests that were answered with an error since the disk would have died of them.
    pub fatal: u64,
}

/// Counters of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Kind {
    come: u64,
    answered: u64,
    bytes: u64,
    /// Sums of nanoseconds since the start.
    come_ns: u128,
    answered_ns: u128,
}

impl Stats {
    /// Goes on counting where a process before this one has stopped, if there was one.
    pub fn resumed(counters: Counters) -> Stats {
        let now = Instant::now();
        // A clock that did not run then: the durations of requests are differences, and stay right.
        let started = now.checked_sub(Duration::from_nanos(counters.elapsed_ns)).unwrap_or(now);
        Stats { started, counters }
    }

    /// All statistics, for the next process; `polls` are this process's polls before sleeping.
    pub fn counters(&self, polls: (u64, u64)) -> Counters {
        let (hit, missed) = self.counters.polls;
        let polls = (hit + polls.0, missed + polls.1);
        Counters { elapsed_ns: self.clock(), polls, ..self.counters }
    }

    /// Nanoseconds since the start, to be read once for a batch of requests.
    pub fn clock(&self) -> u64 {
        narrow(self.started.elapsed().as_nanos())
    }

    /// The number of requests received so far.
    pub fn come(&self) -> u64 {
        let Counters { reads, writes, flushes, discards, .. } = self.counters;
        [reads, writes, flushes, discards].iter().map(|kind| kind.come).sum()
    }

    /// A request was taken from its peer.
    pub fn came(&mut self, operation: Operation, at: u64) {
        if let Some(kind) = self.counters.kind(operation) {
            kind.come += 1;
            kind.come_ns += u128::from(at);
        }
    }

    /// A request was answered.
    pub fn answered(&mut self, operation: Operation, bytes: u64, at: u64) {
        if let Some(kind) = self.counters.kind(operation) {
            kind.answered += 1;
            kind.bytes += bytes;
            kind.answered_ns += u128::from(at);
        }
    }

    /// A request that came then was given back, as if it had not come.
    pub fn given_back(&mut self, operation: Operation, came_at: u64) {
        self.counters.given_back(operation, came_at);
    }

    /// The loop went round once; `slept`: it waited for something to happen.
    pub fn round(&mut self, slept: bool) {
        self.counters.rounds += 1;
        self.counters.sleeps += u64::from(slept);
    }

    /// Memory was given back, since the disk was not used.
    pub fn memory_given_back(&mut self) {
        self.counters.rests += 1;
    }

    /// All statistics so far, as one line without a terminator; `polls` are this process's polls before sleeping.
    pub fn line(&self, polls: (u64, u64), condition: Condition) -> String {
        let told = self.told(polls, condition);
        serde_json::to_string(&told).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    /// All statistics so far.
    pub fn told(&self, polls: (u64, u64), condition: Condition) -> answer::Stats {
        let Counters { elapsed_ns: now, reads, writes, flushes, discards, rounds, sleeps, rests, polls, .. } =
            self.counters(polls);
        answer::Stats {
            elapsed_ns: now,
            reads: reads.told(now),
            writes: writes.told(now),
            flushes: flushes.told(now),
            discards: discards.told(now),
            rounds,
            sleeps,
            rests,
            polls_hit: polls.0,
            polls_missed: polls.1,
            condition,
        }
    }
}

impl Counters {
    /// A request that came then is not done here, as if it had not come.
    pub fn given_back(&mut self, operation: Operation, came_at: u64) {
        if let Some(kind) = self.kind(operation) {
            kind.come -= 1;
            kind.come_ns -= u128::from(came_at);
        }
    }

    fn kind(&mut self, operation: Operation) -> Option<&mut Kind> {
        match operation {
            Operation::Read => Some(&mut self.reads),
            Operation::Write { .. } | Operation::Patch { .. } => Some(&mut self.writes),
            Operation::Flush => Some(&mut self.flushes),
            Operation::Discard | Operation::WriteZeroes { .. } => Some(&mut self.discards),
            Operation::Extents { .. } => None,
        }
    }
}

impl Kind {
    fn told(&self, now: u64) -> answer::Counters {
        let in_flight = self.come - self.answered;
        let until_now = u128::from(in_flight) * u128::from(now);
        let sum = (self.answered_ns + until_now).saturating_sub(self.come_ns);
        answer::Counters { count: self.answered, bytes: self.bytes, sum_ns: narrow(sum), in_flight }
    }
}

/// The file to which lines are appended. It is reopened for each, so that it may be rotated.
pub fn open_file(path: &Path) -> io::Result<File> {
    File::options().append(true).create(true).open(path)
}

fn narrow(ns: u128) -> u64 {
    u64::try_from(ns).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn durations_are_summed_without_remembering_requests() {
        let mut kind = Kind { come: 2, come_ns: 100 + 200, ..Kind::default() };
        kind.answered = 2;
        kind.answered_ns = 250 + 500;
        assert_eq!(kind.told(1_000_000_000).sum_ns, (250 - 100) + (500 - 200));
    }

    #[test]
    fn requests_in_flight_count_up_to_now() {
        let kind = Kind { come: 1, come_ns: 100, ..Kind::default() };
        let line = kind.told(700);
        assert_eq!((line.count, line.in_flight, line.sum_ns), (0, 1, 600));
    }

    #[test]
    fn returned_requests_are_not_counted() {
        let mut stats = Stats::resumed(Counters::default());
        stats.came(Operation::Flush, 5);
        stats.came(Operation::Flush, 7);
        stats.given_back(Operation::Flush, 7);
        let flushes = stats.counters.flushes.told(9);
        assert_eq!((stats.come(), flushes.in_flight, flushes.sum_ns), (1, 1, 4));
    }

    #[test]
    fn the_next_process_continues_the_counters() {
        let mut stats = Stats::resumed(Counters::default());
        stats.counters.reads =
            Kind { come: 3, answered: 3, bytes: 9, come_ns: u128::MAX / 3, answered_ns: u128::MAX / 2 };
        stats.round(true);
        let told = serde_json::to_string(&stats.counters((5, 7))).unwrap();
        let mut next = Stats::resumed(serde_json::from_str(&told).unwrap());
        assert!(next.clock() >= stats.counters.elapsed_ns);
        next.round(false);
        let all = next.counters((1, 1));
        assert_eq!((all.reads, all.rounds, all.sleeps, all.polls), (stats.counters.reads, 2, 1, (6, 8)));
    }

    #[test]
    fn the_line_is_json_with_every_kind() {
        let mut stats = Stats::resumed(Counters::default());
        stats.came(Operation::Write { durable: true }, 5);
        stats.answered(Operation::Write { durable: true }, 4096, 9);
        let line: serde_json::Value =
            serde_json::from_str(&stats.line((3, 4), Condition { waiting: 2, ..Condition::default() })).unwrap();
        assert_eq!(line["writes"]["bytes"], 4096);
        assert_eq!(line["writes"]["sum_ns"], 4);
        assert_eq!(line["reads"]["count"], 0);
        assert_eq!((&line["broken"], &line["waiting"]), (&false.into(), &2.into()));
    }
}
