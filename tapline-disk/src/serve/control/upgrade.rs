//! `upgrade`: another process replaces this one, and the disk's clients notice nothing but a short wait.
//!
//! This process starts the new one, or the client has started it. When the new process is ready, this one flushes,
//! stops accepting requests, waits for those in flight, and hands over everything ([`crate::serve::handover`]).
//!
//! Invariants: until it sends 'go' to the new process, this one can continue, and does so if anything fails or takes
//! too long; from then on it touches nothing.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use control::answer::{self, Answer};
use control::{Kind, ask};
use disk::MapState;
use transport::vhost_user::Listener;
use transport::{HandOver, HandoverError, Timer};

use super::pause::micros;
use super::successor::{ControlSocket, NotHanded, Start, Successor};
use super::work::Work;
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::serve::handover::ChannelError;
use crate::serve::own_keys::UPGRADE_TIMER;

/// The time limit for the new process to send hello.
const TO_START: Duration = Duration::from_secs(30);
/// The default limit on how long clients wait.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// The maximum number of attempts to hand the disk over, and the growth of the wait before each of them.
const ATTEMPTS: u32 = 20;
const RETRY_STEP: Duration = Duration::from_millis(20);

const LATE: &str = "the new process does not take over the disk";

/// An upgrade in progress.
#[derive(Debug)]
pub struct Upgrade {
    successor: Successor,
    stage: Stage,
    timer: Timer,
    /// The program, if this process starts the new one.
    program: Option<PathBuf>,
    pause_max: Duration,
    attempts: u32,
    control: ControlSocket,
    /// Whether a merge is running, which must be interrupted.
    merging: bool,
}

#[derive(Debug)]
enum Stage {
    /// The new process is being started.
    Starting(Option<Start>),
    /// It has its arguments, but has not sent hello.
    Greeting { until: Instant },
    /// It is ready. A merge is being interrupted, or the disk can be handed over.
    Ready,
    /// The disk is being flushed; requests are still accepted.
    Flushing,
    /// No requests are accepted since then; those in flight complete.
    Draining { since: Instant },
    /// Like `Draining`, while data that is in no redo log is being made durable.
    Syncing { since: Instant },
    /// Requests are accepted again for a while, since those in flight took too long.
    Resting { until: Instant },
}

/// The result of an attempt.
enum Attempt {
    /// The disk was handed over; clients have waited for this time.
    Done(Duration),
    /// Not now: requests are in flight.
    Later,
    /// The new process took too long.
    Late,
}

impl Upgrade {
    /// Checks the request and starts the upgrade; `successor` is the socket of a process started by the client.
    pub fn begin(
        asked: ask::Upgrade,
        successor: Option<OwnedFd>,
        control: &Listener,
        work: &mut Work<'_>,
    ) -> Result<Upgrade, Failure> {
        refuse_impossible(work)?;
        hands_over(work)?;
        let failed = |error: std::io::Error| Failure::failed("wait for a new process", &error);
        let timer = Timer::new().map_err(failed)?;
        let (successor, start) = match (successor, &asked.program) {
            (Some(socket), None) => (Successor::at(socket, work)?, None),
            (None, Some(program)) if work.files.are_handed() => return Err(must_be_handed(program)),
            (None, Some(program)) => {
                Successor::start(program, work).map(|(successor, start)| (successor, Some(start)))?
            }
            _ => {
                let what = "give either the program, or a socket to an already started process";
                return Err(Failure::of(Kind::Invalid, what));
            }
        };
        work.engine.watch(timer.as_fd(), false, UPGRADE_TIMER.0).map_err(failed)?;
        timer.set(TO_START).map_err(failed)?;
        let stage = match start {
            Some(start) => Stage::Starting(Some(start)),
            None => Stage::Greeting { until: Instant::now() + TO_START },
        };
        Ok(Upgrade {
            successor,
            stage,
            timer,
            program: asked.program,
            pause_max: asked.pause_max.map_or(PAUSE_MAX, Duration::from_micros),
            attempts: 0,
            control: ControlSocket::of(control).map_err(failed)?,
            merging: false,
        })
    }

    /// Returns whether a merge must be stopped before it can continue.
    pub fn needs_no_merge(&self) -> bool {
        !matches!(self.stage, Stage::Starting(_) | Stage::Greeting { .. })
    }

    /// Sets whether a merge is running.
    pub fn merging(&mut self, merging: bool) {
        self.merging = merging;
    }

