//! How many threads a disk uses: one, and lanes (`uring`) while its own is saturated and the machine has idle
//! processors.
//!
//! Decisions are made per time window. The thread counts as busy except while it sleeps or polls without finding
//! anything. A lane is started if the thread and its lanes were busy for nearly all of two windows, and processors were
//! idle meanwhile. One is ended if in five windows the same work on one thread less would have left these idle for much
//! of the time. The wide gap between the two thresholds means that a steady load changes nothing.
//!
//! It knows nothing about lanes but their number and their processor time, and reads no clock. Invariant: a disk that
//! may have only one thread is not monitored.

mod processors;

use std::sync::LazyLock;

use disk::size::on_disk;

pub use processors::{Processors, prepare};

use crate::process::fault::for_tests;

/// Long enough to show the effect of a new lane, and for the kernel's count of idle processors, which has steps of 10
/// ms.
const WINDOW: u64 = 200_000_000;
/// The percentage of a window for which a saturated thread is busy; less for lanes, which sleep with work in flight.
const SATURATED: u64 = 90;
const LANES_SATURATED: u64 = 70;
/// Thresholds for tests of the consequences: a busy machine must not delay them.
const EAGER: Saturation = Saturation { owner: 0, lanes: 0, spare: 0 };
/// The number of consecutive windows before a lane is started.
const STARTS: u32 = 2;
/// A lane is not needed if the other threads would be busy for no more than this percentage.
const NEEDLESS: u64 = 60;
/// The number of consecutive windows before a lane is ended.
const ENDS: u32 = 5;
/// The total percentage of a window for which processors must have been idle.
const SPARE: u64 = 50;

/// Returns the number of threads that a test makes every disk use all the time.
pub fn forced() -> Option<usize> {
    static FORCED: LazyLock<Option<usize>> = LazyLock::new(|| for_tests("TAPLINE_DISK_THREADS")?.parse().ok());
    *FORCED
}

/// When threads are saturated, and processors idle, in percent of a window.
#[derive(Clone, Copy)]
struct Saturation {
    owner: u64,
    lanes: u64,
    spare: u64,
}

impl Saturation {
    fn of_environment() -> Saturation {
        match for_tests("TAPLINE_DISK_EAGER") {
            None => Saturation { owner: SATURATED, lanes: LANES_SATURATED, spare: SPARE },
            Some(_) => EAGER,
        }
    }
}

/// A change of the number of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Start one.
    Start,
    /// End one.
    End,
}

/// Decides how many threads a disk uses. Times are in nanoseconds of the disk's clock.
pub struct Threads {
    /// The maximum number of threads, including the disk's own.
    most: usize,
    /// The reduced maximum after a lane was refused.
    refused: Option<usize>,
    /// Whether the maximum was set while the disk was served.
    was_set: bool,
    saturation: Saturation,
    processors: Processors,
    /// The start of the current window.
    begun: u64,
    /// Its end; `None` before the first one.
    until: Option<u64>,
    /// For how long the thread was not busy in it.
    rested: u64,
    /// The number of lanes at its start, and their total processor time.
    lanes: usize,
    lanes_time: u64,
    /// For how long processors had been idle at its start, if that was queried.
    idle: Option<u64>,
    saturated: u32,
    needless: u32,
}

impl Threads {
    /// Makes the decider for a disk that may have `most` threads.
    pub fn new(most: usize, processors: Processors) -> Threads {
        Threads {
            most,
            refused: None,
            was_set: false,
            saturation: Saturation::of_environment(),
            processors,
            begun: 0,
            until: None,
            rested: 0,
            lanes: 0,
            lanes_time: 0,
            idle: None,
            saturated: 0,
            needless: 0,
        }
    }

    /// Returns the maximum number of threads.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Sets the maximum number of threads.
    pub fn set_most(&mut self, most: usize) {
        (self.most, self.refused, self.until, self.was_set) = (most, None, None, true);
    }

    /// Returns the maximum for the successor, if it differs from the command line.
    pub fn handed(&self) -> Option<usize> {
        self.was_set.then_some(self.most)
    }

    /// Called when a lane was refused: limits the disk to `threads`, until the maximum is set again.
    pub fn stay_at(&mut self, threads: usize) {
        self.refused = Some(threads);
    }

    /// Returns whether the disk may have more than one thread.
    #[inline]
    pub fn are_watched(&self) -> bool {
        self.most > 1
    }

