//! Conditions of a changing request on its commit: the response is recorded with its key (`Idempotency-Key`), and the
//! object is still the one that the client has seen (`If-Match`).
//!
//! It knows no HTTP. Invariants: of several requests with the same key, one runs at a time; its changes are recorded
//! in the same commit as its key, so that a repetition, even to another daemon, gets that response. A conditional
//! change is checked in the transaction that makes it, so that no other change comes between.

use std::collections::HashMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, ObjectKind, Problem};
use repo::catalogue::{Answered, RequestKey};
use repo::{Catalogue, View};
use serde::Serialize;
use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

/// The status of a response without a body.
const NO_CONTENT: u16 = 204;

/// Bytes of a hash in an entity tag: 128 bits, so that no two versions of an object share one.
const TAG_BYTES: usize = 16;

/// The request that is being carried out.
#[derive(Debug)]
struct Current {
    /// Its key, until the response is recorded.
    key: Mutex<Option<RequestKey>>,
    condition: Option<Condition>,
}

tokio::task_local! {
    static CURRENT: Arc<Current>;
}

/// The condition of a change on an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The kind of the object.
    pub kind: ObjectKind,
    /// The object's UUID.
    pub uuid: Uuid,
    /// The acceptable entity tags; `None` if any will do.
    pub tags: Option<Vec<String>>,
}

impl Condition {
    /// Refuses if the object is gone or has changed since the client read it.
    pub fn check(&self, view: &View<'_>) -> Result<(), Problem> {
        let now = tag_of(&representation(view, self.kind, self.uuid)?);
        if self.tags.as_ref().is_none_or(|tags| tags.contains(&now)) {
            return Ok(());
        }
        let what = format!("{} was changed since its ETag was read; it has {now} now", self.uuid);
        Err(Problem::new(Code::Changed, what)
            .field("if-match")
            .advise("get it again, decide whether the change still makes sense, and ask with its new ETag"))
    }
}

/// An object in the form of a response.
pub fn representation(view: &View<'_>, kind: ObjectKind, uuid: Uuid) -> Result<Vec<u8>, Problem> {
    let text = match kind {
        ObjectKind::Sr => serde_json::to_vec(&view.shown_sr(uuid)?),
        ObjectKind::Vdi => serde_json::to_vec(&view.vdi(uuid)?),
        ObjectKind::Vbd => serde_json::to_vec(&view.vbd(uuid)?),
        ObjectKind::Vm => serde_json::to_vec(&view.vm(uuid)?),
        ObjectKind::Task => serde_json::to_vec(&view.task(uuid)?),
        ObjectKind::Host => return Err(Problem::new(Code::Internal, "the host is not in the catalogue")),
    };
    text.map_err(|error| Problem::failed("encode the response", error))
}

/// The entity tag of a representation (RFC 9110, 8.8.3): a strong one, since it changes with every byte.
pub fn tag_of(representation: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, representation);
    let digits: String = hash.as_ref().iter().take(TAG_BYTES).map(|byte| format!("{byte:02x}")).collect();
    format!("\"{digits}\"")
}

/// Takes the key of the current request, to record its response; can be taken once.
pub fn take_key() -> Option<RequestKey> {
    CURRENT.try_with(|current| current.key.lock().unwrap_or_else(PoisonError::into_inner).take()).ok().flatten()
}

/// The condition of the current request.
pub fn condition() -> Option<Condition> {
    CURRENT.try_with(|current| current.condition.clone()).ok().flatten()
}

/// Executes a request; returns its key if no response was recorded.
pub async fn during<T>(
    key: Option<RequestKey>,
    condition: Option<Condition>,
    work: impl Future<Output = T>,
) -> (T, Option<RequestKey>) {
    let current = Arc::new(Current { key: Mutex::new(key), condition });
    let done = CURRENT.scope(current.clone(), work).await;
    let left = current.key.lock().unwrap_or_else(PoisonError::into_inner).take();
    (done, left)
}

/// Makes a change, whose result is the response with this status.
pub async fn change<T, F>(catalogue: &Catalogue, status: u16, change: F) -> Result<T, Problem>
where
    T: Serialize + Send + 'static,
    F: FnOnce(&mut repo::Tx<'_>) -> Result<T, Problem> + Send + 'static,
{
    let (key, condition) = (take_key(), condition());
    let changed = catalogue.write(move |tx| {
        condition.map_or(Ok(()), |condition| condition.check(tx))?;
        let changed = change(tx)?;
        if let Some(key) = key {
            let body = match status {
                NO_CONTENT => String::new(),
                _ => serde_json::to_string(&changed).map_err(|error| Problem::failed("encode a response", error))?,
            };
            tx.keep_answer(&key, &Answered::Done { status, body })?;
        }
        Ok(changed)
    });
    changed.await
}

/// The caller and its key.
type CallerKey = (String, String);

/// The requests with keys in progress.
#[derive(Clone, Debug, Default)]
pub struct KeyLocks(Arc<Mutex<HashMap<CallerKey, Arc<tokio::sync::Mutex<()>>>>>);

/// Excludes other requests with the same key until dropped.
#[derive(Debug)]
pub struct KeyLock {
    key_of: CallerKey,
    locks: KeyLocks,
    _held: OwnedMutexGuard<()>,
}

impl KeyLocks {
    fn entries(&self) -> MutexGuard<'_, HashMap<CallerKey, Arc<tokio::sync::Mutex<()>>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until no other request with this key is in progress.
    pub async fn wait(&self, key: &RequestKey) -> KeyLock {
        let key_of = (key.asker.clone(), key.key.clone());
        let lock = self.entries().entry(key_of.clone()).or_default().clone();
        KeyLock { key_of, locks: self.clone(), _held: lock.lock_owned().await }
    }
}

impl Drop for KeyLock {
    fn drop(&mut self) {
        let mut entries = self.locks.entries();
        // One reference is the map's and one ours; each waiting request has another.
        if entries.get(&self.key_of).is_some_and(|lock| Arc::strong_count(lock) <= 2) {
            entries.remove(&self.key_of);
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
        let locks = KeyLocks::default();
        let first = locks.wait(&key()).await;
        let second = tokio::spawn({
            let locks = locks.clone();
            async move { locks.wait(&key()).await }
        });
        drop(locks.wait(&RequestKey { key: "b".into(), ..key() }).await);
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        drop(first);
        drop(second.await.unwrap());
        assert!(locks.entries().is_empty());
    }

    #[tokio::test]
    async fn a_key_is_used_once_and_not_by_background_work() {
        let work = async {
            let behind = tokio::spawn(async { take_key() }).await.unwrap();
            (behind, take_key(), take_key())
        };
        assert_eq!(during(Some(key()), None, work).await, ((None, Some(key()), None), None));
        assert_eq!(during(Some(key()), None, async {}).await.1, Some(key()));
    }
}
