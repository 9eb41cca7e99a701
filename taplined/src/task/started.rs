//! Threads and processes started by a step: they may end after the step, whose future was dropped when its task was
//! cancelled.
//!
//! Invariant: each of them is counted until it has ended. An undo waits until the count is zero, so no file appears
//! or changes after it.

use std::future::Future;

use tokio::sync::watch;

tokio::task_local! {
    static STARTED: Started;
}

/// The number of threads and processes that run for a task.
#[derive(Clone, Debug)]
pub struct Started(watch::Sender<usize>);

/// One of them; dropping it marks it as ended.
#[derive(Debug)]
#[must_use = "it counts as ended when this is dropped"]
pub struct Running(Option<Started>);

impl Started {
    /// Creates a count of zero.
    pub fn none() -> Started {
        Started(watch::channel(0).0)
    }

    /// Runs `work`, and counts what it starts.
    pub async fn during<T>(&self, work: impl Future<Output = T>) -> T {
        STARTED.scope(self.clone(), work).await
    }

    /// Waits until all have ended.
    pub async fn ended(&self) {
        // The sender is a field of this, so there is no error.
        let _zero = self.0.subscribe().wait_for(|running| *running == 0).await.is_ok();
    }
}

impl Running {
    /// Counts one that the current task is about to start. Work outside of a job is not counted.
    pub fn begin() -> Running {
        let started = STARTED.try_with(Started::clone).ok();
        started.iter().for_each(|started| started.0.send_modify(|running| *running = running.saturating_add(1)));
        Running(started)
    }

    /// Whether it belongs to a job, and is counted.
    pub fn is_counted(&self) -> bool {
        self.0.is_some()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(started) = &self.0 else { return };
        started.0.send_modify(|running| *running = running.saturating_sub(1));
    }
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;

    use super::*;
    use crate::task::blocking;

    #[tokio::test]
    async fn a_thread_that_outlives_its_step_is_waited_for() {
        let (started, (release, wait)) = (Started::none(), mpsc::channel::<()>());
        let step = started.during(blocking("wait", move || {
            wait.recv().ok();
            Ok(())
        }));
        // The step is cancelled when its thread has begun.
        tokio::select! {
            biased;
            _ = step => unreachable!("the thread waits"),
            () = tokio::task::yield_now() => {}
        }
        let ended = tokio::spawn({
            let started = started.clone();
            async move { started.ended().await }
        });
        tokio::task::yield_now().await;
        assert!(!ended.is_finished());
        release.send(()).unwrap();
        ended.await.unwrap();
    }

    #[tokio::test]
    async fn work_of_no_job_is_not_counted() {
        let started = Started::none();
        let _running = Running::begin();
        started.ended().await;
    }
}
