//! How long each request spends at what, by the times that the disk is given.
//!
//! Knows no clock: who drives the disk says what time it is, and one that never does finds zeroes. Keeps: at any moment
//! a request is in one stage only, so that its stages add up; it waits for the storage while at least one thing that it
//! waits for is with the engine.

use probe::probe_lazy;

/// The time of a request by stage, in nanoseconds. Between `begun` and `ended` it was split, queued, or with the
/// storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// When its first operation was submitted, or found the engine full; zero: it needed none.
    pub begun: u64,
    /// When its last operation ended.
    pub ended: u64,
    /// How long none of its operations was under way, between two of them.
    pub split: u64,
    /// How long one waited in front of a full engine.
    pub queue: u64,
}

impl Times {
    /// How long an operation was submitted.
    pub fn storage(&self) -> u64 {
        self.ended.saturating_sub(self.begun).saturating_sub(self.split).saturating_sub(self.queue)
    }
}

/// Where a request is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// With the disk: nothing of it is under way.
    #[default]
    Here,
    /// Something was pushed since the last batch was submitted.
    Pushed,
    /// Something was pushed, and the engine has no room for it.
    Queued,
    /// Something was submitted.
    Submitted,
}

/// The stages of one request.
#[derive(Clone, Copy, Debug, Default)]
struct Stages {
    times: Times,
    /// The number of things that it waits for: operations of the engine, metadata, a round.
    waits: u32,
    state: State,
    /// The slot of the request.
    slot: u16,
}

impl Stages {
    /// It waits for one thing more. Whether that is the first one.
    #[inline(always)]
    fn wait_begun(&mut self) -> bool {
        self.waits += 1;
        let first = self.waits == 1;
        if first {
            self.state = State::Pushed;
            probe_lazy!(tapline, mapped, self.slot);
        }
        first
    }

    /// One of the things it waits for has ended, at `now`.
    #[inline(always)]
    fn wait_ended(&mut self, now: u64) {
        debug_assert!(self.waits > 0, "nothing was waited for");
        self.waits = self.waits.saturating_sub(1);
        if self.waits == 0 {
            match std::mem::take(&mut self.state) {
                // Nothing had to be submitted: a round with nothing to write, a block that had come.
                State::Pushed => return,
                State::Queued => self.times.queue += now.saturating_sub(self.times.ended),
                State::Submitted | State::Here => {}
            }
            self.times.ended = now;
            probe_lazy!(tapline, completed, self.slot);
        }
    }

    /// Whether something of it was pushed, and nothing submitted.
    #[inline(always)]
    fn is_pushed(&self) -> bool {
        matches!(self.state, State::Pushed | State::Queued)
    }

    /// Whether it waits for nothing.
    fn is_here(&self) -> bool {
        self.waits == 0
    }

    /// What it waits for lies in front of a full engine.
    fn queued(&mut self, now: u64) {
        self.begun(now);
        self.state = State::Queued;
    }

    #[inline(always)]
    fn submitted(&mut self, now: u64) {
        match self.state {
            State::Queued => self.times.queue += now.saturating_sub(self.times.ended),
            _ => self.begun(now),
        }
        self.times.ended = now;
        self.state = State::Submitted;
    }

    /// Until its end is known, that is when the present stage began.
    #[inline(always)]
    fn begun(&mut self, now: u64) {
        if self.times.begun == 0 {
            self.times.begun = now;
        } else {
            self.times.split += now.saturating_sub(self.times.ended);
        }
        self.times.ended = now;
    }
}

const NONE: Times = Times { begun: 0, ended: 0, split: 0, queue: 0 };

/// The stages of all requests, by their numbers.
#[derive(Debug)]
pub(super) struct Waiting {
    stages: Vec<Stages>,
    /// Whether the driver says what time it is.
    is_timed: bool,
    /// If so, those of which something was pushed, and not submitted yet.
    pushed: Vec<u32>,
    /// The time of what has ended.
    now: u64,
}

impl Waiting {
    pub fn with_capacity(size: usize) -> Waiting {
        Waiting { stages: Vec::with_capacity(size), is_timed: false, pushed: Vec::new(), now: 0 }
    }

    /// From now on the driver says what time it is.
    pub fn time(&mut self) {
        self.is_timed = true;
    }

    /// A request has begun, and waits for nothing yet.
    #[inline(always)]
    pub fn begin(&mut self, number: u32, slot: u16) {
        match self.stages.get_mut(number as usize) {
            Some(stages) => *stages = Stages { slot, ..Stages::default() },
            None => self.append(number, slot),
        }
    }

