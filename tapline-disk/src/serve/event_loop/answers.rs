//! Completions, from the disk to the server and to the statistics.
//!
//! It knows no protocol and no format. Invariant: all requests completed before a publication have the same completion
//! time, at which they are counted.

use std::time::Duration;

use disk::{Operation, Request, Span, Status, Times};
use transport::Server;
use uring::ImageFile;

use super::EventLoop;
use super::words::{in_words, of_damage, worth_a_line};
use crate::process::fault;
use crate::serve::control::{FLUSH, Flush};

impl<S: Server> EventLoop<S> {
    /// Passes completions to the server; returns their number.
    pub(super) fn answer(&mut self) -> usize {
        let (mut count, mut at) = (0, None);
        while let Some((request, status, times)) = self.disk.answer_with_times() {
            count += 1;
            if request.token() == FLUSH {
                request.retire();
                self.flush = Flush::Answered(status);
                continue;
            }
            fault::point("answer", &request);
            // Settling has taken time. All requests completed now have the same completion time.
            let now = *at.get_or_insert_with(|| self.stats.now());
            if self.admission.concerns(status) {
                self.time = at;
                self.give_unless_held(request, status, now);
            } else {
                self.stats.answered(&request, status, times, now);
                self.give(request, status, now);
            }
        }
        if let Some(now) = at {
            self.time = at;
            // This includes a request that waits for space: it does not wait for a pause.
            self.pause.answered(Duration::from_nanos(now));
        }
        count
    }

    /// Passes one completion to the server, unless the request now waits for space.
    #[cold]
    fn give_unless_held(&mut self, request: Request, status: Status, now: u64) {
        if let Some((request, status)) = self.admission.completed(request, status, now) {
            self.give_late(request, status);
        }
    }

    /// Passes the completion of a request whose times no longer matter to the server.
    pub(super) fn give_late(&mut self, request: Request, status: Status) {
        let now = self.time();
        self.stats.answered(&request, status, &Times::default(), now);
        self.give(request, status, now);
    }

    /// Passes one completion to the server.
    #[inline(always)]
    pub(super) fn give(&mut self, request: Request, status: Status, now: u64) {
        if let Some(stats) = &mut self.blkback_stats {
            stats.answered(&request, status, now);
        }
        if let Some(why) = worth_a_line(status) {
            let Span { at, len } = request.span();
            let damage = self.disk.take_damage(request.span()).map(of_damage);
            let cause = damage.or_else(|| self.cut_short()).unwrap_or_default();
            self.log
                .caused(format_args!("{} of {len} bytes at {at} failed{why}{cause}", in_words(request.operation())));
        }
        if self.changes.bitmaps.is_any() && matches!(request.operation(), Operation::Extents { .. }) {
            return self.give_with_bitmaps(request, status);
        }
        self.server.complete(request, status);
    }

    /// Passes the completion of a query of extents to the server, with the dirty bitmaps as they are now.
    #[cold]
    fn give_with_bitmaps(&mut self, request: Request, status: Status) {
        let shown = self.changes.bitmaps.shown(&self.disk);
        match self.server.shows_bitmaps() {
            Some(server) => server.complete_with(request, status, &shown),
            None => self.server.complete(request, status),
        }
    }

    /// Describes a layer whose file another program has truncated, as the cause of a failure.
    #[cold]
    fn cut_short(&self) -> Option<String> {
        let layers = self.disk.layers().iter().filter_map(|layer| self.engine.file(layer.file));
        let mut files = layers.flat_map(ImageFile::all_files);
        let cut = files.find(|file| file.is_cut_short())?;
        Some(format!(": another program has cut off the end of {}", cut.path().display()))
    }

    /// Publishes `count` completions to the server's peers.
    pub(super) fn publish_answers(&mut self, count: usize) {
        self.publish();
        self.admission.answered(count, self.disk.leaf_log());
    }

    /// Publishes completions to the server's peers.
    pub(super) fn publish(&mut self) {
        if let Err(gone) = self.server.publish() {
            self.log.caused(gone);
        }
        self.stats.published();
    }
}
