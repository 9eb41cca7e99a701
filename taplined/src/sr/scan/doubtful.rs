//! Finds disks on which an unknown file is based: the daemon died right after a snapshot switched the leaf and the
//! catalogue was then lost, or an older catalogue was restored. Later writes are in that file, and writing to its
//! parent would make it worthless. Such a VDI is diverged until a user decides.
//!
//! Invariant: nothing is added or changed otherwise; a running disk reports its own layers.

use std::collections::HashMap;

use api::Problem;
use repo::Tx;
use repo::catalogue::{Image, ImageState};
use uuid::Uuid;

use super::{examine, list, placement};
use crate::daemon::Daemon;

/// Checks the files of a repository that was just attached. Failure is only logged.
pub async fn hold(daemon: &Daemon, sr: Uuid) {
    super::same_file::hold(daemon, sr).await;
    match look(daemon, sr).await {
        Ok(held) => {
            for (vdi, file) in held {
                tracing::error!(
                    %vdi, %sr, file,
                    "the file is a child of the VDI's image and may hold the latest writes, so the VDI is blocked \
                     until you decide. If the file is not needed, move it away and run: tapline vdi reconcile VDI \
                     --believe catalogue. If it is, make the VDI read-only and scan: the file becomes a VDI of its own"
                );
            }
        }
        Err(problem) => tracing::warn!(%sr, "cannot tell whether files depend on its disks: {problem}"),
    }
}

/// The VDIs that are now diverged, with the files of their children.
async fn look(daemon: &Daemon, uuid: Uuid) -> Result<Vec<(Uuid, String)>, Problem> {
    let directory = daemon.srs.directory(uuid).await?;
    let (sr, sorted) = list(daemon, uuid, &directory).await?;
    if sorted.appeared.is_empty() {
        return Ok(Vec::new());
    }
    let (found, _) = examine(daemon, &sr, &directory, &sorted, None).await?;
    let standing: HashMap<String, String> =
        placement::place(found).placed.into_iter().filter_map(|one| Some((one.parent?, one.found.file.file))).collect();
    daemon.catalogue.write(move |tx| diverge(tx, uuid, &standing)).await
}

/// Marks VDIs as diverged. `standing`: the child files by the file of their parent.
fn diverge(tx: &mut Tx<'_>, sr: Uuid, standing: &HashMap<String, String>) -> Result<Vec<(Uuid, String)>, Problem> {
    let mut held = Vec::new();
    for image in tx.images_of_sr(sr)? {
        let Some(file) = standing.get(&image.file).filter(|_| image.state == ImageState::Ready) else { continue };
        let Some(vdi) = tx.vdi_of_image(image.uuid)? else { continue };
        let shown = tx.vdi(vdi)?;
        if shown.read_only || !shown.users.is_empty() || tx.claimant(vdi)?.is_some() {
            continue;
        }
        tx.set_image(&Image { state: ImageState::Diverged, ..image })?;
        held.push((vdi, file.clone()));
    }
    Ok(held)
}
