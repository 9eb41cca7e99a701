//! The service manager's watchdog (sd_notify(3), WATCHDOG=1), which is notified for as long as the daemon is able to
//! work.
//!
//! Invariants: it is notified only if tokio's threads, the catalogue's writer and a reader have just responded;
//! without a watchdog nothing here wakes up, otherwise once per half of the watchdog's interval.

use std::time::Duration;

use crate::background;
use crate::daemon::Daemon;
use crate::notify;

/// Notifies for the lifetime of the daemon; does nothing without a receiver.
pub fn begin(daemon: Daemon) {
    let Some(limit) = interval() else { return };
    background::spawn(async move {
        loop {
            alive(&daemon).await;
            notify::alive();
            tokio::time::sleep(limit / 2).await;
        }
    });
}

/// Returns when the catalogue can be changed and read. A refusal counts as a response: a full file system is reported
/// to callers and is no reason for a restart. An empty change writes nothing.
async fn alive(daemon: &Daemon) {
    let wrote = daemon.catalogue.write(|_| Ok(())).await;
    let read = daemon.catalogue.read(|_| Ok(())).await;
    if let Err(problem) = wrote.and(read) {
        tracing::debug!("the catalogue responds, but refuses: {problem}");
    }
}

/// The watchdog's interval, if the service manager has one for this process.
fn interval() -> Option<Duration> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let other = number("WATCHDOG_PID").is_some_and(|pid| pid != u64::from(std::process::id()));
    number("WATCHDOG_USEC").filter(|limit| *limit > 0 && !other).map(Duration::from_micros)
}
