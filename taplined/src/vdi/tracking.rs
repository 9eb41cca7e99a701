//! `vdi-cbt-enable` and `vdi-cbt-disable`: whether the changed blocks of a VDI are recorded; and the maps of changed
//! blocks of plugged VDIs.
//!
//! Enable:
//! 1. `map`: the disk process records changes in a new map, if the VDI is plugged; otherwise the next plug begins one.
//!    *If killed:* the map is ended and removed.
//! 2. `record`: the catalogue is updated.
//!
//! Disable:
//! 1. `record`: the catalogue is updated. There is no rollback from here.
//! 2. `end`: the disk process ends the map, durably. *If killed:* repeated.
//! 3. `remove`: the image loses its mark, and the files of the maps are removed. *If killed:* repeated.

use std::sync::Arc;
use std::time::Duration;

use api::{About, ChangeMap, ChangeTracking, Code, Problem, map_file};
use control::answer::{self, MapState};
use control::ask;
use jiff::Timestamp;
use repo::driver::Directory;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::about_vdi;
use crate::daemon::Daemon;
use crate::disk::control::PassedFile;
use crate::disk::{live, mark};
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// How long a disk may take to report its map.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// The intent of `vdi-cbt-enable`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct EnableTracking {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// The VBD through which it is being written, if there is one.
    pub vbd: Option<Uuid>,
    /// The new map.
    pub map: Uuid,
}

declare_steps!(
    /// The steps of `vdi-cbt-enable`.
    EnableStep { Map = "map", Record = "record" }
);

impl Job for EnableTracking {
    type Step = EnableStep;

    const VERB: &'static str = "vdi-cbt-enable";
    const NO_RETURN: EnableStep = EnableStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi)]
    }

    async fn step(&self, step: EnableStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        match step {
            EnableStep::Map => match self.vbd {
                Some(vbd) => begin_map(daemon, self.vdi, vbd, self.map).await,
                None => Ok(()),
            },
            EnableStep::Record => self.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(vbd) = self.vbd {
            if present(daemon, vbd).await?.is_some_and(|found| found.id == mark::digits(self.map)) {
                end_map(daemon, vbd, self.sr).await?;
            }
        }
        let directory = daemon.srs.directory(self.sr).await?;
        let map = self.map;
        blocking("remove a map of changed blocks", move || directory.remove_image(&map_file(map))).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi })
    }
}

impl EnableTracking {
    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let EnableTracking { vdi, vbd, map, .. } = *self;
        let recorded = daemon.catalogue.write(move |tx| {
            tx.change_tracking(vdi, |tracking| {
                tracking.enabled = true;
                if vbd.is_some() && tracking.maps.last().is_none_or(|last| last.uuid != map) {
                    tracking.begin(map, Timestamp::now());
                }
            })
        });
        recorded.await?;
        remove_unneeded_maps(daemon, vdi).await;
        Ok(())
    }
}

/// The intent of `vdi-cbt-disable`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DisableTracking {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// The VBD through which it is being written, if there is one.
    pub vbd: Option<Uuid>,
}

declare_steps!(
    /// The steps of `vdi-cbt-disable`.
    DisableStep { Record = "record", End = "end", Remove = "remove" }
);

impl Job for DisableTracking {
    type Step = DisableStep;

    const VERB: &'static str = "vdi-cbt-disable";
    const NO_RETURN: DisableStep = DisableStep::Record;
    // Its leaf can be merged, and backups need no base of it.
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.vdi)]
    }

    async fn step(&self, step: DisableStep, daemon: &Daemon, _: &Context) -> Result<(), Problem> {
        let vdi = self.vdi;
        match step {
            DisableStep::Record => {
                let recorded = daemon.catalogue.write(move |tx| {
                    tx.change_tracking(vdi, |tracking| {
                        tracking.enabled = false;
                        tracking.end("tracking was disabled");
                    })
                });
                recorded.await.map(drop)
            }
            DisableStep::End => match self.vbd {
                Some(vbd) => end_map(daemon, vbd, self.sr).await,
                None => Ok(()),
            },
            DisableStep::Remove => {
                unmark(daemon, vdi, self.sr).await?;
                remove_unneeded_maps(daemon, vdi).await;
                Ok(())
            }
        }
    }

    async fn undo(&self, _: &Daemon) -> Result<(), Problem> {
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.vdi })
    }
}

