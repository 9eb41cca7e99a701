//! The end of a served disk: accepted requests are completed, or left to a client that keeps them, and everything
//! written is durable.
//!
//! It knows no protocol and no format. Invariant: it ends only when nothing is in flight.

use std::io::Write;
use std::path::PathBuf;

use disk::{DiskOffset, Image, MapState, Operation, Request, Span, Status, Token, Until};
use memory::Segments;
use transport::Server;
use uring::Remote;

use super::EventLoop;
use crate::image::check;
use crate::image::redo_log;
use crate::image::tracking;
use crate::process::failure::{Exit, Failure};
use crate::process::log::{self, say};
use crate::serve::changes::leaf_of;
use crate::serve::control::{Control, FLUSH};
use crate::serve::engine_watch::EngineWatch;
use crate::serve::stats;

impl<S: Server> EventLoop<S> {
    /// Completes accepted requests, makes all data durable, and exits.
    pub(super) fn shut_down(mut self) -> Result<Exit, Failure> {
        say("stopping: no longer accepting requests");
        self.server.stop(&mut EngineWatch(&mut self.engine));
        let before = self.given_back;
        if self.server.takes_back().is_none() {
            self.admission.close();
        }
        self.begin_released();
        self.see_to_space();
        self.leave_control()?;
        self.drain()?;
        let flushed = if self.geometry.read_only { Status::Done } else { self.flush()? };
        write_stats(&self.line(), self.stats_file.as_ref());
        for (depth, layer) in self.disk.layers().iter().enumerate() {
            if let Image::Qcow2(image) = &layer.format {
                check::tell_of_refcounts(format_args!("layer {depth}"), image);
            }
        }
        let why = match flushed {
            Status::Done => None,
            Status::NoSpace => Some("no space is left on the image's storage"),
            Status::Failed | Status::Refused | Status::Unsupported => Some("the storage failed, or had failed before"),
        };
        if let Some(why) = why {
            return Err(Failure::new("flush the disk before stopping", why)
                .advise(format!("data whose flush was acknowledged is safe; see {}", self.storage_log())));
        }
        if !self.geometry.read_only {
            // If this fails, the remaining stamps do no harm.
            self.disk.clear_stamps();
            self.flush()?;
        }
        self.close_map()?;
        self.end_well();
        self.stats.page().leave();
        self.page.remove();
        self.admission.limiter.leave();
        redo_log::end_all();
        match self.given_back - before {
            0 => say("stopped: all requests are completed and flushed"),
            left => say(format_args!(
                "stopped: {left} waiting requests stay with their guest for the next process; all others are completed \
                 and flushed"
            )),
        }
        Ok(Exit::Done)
    }

    /// Waits until nothing is in flight.
    fn drain(&mut self) -> Result<(), Failure> {
        loop {
            self.reap(Until::Now)?;
            self.leave_to_guest();
            self.settle();
            self.answer();
            self.give_back();
            self.publish();
            if self.disk.is_idle() {
                return Ok(());
            }
            if !(self.disk.is_quiet() && self.end_waiting_for_map()) {
                self.reap(Until::Any)?;
            }
        }
    }

    /// Ends the requests that wait for a map of changed blocks that can be neither written nor made invalid: they stay
    /// with a peer that keeps them, and fail otherwise. Nothing of them was begun, so the map names all that has
    /// changed, and the next process continues it. Returns whether there were any.
    fn end_waiting_for_map(&mut self) -> bool {
        if self.disk.map_state() != Some(MapState::Doubtful) {
            return false;
        }
        let was_quiesced = self.disk.is_quiesced();
        self.disk.quiesce();
        let kept = self.give_back();
        let waiting = self.disk.take_waiting(|token| token != FLUSH);
        let failed = waiting.len();
        waiting.into_iter().for_each(|request| self.give_late(request, Status::Failed));
        if !was_quiesced {
            self.disk.resume(&mut self.engine);
        }
        if failed > 0 {
            say(format_args!("{failed} requests that waited for the map of changed blocks have failed"));
        }
        kept + failed > 0
    }

    /// Exits if the disk's NBD server was given up and the guest has recorded its requests: they then stay with it for
    /// the next process, as if this one had been killed. Otherwise they fail.
    fn leave_to_guest(&mut self) {
        let mut files = self.disk.layers().iter().filter_map(|layer| self.engine.file(layer.file));
        let given_up = files.any(|file| file.remote().is_some_and(Remote::is_given_up));
        let recorded = self.server.takes_back().and_then(|server| server.records_in_flight());
        let requests = self.disk.in_flight();
        if given_up && requests > 0 && recorded == Some(true) {
            say(format_args!("stopped: {requests} requests stay with their guest for the next process; not flushed"));
            log::end();
            std::process::exit(i32::from(Exit::Failed.code()))
        }
    }

    /// Flushes an idle disk.
    fn flush(&mut self) -> Result<Status, Failure> {
        let nothing = Span { at: DiskOffset(0), len: 0 };
        let flush = Request::new(Operation::Flush, nothing, Segments::empty(), Token(u64::MAX), &self.geometry);
        let flush = match flush {
            Ok(flush) => flush,
            Err(status) => return Ok(status),
        };
        self.disk.submit(flush, &mut self.engine);
        let status = loop {
            if let Some((request, status)) = self.disk.answer() {
                request.retire();
                break status;
            }
            self.reap(Until::Any)?;
            self.settle();
        };
        self.drain()?;
        Ok(status)
    }

    /// Closes the map of changed blocks: it then names exactly what has changed, and the image is not written to any
    /// more. If that fails, the next process continues the map as after a kill.
    fn close_map(&mut self) -> Result<(), Failure> {
        let Some((path, map)) = self.changes.file_to_close(&self.disk, &self.engine) else { return Ok(()) };
        self.disk.quiesce();
        self.drain()?;
        let failed = |why: &dyn std::fmt::Display| {
            say(format_args!("{} is not closed, so more blocks than have changed may be named: {why}", path.display()));
        };
        if let Err(error) = self.disk.stop_tracking(&mut self.engine) {
            failed(&error);
            return Ok(());
        }
        self.drain()?;
        let image = leaf_of(&self.disk, &self.engine);
        match (self.disk.tracked(), image) {
            (None, Some(image)) => tracking::close(&map, image).unwrap_or_else(|error| failed(&error)),
            _ => failed(&"it could not be written"),
        }
        Ok(())
    }

    /// Finishes what the control socket has begun.
    fn leave_control(&mut self) -> Result<(), Failure> {
        self.with_control(|control, work| control.stop(work));
        self.control_due = true;
        while self.control.as_ref().is_some_and(Control::is_working) {
            let turn = self.turn()?;
            if !turn.more && !self.is_asked() && self.control.as_ref().is_some_and(Control::is_working) {
                self.reap(Until::Any)?;
            }
        }
        Ok(())
    }
}

/// Exits after another process has taken over. Nothing is dropped, because everything belongs to that process.
pub(super) fn leave_everything() -> ! {
    log::end();
    std::process::exit(i32::from(Exit::Done.code()))
}

/// Writes the statistics. An error is only logged, because it must not stop the disk.
pub(super) fn write_stats(line: &str, file: Option<&PathBuf>) {
    let Some(path) = file else { return say(format_args!("statistics: {line}")) };
    if let Err(error) = stats::open_file(path).and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())) {
        say(format_args!("cannot append statistics to {}: {error}", path.display()));
    }
}