    /// Advances the upgrade; returns the answer when the new process has taken over. This process must then exit at
    /// once.
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<Option<Answer>, Failure> {
        loop {
            match &mut self.stage {
                Stage::Starting(blocking_task) => {
                    let Some(sent) = blocking_task.take() else { return Ok(None) };
                    match work.fetch(sent) {
                        Err(sent) => {
                            *blocking_task = Some(sent);
                            return Ok(None);
                        }
                        Ok(started) => self.successor.started(started)?,
                    }
                    self.stage = Stage::Greeting { until: Instant::now() + TO_START };
                }
                Stage::Greeting { until } => {
                    let until = *until;
                    match self.successor.has_sent_hello()? {
                        true => self.stage = Stage::Ready,
                        false if Instant::now() < until => return Ok(None),
                        false => return Err(self.successor.no_hello(&ChannelError::Late)),
                    }
                }
                Stage::Ready if self.merging => return Ok(None),
                Stage::Ready => {
                    refuse_impossible(work)?;
                    refuse_writable_parents(work)?;
                    if work.geometry.read_only {
                        self.hold(work)?;
                    } else {
                        work.begin_flush();
                        self.stage = Stage::Flushing;
                    }
                }
                Stage::Flushing => match work.is_flushed() {
                    Ok(false) => return Ok(None),
                    Ok(true) => self.hold(work)?,
                    // Unflushed data is in the redo log, and the guest waits for space under the new process too.
                    Err(refusal) if refusal.kind() == Kind::NoSpace => self.hold(work)?,
                    Err(refusal) => return Err(refusal),
                },
                Stage::Draining { since } | Stage::Syncing { since } => {
                    let since = *since;
                    match self.attempt(since, work)? {
                        Some(Attempt::Done(pause)) => return Ok(Some(self.answer(pause))),
                        Some(Attempt::Later) => self.rest(work)?,
                        Some(Attempt::Late) => self.start_again(work)?,
                        None => return Ok(None),
                    }
                }
                Stage::Resting { until } if Instant::now() >= *until => self.hold(work)?,
                Stage::Resting { .. } => return Ok(None),
            }
        }
    }

    /// Stops accepting requests.
    fn hold(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        hands_over(work)?.hold(true);
        // Requests that its peers do not keep for the next process are completed by this one.
        work.admission.limiter.set_ending(work.server.takes_back().is_none());
        self.set_timer(self.pause_max)?;
        self.stage = Stage::Draining { since: Instant::now() };
        Ok(())
    }

    /// Accepts requests again, and retries later.
    fn rest(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        accept_again(work);
        self.count_attempt("requests in flight do not complete")?;
        let rest = RETRY_STEP * self.attempts;
        self.set_timer(rest)?;
        self.stage = Stage::Resting { until: Instant::now() + rest };
        Ok(())
    }

    /// Accepts requests again, and retries with another new process: the late one has been notified, and exits.
    fn start_again(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        accept_again(work);
        self.count_attempt(LATE)?;
        let Some(program) = &self.program else { return Err(self.too_long(LATE)) };
        self.successor.end(work);
        let (successor, start) = Successor::start(program, work)?;
        (self.successor, self.stage) = (successor, Stage::Starting(Some(start)));
        self.set_timer(TO_START)
    }

    fn count_attempt(&mut self, what: &str) -> Result<(), Failure> {
        self.attempts += 1;
        if self.attempts < ATTEMPTS { Ok(()) } else { Err(self.too_long(what)) }
    }

    fn too_long(&self, what: &str) -> Failure {
        Failure::of(Kind::Busy, format!("{what} in {} ms", self.pause_max.as_millis()))
            .advise("retry when the disk is less busy, or allow a longer pause: --pause-max")
    }

    fn set_timer(&self, after: Duration) -> Result<(), Failure> {
        self.timer.set(after).map_err(|error| Failure::failed("wait for requests in flight", &error))
    }

