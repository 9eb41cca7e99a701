//! On whose behalf changes are made: it is recorded with tasks, and is in events.
//!
//! Invariant: a change is recorded as that of the requester of the future that makes it; of the daemon, if no other is
//! named.

use std::future::Future;

use api::Requester;

tokio::task_local! {
    static REQUESTER: Requester;
}

/// Has all changes that `work` makes be those of a requester. What it spawns is not meant.
pub async fn on_behalf_of<T>(requester: Requester, work: impl Future<Output = T>) -> T {
    REQUESTER.scope(requester, work).await
}

/// On whose behalf the current future works.
pub(super) fn current() -> Requester {
    REQUESTER.try_with(Clone::clone).unwrap_or(Requester::Daemon)
}
