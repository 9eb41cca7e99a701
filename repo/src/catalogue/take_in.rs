//! Updates the catalogue from a repository's inventory: in one commit, replacing everything known about the repository.

use std::collections::{BTreeMap, HashMap};

use api::{Change, Code, ImageFormat, InventoryVdi, ObjectKind, Problem};
use jiff::{SignedDuration, Timestamp};
use rusqlite::named_params;
use uuid::Uuid;

use super::image::{Image, ImageState};
use super::inventory::Noted;
use super::row::{Block, Id, Json, Time};
use super::{Tx, View};
use crate::inventory::{Contents, Words};

/// How long a schedule of snapshots that was taken in destroys nothing.
const SCHEDULES_REST: SignedDuration = SignedDuration::from_hours(24);

/// The changes to the VDIs of a repository.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TakenIn {
    /// VDIs that the catalogue did not know.
    pub added: Vec<Uuid>,
    /// Those that were changed.
    pub changed: Vec<Uuid>,
    /// Those that were removed.
    pub removed: Vec<Uuid>,
    /// Those that are gone but have VBDs: they stay, without a file.
    pub missing: Vec<Uuid>,
}

impl View<'_> {
    /// Rejects an inventory of the repository `sr` that contains objects of another repository in this catalogue.
    pub fn check_nowhere_else(&self, sr: Uuid, contents: &Contents) -> Result<(), Problem> {
        let elsewhere = |what: String| {
            Problem::new(Code::Exists, what).advise(
                "one of the two repositories is a copy of the other: forget the other one, or import what you need \
                 from this one",
            )
        };
        for image in contents.images.keys() {
            if let Some(other) = self.find_image(*image)?.filter(|other| other.sr != sr) {
                return Err(elsewhere(format!("image {image} already belongs to the repository {}", other.sr)));
            }
        }
        for vdi in contents.vdis.keys() {
            if let Some(other) = self.find_vdi(*vdi)?.filter(|other| other.sr != sr) {
                let what = format!("VDI {vdi} ('{}') already belongs to the repository {}", other.name, other.sr);
                return Err(elsewhere(what));
            }
        }
        Ok(())
    }
}

