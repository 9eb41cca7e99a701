//! Verbs: how they are begun, and what has become of them.

use std::time::{Duration, Instant};

use serde_json::Value;
use testbed::daemon::api::{Ended, Trouble, uuid};

use super::machines::Power;
use super::world::{Pending, Vdi, Verb, World};

/// So long a trouble lasts that something waits for.
const ENOUGH: Duration = Duration::from_secs(3);

/// Anything comes to its end before this, on a loaded machine, with pauses between the lives of a disk that dies often.
/// Who seeks a planted fault need not be as sure, but a guest has 60 s to power off.
pub fn patience() -> Duration {
    Duration::from_secs(if super::planted::is_sought() { 75 } else { 240 })
}

/// What fails without a task has no verb of its own.
pub const NO_TASK: Verb = Verb::Merge;

/// What was asked for, as the API takes it.
#[derive(Clone, Debug)]
pub struct Asked {
    /// POST or DELETE.
    pub method: &'static str,
    /// The path.
    pub path: String,
    /// The body.
    pub body: Value,
}

impl Asked {
    /// A POST.
    pub fn post(path: impl Into<String>, body: Value) -> Asked {
        Asked { method: "POST", path: path.into(), body }
    }

    /// A DELETE.
    pub fn delete(path: impl Into<String>) -> Asked {
        Asked { method: "DELETE", path: path.into(), body: Value::Null }
    }
}

impl World {
    /// Starts the daemon if it does not run.
    pub fn must_run(&mut self) -> Result<(), String> {
        if !self.down {
            return Ok(());
        }
        if self.bed.is_full() {
            // A catalogue that has no space may keep a daemon from starting.
            self.relieve()?;
        }
        if !self.random_is(4) {
            // It asks all disks, and waits for those that stand still.
            self.let_go_on()?;
        }
        self.tell("start the daemon");
        self.bed.daemon()?.restart()?;
        (self.down, self.dies_at) = (false, None);
        Ok(())
    }

    /// The daemon did not answer. It may have died where it was to; else by itself, which it must not.
    pub fn has_gone(&mut self) -> Result<(), String> {
        if self.dies_at.is_none() && !self.down && !self.bed.is_full() {
            return Err("the daemon has ended by itself, or ends connections".into());
        }
        self.tell(format!("the daemon is gone: {:?}", self.dies_at));
        self.counts.kills += 1;
        self.bed.daemon()?.kill()?;
        (self.down, self.troubled) = (true, true);
        Ok(())
    }

    /// Something waits since then: long enough for a trouble to have lasted.
    pub fn waits(&mut self, begun: Instant) -> Result<(), String> {
        let stopped = !self.stopped.is_empty() || self.vbds.values().any(|vbd| vbd.stopped.is_some());
        let troubles = self.bed.is_full() || stopped;
        if troubles && begun.elapsed() > ENOUGH { self.calm() } else { Ok(()) }
    }

    /// Asks what changes nothing.
    pub fn get(&mut self, path: &str) -> Result<Value, String> {
        let begun = Instant::now();
        loop {
            self.must_run()?;
            match self.bed.api.ask("GET", path, &Value::Null) {
                Ok(value) => return Ok(value),
                Err(Trouble::Gone) => self.has_gone()?,
                Err(Trouble::Refused(code, why)) => {
                    if !["overloaded", "timeout"].contains(&code.as_str()) && !self.bed.is_full()
                        || begun.elapsed() > patience()
                    {
                        return Err(why);
                    }
                    if begun.elapsed() > ENOUGH {
                        self.relieve()?;
                    }
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(trouble) => return Err(trouble.to_string()),
            }
        }
    }

    /// A list.
    pub fn list(&mut self, path: &str) -> Result<Vec<Value>, String> {
        match self.get(path)? {
            Value::Array(list) => Ok(list),
            other => Err(format!("GET {path}: {other} is no list")),
        }
    }

    /// Asks for something that is no task. None if it was refused with an excuse, or the answer was lost.
    pub fn once(&mut self, asked: &Asked) -> Result<Option<Value>, String> {
        let Asked { method, path, body } = asked;
        self.must_run()?;
        self.tell(format!("{method} {path} {body}"));
        match self.bed.api.ask(method, path, body) {
            Ok(value) => Ok(Some(value)),
            Err(Trouble::Gone) => self.has_gone().map(|()| None),
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why).map(|()| None),
            Err(trouble) => Err(trouble.to_string()),
        }
    }

    /// Begins a verb that is a task.
    pub fn begin(
        &mut self,
        verb: Verb,
        holds: Vec<String>,
        source: Option<String>,
        asked: &Asked,
    ) -> Result<(), String> {
        self.begin_as(Pending::new(verb, holds, source), asked)
    }

    /// The same; one that is contested may be refused.
    pub fn begin_as(&mut self, pending: Pending, asked: &Asked) -> Result<(), String> {
        let key = self.random_is(4).then(|| self.key());
        match self.ask_for(asked, key.as_deref())? {
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

    /// Something was refused or has failed: whether that may be.
    pub fn excuse(&mut self, verb: &Verb, code: &str, why: &str) -> Result<(), String> {
        self.refused(verb, code, why);
        let passes = ["busy", "overloaded", "no-space"].contains(&code);
        match passes || self.troubled && code != "internal" {
            true => Ok(()),
            false => Err(format!("refused without a reason that the model knows: {why}")),
        }
    }

    /// Something was refused or has failed.
    pub fn refused(&mut self, verb: &Verb, code: &str, why: &str) {
        self.tell(format!("refused or failed: {why}"));
        let what = format!("{} {code}", word(verb));
        *self.counts.refused.entry(what).or_default() += 1;
    }

    /// Looks what has become of verbs that are under way; with `wait` until all are over.
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
            self.waits(begun)?;
        }
        Ok(())
    }

