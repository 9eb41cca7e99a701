//! VMs: QEMUs that run only their firmware, with disks that are plugged when they start.
//!
//! Their disks have no client here: their content is compared while the VM is halted, through another VBD.

use std::collections::BTreeMap;
use std::time::Instant;

use serde_json::{Value, json};
use testbed::daemon::api::Trouble;
use testbed::tool;

use super::check::text;
use super::verbs::{Request, patience};
use super::vm_snapshots::VmSnapshot;
use super::world::{Pending, PendingVerb, Vbd, World};

/// The program of QEMU; without it there are no VMs.
pub const QEMU: &str = "qemu-system-x86_64";

/// Maximum number of VMs: each running one uses CPU time until its firmware has found nothing to boot.
pub const VMS_MAX: usize = 3;

/// Maximum number of disks of a VM.
pub const DISKS_MAX: usize = 3;

/// Points at which the daemon can be made to die that `--steps` does not list, because nothing is repeated after them.
pub const STEPS: &[&str] = &[
    "vm-start:plug",
    "vm-start:start",
    "vm-shutdown:end",
    "vm-end:unplug",
    "vbd-plug:open",
    "vbd-plug:start",
    "vbd-plug:hand",
    "vbd-plug:answer",
    "vbd-unplug:stop",
    "vbd-unplug:clear",
    "vbd-upgrade:start",
    "vbd-upgrade:ask",
    "inventory:append",
];

/// Whether QEMU is installed.
pub fn qemu_is_installed() -> bool {
    tool::locate(QEMU).is_some()
}

/// The power state of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Power {
    /// The VM has no QEMU.
    #[default]
    Halted,
    /// The guest runs.
    Running,
    /// The guest is paused.
    Paused,
}

impl Power {
    /// Parses the name in the API.
    pub fn parse(word: &str) -> Option<Power> {
        match word {
            "halted" => Some(Power::Halted),
            "running" => Some(Power::Running),
            "paused" => Some(Power::Paused),
            _ => None,
        }
    }

    /// The name of the state in the API.
    pub fn word(self) -> &'static str {
        match self {
            Power::Halted => "halted",
            Power::Running => "running",
            Power::Paused => "paused",
        }
    }

    /// The name of the state in QMP (qapi/run-state.json).
    pub fn status(self) -> &'static str {
        if self == Power::Running { "running" } else { "paused" }
    }
}

/// A VM of the model.
#[derive(Clone, Debug, Default)]
pub struct Vm {
    /// The VM as the API shows it.
    pub shown: Value,
    /// Its power state.
    pub power: Power,
    /// Its QEMU was killed, so that it will be halted.
    pub killed: bool,
    /// Its snapshots by UUID.
    pub snapshots: BTreeMap<String, VmSnapshot>,
}

impl Vm {
    /// Parses a VM of the API.
    pub fn parse(now: &Value) -> Result<Vm, String> {
        let power = Power::parse(&text(&now["power"])).ok_or_else(|| format!("stuck: {now}"))?;
        let shown = ["name", "description", "memory", "vcpus", "autostart"];
        let shown = shown.into_iter().map(|key| (key.to_owned(), now[key].clone()));
        Ok(Vm { shown: Value::Object(shown.collect()), power, ..Vm::default() })
    }
}

impl World {
    /// Does a random operation with VMs.
    pub fn machine_step(&mut self) -> Result<(), String> {
        match self.random.below(20) {
            _ if !self.has_qemu => Ok(()),
            16..=19 => self.vm_snapshot_step(),
            0..=1 if self.vms.len() < VMS_MAX => self.make_machine(),
            0..=5 => self.start_some(),
            6..=7 => self.stop_some(),
            8..=9 => self.pause_or_resume(),
            10 => self.kill_machine(),
            11..=12 => self.kill_disk_of_machine(),
            13 => self.die_with_machine(),
            14 => self.rival_machines(),
            _ if self.random_is(2) => self.destroy_machine(),
            _ => self.add_disk(),
        }
    }

    /// The VBDs of a VM.
    pub fn vbds_of_vm(&self, vm: &str) -> Vec<String> {
        self.vbds.iter().filter(|(_, vbd)| vbd.vm.as_deref() == Some(vm)).map(|(uuid, _)| uuid.clone()).collect()
    }

