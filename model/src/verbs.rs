//! Begins verbs and determines their results.

use std::time::{Duration, Instant};

use serde_json::Value;
use testbed::daemon::api::{Ended, Trouble, uuid};

use super::machines::Power;
use super::world::{Pending, PendingVerb, Vdi, World};

/// Maximum duration of a fault that a verb waits for.
const FAULT_MAX: Duration = Duration::from_secs(3);

/// Timeout of everything: enough for a loaded machine and for the delays between restarts of a disk that dies often. It
/// is shorter in a search for planted faults, but a guest has 60 s to power off.
pub fn patience() -> Duration {
    Duration::from_secs(if super::planted::is_searching() { 75 } else { 240 })
}

/// Stands for requests without a task, which have no verb of their own.
pub const NO_TASK: PendingVerb = PendingVerb::Merge;

/// A request of the API.
#[derive(Clone, Debug)]
pub struct Request {
    /// The method: POST or DELETE.
    pub method: &'static str,
    /// The path of the request.
    pub path: String,
    /// The body of the request.
    pub body: Value,
}

impl Request {
    /// A POST request.
    pub fn post(path: impl Into<String>, body: Value) -> Request {
        Request { method: "POST", path: path.into(), body }
    }

    /// A DELETE request.
    pub fn delete(path: impl Into<String>) -> Request {
        Request { method: "DELETE", path: path.into(), body: Value::Null }
    }
}

impl World {
    /// Starts the daemon unless it is running.
    pub fn ensure_daemon(&mut self) -> Result<(), String> {
        if !self.down {
            return Ok(());
        }
        if self.bed.is_full() {
            // A full file system of the catalogue may keep the daemon from starting.
            self.relieve()?;
        }
        if !self.random_is(4) {
            // It queries all disks and would wait for those that are stopped.
            self.continue_stopped()?;
        }
        self.log("start the daemon");
        self.bed.daemon()?.restart()?;
        (self.down, self.dies_at) = (false, None);
        Ok(())
    }

    /// Records that the daemon did not respond. It must have been killed or made to die.
    pub fn note_daemon_gone(&mut self) -> Result<(), String> {
        if self.dies_at.is_none() && !self.down && !self.bed.is_full() {
            return Err("the daemon has ended by itself, or ends connections".into());
        }
        self.log(format!("the daemon is gone: {:?}", self.dies_at));
        self.counts.kills += 1;
        self.bed.daemon()?.kill()?;
        (self.down, self.troubled) = (true, true);
        Ok(())
    }

    /// Waits a moment for something in progress since `begun`; ends the faults if it takes too long.
    pub fn wait_a_moment(&mut self, begun: Instant) -> Result<(), String> {
        let stopped = !self.stopped.is_empty() || self.vbds.values().any(|vbd| vbd.stopped.is_some());
        let troubles = self.bed.is_full() || stopped;
        if troubles && begun.elapsed() > FAULT_MAX { self.calm() } else { Ok(()) }
    }

