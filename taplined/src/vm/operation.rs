//! Operations in progress on VMs: at most one per VM.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::{Code, Problem};
use tokio::sync::watch;
use uuid::Uuid;

/// The operations in progress; a task that waits for the end of one holds the other side of its channel.
#[derive(Clone, Debug, Default)]
pub struct Operations(Arc<Mutex<HashMap<Uuid, watch::Sender<()>>>>);

/// An operation; over when it is dropped.
#[derive(Debug)]
pub struct Operation {
    vm: Uuid,
    operations: Operations,
    _lives: watch::Receiver<()>,
}

impl Operations {
    fn entries(&self) -> MutexGuard<'_, HashMap<Uuid, watch::Sender<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins an operation, if none is under way with the VM.
    pub fn begin(&self, vm: Uuid) -> Result<Operation, Problem> {
        let mut entries = self.entries();
        if entries.contains_key(&vm) {
            let what = format!("another task is working on VM {vm}");
            return Err(Problem::new(Code::Busy, what).advise("wait for it or cancel it"));
        }
        let (ends, lives) = watch::channel(());
        entries.insert(vm, ends);
        Ok(Operation { vm, operations: self.clone(), _lives: lives })
    }

    /// Whether one is under way with the VM.
    pub fn is_busy(&self, vm: Uuid) -> bool {
        self.entries().contains_key(&vm)
    }

    /// Begins an operation as soon as none is under way with the VM.
    pub async fn wait(&self, vm: Uuid) -> Operation {
        loop {
            let other = self.entries().get(&vm).cloned();
            match (other, self.begin(vm)) {
                (_, Ok(operation)) => return operation,
                (Some(other), Err(_)) => other.closed().await,
                // It began just now.
                (None, Err(_)) => {}
            }
        }
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // Before the receiver goes, for which the next one waits.
        self.operations.entries().remove(&self.vm);
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
        operations.begin(vm).unwrap();
    }
}
