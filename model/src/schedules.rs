//! Schedules of snapshots of VDIs and VMs, with a clock that is set forward.
//!
//! Snapshots taken by a schedule may be destroyed by it. All others must stay; a missing one is found when the lists
//! are compared.

use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use super::check::text;
use super::machines::{DISKS_MAX, Vm};
use super::verbs::{Request, patience};
use super::world::{PendingVerb, Vdi, World};

/// Steps of schedules at which the daemon sometimes dies.
const STEPS: [&str; 8] = [
    "vdi-snapshot:leaf",
    "vdi-snapshot:record:after",
    "vdi-destroy:forget:after",
    "vm-snapshot:first:after",
    "vm-snapshot:record",
    "vm-snapshot:record:after",
    "vm-snapshot-destroy:forget",
    "vm-snapshot-destroy:forget:after",
];

/// The subject of a schedule: a VDI, or a VM with its number of writable disks.
enum Subject {
    Vdi(String),
    Vm(String, usize),
}

impl World {
    /// Gives a VDI or VM a schedule for some hours.
    pub fn follow_schedule(&mut self) -> Result<(), String> {
        self.rest()?;
        if self.vms.is_empty() && self.has_qemu {
            self.make_machine()?;
        }
        let Some(of) = self.some_subject() else { return Ok(()) };
        let hours = 2 + self.random.below(3);
        let (path, verb, each) = match &of {
            Subject::Vdi(vdi) => (format!("/vdis/{vdi}"), "vdi-schedule", 1),
            Subject::Vm(vm, disks) => (format!("/vms/{vm}"), "vm-schedule", *disks),
        };
        if !self.has_room_for(each * 2) {
            return Ok(());
        }
        self.count(verb);
        if let Subject::Vdi(vdi) = &of {
            // A manual snapshot, which the schedule must not destroy.
            self.snapshot_now(vdi)?;
        }
        if self.random_is(3) {
            let step = self.one_of(&STEPS).unwrap_or(STEPS[0]);
            self.die_at(step.to_owned())?;
        }
        let schedule = json!({ "hourly": 1 + self.random.below(2) });
        for _ in 0..hours {
            self.advance_an_hour()?;
            self.set_schedule(&path, verb, &schedule)?;
        }
        while !self.set(&path, &json!({ "retention": null }), false)? {}
        self.rest()?;
        match of {
            Subject::Vdi(vdi) => self.record_vdi_snapshots(&vdi),
            Subject::Vm(vm, _) => self.record_vm_snapshots(&vm),
        }?;
        self.check()
    }

    fn some_subject(&mut self) -> Option<Subject> {
        if !self.random_is(4) {
            let fits = |world: &World, vm: &str, _: &Vm| !world.written_by(vm).is_empty();
            if let Some(vm) = self.free_vm(fits) {
                let disks = self.written_by(&vm).len().min(DISKS_MAX);
                return Some(Subject::Vm(vm, disks));
            }
        }
        self.free_vdi(|_, _, vdi: &Vdi| !vdi.read_only).map(Subject::Vdi)
    }

    /// The VDIs that the guest of a VM may write.
    fn written_by(&self, vm: &str) -> BTreeSet<String> {
        let vbds = self.vbds_of_vm(vm).into_iter().filter_map(|vbd| self.vbds.get(&vbd));
        vbds.map(|vbd| vbd.vdi.clone()).filter(|vdi| self.vdis.get(vdi).is_some_and(|vdi| !vdi.read_only)).collect()
    }