    /// A VM that fits and that, with its disks, is not in use by a verb.
    pub fn free_vm(&mut self, fits: impl Fn(&World, &str, &Vm) -> bool) -> Option<String> {
        let held = self.held();
        let is_free = |uuid: &String| {
            let mut disks = self.vbds.values().filter(|vbd| vbd.vm.as_ref() == Some(uuid));
            !held.contains(uuid) && disks.all(|vbd| !held.contains(&vbd.vdi))
        };
        let free = self.vms.iter().filter(|(uuid, vm)| !vm.killed && is_free(uuid) && fits(self, uuid, vm));
        let free: Vec<String> = free.map(|(uuid, _)| uuid.clone()).collect();
        self.one_of(&free)
    }

    pub fn make_machine(&mut self) -> Result<(), String> {
        let (name, description, vcpus) = (self.name(), self.name(), 1 + self.random.below(2));
        let shown = json!({ "name": name, "description": description, "memory": 64 << 20, "vcpus": vcpus });
        let mut body = shown.clone();
        body["driver"] = json!("qemu");
        self.count("vm-create");
        let key = self.key();
        let made = match self.request_task(&Request::post("/vms", body), Some(&key))? {
            Ok(vm) => text(&vm["uuid"]),
            Err(Trouble::Refused(code, why)) => {
                return self.excuse(&PendingVerb::Power(String::new(), Power::Halted), &code, &why);
            }
            Err(trouble) => return Err(trouble.to_string()),
        };
        self.vms.insert(made.clone(), Vm { shown, ..Vm::default() });
        for _ in 0..1 + self.random.below(2) {
            self.create_vm_disk(&made)?;
        }
        Ok(())
    }

    fn add_disk(&mut self) -> Result<(), String> {
        let fits = |world: &World, uuid: &str, _: &Vm| world.vbds_of_vm(uuid).len() < DISKS_MAX;
        match self.free_vm(fits) {
            Some(vm) => self.create_vm_disk(&vm),
            None => Ok(()),
        }
    }

