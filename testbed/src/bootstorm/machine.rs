//! The life of one VM: its disks are cloned from the golden image, plugged, used, unplugged and destroyed.
//!
//! Each part has an end that is looked for, and goes on towards it whatever is killed meanwhile: what failed is noted
//! and asked for again.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::Storm;
use crate::daemon::api::{Ended, REST, Trouble, nothing, uuid};

/// How long one part of a VM's life may take: guests are translated, and there are many.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1200);

/// A guest that has said nothing for so long does not get on: it says something each time it has written.
const STANDSTILL: std::time::Duration = std::time::Duration::from_secs(120);

/// Bytes of a guest that is none.
const SMALL: u64 = 64 << 20;

/// A VM.
#[derive(Debug)]
pub struct Machine {
    pub name: String,
    /// Whether a QEMU runs it.
    pub real: bool,
    pub vm: String,
    /// By position.
    pub vbds: Vec<String>,
    pub vdis: Vec<String>,
}

/// How much a guest had said at last, and since when it has said no more.
struct Silence {
    len: u64,
    since: Instant,
}

impl Storm<'_> {
    /// Tries until there is something, or it cannot be.
    fn until<T>(&self, what: &str, mut step: impl FnMut() -> Result<Option<T>, Trouble>) -> Result<T, String> {
        let begin = Instant::now();
        let mut last = String::new();
        while begin.elapsed() < PATIENCE {
            match step() {
                Ok(Some(value)) => return Ok(value),
                Ok(None) => {}
                Err(Trouble::Gone) => {}
                Err(Trouble::Refused(code, why)) if code != "internal" => {
                    self.notes.again(what, &why);
                    last = why;
                }
                Err(trouble) => return Err(format!("{what}: {trouble}")),
            }
            std::thread::sleep(REST);
        }
        Err(format!("{what}: not in {} s; {last}", PATIENCE.as_secs()))
    }

    /// What came of a task: its result, if it was done.
    fn outcome(&self, what: &str, task: &Value) -> Result<Option<Value>, Trouble> {
        match self.api.wait(task)? {
            Ended::Done(result) => Ok(Some(result)),
            Ended::Forgotten => Ok(None),
            Ended::Failed(why) => {
                self.notes.again(what, &why);
                Ok(None)
            }
        }
    }

    /// Makes an object; one whose maker has not heard of it is found by `find`.
    fn made(
        &self,
        what: &str,
        path: &str,
        body: &Value,
        find: impl Fn() -> Result<Option<String>, Trouble>,
    ) -> Result<String, String> {
        let mut again = false;
        self.until(what, || {
            if again {
                if let Some(found) = find()? {
                    return Ok(Some(found));
                }
            }
            again = true;
            let made = self.api.ask("POST", path, body)?;
            uuid(&made).map(|uuid| Some(uuid.to_owned()))
        })
    }

    /// Finds the one object that is named so.
    fn named(&self, path: &str) -> Result<Option<String>, Trouble> {
        let found = self.api.list(path)?;
        match &found[..] {
            [] => Ok(None),
            [one] => uuid(one).map(|uuid| Some(uuid.to_owned())),
            several => {
                Err(Trouble::Wrong(format!("{path}: one was asked for at a time, and there are {}", several.len())))
            }
        }
    }

    /// A clone of the golden image.
    fn cloned(&self, name: &str) -> Result<String, String> {
        let mut again = false;
        self.until("vdi-clone", || {
            if again {
                if let Some(found) = self.named(&format!("/vdis?sr={}&match={name}", self.sr))? {
                    return Ok(Some(found));
                }
            }
            again = true;
            let path = format!("/vdis/{}/clone", self.golden);
            let task = match self.api.ask("POST", &path, &json!({ "name": name })) {
                Err(Trouble::Gone) => {
                    self.api.settle("vdi-clone")?;
                    return Ok(None);
                }
                other => other?,
            };
            let done = self.outcome("vdi-clone", &task)?;
            Ok(done.and_then(|result| result["uuid"].as_str().map(str::to_owned)))
        })
    }

    /// Makes a VM and its disks.
    pub fn create(&self, number: usize) -> Result<Machine, String> {
        let name = format!("storm{number:03}");
        let real = number < self.plan.real();
        let vm =
            self.made("vm-create", "/vms", &self.hardware(&name, real), || self.named(&format!("/vms?match={name}")))?;
        let (mut vdis, mut vbds) = (Vec::new(), Vec::new());
        for position in 0..self.plan.disks() {
            let vdi = self.cloned(&format!("{name}-{position}"))?;
            let asked = json!({ "vm": vm, "vdi": vdi, "position": position });
            let find = || {
                let of_vm = self.api.list(&format!("/vbds?vm={vm}"))?;
                let found = of_vm.iter().find(|vbd| vbd["position"] == position);
                found.map(|vbd| uuid(vbd).map(str::to_owned)).transpose()
            };
            vbds.push(self.made("vbd-create", "/vbds", &asked, find)?);
            vdis.push(vdi);
        }
        Ok(Machine { name, real, vm, vbds, vdis })
    }

    fn hardware(&self, name: &str, real: bool) -> Value {
        let mut asked = json!({ "name": name, "driver": "qemu", "memory": SMALL, "vcpus": 1 });
        if let (true, Some(boot)) = (real, &self.boot) {
            asked["memory"] = json!(u64::from(crate::guest::MEMORY_MIB) << 20);
            asked["boot"] = boot.clone();
            asked["platform"] = json!({ "hvm_serial": format!("file:{}", self.console(name).display()) });
        }
        asked
    }

    /// Where a guest's console is kept.
    fn console(&self, name: &str) -> PathBuf {
        self.places.room.join(format!("{name}.console"))
    }

    /// Its VBDs are all plugged, whatever it is and without it.
    pub fn settle(&self, machine: &Machine) -> Result<(), String> {
        self.until("vbd-plug", || self.plugged(machine))
    }

    /// Its VBDs are all plugged; if it is real, it runs.
    pub fn plug(&self, machine: &Machine) -> Result<(), String> {
        if machine.real { self.until("vm-start", || self.started(machine)) } else { self.settle(machine) }
    }

    /// The VBDs of a machine that are not plugged are.
    fn plugged(&self, machine: &Machine) -> Result<Option<()>, Trouble> {
        let vbds = self.vbds(machine)?;
        if vbds.iter().all(|vbd| vbd["state"] == "plugged") {
            return Ok(Some(()));
        }
        let down: Vec<&Value> = vbds.iter().filter(|vbd| vbd["state"] == "unplugged").map(|vbd| &vbd["uuid"]).collect();
        if !down.is_empty() {
            let task = self.api.ask("POST", "/vbds/plug", &json!({ "vbds": down }))?;
            self.outcome("vbd-plug", &task)?;
        }
        self.raise(&vbds)?;
        Ok(None)
    }

    /// Disks that have died too often are plugged again, as the daemon advises.
    fn raise(&self, vbds: &[Value]) -> Result<(), Trouble> {
        let too_often = |vbd: &&Value| {
            vbd["state"] == "restarting"
                && vbd["problem"]["advice"].as_str().is_some_and(|advice| advice.contains("stays down"))
        };
        for vbd in vbds.iter().filter(too_often) {
            let task = self.api.ask("POST", &format!("/vbds/{}/plug", uuid(vbd)?), &nothing())?;
            self.outcome("vbd-plug", &task)?;
        }
        Ok(())
    }

    fn vbds(&self, machine: &Machine) -> Result<Vec<Value>, Trouble> {
        self.api.list(&format!("/vbds?vm={}", machine.vm))
    }

    /// A machine runs, or has done all that it was to do.
    fn started(&self, machine: &Machine) -> Result<Option<()>, Trouble> {
        let vm = self.api.get(&format!("/vms/{}", machine.vm))?;
        match vm["power"].as_str() {
            Some("running") => Ok(Some(())),
            Some("halted") if self.has_finished(machine, &vm)? => Ok(Some(())),
            Some("halted") => {
                // What an earlier one has said, whose start was undone, is not to be taken for this one's.
                fs::remove_file(self.console(&machine.name)).ok();
                let task = self.api.ask("POST", &format!("/vms/{}/start", machine.vm), &nothing())?;
                self.outcome("vm-start", &task)?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Whether the guest of a machine that is halted has said that it is done. It must not have gone wrong.
    fn has_finished(&self, machine: &Machine, vm: &Value) -> Result<bool, Trouble> {
        let console = fs::read(self.console(&machine.name)).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let said =
            |what: &str| console.split(['\r', '\n']).find_map(|line| line.strip_prefix("TAPLINE ")?.strip_prefix(what));
        if let Some(why) = said("fail=") {
            return Err(Trouble::Wrong(format!("the guest of {} says: {why}", machine.name)));
        }
        if said("end=ok").is_some() {
            return Ok(true);
        }
        let message = vm["problem"]["detail"].as_str().unwrap_or_default();
        if message.contains("exited unexpectedly") && self.plan.kill {
            // It had lost a disk and was ended for it. Its disks are unplugged then, and the VM starts anew.
            self.notes.again("a guest", "a QEMU whose disks were killed has ended by itself");
            return Ok(false);
        }
        // A start that was undone with its daemon is no fault of the guest's.
        let undone = message.contains("was not started");
        if said("init=").is_some() && !undone {
            return Err(Trouble::Wrong(format!("the guest of {} broke off: {vm}\n{console}", machine.name)));
        }
        Ok(false)
    }

    /// Its guest has done all that it was to do.
    pub fn load(&self, machine: &Machine, rounds: u32) -> Result<(), String> {
        if !machine.real {
            return self.simulated(machine, rounds);
        }
        let mut silence = Silence { len: 0, since: Instant::now() };
        self.until("a guest", || {
            let vm = self.api.get(&format!("/vms/{}", machine.vm))?;
            if vm["power"] == "halted" && self.has_finished(machine, &vm)? {
                return Ok(Some(()));
            }
            match vm["power"].as_str() {
                // Its start may have been undone after it was done: the daemon that did it was killed before it said
                // so.
                Some("halted") => self.started(machine).map(|_| None),
                Some("running") => {
                    let vbds = self.vbds(machine)?;
                    self.raise(&vbds)?;
                    self.give_up_on_lost_disks(machine, &vbds, &mut silence).map_err(Trouble::Wrong)?;
                    Ok(None)
                }
                _ => Ok(None),
            }
        })
    }

    /// A disk that QEMU has lost, as its VBD says, is waited for by the guest for ever, until somebody ends it.
    fn give_up_on_lost_disks(&self, machine: &Machine, vbds: &[Value], silence: &mut Silence) -> Result<(), String> {
        let len = fs::metadata(self.console(&machine.name)).map_or(0, |console| console.len());
        if len != silence.len {
            *silence = Silence { len, since: Instant::now() };
        }
        let lost = |vbd: &Value| {
            vbd["problem"]["detail"].as_str().is_some_and(|message| message.starts_with("QEMU has lost this disk"))
        };
        if !self.plan.kill || !vbds.iter().any(lost) || silence.since.elapsed() < STANDSTILL {
            return Ok(());
        }
        *silence = Silence { len, since: Instant::now() };
        self.notes.again("a guest", "a QEMU that had lost a disk was ended");
        self.places.machine(&machine.vm).map_or(Ok(()), |pid| self.places.kill(pid))
    }

    /// What a guest does, without one. A disk whose process ends is waited for, and booted from again.
    pub fn simulated(&self, machine: &Machine, rounds: u32) -> Result<(), String> {
        let mut left: BTreeMap<String, Option<u64>> = machine.vbds.iter().map(|vbd| (vbd.clone(), None)).collect();
        let mut first = Ok(());
        self.until("a simulated guest", || {
            let vbds = self.vbds(machine)?;
            self.raise(&vbds)?;
            let ready: Vec<&Value> = vbds.iter().filter(|vbd| is_ready(vbd, &left)).collect();
            if ready.is_empty() {
                return Ok(None);
            }
            let outcomes = self.run_guest(machine, &ready, rounds).map_err(Trouble::Wrong)?;
            for (vbd, outcome) in ready.iter().zip(outcomes) {
                let known = uuid(vbd)?;
                match outcome["outcome"].as_str() {
                    Some("done") => drop(left.remove(known)),
                    Some("gone") => drop(left.insert(known.to_owned(), vbd["pid"].as_u64())),
                    _ => {
                        first = Err(format!("{}, position {}: {}", machine.name, vbd["position"], outcome["why"]));
                        return Ok(Some(()));
                    }
                }
                self.notes.requests(outcome["requests"].as_u64().unwrap_or(0));
            }
            Ok(left.is_empty().then_some(()))
        })?;
        first
    }

    /// Runs `bench-guest` on disks; what came of each.
    fn run_guest(&self, machine: &Machine, vbds: &[&Value], rounds: u32) -> Result<Vec<Value>, String> {
        let disks: Vec<Value> = vbds.iter().map(|vbd| self.disk(machine, vbd)).collect();
        let job = json!({ "rounds": rounds, "blocks": super::BLOCKS, "disks": disks });
        let failed = |error: std::io::Error| format!("bench-guest: {error}");
        let mut command = Command::new(self.programs.join("bench-guest"));
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().map_err(failed)?;
        if let Some(mut stdin) = child.stdin.take() {
            stdin.write_all(job.to_string().as_bytes()).map_err(failed)?;
        }
        let output = child.wait_with_output().map_err(failed)?;
        let said = String::from_utf8_lossy(&output.stdout);
        serde_json::from_str(&said)
            .map_err(|error| format!("bench-guest: {error}: {said}{}", String::from_utf8_lossy(&output.stderr)))
    }

    fn disk(&self, machine: &Machine, vbd: &Value) -> Value {
        let position = vbd["position"].as_u64().unwrap_or(0);
        let seed =
            machine.name.bytes().fold(position + 1, |seed, byte| seed.wrapping_mul(257).wrapping_add(u64::from(byte)));
        json!({
            "socket": vbd["socket"], "pid": vbd["pid"], "seed": seed,
            "memory": self.places.room.join(format!("{}-{position}.json", machine.name)),
            "marker": machine.real.then(|| super::last_line(super::REAL_ROUNDS)),
        })
    }

    /// Its VBDs are all unplugged.
    pub fn unplug(&self, machine: &Machine) -> Result<(), String> {
        self.until("vbd-unplug", || {
            let vbds = self.vbds(machine)?;
            if vbds.iter().all(|vbd| vbd["state"] == "unplugged") {
                return Ok(Some(()));
            }
            let task = self.api.ask("POST", "/vbds/unplug", &json!({ "vm": machine.vm }))?;
            self.outcome("vbd-unplug", &task)?;
            Ok(None)
        })
    }

    /// It is no more, nor are its disks.
    pub fn destroy(&self, machine: &Machine) -> Result<(), String> {
        for vbd in &machine.vbds {
            self.gone("vbd-destroy", &format!("/vbds/{vbd}"))?;
        }
        self.gone("vm-destroy", &format!("/vms/{}", machine.vm))?;
        machine.vdis.iter().try_for_each(|vdi| self.gone("vdi-destroy", &format!("/vdis/{vdi}")))
    }

    fn gone(&self, what: &str, path: &str) -> Result<(), String> {
        self.until(what, || match self.api.ask("DELETE", path, &Value::Null) {
            Err(trouble) if trouble.is_not_found() => Ok(Some(())),
            Ok(Value::Null) => Ok(Some(())),
            Ok(task) => Ok(self.outcome(what, &task)?.map(drop)),
            Err(trouble) => Err(trouble),
        })
    }
}

/// Whether a VBD is served, by another process than the one that has gone, and is not done with.
fn is_ready(vbd: &Value, left: &BTreeMap<String, Option<u64>>) -> bool {
    let gone = vbd["uuid"].as_str().and_then(|uuid| left.get(uuid));
    vbd["state"] == "plugged" && gone.is_some_and(|gone| gone.is_none() || *gone != vbd["pid"].as_u64())
}
