//! Work that blocks, on threads of the tokio runtime.
//!
//! Each closure is behind a pointer, so that tokio's task, a hundred functions, is compiled once and not for each
//! caller.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::{JoinError, JoinHandle, spawn_blocking};

/// Work that runs on a thread.
#[derive(Debug)]
pub struct Blocking<T> {
    thread: JoinHandle<()>,
    result: Arc<Mutex<Option<T>>>,
}

/// Starts `work`, which continues even if its result is not waited for.
pub fn start<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Blocking<T> {
    let result = Arc::new(Mutex::new(None));
    let place = result.clone();
    let work: Box<dyn FnOnce() + Send> = Box::new(move || {
        let done = work();
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
    });
    Blocking { thread: spawn_blocking(work), result }
}

impl<T> Blocking<T> {
    /// Waits for the result, which is returned once. An error: the work has panicked, or the runtime ends.
    pub async fn ended(&mut self) -> Result<T, Died> {
        let joined = (&mut self.thread).await;
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.ok_or(Died(joined.err()))
    }
}

/// The end of work without a result.
#[derive(Debug, thiserror::Error)]
#[error("a thread ended without a result{}", .0.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
pub struct Died(Option<JoinError>);

#[cfg(test)]
mod test {
    #[tokio::test]
    async fn work_that_panics_has_no_result_and_names_its_panic() {
        assert_eq!(super::start(|| 7).ended().await.unwrap(), 7);
        let died = super::start(|| -> u8 { panic!("no luck") }).ended().await.unwrap_err();
        assert!(died.to_string().contains("no luck"), "{died}");
    }
}
