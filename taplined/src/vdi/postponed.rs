//! Repositories in which cleanup was prevented by other operations, and the time of its retry.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use uuid::Uuid;

/// Pause before a prevented cleanup is retried; doubled each time.
const AGAIN_AFTER: Duration = Duration::from_secs(30);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(3600);

/// Repositories with postponed cleanup.
#[derive(Debug, Default)]
pub struct Postponed(Mutex<HashMap<Uuid, Pause>>);

#[derive(Debug, Default)]
struct Pause {
    last: Duration,
    /// Whether a retry is already scheduled.
    waiting: bool,
}

impl Postponed {
    fn pauses(&self) -> MutexGuard<'_, HashMap<Uuid, Pause>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Pause before a retry in a repository; `None` if one is already scheduled.
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

    /// Resets the pause after a success.
    pub fn done(&self, sr: Uuid) {
        if let Some(pause) = self.pauses().get_mut(&sr) {
            pause.last = Duration::ZERO;
        }
    }
}
