//! A VDI's new leaf: an empty image on top of the current one, which is no longer written.
//!
//! 1. The file is created.
//! 2. It becomes the leaf: atomically, by the disk process, if the VDI is plugged (docs/control.md, `snapshot`);
//!    otherwise by being written.
//! 3. The catalogue is updated.
//!
//! *If killed before 3,* the rollback calls [`Leaf::settle`]. Of a plugged VDI that was killed after 2, either the file
//! opens as a complete image on the old leaf, and may contain data that was acknowledged to a guest; or it does not,
//! and was never the leaf. A living process knows which. An unused empty leaf has no effect, so in doubt it counts as
//! the leaf.

use std::path::PathBuf;
use std::time::Duration;

use api::{Code, ImageFormat, Mode, Problem, map_file};
use control::ask::{self, Method};
use control::tracking::{ExpectedMap, ExpectedMaps, NewMap, Proof};
use jiff::Timestamp;
use repo::catalogue::Image;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::file::{described, make_image, physical, remove_unrecorded};
use super::record_changes::{self, Recording};
use super::tracking::{prepare_map, remove_unrecorded_map};
use super::{Chain, chain, file_name};
use crate::daemon::Daemon;
use crate::disk::control::PassedFile;
use crate::disk::handing::Handing;
use crate::disk::{live, mark, names};
use crate::task::blocking;

/// The data to create a leaf, and to find out whether it was created.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Leaf {
    /// The VDI.
    pub vdi: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// The current leaf.
    pub below: Uuid,
    /// The new leaf.
    pub image: Uuid,
    /// The format of the new leaf.
    pub format: ImageFormat,
    /// The VBD through which the VDI is being written, if there is one.
    pub vbd: Option<Uuid>,
    /// The map of changed blocks of the interval that begins, if changes are recorded.
    #[serde(default)]
    pub map: Option<Uuid>,
}

/// The pauses in which a process may seal a map itself.
const SEALING_MS: [u64; 6] = [2, 10, 50, 100, 400, 1600];

/// A new map and its file.
type PassedMap = (NewMap, PassedFile);

/// The VBD through which a VDI is being written; its disk process must then make all changes.
pub fn writer_of(vdi: &api::Vdi) -> Option<Uuid> {
    vdi.users.iter().find(|user| user.mode == Mode::ReadWrite).map(|user| user.vbd)
}

impl Leaf {
    /// Creates the new leaf.
    pub async fn make(&self, daemon: &Daemon) -> Result<(), Problem> {
        let below = Chain::of_image(daemon, self.below).await?;
        let Some(vbd) = self.vbd else {
            return match self.map {
                Some(map) => self.make_with_map(daemon, below, map).await,
                None => make_image(daemon, self.sr, self.image, self.format, Vec::new(), Some(&below)).await,
            };
        };
        let (path, opened, map) = self.open_for_switch(below).await?;
        let (new, map) = map.unzip();
        let to = names::image_name(self.format, path);
        let path = map.as_ref().map(|map: &PassedFile| map.path.clone());
        let snapshot = ask::Snapshot { to, method: Method::Chain, map: path, new };
        Ok(live::ask_with(daemon, vbd, snapshot, opened, map.into_iter().collect()).await.map(drop)?)
    }

    /// Creates the new leaf of a disk that is not plugged, and the map of its changes, unless those until now are not
    /// known: then there is no map.
    async fn make_with_map(&self, daemon: &Daemon, below: Chain, map: Uuid) -> Result<(), Problem> {
        let (vdi, new) = (self.vdi, file_name(self.image, self.format));
        let present =
            daemon.catalogue.read(move |view| view.vdi(vdi)).await?.cbt.and_then(|cbt| cbt.maps.last().copied());
        let path = below.directory.path().join(&new);
        let mut words = vec!["create".into()];
        words.extend(names::words_of(
            std::iter::once(names::image_name(self.format, path.clone())).chain(below.names()),
        ));
        words.push("--map-of-daemon".into());
        let opened = blocking("create a file", move || {
            let failed = |error| Problem::failed("duplicate a descriptor", error);
            let (mut handing, mut image) = (Handing::default(), None);
            let leaf = below.directory.create_image(&new)?;
            handing.file(&path, true, leaf.try_clone().map_err(failed)?);
            for parent in &below.images {
                let file = below.directory.open_marked(&parent.file, false)?;
                image = Some(image.map_or_else(|| file.try_clone().map_err(failed), Ok)?);
                handing.file(&parent.path(below.directory.path()), false, file);
            }
            let image = image.ok_or_else(|| Problem::failed("create a leaf", "it has no parent"))?;
            Ok((handing, Recording { vdi, map: present, directory: below.directory, image }, leaf))
        });
        let (handing, recording, leaf) = opened.await?;
        let talk = move |socket| record_changes::begin_next_interval(socket, recording, &leaf, map).map(drop);
        Ok(daemon.tool.talking_image(words, handing, talk).await.map(|IgnoredAny| ())?)
    }

