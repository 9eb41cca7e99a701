//! Backs up and verifies the catalogue while the daemon runs: daily, if it has changed, when no work is running; and
//! backs it up when the daemon stops.
//!
//! Invariants: none of this runs on the writer's thread or touches a disk process; a failure is logged and blocks
//! nothing.

use std::time::Duration;

use api::{Backup, BackupReason, Problem};
use jiff::Timestamp;
use repo::catalogue::backup;

use crate::background;
use crate::daemon::Daemon;
use crate::task::blocking;

/// Delay of the first check, because a host that has just booted is busy; and of the next attempt if the catalogue
/// was busy. Both are at most the interval between checks.
const SOON: Duration = Duration::from_secs(600);

/// The state of the last backup.
#[derive(Debug, Default)]
pub struct Care {
    /// Locked while a backup is made; the number of commits at the start of the last one.
    copied: tokio::sync::Mutex<u64>,
}

impl Care {
    /// Starts the maintenance, for the lifetime of the daemon. Writes during the daemon's start do not count as
    /// changes.
    pub fn begin(&self, daemon: &Daemon) {
        if let Ok(mut copied) = self.copied.try_lock() {
            *copied = daemon.catalogue.commits();
        }
        background::spawn(maintain(daemon.clone()));
    }

    /// The existing backups, newest first.
    pub async fn backups(&self, daemon: &Daemon) -> Result<Vec<Backup>, Problem> {
        let directory = daemon.config.backups();
        blocking("list the backups", move || backup::list(&directory)).await
    }

    /// Creates a backup, even if the caller stops waiting; concurrent backups would have the same file name.
    pub async fn back_up(&self, daemon: &Daemon, reason: BackupReason) -> Result<Backup, Problem> {
        let at_work = daemon.clone();
        let made = background::spawn(async move { at_work.care.make(&at_work, reason).await }).await;
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
            try_backup(daemon, "when the daemon stopped").await;
        }
    }
}

async fn try_backup(daemon: &Daemon, when: &str) {
    if let Err(problem) = daemon.care.back_up(daemon, BackupReason::Daily).await {
        tracing::error!("the catalogue could not be backed up {when}: {problem}");
    }
}

async fn maintain(daemon: Daemon) {
    let every = Duration::from_secs(daemon.config.catalogue.backup_interval.into());
    let soon = SOON.min(every);
    tokio::time::sleep(soon).await;
    let mut examined = None;
    loop {
        let commits = daemon.catalogue.commits();
        // Nothing was written since the last check: there can be no new error.
        if examined != Some(commits) {
            if is_busy(&daemon).await {
                tokio::time::sleep(soon).await;
                continue;
            }
            // A damaged catalogue must not replace good backups.
            if daemon.catalogue.examine().await.is_ok() {
                examined = Some(commits);
                if is_due(&daemon, every).await {
                    try_backup(&daemon, "today").await;
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

/// Whether tasks are running. Tasks that are stuck or keep failing do not count: they may stay for weeks, and must
/// not prevent backups.
async fn is_busy(daemon: &Daemon) -> bool {
    !daemon.catalogue.read(|view| view.count_working_tasks()).await.is_ok_and(|working| working == 0)
}

/// Whether the newest daily backup is old enough. A backup from the future was made with a wrong clock and does not
/// count.
async fn is_due(daemon: &Daemon, every: Duration) -> bool {
    let found = daemon.care.backups(daemon).await.unwrap_or_default();
    let now = Timestamp::now();
    let newest = found.iter().find(|backup| backup.reason == BackupReason::Daily && backup.created <= now);
    // The previous check may have begun a little later in its interval than this one.
    let old_enough = every.as_secs() * 23 / 24;
    newest.is_none_or(|newest| now.duration_since(newest.created).unsigned_abs().as_secs() >= old_enough)
}
