//! Workers: each plug and unplug waits for its turn in the [`Queue`] and releases it when it ends, however it ends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use api::Limits;
use tokio::sync::oneshot;

use super::queue::{Queue, Request, Ticket};

/// The workers of the host.
#[derive(Clone, Debug)]
pub struct Workers(Arc<Mutex<WorkersState>>);

#[derive(Debug)]
struct WorkersState {
    queue: Queue,
    /// The waiting requests, to be notified when they may start.
    waiting: HashMap<Ticket, oneshot::Sender<()>>,
}

/// A worker, or a place in the queue for one; released when dropped.
#[derive(Debug)]
pub struct Turn {
    workers: Workers,
    ticket: Ticket,
}

impl Workers {
    /// Creates the workers, all of them free.
    pub fn new(limits: Limits) -> Workers {
        Workers(Arc::new(Mutex::new(WorkersState { queue: Queue::new(limits), waiting: HashMap::new() })))
    }

    fn state(&self) -> MutexGuard<'_, WorkersState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a worker. Dropping the future gives up the place in the queue.
    pub async fn turn(&self, request: Request) -> Turn {
        let (begin, begins) = oneshot::channel();
        let turn = {
            let mut state = self.state();
            let ticket = state.queue.add(request);
            state.waiting.insert(ticket, begin);
            state.advance();
            Turn { workers: self.clone(), ticket }
        };
        // The sender is dropped only with the turn itself.
        begins.await.ok();
        turn
    }
}

impl WorkersState {
    fn advance(&mut self) {
        while let Some(ticket) = self.queue.next() {
            if let Some(begin) = self.waiting.remove(&ticket) {
                // A request cancelled at this moment releases its own turn.
                begin.send(()).ok();
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.workers.state();
        state.waiting.remove(&self.ticket);
        state.queue.end(self.ticket);
        state.advance();
    }
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use api::Mode;
    use uuid::Uuid;

    use super::*;

    fn request() -> Request {
        Request { vbd: Uuid::new_v4(), vm: None, mode: Mode::ReadWrite, memory: 1 }
    }

    #[tokio::test]
    async fn a_turn_is_released_at_its_end_and_on_cancellation() {
        let workers = Workers::new(Limits { plug_window: 1, worker_pool_size: 1, worker_memory: 10 });
        let first = workers.turn(request()).await;
        let waits = tokio::time::timeout(Duration::from_millis(1), workers.turn(request())).await;
        assert!(waits.is_err());
        let third = tokio::spawn({
            let workers = workers.clone();
            async move { workers.turn(request()).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        drop(third.await.unwrap());
        drop(workers.turn(request()).await);
    }
}
