//! Images: the files of a repository that contain a disk or a layer of one. The API does not show them; VDIs are based
//! on them.

use std::collections::HashMap;
use std::path::PathBuf;

use api::{Code, ImageFormat, Problem, VdiState};
use rusqlite::{Row, named_params};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::inventory::{Noted, is_same};
use super::row::{Id, Word};
use super::{Tx, View};

/// A file that holds a disk or a layer of one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Its identity in the catalogue: the one in the file's own metadata is not trusted.
    pub uuid: Uuid,
    /// The repository.
    pub sr: Uuid,
    /// The file's name in the repository.
    pub file: String,
    /// Its format.
    pub format: ImageFormat,
    /// Virtual size in bytes.
    pub size: u64,
    /// Its space on the file system at the last measurement.
    pub physical: u64,
    /// The parent image.
    pub parent: Option<Uuid>,
    /// Whether it can be used.
    pub state: ImageState,
    /// It was added without a VDI: only a user may merge or remove it.
    pub kept: bool,
}

/// Whether an image can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageState {
    /// It can.
    Ready,
    /// A task is making it; whether it becomes one is in the journal.
    Making,
    /// Its file is not there.
    Missing,
    /// Its file was found damaged.
    Damaged,
    /// A running disk and the catalogue disagree about the chain that it is part of.
    Diverged,
    /// It has no file: it stands for the data of a snapshot that were destroyed.
    NoData,
}

impl ImageState {
    /// The state of a VDI whose image is in this one.
    pub(super) fn shown(self) -> VdiState {
        match self {
            ImageState::Ready | ImageState::Making => VdiState::Ready,
            ImageState::Missing => VdiState::Missing,
            ImageState::Damaged => VdiState::Damaged,
            ImageState::Diverged => VdiState::Diverged,
            ImageState::NoData => VdiState::NoData,
        }
    }
}

/// More images than a chain may have (the disk process's limit is lower): a chain of this length is a loop.
const DEPTH_MAX: u32 = 4096;

const COLUMNS: &str = "uuid, sr, file, format, size, physical, parent, state, kept";

pub(super) fn of_row(row: &Row<'_>) -> rusqlite::Result<Image> {
    Ok(Image {
        uuid: row.get::<_, Id>("uuid")?.0,
        sr: row.get::<_, Id>("sr")?.0,
        file: row.get("file")?,
        format: row.get::<_, Word<_>>("format")?.0,
        size: row.get("size")?,
        physical: row.get("physical")?,
        parent: row.get::<_, Option<Id>>("parent")?.map(|id| id.0),
        state: row.get::<_, Word<_>>("state")?.0,
        kept: row.get("kept")?,
    })
}

fn no_image(uuid: Uuid) -> Problem {
    Problem::new(Code::NotFound, format!("there is no image {uuid}"))
}

/// The file of an image of ours: it is called after it.
pub fn file_name(image: Uuid, format: ImageFormat) -> String {
    format!("{image}.{format}")
}

impl Image {
    /// A usable image of ours, whose physical size is still to be measured.
    pub fn new(uuid: Uuid, sr: Uuid, format: ImageFormat, size: u64, parent: Option<Uuid>) -> Image {
        let (file, state) = (file_name(uuid, format), ImageState::Ready);
        Image { uuid, sr, file, format, size, physical: 0, parent, state, kept: false }
    }

    /// Where its file is, in a repository that is at `directory`.
    pub fn path(&self, directory: &std::path::Path) -> PathBuf {
        directory.join(&self.file)
    }
}