    /// Clones a scheduled snapshot so that, after a revert of the disk, only the clone is based on it; it must stay.
    pub fn clone_by_schedule(&mut self) -> Result<(), String> {
        self.rest()?;
        let Some(of) = self.free_vdi(|world, uuid, vdi| !vdi.read_only && !world.is_plugged(uuid)) else {
            return Ok(());
        };
        if !self.has_room_for(6) {
            return Ok(());
        }
        self.count("clone-by-schedule");
        let Some(first) = self.snapshot_now(&of)? else { return Ok(()) };
        let path = format!("/vdis/{of}");
        for _ in 0..2 {
            self.advance_an_hour()?;
            self.set_schedule(&path, "vdi-schedule", &json!({ "hourly": 5 }))?;
        }
        self.end_schedule(&of)?;
        let mut taken = self.scheduled_of(&of)?;
        taken.sort();
        let [.., (_, cloned), (_, last)] = taken.as_slice() else { return self.check() };
        let (cloned, last, name) = (cloned.clone(), last.clone(), self.name());
        let source = self.vdi(&cloned)?;
        let made = source.copied(name.clone(), source.sr, None);
        let request = Request::post(format!("/vdis/{cloned}/clone"), json!({ "name": name }));
        self.begin(PendingVerb::Make(made), vec![cloned.clone()], Some(cloned.clone()), &request)?;
        self.settle(true)?;
        let is_cloned = self.vdis.values().any(|vdi| vdi.name == name);
        let revert = Request::post(format!("/vdis/{of}/revert"), json!({ "snapshot": first }));
        self.begin(PendingVerb::Revert(of.clone(), first.clone()), vec![of.clone(), first], None, &revert)?;
        self.settle(true)?;
        self.destroy_now(&last)?;
        self.rest()?;
        // With reflinks, images are not based on each other.
        let depth = self.list("/vdis")?.into_iter().find(|vdi| vdi["name"] == *name).map(|vdi| vdi["depth"].clone());
        let stands = is_cloned && depth.is_some_and(|depth| depth.as_u64() > Some(1));
        // The clock may have been held back before.
        for _ in 0..3 {
            self.advance_an_hour()?;
            self.set_schedule(&path, "vdi-schedule", &json!({ "hourly": 1 }))?;
        }
        let there = self.list("/vdis")?.iter().any(|vdi| vdi["uuid"] == *cloned);
        if stands && !there {
            return Err(format!(
                "the snapshot {cloned} was destroyed by its schedule, and the clone {name} stands on it"
            ));
        }
        self.end_schedule(&of)?;
        self.check()
    }

    /// Sets the clock a year ahead for an hour and back: no snapshot may be destroyed.
    pub fn clock_jumps(&mut self) -> Result<(), String> {
        self.rest()?;
        let Some(of) = self.free_vdi(|world, uuid, vdi| !vdi.read_only && !world.is_plugged(uuid)) else {
            return Ok(());
        };
        if !self.has_room_for(6) {
            return Ok(());
        }
        self.count("clock-jump");
        let path = format!("/vdis/{of}");
        for _ in 0..3 {
            self.advance_an_hour()?;
            self.set_schedule(&path, "vdi-schedule", &json!({ "hourly": 3 }))?;
        }
        let before = self.scheduled_of(&of)?;
        for years in [1, 0] {
            self.hours += 1;
            self.set_clocks(years)?;
            self.set_schedule(&path, "vdi-schedule", &json!({ "hourly": 1 }))?;
            let after = self.scheduled_of(&of)?;
            if let Some((_, gone)) = before.iter().find(|snapshot| !after.contains(snapshot)) {
                return Err(format!("the clock has jumped, and the snapshot {gone} was destroyed by its schedule"));
            }
        }
        self.end_schedule(&of)?;
        self.check()
    }

    fn end_schedule(&mut self, of: &str) -> Result<(), String> {
        while !self.set(&format!("/vdis/{of}"), &json!({ "retention": null }), false)? {}
        self.rest()?;
        self.record_vdi_snapshots(of)
    }

    /// The snapshots taken by the schedule of a VDI: times and UUIDs.
    fn scheduled_of(&mut self, of: &str) -> Result<Vec<(String, String)>, String> {
        let shown = self.list(&format!("/vdis?snapshot_of={of}"))?;
        let scheduled = shown.iter().filter(|vdi| vdi["scheduled"] == true);
        Ok(scheduled.map(|vdi| (text(&vdi["snapshot_time"]), text(&vdi["uuid"]))).collect())
    }

    /// Advances the clock of schedules by an hour.
    fn advance_an_hour(&mut self) -> Result<(), String> {
        self.hours += 1;
        self.set_clocks(0)
    }