    /// Creates a VBD of a VM, for a VDI that has no other VM and is not autostarted.
    fn create_vm_disk(&mut self, vm: &str) -> Result<(), String> {
        let is_free = |world: &World, uuid: &str, _: &super::world::Vdi| {
            world.vbds.values().all(|vbd| vbd.vdi != uuid || vbd.vm.is_none() && !vbd.autostart)
        };
        let Some(vdi) = self.free_vdi(is_free) else { return Ok(()) };
        // A VM with autostart that had nothing to boot is retried; with this disk it would start.
        let tried_again = self.vbds_of_vm(vm).is_empty() && self.vm(vm)?.shown["autostart"].is_object();
        if tried_again {
            if !self.set(&format!("/vms/{vm}"), &super::settings::autostart(false), false)? {
                return Ok(());
            }
            self.vm(vm)?.shown["autostart"] = Value::Null;
        }
        self.count("vbd-make");
        let key = self.key();
        match self
            .request_task(&Request::post("/vbds", json!({ "vdi": vdi, "vm": vm, "bootable": true })), Some(&key))?
        {
            Ok(vbd) => {
                let position = vbd["position"].as_u64().ok_or("a VBD without a position")?;
                let new = Vbd { vdi, vm: Some(vm.to_owned()), position, ..Vbd::default() };
                self.vbds.insert(text(&vbd["uuid"]), new);
                Ok(())
            }
            Err(Trouble::Refused(code, why)) => self.excuse(&PendingVerb::Plug(String::new()), &code, &why),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// The objects that a verb about a VM holds.
    pub fn held_by(&self, vm: &str) -> Vec<String> {
        let vbds = self.vbds.values().filter(|vbd| vbd.vm.as_deref() == Some(vm));
        vbds.map(|vbd| vbd.vdi.clone()).chain([vm.to_owned()]).collect()
    }

    /// A halted VM whose disks are not plugged elsewhere.
    fn startable(&mut self) -> Option<String> {
        self.free_vm(|world, uuid, vm| {
            let mine = world.vbds_of_vm(uuid);
            let elsewhere =
                |vdi: &str| world.vbds.iter().any(|(vbd, now)| now.vdi == vdi && now.plugged && !mine.contains(vbd));
            let mut vdis = mine.iter().filter_map(|vbd| world.vbds.get(vbd)).map(|vbd| vbd.vdi.as_str());
            vm.power == Power::Halted && !mine.is_empty() && !vdis.any(elsewhere)
        })
    }

    pub fn start_some(&mut self) -> Result<(), String> {
        let Some(vm) = self.startable() else { return Ok(()) };
        let holds = self.held_by(&vm);
        let request = Request::post(format!("/vms/{vm}/start"), json!({}));
        self.begin(PendingVerb::Power(vm, Power::Running), holds, None, &request)
    }

    fn stop_some(&mut self) -> Result<(), String> {
        match self.free_vm(|_, _, vm| vm.power != Power::Halted) {
            Some(vm) => self.stop(&vm),
            None => Ok(()),
        }
    }

    /// Shuts a VM down, with force at once or after a second: the firmware ignores the request.
    fn stop(&mut self, vm: &str) -> Result<(), String> {
        let force = self.vm(vm)?.power == Power::Paused || !self.random_is(4);
        let body = if force { json!({ "force": true }) } else { json!({ "force_after": 1 }) };
        let holds = self.held_by(vm);
        let request = Request::post(format!("/vms/{vm}/shutdown"), body);
        self.begin(PendingVerb::Power(vm.to_owned(), Power::Halted), holds, None, &request)
    }

    /// Pauses a running VM, or resumes a paused one.
    fn pause_or_resume(&mut self) -> Result<(), String> {
        let Some(vm) = self.free_vm(|_, _, vm| vm.power != Power::Halted) else { return Ok(()) };
        let (verb, power) = match self.vm(&vm)?.power {
            Power::Paused => ("resume", Power::Running),
            _ => ("pause", Power::Paused),
        };
        let holds = self.held_by(&vm);
        let request = Request::post(format!("/vms/{vm}/{verb}"), json!({}));
        self.begin(PendingVerb::Power(vm, power), holds, None, &request)
    }

    /// Sends two verbs about one VM concurrently.
    fn rival_machines(&mut self) -> Result<(), String> {
        let Some(vm) = self.startable() else { return Ok(()) };
        let holds = self.held_by(&vm);
        let mut all = vec![(Power::Running, "start", json!({}))];
        all.push(match self.random.below(3) {
            0 => (Power::Running, "start", json!({})),
            1 => (Power::Halted, "shutdown", json!({ "force": true })),
            _ => (Power::Paused, "pause", json!({})),
        });
        self.count("race");
        let request = all.into_iter().map(|(power, verb, body)| {
            let pending = Pending::new(PendingVerb::Power(vm.clone(), power), holds.clone(), None);
            (pending, Request::post(format!("/vms/{vm}/{verb}"), body))
        });
        self.request_concurrently(request.collect())
    }

    /// A VM whose QEMU runs, and its process.
    pub fn some_machine(&mut self) -> Option<(String, u32)> {
        let running: Vec<(String, u32)> =
            self.vms.keys().filter_map(|vm| Some((vm.clone(), self.bed.places.machine(vm)?))).collect();
        self.one_of(&running)
    }

    fn kill_machine(&mut self) -> Result<(), String> {
        let Some((vm, pid)) = self.some_machine() else { return Ok(()) };
        self.trouble("kill qemu", format!("kill {pid}, the QEMU of VM {vm}"));
        self.counts.kills += 1;
        self.vm(&vm)?.killed = true;
        self.bed.places.kill(pid)
    }

    fn kill_disk_of_machine(&mut self) -> Result<(), String> {
        let plugged: Vec<String> =
            self.vbds.iter().filter(|(_, vbd)| vbd.vm.is_some() && vbd.plugged).map(|(uuid, _)| uuid.clone()).collect();
        let Some(vbd) = self.one_of(&plugged) else { return Ok(()) };
        let disks = self.bed.places.disks();
        let Some(disk) = disks.iter().find(|disk| disk.vbd.as_ref() == Some(&vbd)) else { return Ok(()) };
        self.trouble("kill disk", format!("kill {}, the disk of VBD {vbd} of a VM", disk.pid));
        self.counts.kills += 1;
        self.bed.places.kill(disk.pid)
    }

    /// Lets the daemon die during a start or a shutdown.
    fn die_with_machine(&mut self) -> Result<(), String> {
        self.settle(true)?;
        let steps: Vec<&&str> = STEPS.iter().filter(|step| step.starts_with("vm-")).collect();
        let Some(step) = self.one_of(&steps) else { return Ok(()) };
        let after = if self.random_is(2) { ":after" } else { "" };
        self.die_at(format!("{step}{after}"))?;
        match *step {
            step if step.starts_with("vm-start") => self.start_some(),
            step if step.starts_with("vm-end") => self.kill_machine(),
            _ => self.stop_some(),
        }
    }

    fn destroy_machine(&mut self) -> Result<(), String> {
        match self.free_vm(|_, _, vm| vm.power == Power::Halted) {
            Some(vm) => self.delete_machine(&vm),
            None => Ok(()),
        }
    }

    /// Halts and deletes a VM with its VBDs.
    pub fn delete_machine(&mut self, vm: &str) -> Result<(), String> {
        for vbd in self.vbds_of_vm(vm) {
            self.delete_vbd(&vbd)?;
        }
        self.halt_for_sure(vm)?;
        let begun = Instant::now();
        while self.vms.contains_key(vm) {
            self.ensure_daemon()?;
            self.log(format!("DELETE /vms/{vm}"));
            match self.bed.api.ask("DELETE", &format!("/vms/{vm}"), &Value::Null) {
                Ok(_) => drop(self.vms.remove(vm)),
                Err(trouble) if trouble.is_not_found() => drop(self.vms.remove(vm)),
                Err(Trouble::Gone) => self.note_daemon_gone()?,
                Err(Trouble::Refused(code, why)) => {
                    self.excuse(&PendingVerb::Power(vm.to_owned(), Power::Halted), &code, &why)?;
                    self.calm()?;
                }
                Err(trouble) => return Err(trouble.to_string()),
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck, VM {vm} cannot be deleted"));
            }
        }
        self.count("vm-destroy");
        Ok(())
    }

    /// Halts a VM, whatever is in progress with it.
    pub fn halt_for_sure(&mut self, vm: &str) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            self.settle(true)?;
            self.follow_the_killed()?;
            if self.vms.get(vm).is_none_or(|vm| vm.power == Power::Halted) {
                return Ok(());
            }
            self.stop(vm)?;
            self.wait_a_moment(begun)?;
            if begun.elapsed() > patience() {
                return Err(format!("stuck, VM {vm} does not halt"));
            }
        }
    }

