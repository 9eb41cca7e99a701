//! The catalogue's side of inventories ([`crate::inventory`]).
//!
//! Each commit that changes images or VDIs of a repository, or its name and description, also increments the
//! repository's generation and stores the inventory line for that, in the same commit. So the file plus the stored
//! lines always equal the catalogue's state, whatever crashes when. Lines that have reached the file are deleted with
//! the next commit that creates one.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use api::{InventoryImage, InventoryVdi, Labels, Problem};
use rusqlite::Row;
use tokio::sync::Notify;
use uuid::Uuid;

use super::image::{Image, ImageState};
use super::row::{Block, Id, Json, Time, labels, text};
use super::{Tx, View, failed};
use crate::inventory::{Change, Contents, Gone, Line, Words, first_head};

/// The part of a repository's inventory that a change has touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Noted {
    /// The repository's name, description and labels.
    Words,
    /// An image.
    Image(Uuid),
    /// A VDI.
    Vdi(Uuid),
}

/// The generations committed, and those in the files. In memory only: when the daemon starts, the files are read.
#[derive(Debug, Default)]
pub struct Outbox {
    state: Mutex<HashMap<Uuid, Reached>>,
    more: Notify,
}

#[derive(Clone, Copy, Debug, Default)]
struct Reached {
    recorded: u64,
    written: Option<u64>,
}

impl Outbox {
    fn state(&self) -> MutexGuard<'_, HashMap<Uuid, Reached>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records committed generations; `None` for a repository that no longer exists.
    pub(super) fn recorded(&self, reached: &[(Uuid, Option<u64>)]) {
        if reached.is_empty() {
            return;
        }
        let mut state = self.state();
        for (sr, generation) in reached {
            match generation {
                Some(generation) => state.entry(*sr).or_default().recorded = *generation,
                None => drop(state.remove(sr)),
            }
        }
        drop(state);
        self.more.notify_one();
    }

    /// Records the generation that is durable in a repository's file, if that is known.
    pub fn wrote(&self, sr: Uuid, generation: Option<u64>) {
        if let Some(reached) = self.state().get_mut(&sr) {
            reached.written = generation;
        }
    }

    /// The generation that is in the file of a repository for certain, if that is known.
    pub fn written(&self, sr: Uuid) -> Option<u64> {
        self.state().get(&sr).and_then(|reached| reached.written)
    }

    /// Whether something is recorded that may not be in the file.
    pub fn is_behind(&self, sr: Uuid) -> bool {
        self.state().get(&sr).is_some_and(|reached| reached.written.is_none_or(|written| written < reached.recorded))
    }

    /// The repositories of which that is so.
    pub fn behind(&self) -> Vec<Uuid> {
        let known: Vec<Uuid> = self.state().keys().copied().collect();
        known.into_iter().filter(|sr| self.is_behind(*sr)).collect()
    }

    /// Waits until something more is recorded.
    pub async fn more(&self) {
        self.more.notified().await;
    }
}

/// An image as an inventory describes it; `None` for one that is still being created.
fn described(image: &Image) -> Option<InventoryImage> {
    let Image { uuid, sr: _, file, format, size, physical: _, parent, state, kept } = image.clone();
    let (damaged, diverged) = (state == ImageState::Damaged, state == ImageState::Diverged);
    let no_data = state == ImageState::NoData;
    (state != ImageState::Making).then_some(InventoryImage {
        uuid,
        file,
        format,
        size,
        parent,
        damaged,
        diverged,
        no_data,
        kept,
    })
}

/// Whether both have the same description in an inventory.
pub(super) fn is_same(one: &Image, other: &Image) -> bool {
    described(one) == described(other)
}

const VDIS: &str = "SELECT vdi.* FROM vdi JOIN image ON vdi.image = image.uuid";

