//! The thread that owns a served disk: requests from the server to the disk, operations from the disk to the engine,
//! and back.
//!
//! The path of a request: the server pops it from its peer's ring or connection (`accept.rs`); [`Admission`] starts or
//! holds it; the disk splits it into operations, which the engine submits to the kernel together at the end of the
//! batch (`reap`). Completed operations are settled in the disk, which may push more. A request without remaining
//! operations is completed (`answers.rs`), unless it has found no space and waits for some in [`Admission`]; the
//! completions of a loop iteration are published to the peers together.
//!
//! It knows no protocol, no format and no system call. Invariants: it sleeps only when the server has agreed to be
//! woken for new requests; it ends only when every request is completed and everything written is flushed.

mod accept;
mod answers;
mod ending;
mod lanes;
mod quarantine;
mod quiet;
mod servers;
mod waiting;
mod words;

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use ::stats::Clock;
use disk::{Disk, FileDone, Geometry, Image, Io, Until};
use transport::{Interest, MemoryChange, Server, Timer, Watch, WatchKey};
use uring::Engine;

use crate::files::Files;
use crate::process::failure::{Exit, Failure};
use crate::process::log::{Log, say};
use crate::process::panics;
use crate::process::signals::Signal;
use crate::serve::admission::Admission;
use crate::serve::blkback_stats::BlkbackStats;
use crate::serve::changes::Changes;
use crate::serve::control::{Control, Flush, Pause, Work};
use crate::serve::engine_watch::EngineWatch;
use crate::serve::own_keys::{ADMISSION, LEAVE, QUIET, REPORT, STOP};
use crate::serve::page::{self, Kept, PageFile};
use crate::serve::polling::Polling;
use crate::serve::quiet::Quiet;
use crate::serve::shaping::Shaping;
use crate::serve::stats::{Counters, Stats};
use crate::serve::threads::Threads;

/// The maximum age of a stamp in nanoseconds: an older one is replaced before the next logged change, so that a copy
/// made by another program longer than this before that change has another stamp. A sector per interval costs nothing.
const STAMP_NS: u64 = 100_000_000;

/// A disk, its engine, and the destinations of its reports.
pub struct Serving {
    /// The source of new files.
    pub files: Files,
    /// The disk.
    pub disk: Disk<Image>,
    /// The engine.
    pub engine: Engine,
    /// How to wait.
    pub polling: Polling,
    /// How many threads to use.
    pub threads: Threads,
    /// The file of statistics; they are logged if there is none.
    pub stats_file: Option<PathBuf>,
    /// Statistics of a Xen guest's disk, for other tools.
    pub blkback_stats: Option<BlkbackStats>,
    /// The signal to stop, blocked before any client can know of the disk.
    pub stop: Signal,
    /// The signal to exit and leave the client to another process.
    pub leave: Signal,
    /// The signal to report statistics.
    pub report: Signal,
    /// The control socket, if there is one.
    pub control: Option<Control>,
    /// Holds requests back before the disk receives them.
    pub admission: Admission,
    /// How its transfers are split and merged.
    pub shaping: Shaping,
    /// The map of its changed blocks, if there is one.
    pub changes: Changes,
    /// The counters of earlier processes of the disk.
    pub counters: Counters,
    /// The file of the statistics page, if there is one.
    pub page: Option<PageFile>,
    /// The description of the disk in the page.
    pub identity: String,
}

