//! Cancels tasks before, in and after each step, and lets QEMUs obey after the daemon has stopped waiting.
//!
//! Invariants checked: an accepted cancel wins: its task does not end as done. The reported state of a VM is what its
//! QEMU did, however late.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use testbed::daemon::api::{Trouble, uuid};
use testbed::tool;

use super::check::text;
use super::machines::Power;
use super::verbs::{NO_TASK, Request, patience};
use super::world::{Pending, PendingVerb, Vdi, World};

/// Makes a file immutable until it is dropped.
struct Sealed(PathBuf);

impl Sealed {
    fn new(path: PathBuf) -> Result<Sealed, String> {
        tool::run(Command::new("chattr").arg("+i").arg(&path)).map_err(|error| error.to_string())?;
        Ok(Sealed(path))
    }
}

impl Drop for Sealed {
    fn drop(&mut self) {
        if let Err(error) = tool::run(Command::new("chattr").arg("-i").arg(&self.0)) {
            println!("{error}");
        }
    }
}

/// Result of waiting for a task to reach a point at which it can be cancelled.
enum WaitResult {
    /// The task waits before its first step.
    Waits(Value),
    /// The task has ended or was refused.
    Missed,
}

impl World {
    /// Begins a random verb and cancels its task soon, at a random time.
    pub fn cancel_soon(&mut self) -> Result<(), String> {
        let before = self.pending.len();
        match self.random.below(4) {
            0 => self.destroy(),
            1 => self.create(),
            _ => self.copy(),
        }?;
        // The response may have been lost.
        let begun = if self.pending.len() > before { self.pending.last_mut() } else { None };
        let Some(pending) = begun.filter(|pending| pending.task.is_some()) else { return Ok(()) };
        pending.contested = true;
        let task = pending.task.clone().unwrap_or_default();
        if !self.random_is(3) {
            std::thread::sleep(Duration::from_micros(self.random.below(120_000)));
        }
        let accepted = self.cancel(&task)?;
        if let Some(pending) = self.pending.last_mut().filter(|_| accepted) {
            pending.cancelled = true;
        }
        self.settle(true)?;
        if self.random_is(2) { self.check() } else { Ok(()) }
    }

