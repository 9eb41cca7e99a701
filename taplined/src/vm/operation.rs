//! Operations in progress on VMs: at most one per VM.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use tokio::sync::watch;
use uuid::Uuid;

/// The operations in progress.
#[derive(Clone, Debug, Default)]
pub struct Operations(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    /// By VM; a task that waits for the end of one holds a clone of its sender.
    running: HashMap<Uuid, watch::Sender<()>>,
    /// The number of operations begun, on all VMs.
    begun: u64,
}

/// A point in time at which no operation was in progress on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdlePoint(u64);

/// An operation in progress; dropping it ends it.
#[derive(Debug)]
pub struct Operation {
    vm: Uuid,
    operations: Operations,
    _lives: watch::Receiver<()>,
}

impl Operations {
    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation; refused while another one is in progress on the VM.
    pub fn begin(&self, vm: Uuid) -> Result<Operation, Problem> {
        let mut entries = self.entries();
        if entries.running.contains_key(&vm) {
            let what = format!("another task is working on VM {vm}");
            return Err(Problem::new(Code::Busy, what).advise("wait for it or cancel it"));
        }
        let (ends, lives) = watch::channel(());
        entries.running.insert(vm, ends);
        entries.begun = entries.begun.wrapping_add(1);
        Ok(Operation { vm, operations: self.clone(), _lives: lives })
    }

    /// Whether an operation is in progress on the VM.
    pub fn is_busy(&self, vm: Uuid) -> bool {
        self.entries().running.contains_key(&vm)
    }

    /// Waits until no operation is in progress on the VM, without beginning one.
    pub async fn idle(&self, vm: Uuid) -> IdlePoint {
        loop {
            let other = {
                let entries = self.entries();
                match entries.running.get(&vm) {
                    None => return IdlePoint(entries.begun),
                    Some(other) => other.clone(),
                }
            };
            other.closed().await;
        }
    }

    /// Whether no operation has begun on any VM since.
    pub fn is_idle_since(&self, since: IdlePoint) -> bool {
        self.entries().begun == since.0
    }

    /// Begins an operation as soon as none is in progress on the VM.
    pub async fn wait(&self, vm: Uuid) -> Operation {
        loop {
            let other = self.entries().running.get(&vm).cloned();
            match (other, self.begin(vm)) {
                (_, Ok(operation)) => return operation,
                (Some(other), Err(_)) => other.closed().await,
                // It ended just now.
                (None, Err(_)) => {}
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // Before the receiver is dropped, for which the next operation waits.
        self.operations.entries().running.remove(&self.vm);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn one_operation_at_a_time_in_order() {
        let operations = Operations::default();
        let (vm, other) = (Uuid::new_v4(), Uuid::new_v4());
        let first = operations.begin(vm).unwrap();
        assert_eq!(operations.begin(vm).unwrap_err().code, Code::Busy);
        drop(operations.begin(other).unwrap());
        let waiting = tokio::spawn({
            let operations = operations.clone();
            async move { operations.wait(vm).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        let second = waiting.await.unwrap();
        assert_eq!(operations.begin(vm).unwrap_err().code, Code::Busy);
        drop(second);
        let before = operations.idle(vm).await;
        assert!(operations.is_idle_since(before));
        operations.begin(vm).unwrap();
        assert!(!operations.is_idle_since(before));
    }
}
