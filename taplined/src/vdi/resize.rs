//! `vdi-resize`: grows a VDI.
//!
//! 1. `resize`: the disk process grows the image in one step that is all or nothing. Requested twice for the same size,
//!    it does nothing the second time. *If killed:* repeated; a larger disk loses nothing.
//! 2. `record`: the catalogue is updated.

use std::time::Duration;

use api::{About, Code, Problem};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{Chain, about_vdi};
use crate::daemon::Daemon;
use crate::disk::control::Refused;
use crate::disk::live;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// Interval of checking whether a disk is still growing.
const LOOK_AGAIN_AFTER: Duration = Duration::from_millis(50);

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Resize {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its new size in bytes.
    pub size: u64,
    /// The VBD through which it is being written, if there is one: its disk process does the work.
    pub vbd: Option<Uuid>,
}

declare_steps!(
    /// The steps of `vdi-resize`.
    ResizeStep { Resize = "resize", Record = "record" }
);

impl Job for Resize {
    type Step = ResizeStep;

    const VERB: &'static str = "vdi-resize";
    const NO_RETURN: ResizeStep = ResizeStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi)]
    }

    async fn step(&self, step: ResizeStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            ResizeStep::Resize => self.resize(daemon).await,
            ResizeStep::Record => self.record(daemon, self.size).await,
        }
    }

    /// A grown disk keeps its size, which is then recorded.
    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(vbd) = self.vbd {
            if let Some(size) = settled(daemon, vbd).await? {
                return self.record(daemon, size).await;
            }
        }
        let chain = Chain::of_vdi(daemon, self.vdi).await?;
        let size = super::chain::size(daemon, &chain).await?;
        self.record(daemon, size).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi, "size": self.size })
    }
}

/// The size of a disk once its process is no longer growing it; `None` if the process no longer exists. The process
/// may still be growing it although the daemon that requested that is dead.
async fn settled(daemon: &Daemon, vbd: Uuid) -> Result<Option<u64>, Problem> {
    // The process carries out one verb at a time, and reports that before it checks another: it rejects this one in
    // any case, because of its size.
    loop {
        match live::resize(daemon, vbd, 1).await {
            Err(Refused::Disk(error)) if is_growing(&error) => tokio::time::sleep(LOOK_AGAIN_AFTER).await,
            Err(Refused::Unanswered(problem)) if problem.code == Code::Timeout => return Err(problem),
            _ => break,
        }
    }
    let layers = live::layers(daemon, vbd).await?;
    Ok(layers.and_then(|layers| layers.first().map(|leaf| leaf.size)))
}

/// Whether a disk process refuses a verb because it is growing its disk.
fn is_growing(error: &control::Error) -> bool {
    error.under_way == control::Error::busy_with("resize").under_way
}

impl Resize {
    async fn resize(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(vbd) = self.vbd {
            return Ok(live::resize(daemon, vbd, self.size).await?);
        }
        let chain = Chain::of_vdi(daemon, self.vdi).await?;
        // Only its own image grows. Those below are read: growing must not expose their data beyond its old end.
        let mut words = vec!["resize".into()];
        words.extend(chain.words());
        words.extend(["--size".into(), self.size.to_string().into()]);
        Ok(daemon.tool.image(words, chain.handing(1).await?).await.map(|IgnoredAny| ())?)
    }

    async fn record(&self, daemon: &Daemon, size: u64) -> Result<(), Problem> {
        let vdi = self.vdi;
        daemon
            .catalogue
            .write(move |tx| {
                let mut image = tx.image(tx.vdi_image(vdi)?)?;
                image.size = size;
                tx.set_image(&image)
            })
            .await
    }
}

#[cfg(test)]
mod test {
    use control::Kind;

    use super::*;

    #[test]
    fn a_process_that_grows_its_disk_is_recognized() {
        assert!(is_growing(&control::Error::busy_with("resize").advise("retry")));
        assert!(!is_growing(&control::Error::busy_with("merge")));
        assert!(!is_growing(&control::Error::new(Kind::Unsupported, "cannot shrink the disk")));
    }
}
