//! A planned image of a VDI that takes the place of its present one: the data to create it, to exchange both, or to
//! roll that back.
//!
//! It does not know where the content comes from. Invariants: the VDI has its present image, untouched, until the
//! exchange, which is one commit; the file of that image is removed only after it.

use api::{Code, ImageFormat, LogicalBlockSize, Problem};
use repo::Tx;
use repo::catalogue::Image;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::destroy::forget_image;
use super::file::{described, remove_unrecorded};
use super::file_name;
use super::tracking::remove_unneeded_maps;
use crate::daemon::Daemon;

/// The image to create, and its VDI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Replacement {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its present image.
    pub old: Uuid,
    /// The new image, which has no parent.
    pub new: Uuid,
    /// The format of the new image.
    pub format: ImageFormat,
    /// Its size in bytes, which becomes that of the VDI.
    pub size: u64,
    /// The sector size for guests; `None`: that of the storage.
    pub logical_block_size: Option<LogicalBlockSize>,
}

impl Replacement {
    /// The catalogue entry of the new image.
    pub async fn described(&self, daemon: &Daemon) -> Result<Image, Problem> {
        described(daemon, self.sr, self.new, self.format, self.size, None).await
    }

    /// Records the new image as the VDI's, unless a repeated step already has. Changes since earlier states are not
    /// known from here on, for the reason `why`.
    pub fn record_in(&self, tx: &mut Tx<'_>, image: &Image, why: &str) -> Result<(), Problem> {
        if tx.find_image(image.uuid)?.is_some() {
            return Ok(());
        }
        tx.add_image(image)?;
        tx.exchange_vdi(self.vdi, image.uuid, self.logical_block_size, why)
    }

    /// Removes the old image, if none is based on it. One that another program has opened meanwhile is removed later.
    pub async fn remove(&self, daemon: &Daemon) -> Result<(), Problem> {
        match forget_image(daemon, self.old).await {
            Err(problem) if problem.code == Code::InUse => {
                tracing::warn!(vdi = %self.vdi, "its old image stays for now: {problem}");
            }
            removed => removed?,
        }
        remove_unneeded_maps(daemon, self.vdi).await;
        // A client that waits for this task sees the freed space.
        daemon.srs.measure_now(self.sr).await;
        Ok(())
    }

    /// Removes the file of the new image, unless it was exchanged.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        remove_unrecorded(daemon, self.sr, &file_name(self.new, self.format)).await
    }
}
