//! `vdi-create`: an empty VDI.
//!
//! 1. `file`: the image's file is created and written. *If killed:* it is removed; nothing refers to it.
//! 2. `record`: the image and the VDI are in the catalogue. *If killed before:* as above. *After:* done.

use api::{About, Problem};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::about_vdi;
use super::file::make_image;
use super::target::Target;
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Create(pub Target);

declare_steps!(
    /// The steps of `vdi-create`.
    CreateStep { File = "file", Record = "record" }
);

impl Job for Create {
    type Step = CreateStep;

    const VERB: &'static str = "vdi-create";
    const NO_RETURN: CreateStep = CreateStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.0.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.0.vdi)]
    }

    async fn step(&self, step: CreateStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let Target { sr, image, format, size, .. } = self.0;
        let words = vec!["--size".into(), size.to_string().into()];
        match step {
            CreateStep::File => context.unless_cancelled(make_image(daemon, sr, image, format, words, None)).await,
            CreateStep::Record => self.0.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.0.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.0.vdi })
    }
}