    /// Cancels a task; returns whether that was accepted.
    fn cancel(&mut self, task: &Value) -> Result<bool, String> {
        let at = uuid(task)?.to_owned();
        self.ensure_daemon()?;
        self.count("cancel");
        self.log(format!("cancel {} {at}", text(&task["verb"])));
        match self.bed.api.ask("POST", &format!("/tasks/{at}/cancel"), &json!({})) {
            Ok(_) => Ok(true),
            Err(Trouble::Gone) => self.note_daemon_gone().map(|()| false),
            // It can no longer be rolled back, or has ended.
            Err(Trouble::Refused(code, why)) if code == "state" => {
                self.log(why);
                Ok(false)
            }
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why).map(|()| false),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Destroys a VDI while its repository's inventory cannot be written, so that the task waits before its first step.
    /// It is cancelled there, or the daemon is killed; the VDI must be unchanged.
    pub fn cancel_waiting(&mut self) -> Result<(), String> {
        self.rest()?;
        let fits = |world: &World, uuid: &str, _: &Vdi| world.vbds_of(uuid).is_empty();
        let Some(vdi) = self.free_vdi(fits) else { return self.create() };
        if self.down || self.dies_at.is_some() {
            return Ok(());
        }
        let sr = self.vdi(&vdi)?.sr;
        let sr = self.srs.get(sr).ok_or("no such repository")?;
        let storage = self.bed.storages.get(sr.storage).ok_or("no such storage")?;
        let sealed = Sealed::new(storage.path.join(".tapline-inventory.jsonl"))?;
        self.trouble("seal", format!("the inventory of VDI {vdi} cannot be written"));
        let WaitResult::Waits(task) = self.begin_to_wait(&vdi)? else {
            drop(sealed);
            return self.rest();
        };
        let at = uuid(&task)?.to_owned();
        let dies = self.random_is(2);
        match dies {
            true => self.kill_daemon()?,
            false if !self.cancel(&task)? => return Err(format!("a task that waits cannot be cancelled: {task}")),
            false => {}
        }
        if self.random_is(2) {
            std::thread::sleep(Duration::from_millis(self.random.below(200)));
        }
        drop(sealed);
        self.log("the inventory can be written");
        self.ensure_daemon()?;
        let begun = Instant::now();
        let ended = loop {
            let now = self.get(&format!("/tasks/{at}?wait=2"))?;
            match now["state"].as_str() {
                Some("done" | "failed" | "cancelled") => break now,
                _ if begun.elapsed() > patience() => return Err(format!("stuck: {now}")),
                _ => {}
            }
        };
        let right = ended["state"] == if dies { "failed" } else { "cancelled" };
        match right && self.get_vdi(&vdi)?.is_some() {
            true => self.check(),
            false => Err(format!("a destroy that had not begun (the daemon died: {dies}) was not undone: {ended}")),
        }
    }

    /// Requests the end of a VDI with unsaved changes of the inventory, and waits until the task waits.
    fn begin_to_wait(&mut self, vdi: &str) -> Result<WaitResult, String> {
        let description = self.name();
        let changed = self.bed.api.ask("PATCH", &format!("/vdis/{vdi}"), &json!({ "description": description }));
        changed.map_err(|trouble| trouble.to_string())?;
        self.vdi(vdi)?.description = description;
        let request = Request::delete(format!("/vdis/{vdi}"));
        let task = match self.request_task(&request, None)? {
            Ok(task) => task,
            Err(Trouble::Refused(code, why)) => {
                return self.excuse(&PendingVerb::Destroy(vdi.to_owned()), &code, &why).map(|()| WaitResult::Missed);
            }
            Err(trouble) => return Err(trouble.to_string()),
        };
        let begun = Instant::now();
        loop {
            let now = self.get(&format!("/tasks/{}", uuid(&task)?))?;
            match now["state"].as_str() {
                Some("pending") if now["problem"].is_object() => return Ok(WaitResult::Waits(now)),
                Some("pending" | "running") if begun.elapsed() < patience() => {}
                _ => return Err(format!("a destroy does not wait for its inventory: {now}")),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops a QEMU for longer than the daemon waits for it; when it continues, it executes what it was sent.
    pub fn obey_late(&mut self) -> Result<(), String> {
        self.rest()?;
        let Some(vm) = self.free_vm(|_, _, vm| vm.power != Power::Halted) else {
            self.make_machine()?;
            self.start_some()?;
            return self.settle(true);
        };
        let (Some(pid), false) = (self.bed.places.machine(&vm), self.down) else { return Ok(()) };
        let before = self.vm(&vm)?.power;
        let (verb, power) = match before {
            Power::Paused => ("resume", Power::Running),
            _ if self.random_is(3) => ("snapshot", before),
            _ => ("pause", Power::Paused),
        };
        if verb == "snapshot" && !self.has_room_for(super::machines::DISKS_MAX) {
            return Ok(());
        }
        self.trouble("late qemu", format!("stop {pid}, the QEMU of VM {vm}, until a {verb} has not been answered"));
        self.stopped.push(pid);
        self.bed.places.signal(pid, Signal::STOP)?;
        let name = self.name();
        let body = if verb == "snapshot" { json!({ "name": name }) } else { json!({}) };
        let request = Request::post(format!("/vms/{vm}/{verb}"), body);
        let begun = match self.request_task(&request, None)? {
            Ok(task) => Some(task),
            Err(Trouble::Refused(code, why)) => {
                self.excuse(&PendingVerb::Power(vm.clone(), power), &code, &why)?;
                None
            }
            Err(trouble) => return Err(trouble.to_string()),
        };
        if let Some(task) = &begun {
            self.wait_until_given_up(task)?;
        }
        self.continue_stopped()?;
        if let (Some(task), "snapshot") = (begun.clone(), verb) {
            let holds = self.held_by(&vm);
            let pending = Pending::new(PendingVerb::Keep(vm.clone(), name), holds, None);
            self.pending.push(Pending { task: Some(task), ..pending });
            self.settle(true)?;
        }
        let power = if begun.is_some() { power } else { before };
        let since = Instant::now();
        while self.power_of(&vm)? != power {
            // A QEMU whose disk died meanwhile may exit when it continues.
            if self.power_of(&vm)? == Power::Halted && self.bed.places.machine(&vm).is_none() {
                self.log(format!("the QEMU of VM {vm} has ended itself"));
                self.vm(&vm)?.killed = true;
                self.follow_the_killed()?;
                return self.check();
            }
            if since.elapsed() > patience() / 4 {
                return Err(format!("the QEMU of VM {vm} has obeyed a {verb} late, and the VM is not {power:?}"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.vm(&vm)?.power = power;
        self.check()
    }

    /// Waits until a task has failed, or waits to retry.
    fn wait_until_given_up(&mut self, task: &Value) -> Result<(), String> {
        let (at, begun) = (uuid(task)?.to_owned(), Instant::now());
        loop {
            let now = self.get(&format!("/tasks/{at}?wait=2"))?;
            let over = now["state"] == "failed" || now["state"] == "done" || now["problem"].is_object();
            if over || begun.elapsed() > patience() {
                self.log(format!("given up: {} {}", now["state"], now["problem"]));
                return if over { Ok(()) } else { Err(format!("stuck: {now}")) };
            }
        }
    }
}
