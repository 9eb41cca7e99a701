//! Repositories: made, scanned, detached, forgotten, introduced, and brought back after trouble.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::daemon::api::{Ended, Trouble, uuid};

use super::check::text;
use super::verbs::{Asked, patience};
use super::world::{Sr, Vbd, Verb, World};

impl World {
    /// Makes one on each storage of the bed.
    pub fn make_repositories(&mut self) -> Result<(), String> {
        // The last one is for a repository that comes and goes.
        let fixed = self.bed.storages.len().saturating_sub(1);
        for (storage, on) in self.bed.storages.clone().into_iter().enumerate().take(fixed) {
            let source = json!({ "type": "dir", "path": on.path });
            let body = json!({ "name": on.name, "source": source, "format": on.format });
            let made = self.bed.api.done("/srs", &body)?;
            let sr = uuid(&made)?.to_owned();
            self.tell(format!("sr {sr}: {}, {}", on.name, on.format));
            self.srs.push(Sr { uuid: sr, storage, name: on.name.to_owned(), description: String::new() });
        }
        Ok(())
    }

    /// Asks for a change of a repository, and waits for its end. What came of it is seen from what it is then.
    pub fn change(&mut self, asked: &Asked) -> Result<(), String> {
        let Asked { method, path, body } = asked;
        self.must_run()?;
        self.tell(format!("{method} {path} {body}"));
        match self.bed.api.ask(method, path, body) {
            Ok(Value::Null) => Ok(()),
            Ok(task) => {
                let begun = Instant::now();
                while begun.elapsed() < patience() {
                    let now = self.get(&format!("/tasks/{}?wait=2", uuid(&task)?))?;
                    match now["state"].as_str() {
                        Some("done") => return Ok(()),
                        Some("failed" | "cancelled") if self.troubled => {
                            self.tell(format!("{} has failed: {}", now["verb"], now["problem"]));
                            return Ok(());
                        }
                        Some("failed" | "cancelled") => return Err(format!("{path}: {}", now["problem"])),
                        _ => self.waits(begun)?,
                    }
                }
                Err(format!("stuck: {path}: {task}"))
            }
            Err(Trouble::Gone) => self.has_gone(),
            Err(Trouble::Refused(code, why)) if self.troubled || code == "busy" => {
                self.tell(why);
                Ok(())
            }
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Until all repositories are attached.
    pub fn bring_back_repositories(&mut self) -> Result<(), String> {
        let begun = Instant::now();
        for sr in self.srs.clone() {
            loop {
                let shown = self.list("/srs")?;
                let now = shown.iter().find(|shown| shown["uuid"] == *sr.uuid).map(|shown| text(&shown["state"]));
                match now.as_deref() {
                    Some("attached") => break,
                    Some("detached" | "lost") => {
                        self.change(&Asked::post(format!("/srs/{}/attach", sr.uuid), json!({})))?
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
        self.change(&Asked::post("/srs/introduce", body))
    }

    /// Has a scan look, which finds nothing that is not known.
    pub fn scan(&mut self) -> Result<(), String> {
        let srs = self.srs.clone();
        let Some(sr) = self.one_of(&srs) else { return Ok(()) };
        self.count("sr-scan");
        self.change(&Asked::post(format!("/srs/{}/scan", sr.uuid), json!({})))
    }

    /// Detaches a repository that nobody uses, forgets it perhaps, and brings it back.
    pub fn take_away(&mut self, forget: bool) -> Result<(), String> {
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
        self.change(&Asked::post(format!("/srs/{}/detach", sr.uuid), json!({})))?;
        // Something that tidies up may have been at work in it.
        let shown = self.list("/srs")?;
        let detached = shown.iter().any(|shown| shown["uuid"] == *sr.uuid && shown["state"] == "detached");
        if forget && detached {
            self.count("sr-forget");
            self.change(&Asked::post(format!("/srs/{}/forget", sr.uuid), json!({})))?;
        } else if detached && self.random_is(2) {
            // There are not two sides, and it is attached as without.
            let believe = if self.random_is(2) { "repository" } else { "catalogue" };
            self.change(&Asked::post(format!("/srs/{}/attach", sr.uuid), json!({ "believe": believe })))?;
        }
        // A catalogue of before this is another case: its VBDs are of disks that were not in between.
        self.backup = None;
        self.bring_back_repositories()?;
        // What it finds that nothing shows it merges away.
        if self.random_is(2) { self.scan() } else { Ok(()) }
    }

    /// Makes a VBD; none if it could not be.
    pub fn make_vbd(&mut self, vdi: &str) -> Result<Option<String>, String> {
        self.must_run()?;
        let body = json!({ "vdi": vdi, "transport": "nbd" });
        self.tell(format!("POST /vbds {body}"));
        self.count("vbd-make");
        let made = match self.bed.api.ask("POST", "/vbds", &body) {
            Ok(vbd) => Some(text(&vbd["uuid"])),
            Err(Trouble::Gone) => {
                self.has_gone()?;
                let shown = self.list("/vbds")?;
                shown.iter().map(|vbd| text(&vbd["uuid"])).find(|uuid| !self.vbds.contains_key(uuid))
            }
            Err(Trouble::Refused(code, why)) => {
                self.excuse(&Verb::Plug(String::new()), &code, &why)?;
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
        // A guest does not let go here.
        if let Some(vm) = self.vbds.get(vbd).and_then(|vbd| vbd.vm.clone()) {
            self.halt_for_sure(&vm)?;
        }
        while self.vbds.contains_key(vbd) {
            self.calm()?;
            if self.vbd(vbd)?.plugged {
                self.vbd(vbd)?.client = None;
                let asked = Asked::post(format!("/vbds/{vbd}/unplug"), json!({}));
                self.begin(Verb::Unplug(vbd.to_owned()), Vec::new(), None, &asked)?;
                self.settle(true)?;
            }
            self.must_run()?;
            self.tell(format!("DELETE /vbds/{vbd}"));
            match self.bed.api.ask("DELETE", &format!("/vbds/{vbd}"), &Value::Null) {
                Ok(_) => drop(self.vbds.remove(vbd)),
                Err(trouble) if trouble.is_not_found() => drop(self.vbds.remove(vbd)),
                Err(Trouble::Gone) => self.has_gone()?,
                Err(Trouble::Refused(code, why)) => self.excuse(&Verb::Unplug(String::new()), &code, &why)?,
                Err(trouble) => return Err(trouble.to_string()),
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck, VBD {vbd} cannot be deleted"));
            }
        }
        self.count("vbd-delete");
        Ok(())
    }

    /// A VDI that an older catalogue knows and that is no more.
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
