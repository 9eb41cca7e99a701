//! Gives files their stamps, and holds requests back meanwhile ([`crate::redo`], "Whose log it is").
//!
//! Keeps: no request is answered whose changes a log has that may be of another state of its file; no round begins
//! while a stamp is being written, so that two writes never concern one place.

use memory::Segments;

use super::Disk;
use super::layer::Logged;
use super::ops::Op;
use crate::format::Format;
use crate::{Action, FileError, FileId, Io};

impl<F: Format> Disk<F> {
    /// Holds back a request that is done until its changes are logged.
    pub(super) fn wait_for_stamps(&mut self, number: u32) {
        self.active.waiting.wait_begun(number);
        self.unstamped.push(number);
        self.rounds.consider();
    }

    /// Whether everything that has changed is logged, or left out, so that a round may begin. If not, the stamps for it
    /// are on their way.
    pub(super) fn have_stamps<I: Io>(&mut self, io: &mut I) -> bool {
        // After a failed sync nothing is written any more, and the requests fail with the round.
        while !self.chain.is_broken() && self.chain.is_log_due() {
            if self.chain.is_stamping() {
                return false;
            }
            if self.chain.log_changes() != Logged::Waits {
                break;
            }
            for (file, write) in self.chain.begin_stamps() {
                let from = Segments::copy_of(&write.bytes);
                self.ops.push(Op::Stamp, file, Action::Write { at: write.at, from }, io);
            }
        }
        self.end_waiting_for_stamps();
        true
    }

    /// The write of a stamp has ended.
    pub(super) fn stamped(&mut self, file: FileId, result: Result<(), FileError>) {
        self.chain.of(file).stamp_ended(result.is_ok());
        self.rounds.consider();
    }

    fn end_waiting_for_stamps(&mut self) {
        for number in std::mem::take(&mut self.unstamped) {
            self.active.waiting.wait_ended(number);
            if self.chain.is_broken() {
                self.active.waiting.wait_begun(number);
                self.rounds.join(number);
            } else {
                self.quiet(number);
            }
        }
    }

    /// The next change that is logged needs a new stamp. To be called from time to time while requests come: a copy of
    /// the file that was made since the last stamp cannot be distinguished from the file.
    pub fn expire_stamps(&mut self) {
        self.chain.for_writers_upwards(super::layer::Layer::expire_stamp);
    }

    /// Has the next round remove the stamps from the files. For the end of the process that has written them, on an
    /// idle disk of which everything is durable.
    pub fn clear_stamps(&mut self) {
        if self.is_clean() && self.chain.is_logged() {
            self.chain.for_writers_upwards(super::layer::Layer::clear_stamp);
        }
    }
}
