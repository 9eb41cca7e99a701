//! The service manager's watchdog (sd_notify(3), WATCHDOG=1): it is told that the daemon lives for as long as that can
//! do its work.
//!
//! It knows no object. Invariants: nothing is told unless the threads of tokio's, the catalogue's writer and a reader
//! have answered just then; where nobody asked for it nothing here wakes up, and else once in half of the time that was
//! given.

use std::time::Duration;

use crate::daemon::Daemon;
use crate::notify;

/// Tells for as long as the daemon lives; does nothing if nobody listens.
pub fn begin(daemon: Daemon) {
    let Some(limit) = asked_for() else { return };
    tokio::spawn(async move {
        loop {
            alive(&daemon).await;
            notify::alive();
            tokio::time::sleep(limit / 2).await;
        }
    });
}

/// Returns when the catalogue can be changed and read. That it refuses is an answer: a full file system is told to who
/// asks, and is no reason to start anew. A change of nothing writes nothing.
async fn alive(daemon: &Daemon) {
    let wrote = daemon.catalogue.write(|_| Ok(())).await;
    let read = daemon.catalogue.read(|_| Ok(())).await;
    if let Err(problem) = wrote.and(read) {
        tracing::debug!("the catalogue responds, but refuses: {problem}");
    }
}

/// The time in which it wants to hear of this process, if the service manager does.
fn asked_for() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let other = number("WATCHDOG_PID").is_some_and(|pid| pid != u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|limit| *limit > 0 && !other).map(Duration::from_micros)
}