impl View<'_> {
    /// An image, if there is one.
    pub fn find_image(&self, uuid: Uuid) -> Result<Option<Image>, Problem> {
        self.row(&format!("SELECT {COLUMNS} FROM image WHERE uuid = ?1"), [Id(uuid)], of_row)
    }

    /// An image; an error if there is none with this UUID.
    pub fn image(&self, uuid: Uuid) -> Result<Image, Problem> {
        self.find_image(uuid)?.ok_or_else(|| no_image(uuid))
    }

    /// The image of a VDI and its ancestors, leaf first.
    pub fn chain(&self, vdi: Uuid) -> Result<Vec<Image>, Problem> {
        let leaf = self.vdi_image(vdi)?;
        self.chain_of_image(leaf)
    }

    /// An image and its ancestors, leaf first.
    pub fn chain_of_image(&self, image: Uuid) -> Result<Vec<Image>, Problem> {
        let sql = "WITH RECURSIVE chain (link, depth) AS (
                       SELECT ?1, 0
                       UNION ALL
                       SELECT image.parent, depth + 1 FROM chain JOIN image ON image.uuid = chain.link
                       WHERE image.parent IS NOT NULL AND depth < ?2
                   )
                   SELECT image.* FROM chain JOIN image ON image.uuid = chain.link ORDER BY depth";
        let chain = self.rows(sql, (Id(image), DEPTH_MAX), of_row)?;
        if chain.is_empty() { Err(no_image(image)) } else { Ok(chain) }
    }

    /// The image that a file of a repository is, if it is known.
    pub fn image_of_file(&self, sr: Uuid, file: &str) -> Result<Option<Image>, Problem> {
        self.row(&format!("SELECT {COLUMNS} FROM image WHERE sr = ?1 AND file = ?2"), (Id(sr), file), of_row)
    }

    /// The direct children of an image.
    pub fn children(&self, image: Uuid) -> Result<Vec<Image>, Problem> {
        self.rows(&format!("SELECT {COLUMNS} FROM image WHERE parent = ?1 ORDER BY uuid"), [Id(image)], of_row)
    }

    /// The VDI of an image, if it is not hidden.
    pub fn vdi_of_image(&self, image: Uuid) -> Result<Option<Uuid>, Problem> {
        self.row("SELECT uuid FROM vdi WHERE image = ?1", [Id(image)], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// The VDIs of a repository by the images they show.
    pub fn vdis_by_image(&self, sr: Uuid) -> Result<HashMap<Uuid, Uuid>, Problem> {
        let sql = "SELECT vdi.image, vdi.uuid FROM vdi JOIN image ON vdi.image = image.uuid WHERE image.sr = ?1";
        let pairs = self.rows(sql, [Id(sr)], |row| Ok((row.get::<_, Id>(0)?.0, row.get::<_, Id>(1)?.0)))?;
        Ok(pairs.into_iter().collect())
    }

    /// The VDIs whose chain contains an image.
    pub fn vdis_above(&self, image: Uuid) -> Result<Vec<Uuid>, Problem> {
        let sql = "WITH RECURSIVE above (link) AS (
                       SELECT ?1 UNION SELECT image.uuid FROM above JOIN image ON image.parent = above.link
                   )
                   SELECT vdi.uuid FROM above JOIN vdi ON vdi.image = above.link ORDER BY vdi.uuid";
        self.rows(sql, [Id(image)], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// All images, in the order in which they were recorded.
    pub fn images_by_age(&self) -> Result<Vec<Uuid>, Problem> {
        self.rows("SELECT uuid FROM image ORDER BY rowid", [], |row| Ok(row.get::<_, Id>(0)?.0))
    }

    /// All images of a repository.
    pub fn images_of_sr(&self, sr: Uuid) -> Result<Vec<Image>, Problem> {
        self.rows(&format!("SELECT {COLUMNS} FROM image WHERE sr = ?1 ORDER BY file"), [Id(sr)], of_row)
    }
}

impl Tx<'_> {
    /// Adds an image to its repository.
    pub fn add_image(&mut self, image: &Image) -> Result<(), Problem> {
        self.note(image.sr, Noted::Image(image.uuid));
        self.insert_image(image)
    }

    /// The same for one of which the inventory knows.
    pub(super) fn insert_image(&mut self, image: &Image) -> Result<(), Problem> {
        self.execute(
            "INSERT INTO image (uuid, sr, file, format, size, physical, parent, state, kept)
             VALUES (:uuid, :sr, :file, :format, :size, :physical, :parent, :state, :kept)",
            named_params! {
                ":uuid": Id(image.uuid), ":sr": Id(image.sr), ":file": image.file, ":format": Word(image.format),
                ":size": image.size, ":physical": image.physical, ":parent": image.parent.map(Id),
                ":state": Word(image.state), ":kept": image.kept,
            },
        )?;
        Ok(())
    }

    /// Records what has become of an image: all but its identity, its repository and whether it is kept.
    pub fn set_image(&mut self, image: &Image) -> Result<(), Problem> {
        let before = self.image(image.uuid)?;
        self.execute(
            "UPDATE image SET file = :file, format = :format, size = :size, physical = :physical, parent = :parent,
             state = :state WHERE uuid = :uuid",
            named_params! {
                ":uuid": Id(image.uuid), ":file": image.file, ":format": Word(image.format), ":size": image.size,
                ":physical": image.physical, ":parent": image.parent.map(Id), ":state": Word(image.state),
            },
        )?;
        if !is_same(&before, &Image { sr: before.sr, kept: before.kept, ..image.clone() }) {
            self.note(before.sr, Noted::Image(image.uuid));
        }
        self.touch_vdi_of(image.uuid)
    }

    /// Forgets an image, if it is known: a step of a task may be done twice.
    pub fn remove_image(&mut self, uuid: Uuid) -> Result<(), Problem> {
        if let Some(image) = self.find_image(uuid)? {
            self.note(image.sr, Noted::Image(uuid));
        }
        self.execute("DELETE FROM image WHERE uuid = ?1", [Id(uuid)]).map(drop)
    }
}
