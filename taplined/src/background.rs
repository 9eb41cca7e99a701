//! Tokio tasks of the daemon.
//!
//! Each future is behind a pointer, so that tokio's task, a hundred functions, is compiled for each type of result and
//! not for each future.

use std::future::Future;

use futures_util::future::BoxFuture;
use tokio::task::JoinHandle;

/// Starts `work`, which continues if its result is not waited for.
pub fn spawn<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
    let work: BoxFuture<'static, T> = Box::pin(work);
    tokio::spawn(work)
}
