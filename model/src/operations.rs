//! Chooses the next operation and its object.

use serde_json::json;

use super::content::Content;
use super::machines::Power;
use super::verbs::Request;
use super::world::{Pending, PendingVerb, Vdi, World};

/// Maximum number of VDIs: repositories are small, and everything is read in the end.
const VDIS_MAX: usize = 24;

/// Sizes of new VDIs, in MiB.
const SIZES: &[u64] = &[1, 4, 16, 63];

/// Maximum size of a VDI in bytes.
const SIZE_MAX: u64 = 160 << 20;

impl World {
    /// Whether another VDI may be created.
    pub fn has_room(&self) -> bool {
        self.has_room_for(1)
    }

    /// Whether this number of VDIs may be created.
    pub fn has_room_for(&self, more: usize) -> bool {
        self.vdis.len() + self.pending.len() + more <= VDIS_MAX
    }

    /// Does a random operation.
    pub fn step(&mut self, steps: &[String]) -> Result<(), String> {
        if let Some(favoured) = self.favoured.filter(|_| self.random_is(8)) {
            return self.favour(favoured);
        }
        match self.random.below(100) {
            0..=5 => self.create(),
            6..=10 => self.snapshot(false),
            11 => self.upgrade(),
            12 => self.race(),
            13 if self.random_is(2) => self.race(),
            13 => self.plug_many(),
            14..=17 => self.snapshot(true),
            18..=19 => self.copy(),
            20..=22 => self.resize(),
            23..=25 => self.revert(),
            26..=31 => self.destroy(),
            32..=39 => self.plug_one(),
            40..=43 => self.unplug_one(),
            44..=45 => self.set_some(),
            46..=47 => self.export(),
            48 => self.merge(),
            49..=55 => self.machine_step(),
            56 if self.random_is(2) => self.cancel_soon(),
            56 => self.cancel_some(),
            57..=72 => match self.usable_vbd() {
                // The write may wait until there is space.
                Some(vbd) if self.bed.is_full() => self.send_write(&vbd),
                Some(vbd) => self.write_some(&vbd),
                None => self.plug_one(),
            },
            73..=76 => match self.usable_vbd() {
                Some(vbd) => self.read(&vbd),
                None => Ok(()),
            },
            77..=78 => match self.usable_vbd() {
                Some(vbd) if !self.bed.is_full() => self.flush(&vbd),
                _ => Ok(()),
            },
            79..=82 => self.settle(true),
            83..=86 => self.kill_disk(),
            87..=88 => self.kill_daemon(),
            89..=90 => self.kill_job(),
            91 => self.arm(steps),
            92 => self.stop_disk(),
            93 => self.fill(),
            94 if self.random_is(2) => self.scan(),
            94 if self.random_is(3) => self.back_up_by_daemon(),
            94 => self.reconcile(),
            95 if self.random.below(3) == 0 => {
                let forget = self.random.below(2) == 0;
                self.detach_and_return(forget)
            }
            96 if self.random.below(3) == 0 => self.put_back(),
            95..=96 if self.random_is(2) => self.seldom(),
            97 if self.random.below(3) == 0 => self.delete_some_vbd(),
            97 if self.random_is(2) => self.damage(),
            98 if self.random.below(6) == 0 => self.kill_repeatedly(),
            98 if self.random.below(6) == 0 => self.reboot(),
            99 if self.random.below(12) == 0 => self.deepen(),
            99 if self.random.below(8) == 0 => self.lose_catalogue(),
            _ => self.check(),
        }
    }

    pub fn create(&mut self) -> Result<(), String> {
        if !self.has_room() {
            return self.destroy();
        }
        let sr = self.random.index(self.srs.len());
        let size = self.one_of(SIZES).unwrap_or(1) << 20;
        let name = self.name();
        let body = json!({ "sr": self.srs.get(sr).map(|sr| &sr.uuid), "name": name, "size": size });
        let content = Content::default();
        let description = String::new();
        let made = Vdi { name, description, sr, sizes: vec![size], read_only: false, snapshot_of: None, content };
        self.begin(PendingVerb::Make(made), Vec::new(), None, &Request::post("/vdis", body))
    }

    /// Takes a snapshot or creates a clone.
    fn snapshot(&mut self, clone: bool) -> Result<(), String> {
        if !self.has_room() {
            return self.destroy();
        }
        // A write to a stopped disk is pending until it continues.
        let fits = |world: &World, uuid: &str, vdi: &Vdi| {
            let stopped = world.vbds.values().any(|vbd| vbd.vdi == uuid && vbd.stopped.is_some());
            !stopped && (clone || !vdi.read_only)
        };
        let Some(of) = self.free_vdi(fits) else { return Ok(()) };
        let name = self.name();
        let now = self.vdi(&of)?;
        let made = now.copied(name.clone(), now.sr, (!clone).then(|| of.clone()));
        let verb = if clone { "clone" } else { "snapshot" };
        let request = Request::post(format!("/vdis/{of}/{verb}"), json!({ "name": name }));
        self.begin(PendingVerb::Make(made), vec![of.clone()], Some(of), &request)
    }

    pub fn copy(&mut self) -> Result<(), String> {
        if !self.has_room() {
            return self.destroy();
        }
        let Some(of) = self.free_vdi(|world, uuid, _| !world.is_plugged(uuid)) else { return Ok(()) };
        let sr = self.random.index(self.srs.len());
        let name = self.name();
        let now = self.vdi(&of)?;
        let made = Vdi { description: now.description.clone(), ..now.copied(name.clone(), sr, None) };
        let body = json!({ "sr": self.srs.get(sr).map(|sr| &sr.uuid), "name": name });
        self.begin(PendingVerb::Make(made), vec![of.clone()], None, &Request::post(format!("/vdis/{of}/copy"), body))
    }

