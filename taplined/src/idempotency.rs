//! Carries out repeated requests only once: a client that got no response repeats the request with the same key
//! (`Idempotency-Key`).
//!
//! It knows no HTTP. Invariants: of several requests with the same key, one runs at a time; what it began or created is
//! recorded in the same commit as its key, so that a repetition, even to another daemon, gets that response.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::Problem;
use repo::Catalogue;
use repo::catalogue::{Answered, RequestKey};
use serde::Serialize;
use tokio::sync::OwnedMutexGuard;

tokio::task_local! {
    /// The key of the request that is being done, until it is recorded.
    static KEY: Arc<Mutex<Option<RequestKey>>>;
}

/// Takes the key of the current request, to record its response: it can be taken once.
pub fn take() -> Option<RequestKey> {
    KEY.try_with(|key| key.lock().unwrap_or_else(PoisonError::into_inner).take()).ok().flatten()
}

/// Executes a request with a key; releases the key if no response was recorded.
pub async fn during<T>(key: RequestKey, work: impl Future<Output = T>) -> (T, Option<RequestKey>) {
    let key = Arc::new(Mutex::new(Some(key)));
    let done = KEY.scope(key.clone(), work).await;
    let left = key.lock().unwrap_or_else(PoisonError::into_inner).take();
    (done, left)
}

/// Creates an object, which is the response with this status.
pub async fn make<T, F>(catalogue: &Catalogue, status: u16, make: F) -> Result<T, Problem>
where
    T: Serialize + Send + 'static,
    F: FnOnce(&mut repo::Tx<'_>) -> Result<T, Problem> + Send + 'static,
{
    let key = take();
    let made = catalogue.write(move |tx| {
        let made = make(tx)?;
        if let Some(key) = key {
            let body = serde_json::to_string(&made).map_err(|error| Problem::failed("encode a response", error))?;
            tx.keep_answer(&key, &Answered::Done { status, body })?;
        }
        Ok(made)
    });
    made.await
}

/// Whose key, and which.
type Whose = (String, String);

/// The requests with keys that are being done.
#[derive(Clone, Debug, Default)]
pub struct Turns(Arc<Mutex<HashMap<Whose, Arc<tokio::sync::Mutex<()>>>>>);

/// No other request with its key is executed in the meantime.
#[derive(Debug)]
pub struct Turn {
    whose: Whose,
    turns: Turns,
    _held: OwnedMutexGuard<()>,
}

impl Turns {
    fn entries(&self) -> MutexGuard<'_, HashMap<Whose, Arc<tokio::sync::Mutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other request with this key is being done.
    pub async fn wait(&self, key: &RequestKey) -> Turn {
        let whose = (key.asker.clone(), key.key.clone());
        let lock = self.entries().entry(whose.clone()).or_default().clone();
        Turn { whose, turns: self.clone(), _held: lock.lock_owned().await }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut entries = self.turns.entries();
        // One reference is the map's and one ours; each waiting request has another.
        if entries.get(&self.whose).is_some_and(|lock| Arc::strong_count(lock) <= 2) {
            entries.remove(&self.whose);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn key() -> RequestKey {
        RequestKey { asker: "user 0".into(), key: "a".into(), hash: [0; 32] }
    }

    #[tokio::test]
    async fn requests_with_the_same_key_are_serialized_without_leftovers() {
        let turns = Turns::default();
        let first = turns.wait(&key()).await;
        let second = tokio::spawn({
            let turns = turns.clone();
            async move { turns.wait(&key()).await }
        });
        drop(turns.wait(&RequestKey { key: "b".into(), ..key() }).await);
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop(first);
        drop(second.await.unwrap());
        assert!(turns.entries().is_empty());
    }

    #[tokio::test]
    async fn a_key_is_used_once_and_not_by_background_work() {
        let work = async {
            let behind = tokio::spawn(async { take() }).await.unwrap();
            (behind, take(), take())
        };
        assert_eq!(during(key(), work).await, ((None, Some(key()), None), None));
        assert_eq!(during(key(), async {}).await.1, Some(key()));
    }
}
