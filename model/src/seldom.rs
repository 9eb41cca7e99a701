//! Rare operations: a temporary repository, a drain of the host, a second daemon, stopped processes, tokens, and an
//! unnecessary decision.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use testbed::daemon::api::{Trouble, uuid};

use super::check::{names_in, text};
use super::machines::Power;
use super::verbs::{NO_TASK, Request};
use super::world::{PendingVerb, Sr, World};

/// Maximum number of tokens.
const TOKENS_MAX: usize = 4;

/// A file of another program, in a repository that is destroyed.
const FOREIGN: &str = "notes.txt";

impl World {
    /// Does a random rare operation.
    pub fn seldom(&mut self) -> Result<(), String> {
        match self.random.below(18) {
            0..=2 => self.further_repository(),
            3..=4 => self.drain(),
            5 => self.stop_daemon(),
            6..=7 => self.stop_job(),
            8 if self.has_qemu => self.stop_machine(),
            9..=11 => self.follow_schedule(),
            12 if self.random_is(2) => self.cancel_waiting(),
            // Longer than the daemon waits for QEMU.
            12 if self.has_qemu && self.random_is(4) => self.obey_late(),
            13..=14 => self.meddle(),
            15 => self.clone_by_schedule(),
            16 => self.clock_jumps(),
            _ => self.resolve_undiverged(),
        }
    }

    /// Creates the repository on the last storage, or destroys it.
    fn further_repository(&mut self) -> Result<(), String> {
        let storage = self.bed.storages.len().saturating_sub(1);
        match self.srs.last().is_some_and(|sr| sr.storage == storage) {
            true => self.destroy_repository(),
            false => self.make_repository(storage),
        }
    }

    fn make_repository(&mut self, storage: usize) -> Result<(), String> {
        self.rest()?;
        let (name, description) = (self.name(), self.name());
        let on = self.bed.storages.get(storage).ok_or("no such storage")?.clone();
        let source = json!({ "type": "dir", "path": on.path });
        let body = json!({ "name": name, "description": description, "source": source, "format": on.format });
        self.count("sr-create");
        self.change(&Request::post("/srs", body))?;
        self.rest()?;
        let shown = self.list("/srs")?;
        let Some(made) = shown.iter().find(|sr| sr["name"] == name) else {
            let left = names_in(&on.path)?;
            return match left.is_empty() {
                true => Ok(()),
                false => Err(format!("a repository was not made, and its directory has {left:?}")),
            };
        };
        let sr = text(&made["uuid"]);
        self.log(format!("sr {sr}: {}, {}", on.name, on.format));
        self.srs.push(Sr { uuid: sr.clone(), storage, name, description });
        match self.once(&Request::post("/srs/probe", json!({ "source": source })))? {
            Some(found) if found.as_array().map(Vec::len) != Some(1) || found[0]["uuid"] != sr => {
                Err(format!("a probe finds {found}, should be {sr}"))
            }
            Some(found) if found[0]["known"] != true => Err(format!("the repository is known, and a probe: {found}")),
            _ => Ok(()),
        }
    }

    /// Destroys it with everything in it; files of other programs stay.
    fn destroy_repository(&mut self) -> Result<(), String> {
        self.rest()?;
        let number = self.srs.len().saturating_sub(1);
        let Some(sr) = self.srs.last().cloned() else { return Ok(()) };
        let path = self.bed.storages.get(sr.storage).ok_or("no such storage")?.path.clone();
        let mine: Vec<String> =
            self.vdis.iter().filter(|(_, vdi)| vdi.sr == number).map(|(uuid, _)| uuid.clone()).collect();
        for vdi in mine {
            for vbd in self.vbds_of(&vdi) {
                self.delete_vbd(&vbd)?;
            }
            let request = Request::delete(format!("/vdis/{vdi}"));
            self.begin(PendingVerb::Destroy(vdi.clone()), vec![vdi], None, &request)?;
        }
        self.rest()?;
        if self.vdis.values().any(|vdi| vdi.sr == number) {
            // A VDI was not destroyed, for which there was an excuse.
            return Ok(());
        }
        let foreign = path.join(FOREIGN);
        fs::write(&foreign, "not ours").map_err(|error| format!("{}: {error}", foreign.display()))?;
        let gone = self.destroy_empty_repository(&sr, &path);
        fs::remove_file(&foreign).map_err(|error| format!("{} is not as it was: {error}", foreign.display()))?;
        gone
    }

