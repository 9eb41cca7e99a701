//! Work that may wait for storage, done on a separate thread while the disk's thread continues.
//!
//! It knows nothing about disks. Invariant: the descriptor is signalled when the result is available, also if the work
//! panicked, which then becomes a panic in `fetch`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};

/// A task in progress.
#[derive(Debug)]
pub struct BlockingTask<T> {
    thread: JoinHandle<T>,
    event: Arc<OwnedFd>,
}

/// Signals when it is dropped.
struct Signal(Arc<OwnedFd>);

impl Drop for Signal {
    fn drop(&mut self) {
        // The write cannot fail: the counter is far from full.
        rustix::io::write(&*self.0, &1u64.to_ne_bytes()).ok();
    }
}

impl<T: Send + 'static> BlockingTask<T> {
    /// Starts `work` on a thread.
    pub fn send(work: impl FnOnce() -> T + Send + 'static) -> io::Result<BlockingTask<T>> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let signal = Signal(Arc::clone(&event));
        let thread = std::thread::Builder::new().name("blocking_task".into()).spawn(move || {
            let _signal = signal;
            work()
        })?;
        Ok(BlockingTask { thread, event })
    }

    /// Returns whether the result is available, or will be in a moment.
    pub fn is_back(&self) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&*self.event, &mut count).is_ok() || self.thread.is_finished()
    }

    /// Returns the result; waits for it if necessary.
    pub fn fetch(self) -> T {
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl<T> AsFd for BlockingTask<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod test {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;

    #[test]
    fn the_descriptor_signals_the_result() {
        let (go, wait) = std::sync::mpsc::channel::<u32>();
        let blocking_task = BlockingTask::send(move || wait.recv().unwrap()).unwrap();
        assert!(!blocking_task.is_back());
        go.send(7).unwrap();
        poll(&mut [PollFd::new(&blocking_task, PollFlags::IN)], None).unwrap();
        assert!(blocking_task.is_back());
        assert_eq!(blocking_task.fetch(), 7);
    }
}
