//! Repositories in which housekeeping was prevented by other operations, and when it is retried.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use uuid::Uuid;

/// How long to wait before something is tried again that others were in the way of: twice as long each time.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Repositories in which something could not be done, and will be tried again.
#[derive(Debug, Default)]
pub struct Postponed(Mutex<HashMap<Uuid, Pause>>);

#[derive(Debug, Default)]
struct Pause {
    last: Duration,
    /// Whether it is already being waited for.
    waiting: bool,
}

impl Postponed {
    fn pauses(&self) -> MutexGuard<'_, HashMap<Uuid, Pause>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long to wait in a repository; `None` if that is already being waited for.
    pub fn begin(&self, sr: Uuid) -> Option<Duration> {
        let mut pauses = self.pauses();
        let pause = pauses.entry(sr).or_default();
        if pause.waiting {
            return None;
        }
        let next = pause.last.saturating_mul(2).clamp(AGAIN_AFTER, AGAIN_AFTER_MAX);
        *pause = Pause { last: next, waiting: true };
        Some(next)
    }

    pub fn waited(&self, sr: Uuid) {
        if let Some(pause) = self.pauses().get_mut(&sr) {
            pause.waiting = false;
        }
    }

    /// Something was done: the next wait is a short one.
    pub fn done(&self, sr: Uuid) {
        if let Some(pause) = self.pauses().get_mut(&sr) {
            pause.last = Duration::ZERO;
        }
    }
}