    fn destroy_empty_repository(&mut self, sr: &Sr, path: &Path) -> Result<(), String> {
        self.count("sr-destroy");
        let at = format!("/srs/{}", sr.uuid);
        let Some(plan) = self.once(&Request::delete(format!("{at}?dry_run=true")))? else { return Ok(()) };
        if plan["leaves"] != json!([FOREIGN]) {
            return Err(format!("a repository with a foreign file {FOREIGN} would be destroyed so: {plan}"));
        }
        // An older catalogue would restore it, with VDIs that no longer exist.
        self.backup = None;
        // The model no longer brings it back.
        let kept = self.srs.pop();
        self.change(&Request::delete(at))?;
        self.rest()?;
        if self.list("/srs")?.iter().any(|shown| shown["uuid"] == *sr.uuid) {
            self.srs.extend(kept);
            return Ok(());
        }
        let left = names_in(path)?;
        match left.iter().all(|name| name == FOREIGN) {
            true => Ok(()),
            false => Err(format!("a repository was destroyed, and its directory has {left:?}")),
        }
    }

    /// Drains the host: everything is shut down and unplugged.
    fn drain(&mut self) -> Result<(), String> {
        self.settle(true)?;
        self.count("drain");
        for vbd in self.vbds.values_mut() {
            // Clients of disks that are unplugged are disconnected.
            (vbd.client, vbd.sent) = (None, None);
        }
        let holds = self.vdis.keys().chain(self.vms.keys()).cloned().collect();
        let request = Request::post("/host/drain", json!({ "timeout": self.random.below(3) }));
        self.begin(PendingVerb::Drain, holds, None, &request)?;
        if self.random_is(4) {
            self.kill_daemon()?;
        }
        self.settle(true)
    }

    /// Updates the model after a drain.
    pub fn drained(&mut self, done: bool) -> Result<(), String> {
        for vm in self.vms.keys().cloned().collect::<Vec<_>>() {
            let power = self.power_of(&vm)?;
            if done && power != Power::Halted {
                return Err(format!("the host was drained, and VM {vm} is {power:?}"));
            }
            self.vm(&vm)?.power = power;
        }
        for vbd in self.vbds.keys().cloned().collect::<Vec<_>>() {
            self.settle_plugged(&vbd)?;
            if done && self.vbd(&vbd)?.plugged {
                return Err(format!("the host was drained, and VBD {vbd} is plugged"));
            }
        }
        Ok(())
    }

    /// Stops the daemon for a moment, in which a disk may die. A second daemon must not start.
    fn stop_daemon(&mut self) -> Result<(), String> {
        self.ensure_daemon()?;
        if self.dies_at.is_some() || self.bed.is_full() {
            return Ok(());
        }
        self.trouble("stop daemon", "stop the daemon".into());
        self.bed.daemon()?.signal(Signal::STOP)?;
        if self.random_is(2) {
            let disks = self.bed.places.disks();
            if let Some(disk) = self.one_of(&disks) {
                self.log(format!("kill {}, of VBD {:?}", disk.pid, disk.vbd));
                self.counts.kills += 1;
                self.bed.places.kill(disk.pid)?;
                if let Some(vbd) = disk.vbd.as_ref().and_then(|vbd| self.vbds.get_mut(vbd)) {
                    (vbd.client, vbd.sent) = (None, None);
                }
            }
        }
        let second = self.bed.daemon()?.second();
        std::thread::sleep(Duration::from_millis(self.random.below(400)));
        self.bed.daemon()?.signal(Signal::CONT)?;
        second
    }

    /// Stops a process that works on an image until the daemon's timeout.
    fn stop_job(&mut self) -> Result<(), String> {
        let Some(pid) = self.some_job() else { return Ok(()) };
        self.trouble("stop job", format!("stop {pid}, which works on an image"));
        self.stopped.push(pid);
        self.bed.places.signal(pid, Signal::STOP)
    }

    /// Stops the QEMU of a VM until the daemon's timeout.
    fn stop_machine(&mut self) -> Result<(), String> {
        let Some((vm, pid)) = self.some_machine() else { return Ok(()) };
        self.trouble("stop qemu", format!("stop {pid}, the QEMU of VM {vm}"));
        self.stopped.push(pid);
        self.bed.places.signal(pid, Signal::STOP)
    }