impl Tx<'_> {
    /// Replaces the catalogue's state of a repository with its inventory's at `generation` with `head`. `files` are the
    /// existing files with their space. Rejects objects that belong to another repository here.
    pub fn take_in(
        &mut self,
        sr: Uuid,
        (generation, head): (u64, &str),
        contents: &Contents,
        files: &HashMap<String, u64>,
    ) -> Result<TakenIn, Problem> {
        self.check_nowhere_else(sr, contents)?;
        let before = self.contents(sr)?;
        // References are checked when the transaction ends, because images and VDIs are exchanged in between.
        self.execute("PRAGMA defer_foreign_keys = ON", [])?;
        self.execute(
            "UPDATE vdi SET image = '-' || uuid WHERE image IN (SELECT uuid FROM image WHERE sr = ?1)",
            [Id(sr)],
        )?;
        self.execute("DELETE FROM image WHERE sr = ?1", [Id(sr)])?;
        self.take_in_images(sr, contents, files)?;
        let taken = self.take_in_vdis(sr, &before.vdis, contents)?;
        let Words { name, description, tags, other_config } = &contents.words;
        self.execute(
            "UPDATE sr SET name = ?2, description = ?3, tags = ?4, other_config = ?5 WHERE uuid = ?1",
            (Id(sr), name.as_str(), description.as_str(), Json(tags), Json(other_config)),
        )?;
        self.touch(ObjectKind::Sr, sr, Change::Changed);
        self.set_inventory(sr, generation, head)?;
        for vdi in &taken.missing {
            self.keep_without_file(sr, *vdi)?;
        }
        Ok(taken)
    }

    fn take_in_images(&mut self, sr: Uuid, contents: &Contents, files: &HashMap<String, u64>) -> Result<(), Problem> {
        for image in contents.images.values() {
            let physical = files.get(&image.file).copied();
            let state = match physical {
                _ if image.no_data => ImageState::NoData,
                None => ImageState::Missing,
                Some(_) if image.damaged => ImageState::Damaged,
                Some(_) if image.diverged => ImageState::Diverged,
                Some(_) => ImageState::Ready,
            };
            self.insert_image(&Image {
                uuid: image.uuid,
                sr,
                file: image.file.clone(),
                format: image.format,
                size: image.size,
                physical: physical.unwrap_or(0),
                parent: image.parent,
                state,
                kept: image.kept,
            })?;
        }
        Ok(())
    }

    fn take_in_vdis(
        &mut self,
        sr: Uuid,
        before: &BTreeMap<Uuid, InventoryVdi>,
        contents: &Contents,
    ) -> Result<TakenIn, Problem> {
        let mut taken = TakenIn::default();
        // Somebody may have brought the repository here for the sake of its old states.
        let rests = Timestamp::now().saturating_add(SCHEDULES_REST).unwrap_or(Timestamp::MAX);
        for vdi in contents.vdis.values() {
            self.execute(
                "INSERT INTO vdi VALUES
                 (:uuid, :image, :name, :description, :read_only, :snapshot_of, :snapshot_time, :created, :tags,
                  :other_config, :retention, :scheduled, :rests, NULL, :logical_block_size, :cbt,
                  :for_backup, NULL, NULL, NULL)
                 ON CONFLICT (uuid) DO UPDATE SET image = :image, name = :name, description = :description,
                 read_only = :read_only, snapshot_of = :snapshot_of, snapshot_time = :snapshot_time, created = :created,
                 tags = :tags, other_config = :other_config, scheduled = :scheduled,
                 logical_block_size = :logical_block_size, cbt = :cbt, for_backup = :for_backup,
                 retention_rests = iif(retention IS :retention, retention_rests, :rests), retention = :retention",
                named_params! {
                    ":uuid": Id(vdi.uuid), ":image": Id(vdi.image), ":name": vdi.name.as_str(),
                    ":description": vdi.description.as_str(), ":read_only": vdi.read_only,
                    ":snapshot_of": vdi.snapshot_of.map(Id), ":snapshot_time": vdi.snapshot_time.map(Time),
                    ":created": Time(vdi.created), ":tags": Json(&vdi.tags),
                    ":other_config": Json(&vdi.other_config), ":retention": vdi.retention.map(Json),
                    ":scheduled": vdi.scheduled, ":rests": vdi.retention.map(|_| Time(rests)),
                    ":logical_block_size": vdi.logical_block_size.map(Block),
                    ":cbt": vdi.cbt.as_deref().map(Json), ":for_backup": vdi.for_backup,
                },
            )?;
            match before.get(&vdi.uuid) {
                None => {
                    taken.added.push(vdi.uuid);
                    self.touch(ObjectKind::Vdi, vdi.uuid, Change::Added);
                }
                Some(known) if known == vdi => {}
                Some(_) => {
                    taken.changed.push(vdi.uuid);
                    self.touch(ObjectKind::Vdi, vdi.uuid, Change::Changed);
                }
            }
        }
        let gone = self.rows("SELECT uuid FROM vdi WHERE image = '-' || uuid", [], |row| Ok(row.get::<_, Id>(0)?.0))?;
        for vdi in gone {
            if !self.vbds(None, Some(vdi))?.is_empty() {
                taken.missing.push(vdi);
                continue;
            }
            self.execute("DELETE FROM lease WHERE vdi = ?1", [Id(vdi)])?;
            self.execute("DELETE FROM vdi WHERE uuid = ?1", [Id(vdi)])?;
            self.touch(ObjectKind::Vdi, vdi, Change::Removed);
            taken.removed.push(vdi);
        }
        tracing::debug!(%sr, ?taken, "taken in");
        Ok(taken)
    }

    /// A VDI that is gone but in use stays, marked as missing its file.
    fn keep_without_file(&mut self, sr: Uuid, vdi: Uuid) -> Result<(), Problem> {
        let uuid = Uuid::new_v4();
        let (file, state) = (format!("{vdi}.missing"), ImageState::Missing);
        self.add_image(&Image { file, state, ..Image::new(uuid, sr, ImageFormat::Raw, 512, None) })?;
        self.execute("UPDATE vdi SET image = ?2 WHERE uuid = ?1", (Id(vdi), Id(uuid)))?;
        self.note(sr, Noted::Vdi(vdi));
        self.touch(ObjectKind::Vdi, vdi, Change::Changed);
        Ok(())
    }
}
