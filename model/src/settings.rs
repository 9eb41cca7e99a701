//! Changes settings of objects, and reboots the host, which applies some of them.

use serde_json::{Value, json};
use testbed::daemon::api::Trouble;

use super::check::text;
use super::machines::{Power, Vm};
use super::verbs::{NO_TASK, Request};
use super::world::{PendingVerb, Vdi, World};

impl World {
    /// Changes a random setting.
    pub fn set_some(&mut self) -> Result<(), String> {
        match self.random.below(15) {
            0..=1 => self.set_vdi(),
            2 => self.set_read_only(),
            3..=4 => self.set_sr(),
            5 => self.set_autostart(),
            6..=7 => self.token(),
            8 => self.request_connection(),
            9..=12 => self.set_qos(),
            _ => self.set_vm(),
        }
    }

    /// Sets fields of an object; returns whether they are set afterwards. If the response was lost, the object shows
    /// whether they are as before or as requested.
    pub fn set(&mut self, path: &str, body: &Value, may_be_refused: bool) -> Result<bool, String> {
        self.ensure_daemon()?;
        self.log(format!("PATCH {path} {body}"));
        self.count("set");
        let key = self.random_is(3).then(|| self.key());
        match self.bed.api.ask_with("PATCH", path, body, key.as_deref()) {
            Ok(_) => Ok(true),
            Err(Trouble::Gone) => {
                self.note_daemon_gone()?;
                let now = self.get(path)?;
                // A partial change is neither, and found when everything is compared.
                Ok(body.as_object().into_iter().flatten().all(|(key, value)| now[key.as_str()] == *value))
            }
            Err(Trouble::Refused(code, why)) if may_be_refused && code != "internal" => {
                self.refused(&NO_TASK, &code, &why);
                Ok(false)
            }
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why).map(|()| false),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Changes the name, the description or both.
    fn set_vdi(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|_, _, _| true) else { return Ok(()) };
        let (name, description) = (self.name(), self.name());
        if self.set(&format!("/vdis/{vdi}"), &json!({ "name": name, "description": description }), false)? {
            let vdi = self.vdi(&vdi)?;
            (vdi.name, vdi.description) = (name, description);
        }
        Ok(())
    }

    /// Makes an unused VDI read-only or writable.
    fn set_read_only(&mut self) -> Result<(), String> {
        let fits = |world: &World, uuid: &str, vdi: &Vdi| {
            vdi.snapshot_of.is_none()
                && world.vbds_of(uuid).iter().all(|vbd| world.vbds.get(vbd).is_some_and(|vbd| vbd.vm.is_none()))
                && !world.is_plugged(uuid)
        };
        let Some(vdi) = self.free_vdi(fits) else { return Ok(()) };
        // A VBD's mode is determined when it is created.
        for vbd in self.vbds_of(&vdi) {
            self.delete_vbd(&vbd)?;
        }
        if self.held().contains(&vdi) || !self.vdis.contains_key(&vdi) {
            return Ok(());
        }
        let read_only = !self.vdi(&vdi)?.read_only;
        // Images based on it by now make this a refusal.
        if self.set(&format!("/vdis/{vdi}"), &json!({ "read_only": read_only }), true)? {
            self.vdi(&vdi)?.read_only = read_only;
        }
        Ok(())
    }

    fn set_sr(&mut self) -> Result<(), String> {
        let at = self.random.index(self.srs.len());
        let Some(sr) = self.srs.get(at).cloned() else { return Ok(()) };
        let (name, description) = (self.name(), self.name());
        let set =
            self.set(&format!("/srs/{}", sr.uuid), &json!({ "name": name, "description": description }), false)?;
        if let Some(sr) = self.srs.get_mut(at).filter(|_| set) {
            (sr.name, sr.description) = (name, description);
        }
        Ok(())
    }

    /// Sets or clears autostart of a disk without a VM.
    fn set_autostart(&mut self) -> Result<(), String> {
        let held = self.held();
        let is_alone = |vdi: &str| self.vbds.values().filter(|vbd| vbd.vdi == vdi).count() == 1;
        let free =
            self.vbds.iter().filter(|(_, vbd)| vbd.vm.is_none() && !held.contains(&vbd.vdi) && is_alone(&vbd.vdi));
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        let Some(vbd) = self.one_of(&free) else { return Ok(()) };
        let wanted = !self.vbd(&vbd)?.autostart;
        if self.set(&format!("/vbds/{vbd}"), &autostart(wanted), false)? {
            self.vbd(&vbd)?.autostart = wanted;
        }
        Ok(())
    }

    /// Changes the name and autostart of a VM, and the hardware of a halted one.
    fn set_vm(&mut self) -> Result<(), String> {
        let held = self.held();
        let free: Vec<String> = self
            .vms
            .iter()
            .filter(|(uuid, vm)| !held.contains(*uuid) && !vm.killed)
            .map(|(uuid, _)| uuid.clone())
            .collect();
        let Some(vm) = self.one_of(&free) else { return Ok(()) };
        let mut body = autostart(self.random_is(2));
        body["name"] = json!(self.name());
        if self.vm(&vm)?.power == Power::Halted {
            body["vcpus"] = json!(1 + self.random.below(3));
            body["memory"] = json!((48 + self.random.below(32)) << 20);
        }
        if self.set(&format!("/vms/{vm}"), &body, false)? {
            let vm = self.vm(&vm)?;
            for (key, value) in body.as_object().into_iter().flatten() {
                vm.shown[key.as_str()] = value.clone();
            }
        }
        Ok(())
    }