    /// Hands everything over, if nothing is in flight any more and there is time.
    fn attempt(&mut self, since: Instant, work: &mut Work<'_>) -> Result<Option<Attempt>, Failure> {
        let until = since + self.pause_max;
        let not_yet = || Ok((Instant::now() >= until).then_some(Attempt::Later));
        if !work.disk.is_idle() {
            return not_yet();
        }
        if matches!(self.stage, Stage::Draining { .. }) && needs_sync(work) {
            work.disk.sync(work.engine);
            self.stage = Stage::Syncing { since };
            return Ok(None);
        }
        if matches!(self.stage, Stage::Syncing { .. }) && !work.is_synced()? {
            return not_yet();
        }
        if !work.disk.is_map_at_rest() {
            // The next process would count regions with an intent as changed.
            work.disk.rest_map(work.engine);
            return not_yet();
        }
        let server = match hands_over(work)?.hand_over() {
            Ok(server) => server,
            Err(HandoverError::NotNow(_)) => return not_yet(),
            Err(why) => return Err(Failure::new("hand over the disk's connections", why)),
        };
        match self.successor.hand_over(server, &self.control, until, work) {
            Ok(()) => {
                let pause = since.elapsed();
                hands_over(work)?.end_left_behind();
                work.server.log_events(&mut |event| say(event));
                Ok(Some(Attempt::Done(pause)))
            }
            Err(NotHanded::Successor(ChannelError::Late)) => Ok(Some(Attempt::Late)),
            Err(NotHanded::Successor(why)) => Err(Failure::new("hand over the disk", why)
                .advise("the disk continues as before; see the log for why the new process did not take it over")),
            Err(NotHanded::Disk(refusal)) => Err(refusal),
        }
    }

    /// Logs the takeover and makes the answer.
    fn answer(&self, pause: Duration) -> Answer {
        let (Successor { pid, program, .. }, pause_us) = (&self.successor, micros(pause));
        say(format_args!("process {pid} has taken over the disk; its clients waited {pause_us} µs"));
        answer::Upgrade { pid: *pid, program: Some(program.clone()), pause_us }.into()
    }

    /// Undoes a failed upgrade: the new process must exit, and this one continues.
    pub fn undo(&mut self, work: &mut Work<'_>) {
        accept_again(work);
        work.engine.forget(UPGRADE_TIMER.0);
        self.successor.end(work);
    }
}

/// Accepts requests again, within the limits of the disk.
fn accept_again(work: &mut Work<'_>) {
    if let Some(server) = work.server.hands_over() {
        server.hold(false);
    }
    work.admission.limiter.set_ending(false);
}

/// Fails in states that waiting does not change.
fn refuse_impossible(work: &mut Work<'_>) -> Result<(), Failure> {
    if work.paused {
        return Err(Failure::of(Kind::State, "the disk is paused").advise("resume it first"));
    }
    if work.disk.is_broken() {
        return Err(Failure::of(Kind::State, "a sync of the disk has failed, so it no longer writes")
            .advise("see the kernel log, and restart the disk"));
    }
    if work.disk.map_state() == Some(MapState::Doubtful) {
        return Err(Failure::of(Kind::State, "the map of changed blocks is doubtful")
            .advise("remove its file, then use untrack --removed"));
    }
    if work.admission.is_full() && work.server.takes_back().is_none() {
        return Err(Failure::of(Kind::NoSpace, "requests of NBD clients are waiting for space")
            .advise("free some space and retry"));
    }
    Ok(())
}

/// Fails while a parent is open for writing, as during a merge: the next process opens them read-only.
fn refuse_writable_parents(work: &Work<'_>) -> Result<(), Failure> {
    match (1..work.disk.layers().len()).find(|&depth| work.file(depth).is_ok_and(|(_, file)| file.options().write)) {
        Some(depth) => {
            let what = format!("the layer {depth} is open for writing");
            Err(Failure::of(Kind::State, what).advise("retry; a merge may have to be requested again first"))
        }
        None => Ok(()),
    }
}

/// Returns whether something is in no redo log, or in that of a layer that the new process opens read-only.
fn needs_sync(work: &Work<'_>) -> bool {
    let is_elsewhere = || work.file(0).is_ok_and(|(_, leaf)| redo_log::other_logs_remain(leaf));
    !work.geometry.read_only && (!work.disk.is_logged() || is_elsewhere())
}

/// Returns the server's interface for a handover.
fn hands_over<'a>(work: &'a mut Work<'_>) -> Result<&'a mut dyn HandOver, Failure> {
    work.server.hands_over().ok_or_else(|| {
        Failure::of(Kind::Unsupported, "a Xen guest's disk is handed over through xenstore")
            .advise("use tapline xen upgrade, or send SIGUSR2 and serve it again")
    })
}

fn must_be_handed(program: &Path) -> Failure {
    let what = format!("this disk was started with --handed and cannot start {}", program.display());
    Failure::of(Kind::Unsupported, what).advise("upgrade it through the daemon: tapline vbd upgrade")
}
