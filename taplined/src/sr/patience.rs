//! Access to storage that may not respond: on a separate thread, and with a time limit.
//!
//! A thread that is blocked in a system call by an unreachable server cannot be stopped. It is abandoned, logged and
//! counted; a repository that blocks too many threads is not accessed again until one of them has returned. Calls that
//! are under way at that moment may block more, and steps of jobs are not counted (`task::blocking`).

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{Code, Problem};
use repo::blocking::{Blocking, Died};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::background;
use crate::task::started::Running;

/// Abandoned calls to one repository from which on no other begins.
const STUCK_MAX: usize = 4;

/// A limit on waiting for storage.
#[derive(Clone, Debug)]
pub struct Patience {
    limit: Duration,
    stuck: Arc<Mutex<HashMap<Uuid, usize>>>,
    changed: Arc<Notify>,
}

impl Patience {
    /// Creates the limit for storage that responds within `limit`.
    pub fn new(limit: Duration) -> Patience {
        Patience { limit, stuck: Arc::default(), changed: Arc::default() }
    }

    fn stuck(&self) -> MutexGuard<'_, HashMap<Uuid, usize>> {
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The repositories whose storage does not respond.
    pub fn silent(&self) -> HashSet<Uuid> {
        self.stuck().keys().copied().collect()
    }

    /// Waits until [`Patience::silent`] may have changed. Only one caller may wait.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Calls the storage of a repository. `tried` is used in the error if it does not respond.
    pub fn ask<T, F>(
        &self,
        sr: Uuid,
        tried: &'static str,
        question: F,
    ) -> impl Future<Output = Result<T, Problem>> + Send + use<T, F>
    where
        T: Send + 'static,
        F: FnOnce() -> Result<T, Problem> + Send + 'static,
    {
        let patience = self.clone();
        async move {
            if patience.stuck().get(&sr).is_some_and(|stuck| *stuck >= STUCK_MAX) {
                return Err(silent(sr, tried, "earlier requests have not been answered"));
            }
            let running = Running::begin();
            let mut running_call = repo::blocking::start(move || {
                let answer = question();
                drop(running);
                answer
            });
            match tokio::time::timeout(patience.limit, running_call.ended()).await {
                Ok(answer) => answer.map_err(ended)?,
                Err(_) => {
                    patience.leave(sr, tried, running_call);
                    Err(silent(sr, tried, &format!("no answer in {} s", patience.limit.as_secs())))
                }
            }
        }
    }

    /// Counts an abandoned thread until it returns.
    fn leave<T: Send + 'static>(&self, sr: Uuid, tried: &'static str, mut running_call: Blocking<T>) {
        let stuck = {
            let mut all = self.stuck();
            let stuck = all.entry(sr).or_default();
            *stuck = stuck.saturating_add(1);
            *stuck
        };
        self.changed.notify_one();
        tracing::error!(%sr, tried, stuck, "the storage does not respond; a thread stays blocked on it");
        let patience = self.clone();
        background::spawn(async move {
            // A result this late is of no use.
            drop(running_call.ended().await);
            tracing::info!(%sr, tried, "the storage responded after all");
            let mut all = patience.stuck();
            if let Some(stuck) = all.get_mut(&sr) {
                *stuck = stuck.saturating_sub(1);
            }
            all.retain(|_, stuck| *stuck > 0);
            drop(all);
            patience.changed.notify_one();
        });
    }
}

fn silent(sr: Uuid, tried: &str, why: &str) -> Problem {
    Problem::new(Code::Timeout, format!("cannot {tried}, the repository {sr}: {why}"))
        .advise("check the server or disk")
}

fn ended(died: Died) -> Problem {
    Problem::new(Code::Internal, format!("a request to the storage: {died}"))
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn unresponsive_storage_is_abandoned_and_counted_until_it_responds() {
        let patience = Patience::new(Duration::from_millis(20));
        let (one, other) = (Uuid::new_v4(), Uuid::new_v4());
        let mut locked = Vec::new();
        for _ in 0..STUCK_MAX {
            let (release, wait) = mpsc::channel::<()>();
            locked.push(release);
            let running_call = patience.ask(one, "look", move || {
                wait.recv().ok();
                Ok(())
            });
            assert_eq!(running_call.await.unwrap_err().code, Code::Timeout);
        }
        // Responsive storage gets as much time as a busy machine needs.
        let patience = Patience { limit: Duration::from_secs(60), ..patience };
        // No further thread is given to it, and others are served.
        assert!(patience.ask(one, "look", || Ok(())).await.unwrap_err().detail.contains("earlier requests"));
        patience.ask(other, "look", || Ok(())).await.unwrap();
        drop(locked);
        while patience.stuck().contains_key(&one) {
            tokio::task::yield_now().await;
        }
        patience.ask(one, "look", || Ok(())).await.unwrap();
    }
}
