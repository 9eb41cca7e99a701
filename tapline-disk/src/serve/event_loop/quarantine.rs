//! Requests that may have killed the last process, on their way through admission to the disk.
//!
//! It knows no protocol and no format. Invariant: while requests are in quarantine, at most one is in flight; the
//! leaf's redo log records that the process works on it only while the process does nothing else.

use disk::redo::Mark;
use disk::size::on_disk;
use disk::{Request, Span, Status};
use transport::Server;

use super::EventLoop;
use super::words::in_words;
use crate::process::log::say;
use crate::serve::admission::DiskState;
use crate::serve::control::Control;

impl<S: Server> EventLoop<S> {
    /// Begins with what the last process has left, and logs that.
    pub(super) fn begin_admission(&mut self, fatal: u64) {
        let now = self.time();
        self.admission.begin(self.disk.leaf_log(), fatal, now);
        if self.admission.is_in_quarantine() {
            say("the last process of this disk died with requests in flight: retrying them one at a time");
        }
        if let Some(deaths) = self.admission.deaths() {
            say(format_args!("as far as can be known, {deaths} processes in a row have died of the same request"));
        }
    }

    /// Returns how many requests, at most `most`, may be accepted now.
    #[cold]
    pub(super) fn batch(&mut self, most: usize) -> usize {
        let now = self.time();
        self.admission.batch(most, self.disk_state(), now)
    }

    /// Records for the next process which request of the quarantine starts while this one does nothing else.
    pub(super) fn note_if_alone(&self, request: &Request) {
        let is_alone = self.admission.is_alone(self.disk_state());
        if let Some(log) = self.disk.leaf_log().filter(|_| is_alone) {
            log.note_alone(Mark::of(request));
            log.note_at_work(true);
        }
    }

    fn disk_state(&self) -> DiskState {
        DiskState {
            in_flight: self.disk.in_flight(),
            is_quiet: self.disk.is_quiet(),
            is_working: self.control.as_ref().is_some_and(Control::is_working),
        }
    }

    /// Records whether the process is working on a request that was started alone.
    pub(super) fn at_work(&self, at_work: bool) {
        if self.admission.is_in_quarantine() {
            if let Some(log) = self.disk.leaf_log() {
                log.note_at_work(at_work);
            }
        }
    }

    /// Completes a request with an error that has killed several processes in a row, instead of being the next.
    #[cold]
    pub(super) fn fail(&mut self, request: Request) {
        let Span { at, len } = request.span();
        let place = self.server.place_of(request.token()).map(|place| format!(", {place}")).unwrap_or_default();
        let deaths = self.admission.deaths().unwrap_or(0);
        say(format_args!(
            "{} of {len} bytes at sector {}{place} has killed {deaths} processes of this disk in a row. Failing it \
             with an error once; the disk continues",
            in_words(request.operation()),
            at / 512,
        ));
        self.give_late(request, Status::Failed);
        self.publish();
        self.admission.failed(self.disk.leaf_log());
        self.control_due = true;
    }

    /// Records for the next process how many requests are in flight.
    #[inline]
    pub(super) fn note_in_flight(&self, count: usize) {
        if let Some(log) = self.disk.leaf_log() {
            log.note_in_flight(on_disk(count).max(self.admission.left_in_quarantine()));
        }
    }

    /// Records that this process ends normally.
    pub(super) fn end_well(&self) {
        if let Some(log) = self.disk.leaf_log() {
            log.note_in_flight(0);
            log.acquit();
        }
    }
}