    fn resize(&mut self) -> Result<(), String> {
        let fits = |_: &World, _: &str, vdi: &Vdi| !vdi.read_only && vdi.least() < SIZE_MAX;
        let Some(vdi) = self.free_vdi(fits) else { return Ok(()) };
        let known = &self.vdi(&vdi)?.sizes;
        let size = known.iter().copied().max().unwrap_or(0) + ((1 + self.random.below(16)) << 20);
        let request = Request::post(format!("/vdis/{vdi}/resize"), json!({ "size": size }));
        self.begin(PendingVerb::Resize(vdi.clone(), size), vec![vdi], None, &request)
    }

    fn revert(&mut self) -> Result<(), String> {
        let held = self.held();
        let fits = |world: &World, _: &str, vdi: &Vdi| {
            let of = vdi.snapshot_of.as_ref().filter(|of| world.vdis.contains_key(*of) && !held.contains(*of));
            of.is_some_and(|of| !world.is_plugged(of) && world.vdis.get(of).is_some_and(|of| !of.read_only))
        };
        let Some(snapshot) = self.free_vdi(fits) else { return Ok(()) };
        let Some(vdi) = self.vdi(&snapshot)?.snapshot_of.clone() else { return Ok(()) };
        let request = Request::post(format!("/vdis/{vdi}/revert"), json!({ "snapshot": snapshot }));
        self.begin(PendingVerb::Revert(vdi.clone(), snapshot.clone()), vec![vdi, snapshot], None, &request)
    }

    pub fn destroy(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|world, uuid, _| !world.is_plugged(uuid)) else { return Ok(()) };
        for vbd in self.vbds_of(&vdi) {
            self.delete_vbd(&vbd)?;
        }
        if self.held().contains(&vdi) {
            return Ok(());
        }
        let request = Request::delete(format!("/vdis/{vdi}"));
        self.begin(PendingVerb::Destroy(vdi.clone()), vec![vdi], None, &request)
    }

    fn plug_one(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|world, uuid, _| !world.is_plugged(uuid)) else { return Ok(()) };
        let vbd = match self.vbds_of(&vdi).first() {
            Some(vbd) => Some(vbd.clone()),
            None => self.make_vbd(&vdi)?,
        };
        let Some(vbd) = vbd else { return Ok(()) };
        let request = Request::post(format!("/vbds/{vbd}/plug"), json!({}));
        self.begin(PendingVerb::Plug(vbd), vec![vdi], None, &request)
    }

    fn unplug_one(&mut self) -> Result<(), String> {
        let held = self.held();
        let plugged = self.vbds.iter().filter(|(_, vbd)| {
            let runs = vbd.vm.as_ref().is_some_and(|vm| self.vms.get(vm).is_some_and(|vm| vm.power != Power::Halted));
            vbd.plugged && !held.contains(&vbd.vdi) && !runs
        });
        let plugged: Vec<String> = plugged.map(|(uuid, _)| uuid.clone()).collect();
        let Some(vbd) = self.one_of(&plugged) else { return Ok(()) };
        let force = self.random.below(3) == 0;
        let now = self.vbd(&vbd)?;
        if !force {
            if now.stopped.is_some() || now.sent.is_some() {
                return Ok(());
            }
            now.client = None;
        }
        // Clients of a disk that is unplugged are disconnected.
        now.client = None;
        now.sent = None;
        let vdi = now.vdi.clone();
        let request = Request::post(format!("/vbds/{vbd}/unplug"), json!({ "force": force }));
        self.begin(PendingVerb::Unplug(vbd), vec![vdi], None, &request)
    }

    fn delete_some_vbd(&mut self) -> Result<(), String> {
        let held = self.held();
        let free = self.vbds.iter().filter(|(_, vbd)| !held.contains(&vbd.vdi) && vbd.vm.is_none());
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        match self.one_of(&free) {
            Some(vbd) => self.delete_vbd(&vbd),
            None => Ok(()),
        }
    }

    /// Exports a VDI to a file and sometimes imports that: the content must be the same.
    fn export(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|world, uuid, _| !world.is_plugged(uuid)) else { return Ok(()) };
        let name = self.name();
        let format = self.one_of(&["raw", "vhd", "qcow2"]).unwrap_or("raw");
        let path = self.bed.places.room.join(format!("{name}.{format}"));
        let request = Request::post(format!("/vdis/{vdi}/export"), json!({ "path": path, "format": format }));
        let before = self.vdi(&vdi)?.clone();
        self.begin(PendingVerb::Export, vec![vdi], None, &request)?;
        self.settle(true)?;
        if !path.exists() {
            return Ok(());
        }
        let sr = self.random.index(self.srs.len());
        let into = self.srs.get(sr).map(|sr| sr.uuid.clone());
        let body = json!({ "sr": into, "name": name, "path": path, "source_format": format });
        let made = before.copied(name, sr, None);
        self.begin(PendingVerb::Make(made), Vec::new(), None, &Request::post("/vdis/import", body))?;
        self.settle(true)?;
        std::fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn merge(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|_, _, vdi| !vdi.read_only) else { return Ok(()) };
        // If there is nothing to merge, it is refused.
        let request = Request::post(format!("/vdis/{vdi}/merge"), json!({}));
        let pending = Pending { contested: true, ..Pending::new(PendingVerb::Merge, vec![vdi], None) };
        self.begin_as(pending, &request)
    }
}
