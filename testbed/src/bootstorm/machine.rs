//! The life of a VM: its disks are cloned from the golden image, plugged, used, unplugged and destroyed.
//!
//! Each part continues until its goal is reached, whatever is killed meanwhile: failed requests are noted and repeated.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::{Value, json};

use super::Storm;
use crate::daemon::api::{Ended, REST, Trouble, nothing, uuid};

/// Timeout of a part of a VM's life: guests are emulated, and there are many.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(1200);

/// Time after which a silent guest counts as hung: it prints a line after each write.
const STANDSTILL: std::time::Duration = std::time::Duration::from_secs(120);

/// Memory in bytes of a VM without a real guest.
const SMALL: u64 = 64 << 20;

/// A VM of the storm.
#[derive(Debug)]
pub struct Machine {
    pub name: String,
    /// Whether QEMU runs it.
    pub real: bool,
    pub vm: String,
    /// The VBDs, by position.
    pub vbds: Vec<String>,
    pub vdis: Vec<String>,
}

/// The length of a guest's console output, and since when it has not grown.
struct Silence {
    len: u64,
    since: Instant,
}

impl Storm<'_> {
    /// Repeats a step until it yields a result or cannot succeed.
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

    /// The result of a task if it succeeded.
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

    /// Creates an object. If the response was lost, the object is found by `find`.
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

    /// Finds the object with this name.
    fn named(&self, path: &str) -> Result<Option<String>, Trouble> {
        let found = self.api.list(path)?;
        match &found[..] {
            [] => Ok(None),
            [one] => uuid(one).map(|uuid| Some(uuid.to_owned())),
            several => {
                Err(Trouble::Wrong(format!("{path}: one was requested at a time, and there are {}", several.len())))
            }
        }
    }

    /// Clones the golden image.
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

    /// Creates a VM and its disks.
    pub fn create(&self, number: usize) -> Result<Machine, String> {
        let name = format!("storm{number:03}");
        let real = number < self.plan.real();
        let vm =
            self.made("vm-create", "/vms", &self.hardware(&name, real), || self.named(&format!("/vms?match={name}")))?;
        let (mut vdis, mut vbds) = (Vec::new(), Vec::new());
        for position in 0..self.plan.disks() {
            let vdi = self.cloned(&format!("{name}-{position}"))?;
            let request = json!({ "vm": vm, "vdi": vdi, "position": position });
            let find = || {
                let of_vm = self.api.list(&format!("/vbds?vm={vm}"))?;
                let found = of_vm.iter().find(|vbd| vbd["position"] == position);
                found.map(|vbd| uuid(vbd).map(str::to_owned)).transpose()
            };
            vbds.push(self.made("vbd-create", "/vbds", &request, find)?);
            vdis.push(vdi);
        }
        Ok(Machine { name, real, vm, vbds, vdis })
    }

    fn hardware(&self, name: &str, real: bool) -> Value {
        let mut request = json!({ "name": name, "driver": "qemu", "memory": SMALL, "vcpus": 1 });
        if let (true, Some(boot)) = (real, &self.boot) {
            request["memory"] = json!(u64::from(crate::guest::MEMORY_MIB) << 20);
            request["boot"] = boot.clone();
            request["platform"] = json!({ "hvm_serial": format!("file:{}", self.console(name).display()) });
        }
        request
    }

    /// The file of a guest's console output.
    fn console(&self, name: &str) -> PathBuf {
        self.places.room.join(format!("{name}.console"))
    }

    /// Plugs all VBDs of a machine, without starting it.
    pub fn settle(&self, machine: &Machine) -> Result<(), String> {
        self.until("vbd-plug", || self.plugged(machine))
    }

    /// Plugs all VBDs of a machine and starts it if it is real.
    pub fn plug(&self, machine: &Machine) -> Result<(), String> {
        if machine.real { self.until("vm-start", || self.started(machine)) } else { self.settle(machine) }
    }

    /// Plugs the VBDs of a machine that are not plugged.
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
        self.plug_again(&vbds)?;
        Ok(None)
    }

    /// Plugs disks that have crashed too often again, as the daemon advises.
    fn plug_again(&self, vbds: &[Value]) -> Result<(), Trouble> {
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

    /// Starts a machine unless it runs or has finished its work.
    fn started(&self, machine: &Machine) -> Result<Option<()>, Trouble> {
        let vm = self.api.get(&format!("/vms/{}", machine.vm))?;
        match vm["power"].as_str() {
            Some("running") => Ok(Some(())),
            Some("halted") if self.has_finished(machine, &vm)? => Ok(Some(())),
            Some("halted") => {
                // The output of an earlier start that was rolled back must not count for this one.
                fs::remove_file(self.console(&machine.name)).ok();
                let task = self.api.ask("POST", &format!("/vms/{}/start", machine.vm), &nothing())?;
                self.outcome("vm-start", &task)?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Whether the guest of a halted machine has reported that it is done; an error if it failed.
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
            // It was ended because it had lost a disk. Its disks are unplugged then, and the VM starts again.
            self.notes.again("a guest", "a QEMU whose disks were killed has ended by itself");
            return Ok(false);
        }
        // A start that was rolled back with its daemon is not the guest's fault.
        let undone = message.contains("was not started");
        if said("init=").is_some() && !undone {
            return Err(Trouble::Wrong(format!("the guest of {} broke off: {vm}\n{console}", machine.name)));
        }
        Ok(false)
    }

    /// Waits until the guest has finished its work.
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
                // The start may have been rolled back after it succeeded, because the daemon was killed before it
                // recorded that.
                Some("halted") => self.started(machine).map(|_| None),
                Some("running") => {
                    let vbds = self.vbds(machine)?;
                    self.plug_again(&vbds)?;
                    self.give_up_on_lost_disks(machine, &vbds, &mut silence).map_err(Trouble::Wrong)?;
                    Ok(None)
                }
                _ => Ok(None),
            }
        })
    }

    /// Ends a machine whose QEMU has lost a disk according to its VBD, because the guest would wait forever.
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

    /// Does a guest's work without a VM. If the process of a disk ends, its successor is waited for and used again.
    pub fn simulated(&self, machine: &Machine, rounds: u32) -> Result<(), String> {
        let mut left: BTreeMap<String, Option<u64>> = machine.vbds.iter().map(|vbd| (vbd.clone(), None)).collect();
        let mut first = Ok(());
        self.until("a simulated guest", || {
            let vbds = self.vbds(machine)?;
            self.plug_again(&vbds)?;
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

    /// Runs `bench-guest` on disks; returns the result of each.
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

    /// Unplugs all VBDs of a machine.
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

    /// Destroys a machine and its disks.
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

/// Whether a VBD is served by a process other than the one that has ended, and is not finished.
fn is_ready(vbd: &Value, left: &BTreeMap<String, Option<u64>>) -> bool {
    let gone = vbd["uuid"].as_str().and_then(|uuid| left.get(uuid));
    vbd["state"] == "plugged" && gone.is_some_and(|gone| gone.is_none() || *gone != vbd["pid"].as_u64())
}