    /// How a verb has ended, if it has.
    fn ended(&mut self, pending: &Pending, wait: bool) -> Result<Option<Ended>, String> {
        let Some(task) = &pending.task else {
            // Its answer was lost with the daemon; what the next one makes of it is there when nothing is under way.
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

    /// The model follows what a verb has done.
    fn resolve(&mut self, pending: &Pending, ended: &Ended) -> Result<(), String> {
        self.tell(format!("{} has ended: {ended:?}", word(&pending.verb)));
        self.count(word(&pending.verb));
        let lost = matches!(ended, Ended::Forgotten);
        let done = matches!(ended, Ended::Done(_));
        match &pending.verb {
            Verb::Make(vdi) => {
                let found = match ended {
                    Ended::Done(result) => Some(uuid(result)?.to_owned()),
                    Ended::Failed(_) => None,
                    Ended::Forgotten => self.by_name(&vdi.name)?,
                };
                if let Some(uuid) = found {
                    self.vdis.insert(uuid, vdi.clone());
                }
            }
            Verb::Destroy(vdi) => {
                if done || lost && self.get_vdi(vdi)?.is_none() {
                    self.vdis.remove(vdi);
                    self.vbds.retain(|_, vbd| vbd.vdi != *vdi);
                }
            }
            Verb::Resize(vdi, _) if !self.vdis.contains_key(vdi) => {}
            Verb::Resize(vdi, size) => self.resized(vdi, *size, done)?,
            Verb::Revert(vdi, snapshot) => self.reverted(vdi, snapshot, done, lost)?,
            Verb::Plug(vbd) | Verb::Unplug(vbd) if lost || pending.contested => self.ask_whether_plugged(vbd)?,
            Verb::Plug(vbd) => {
                if done {
                    self.vbd(vbd)?.plugged = true;
                } else {
                    self.ask_whether_plugged(vbd)?;
                }
            }
            Verb::Unplug(vbd) => {
                if done {
                    let vbd = self.vbd(vbd)?;
                    (vbd.plugged, vbd.client, vbd.stopped) = (false, None, None);
                } else {
                    self.ask_whether_plugged(vbd)?;
                }
            }
            Verb::Power(vm, power) => self.power_changed(vm, *power, done, pending.contested)?,
            Verb::Many(vbds) => {
                for vbd in vbds {
                    self.ask_whether_plugged(vbd)?;
                }
            }
            Verb::Upgrade => {
                if let Ended::Done(result) = ended {
                    if result["pid"] == result["replaced"] {
                        return Err(format!("a disk was upgraded, and its process is the same: {result}"));
                    }
                }
            }
            Verb::Drain => self.drained(done)?,
            Verb::Keep(vm, name) => self.kept(vm, name, ended)?,
            Verb::RevertAll(pairs) => {
                for (vdi, snapshot) in pairs {
                    self.reverted(vdi, snapshot, done, lost)?;
                }
            }
            Verb::Forget(vm, moment) => self.moment_destroyed(vm, moment, done)?,
            Verb::CloneVm(name, disks) => self.cloned(name, disks, ended)?,
            Verb::Merge | Verb::Export => {}
        }
        Ok(())
    }

    /// What has grown stays so, though the verb may have failed behind that; a disk that had no space may grow later.
    fn resized(&mut self, vdi: &str, size: u64, done: bool) -> Result<(), String> {
        let grown = done || self.get_vdi(vdi)?.is_some_and(|shown| shown["size"] == size);
        match grown {
            // It never shrinks: another resize may have gone further.
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
            // Its size may tell, its content will.
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

    /// A VDI as the daemon shows it.
    pub fn get_vdi(&mut self, vdi: &str) -> Result<Option<Value>, String> {
        let found = self.list("/vdis")?;
        Ok(found.into_iter().find(|other| other["uuid"] == *vdi))
    }

    /// Asks whether a VBD is plugged, where that may be or not; waits until it is one of the two.
    pub fn ask_whether_plugged(&mut self, vbd: &str) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            let now = self.get(&format!("/vbds/{vbd}"))?;
            let plugged = match now["state"].as_str() {
                Some("plugged" | "restarting") => true,
                Some("unplugged") => false,
                _ if begun.elapsed() < patience() => {
                    self.waits(begun)?;
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

/// What a verb is called.
pub fn word(verb: &Verb) -> &'static str {
    match verb {
        Verb::Make(Vdi { snapshot_of: Some(_), .. }) => "vdi-snapshot",
        Verb::Make(_) => "vdi-make",
        Verb::Export => "vdi-export",
        Verb::Resize(..) => "vdi-resize",
        Verb::Revert(..) => "vdi-revert",
        Verb::Destroy(_) => "vdi-destroy",
        Verb::Merge => "vdi-merge",
        Verb::Plug(_) => "vbd-plug",
        Verb::Unplug(_) => "vbd-unplug",
        Verb::Many(_) => "vbds",
        Verb::Upgrade => "vbd-upgrade",
        Verb::Drain => "host-drain",
        Verb::Keep(..) => "vm-snapshot",
        Verb::RevertAll(_) => "vm-revert",
        Verb::Forget(..) => "vm-snapshot-destroy",
        Verb::CloneVm(..) => "vm-clone",
        Verb::Power(_, Power::Halted) => "vm-shutdown",
        Verb::Power(_, Power::Running) => "vm-run",
        Verb::Power(_, Power::Paused) => "vm-pause",
    }
}
