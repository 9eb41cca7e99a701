//! A planned VDI whose image has no parent: the data to create it or roll that back.

use api::{Description, ImageFormat, Labels, LogicalBlockSize, Name, Problem};
use repo::catalogue::{Among, NewVdi};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::file::{described, record_once, remove_unrecorded};
use super::file_name;
use crate::daemon::Daemon;

/// The VDI to create.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// The VDI.
    pub vdi: Uuid,
    /// Its image.
    pub image: Uuid,
    /// The repository.
    pub sr: Uuid,
    /// Its name.
    pub name: Name,
    /// The request had no name: if this one is taken, another one is chosen.
    pub name_is_default: bool,
    /// Its description.
    pub description: Description,
    /// Its tags and `other_config` strings.
    pub labels: Labels,
    /// Its format.
    pub format: ImageFormat,
    /// Its size in bytes.
    pub size: u64,
    /// The sector size for its guest.
    pub logical_block_size: LogicalBlockSize,
}

impl Target {
    /// Records it, unless a repeated step already has.
    pub async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let image = described(daemon, self.sr, self.image, self.format, self.size, None).await?;
        let vdi = NewVdi {
            uuid: self.vdi,
            image: self.image,
            name: self.name.clone(),
            description: self.description.clone(),
            labels: self.labels.clone(),
            read_only: false,
            snapshot: None,
            scheduled: false,
            logical_block_size: Some(self.logical_block_size),
        };
        let name_is_default = self.name_is_default;
        let recorded = daemon.catalogue.write(move |tx| {
            let among = Among::Vdis(image.sr);
            let name = match name_is_default && !tx.is_name_free(among, &vdi.name)? {
                true => tx.free_name(among, &vdi.name, "-copy")?,
                false => vdi.name.clone(),
            };
            record_once(tx, &image, Some(&NewVdi { name, ..vdi }))
        });
        recorded.await
    }

    /// Removes its file.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        remove_unrecorded(daemon, self.sr, &file_name(self.image, self.format)).await
    }
}