    /// Halts the VMs whose QEMUs were killed in the model, and unplugs their disks.
    pub fn follow_the_killed(&mut self) -> Result<(), String> {
        let killed: Vec<String> = self.vms.iter().filter(|(_, vm)| vm.killed).map(|(uuid, _)| uuid.clone()).collect();
        for vm in killed {
            let begun = Instant::now();
            while self.power_of(&vm)? != Power::Halted {
                if begun.elapsed() > patience() {
                    return Err(format!("stuck, the QEMU of VM {vm} was killed, and it is not halted"));
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            let now = self.vm(&vm)?;
            (now.power, now.killed) = (Power::Halted, false);
            self.follow_disks(&vm)?;
        }
        Ok(())
    }

    /// The power state of a VM according to the daemon, once it is not changing.
    pub fn power_of(&mut self, vm: &str) -> Result<Power, String> {
        let begun = Instant::now();
        loop {
            let now = self.get(&format!("/vms/{vm}"))?;
            if let Some(power) = now["power"].as_str().and_then(Power::parse) {
                return Ok(power);
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck: {now}"));
            }
            self.wait_a_moment(begun)?;
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }

    /// Updates the model after a verb about a VM has ended.
    pub fn power_changed(&mut self, vm: &str, wanted: Power, done: bool, contested: bool) -> Result<(), String> {
        let before = self.vm(vm)?.clone();
        let now = self.power_of(vm)?;
        // A rival or a death may have changed the state further.
        let any = contested || before.killed;
        let right = if done { now == wanted } else { now == wanted || now == before.power };
        if !any && !right {
            return Err(format!("VM {vm} is {now:?}; it was {before:?}, should be {wanted:?}, done: {done}"));
        }
        self.vm(vm)?.power = now;
        // A start plugs all disks. One that was created while the VM was running is plugged by the next start.
        let started = before.power == Power::Halted;
        let disks = self.vbds_of_vm(vm).into_iter();
        let kept: Vec<String> =
            disks.filter(|vbd| started || self.vbds.get(vbd).is_some_and(|vbd| vbd.plugged)).collect();
        self.follow_disks(vm)?;
        for vbd in kept {
            if !any && now != Power::Halted && !self.vbd(&vbd)?.plugged {
                return Err(format!("VBD {vbd} is not plugged, and its VM {vm} is {now:?}"));
            }
        }
        Ok(())
    }

    /// Takes from the daemon whether the VM's disks are plugged.
    fn follow_disks(&mut self, vm: &str) -> Result<(), String> {
        self.vbds_of_vm(vm).iter().try_for_each(|vbd| self.settle_plugged(vbd))
    }

    /// Deletes all VMs.
    pub fn delete_machines(&mut self) -> Result<(), String> {
        for vm in self.vms.keys().cloned().collect::<Vec<_>>() {
            self.delete_machine(&vm)?;
        }
        Ok(())
    }
}
