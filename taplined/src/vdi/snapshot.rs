//! `vdi-snapshot` and `vdi-clone`: a VDI's state as another VDI, which is read-only or writable.
//!
//! With chains: the VDI gets a new leaf ([`super::leaf`]), and its previous image becomes the snapshot's, or the
//! parent of the clone's leaf. With reflink: a file that shares all blocks. Steps:
//!
//! 1. `leaf`: the VDI's new leaf, if needed. *If killed:* its file is removed, or it is recorded where a
//!    process has it ([`Leaf::settle`](super::leaf::Leaf::settle)).
//! 2. `file`: the new VDI's file, if it has one of its own. *If killed:* it is removed.
//! 3. `record`: everything is in the catalogue, in one commit.
//! 4. `seal`: the map of changed blocks whose interval has ended is sealed
//!    ([`Leaf::seal`](super::leaf::Leaf::seal)). *If killed:* repeated.

use api::{About, Description, ImageFormat, Labels, Name, Problem};
use control::ask::{self, Method};
use jiff::Timestamp;
use repo::catalogue::{Among, Image, NewVdi};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::file::{described, make_image, record_once, remove_unrecorded};
use super::leaf::Leaf;
use super::{Chain, about_vdi, file_name};
use crate::daemon::Daemon;
use crate::disk::control::PassedFile;
use crate::disk::live;
use crate::disk::names;
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// The intent of both verbs: a state of a VDI that becomes another VDI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KeptState {
    /// The VDI.
    pub of: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its image, whose state is kept.
    pub image: Uuid,
    /// Its format.
    pub format: ImageFormat,
    /// Its size in bytes.
    pub size: u64,
    /// The VBD through which it is being written, if there is one.
    pub vbd: Option<Uuid>,
    /// The new VDI.
    pub vdi: Uuid,
    /// Its name; `None`: a free name is chosen when it is recorded.
    pub name: Option<Name>,
    /// Its description.
    pub description: Description,
    /// Its tags and `other_config` strings.
    pub labels: Labels,
    /// The VDI's new leaf, if one is needed.
    pub leaf: Option<Leaf>,
    /// The new VDI's own file; `None` if it uses the image itself.
    pub own: Option<Own>,
    /// The time of the state.
    pub at: Timestamp,
    /// Whether the VDI's schedule takes it.
    pub scheduled: bool,
    /// Whether it is taken for a backup.
    #[serde(default)]
    pub for_backup: bool,
}

/// The file of a new VDI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Own {
    /// Its image.
    pub image: Uuid,
    /// Whether it shares blocks with the image, instead of being its child.
    pub reflink: bool,
}

/// The catalogue entries for a kept state.
#[derive(Clone, Debug)]
pub struct KeptImages {
    leaf: Option<(Leaf, (Image, Image))>,
    own: Option<Image>,
}

/// The jobs of both verbs: a read-only or a writable state.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Branch<const WRITABLE: bool>(pub KeptState);

/// The job `vdi-snapshot`.
pub type Snapshot = Branch<false>;

/// The job `vdi-clone`.
pub type Clone = Branch<true>;

impl KeptState {
    async fn step(&self, step: BranchStep, daemon: &Daemon, snapshot: bool) -> Result<(), Problem> {
        match step {
            BranchStep::Leaf => match &self.leaf {
                Some(leaf) => leaf.make(daemon).await,
                None => Ok(()),
            },
            BranchStep::File => match &self.own {
                Some(own) => self.make(daemon, own).await,
                None => Ok(()),
            },
            BranchStep::Record => {
                let (state, images) = (self.clone(), self.described(daemon).await?);
                daemon.catalogue.write(move |tx| state.record_in(tx, &images, snapshot)).await
            }
            BranchStep::Seal => self.seal(daemon).await,
        }
    }

    /// Seals the map of changed blocks whose interval has ended, once the state is recorded.
    pub async fn seal(&self, daemon: &Daemon) -> Result<(), Problem> {
        match &self.leaf {
            Some(leaf) => leaf.seal(daemon).await,
            None => Ok(()),
        }
    }

    /// Runs both steps before the state is recorded.
    pub async fn keep(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.step(BranchStep::Leaf, daemon, true).await?;
        self.step(BranchStep::File, daemon, true).await
    }

