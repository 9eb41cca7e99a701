//! `vdi-destroy`, and `sr-reclaim` of images that are no longer needed.
//!
//! 1. `forget`: the VDI is removed from the catalogue; its image is hidden. There is no rollback from here.
//! 2. `remove`: the file is removed, if no image is based on it, and then its catalogue entry. *If killed:* repeated.

use api::{About, Code, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::about_vdi;
use super::file::remove_file;
use super::tracking::{remove_unneeded_maps, remove_unrecorded_map};
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// The intent of `vdi-destroy`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Destroy {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its image.
    pub image: Uuid,
    /// Its maps of changed blocks.
    #[serde(default)]
    pub maps: Vec<Uuid>,
}

/// The intent of `sr-reclaim`: removes a hidden image without children.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reclaim {
    /// Its repository.
    pub sr: Uuid,
    /// The image.
    pub image: Uuid,
}

declare_steps!(
    /// The steps of `vdi-destroy`.
    DestroyStep { Forget = "forget", Remove = "remove" }
);

impl Job for Destroy {
    type Step = DestroyStep;

    const VERB: &'static str = "vdi-destroy";
    const NO_RETURN: DestroyStep = DestroyStep::Forget;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi)]
    }

    /// A VBD was created for it in the meantime.
    fn is_hopeless(&self, problem: &Problem) -> bool {
        problem.code == Code::InUse
    }

    async fn step(&self, step: DestroyStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            DestroyStep::Forget => {
                let vdi = self.vdi;
                daemon.catalogue.write(move |tx| tx.remove_vdi(vdi)).await
            }
            DestroyStep::Remove => self.remove(daemon).await,
        }
    }

    async fn undo(&self, _: &Daemon) -> Result<(), Problem> {
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi })
    }
}

impl Destroy {
    /// Removes the image of the VDI, which is no longer in the catalogue.
    pub async fn remove(&self, daemon: &Daemon) -> Result<(), Problem> {
        for map in &self.maps {
            remove_unrecorded_map(daemon, self.sr, *map).await?;
        }
        if !self.maps.is_empty() {
            // Later states may have had maps for the sake of this one.
            let sr = self.sr;
            for (vdi, ..) in daemon.catalogue.read(move |view| view.tracked_vdis(sr)).await? {
                remove_unneeded_maps(daemon, vdi).await;
            }
        }
        match forget_image(daemon, self.image).await {
            Err(problem) if problem.code == Code::InUse => {
                // The image is removed when it is no longer in use.
                tracing::warn!(vdi = %self.vdi, "{problem}; retrying later");
                Ok(())
            }
            removed => {
                // A client that waits for this task sees the freed space.
                daemon.srs.measure_now(self.sr).await;
                removed
            }
        }
    }
}

declare_steps!(
    /// The steps of `sr-reclaim`.
    ReclaimStep { Remove = "remove" }
);

impl Job for Reclaim {
    type Step = ReclaimStep;

    const VERB: &'static str = "sr-reclaim";
    const NO_RETURN: ReclaimStep = ReclaimStep::Remove;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![About { kind: api::ObjectKind::Sr, uuid: self.sr }]
    }

    async fn step(&self, _: ReclaimStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        forget_image(daemon, self.image).await
    }

    async fn undo(&self, _: &Daemon) -> Result<(), Problem> {
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.sr })
    }
}

/// Removes an image without VDI and children: its file first, so that if the daemon dies in between, the entry is
/// still found.
pub async fn forget_image(daemon: &Daemon, image: Uuid) -> Result<(), Problem> {
    let found = daemon.catalogue.read(move |view| {
        let Some(found) = view.find_image(image)? else { return Ok(None) };
        let needed = !view.children(image)?.is_empty() || view.vdi_of_image(image)?.is_some();
        Ok((!needed).then_some(found))
    });
    let Some(found) = found.await? else { return Ok(()) };
    remove_file(daemon, found.sr, &found.file).await?;
    daemon.catalogue.write(move |tx| tx.remove_image(image)).await
}
