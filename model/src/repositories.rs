//! Operations on repositories: create, scan, detach, forget, introduce, and repair after trouble.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::daemon::api::{Ended, Trouble, uuid};

use super::check::text;
use super::verbs::{Request, patience};
use super::world::{PendingVerb, Sr, Vbd, World};

impl World {
    /// Creates a repository on each storage except the last one.
    pub fn make_repositories(&mut self) -> Result<(), String> {
        // The last storage is for a repository that is created and destroyed again.
        let fixed = self.bed.storages.len().saturating_sub(1);
        for (storage, on) in self.bed.storages.clone().into_iter().enumerate().take(fixed) {
            let source = json!({ "type": "dir", "path": on.path });
            let body = json!({ "name": on.name, "source": source, "format": on.format });
            let made = self.bed.api.done("/srs", &body)?;
            let sr = uuid(&made)?.to_owned();
            self.log(format!("sr {sr}: {}, {}", on.name, on.format));
            self.srs.push(Sr { uuid: sr, storage, name: on.name.to_owned(), description: String::new() });
        }
        Ok(())
    }

    /// Requests a change of a repository and waits for its end. The result is taken from the repository's state.
    pub fn change(&mut self, request: &Request) -> Result<(), String> {
        let Request { method, path, body } = request;
        self.ensure_daemon()?;
        self.log(format!("{method} {path} {body}"));
        match self.bed.api.ask(method, path, body) {
            Ok(Value::Null) => Ok(()),
            Ok(task) => {
                let begun = Instant::now();
                while begun.elapsed() < patience() {
                    let now = self.get(&format!("/tasks/{}?wait=2", uuid(&task)?))?;
                    match now["state"].as_str() {
                        Some("done") => return Ok(()),
                        Some("failed" | "cancelled") if self.troubled => {
                            self.log(format!("{} has failed: {}", now["verb"], now["problem"]));
                            return Ok(());
                        }
                        Some("failed" | "cancelled") => return Err(format!("{path}: {}", now["problem"])),
                        _ => self.wait_a_moment(begun)?,
                    }
                }
                Err(format!("stuck: {path}: {task}"))
            }
            Err(Trouble::Gone) => self.note_daemon_gone(),
            Err(Trouble::Refused(code, why)) if self.troubled || code == "busy" => {
                self.log(why);
                Ok(())
            }
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Attaches all repositories, introducing those that are unknown.
    pub fn bring_back_repositories(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        for sr in self.srs.clone() {
            loop {
                let shown = self.list("/srs")?;
                let now = shown.iter().find(|shown| shown["uuid"] == *sr.uuid).map(|shown| text(&shown["state"]));
                match now.as_deref() {
                    Some("attached") => break,
                    Some("detached" | "lost") => {
                        self.change(&Request::post(format!("/srs/{}/attach", sr.uuid), json!({})))?
                    }
                    None => self.introduce(&sr)?,
                    Some(_) => {}
                }
                if begun.elapsed() > patience() {
                    return Err(format!("stuck, SR {} does not come back: {}", sr.uuid, json!(shown)));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        Ok(())
    }

    fn introduce(&mut self, sr: &Sr) -> Result<(), String> {
        let path = self.bed.storages.get(sr.storage).ok_or("no such storage")?.path.clone();
        let body = json!({ "uuid": sr.uuid, "source": { "type": "dir", "path": path } });
        self.change(&Request::post("/srs/introduce", body))
    }

    /// Scans all repositories, which must find nothing unknown.
    pub fn scan(&mut self) -> Result<(), String> {
        let srs = self.srs.clone();
        let Some(sr) = self.one_of(&srs) else { return Ok(()) };
        self.count("sr-scan");
        self.change(&Request::post(format!("/srs/{}/scan", sr.uuid), json!({})))
    }

    /// Detaches an unused repository, with `forget` forgets it as well, and brings it back.
    pub fn detach_and_return(&mut self, forget: bool) -> Result<(), String> {
        let srs = self.srs.clone();
        let Some(sr) = self.one_of(&srs) else { return Ok(()) };
        self.settle(true)?;
        let number = srs.iter().position(|other| other.uuid == sr.uuid).unwrap_or(0);
        let mine: Vec<String> =
            self.vdis.iter().filter(|(_, vdi)| vdi.sr == number).map(|(uuid, _)| uuid.clone()).collect();
        for vbd in mine.iter().flat_map(|vdi| self.vbds_of(vdi)).collect::<Vec<_>>() {
            self.delete_vbd(&vbd)?;
        }
        self.count("sr-detach");
        self.change(&Request::post(format!("/srs/{}/detach", sr.uuid), json!({})))?;
        // A cleanup may have been in progress in it.
        let shown = self.list("/srs")?;
        let detached = shown.iter().any(|shown| shown["uuid"] == *sr.uuid && shown["state"] == "detached");
        if forget && detached {
            self.count("sr-forget");
            self.change(&Request::post(format!("/srs/{}/forget", sr.uuid), json!({})))?;
        } else if detached && self.random_is(2) {
            // The sides agree, so either is accepted and changes nothing.
            let believe = if self.random_is(2) { "repository" } else { "catalogue" };
            self.change(&Request::post(format!("/srs/{}/attach", sr.uuid), json!({ "believe": believe })))?;
        }
        // An older catalogue is another case: its VBDs may be of disks that were unknown in between.
        self.backup = None;
        self.bring_back_repositories()?;
        // Images without a VDI that the scan finds are merged.
        if self.random_is(2) { self.scan() } else { Ok(()) }
    }

    /// Creates a VBD; `None` if that failed.
    pub fn make_vbd(&mut self, vdi: &str) -> Result<Option<String>, String> {
        self.ensure_daemon()?;
        let body = json!({ "vdi": vdi, "transport": "nbd" });
        self.log(format!("POST /vbds {body}"));
        self.count("vbd-make");
        let made = match self.bed.api.ask("POST", "/vbds", &body) {
            Ok(vbd) => Some(text(&vbd["uuid"])),
            Err(Trouble::Gone) => {
                self.note_daemon_gone()?;
                let shown = self.list("/vbds")?;
                shown.iter().map(|vbd| text(&vbd["uuid"])).find(|uuid| !self.vbds.contains_key(uuid))
            }
            Err(Trouble::Refused(code, why)) => {
                self.excuse(&PendingVerb::Plug(String::new()), &code, &why)?;
                None
            }
            Err(trouble) => return Err(trouble.to_string()),
        };
        if let Some(vbd) = &made {
            self.vbds.insert(vbd.clone(), Vbd { vdi: vdi.to_owned(), ..Vbd::default() });
        }
        Ok(made)
    }

    /// Unplugs and deletes a VBD.
    pub fn delete_vbd(&mut self, vbd: &str) -> Result<(), String> {
        let begun = Instant::now();
        // The guest would not release the disk.
        if let Some(vm) = self.vbds.get(vbd).and_then(|vbd| vbd.vm.clone()) {
            self.halt_for_sure(&vm)?;
        }
        while self.vbds.contains_key(vbd) {
            self.calm()?;
            if self.vbd(vbd)?.plugged {
                self.vbd(vbd)?.client = None;
                let request = Request::post(format!("/vbds/{vbd}/unplug"), json!({}));
                self.begin(PendingVerb::Unplug(vbd.to_owned()), Vec::new(), None, &request)?;
                self.settle(true)?;
            }
            self.ensure_daemon()?;
            self.log(format!("DELETE /vbds/{vbd}"));
            match self.bed.api.ask("DELETE", &format!("/vbds/{vbd}"), &Value::Null) {
                Ok(_) => drop(self.vbds.remove(vbd)),
                Err(trouble) if trouble.is_not_found() => drop(self.vbds.remove(vbd)),
                Err(Trouble::Gone) => self.note_daemon_gone()?,
                Err(Trouble::Refused(code, why)) => self.excuse(&PendingVerb::Unplug(String::new()), &code, &why)?,
                Err(trouble) => return Err(trouble.to_string()),
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck, VBD {vbd} cannot be deleted"));
            }
        }
        self.count("vbd-delete");
        Ok(())
    }

    /// Removes a VDI that an older catalogue knows but that no longer exists.
    pub fn drop_missing(&mut self, vdi: &str) -> Result<(), String> {
        let Some(now) = self.get_vdi(vdi)? else { return Ok(()) };
        if now["state"] != "missing" {
            return Err(format!("a VDI that was destroyed is back, with an older catalogue: {now}"));
        }
        let task = self.bed.api.ask("DELETE", &format!("/vdis/{vdi}"), &Value::Null)?;
        match self.bed.api.wait(&task)? {
            Ended::Done(_) => Ok(()),
            other => Err(format!("a VDI that is missing cannot be destroyed: {other:?}")),
        }
    }
}