    /// Called when the thread has slept, or polled without finding anything, for `time`.
    #[inline]
    pub fn rested(&mut self, time: u64) {
        self.rested = self.rested.saturating_add(time);
    }

    /// Returns whether [`Threads::judge`] is due.
    #[inline]
    pub fn are_due(&self, now: u64) -> bool {
        self.until.is_none_or(|until| now >= until)
    }

    /// Decides about lanes at the end of a window, with their present number and their total processor time.
    pub fn judge(&mut self, now: u64, lanes: usize, lanes_time: u64) -> Option<Change> {
        let change = match self.until {
            Some(_) if lanes == self.lanes => self.change(now, lanes_time.saturating_sub(self.lanes_time)),
            // The first window, or one in which lanes have started or ended, which shows nothing.
            _ => None,
        };
        if change.is_some() || lanes != self.lanes {
            (self.saturated, self.needless, self.idle) = (0, 0, None);
        }
        (self.begun, self.until, self.rested) = (now, Some(now.saturating_add(WINDOW)), 0);
        (self.lanes, self.lanes_time) = (lanes, lanes_time);
        change
    }

    fn change(&mut self, now: u64, lanes_busy: u64) -> Option<Change> {
        let span = now.saturating_sub(self.begun);
        let busy = span.saturating_sub(self.rested);
        let others = on_disk(self.lanes);
        let Saturation { owner, lanes, spare } = self.saturation;
        let is_saturated = busy >= share(span, owner) && lanes_busy >= share(span * others, lanes);
        let is_needless = others > 0 && busy.saturating_add(lanes_busy) < share(span * others, NEEDLESS);
        self.saturated = if is_saturated { self.saturated + 1 } else { 0 };
        self.needless = if is_needless { self.needless + 1 } else { 0 };
        if self.needless >= ENDS {
            return Some(Change::End);
        }
        let most = self.most.min(self.processors.count()).min(self.refused.unwrap_or(usize::MAX));
        let may_start = is_saturated && self.lanes + 1 < most;
        if !may_start {
            self.idle = None;
            return None;
        }
        // Idle time from before the last change of threads does not count: the same windows are compared.
        let idle = self.processors.idle();
        let before = std::mem::replace(&mut self.idle, idle);
        let are_idle = before.zip(idle).is_some_and(|(before, idle)| idle.saturating_sub(before) >= share(span, spare));
        (are_idle && self.saturated >= STARTS).then_some(Change::Start)
    }
}

/// Returns a percentage of a time.
fn share(time: u64, hundredths: u64) -> u64 {
    time / 100 * hundredths
}

#[cfg(test)]
mod test {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const STEP: u64 = 1_000_000;

    /// A simulated machine in steps of 1 ms, with a disk on it.
    struct Machine {
        threads: Threads,
        now: u64,
        lanes: usize,
        lanes_time: u64,
        /// The total idle time of its processors.
        idle: Arc<AtomicU64>,
        changes: Vec<(u64, Change)>,
    }

    impl Machine {
        fn new(most: usize, processors: usize) -> Machine {
            let idle = Arc::new(AtomicU64::new(0));
            let read = Arc::clone(&idle);
            let processors = Processors::by(processors, move || Some(read.load(Ordering::Relaxed)));
            let threads = Threads::new(most, processors);
            Machine { threads, now: STEP, lanes: 0, lanes_time: 0, idle, changes: Vec::new() }
        }

        /// Simulates `time` ms in which all threads share work of `work` percent of one thread's time, and processors
        /// are idle for `idle` percent. Returns the changes of lanes.
        fn runs(&mut self, time: u64, work: u64, idle: u64) -> Vec<Change> {
            self.changes.clear();
            for _ in 0..time {
                let threads = u64::try_from(self.lanes).unwrap() + 1;
                let each = (work / threads).min(100);
                self.threads.rested(STEP / 100 * (100 - each));
                self.lanes_time += STEP / 100 * each * (threads - 1);
                self.idle.fetch_add(STEP / 100 * idle, Ordering::Relaxed);
                self.now += STEP;
                if !(self.threads.are_watched() && self.threads.are_due(self.now)) {
                    continue;
                }
                let change = self.threads.judge(self.now, self.lanes, self.lanes_time);
                match change {
                    Some(Change::Start) => self.lanes += 1,
                    Some(Change::End) => self.lanes -= 1,
                    None => {}
                }
                self.changes.extend(change.map(|change| (self.now, change)));
            }
            self.changes.iter().map(|(_, change)| *change).collect()
        }
    }

