//! What the thread does between two iterations: it polls, or sleeps.
//!
//! It knows no protocol and no format. Invariant: it sleeps only when the server has agreed to be woken.

use std::time::Duration;

use disk::Until;
use transport::Server;

use super::EventLoop;
use crate::process::failure::{Exit, Failure};
use crate::serve::polling::{Awaited, Nap};

impl<S: Server> EventLoop<S> {
    /// Serves the disk until a signal ends it.
    pub fn run(mut self) -> Result<Exit, Failure> {
        while !self.stopping {
            let mut polled = false;
            let busy = self.turn()?.more || self.look_again(&mut polled)?;
            if self.threads.are_watched() {
                self.mind_lanes();
            }
            let asleep = !busy && !self.stopping && !self.is_asked() && self.may_sleep();
            if asleep {
                self.wait(polled)?;
            }
            self.stats.round(asleep);
        }
        self.shut_down()
    }

    /// Waits until something happens. `polled`: polling has found nothing before.
    fn wait(&mut self, polled: bool) -> Result<(), Failure> {
        self.mind_quiet();
        let (awaited, begun) = (self.awaited(), self.time());
        let found = match self.polling.nap(awaited, begun) {
            None => false,
            Some(Nap { sleep, look }) => {
                self.engine.limit_sleep(Duration::from_nanos(sleep));
                self.sleep()?;
                self.look_for(look)?
            }
        };
        if !found && !self.stopping {
            self.sleep()?;
        }
        let ended = self.time();
        self.polling.waited(awaited, polled, begun, ended);
        Ok(())
    }

    /// Sleeps until something happens, or for as long as it may.
    fn sleep(&mut self) -> Result<(), Failure> {
        let begun = self.time();
        self.reap(Until::Any)?;
        let woken = self.time();
        self.threads.rested(woken.saturating_sub(begun));
        self.seen = Some(woken);
        Ok(())
    }

    /// Returns what the thread would wait for now.
    fn awaited(&self) -> Awaited {
        if self.disk.in_flight() == 0 { Awaited::Peer } else { Awaited::Storage }
    }

    /// Polls for more to do, for as long as polling has paid so far. Returns whether something was found.
    fn look_again(&mut self, polled: &mut bool) -> Result<bool, Failure> {
        let (awaited, now) = (self.awaited(), self.time());
        let budget = self.polling.budget(awaited, now);
        let may = budget > 0 && !self.stopping && !self.admission.is_in_quarantine();
        if !may {
            return Ok(false);
        }
        let found = self.look_for(budget)?;
        self.polling.polled(awaited, found);
        *polled = true;
        Ok(found)
    }

    /// Polls for `budget` nanoseconds, or until other threads want the processor. Returns whether something was found.
    fn look_for(&mut self, budget: u64) -> Result<bool, Failure> {
        let begun = self.time();
        let (mut now, mut found) = (begun, false);
        while !found && !self.stopping && now < begun.saturating_add(budget) {
            found = self.turn()?.found;
            if !found {
                std::hint::spin_loop();
                self.time = None;
            }
            let before = std::mem::replace(&mut now, self.time());
            if self.polling.must_stop(before, now) {
                break;
            }
        }
        let looked = now.saturating_sub(begun);
        if !found {
            self.threads.rested(looked);
        }
        self.stats.polled(found, looked);
        Ok(found)
    }
}