    /// Sets both clocks; the wall clock is ahead by this number of years.
    fn set_clocks(&mut self, years: u64) -> Result<(), String> {
        // Months of four weeks suffice: the clock only has to advance.
        let (days, hour) = (self.hours / 24, self.hours % 24);
        let (year, month, day) = (2027 + years + days / 28 / 12, 1 + days / 28 % 12, 1 + days % 28);
        let at = format!("{year}-{month:02}-{day:02}T{hour:02}:30:00Z");
        self.log(format!("for schedules it is {at}"));
        let path = self.bed.places.room.join("clock");
        let temporary = path.with_extension("new");
        let set =
            fs::write(&temporary, format!("{at} {}", self.hours * 3600)).and_then(|()| fs::rename(&temporary, &path));
        set.map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Sets a schedule, upon which the daemon reads the clock, and waits until everything due is done.
    fn set_schedule(&mut self, path: &str, verb: &str, schedule: &Value) -> Result<(), String> {
        let kept = |world: &mut World| -> Result<BTreeSet<String>, String> {
            let tasks = world.list("/tasks")?;
            let over = tasks.iter().filter(|task| task["verb"] == verb && task["ended"].is_string());
            Ok(over.map(|task| text(&task["uuid"])).collect())
        };
        let before = kept(self)?;
        for retention in [&Value::Null, schedule] {
            while !self.set(path, &json!({ "retention": retention }), false)? {}
        }
        let begun = Instant::now();
        while kept(self)?.is_subset(&before) {
            if begun.elapsed() > patience() {
                return Err(format!("stuck, no snapshot of {path} is taken by its schedule"));
            }
            self.wait_a_moment(begun)?;
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(())
    }

    /// Ends the schedule of a VDI in the model: its snapshots are recorded, and those that are gone are removed.
    fn record_vdi_snapshots(&mut self, of: &str) -> Result<(), String> {
        let shown = self.list(&format!("/vdis?snapshot_of={of}"))?;
        let there: BTreeSet<String> = shown.iter().map(|vdi| text(&vdi["uuid"])).collect();
        for uuid in self.by_schedule.clone().difference(&there) {
            if self.vdis.get(uuid).is_some_and(|vdi| vdi.snapshot_of.as_deref() == Some(of)) {
                self.vdis.remove(uuid);
            }
        }
        for vdi in shown.iter().filter(|vdi| vdi["scheduled"] == true) {
            let uuid = text(&vdi["uuid"]);
            if !self.vdis.contains_key(&uuid) {
                self.add_copied_vdi(&uuid, of, Some(of.to_owned()))?;
                self.by_schedule.insert(uuid);
            }
        }
        Ok(())
    }

    /// Ends the schedule of a VM in the model.
    fn record_vm_snapshots(&mut self, vm: &str) -> Result<(), String> {
        let scheduled: BTreeSet<String> = self
            .list(&format!("/vms/{vm}/snapshots"))?
            .iter()
            .filter(|snapshot| snapshot["scheduled"] == true)
            .map(|snapshot| text(&snapshot["uuid"]))
            .collect();
        let shown = self.vm_snapshots(vm)?;
        let known = self.vm(vm)?.snapshots.clone();
        for (uuid, moment) in known {
            if self.by_schedule.contains(&uuid) && !shown.contains_key(&uuid) {
                self.vm(vm)?.snapshots.remove(&uuid);
                for (_, snapshot) in moment.pairs() {
                    self.vdis.remove(&snapshot);
                }
            }
        }
        let written = self.written_by(vm);
        for (uuid, moment) in shown.into_iter().filter(|(uuid, _)| scheduled.contains(uuid)) {
            if self.vm(vm)?.snapshots.contains_key(&uuid) {
                continue;
            }
            let pairs = moment.pairs();
            if pairs.iter().map(|(vdi, _)| vdi.clone()).collect::<BTreeSet<_>>() != written {
                return Err(format!("a scheduled snapshot of VM {vm} has {moment:?}, and should have {written:?}"));
            }
            for (of, snapshot) in &pairs {
                self.add_copied_vdi(snapshot, of, Some(of.clone()))?;
            }
            self.vm(vm)?.snapshots.insert(uuid.clone(), moment);
            self.by_schedule.insert(uuid);
        }
        Ok(())
    }
}