fn vdi_of_row(row: &Row<'_>) -> rusqlite::Result<InventoryVdi> {
    let Labels { tags, other_config } = labels(row)?;
    Ok(InventoryVdi {
        uuid: row.get::<_, Id>("uuid")?.0,
        image: row.get::<_, Id>("image")?.0,
        name: text(row, "name")?,
        description: text(row, "description")?,
        tags,
        other_config,
        read_only: row.get("read_only")?,
        logical_block_size: row.get::<_, Option<Block>>("logical_block_size")?.map(|size| size.0),
        snapshot_of: row.get::<_, Option<Id>>("snapshot_of")?.map(|id| id.0),
        snapshot_time: row.get::<_, Option<Time>>("snapshot_time")?.map(|time| time.0),
        retention: row.get::<_, Option<Json<_>>>("retention")?.map(|json| json.0),
        scheduled: row.get("scheduled")?,
        for_backup: row.get("for_backup")?,
        cbt: row.get::<_, Option<Json<_>>>("cbt")?.map(|json| Box::new(json.0)),
        created: row.get::<_, Time>("created")?.0,
    })
}

/// The catalogue's state of a repository, with its generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// How many changes it has recorded.
    pub generation: u64,
    /// The hash over all of them.
    pub head: String,
    /// The resulting contents.
    pub contents: Contents,
    /// Lines that may not be in the file, the oldest first.
    pub lines: Vec<Line>,
}

impl Recorded {
    /// Generations that the catalogue knows by their heads.
    pub fn heads(&self) -> Vec<(u64, String)> {
        let before = self.lines.first().map(|line| (line.generation.saturating_sub(1), line.before.clone()));
        let lines = self.lines.iter().map(|line| (line.generation, line.head.clone()));
        before.into_iter().chain(lines).chain([(self.generation, self.head.clone())]).collect()
    }
}

impl View<'_> {
    /// How far the inventory of a repository is, if it has one.
    pub fn inventory_head(&self, sr: Uuid) -> Result<Option<(u64, String)>, Problem> {
        self.row("SELECT generation, head FROM inventory WHERE sr = ?1", [Id(sr)], |row| Ok((row.get(0)?, row.get(1)?)))
    }

    /// The same of all repositories.
    pub(super) fn inventory_heads(&self) -> Result<Vec<(Uuid, Option<u64>)>, Problem> {
        self.rows("SELECT sr, generation FROM inventory", [], |row| Ok((row.get::<_, Id>(0)?.0, Some(row.get(1)?))))
    }

    /// The lines of a repository's inventory that may not be in its file, the oldest first.
    pub fn inventory_lines(&self, sr: Uuid) -> Result<Vec<Line>, Problem> {
        let sql = "SELECT line FROM inventory_outbox WHERE sr = ?1 ORDER BY generation";
        let lines = self.rows(sql, [Id(sr)], |row| row.get::<_, String>(0))?;
        lines.into_iter().map(Line::parse).collect()
    }

    /// The catalogue's consistent state of a repository; `None` if it has no inventory.
    pub fn inventory(&self, sr: Uuid) -> Result<Option<Recorded>, Problem> {
        let _moment = self.connection.unchecked_transaction().map_err(failed)?;
        let Some((generation, head)) = self.inventory_head(sr)? else { return Ok(None) };
        Ok(Some(Recorded { generation, head, contents: self.contents(sr)?, lines: self.inventory_lines(sr)? }))
    }

    /// The contents that a repository's inventory should have.
    pub(super) fn contents(&self, sr: Uuid) -> Result<Contents, Problem> {
        let images = self.images_of_sr(sr)?.iter().filter_map(described).map(|image| (image.uuid, image)).collect();
        let vdis =
            self.rows(&format!("{VDIS} WHERE image.sr = ?1 AND image.state <> 'making'"), [Id(sr)], vdi_of_row)?;
        let vdis = vdis.into_iter().map(|vdi| (vdi.uuid, vdi)).collect();
        Ok(Contents { words: self.words(sr)?, images, vdis })
    }

    fn words(&self, sr: Uuid) -> Result<Words, Problem> {
        let api::Sr { name, description, tags, other_config, .. } = self.sr(sr)?;
        Ok(Words { name, description, tags, other_config })
    }

    fn change(&self, sr: Uuid, noted: Noted) -> Result<Change, Problem> {
        Ok(match noted {
            Noted::Words => Change::Sr(self.words(sr)?),
            Noted::Image(image) => match self.find_image(image)?.as_ref().and_then(described) {
                Some(image) => Change::Image(image),
                None => Change::Gone(Gone::Image(image)),
            },
            Noted::Vdi(vdi) => match self.row(&format!("{VDIS} WHERE vdi.uuid = ?1"), [Id(vdi)], vdi_of_row)? {
                Some(vdi) => Change::Vdi(vdi),
                None => Change::Gone(Gone::Vdi(vdi)),
            },
        })
    }
}

