//! Gates at which verbs wait while the process of a disk is replaced.
//!
//! It knows no verb and no process. Invariant: while a gate is closed no caller is inside; a caller can tell by the
//! count whether the gate was closed in between.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};
use uuid::Uuid;

/// The gates of all disks.
#[derive(Debug, Default)]
pub struct Gates(Mutex<HashMap<Uuid, Gate>>);

/// The gate of a disk.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<Both>);

#[derive(Debug, Default)]
struct Both {
    lock: Arc<RwLock<()>>,
    closed: AtomicU64,
}

impl Gates {
    /// The gate of a VBD's disk.
    pub fn of(&self, vbd: Uuid) -> Gate {
        let mut gates = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Unused gates need not be kept.
        gates.retain(|other, gate| *other == vbd || Arc::strong_count(&gate.0) > 1);
        gates.entry(vbd).or_default().clone()
    }
}

impl Gate {
    /// Waits until the gate is open, and enters.
    pub async fn enter(&self) -> OwnedRwLockReadGuard<()> {
        self.0.lock.clone().read_owned().await
    }

    /// Closes the gate once no caller is inside; dropping the returned guard reopens it.
    pub async fn close(&self) -> OwnedRwLockWriteGuard<()> {
        let closed = self.0.lock.clone().write_owned().await;
        self.0.closed.fetch_add(1, Ordering::SeqCst);
        closed
    }

    /// How often the gate was closed.
    pub fn count(&self) -> u64 {
        self.0.closed.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn a_closed_gate_is_empty_and_earlier_visitors_notice_it() {
        let (gates, vbd) = (Gates::default(), Uuid::new_v4());
        let gate = gates.of(vbd);
        let (one, other) = (gate.enter().await, gate.enter().await);
        let before = gate.count();
        let closing = tokio::spawn({
            let gate = gates.of(vbd);
            async move { gate.close().await }
        });
        drop(one);
        tokio::task::yield_now().await;
        assert!(!closing.is_finished());
        drop(other);
        let closed = closing.await.unwrap();
        let entering = tokio::spawn({
            let gate = gates.of(vbd);
            async move { drop(gate.enter().await) }
        });
        tokio::task::yield_now().await;
        assert!(!entering.is_finished());
        drop(closed);
        entering.await.unwrap();
        assert_eq!(gate.count(), before + 1);
    }

    #[test]
    fn unused_gates_are_forgotten() {
        let gates = Gates::default();
        let held = gates.of(Uuid::new_v4());
        (0..100).for_each(|_| drop(gates.of(Uuid::new_v4())));
        assert_eq!(gates.0.lock().unwrap().len(), 2);
        drop(held);
    }
}
