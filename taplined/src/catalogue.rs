//! Self-protection of the catalogue (decision 0022): a damaged one is not used, a missing one is not replaced by an
//! empty one, and an intact one is backed up.
//!
//! Invariant: nothing here ever removes or overwrites a catalogue with content; it is renamed instead.

mod care;
mod evidence;
mod put_in_place;
mod rebuild;
mod repositories;

use std::time::Duration;

use api::{BackupReason, Code, Problem};
use repo::catalogue::backup;
use repo::{Catalogue, Tx};

use crate::config::Config;

pub use care::Care;
pub use put_in_place::{init, restore};
pub use rebuild::{absolute, rebuild};

/// Maximum number of backups listed in a message.
const NAMED: usize = 3;

/// The file in the run directory with the number of the last commit: a catalogue with another number is an older
/// copy.
const LAST_COMMIT: &str = "last-commit";

/// Interval between attempts to record an event.
const RECORD_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// Opens the catalogue, or creates the first one of a host that never had one.
pub fn open(config: &Config) -> Result<Catalogue, Problem> {
    let path = config.catalogue();
    if backup::is_nothing(&path) {
        if let Some(evidence) = evidence::of_one_before(config)? {
            let what = format!("the catalogue {} is missing, but one existed before: {evidence}", path.display());
            return Err(Problem::new(Code::Damaged, what));
        }
    }
    Catalogue::open_with(&path, Some(&config.run_directory.join(LAST_COMMIT)), || {
        // Without the backup, a downgrade is impossible; but without a daemon, no space could be freed for a backup.
        match backup::write(&path, &config.backups(), BackupReason::Schema, config.catalogue.backups) {
            Ok(made) => tracing::info!(file = made.file, "catalogue backed up before a schema upgrade"),
            Err(problem) => tracing::error!("upgrading the catalogue's schema without a backup: {problem}"),
        }
    })
}

/// Records something that has already happened, or must be completed: retried while the catalogue's file system accepts
/// no writes. The caller holds the objects concerned until then.
pub async fn record<T, F>(catalogue: &Catalogue, change: F) -> Result<T, Problem>
where
    T: Send + 'static,
    F: Fn(&mut Tx<'_>) -> Result<T, Problem> + Clone + Send + 'static,
{
    let mut logged = false;
    loop {
        match catalogue.write(change.clone()).await {
            Err(problem) if matches!(problem.code, Code::NoSpace | Code::ReadOnly) => {
                if !std::mem::replace(&mut logged, true) {
                    tracing::error!("a change cannot be recorded; retrying: {problem}");
                }
                tokio::time::sleep(RECORD_AGAIN_AFTER).await;
            }
            other => return other,
        }
    }
}

/// Adds advice to a problem with the whole catalogue. `command` is how the daemon is called.
pub fn advise(config: &Config, command: &str, problem: Problem) -> Problem {
    if problem.code != Code::Damaged {
        return problem;
    }
    let found = backup::list(&config.backups()).unwrap_or_default();
    let mut advice = String::from("running disks keep running without the daemon. ");
    if found.is_empty() {
        advice += "If the state directory is on a file system that is not mounted, mount it. There is no backup here";
    } else {
        let named: Vec<String> =
            found.iter().take(NAMED).map(|backup| format!("{} ({:.0})", backup.file, backup.created)).collect();
        let more = found.len().saturating_sub(named.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        advice += &format!("Backups: {}{more}. Restore the newest: {command} --restore latest", named.join(", "));
    }
    advice += &format!(
        ". Without a backup, rebuild the catalogue from the repositories' inventories: {command} --rebuild DIRECTORY…; \
         or start empty: {command} --init. See docs/recover.md"
    );
    let what = match problem.detail.contains(&config.catalogue().display().to_string()) {
        true => problem.detail,
        false => format!("{} ({})", problem.detail, config.catalogue().display()),
    };
    Problem::new(Code::Damaged, what).advise(advice)
}
