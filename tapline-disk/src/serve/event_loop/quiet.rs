//! Releases memory and threads of an idle disk ([`Quiet`]).
//!
//! It knows no protocol and no format. Invariant: an idle disk with little cached is not woken.

use std::io;

use transport::Server;

use super::EventLoop;
use crate::serve::engine_watch::EngineWatch;
use crate::serve::own_keys::QUIET;

impl<S: Server> EventLoop<S> {
    /// Starts the idle timer, if an idle disk would have something to release. Call it before sleeping.
    pub(super) fn mind_quiet(&mut self) {
        if self.quiet.is_waiting() || !self.has_something_to_release() {
            return;
        }
        let waits = self.quiet.begin(self.stats.come(), &mut EngineWatch(&mut self.engine), QUIET);
        self.mind_timer(waits);
    }

    fn has_something_to_release(&mut self) -> bool {
        self.disk.is_trim_due()
            || self.has_lanes_to_end()
            || self.server.keeps_memory().is_some_and(|memory| memory.keeps_much())
    }

    /// Handles the idle timer: releases memory and lanes if the disk is idle.
    pub(super) fn look_whether_quiet(&mut self) {
        match self.quiet.is_over(self.stats.come(), self.disk.is_idle()) {
            Ok(false) => {}
            Ok(true) => {
                self.disk.drop_caches();
                if let Some(memory) = self.server.keeps_memory() {
                    memory.free_kept();
                }
                self.end_idle_lanes();
                memory::give_back_freed();
                self.stats.memory_given_back();
            }
            Err(error) => self.mind_timer(Err(error)),
        }
    }

    fn mind_timer(&mut self, waits: io::Result<()>) {
        if let Err(error) = waits {
            self.log.caused(format_args!("memory is not released while the disk is idle: no timer: {error}"));
        }
    }
}