    async fn make(&self, daemon: &Daemon, own: &Own) -> Result<(), Problem> {
        let below = Chain::of_image(daemon, self.image).await?;
        if !own.reflink {
            return make_image(daemon, self.sr, own.image, self.format, Vec::new(), Some(&below)).await;
        }
        let to = file_name(own.image, self.format);
        let Some(vbd) = self.vbd else { return below.share(to).await };
        let directory = below.directory;
        let path = directory.path().join(&to);
        let file = blocking("create a file", move || directory.create_image(&to)).await?;
        let snapshot = ask::Snapshot {
            to: names::image_name(self.format, path.clone()),
            method: Method::Reflink,
            map: None,
            new: None,
        };
        Ok(live::ask(daemon, vbd, snapshot, vec![PassedFile { path, write: true, file }]).await.map(drop)?)
    }

    /// The catalogue entries for the kept state.
    pub async fn described(&self, daemon: &Daemon) -> Result<KeptImages, Problem> {
        let leaf = match &self.leaf {
            Some(leaf) => Some((leaf.as_made(daemon).await?, leaf.described(daemon).await?)),
            None => None,
        };
        let own = match &self.own {
            Some(own) => {
                let parent = (!own.reflink).then_some(self.image);
                Some(described(daemon, self.sr, own.image, self.format, self.size, parent).await?)
            }
            None => None,
        };
        Ok(KeptImages { leaf, own })
    }

    /// Records the state as a VDI, unless that was done before.
    pub fn record_in(&self, tx: &mut repo::Tx<'_>, images: &KeptImages, snapshot: bool) -> Result<(), Problem> {
        if tx.find_vdi(self.vdi)?.is_some() {
            return Ok(());
        }
        let vdi = NewVdi {
            uuid: self.vdi,
            image: images.own.as_ref().map_or(self.image, |own| own.uuid),
            name: self.name_in(tx, snapshot)?,
            description: self.description.clone(),
            labels: self.labels.clone(),
            read_only: snapshot,
            snapshot: snapshot.then_some((self.of, Some(self.at))),
            scheduled: self.scheduled,
            for_backup: self.for_backup,
            logical_block_size: tx.vdi(self.of)?.logical_block_size,
        };
        if let Some((leaf, measured)) = &images.leaf {
            leaf.record(tx, measured)?;
        }
        match &images.own {
            Some(own) => record_once(tx, own, Some(&vdi)),
            None => tx.add_vdi(&vdi),
        }?;
        match images.leaf.as_ref().and_then(|(leaf, _)| leaf.map) {
            // The interval before it ends with the snapshot.
            Some(_) if snapshot && images.own.is_none() => tx.give_maps_to_snapshot(self.of, self.vdi),
            _ => Ok(()),
        }
    }

    /// The name of the new VDI, chosen in the commit that records it.
    fn name_in(&self, tx: &repo::Tx<'_>, snapshot: bool) -> Result<Name, Problem> {
        let among = Among::Vdis(self.sr);
        match &self.name {
            Some(name) => Ok(name.clone()),
            None if snapshot => tx.free_snapshot_name(among, &tx.vdi(self.of)?.name, self.at),
            None => tx.free_name(among, &tx.vdi(self.of)?.name, "-clone"),
        }
    }

    /// Removes what [`KeptState::keep`] may have left.
    pub async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(own) = &self.own {
            remove_unrecorded(daemon, self.sr, &file_name(own.image, self.format)).await?;
        }
        match &self.leaf {
            Some(leaf) => leaf.settle(daemon).await,
            None => Ok(()),
        }
    }
}

declare_steps!(
    /// The steps of `vdi-snapshot` and `vdi-clone`.
    BranchStep { Leaf = "leaf", File = "file", Record = "record", Seal = "seal" }
);

impl<const WRITABLE: bool> Job for Branch<WRITABLE> {
    type Step = BranchStep;

    const VERB: &'static str = if WRITABLE { "vdi-clone" } else { "vdi-snapshot" };
    const NO_RETURN: BranchStep = BranchStep::Record;
    const TIDIES: bool = true;

    /// A failed one may have left a leaf.
    fn changes(&self) -> Vec<Uuid> {
        vec![self.0.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.0.of), about_vdi(self.0.vdi)]
    }

    async fn step(&self, step: BranchStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        self.0.step(step, daemon, !WRITABLE).await
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.0.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.0.vdi })
    }
}
