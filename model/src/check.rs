//! Checks at rest that the model, the daemon, the repositories and the processes agree.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};
use serde_json::{Value, json};

use super::verbs::{Request, patience};
use super::world::{PendingVerb, World};

/// Files of a repository that are not images.
const OWN_FILES: &[&str] = &[".tapline-sr.json", ".tapline-sr.lock", ".tapline-inventory.jsonl"];

impl World {
    /// Ends all trouble and waits until nothing is in progress.
    pub fn rest(&mut self) -> Result<(), String> {
        self.calm()?;
        self.settle(true)?;
        let begun = Instant::now();
        let mut quiet = 0;
        while quiet < 3 {
            let open = self.list("/tasks?open=true")?;
            let vbds = self.list("/vbds")?;
            let on_the_way = vbds
                .iter()
                .any(|vbd| !["plugged", "unplugged"].contains(&vbd["state"].as_str().unwrap_or("")))
                || self.list("/vms")?.iter().any(|vm| ["starting", "stopping"].map(Value::from).contains(&vm["power"]));
            quiet = if open.is_empty() && !on_the_way { quiet + 1 } else { 0 };
            if begun.elapsed() > patience() {
                return Err(format!("stuck, it does not come to rest: {} {}", json!(open), json!(vbds)));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        self.follow_the_killed()?;
        self.bring_back_repositories()
    }

    /// Compares everything that needs no reading of disks. Retried for a while, because some of it follows late.
    pub fn check(&mut self) -> Result<(), String> {
        self.rest()?;
        self.compare_once()?;
        if self.random_is(2) {
            self.query_monitors()?;
            self.compare_once()?;
        }
        self.log("all agrees");
        self.count("check");
        self.troubled = false;
        Ok(())
    }

    /// One attempt of [`World::check`].
    fn compare_once(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let compared = self.compare_lists().and_then(|()| self.compare_settings());
            let compared = compared.and_then(|()| self.compare_machines()).and_then(|()| self.compare_places());
            match compared.and_then(|()| self.expect_no_differences()) {
                Ok(()) => return Ok(()),
                Err(why) if begun.elapsed() > patience() / 4 => return Err(why),
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    }

    /// Compares the lists of the API with the model.
    pub fn compare_lists(&mut self) -> Result<(), String> {
        let shown: BTreeMap<String, Value> =
            self.list("/vdis")?.into_iter().map(|vdi| (text(&vdi["uuid"]), vdi)).collect();
        let known: BTreeSet<&String> = self.vdis.keys().collect();
        if shown.keys().collect::<BTreeSet<_>>() != known {
            let found: Vec<String> = shown.values().map(|vdi| format!("{} {}", vdi["uuid"], vdi["name"])).collect();
            return Err(format!("VDIs are {found:?}, should be {:?}", self.names()));
        }
        for (uuid, vdi) in &self.vdis {
            let Some(now) = shown.get(uuid) else { continue };
            let sr = self.srs.get(vdi.sr).map(|sr| sr.uuid.as_str());
            let size = now["size"].as_u64().unwrap_or(0);
            // A snapshot may outlive its VDI.
            let of = vdi.snapshot_of.as_ref().filter(|of| self.vdis.contains_key(*of));
            let right = now["name"] == *vdi.name
                && now["description"] == *vdi.description
                && vdi.sizes.contains(&size)
                && now["read_only"] == vdi.read_only
                && now["state"] == "ready"
                && now["sr"].as_str() == sr
                && of.is_none_or(|of| now["snapshot_of"] == **of);
            if !right {
                return Err(format!("VDI {uuid} is {now}, should be {vdi:?}"));
            }
        }
        let shown: BTreeMap<String, bool> =
            self.list("/vbds")?.iter().map(|vbd| (text(&vbd["uuid"]), vbd["state"] == "plugged")).collect();
        let known: BTreeMap<String, bool> = self.vbds.iter().map(|(uuid, vbd)| (uuid.clone(), vbd.plugged)).collect();
        if shown != known {
            return Err(format!("VBDs, and whether they are plugged: {shown:?}, should be {known:?}"));
        }
        Ok(())
    }

    fn names(&self) -> Vec<String> {
        self.vdis.iter().map(|(uuid, vdi)| format!("{uuid} {}", vdi.name)).collect()
    }

    /// Removes the files without an image, as a user does after a scan has reported them.
    pub fn remove_unnamed(&mut self) -> Result<(), String> {
        for sr in self.srs.clone() {
            let path = self.bed.storages.get(sr.storage).ok_or("no such storage")?.path.clone();
            let named = named_by(&self.get(&format!("/srs/{}/inventory", sr.uuid))?);
            for file in names_in(&path)?.difference(&named).map(|name| path.join(name)) {
                self.log(format!("remove {}, which no image has", file.display()));
                fs::remove_file(&file).map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
        Ok(())
    }

    /// Compares the files in repositories and in the run directory, the processes, and the chains in the inventories,
    /// the catalogue and the processes.
    fn compare_places(&mut self) -> Result<(), String> {
        for sr in self.srs.clone() {
            let storage = self.bed.storages.get(sr.storage).ok_or("no such storage")?.clone();
            let inventory = self.get(&format!("/srs/{}/inventory", sr.uuid))?;
            let images: BTreeMap<String, Value> =
                list(&inventory["images"]).iter().map(|image| (text(&image["uuid"]), image.clone())).collect();
            let named = named_by(&inventory);
            let there = names_in(&storage.path)?;
            if there != named {
                let (more, less): (Vec<_>, Vec<_>) =
                    (there.difference(&named).collect(), named.difference(&there).collect());
                return Err(format!(
                    "{}: files that nothing names {more:?}, files that are not there {less:?}",
                    storage.name
                ));
            }
            for vdi in list(&inventory["vdis"]) {
                self.compare_chain(&text(&vdi["uuid"]), vdi, &images)?;
            }
        }
        let running: BTreeMap<String, u32> = self.running()?;
        let plugged: BTreeSet<&String> =
            self.vbds.iter().filter(|(_, vbd)| vbd.plugged).map(|(uuid, _)| uuid).collect();
        let places = names_in(&self.bed.places.vbds())?;
        if running.keys().collect::<BTreeSet<_>>() != plugged || places.iter().collect::<BTreeSet<_>>() != plugged {
            return Err(format!("disks of {running:?} run, places of {places:?}; plugged should be {plugged:?}"));
        }
        Ok(())
    }

    /// The VBDs of running disks; an error if a process works on an image.
    fn running(&self) -> Result<BTreeMap<String, u32>, String> {
        let mut running = BTreeMap::new();
        for disk in self.bed.places.disks() {
            let Some(vbd) = disk.vbd else { return Err(format!("process {} is left over", disk.pid)) };
            if running.insert(vbd.clone(), disk.pid).is_some() {
                return Err(format!("two processes serve VBD {vbd}"));
            }
        }
        Ok(running)
    }

    /// Compares the chain of a VDI in the inventory, the catalogue and the process.
    fn compare_chain(&mut self, uuid: &str, recorded: &Value, images: &BTreeMap<String, Value>) -> Result<(), String> {
        let Some(vdi) = self.vdis.get(uuid) else { return Err(format!("VDI {uuid} is in an inventory only")) };
        let description = recorded["description"].as_str().unwrap_or_default();
        if recorded["name"] != *vdi.name
            || description != vdi.description
            || recorded["read_only"].as_bool().unwrap_or(false) != vdi.read_only
        {
            return Err(format!("the inventory has {recorded}, should be {vdi:?}"));
        }
        let mut chain = Vec::new();
        let mut next = recorded["image"].as_str();
        while let Some(image) = next.and_then(|image| images.get(image)) {
            chain.push(text(&image["file"]));
            next = image["parent"].as_str();
        }
        let known = self.catalogue_chain(uuid)?;
        if known != chain {
            return Err(format!("VDI {uuid}: {chain:?} in the inventory, {known:?} in the catalogue"));
        }
        for vbd in self.vbds_of(uuid) {
            if !self.vbd(&vbd)?.plugged {
                continue;
            }
            let (layers, size) = self.layers(&vbd)?;
            if layers != chain {
                return Err(format!("VDI {uuid}: {chain:?} in the catalogue, {layers:?} in the process"));
            }
            if !self.vdi(uuid)?.sizes.contains(&size) {
                return Err(format!(
                    "VDI {uuid}: the process says {size} bytes, should be {:?}",
                    self.vdi(uuid)?.sizes
                ));
            }
        }
        Ok(())
    }

    fn catalogue_chain(&self, vdi: &str) -> Result<Vec<String>, String> {
        let failed = |error: rusqlite::Error| format!("look into the catalogue: {error}");
        let path = self.bed.places.room.join("state/catalogue.db");
        let catalogue = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY).map_err(failed)?;
        let sql = "WITH RECURSIVE chain (link, depth) AS (
                       SELECT image, 0 FROM vdi WHERE uuid = ?1
                       UNION ALL SELECT parent, depth + 1 FROM chain JOIN image ON uuid = link WHERE parent IS NOT NULL
                   ) SELECT file FROM chain JOIN image ON uuid = link ORDER BY depth";
        let mut statement = catalogue.prepare(sql).map_err(failed)?;
        let files = statement.query_map([vdi], |row| row.get(0)).map_err(failed)?;
        files.collect::<Result<_, _>>().map_err(failed)
    }

    /// The files of a disk from the top down and its size, as reported by its process.
    fn layers(&self, vbd: &str) -> Result<(Vec<String>, u64), String> {
        let said = self.ask_disk(vbd, "layers")?;
        let name =
            |layer: &Value| layer["path"].as_str().and_then(|path| path.rsplit('/').next()).unwrap_or("").to_owned();
        Ok((list(&said["layers"]).iter().map(name).collect(), said["size"].as_u64().unwrap_or(0)))
    }

    /// Sends a verb without arguments to the process of a disk.
    pub fn ask_disk(&self, vbd: &str, verb: &str) -> Result<Value, String> {
        let socket = self.bed.places.vbds().join(vbd).join("control.sock");
        let failed = |error: std::io::Error| format!("{}: {error}", socket.display());
        let mut disk = UnixStream::connect(&socket).map_err(failed)?;
        disk.set_read_timeout(Some(patience())).map_err(failed)?;
        disk.write_all(format!("{}\n", json!({ "version": 1, "id": 1, "verb": verb })).as_bytes()).map_err(failed)?;
        let mut said = String::new();
        BufReader::new(disk).read_line(&mut said).map_err(failed)?;
        let said: Value = serde_json::from_str(&said).map_err(|error| format!("{}: {error}", socket.display()))?;
        Ok(said["ok"].clone())
    }

    /// Plugs every VDI, reads and compares all of it, and unplugs it; nothing may be left.
    pub fn check_all(&mut self) -> Result<(), String> {
        self.delete_machines()?;
        self.check()?;
        for vdi in self.vdis.keys().cloned().collect::<Vec<_>>() {
            let plugged = self.vbds.iter().find(|(_, vbd)| vbd.vdi == vdi && vbd.plugged).map(|(uuid, _)| uuid.clone());
            let vbd = match (plugged, self.own_vbds_of(&vdi).first()) {
                (Some(vbd), _) => vbd,
                (None, Some(vbd)) => self.plug(vbd.clone(), vdi.clone())?,
                (None, None) => {
                    let vbd = self.make_vbd(&vdi)?.ok_or("a VBD cannot be made")?;
                    self.plug(vbd, vdi.clone())?
                }
            };
            self.compare_all(&vbd)?;
            let holds = vec![vdi.clone()];
            self.vbd(&vbd)?.client = None;
            self.begin(
                PendingVerb::Unplug(vbd.clone()),
                holds,
                None,
                &Request::post(format!("/vbds/{vbd}/unplug"), json!({})),
            )?;
            self.settle(true)?;
        }
        self.check()?;
        self.log("all is as it should be");
        self.count("check all");
        Ok(())
    }

    fn plug(&mut self, vbd: String, vdi: String) -> Result<String, String> {
        self.begin(
            PendingVerb::Plug(vbd.clone()),
            vec![vdi],
            None,
            &Request::post(format!("/vbds/{vbd}/plug"), json!({})),
        )?;
        self.settle(true)?;
        if self.vbd(&vbd)?.plugged {
            Ok(vbd)
        } else {
            Err(format!("VBD {vbd} cannot be plugged, and nothing is wrong"))
        }
    }
}

/// The text of a JSON string; empty for other values.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The files of a repository according to its inventory, and the repository's own files.
fn named_by(inventory: &Value) -> BTreeSet<String> {
    let images = list(&inventory["images"]).iter().map(|image| text(&image["file"]));
    images.chain(OWN_FILES.iter().map(|name| (*name).to_owned())).collect()
}

/// The file names in a directory.
pub fn names_in(path: &std::path::Path) -> Result<BTreeSet<String>, String> {
    let entries = fs::read_dir(path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}
