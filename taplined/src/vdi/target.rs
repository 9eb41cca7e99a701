//! A planned VDI whose image has no parent: the data to create it or roll that back.

use api::{Description, ImageFormat, Labels, LogicalBlockSize, Name, Problem};
use repo::Tx;
use repo::catalogue::{Among, Image, NewVdi};
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
        let (target, image) = (self.clone(), self.described(daemon).await?);
        daemon.catalogue.write(move |tx| target.record_in(tx, &image)).await
    }

    /// The catalogue entry of its image.
    pub async fn described(&self, daemon: &Daemon) -> Result<Image, Problem> {
        described(daemon, self.sr, self.image, self.format, self.size, None).await
    }

    /// Records it in a commit of the caller, unless a repeated step already has.
    pub fn record_in(&self, tx: &mut Tx<'_>, image: &Image) -> Result<(), Problem> {
        let among = Among::Vdis(image.sr);
        let name = match self.name_is_default && !tx.is_name_free(among, &self.name)? {
            true => tx.free_name(among, &self.name, "-copy")?,
            false => self.name.clone(),
        };
        let vdi = NewVdi {
            uuid: self.vdi,
            image: self.image,
            name,
            description: self.description.clone(),
            labels: self.labels.clone(),
            read_only: false,
            snapshot: None,
            scheduled: false,
            for_backup: false,
            logical_block_size: Some(self.logical_block_size),
        };
        record_once(tx, image, Some(&vdi))
    }

    /// Removes its file.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        remove_unrecorded(daemon, self.sr, &file_name(self.image, self.format)).await
    }
}
