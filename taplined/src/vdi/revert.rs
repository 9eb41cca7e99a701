//! `vdi-revert`: reverts a VDI to one of its snapshots.
//!
//! 1. `file`: a new image that is a child of the snapshot's image or shares its blocks. *If killed:* it is removed.
//! 2. `record`: it becomes the VDI's image, replacing the current one. *If killed before:* as above.
//! 3. `remove`: the old image's file is removed, if no image is based on it. *If killed:* repeated.

use api::{About, ImageFormat, Problem};
use repo::Tx;
use repo::catalogue::Image;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::destroy::forget_image;
use super::file::{described, make_image, remove_unrecorded};
use super::tracking::remove_unneeded_maps;
use super::{Chain, about_vdi, file_name};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Revert {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// The snapshot.
    pub snapshot: Uuid,
    /// The snapshot's image.
    pub state: Uuid,
    /// Its size in bytes.
    pub size: u64,
    /// The VDI's current image.
    pub old: Uuid,
    /// The new image.
    pub new: Uuid,
    /// The format of the new image.
    pub format: ImageFormat,
    /// Whether it shares blocks with the snapshot's image, instead of being its child.
    pub reflink: bool,
}

declare_steps!(
    /// The steps of `vdi-revert`.
    RevertStep { File = "file", Record = "record", Remove = "remove" }
);

impl Job for Revert {
    type Step = RevertStep;

    const VERB: &'static str = "vdi-revert";
    const NO_RETURN: RevertStep = RevertStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi), about_vdi(self.snapshot)]
    }

    async fn step(&self, step: RevertStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            RevertStep::File => self.file(daemon).await,
            RevertStep::Record => {
                let (job, image) = (self.clone(), self.described(daemon).await?);
                daemon.catalogue.write(move |tx| job.record_in(tx, &image)).await
            }
            RevertStep::Remove => self.remove(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        remove_unrecorded(daemon, self.sr, &file_name(self.new, self.format)).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi })
    }
}

impl Revert {
    /// Creates the new image.
    pub async fn file(&self, daemon: &Daemon) -> Result<(), Problem> {
        let state = Chain::of_image(daemon, self.state).await?;
        if !self.reflink {
            return make_image(daemon, self.sr, self.new, self.format, Vec::new(), Some(&state)).await;
        }
        state.share(file_name(self.new, self.format)).await
    }

    /// The catalogue entry of the new image.
    pub async fn described(&self, daemon: &Daemon) -> Result<Image, Problem> {
        let parent = (!self.reflink).then_some(self.state);
        described(daemon, self.sr, self.new, self.format, self.size, parent).await
    }

    /// Records the new image as the VDI's, unless that was done before.
    pub fn record_in(&self, tx: &mut Tx<'_>, image: &Image) -> Result<(), Problem> {
        if tx.find_image(image.uuid)?.is_some() {
            return Ok(());
        }
        tx.add_image(image)?;
        tx.revert_vdi(self.vdi, image.uuid, self.snapshot)
    }

    /// Removes the old image, if none is based on it.
    pub async fn remove(&self, daemon: &Daemon) -> Result<(), Problem> {
        forget_image(daemon, self.old).await?;
        remove_unneeded_maps(daemon, self.vdi).await;
        Ok(())
    }
}
