//! The differences between the catalogue and reality: running disks, processes that serve no plugged VBD, and the
//! files and inventories of repositories.
//!
//! Nothing is ever killed, merged or removed because it is missing from the catalogue. This runs when a repository is
//! attached, introduced or scanned, and on request.

mod repository;

use api::{Difference, Problem};
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::plug::stray;
use crate::reconcile::{self, Heal};

/// Compares everything. Returns the differences and what was done about them.
pub async fn all(daemon: &Daemon, heal: Heal) -> Result<Vec<Difference>, Problem> {
    if heal == Heal::Yes {
        stray::adopt_unknown(daemon).await?;
    }
    let mut found = reconcile::all(daemon, heal).await?;
    found.extend(stray::all(daemon).await?);
    found.extend(repository::all(daemon).await?);
    Ok(found)
}

/// Compares the disks of a repository that was attached, introduced or scanned; disks of unknown VBDs are adopted
/// first. Disks that cannot be compared now are compared again before any operation that changes them.
pub async fn heal_sr(daemon: &Daemon, sr: Uuid) {
    if let Err(problem) = stray::adopt_unknown(daemon).await {
        tracing::warn!(%sr, "disks that run for unknown VBDs could not be adopted: {problem}");
    }
    reconcile::of_sr(daemon, sr).await;
}