    /// Resolving a VDI that has not diverged must be refused.
    fn resolve_undiverged(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|_, _, _| true) else { return Ok(()) };
        self.ensure_daemon()?;
        self.count("decide");
        let believe = if self.random_is(2) { "disk" } else { "catalogue" };
        let path = format!("/vdis/{vdi}/reconcile");
        self.log(format!("POST {path} {believe}"));
        match self.bed.api.ask("POST", &path, &json!({ "believe": believe })) {
            Err(Trouble::Refused(code, _)) if code == "state" => Ok(()),
            Err(Trouble::Gone) => self.note_daemon_gone(),
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why),
            other => Err(format!("a VDI that is not diverged is decided about: {other:?}")),
        }
    }

    /// Requests the configuration for a plugged disk, which must contain its socket.
    pub fn request_connection(&mut self) -> Result<(), String> {
        let Some(vbd) = self.usable_vbd() else { return Ok(()) };
        self.ensure_daemon()?;
        self.count("connect");
        let reader = self.one_of(&["qemu", "libvirt", "cloud-hypervisor"]).unwrap_or("qemu");
        let served = self.bed.places.vbds().join(&vbd).display().to_string();
        match self.bed.api.text(&format!("/vbds/{vbd}/connect?for={reader}")) {
            Ok(said) if said.contains(&served) => Ok(()),
            Ok(said) => Err(format!("how to connect to VBD {vbd} does not name {served}: {said}")),
            Err(Trouble::Gone) => self.note_daemon_gone(),
            // Cloud Hypervisor does not support NBD, and the disk may just have died.
            Err(trouble) => {
                self.log(trouble.to_string());
                Ok(())
            }
        }
    }

    /// Creates or revokes a token.
    pub fn token(&mut self) -> Result<(), String> {
        let known: Vec<String> = self.tokens.keys().cloned().collect();
        if known.len() >= TOKENS_MAX || !known.is_empty() && self.random_is(2) {
            let Some(token) = self.one_of(&known) else { return Ok(()) };
            self.count("token-revoke");
            let revoked = self.once(&Request::delete(format!("/tokens/{token}")))?.is_some();
            if revoked || !self.shown_tokens()?.contains_key(&token) {
                self.tokens.remove(&token);
            }
            return Ok(());
        }
        self.count("token-create");
        let name = self.name();
        let body = json!({ "name": name, "read_only": self.random_is(2) });
        match self.once(&Request::post("/tokens", body))? {
            Some(made) if made["secret"].as_str().is_none_or(str::is_empty) => Err(format!("no secret: {made}")),
            Some(made) => {
                self.tokens.insert(uuid(&made["token"])?.to_owned(), name);
                Ok(())
            }
            None => {
                let made = self.shown_tokens()?.into_iter().filter(|(_, shown)| *shown == name);
                self.tokens.extend(made);
                Ok(())
            }
        }
    }

    /// The tokens of the daemon: names by UUID.
    pub fn shown_tokens(&mut self) -> Result<BTreeMap<String, String>, String> {
        Ok(self.list("/tokens")?.iter().map(|token| (text(&token["uuid"]), text(&token["name"]))).collect())
    }

    /// Compares the daemon's tokens with the model.
    pub fn compare_tokens(&mut self) -> Result<(), String> {
        let shown = self.shown_tokens()?;
        match shown == self.tokens {
            true => Ok(()),
            false => Err(format!("tokens are {shown:?}, should be {:?}", self.tokens)),
        }
    }

    /// Removes the catalogue. A daemon must refuse to start without it; a new one is built from the repositories, or
    /// they are introduced to an empty one. Disks keep running and are found again.
    pub fn lose_catalogue(&mut self) -> Result<(), String> {
        // The QEMU of an unknown VM could not be stopped.
        self.delete_machines()?;
        self.check()?;
        self.kill_daemon()?;
        self.trouble("lose catalogue", "the catalogue is lost".into());
        self.remove_catalogue()?;
        if self.bed.daemon()?.restart().is_ok() {
            return Err("a daemon that has lost its catalogue starts although no new one was requested".into());
        }
        let rebuild = self.random_is(2);
        let mut words = vec![if rebuild { "--rebuild" } else { "--init" }.to_owned()];
        if rebuild {
            let at = self.srs.iter().filter_map(|sr| self.bed.storages.get(sr.storage));
            words.extend(at.map(|on| on.path.display().to_string()));
        }
        self.log(format!("taplined {}", words.join(" ")));
        let said = self.bed.daemon()?.once(&words)?;
        self.log(said);
        self.backup = None;
        self.tokens.clear();
        if self.random_is(4) {
            // A disk that died while it was unknown is not restarted.
            let plugged: Vec<String> = self.plugged_vbds();
            if let Some(vbd) = self.one_of(&plugged) {
                let disks = self.bed.places.disks();
                for disk in disks.iter().filter(|disk| disk.vbd.as_ref() == Some(&vbd)) {
                    self.log(format!("kill {}, the disk of VBD {vbd}", disk.pid));
                    self.counts.kills += 1;
                    self.bed.places.kill(disk.pid)?;
                }
                self.vbd(&vbd)?.plugged = false;
            }
        }
        // Objects that neither a repository nor a process knows are lost.
        self.vbds.retain(|_, vbd| vbd.plugged);
        for vbd in self.vbds.values_mut() {
            vbd.autostart = false;
        }
        self.ensure_daemon()?;
        self.check()
    }

    fn plugged_vbds(&self) -> Vec<String> {
        self.vbds.iter().filter(|(_, vbd)| vbd.plugged).map(|(uuid, _)| uuid.clone()).collect()
    }
}
