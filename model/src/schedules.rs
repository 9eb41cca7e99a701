//! Schedules of snapshots, of VDIs and of VMs, with a clock that is set forward.
//!
//! What a schedule takes is the schedule's, and may go; all that was there before, and all that is taken by hand, may
//! not, and is missed when the lists are compared.

use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use serde_json::{Value, json};

use super::check::text;
use super::machines::{DISKS_MAX, Vm};
use super::verbs::{Asked, patience};
use super::world::{Vdi, Verb, World};

/// Where the daemon dies now and then while it follows one.
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

/// What has a schedule: a VDI, or a VM with so many disks that its guest may write.
enum Subject {
    Vdi(String),
    Vm(String, usize),
}

impl World {
    /// A VDI or a VM has a schedule for some hours.
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
            // One by hand, which the schedule has to leave alone.
            self.snapshot_now(vdi)?;
        }
        if self.random_is(3) {
            let step = self.one_of(&STEPS).unwrap_or(STEPS[0]);
            self.die_at(step.to_owned())?;
        }
        let schedule = json!({ "hourly": 1 + self.random.below(2) });
        for _ in 0..hours {
            self.an_hour_passes()?;
            self.keeps(&path, verb, &schedule)?;
        }
        while !self.set(&path, &json!({ "retention": null }), false)? {}
        self.rest()?;
        match of {
            Subject::Vdi(vdi) => self.vdi_was_kept(&vdi),
            Subject::Vm(vm, _) => self.vm_was_kept(&vm),
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

    /// A clone of what a schedule has taken is all that stands on it, after the disk was reverted; it stays.
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
            self.an_hour_passes()?;
            self.keeps(&path, "vdi-schedule", &json!({ "hourly": 5 }))?;
        }
        self.end_schedule(&of)?;
        let mut taken = self.scheduled_of(&of)?;
        taken.sort();
        let [.., (_, cloned), (_, last)] = taken.as_slice() else { return self.check() };
        let (cloned, last, name) = (cloned.clone(), last.clone(), self.name());
        let source = self.vdi(&cloned)?;
        let made = source.copied(name.clone(), source.sr, None);
        let asked = Asked::post(format!("/vdis/{cloned}/clone"), json!({ "name": name }));
        self.begin(Verb::Make(made), vec![cloned.clone()], Some(cloned.clone()), &asked)?;
        self.settle(true)?;
        let is_cloned = self.vdis.values().any(|vdi| vdi.name == name);
        let revert = Asked::post(format!("/vdis/{of}/revert"), json!({ "snapshot": first }));
        self.begin(Verb::Revert(of.clone(), first.clone()), vec![of.clone(), first], None, &revert)?;
        self.settle(true)?;
        self.destroy_now(&last)?;
        self.rest()?;
        // Images of a repository that shares blocks do not stand on each other.
        let depth = self.list("/vdis")?.into_iter().find(|vdi| vdi["name"] == *name).map(|vdi| vdi["depth"].clone());
        let stands = is_cloned && depth.is_some_and(|depth| depth.as_u64() > Some(1));
        // The clock may have been held back before.
        for _ in 0..3 {
            self.an_hour_passes()?;
            self.keeps(&path, "vdi-schedule", &json!({ "hourly": 1 }))?;
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

    /// The clock is a year ahead for an hour, and right again: nothing is destroyed meanwhile.
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
            self.an_hour_passes()?;
            self.keeps(&path, "vdi-schedule", &json!({ "hourly": 3 }))?;
        }
        let before = self.scheduled_of(&of)?;
        for years in [1, 0] {
            self.hours += 1;
            self.clocks_say(years)?;
            self.keeps(&path, "vdi-schedule", &json!({ "hourly": 1 }))?;
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
        self.vdi_was_kept(of)
    }

    /// The snapshots that the schedule of a VDI has taken: the time of each, and which it is.
    fn scheduled_of(&mut self, of: &str) -> Result<Vec<(String, String)>, String> {
        let shown = self.list(&format!("/vdis?snapshot_of={of}"))?;
        let scheduled = shown.iter().filter(|vdi| vdi["scheduled"] == true);
        Ok(scheduled.map(|vdi| (text(&vdi["snapshot_time"]), text(&vdi["uuid"]))).collect())
    }

    /// Sets the clock that schedules go by.
    fn an_hour_passes(&mut self) -> Result<(), String> {
        self.hours += 1;
        self.clocks_say(0)
    }

    /// Sets both clocks, the one that can be set by so many years ahead.
    fn clocks_say(&mut self, years: u64) -> Result<(), String> {
        // Months of four weeks: it only has to go on.
        let (days, hour) = (self.hours / 24, self.hours % 24);
        let (year, month, day) = (2027 + years + days / 28 / 12, 1 + days / 28 % 12, 1 + days % 28);
        let at = format!("{year}-{month:02}-{day:02}T{hour:02}:30:00Z");
        self.tell(format!("for schedules it is {at}"));
        let path = self.bed.places.room.join("clock");
        let beside = path.with_extension("new");
        let set = fs::write(&beside, format!("{at} {}", self.hours * 3600)).and_then(|()| fs::rename(&beside, &path));
        set.map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Sets a schedule, by which the daemon looks at the clock, and waits until it has done what is due.
    fn keeps(&mut self, path: &str, verb: &str, schedule: &Value) -> Result<(), String> {
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
            self.waits(begun)?;
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        Ok(())
    }

    /// A schedule of a VDI has ended: its snapshots are known from now on, and those of them that are gone may be.
    fn vdi_was_kept(&mut self, of: &str) -> Result<(), String> {
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
                self.take_in(&uuid, of, Some(of.to_owned()))?;
                self.by_schedule.insert(uuid);
            }
        }
        Ok(())
    }

    /// The same of a VM.
    fn vm_was_kept(&mut self, vm: &str) -> Result<(), String> {
        let scheduled: BTreeSet<String> = self
            .list(&format!("/vms/{vm}/snapshots"))?
            .iter()
            .filter(|snapshot| snapshot["scheduled"] == true)
            .map(|snapshot| text(&snapshot["uuid"]))
            .collect();
        let shown = self.shown_moments(vm)?;
        let known = self.vm(vm)?.moments.clone();
        for (uuid, moment) in known {
            if self.by_schedule.contains(&uuid) && !shown.contains_key(&uuid) {
                self.vm(vm)?.moments.remove(&uuid);
                for (_, snapshot) in moment.pairs() {
                    self.vdis.remove(&snapshot);
                }
            }
        }
        let written = self.written_by(vm);
        for (uuid, moment) in shown.into_iter().filter(|(uuid, _)| scheduled.contains(uuid)) {
            if self.vm(vm)?.moments.contains_key(&uuid) {
                continue;
            }
            let pairs = moment.pairs();
            if pairs.iter().map(|(vdi, _)| vdi.clone()).collect::<BTreeSet<_>>() != written {
                return Err(format!("a scheduled snapshot of VM {vm} has {moment:?}, and should have {written:?}"));
            }
            for (of, snapshot) in &pairs {
                self.take_in(snapshot, of, Some(of.clone()))?;
            }
            self.vm(vm)?.moments.insert(uuid.clone(), moment);
            self.by_schedule.insert(uuid);
        }
        Ok(())
    }
}
