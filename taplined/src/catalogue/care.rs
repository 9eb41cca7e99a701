//! Backs up and verifies the catalogue while the daemon runs: daily, if it has changed, when no work is running; and
//! backs it up when the daemon stops.
//!
//! Invariants: none of this runs on the writer's thread or touches a disk process; a failure is logged and blocks
//! nothing.

use std::time::Duration;

use api::{Backup, BackupReason, Problem};
use jiff::Timestamp;
use repo::catalogue::backup;

use crate::daemon::Daemon;
use crate::task::blocking;

/// Time from the start to the first check: a host that has just booted has other things to do.
const FIRST: Duration = Duration::from_secs(600);

/// Interval between checks.
const EVERY: Duration = Duration::from_secs(24 * 3600);

/// How soon again, where tasks were at work.
const AGAIN: Duration = Duration::from_secs(600);

/// The state of the last backup.
#[derive(Debug, Default)]
pub struct Care {
    /// Held while a backup is made; the number of commits before the last one.
    copied: tokio::sync::Mutex<u64>,
}

impl Care {
    /// Maintains the catalogue from now on, for the lifetime of the daemon. Writes of the start do not count as
    /// changes.
    pub fn begin(&self, daemon: &Daemon) {
        if let Ok(mut copied) = self.copied.try_lock() {
            *copied = daemon.catalogue.commits();
        }
        tokio::spawn(look_after(daemon.clone()));
    }

    /// The copies that there are, the newest first.
    pub async fn backups(&self, daemon: &Daemon) -> Result<Vec<Backup>, Problem> {
        let directory = daemon.config.backups();
        blocking("list the backups", move || backup::list(&directory)).await
    }

    /// Creates a backup, even if the caller stops waiting; concurrent backups would have the same file name.
    pub async fn back_up(&self, daemon: &Daemon, reason: BackupReason) -> Result<Backup, Problem> {
        let at_work = daemon.clone();
        let made = tokio::spawn(async move { at_work.care.make(&at_work, reason).await }).await;
        made.map_err(|error| Problem::failed("create a backup", error))?
    }

    async fn make(&self, daemon: &Daemon, reason: BackupReason) -> Result<Backup, Problem> {
        let mut copied = self.copied.lock().await;
        let commits = daemon.catalogue.commits();
        let config = daemon.config.clone();
        let made = blocking("create a backup", move || {
            backup::write(&config.catalogue(), &config.backups(), reason, config.catalogue.backups)
        });
        let made = made.await?;
        *copied = commits;
        tracing::info!(file = made.file, size = made.size, "catalogue backed up");
        Ok(made)
    }

    /// Makes a backup if something has changed since the last one, before the daemon exits.
    pub async fn back_up_at_end(&self, daemon: &Daemon) {
        if *self.copied.lock().await != daemon.catalogue.commits() {
            try_to(daemon, "when the daemon stopped").await;
        }
    }
}

async fn try_to(daemon: &Daemon, when: &str) {
    if let Err(problem) = daemon.care.back_up(daemon, BackupReason::Daily).await {
        tracing::error!("the catalogue could not be backed up {when}: {problem}");
    }
}

async fn look_after(daemon: Daemon) {
    tokio::time::sleep(FIRST).await;
    let mut examined = None;
    loop {
        let commits = daemon.catalogue.commits();
        // Nothing was written since the last check: there can be no new error.
        if examined != Some(commits) {
            if !is_idle(&daemon).await {
                tokio::time::sleep(AGAIN).await;
                continue;
            }
            // A damaged catalogue must not replace good backups.
            if daemon.catalogue.examine().await.is_ok() {
                examined = Some(commits);
                if is_due(&daemon).await {
                    try_to(&daemon, "today").await;
                }
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn is_idle(daemon: &Daemon) -> bool {
    daemon.catalogue.read(|view| view.count_open_tasks()).await.is_ok_and(|open| open == 0)
}

/// Whether the newest daily backup is at least a day old. A backup from the future was made with a wrong clock and does
/// not count.
async fn is_due(daemon: &Daemon) -> bool {
    let found = daemon.care.backups(daemon).await.unwrap_or_default();
    let now = Timestamp::now();
    let newest = found.iter().find(|backup| backup.reason == BackupReason::Daily && backup.made <= now);
    newest.is_none_or(|newest| now.duration_since(newest.made).as_secs() >= 23 * 3600)
}