    /// Sends a request that changes nothing.
    pub fn get(&mut self, path: &str) -> Result<Value, String> {
        let begun = Instant::now();
        loop {
            self.ensure_daemon()?;
            match self.bed.api.ask("GET", path, &Value::Null) {
                Ok(value) => return Ok(value),
                Err(Trouble::Gone) => self.note_daemon_gone()?,
                Err(Trouble::Refused(code, why)) => {
                    if !["overloaded", "timeout"].contains(&code.as_str()) && !self.bed.is_full()
                        || begun.elapsed() > patience()
                    {
                        return Err(why);
                    }
                    if begun.elapsed() > FAULT_MAX {
                        self.relieve()?;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(trouble) => return Err(trouble.to_string()),
            }
        }
    }

    /// Requests a list.
    pub fn list(&mut self, path: &str) -> Result<Vec<Value>, String> {
        match self.get(path)? {
            Value::Array(list) => Ok(list),
            other => Err(format!("GET {path}: {other} is no list")),
        }
    }

    /// Sends a request without a task. `None` if it was refused with an excuse, or the response was lost.
    pub fn once(&mut self, request: &Request) -> Result<Option<Value>, String> {
        let Request { method, path, body } = request;
        self.ensure_daemon()?;
        self.log(format!("{method} {path} {body}"));
        match self.bed.api.ask(method, path, body) {
            Ok(value) => Ok(Some(value)),
            Err(Trouble::Gone) => self.note_daemon_gone().map(|()| None),
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why).map(|()| None),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Begins a verb with a task.
    pub fn begin(
        &mut self,
        verb: PendingVerb,
        holds: Vec<String>,
        source: Option<String>,
        request: &Request,
    ) -> Result<(), String> {
        self.begin_as(Pending::new(verb, holds, source), request)
    }

    /// Begins a prepared verb; a contested one may be refused.
    pub fn begin_as(&mut self, pending: Pending, request: &Request) -> Result<(), String> {
        let key = self.random_is(4).then(|| self.key());
        match self.request_task(request, key.as_deref())? {
            Ok(task) => self.pending.push(Pending { task: Some(task), ..pending }),
            Err(Trouble::Gone) => self.pending.push(pending),
            Err(Trouble::Refused(code, why)) if pending.contested && code != "internal" => {
                self.refused(&pending.verb, &code, &why);
            }
            Err(Trouble::Refused(code, why)) => return self.excuse(&pending.verb, &code, &why),
            Err(trouble) => return Err(trouble.to_string()),
        }
        Ok(())
    }

    /// Checks whether a refusal or failure is allowed, and records it.
    pub fn excuse(&mut self, verb: &PendingVerb, code: &str, why: &str) -> Result<(), String> {
        self.refused(verb, code, why);
        let passes = ["busy", "overloaded", "no-space"].contains(&code);
        match passes || self.troubled && code != "internal" {
            true => Ok(()),
            false => Err(format!("refused without a reason that the model knows: {why}")),
        }
    }

    /// Counts a refusal or failure.
    pub fn refused(&mut self, verb: &PendingVerb, code: &str, why: &str) {
        self.log(format!("refused or failed: {why}"));
        let what = format!("{} {code}", word(verb));
        *self.counts.refused.entry(what).or_default() += 1;
    }

    /// Updates the model with verbs that have ended; with `wait`, waits for all of them.
    pub fn settle(&mut self, wait: bool) -> Result<(), String> {
        let begun = Instant::now();
        let mut open = std::mem::take(&mut self.pending);
        while !open.is_empty() {
            let mut left = Vec::new();
            for pending in open {
                let ended = self.ended(&pending, wait)?;
                match ended {
                    Some(ended) => self.resolve(&pending, &ended)?,
                    None => left.push(pending),
                }
            }
            if !wait {
                self.pending.extend(left);
                break;
            }
            if begun.elapsed() > patience() {
                return Err(format!("stuck, these do not come to an end: {left:?}"));
            }
            open = left;
            self.wait_a_moment(begun)?;
        }
        Ok(())
    }

    /// The result of a verb if it has ended.
    fn ended(&mut self, pending: &Pending, wait: bool) -> Result<Option<Ended>, String> {
        let Some(task) = &pending.task else {
            // Its response was lost with the daemon; the next daemon's result is final when no task is open.
            let open = self.list("/tasks?open=true")?;
            return Ok(open.is_empty().then_some(Ended::Forgotten));
        };
        let path = format!("/tasks/{}{}", uuid(task)?, if wait { "?wait=2" } else { "" });
        let now = self.get(&path)?;
        Ok(match now["state"].as_str() {
            Some("done") if pending.cancelled => return Err(format!("a cancel was accepted, and it is done: {now}")),
            Some("done") => Some(Ended::Done(now["result"].clone())),
            Some("failed" | "cancelled") => {
                let code = now["problem"]["code"].as_str().unwrap_or("no code").to_owned();
                let why = format!("{}: {}", now["verb"], now["problem"]);
                match pending.contested && code != "internal" {
                    true => self.refused(&pending.verb, &code, &why),
                    false => self.excuse(&pending.verb, &code, &why)?,
                }
                Some(Ended::Failed(code))
            }
            _ => None,
        })
    }

    /// Updates the model with the result of a verb.
    fn resolve(&mut self, pending: &Pending, ended: &Ended) -> Result<(), String> {
        self.log(format!("{} has ended: {ended:?}", word(&pending.verb)));
        self.count(word(&pending.verb));
        let lost = matches!(ended, Ended::Forgotten);
        let done = matches!(ended, Ended::Done(_));
        match &pending.verb {
            PendingVerb::Make(vdi) => {
                let found = match ended {
                    Ended::Done(result) => Some(uuid(result)?.to_owned()),
                    Ended::Failed(_) => None,
                    Ended::Forgotten => self.by_name(&vdi.name)?,
                };
                if let Some(uuid) = found {
                    self.vdis.insert(uuid, vdi.clone());
                }
            }
            PendingVerb::Destroy(vdi) => {
                if done || lost && self.get_vdi(vdi)?.is_none() {
                    self.vdis.remove(vdi);
                    self.vbds.retain(|_, vbd| vbd.vdi != *vdi);
                }
            }
            PendingVerb::Resize(vdi, _) if !self.vdis.contains_key(vdi) => {}
            PendingVerb::Resize(vdi, size) => self.resized(vdi, *size, done)?,
            PendingVerb::Revert(vdi, snapshot) => self.reverted(vdi, snapshot, done, lost)?,
            PendingVerb::Plug(vbd) | PendingVerb::Unplug(vbd) if lost || pending.contested => {
                self.settle_plugged(vbd)?
            }
            PendingVerb::Plug(vbd) => {
                if done {
                    self.vbd(vbd)?.plugged = true;
                } else {
                    self.settle_plugged(vbd)?;
                }
            }
            PendingVerb::Unplug(vbd) => {
                if done {
                    let vbd = self.vbd(vbd)?;
                    (vbd.plugged, vbd.client, vbd.stopped) = (false, None, None);
                } else {
                    self.settle_plugged(vbd)?;
                }
            }
            PendingVerb::Power(vm, power) => self.power_changed(vm, *power, done, pending.contested)?,
            PendingVerb::Many(vbds) => {
                for vbd in vbds {
                    self.settle_plugged(vbd)?;
                }
            }
            PendingVerb::Upgrade => {
                if let Ended::Done(result) = ended {
                    if result["pid"] == result["replaced"] {
                        return Err(format!("a disk was upgraded, and its process is the same: {result}"));
                    }
                }
            }
            PendingVerb::Drain => self.drained(done)?,
            PendingVerb::Keep(vm, name) => self.vm_snapshot_ended(vm, name, ended)?,
            PendingVerb::RevertAll(pairs) => {
                for (vdi, snapshot) in pairs {
                    self.reverted(vdi, snapshot, done, lost)?;
                }
            }
            PendingVerb::Forget(vm, moment) => self.vm_snapshot_destroyed(vm, moment, done)?,
            PendingVerb::CloneVm(name, disks) => self.vm_clone_ended(name, disks, ended)?,
            PendingVerb::Merge | PendingVerb::Export => {}
        }
        Ok(())
    }

    /// A disk that has grown stays so even if the verb failed later; without space it may grow later.
    fn resized(&mut self, vdi: &str, size: u64, done: bool) -> Result<(), String> {
        let grown = done || self.get_vdi(vdi)?.is_some_and(|shown| shown["size"] == size);
        match grown {
            // It never shrinks: another resize may have grown it further.
            true => {
                let now = self.vdi(vdi)?;
                now.sizes = vec![size.max(now.least())];
            }
            false => self.vdi(vdi)?.sizes.push(size),
        }
        Ok(())
    }

    fn reverted(&mut self, vdi: &str, snapshot: &str, done: bool, lost: bool) -> Result<(), String> {
        let kept = self.vdi(snapshot)?.clone();
        let shown = if lost { self.get_vdi(vdi)?.and_then(|vdi| vdi["size"].as_u64()) } else { None };
        let vdi = self.vdi(vdi)?;
        if done {
            (vdi.content, vdi.sizes) = (kept.content, kept.sizes);
        } else if lost {
            // Its size may show whether the revert was done, its content will.
            let size = shown.ok_or("a VDI that was to be reverted is not there")?;
            vdi.content.or(&kept.content);
            if kept.sizes.contains(&size) {
                vdi.sizes = vec![size];
            }
        }
        Ok(())
    }

    fn by_name(&mut self, name: &str) -> Result<Option<String>, String> {
        let found = self.list(&format!("/vdis?match={name}"))?;
        let named = found.iter().find(|vdi| vdi["name"] == name);
        Ok(named.map(|vdi| uuid(vdi).map(str::to_owned)).transpose()?)
    }

    /// A VDI according to the daemon.
    pub fn get_vdi(&mut self, vdi: &str) -> Result<Option<Value>, String> {
        let found = self.list("/vdis")?;
        Ok(found.into_iter().find(|other| other["uuid"] == *vdi))
    }

    /// Determines whether a VBD is plugged, if both are possible; waits until it is settled.
    pub fn settle_plugged(&mut self, vbd: &str) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let now = self.get(&format!("/vbds/{vbd}"))?;
            let plugged = match now["state"].as_str() {
                Some("plugged" | "restarting") => true,
                Some("unplugged") => false,
                _ if begun.elapsed() < patience() => {
                    self.wait_a_moment(begun)?;
                    std::thread::sleep(Duration::from_millis(50));
                    continue;
                }
                _ => return Err(format!("stuck: {now}")),
            };
            let vbd = self.vbd(vbd)?;
            vbd.plugged = plugged;
            if !plugged {
                (vbd.client, vbd.stopped) = (None, None);
            }
            return Ok(());
        }
    }
}

/// The name of a verb.
pub fn word(verb: &PendingVerb) -> &'static str {
    match verb {
        PendingVerb::Make(Vdi { snapshot_of: Some(_), .. }) => "vdi-snapshot",
        PendingVerb::Make(_) => "vdi-make",
        PendingVerb::Export => "vdi-export",
        PendingVerb::Resize(..) => "vdi-resize",
        PendingVerb::Revert(..) => "vdi-revert",
        PendingVerb::Destroy(_) => "vdi-destroy",
        PendingVerb::Merge => "vdi-merge",
        PendingVerb::Plug(_) => "vbd-plug",
        PendingVerb::Unplug(_) => "vbd-unplug",
        PendingVerb::Many(_) => "vbds",
        PendingVerb::Upgrade => "vbd-upgrade",
        PendingVerb::Drain => "host-drain",
        PendingVerb::Keep(..) => "vm-snapshot",
        PendingVerb::RevertAll(_) => "vm-revert",
        PendingVerb::Forget(..) => "vm-snapshot-destroy",
        PendingVerb::CloneVm(..) => "vm-clone",
        PendingVerb::Power(_, Power::Halted) => "vm-shutdown",
        PendingVerb::Power(_, Power::Running) => "vm-run",
        PendingVerb::Power(_, Power::Paused) => "vm-pause",
    }
}