/// The event loop of a served disk.
pub struct EventLoop<S> {
    files: Files,
    server: S,
    disk: Disk<Image>,
    engine: Engine,
    geometry: Geometry,
    stats: Stats,
    page: Kept,
    /// The earliest arrival of requests not yet popped, if the last look has left some or the thread was woken since.
    seen: Option<u64>,
    blkback_stats: Option<BlkbackStats>,
    polling: Polling,
    threads: Threads,
    stats_file: Option<PathBuf>,
    log: Log,
    stop: Signal,
    leave: Signal,
    report: Signal,
    control: Option<Control>,
    pause: Pause,
    flush: Flush,
    admission: Admission,
    /// Fires when admission may release a request; created on first use.
    timer: Option<Timer>,
    /// When the timer fires.
    fires_at: Option<u64>,
    shaping: Shaping,
    changes: Changes,
    quiet: Quiet,
    stopping: bool,
    /// Whether another process has taken over.
    replaced: bool,
    /// The number of requests that waited for space and were returned to their peers.
    given_back: usize,
    /// Whether a failed sync has been logged.
    said_broken: bool,
    /// Whether lack of space has been logged.
    said_full: bool,
    /// Whether it is known to the control socket that an NBD server is away.
    said_away: bool,
    /// Whether the control socket must be served: something of it is ready or unfinished.
    control_due: bool,
    ready: Vec<u64>,
    done: Vec<FileDone>,
    /// The cached time, if nothing that takes long has been done since it was read.
    time: Option<u64>,
    /// When the stamps of the images were last declared old.
    stamped: u64,
}

/// The result of a loop iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Turn {
    /// Whether requests arrived, operations completed or requests were completed.
    found: bool,
    /// Whether more of that may be there already.
    more: bool,
}

impl<S: Server> EventLoop<S> {
    /// Makes a loop that is ready to run.
    pub fn new(mut server: S, serving: Serving) -> Result<EventLoop<S>, Failure> {
        let Serving {
            files,
            mut disk,
            mut engine,
            polling,
            threads,
            stats_file,
            blkback_stats,
            stop,
            leave,
            report,
            mut control,
            admission,
            shaping,
            changes,
            counters,
            page,
            identity,
        } = serving;
        disk.keep_times();
        if disk.owes() {
            // Nothing can be allocated until this is durable.
            disk.sync(&mut engine);
        }
        watch_all(&mut EngineWatch(&mut engine), [&stop, &leave, &report], control.as_mut(), &mut server)?;
        let (page, kept) = page::begin(page, &identity).map_err(|error| Failure::new("count requests", error))?;
        let stats = Stats::resumed(counters, Clock::new(), page);
        let mut begun = EventLoop {
            files,
            server,
            geometry: disk.geometry(),
            disk,
            engine,
            stats,
            page: kept,
            seen: None,
            blkback_stats,
            polling,
            threads,
            stats_file,
            log: Log::new(),
            stop,
            leave,
            report,
            control,
            pause: Pause::default(),
            flush: Flush::default(),
            admission,
            timer: None,
            fires_at: None,
            shaping,
            changes,
            quiet: Quiet::default(),
            stopping: false,
            replaced: false,
            given_back: 0,
            said_broken: false,
            said_full: false,
            said_away: false,
            control_due: true,
            ready: Vec::new(),
            done: Vec::new(),
            time: None,
            stamped: 0,
        };
        begun.begin_admission(counters.fatal);
        Ok(begun)
    }

    /// Does everything that can be done now.
    fn turn(&mut self) -> Result<Turn, Failure> {
        self.hear();
        let came = self.accept_requests();
        if came > 0 {
            self.expire_stamps();
        }
        self.prepare_memory();
        self.at_work(true);
        if came > 0 {
            // Starting requests may have taken some time.
            self.time = None;
        }
        self.reap(Until::Now)?;
        let settled = self.settle();
        let mut answered = self.answer() + self.see_to_space();
        self.publish_answers(answered);
        self.at_work(false);
        self.look_at_servers();
        if self.control_due {
            self.control();
            // Requests released or submitted by a verb may already have completed.
            let more = self.answer() + self.see_to_space();
            self.publish_answers(more);
            answered += more;
        }
        let log = &mut self.log;
        self.server.log_events(&mut |event| log.caused(event));
        if let Some(stats) = &mut self.blkback_stats {
            stats.publish();
        }
        self.stopping |= self.server.detaches().is_some_and(|device| device.is_over());
        let found = came + settled + answered > 0;
        // A client with one request at a time sends the next only after it has received the completion of the last;
        // others may have sent more already. A verb may have waited for this.
        let in_flight = self.disk.in_flight();
        panics::in_flight(in_flight);
        if found {
            self.note_in_flight(in_flight);
            if self.admission.limiter.sharing().is_some() {
                self.tell_others(answered, in_flight);
            }
            self.time = None;
        }
        let one_by_one = came.max(answered).max(in_flight) <= 1;
        Ok(Turn { found, more: found && (!one_by_one || self.control_due) })
    }

