//! Kills the daemon and its disk processes at random times.
//!
//! It runs in a separate thread. While it is held nothing is killed, and the daemon runs and listens.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::daemon::Daemon;
use crate::daemon::processes::Places;

/// Maximum pause between two kills in milliseconds. It grows during a part, so that everything completes, even emulated
/// guests on a loaded machine.
const PAUSE_MAX: u64 = 600;
const PAUSE_GROWS: u64 = 30;
const PAUSE_LIMIT: u64 = 20_000;

/// Interval for checking whether to continue waiting.
const STEP: Duration = Duration::from_millis(50);

/// One of this many kills is of the daemon.
const DAEMON_EVERY: u64 = 5;

/// Number of kills by phase and kind of process.
pub type Killed = BTreeMap<(&'static str, &'static str), u64>;

/// The thread that kills, unless it is held.
pub struct Killer {
    /// Set at the end of the storm.
    over: AtomicBool,
    /// The phase in which it may kill; `None` while it is held. Locked during a kill and restart.
    phase: Mutex<Option<&'static str>>,
    killed: Mutex<Killed>,
}

impl Killer {
    /// Creates it, held.
    pub fn held() -> Killer {
        Killer { over: AtomicBool::new(false), phase: Mutex::new(None), killed: Mutex::default() }
    }

    /// Lets it kill from now on.
    pub fn loose(&self, phase: &'static str) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = Some(phase);
    }

    /// Stops it from killing. The daemon runs when this returns.
    pub fn hold(&self) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The number of kills so far.
    pub fn killed(&self) -> Killed {
        self.killed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends the thread.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Waits for the pause, or until the part ends.
    fn rest(&self, pause: Duration, part: Option<&'static str>) {
        let begin = Instant::now();
        let is_so = || *self.phase.lock().unwrap_or_else(PoisonError::into_inner) == part;
        while begin.elapsed() < pause && is_so() && !self.over.load(Ordering::Relaxed) {
            thread::sleep(STEP.min(pause.saturating_sub(begin.elapsed())));
        }
    }

    /// Kills until it is ended.
    pub fn run(&self, daemon: &Daemon, places: &Places, seed: u64) -> Result<(), String> {
        let mut random = Rng::with_seed(seed);
        let (mut of_part, mut part) = (0, None);
        while !self.over.load(Ordering::Relaxed) {
            let pause_max = (PAUSE_MAX + PAUSE_GROWS * of_part).min(PAUSE_LIMIT);
            self.rest(Duration::from_millis(random.u64(..pause_max)), part);
            // Locked during the kill: nothing is checked meanwhile.
            let phase = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
            of_part = if *phase == part { of_part + 1 } else { 0 };
            part = *phase;
            if let Some(phase) = *phase {
                let kind = once(daemon, places, &mut random)?;
                *self.killed.lock().unwrap_or_else(PoisonError::into_inner).entry((phase, kind)).or_default() += 1;
            }
        }
        Ok(())
    }
}

/// Kills a process; returns its kind.
fn once(daemon: &Daemon, places: &Places, random: &mut Rng) -> Result<&'static str, String> {
    if random.u64(..DAEMON_EVERY) == 0 {
        daemon.kill()?;
        thread::sleep(Duration::from_millis(random.u64(..300)));
        // Sometimes kill the next daemon before it listens.
        if random.u64(..4) == 0 {
            daemon.launch()?;
            thread::sleep(Duration::from_millis(random.u64(..200)));
            daemon.kill()?;
        }
        daemon.restart()?;
        return Ok("daemon");
    }
    let disks = places.disks();
    match random.choice(&disks) {
        None => Ok("none"),
        Some(disk) => {
            places.kill(disk.pid)?;
            Ok(if disk.vbd.is_some() { "disk" } else { "image job" })
        }
    }
}
