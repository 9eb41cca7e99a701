//! Changes that users make to image files while no disk has them open: a hard link, a move away and back, an older copy
//! in place of the newer file or in the same file.
//!
//! Invariants checked: a second name of a file is not a second disk; an image that was moved away is missing until it
//! is back; a disk shows what is in its file, even if that was replaced.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::verbs::Request;
use super::world::{PendingVerb, Vdi, World};

impl World {
    /// Makes a random change to an image file.
    pub fn meddle(&mut self) -> Result<(), String> {
        match self.random.below(4) {
            0 | 1 => self.link_image(),
            2 => self.move_image(),
            _ => self.restore_image(),
        }
    }

    /// A VDI with its file, which no process has open and which contains all of its data.
    fn file_at_rest(&mut self) -> Result<Option<(String, PathBuf)>, String> {
        self.rest()?;
        let fits = |world: &World, uuid: &str, vdi: &Vdi| !vdi.read_only && world.vbds_of(uuid).is_empty();
        let Some(vdi) = self.free_vdi(fits) else { return Ok(None) };
        let Some(shown) = self.get_vdi(&vdi)? else { return Ok(None) };
        let all = self.list("/vdis")?;
        // A file in a chain is not replaced by an older copy of itself.
        let alone =
            shown["depth"] == 1 && shown["state"] == "ready" && all.iter().all(|other| other["snapshot_of"] != *vdi);
        let path = self.file_of(&vdi)?;
        Ok(path.filter(|_| alone).map(|path| (vdi, path)))
    }

    fn scan_of(&mut self, vdi: &str) -> Result<(), String> {
        let number = self.vdi(vdi)?.sr;
        let sr = self.srs.get(number).ok_or("no such repository")?.uuid.clone();
        self.change(&Request::post(format!("/srs/{sr}/scan"), json!({})))
    }

    /// Hard-links a file in its repository, as `cp -al` does.
    fn link_image(&mut self) -> Result<(), String> {
        let Some((vdi, path)) = self.file_at_rest()? else { return Ok(()) };
        let name = self.name();
        let link = path.with_file_name(&name).with_extension(path.extension().unwrap_or_default());
        self.count("image-link");
        self.log(format!("ln {} {}", path.display(), link.display()));
        fs::hard_link(&path, &link).map_err(|error| format!("{}: {error}", link.display()))?;
        let scanned = self.scan_of(&vdi);
        let shown = self.list("/vdis")?;
        let file = link.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let second = shown.into_iter().find(|other| other["file"] == file);
        fs::remove_file(&link).map_err(|error| format!("{}: {error}", link.display()))?;
        match second {
            Some(second) => Err(format!("a hard link of the file of VDI {vdi} is a disk of its own: {second}")),
            None => scanned.and_then(|()| self.check()),
        }
    }

    /// Moves a file away and back.
    fn move_image(&mut self) -> Result<(), String> {
        let Some((vdi, path)) = self.file_at_rest()? else { return Ok(()) };
        let away = path.with_extension("away");
        self.count("image-move");
        self.log(format!("mv {} {}", path.display(), away.display()));
        let rename =
            |from: &Path, to: &Path| fs::rename(from, to).map_err(|error| format!("{}: {error}", to.display()));
        rename(&path, &away)?;
        let scanned = self.scan_of(&vdi);
        let state = self.get_vdi(&vdi)?.map(|shown| shown["state"].clone());
        rename(&away, &path)?;
        scanned?;
        if state != Some(json!("missing")) && !self.troubled {
            return Err(format!("the file of VDI {vdi} was moved away, and the VDI is {state:?}"));
        }
        self.scan_of(&vdi)?;
        self.check()
    }

    /// Restores a file to its state before the last writes, by replacing it or by overwriting its content.
    fn restore_image(&mut self) -> Result<(), String> {
        let Some((vdi, path)) = self.file_at_rest()? else { return Ok(()) };
        let (kept, content) = (path.with_extension("kept"), self.vdi(&vdi)?.content.clone());
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        fs::copy(&path, &kept).map_err(failed)?;
        self.write_through(&vdi, true)?;
        // The disk may have moved to another file meanwhile.
        let same = self.file_of(&vdi)?.is_some_and(|now| now == path);
        if self.vbds_of(&vdi).is_empty() && same {
            let in_place = self.random_is(2);
            self.count("image-restore");
            self.log(format!("{} is as before its last writes, in place: {in_place}", path.display()));
            let restored = if in_place { copy_into(&kept, &path) } else { fs::rename(&kept, &path) };
            restored.map_err(failed)?;
            self.vdi(&vdi)?.content = content;
            self.write_through(&vdi, false)?;
        }
        if kept.exists() {
            fs::remove_file(&kept).map_err(failed)?;
        }
        self.check()
    }

    fn file_of(&mut self, vdi: &str) -> Result<Option<PathBuf>, String> {
        let Some(shown) = self.get_vdi(vdi)? else { return Ok(None) };
        let number = self.vdi(vdi)?.sr;
        let storage = self.srs.get(number).and_then(|sr| self.bed.storages.get(sr.storage));
        Ok(shown["file"].as_str().zip(storage).map(|(file, on)| on.path.join(file)))
    }

    /// Plugs a VDI, writes to it or reads all of it, and unplugs it.
    fn write_through(&mut self, vdi: &str, write: bool) -> Result<(), String> {
        let Some(vbd) = self.make_vbd(vdi)? else { return Ok(()) };
        let request = Request::post(format!("/vbds/{vbd}/plug"), json!({}));
        self.begin(PendingVerb::Plug(vbd.clone()), vec![vdi.to_owned()], None, &request)?;
        self.settle(true)?;
        if self.vbds.get(&vbd).is_some_and(|vbd| vbd.plugged) {
            if write { self.write_some(&vbd)? } else { self.compare_all(&vbd)? }
        }
        self.delete_vbd(&vbd)
    }
}

/// Copies the content of a file into another one, which keeps its inode.
fn copy_into(from: &Path, to: &Path) -> io::Result<()> {
    let mut target = File::options().write(true).truncate(true).open(to)?;
    io::copy(&mut File::open(from)?, &mut target).map(drop)
}
