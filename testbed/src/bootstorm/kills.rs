//! Kills the daemon and its disk processes, at moments that a seed decides, for as long as it may.
//!
//! It is a thread of its own. While it is held nothing is killed, and the daemon runs and listens.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::daemon::Daemon;
use crate::daemon::processes::Places;

/// Between two kills of a part, in milliseconds, at most: the longer it takes the rarer they are, so that everything
/// comes to its end, also guests that are translated on a loaded machine.
const PAUSE_MAX: u64 = 600;
const PAUSE_GROWS: u64 = 30;
const PAUSE_LIMIT: u64 = 20_000;

/// How often it is looked whether there is still something to wait for.
const STEP: Duration = Duration::from_millis(50);

/// Of so many kills one is of the daemon.
const DAEMON_EVERY: u64 = 5;

/// Who was killed, how often, by phase and kind.
pub type Killed = BTreeMap<(&'static str, &'static str), u64>;

/// Kills, unless it is held.
pub struct Killer {
    /// It is over for good.
    over: AtomicBool,
    /// The phase in which it may kill; none while it is held. Locked while it kills and starts again.
    phase: Mutex<Option<&'static str>>,
    killed: Mutex<Killed>,
}

impl Killer {
    /// Holds still.
    pub fn held() -> Killer {
        Killer { over: AtomicBool::new(false), phase: Mutex::new(None), killed: Mutex::default() }
    }

    /// From now on it kills.
    pub fn loose(&self, phase: &'static str) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = Some(phase);
    }

    /// From now on it does not. The daemon is there when this returns.
    pub fn hold(&self) {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Whom it has killed.
    pub fn killed(&self) -> Killed {
        self.killed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It is over.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Waits, but not longer than the part lasts.
    fn rest(&self, pause: Duration, part: Option<&'static str>) {
        let begin = Instant::now();
        let is_so = || *self.phase.lock().unwrap_or_else(PoisonError::into_inner) == part;
        while begin.elapsed() < pause && is_so() && !self.over.load(Ordering::Relaxed) {
            thread::sleep(STEP.min(pause.saturating_sub(begin.elapsed())));
        }
    }

    /// Kills until it is over.
    pub fn run(&self, daemon: &Daemon, places: &Places, seed: u64) -> Result<(), String> {
        let mut random = Rng::with_seed(seed);
        let (mut of_part, mut part) = (0, None);
        while !self.over.load(Ordering::Relaxed) {
            let pause_max = (PAUSE_MAX + PAUSE_GROWS * of_part).min(PAUSE_LIMIT);
            self.rest(Duration::from_millis(random.u64(..pause_max)), part);
            // Held as long as it is at work: nobody looks at what is right in the middle of it.
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

/// Kills one; what it was.
fn once(daemon: &Daemon, places: &Places, random: &mut Rng) -> Result<&'static str, String> {
    if random.u64(..DAEMON_EVERY) == 0 {
        daemon.kill()?;
        thread::sleep(Duration::from_millis(random.u64(..300)));
        // Now and then the next one does not come as far as to listen.
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
        None => Ok("nobody"),
        Some(disk) => {
            places.kill(disk.pid)?;
            Ok(if disk.vbd.is_some() { "disk" } else { "image job" })
        }
    }
}
