//! Turns of requests that look at a backup target: each is a process, and those of one target are few at a time.
//!
//! It knows nothing of what they do. Invariant: a turn lasts until every process and thread that was started in it has
//! ended. One that waits for storage that hangs cannot be killed before that answers, so requests that are given up do
//! not add up to more of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use api::{BackupTarget, Code, Problem};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use crate::background;
use crate::task::started::Started;

/// Turns of one target at a time.
const AT_ONE_TIME: usize = 2;

/// The turns of each target that is in use.
#[derive(Debug, Default)]
pub struct Turns(Mutex<HashMap<Uuid, Arc<Semaphore>>>);

#[derive(Debug)]
struct Turn {
    started: Started,
    permit: Option<OwnedSemaphorePermit>,
}

impl Turns {
    fn of(&self, target: Uuid) -> Arc<Semaphore> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A turn and a request that waits for one have a reference.
        all.retain(|_, turns| Arc::strong_count(turns) > 1);
        Arc::clone(all.entry(target).or_insert_with(|| Arc::new(Semaphore::new(AT_ONE_TIME))))
    }

    /// Does `work` in a turn. It gets the time that is left of `patience` after the wait for its turn.
    pub async fn during<T, W: Future<Output = Result<T, Problem>>>(
        &self,
        target: &BackupTarget,
        patience: Duration,
        work: impl FnOnce(Duration) -> W,
    ) -> Result<T, Problem> {
        let began = Instant::now();
        let waited = tokio::time::timeout(patience, self.of(target.uuid).acquire_owned()).await;
        let permit = waited.map_err(|_| {
            let (name, limit) = (&target.name, patience.as_secs());
            let what = format!("the backup target '{name}' has not responded to earlier requests for {limit} s");
            Problem::new(Code::Timeout, what).advise("check the storage that it is on, then try again")
        })?;
        // The semaphore is never closed.
        let turn = Turn { started: Started::none(), permit: permit.ok() };
        turn.started.during(work(patience.saturating_sub(began.elapsed()))).await
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (started, permit) = (self.started.clone(), self.permit.take());
        background::spawn(async move {
            started.ended().await;
            drop(permit);
        });
    }
}

#[cfg(test)]
mod test {
    use std::future::{pending, ready};

    use super::*;
    use crate::task::started::Running;

    const LONG: Duration = Duration::from_secs(3600);

    fn target() -> BackupTarget {
        BackupTarget {
            uuid: Uuid::new_v4(),
            name: "offsite".parse().unwrap(),
            path: "/mnt".parse().unwrap(),
            s3: None,
            target_id: "0".repeat(32),
            key_file: None,
            created: jiff::Timestamp::now(),
        }
    }

    #[tokio::test]
    async fn an_abandoned_request_keeps_its_turn_until_its_process_has_ended() {
        let (turns, target, other) = (Turns::default(), target(), target());
        let mut processes = Vec::new();
        for _ in 0..AT_ONE_TIME {
            let abandoned = turns.during(&target, LONG, |_| async {
                processes.push(Running::begin());
                pending::<Result<(), Problem>>().await
            });
            tokio::select! {
                biased;
                _ = abandoned => unreachable!("it never ends"),
                () = tokio::task::yield_now() => {}
            }
        }
        let refused = turns.during(&target, Duration::ZERO, |_| ready(Ok(()))).await.unwrap_err();
        assert!(refused.code == Code::Timeout && refused.detail.contains("earlier requests"), "{refused}");
        turns.during(&other, Duration::ZERO, |_| ready(Ok(()))).await.unwrap();
        processes.pop();
        turns.during(&target, LONG, |_| ready(Ok(()))).await.unwrap();
    }
}