    /// The same leaf, without its map if that could not be begun.
    pub async fn as_made(&self, daemon: &Daemon) -> Result<Leaf, Problem> {
        let Some(map) = self.map else { return Ok(self.clone()) };
        let directory = daemon.srs.directory(self.sr).await?;
        let is_empty = blocking("examine a map", move || directory.is_empty(&map_file(map))).await?;
        Ok(Leaf { map: self.map.filter(|_| !is_empty), ..self.clone() })
    }

    /// Creates the new file, and the one of its map; and opens the old one for reading only, as the disk process will
    /// have it.
    async fn open_for_switch(&self, below: Chain) -> Result<(PathBuf, Vec<PassedFile>, Option<PassedMap>), Problem> {
        let (new, map) = (file_name(self.image, self.format), self.map);
        blocking("open files", move || {
            let directory = &below.directory;
            let path = directory.path().join(&new);
            let leaf = directory.create_image(&new)?;
            let map = map.map(|map| prepare_map(directory, &leaf, map)).transpose()?;
            let mut files = vec![PassedFile { path: path.clone(), write: true, file: leaf }];
            if let Some(old) = below.images.first() {
                let file = directory.open_image(&old.file, false)?;
                files.push(PassedFile { path: old.path(directory.path()), write: false, file });
            }
            Ok((path, files, map))
        })
        .await
    }

    /// The catalogue entries of the leaf and of the image below it, which is no longer written and whose physical
    /// size has grown since it was last measured.
    pub async fn described(&self, daemon: &Daemon) -> Result<(Image, Image), Problem> {
        let below = self.below;
        let below = daemon.catalogue.read(move |view| view.image(below)).await?;
        let below = Image { physical: physical(daemon, self.sr, &below.file).await?, ..below };
        let leaf = described(daemon, self.sr, self.image, self.format, below.size, Some(self.below)).await?;
        Ok((leaf, below))
    }

    /// Records the leaf as the VDI's image, unless that was done before; the old one becomes hidden.
    pub fn record(&self, tx: &mut repo::Tx<'_>, (image, below): &(Image, Image)) -> Result<(), Problem> {
        if tx.find_image(image.uuid)?.is_none() {
            tx.add_image(image)?;
        }
        if let Some(now) = tx.find_image(below.uuid)? {
            tx.set_image(&Image { physical: below.physical, ..now })?;
        }
        if tx.vdi_image(self.vdi)? == image.uuid {
            return Ok(());
        }
        self.record_map(tx)?;
        tx.set_vdi_image(self.vdi, image.uuid)
    }

    /// Seals the map of the interval that has ended with the leaf below; then the mark of that image goes, which is the
    /// proof of a map that is not sealed, and would be that of an older copy. A process that serves the disk seals the
    /// map itself, when the last request from before has ended. If neither succeeds, the map is trusted by the mark.
    pub async fn seal(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (Some(new), vdi, image) = (self.map, self.vdi, self.below) else { return Ok(()) };
        let found = daemon.catalogue.read(move |view| {
            let (Some(vdi), Some(image)) = (view.find_vdi(vdi)?, view.find_image(image)?) else { return Ok(None) };
            let maps = vdi.cbt.map(|cbt| cbt.maps).unwrap_or_default();
            Ok(maps.iter().find(|map| map.uuid == new).and_then(|map| map.continues).zip(Some(image.file)))
        });
        let Some((ended, file)) = found.await? else { return Ok(()) };
        for pause in SEALING_MS {
            match seal(daemon, self.sr, &file, ended).await {
                Err(problem) if problem.code == Code::InUse => tokio::time::sleep(Duration::from_millis(pause)).await,
                Err(problem) => {
                    tracing::warn!(%vdi, map = %ended, "the map of an ended interval is not sealed: {problem}");
                    return Ok(());
                }
                Ok(()) => return Ok(()),
            }
        }
        tracing::warn!(%vdi, map = %ended, "the map of an ended interval is not sealed: its process still has it open");
        Ok(())
    }