impl Tx<'_> {
    /// The inventory of a repository says something else now.
    pub(super) fn note(&mut self, sr: Uuid, noted: Noted) {
        self.noted.push((sr, Some(noted)));
    }

    /// The same of a VDI, while it is there.
    pub(super) fn note_vdi(&mut self, vdi: Uuid) -> Result<(), Problem> {
        let sql = "SELECT image.sr FROM vdi JOIN image ON vdi.image = image.uuid WHERE vdi.uuid = ?1";
        if let Some(sr) = self.row(sql, [Id(vdi)], |row| Ok(row.get::<_, Id>(0)?.0))? {
            self.note(sr, Noted::Vdi(vdi));
        }
        Ok(())
    }

    /// A repository that has no inventory gets one: it is to be written as a whole.
    pub fn begin_inventory(&mut self, sr: Uuid) -> Result<(), Problem> {
        self.sr(sr)?;
        if self.inventory_head(sr)?.is_none() {
            self.set_inventory(sr, 0, &first_head())?;
        }
        Ok(())
    }

    /// The inventory of a repository is the file in its directory, or is to be rewritten with a new history.
    pub(super) fn set_inventory(&mut self, sr: Uuid, generation: u64, head: &str) -> Result<(), Problem> {
        self.execute("DELETE FROM inventory_outbox WHERE sr = ?1", [Id(sr)])?;
        self.execute("INSERT OR REPLACE INTO inventory VALUES (?1, ?2, ?3)", (Id(sr), generation, head))?;
        self.noted.push((sr, None));
        Ok(())
    }

    /// A repository is forgotten, its inventory is not.
    pub(super) fn drop_inventory(&mut self, sr: Uuid) -> Result<(), Problem> {
        self.execute("DELETE FROM inventory_outbox WHERE sr = ?1", [Id(sr)])?;
        self.execute("DELETE FROM inventory WHERE sr = ?1", [Id(sr)])?;
        self.noted.push((sr, None));
        Ok(())
    }

    /// Lines that are in the file are not kept any longer.
    pub fn trim_inventory(&mut self, sr: Uuid, written: u64) -> Result<(), Problem> {
        self.execute("DELETE FROM inventory_outbox WHERE sr = ?1 AND generation <= ?2", (Id(sr), written)).map(drop)
    }

    /// Stores a line for each repository whose inventory changes: before the commit, after all its changes. Returns the
    /// new generations.
    pub(super) fn record_inventories(&mut self, outbox: &Outbox) -> Result<Vec<(Uuid, Option<u64>)>, Problem> {
        let mut srs: Vec<Uuid> = Vec::new();
        for (sr, _) in &self.noted {
            if !srs.contains(sr) {
                srs.push(*sr);
            }
        }
        srs.into_iter().map(|sr| self.record_inventory(sr, outbox).map(|reached| (sr, reached))).collect()
    }

    fn record_inventory(&mut self, sr: Uuid, outbox: &Outbox) -> Result<Option<u64>, Problem> {
        let Some((generation, head)) = self.inventory_head(sr)? else { return Ok(None) };
        let mut noted: Vec<Noted> = Vec::new();
        let mut seen = HashSet::new();
        for (_, one) in self.noted.iter().filter(|(other, _)| *other == sr) {
            noted.extend(one.filter(|one| seen.insert(*one)));
        }
        if noted.is_empty() {
            return Ok(Some(generation));
        }
        let changes = noted.into_iter().map(|one| self.change(sr, one)).collect::<Result<Vec<_>, Problem>>()?;
        let line = Line::new(generation.saturating_add(1), head, changes)?;
        if let Some(written) = outbox.written(sr) {
            self.trim_inventory(sr, written)?;
        }
        self.execute("INSERT INTO inventory_outbox VALUES (?1, ?2, ?3)", (Id(sr), line.generation, &line.text))?;
        self.execute(
            "UPDATE inventory SET generation = ?2, head = ?3 WHERE sr = ?1",
            (Id(sr), line.generation, &line.head),
        )?;
        Ok(Some(line.generation))
    }
}

#[cfg(test)]
mod test;
