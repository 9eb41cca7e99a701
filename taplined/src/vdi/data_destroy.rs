//! `vdi-data-destroy`: a snapshot loses its data, and stays as the beginning of changes.
//!
//! 1. `forget`: the VDI gets an image without a file; its own one is hidden. There is no rollback from here.
//! 2. `remove`: the file of that is removed, if no image is based on it, and then its catalogue entry. Otherwise it is
//!    merged like any hidden image. *If killed:* repeated.
//!
//! Its maps are not touched: they are of the VDI, not of the image.

use api::{About, Code, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::about_vdi;
use super::destroy::Destroy;
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DataDestroy {
    /// The snapshot.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its image.
    pub image: Uuid,
    /// The image that it gets, which has no file.
    pub without: Uuid,
}

declare_steps!(
    /// The steps of `vdi-data-destroy`.
    DataDestroyStep { Forget = "forget", Remove = "remove" }
);

impl Job for DataDestroy {
    type Step = DataDestroyStep;

    const VERB: &'static str = "vdi-data-destroy";
    const NO_RETURN: DataDestroyStep = DataDestroyStep::Forget;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi)]
    }

    /// A VBD was created for it in the meantime, or it is gone with an older catalogue.
    fn is_hopeless(&self, problem: &Problem) -> bool {
        matches!(problem.code, Code::InUse | Code::NotFound)
    }

    async fn step(&self, step: DataDestroyStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        let DataDestroy { vdi, sr, image, without } = *self;
        match step {
            DataDestroyStep::Forget => daemon.catalogue.write(move |tx| tx.remove_data(vdi, without)).await,
            DataDestroyStep::Remove => Destroy { vdi, sr, image, maps: Vec::new() }.remove(daemon).await,
        }
    }

    async fn undo(&self, _: &Daemon) -> Result<(), Problem> {
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi })
    }
}