/// The map in which the disk of a VBD records changes; `None` without one, or without a process.
pub async fn present(daemon: &Daemon, vbd: Uuid) -> Result<Option<answer::Changes>, Problem> {
    let gate = daemon.disks.gates.of(vbd);
    // Not while its process is being replaced.
    let _inside = gate.enter().await;
    match daemon.disks.ask(vbd, ask::Layers {}, REPORT_TIMEOUT).await {
        Ok(said) => Ok(said.changes),
        // No process listens any more.
        Err(problem) if problem.code == Code::Failed => Ok(None),
        Err(problem) => Err(problem),
    }
}

/// Has the disk of a plugged VDI record changes in a new map, unless it does already.
async fn begin_map(daemon: &Daemon, vdi: Uuid, vbd: Uuid, map: Uuid) -> Result<(), Problem> {
    let said = {
        let gate = daemon.disks.gates.of(vbd);
        let _inside = gate.enter().await;
        daemon.disks.ask(vbd, ask::Layers {}, REPORT_TIMEOUT).await?
    };
    let image = daemon.catalogue.read(move |view| view.image(view.vdi_image(vdi)?)).await?;
    match &said.changes {
        Some(found) if found.state == MapState::Kept && found.id == mark::digits(map) => return Ok(()),
        // A lost one, or one that an older catalogue does not have.
        Some(_) => end_map(daemon, vbd, image.sr).await?,
        None => {}
    }
    let numbers = said.layers.first().and_then(|leaf| leaf.inode);
    let directory = daemon.srs.directory(image.sr).await?;
    let path = directory.path().join(map_file(map));
    let made = blocking("create a map of changed blocks", move || {
        let leaf = directory.open_marked(&image.file, false)?;
        let found = leaf.metadata().map_err(|error| Problem::failed("examine an image", error))?;
        if Some(std::os::unix::fs::MetadataExt::ino(&found)) != numbers {
            let what = format!("{} is not the file that the disk has open", image.file);
            return Err(Problem::new(Code::State, what).advise(crate::reconcile::ADVICE));
        }
        directory.remove_image(&map_file(map))?;
        let file = directory.create_image(&map_file(map))?;
        Ok((mark::set_new(&leaf, map)?, file))
    });
    let (new, file) = made.await?;
    let passed = PassedFile { path: path.clone(), write: true, file };
    Ok(live::hand(daemon, vbd, ask::Track { map: path, new: Some(new) }, vec![passed]).await.map(drop)?)
}

/// Has the disk of a VBD end its map, durably, if it has one.
async fn end_map(daemon: &Daemon, vbd: Uuid, sr: Uuid) -> Result<(), Problem> {
    let Some(found) = present(daemon, vbd).await? else { return Ok(()) };
    let removed = found.state == MapState::Doubtful;
    if removed {
        // It could not even be made invalid: without its file and the mark no process will find it.
        let (vdi, map) = (daemon.catalogue.read(move |view| view.vbd(vbd)).await?.vdi, Uuid::parse_str(&found.id));
        unmark(daemon, vdi, sr).await?;
        let directory = daemon.srs.directory(sr).await?;
        if let Ok(map) = map {
            blocking("remove a map", move || directory.remove_image(&map_file(map))).await?;
        }
    }
    let ended = live::hand(daemon, vbd, ask::Untrack { removed, recorded: true }, Vec::new()).await;
    Ok(ended.map(drop)?)
}

/// Removes the mark of the image of a VDI, if that is still there.
async fn unmark(daemon: &Daemon, vdi: Uuid, sr: Uuid) -> Result<(), Problem> {
    let image = daemon.catalogue.read(move |view| view.image(view.vdi_image(vdi)?)).await?;
    let directory = daemon.srs.directory(sr).await?;
    blocking("unmark an image", move || match directory.open_image(&image.file, true) {
        Err(problem) if problem.code == Code::NotFound => Ok(()),
        opened => opened.map(drop),
    })
    .await
}