    #[cold]
    fn append(&mut self, number: u32, slot: u16) {
        self.stages.resize(number as usize + 1, Stages { slot, ..Stages::default() });
    }

    /// The time of a request by stage.
    #[inline(always)]
    pub fn times(&self, number: u32) -> &Times {
        self.stages.get(number as usize).map_or(&NONE, |stages| &stages.times)
    }

    /// Whether a request waits for nothing.
    pub fn is_for_nothing(&self, number: u32) -> bool {
        self.stages.get(number as usize).is_none_or(Stages::is_here)
    }

    /// A request waits for one thing more.
    #[inline(always)]
    pub fn wait_begun(&mut self, number: u32) {
        if self.stages.get_mut(number as usize).is_some_and(Stages::wait_begun) && self.is_timed {
            self.pushed.push(number);
        }
    }

    /// One of the things that a request waits for has ended.
    #[inline(always)]
    pub fn wait_ended(&mut self, number: u32) {
        if let Some(stages) = self.stages.get_mut(number as usize) {
            stages.wait_ended(self.now);
        }
    }

    /// Operations that have ended since the last call count as ended at `now`.
    #[inline(always)]
    pub fn ended_at(&mut self, now: u64) {
        self.now = now;
    }

    /// Operations that were pushed are submitted now. Calls `each` with the slots of their requests.
    #[inline(always)]
    pub fn submitted_at(&mut self, now: u64, mut each: impl FnMut(u16)) {
        for number in &self.pushed {
            let stages = self.stages.get_mut(*number as usize);
            if let Some(stages) = stages.filter(|stages| stages.is_pushed()) {
                stages.submitted(now);
                each(stages.slot);
            }
        }
        self.pushed.clear();
    }

    /// The engine has no room for some of what was pushed: that all of it is submitted is said later.
    #[cold]
    pub fn queued_at(&mut self, now: u64) {
        for number in &self.pushed {
            let stages = self.stages.get_mut(*number as usize);
            if let Some(stages) = stages.filter(|stages| stages.state == State::Pushed) {
                stages.queued(now);
            }
        }
    }

    /// Whether something was pushed and not submitted yet.
    #[inline(always)]
    pub fn has_pushed(&self) -> bool {
        !self.pushed.is_empty()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_request_with_one_operation_waits_for_the_storage_from_its_submission_on() {
        let mut stages = Stages::default();
        assert!(stages.wait_begun());
        stages.submitted(130);
        stages.wait_ended(1000);
        assert_eq!(stages.times, Times { begun: 130, ended: 1000, split: 0, queue: 0 });
        assert_eq!(stages.times.storage(), 870);
        assert!(stages.is_here());
    }

    #[test]
    fn what_lies_between_two_operations_is_split_and_what_overlaps_is_counted_once() {
        let mut stages = Stages::default();
        stages.wait_begun();
        assert!(!stages.wait_begun(), "both are begun at once");
        stages.submitted(110);
        stages.wait_ended(300);
        stages.wait_ended(400);
        stages.wait_begun();
        stages.queued(450);
        stages.submitted(470);
        stages.wait_ended(500);
        assert_eq!(stages.times, Times { begun: 110, ended: 500, split: 50, queue: 20 });
        assert_eq!(stages.times.storage(), 290 + 30);
    }

    #[test]
    fn what_ends_before_it_was_submitted_was_queued_or_waited_for_nothing() {
        let mut stages = Stages::default();
        stages.wait_begun();
        stages.wait_ended(200);
        assert_eq!(stages.times, Times::default(), "it waited for nothing");
        stages.wait_begun();
        stages.queued(250);
        stages.wait_ended(300);
        assert_eq!(stages.times, Times { begun: 250, ended: 300, split: 0, queue: 50 });
    }

    #[test]
    fn nothing_is_remembered_for_a_driver_without_a_clock() {
        let mut waiting = Waiting::with_capacity(1);
        for is_timed in [false, true] {
            waiting.begin(0, 7);
            waiting.wait_begun(0);
            assert_eq!(waiting.has_pushed(), is_timed);
            waiting.wait_ended(0);
            waiting.time();
        }
        let mut slots = Vec::new();
        waiting.begin(0, 7);
        waiting.wait_begun(0);
        waiting.submitted_at(100, |slot| slots.push(slot));
        assert_eq!((slots, waiting.has_pushed()), (vec![7], false));
    }
}