    /// Publishes the state after this iteration to the disks that share the storage.
    #[cold]
    fn tell_others(&mut self, answered: usize, in_flight: usize) {
        let now = self.time();
        self.admission.limiter.turned(answered, in_flight, now);
    }

    /// Makes the images get new stamps for future log records, if the last stamps are old.
    fn expire_stamps(&mut self) {
        let now = self.time();
        if now.saturating_sub(self.stamped) >= STAMP_NS {
            self.stamped = now;
            self.disk.expire_stamps();
        }
    }

    /// Returns the time, read once for everything that happens together.
    fn time(&mut self) -> u64 {
        *self.time.get_or_insert_with(|| self.stats.now())
    }

    /// Dispatches what is ready to the server and to this loop.
    fn hear(&mut self) {
        self.engine.take_ready(&mut self.ready);
        let (mut report, mut quiet) = (false, false);
        for key in self.ready.drain(..) {
            match WatchKey(key) {
                STOP if self.stop.take() => {
                    // Requests kept by peers are returned when the server has stopped.
                    if self.server.takes_back().is_none() {
                        self.admission.close();
                    }
                    self.stopping |= self.server.detaches().is_none_or(|device| device.close());
                }
                STOP => {}
                ADMISSION => self.fires_at = None,
                QUIET => quiet = true,
                LEAVE if self.leave.take() => {
                    if let Some(device) = self.server.detaches() {
                        device.leave();
                    }
                    self.stopping = true;
                }
                LEAVE => {}
                REPORT => report |= self.report.take(),
                key if self.control.as_mut().is_some_and(|control| control.ready(key)) => self.control_due = true,
                key => self.server.ready(key, &mut EngineWatch(&mut self.engine)),
            }
        }
        if quiet {
            self.look_whether_quiet();
        }
        if report {
            ending::write_stats(&self.line(), self.stats_file.as_ref());
        }
    }

    /// Registers memory for data with the engine.
    #[inline]
    fn prepare_memory(&mut self) {
        while let Some(change) = self.server.memory_change() {
            let told = match change {
                MemoryChange::Comes(buffer) => self.engine.register_memory(buffer),
                MemoryChange::Goes(buffer) => self.engine.forget_memory(&buffer),
            };
            if let Err(error) = told {
                // This only costs speed: most likely the limit of locked memory is reached (RLIMIT_MEMLOCK).
                self.log.caused(format_args!("{error}: using unregistered buffers (slower)"));
            }
        }
    }

    fn reap(&mut self, until: Until) -> Result<(), Failure> {
        if self.disk.has_pushed() {
            let now = self.time();
            let stats = &self.stats;
            self.disk.submitted_at(now, |slot| stats.submitted(slot, now));
        }
        let shapes = self.engine.shapes();
        let reaped = self.engine.reap(until, &mut self.done);
        if shapes {
            self.stats.shaped(self.engine.shape_counts());
        }
        if until == Until::Any || !self.done.is_empty() {
            self.time = None;
        }
        reaped.map_err(|error| {
            // Nothing will complete any more, and the requests in the disk can never be completed: the guest notices
            // the end of the process.
            say(&error);
            std::process::exit(i32::from(Exit::Failed.code()))
        })
    }

