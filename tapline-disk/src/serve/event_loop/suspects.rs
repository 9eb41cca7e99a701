//! Requests that may have killed the last process ([`Suspects`](crate::serve::suspects::Suspects)), between the server
//! and the disk.
//!
//! It knows no protocol and no format. Invariant: while there are any, at most one request is in flight; the leaf's
//! redo log says that the process works on it only while the process does nothing else.

use disk::redo::Mark;
use disk::{Request, Span, Status};
use transport::Server;

use super::words::in_words;
use super::{Disclose, EngineWatch, EventLoop};
use crate::process::failure::Failure;
use crate::process::fault;
use crate::process::log::say;
use crate::serve::control::Control;
use crate::serve::own_keys::SUSPECTS;

impl<S: Server + Disclose> EventLoop<S> {
    /// Begins with what the last process has left, and says so.
    pub(super) fn begin_suspecting(&mut self) -> Result<(), Failure> {
        if self.suspects.are_there() {
            say("the last process of this disk died with requests in flight: retrying them one at a time");
        }
        if let Some(deaths) = self.suspects.deaths() {
            say(format_args!("as far as can be known, {deaths} processes in a row have died of the same request"));
        }
        let begun = self.suspects.begin(&mut EngineWatch(&mut self.engine), SUSPECTS);
        begun.map_err(|error| Failure::new("wait before retrying a request", error))
    }

    /// Takes one request in, if that may be; how many.
    pub(super) fn take_suspect(&mut self) -> usize {
        if !self.may_take_suspect() {
            return 0;
        }
        let alone = self.disk.is_quiet() && !self.is_working() && !self.full.is_full();
        let Some(mut request) = self.server.pop(&self.geometry) else { return 0 };
        self.note_in_flight(1);
        let looked = self.time();
        if !self.came(&mut request, looked, true) {
            self.full.keep(request);
            return 1;
        }
        if self.suspects.condemn(&request) {
            self.fail(request);
            return 1;
        }
        if let Some(log) = self.disk.leaf_log().filter(|_| alone) {
            log.note_alone(Mark::of(&request));
            log.note_at_work(true);
        }
        fault::point("begin", &request);
        self.disk.submit(request, &mut self.engine);
        self.at_work(false);
        1
    }

    /// Whether nothing is under way that could be taken for the next one, but what may be so for long.
    fn may_take_suspect(&self) -> bool {
        let settled = self.disk.is_quiet() || self.is_working() || self.full.is_full();
        !self.suspects.are_resting() && self.disk.in_flight() == 0 && settled
    }

    fn is_working(&self) -> bool {
        self.control.as_ref().is_some_and(Control::is_working)
    }

    /// Whether the loop may sleep. What waits in a ring while something is under way, or at rest, is no reason not to.
    pub(super) fn may_sleep(&mut self) -> bool {
        if !self.mind_limits() {
            return false;
        }
        (self.suspects.are_there() && !self.may_take_suspect()) || self.server.may_sleep()
    }

    /// The process is at work on what is under way alone, or is not.
    pub(super) fn at_work(&self, at_work: bool) {
        if self.suspects.are_there() {
            if let Some(log) = self.disk.leaf_log() {
                log.note_at_work(at_work);
            }
        }
    }

    /// So many answers can be seen.
    pub(super) fn suspects_answered(&mut self, count: usize) {
        if self.suspects.are_there() {
            (0..count).for_each(|_| self.suspects.answered(self.disk.leaf_log()));
        }
    }

    /// Answers a request that one process after the other has died of, instead of being the next.
    fn fail(&mut self, request: Request) {
        let Span { at, len } = request.span();
        let place = self.server.place_of(request.token()).map(|place| format!(", {place}")).unwrap_or_default();
        let deaths = self.suspects.deaths().unwrap_or(0);
        say(format_args!(
            "{} of {len} bytes at sector {}{place} has killed {deaths} processes of this disk in a row. Failing it \
             with an error once; the disk continues",
            in_words(request.operation()),
            at / 512,
        ));
        self.give_late(request, Status::Failed);
        self.publish();
        self.suspects.failed(self.disk.leaf_log());
        self.suspects_answered(1);
        self.control_due = true;
    }

    /// Notes for the next process how many requests are in flight.
    #[inline]
    pub(super) fn note_in_flight(&self, count: usize) {
        if let Some(log) = self.disk.leaf_log() {
            log.note_in_flight(u64::try_from(count).unwrap_or(u64::MAX).max(self.suspects.left()));
        }
    }

    /// This process ends well: it has died of nothing.
    pub(super) fn end_suspecting(&self) {
        if let Some(log) = self.disk.leaf_log() {
            log.note_in_flight(0);
            log.acquit();
        }
    }
}