    use Change::{End, Start};

    #[test]
    fn a_saturated_thread_gets_lanes_and_loses_them_when_idle() {
        let mut machine = Machine::new(8, 8);
        assert_eq!(machine.runs(5000, 250, 100), [Start, Start], "two and a half threads' work for three threads");
        assert!(machine.changes[0].0 <= 4 * WINDOW, "within a second: {:?}", machine.changes);
        assert_eq!(machine.runs(5000, 0, 800), [End, End]);
        assert_eq!(machine.runs(5000, 250, 100), [Start, Start], "and again");
    }

    #[test]
    fn a_thread_that_is_nearly_saturated_stays_alone() {
        let mut machine = Machine::new(8, 8);
        assert_eq!(machine.runs(20000, 85, 700), []);
    }

    #[test]
    fn a_steady_load_between_the_thresholds_changes_nothing() {
        for work in [62, 80, 100, 150, 179] {
            let mut machine = Machine::new(2, 8);
            assert_eq!(machine.runs(2000, 200, 600), [Start]);
            assert_eq!(machine.runs(60000, work, 600), [], "with {work} hundredths");
        }
        let mut machine = Machine::new(2, 8);
        assert_eq!(machine.runs(2000, 200, 600), [Start]);
        assert_eq!(machine.runs(60000, 50, 600), [End], "and does not come back");
    }

    #[test]
    fn a_short_burst_starts_nothing_and_a_short_pause_ends_nothing() {
        let mut machine = Machine::new(2, 8);
        for _ in 0..30 {
            assert_eq!((machine.runs(250, 100, 700), machine.runs(250, 5, 700)), (vec![], vec![]));
        }
        assert_eq!(machine.runs(2000, 200, 600), [Start]);
        for _ in 0..30 {
            assert_eq!((machine.runs(800, 0, 700), machine.runs(300, 150, 600)), (vec![], vec![]));
        }
    }

    #[test]
    fn without_an_idle_processor_no_lane_is_started() {
        let mut machine = Machine::new(4, 8);
        assert_eq!(machine.runs(10000, 300, 40), []);
        assert_eq!(machine.runs(2000, 100, 60), [Start], "as soon as there is half of one");
    }

    #[test]
    fn threads_never_exceed_the_processors_or_the_maximum() {
        assert_eq!(Machine::new(4, 1).runs(10000, 400, 100), []);
        assert_eq!(Machine::new(4, 2).runs(10000, 400, 100), [Start]);
        assert_eq!(Machine::new(3, 8).runs(10000, 400, 100), [Start, Start]);
        let mut one = Machine::new(1, 8);
        assert!(!one.threads.are_watched());
        assert_eq!(one.runs(10000, 100, 700), []);
    }

    #[test]
    fn a_refused_lane_is_not_retried_until_the_maximum_is_set() {
        let mut machine = Machine::new(4, 8);
        assert_eq!(machine.runs(5000, 150, 100), [Start]);
        machine.threads.stay_at(2);
        assert_eq!(machine.runs(5000, 400, 100), []);
        machine.threads.set_most(3);
        assert_eq!(machine.runs(5000, 400, 100), [Start]);
    }

    #[test]
    fn no_lane_is_started_if_idle_processors_are_unknown() {
        let mut machine = Machine::new(4, 8);
        machine.threads.processors = Processors::by(8, || None);
        assert_eq!(machine.runs(10000, 400, 0), []);
    }

    #[test]
    fn a_window_with_a_long_sleep_is_not_saturated() {
        let mut machine = Machine::new(2, 8);
        machine.threads.judge(0, 0, 0);
        // Asleep for a minute, then busy for 200 ms: that is the end of one window, not of two.
        machine.now = 60_000_000_000;
        machine.threads.rested(60_000_000_000);
        for _ in 0..2 {
            machine.now += WINDOW;
            assert_eq!(machine.threads.judge(machine.now, 0, 0), None);
        }
    }

    #[test]
    fn a_lower_maximum_takes_effect_at_once() {
        let mut machine = Machine::new(4, 8);
        machine.runs(5000, 400, 100);
        assert_eq!(machine.lanes, 3);
        machine.threads.set_most(2);
        assert_eq!(machine.threads.most(), 2);
        // The verb that sets the maximum ends the excess lanes; none is started for them.
        machine.lanes = 1;
        assert_eq!(machine.runs(5000, 400, 100), []);
    }
}