    /// Settles completed operations; returns their number.
    fn settle(&mut self) -> usize {
        let count = self.done.len();
        if count == 0 {
            // A client of a server may have room again although nothing has completed.
            self.disk.retry(&mut self.engine);
            return 0;
        }
        let now = self.time();
        self.disk.ended_at(now);
        for done in self.done.drain(..) {
            self.disk.settle(done, &mut self.engine);
        }
        self.disk.retry(&mut self.engine);
        if self.changes.is_any() {
            self.changes.watch(&self.files, &mut self.disk, &mut self.engine);
        }
        if self.disk.is_broken() && !self.said_broken {
            self.said_broken = true;
            self.control_due = true;
            say("a sync has FAILED: unflushed data may be lost, and the disk no longer writes");
            let log = self.storage_log();
            say(format_args!("see {log} for the reason; the disk accepts writes again after it is restarted"));
        }
        count
    }

    /// Where the reason of a failure of the storage is found.
    fn storage_log(&self) -> &'static str {
        let mut files = self.disk.layers().iter().filter_map(|layer| self.engine.file(layer.file));
        let remote = files.any(|file| file.remote().is_some());
        if remote { "the log of the NBD server" } else { "the kernel log" }
    }

    /// Returns whether the control socket has something to do without being woken.
    fn is_asked(&self) -> bool {
        self.control_due && self.control.as_ref().is_some_and(Control::is_awake)
    }

    /// Serves the control socket.
    fn control(&mut self) {
        self.with_control(|control, work| control.turn(work));
        if self.replaced {
            ending::leave_everything();
        }
        self.control_due = self.control.as_ref().is_some_and(|control| control.is_awake() || control.is_working());
        // A verb may open files, and has its own clock.
        self.time = None;
    }

    fn with_control(&mut self, act: impl FnOnce(&mut Control, &mut Work<'_>)) {
        let Some(control) = &mut self.control else { return };
        let paused = control.is_paused();
        let mut work = Work {
            files: &self.files,
            disk: &mut self.disk,
            engine: &mut self.engine,
            server: &mut self.server,
            geometry: &mut self.geometry,
            pause: &mut self.pause,
            flush: &mut self.flush,
            admission: &mut self.admission,
            shaping: &mut self.shaping,
            changes: &mut self.changes,
            stats: &mut self.stats,
            page: &self.page,
            polling: &mut self.polling,
            threads: &mut self.threads,
            paused,
            replaced: &mut self.replaced,
        };
        act(control, &mut work);
    }

    /// Formats the statistics.
    fn line(&self) -> String {
        self.stats.line(self.admission.condition(self.disk.is_broken()), self.engine.lane_operations())
    }

    /// Removes the timer: it does not wake an idle disk.
    #[cold]
    fn end_timer(&mut self) {
        (self.timer, self.fires_at) = (None, None);
        self.engine.forget(ADMISSION.0);
    }

    /// Sets the timer to wake the loop at that time.
    fn set_deadline(&mut self, at: u64, now: u64) -> io::Result<()> {
        if self.fires_at == Some(at) {
            return Ok(());
        }
        if self.timer.is_none() {
            let timer = Timer::new()?;
            EngineWatch(&mut self.engine).watch(timer.as_fd(), Interest::Read, ADMISSION)?;
            self.timer = Some(timer);
        }
        self.timer.as_ref().map_or(Ok(()), |timer| timer.set(Duration::from_nanos(at.saturating_sub(now))))?;
        self.fires_at = Some(at);
        Ok(())
    }
}

/// Watches everything that wakes the thread.
fn watch_all(
    watch: &mut EngineWatch<'_>,
    signals: [&Signal; 3],
    control: Option<&mut Control>,
    server: &mut impl Server,
) -> Result<(), Failure> {
    let failed = |what: &'static str| move |error: io::Error| Failure::new(what, error);
    for (signal, key) in signals.into_iter().zip([STOP, LEAVE, REPORT]) {
        watch.watch(signal.as_fd(), Interest::Read, key).map_err(failed("wait for signals"))?;
    }
    if let Some(control) = control {
        control.start(watch).map_err(failed("wait for clients of the control socket"))?;
    }
    server.start(watch).map_err(failed("wait for connections"))
}