    fn record_map(&self, tx: &mut repo::Tx<'_>) -> Result<(), Problem> {
        if tx.vdi(self.vdi)?.cbt.is_none() {
            return Ok(());
        }
        let changed = tx.change_tracking(self.vdi, |tracking| match self.map {
            Some(map) => tracking.switch(map, Timestamp::now()),
            None => tracking.end("a snapshot or a clone was made while no changes were recorded"),
        });
        changed.map(drop)
    }

    /// Rolls the leaf back. Of an unplugged VDI its file is removed. Of a plugged one it is recorded as the leaf if the
    /// process has switched to it, or may have before it died: the contents are unchanged, and the image below, then
    /// unneeded, is merged with it later. Otherwise its file is removed.
    pub async fn settle(&self, daemon: &Daemon) -> Result<(), Problem> {
        let vdi = self.vdi;
        if daemon.catalogue.read(move |view| view.vdi_image(vdi)).await? == self.image {
            return Ok(());
        }
        if let Some(vbd) = self.vbd {
            if self.was_made(daemon, vbd).await? {
                let (leaf, images) = (self.clone(), self.described(daemon).await?);
                return daemon.catalogue.write(move |tx| leaf.record(tx, &images)).await;
            }
        }
        remove_unrecorded(daemon, self.sr, &file_name(self.image, self.format)).await?;
        match self.map {
            Some(map) => remove_unrecorded_map(daemon, self.sr, map).await,
            None => Ok(()),
        }
    }

    /// Whether it is the leaf of the disk process, or was when that exited.
    async fn was_made(&self, daemon: &Daemon, vbd: Uuid) -> Result<bool, Problem> {
        if let Some(layers) = live::layers(daemon, vbd).await? {
            return Ok(layers.first().is_some_and(|leaf| leaf.names(&file_name(self.image, self.format))));
        }
        let mut chain = Chain::of_image(daemon, self.below).await?;
        if let Some(map) = self.map {
            // The map is complete, durably, before the disk uses the leaf.
            let directory = chain.directory.clone();
            let is_empty = blocking("examine a map", move || directory.is_empty(&map_file(map))).await?;
            if is_empty {
                return Ok(false);
            }
        }
        let image = match self.described(daemon).await {
            Ok((image, _)) => image,
            // The file does not even exist.
            Err(problem) if problem.code == Code::NotFound => return Ok(false),
            Err(problem) => return Err(problem),
        };
        chain.images.insert(0, image);
        match chain::info(daemon, &chain).await {
            Ok(_) => Ok(true),
            Err(problem) => {
                tracing::info!(image = %self.image, "the new leaf was not completed: {problem}");
                Ok(false)
            }
        }
    }
}

/// Has a map sealed that the mark of this image names; the image then loses the mark, durably.
async fn seal(daemon: &Daemon, sr: Uuid, file: &str, map: Uuid) -> Result<(), Problem> {
    let (directory, file) = (daemon.srs.directory(sr).await?, file.to_owned());
    let opened = blocking("open a map of changed blocks", move || {
        let image = directory.open_marked(&file, false)?;
        let Some(found) = mark::own(&image)?.filter(|found| found.map == mark::digits(map)) else { return Ok(None) };
        let (state, path) = (mark::state(&image)?, directory.path().join(map_file(map)));
        let mut handing = Handing::default();
        handing.plain(&path, true, directory.open_marked(&map_file(map), true)?);
        let expected = ExpectedMap { map: mark::digits(map), continues: None, proof: Proof::Image(found, state) };
        let expected = serde_json::to_string(&ExpectedMaps(vec![expected]));
        let expected = expected.map_err(|error| Problem::failed("seal a map of changed blocks", error))?;
        Ok(Some((image, handing, vec!["seal".into(), path.into(), "--expect".into(), expected.into()])))
    });
    // It was sealed before.
    let Some((image, handing, words)) = opened.await? else { return Ok(()) };
    let IgnoredAny = daemon.tool.image(words, handing).await?;
    blocking("end the mark of an image", move || mark::end(&image)).await
}