    /// Replaces the process of a plugged disk, whose client must not notice.
    pub fn upgrade(&mut self) -> Result<(), String> {
        let held = self.held();
        let plugged = self
            .vbds
            .iter()
            .filter(|(_, vbd)| vbd.plugged && vbd.stopped.is_none() && vbd.sent.is_none() && !held.contains(&vbd.vdi));
        let plugged: Vec<String> = plugged.map(|(uuid, _)| uuid.clone()).collect();
        let Some(vbd) = self.one_of(&plugged) else { return Ok(()) };
        let vdi = self.vbd(&vbd)?.vdi.clone();
        let request = Request::post(format!("/vbds/{vbd}/upgrade"), Value::Null);
        self.begin(PendingVerb::Upgrade, vec![vdi], None, &request)
    }

    /// Compares settings of repositories and VBDs with the model.
    pub fn compare_settings(&mut self) -> Result<(), String> {
        for now in self.list("/srs")? {
            let sr = self.srs.iter().find(|sr| now["uuid"] == *sr.uuid);
            let sr = sr.ok_or_else(|| format!("there is an SR that nobody has made: {now}"))?;
            if now["name"] != *sr.name || now["description"] != *sr.description {
                return Err(format!("SR {} is {now}, should be {sr:?}", sr.uuid));
            }
        }
        for now in self.list("/vbds")? {
            let vbd = self.vbds.get(&text(&now["uuid"]));
            if vbd.is_some_and(|vbd| vbd.autostart != now["autostart"].is_object()) {
                return Err(format!("the VBD is {now}, should be {vbd:?}"));
            }
            self.compare_qos(&now, &text(&now["uuid"]))?;
        }
        self.compare_tokens()
    }

    /// The daemon itself must find no differences.
    pub fn expect_no_differences(&mut self) -> Result<(), String> {
        self.ensure_daemon()?;
        match self.bed.api.ask("POST", "/host/reconcile", &json!({ "dry_run": true })) {
            Ok(Value::Array(none)) if none.is_empty() => Ok(()),
            Err(Trouble::Gone) => self.note_daemon_gone(),
            other => Err(format!("at rest the daemon finds differences: {other:?}")),
        }
    }

    /// Has the daemon look for differences at a random time. Differences that it resolves by itself must not be errors.
    pub fn reconcile(&mut self) -> Result<(), String> {
        self.count("reconcile");
        let dry_run = self.random_is(2);
        self.once(&Request::post("/host/reconcile", json!({ "dry_run": dry_run }))).map(drop)
    }

    /// Reboots the host without warning: exactly the objects with autostart must be started. Everything is flushed
    /// first; loss of the host's memory is left to the simulator.
    pub fn reboot(&mut self) -> Result<(), String> {
        self.check()?;
        for vbd in self.vbds.keys().cloned().collect::<Vec<_>>() {
            let now = self.vbd(&vbd)?;
            if now.plugged && now.vm.is_none() {
                self.flush(&vbd)?;
            }
        }
        self.kill_daemon()?;
        self.trouble("reboot", "the host is started again".into());
        self.kill_everything()?;
        let catalogue = rusqlite::Connection::open(self.bed.places.room.join("state/catalogue.db"));
        let changed = catalogue.and_then(|catalogue| {
            catalogue.execute("UPDATE meta SET value = 'another life' WHERE key = 'boot'", []).map(drop)
        });
        changed.map_err(|error| format!("change the catalogue: {error}"))?;
        // The daemon records there that it has run since the boot.
        let path = self.bed.places.room.join("run/boot");
        std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for uuid in self.vms.keys().cloned().collect::<Vec<_>>() {
            // A VM without disks has nothing to boot.
            let can = !self.vbds_of_vm(&uuid).is_empty();
            let vm = self.vm(&uuid)?;
            vm.power = if can && vm.shown["autostart"].is_object() { Power::Running } else { Power::Halted };
        }
        for vbd in self.vbds.values_mut() {
            let vm: Option<&Vm> = vbd.vm.as_ref().and_then(|vm| self.vms.get(vm));
            vbd.plugged = vm.map_or(vbd.autostart, |vm| vm.power == Power::Running);
            vbd.client = None;
        }
        self.check()
    }

    fn kill_everything(&mut self) -> Result<(), String> {
        let begun = std::time::Instant::now();
        loop {
            let disks = self.bed.places.disks();
            let left: Vec<u32> = disks.into_iter().map(|disk| disk.pid).chain(self.bed.places.machines()).collect();
            if left.is_empty() {
                return Ok(());
            }
            for pid in left {
                self.bed.places.kill(pid)?;
            }
            if begun.elapsed() > super::verbs::patience() {
                return Err("processes that were killed do not end".into());
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    /// Takes the VMs from an older catalogue; those that run keep running.
    pub fn follow_machines(&mut self) -> Result<(), String> {
        let shown = self.list("/vms")?;
        let before = std::mem::take(&mut self.vms);
        for (uuid, vm) in before {
            let now = shown.iter().find(|now| now["uuid"] == *uuid);
            if vm.power != Power::Halted && now.is_none_or(|now| now["power"] != vm.power.word()) {
                return Err(format!("VM {uuid} was {vm:?}, and with an older catalogue it is {now:?}"));
            }
        }
        for now in shown {
            let uuid = text(&now["uuid"]);
            let moments = self.vm_snapshots(&uuid)?;
            self.vms.insert(uuid, Vm { snapshots: moments, ..Vm::parse(&now)? });
        }
        Ok(())
    }
}

/// The request body that sets or clears autostart.
pub fn autostart(wanted: bool) -> Value {
    let value = if wanted { json!({ "order": 1, "delay": 0, "tries": 20 }) } else { Value::Null };
    json!({ "autostart": value })
}
