//! Starts and ends lanes of the engine as decided by [`Threads`](crate::serve::threads::Threads).
//!
//! It knows no protocol and no format. Invariant: failing to start a lane is no error; the thread does the work.

use transport::Server;

use super::EventLoop;
use crate::process::log::say;
use crate::serve::threads::{Change, forced};

impl<S: Server> EventLoop<S> {
    /// Starts or ends a lane, if that is due.
    pub(super) fn mind_lanes(&mut self) {
        let now = self.time();
        if !self.threads.are_due(now) {
            return;
        }
        self.note_lane_trouble();
        let time = u64::try_from(self.engine.lane_time().as_nanos()).unwrap_or(u64::MAX);
        match self.threads.judge(now, self.engine.lane_count(), time) {
            Some(Change::Start) => {
                if let Err(error) = self.engine.start_lane() {
                    self.without_lane(error);
                }
            }
            Some(Change::End) if forced().is_none() => self.engine.end_lane(),
            Some(Change::End) | None => {}
        }
    }

    /// Returns whether there are lanes that an idle disk would end.
    pub(super) fn has_lanes_to_end(&self) -> bool {
        self.engine.lane_count() > 0 && forced().is_none()
    }

    /// Ends the lanes of an idle disk.
    pub(super) fn end_idle_lanes(&mut self) {
        while self.has_lanes_to_end() {
            self.engine.end_lane();
        }
    }

    fn note_lane_trouble(&mut self) {
        while let Some(trouble) = self.engine.take_lane_trouble() {
            self.without_lane(trouble);
        }
    }

    /// Continues without a lane. A refused lane is not retried automatically.
    fn without_lane(&mut self, why: impl std::fmt::Display) {
        let threads = self.engine.lane_count() + 1;
        self.threads.stay_at(threads);
        say(format_args!("no more threads than {threads}: {why} (`tapline disk SOCKET threads N` has it tried again)"));
    }
}
