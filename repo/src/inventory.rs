//! The inventory: a repository's own record of its contents, in a file next to its images (decision 0021).
//!
//! It has one JSON object per line, readable by people. The first line has the complete state of some generation; each
//! later line, the changes of one commit of the catalogue. A line ends with its own hash, which is also its *head*: it
//! covers the head of the previous line, so that two files with the same head have the same history.
//!
//! Invariants: what is read is a state that was written, or nothing; a line that was cut off by a crash is ignored, and
//! damage anywhere else is reported. The whole file may be hostile: no name in it leads out of the directory, and no
//! image is its own ancestor.

mod line;
mod log;

use std::collections::{BTreeMap, HashSet};

use api::{Description, InventoryImage, InventoryVdi, Name, OtherConfig, Tags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

pub use crate::driver::{DAMAGED, INVENTORY};
pub use line::{Line, first_head};
pub use log::{Damage, Log, Read, keep_damaged, read};

/// The texts of a repository that people and programs give it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Words {
    /// Its name.
    pub name: Name,
    /// Its description.
    #[serde(default, skip_serializing_if = "Description::is_empty")]
    pub description: Description,
    /// Its tags.
    #[serde(default, skip_serializing_if = "Tags::is_empty")]
    pub tags: Tags,
    /// The strings that programs keep with it.
    #[serde(default, skip_serializing_if = "OtherConfig::is_empty")]
    pub other_config: OtherConfig,
}

/// The contents of an inventory at some generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contents {
    /// The repository's name and description.
    pub words: Words,
    /// Its images.
    pub images: BTreeMap<Uuid, InventoryImage>,
    /// Its VDIs.
    pub vdis: BTreeMap<Uuid, InventoryVdi>,
}

/// A change of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// The repository has this name and this description.
    Sr(Words),
    /// An image is this.
    Image(InventoryImage),
    /// A VDI is this.
    Vdi(InventoryVdi),
    /// Something was removed.
    Gone(Gone),
}

/// A removed object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gone {
    /// An image.
    Image(Uuid),
    /// A VDI.
    Vdi(Uuid),
}

impl Contents {
    /// An empty repository.
    pub fn new(words: Words) -> Contents {
        Contents { words, images: BTreeMap::new(), vdis: BTreeMap::new() }
    }

    fn apply(&mut self, change: Change) {
        match change {
            Change::Sr(words) => self.words = words,
            Change::Image(image) => drop(self.images.insert(image.uuid, image)),
            Change::Vdi(vdi) => drop(self.vdis.insert(vdi.uuid, vdi)),
            Change::Gone(Gone::Image(image)) => drop(self.images.remove(&image)),
            Change::Gone(Gone::Vdi(vdi)) => drop(self.vdis.remove(&vdi)),
        }
    }

    /// Refuses an invalid state of a repository; returns why.
    fn check(&self) -> Result<(), String> {
        let mut files = HashSet::new();
        for image in self.images.values() {
            let file = &image.file;
            let plain =
                !["", ".", ".."].contains(&&**file) && !file.contains(['/', '\0']) && !file.starts_with(".tapline-");
            if !plain {
                return Err(format!("image {} has a file name that no repository file can have: {file:?}", image.uuid));
            }
            if !files.insert(file) {
                return Err(format!("two images have the same file {file:?}"));
            }
        }
        let mut shown = HashSet::new();
        for vdi in self.vdis.values() {
            if !self.images.contains_key(&vdi.image) || !shown.insert(vdi.image) {
                return Err(format!("VDI {} has no image of its own", vdi.uuid));
            }
        }
        self.check_chains()
    }

    /// Checks that no image is its own ancestor.
    fn check_chains(&self) -> Result<(), String> {
        let mut sound: HashSet<Uuid> = HashSet::new();
        for start in self.images.keys() {
            let mut seen = HashSet::new();
            let mut at = Some(*start);
            while let Some(image) = at.filter(|image| !sound.contains(image)) {
                let Some(found) = self.images.get(&image) else {
                    return Err(format!("image {start} is based on image {image}, which is missing"));
                };
                if !seen.insert(image) {
                    return Err(format!("image {image} is its own ancestor"));
                }
                at = found.parent;
            }
            sound.extend(seen);
        }
        Ok(())
    }
}

#[cfg(test)]
mod test;