/// The map of the interval that a snapshot of a plugged VDI begins; `None` if changes are not recorded. The catalogue
/// follows the disk if it has another map, and a map is begun if the disk lost its own. A disk that records changes
/// although the catalogue, which may be an older one, has it otherwise ends its map: it would take no other leaf.
pub async fn next_map(daemon: &Daemon, vdi: &api::Vdi, vbd: Uuid) -> Result<Option<Uuid>, Problem> {
    let (uuid, found) = (vdi.uuid, present(daemon, vbd).await?);
    let Some(tracking) = vdi.cbt.as_ref().filter(|tracking| tracking.enabled) else {
        if found.is_some_and(|found| found.state == MapState::Kept) {
            end_map(daemon, vbd, vdi.sr).await?;
        }
        return Ok(None);
    };
    match found {
        Some(found) if found.state == MapState::Kept => {
            let last = tracking.maps.last().map(|last| mark::digits(last.uuid));
            if last.as_ref() != Some(&found.id) {
                let Some(map) = reported(&found) else { return Ok(None) };
                let why = "the catalogue was older than the running disk";
                let followed = daemon.catalogue.write(move |tx| {
                    tx.change_tracking(uuid, |tracking| {
                        tracking.end(why);
                        tracking.ended = Some(why.into());
                        tracking.maps = vec![map];
                    })
                });
                followed.await?;
            }
        }
        _ => {
            let map = Uuid::new_v4();
            if let Err(problem) = begin_map(daemon, uuid, vbd, map).await {
                // Its snapshot is more important.
                tracing::warn!(vdi = %uuid, "its changed blocks are not recorded: {problem}");
                return Ok(None);
            }
            let recorded = daemon.catalogue.write(move |tx| {
                tx.change_tracking(uuid, |tracking| {
                    tracking.end("the map could not be written");
                    tracking.begin(map, Timestamp::now());
                })
            });
            recorded.await?;
        }
    }
    Ok(Some(Uuid::new_v4()))
}

/// A map as its disk reports it.
fn reported(found: &answer::Changes) -> Option<ChangeMap> {
    let continues = found.continues.as_ref().and_then(|id| Uuid::parse_str(id).ok());
    Some(ChangeMap { uuid: Uuid::parse_str(&found.id).ok()?, continues })
}

/// The new map of a new leaf: the leaf is marked with it, and its empty file is to be passed.
pub fn prepare_map(
    directory: &Arc<Directory>,
    leaf: &std::fs::File,
    map: Uuid,
) -> Result<(control::tracking::NewMap, PassedFile), Problem> {
    let file = directory.create_image(&map_file(map))?;
    let new = mark::set_new(leaf, map)?;
    Ok((new, PassedFile { path: directory.path().join(map_file(map)), write: true, file }))
}

/// Removes a map that no VDI has.
pub async fn remove_unrecorded_map(daemon: &Daemon, sr: Uuid, map: Uuid) -> Result<(), Problem> {
    if daemon.catalogue.read(move |view| view.is_map_needed(sr, map)).await? {
        return Ok(());
    }
    let directory = daemon.srs.directory(sr).await?;
    blocking("remove a map of changed blocks", move || directory.remove_image(&map_file(map))).await
}

/// Removes the files of maps that a VDI does not need any more; if that fails, later.
pub async fn remove_unneeded_maps(daemon: &Daemon, vdi: Uuid) {
    let removed = async {
        let found = daemon.catalogue.read(move |view| view.find_vdi(vdi)).await?;
        let Some((sr, unneeded)) = found.and_then(|vdi| Some((vdi.sr, vdi.cbt?.unneeded))) else { return Ok(()) };
        for map in &unneeded {
            remove_unrecorded_map(daemon, sr, *map).await?;
        }
        if unneeded.is_empty() {
            return Ok(());
        }
        let forget = move |tracking: &mut ChangeTracking| tracking.unneeded.retain(|map| !unneeded.contains(map));
        daemon.catalogue.write(move |tx| tx.change_tracking(vdi, forget)).await.map(drop)
    };
    if let Err(problem) = removed.await {
        let problem: Problem = problem;
        tracing::warn!(%vdi, "maps of changed blocks that are not needed stay for now: {problem}");
    }
}
