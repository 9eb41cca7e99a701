//! Requests that wait for space ([`Full`]), between the disk and the server.
//!
//! It knows no protocol and no format. Invariant: a waiting request is completed once, by the disk or by the end of the
//! waiting; or it is returned to its client, and nothing more is done with it here.

use disk::{Request, Status};
use transport::Server;

use super::{Disclose, EngineWatch, EventLoop};
use crate::serve::control::FLUSH;
use crate::serve::full::Next;
use crate::serve::own_keys::SPACE;

impl<S: Server + Disclose> EventLoop<S> {
    /// Keeps a request that waits for space, or hands its answer to the server.
    #[cold]
    pub(super) fn keep_or_give(&mut self, request: Request, status: Status) {
        if let Some((request, status)) = self.full.judge(request, status) {
            self.give_late(request, status);
        }
    }

    /// Sees to the requests that wait for space, until there is nothing more to do at once; how many were answered or
    /// begun.
    pub(super) fn see_to_space(&mut self) -> usize {
        let mut moved = self.give_back();
        while self.full.needs_care(self.is_alone()) {
            moved += match self.full.next(self.is_alone()) {
                Next::Nothing => 0,
                Next::Submit(requests) => {
                    let count = requests.len();
                    requests.into_iter().for_each(|request| self.disk.submit(request, &mut self.engine));
                    count
                }
                Next::Refuse(requests) => {
                    let count = requests.len();
                    requests.into_iter().for_each(|request| self.give_late(request, Status::NoSpace));
                    count
                }
            };
            if let Err(error) = self.full.mind_timer(&mut EngineWatch(&mut self.engine), SPACE) {
                self.log.caused(format_args!("cannot wait for space, since there is no timer: {error}"));
            }
            moved += self.answer();
        }
        self.tell_of_space();
        moved
    }

    /// Gives back what waits for space, or is held back, and is wanted by its peer, or stays with it when the server
    /// stops; how many.
    pub(super) fn give_back(&mut self) -> usize {
        let limited = self.give_back_limited();
        if !self.full.is_full() && !self.disk.is_quiesced() {
            return limited;
        }
        let mut wanted = self.full.recall(|token| self.server.recalls(token));
        // Requests are held back for as long as a client of the control socket likes.
        wanted.extend(self.disk.take_waiting(|token| token != FLUSH && self.server.recalls(token)));
        let count = wanted.len();
        for request in wanted {
            self.stats.given_back(&request);
            self.server.give_back(request);
        }
        self.given_back += count;
        count + limited
    }

    /// The same for those that wait for a limit. For the statistics they have not come yet.
    fn give_back_limited(&mut self) -> usize {
        if self.limiter.waiting() == 0 {
            return 0;
        }
        let wanted = self.limiter.recall(|token| self.server.recalls(token));
        let count = wanted.len();
        wanted.into_iter().for_each(|request| self.server.give_back(request));
        self.given_back += count;
        count
    }

    /// Whether there is no client left for which a request waits.
    fn is_alone(&self) -> bool {
        self.full.is_full() && self.server.peers() == 0
    }

    /// Says that the disk is full now, or is not any more.
    fn tell_of_space(&mut self) {
        let full = self.full.is_full();
        if std::mem::replace(&mut self.said_full, full) == full {
            return;
        }
        self.control_due = true;
        self.log.caused(match full {
            true => "no space is left on the image's storage: writes wait for space, reads continue",
            false => "no more requests are waiting for space",
        });
    }
}
