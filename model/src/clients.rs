//! Several clients: who asks again with a key, who does not wait for an answer, who asks at the same time as others
//! about the same, and who cancels what another has asked for.

use std::collections::BTreeMap;
use std::thread;

use serde_json::{Value, json};
use testbed::daemon::api::{Trouble, uuid};

use super::check::text;
use super::verbs::{Asked, NO_TASK};
use super::world::{Pending, Vbd, Vdi, Verb, World};

/// What rivals ask for.
const RIVALS: &[Rival] =
    &[Rival::Snapshot, Rival::Clone, Rival::Resize, Rival::Destroy, Rival::Copy, Rival::Plug, Rival::Unplug];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rival {
    Snapshot,
    Clone,
    Resize,
    Destroy,
    Copy,
    Plug,
    Unplug,
}

impl World {
    /// A key that no other request has.
    pub fn key(&mut self) -> String {
        format!("model-{}", self.stamp())
    }

    /// Asks for what begins a task. With a key the first client may go away at once, and it is asked again when the
    /// daemon has died, or only to see that it is answered as it was.
    pub fn ask_for(&mut self, asked: &Asked, key: Option<&str>) -> Result<Result<Value, Trouble>, String> {
        self.must_run()?;
        self.tell(format!("{} {} {}{}", asked.method, asked.path, asked.body, key.unwrap_or_default()));
        if let Some(key) = key.filter(|_| self.random_is(3)) {
            self.count("leave");
            if self.bed.api.ask_and_leave(asked.method, &asked.path, &asked.body, key).is_err() {
                self.has_gone()?;
            }
        }
        let first = self.until_answered(asked, key)?;
        let (Some(_), Ok(task)) = (key, &first) else { return Ok(first) };
        if self.random_is(2) {
            return Ok(first);
        }
        self.count("ask again");
        match self.until_answered(asked, key)? {
            Ok(again) if again["uuid"] == task["uuid"] => Ok(first),
            // It has no space to look into what it keeps.
            Err(Trouble::Refused(code, _)) if self.bed.is_full() && code != "internal" => Ok(first),
            again => Err(format!("asked again with a key: {again:?}; it was answered {task}")),
        }
    }

    fn until_answered(&mut self, asked: &Asked, key: Option<&str>) -> Result<Result<Value, Trouble>, String> {
        loop {
            self.must_run()?;
            match self.bed.api.ask_with(asked.method, &asked.path, &asked.body, key) {
                Err(Trouble::Gone) => {
                    self.has_gone()?;
                    if key.is_none() {
                        return Ok(Err(Trouble::Gone));
                    }
                }
                answered => return Ok(answered),
            }
        }
    }

    /// Some ask at the same time about the same VDI. Each is done or refused, and what is refused has left nothing.
    pub fn race(&mut self) -> Result<(), String> {
        let Some(vdi) = self.free_vdi(|world, uuid, _| {
            world.vbds_of(uuid).iter().all(|vbd| {
                world.vbds.get(vbd).is_some_and(|vbd| vbd.vm.is_none() && vbd.stopped.is_none() && vbd.sent.is_none())
            })
        }) else {
            return Ok(());
        };
        if self.bed.is_full() || !self.has_room() {
            return Ok(());
        }
        let first = self.one_of(RIVALS).unwrap_or(Rival::Snapshot);
        let mut all = Vec::new();
        for _ in 0..2 + self.random.below(2) {
            let rival = if self.random_is(3) { first } else { self.one_of(RIVALS).unwrap_or(first) };
            if let Some(one) = self.rival(rival, &vdi)? {
                all.push(one);
            }
        }
        let grown: Vec<u64> = all
            .iter()
            .filter_map(|(pending, _)| if let Verb::Resize(_, size) = pending.verb { Some(size) } else { None })
            .collect();
        for (pending, _) in &mut all {
            if let Verb::Make(made) = &mut pending.verb {
                made.sizes.extend(&grown);
            }
        }
        self.count("race");
        self.at_one_time(all)
    }

    /// Asks for all of it over connections of their own.
    pub fn at_one_time(&mut self, all: Vec<(Pending, Asked)>) -> Result<(), String> {
        self.must_run()?;
        let asking: Vec<_> = all
            .into_iter()
            .map(|(pending, asked)| {
                self.tell(format!("at one time: {} {} {}", asked.method, asked.path, asked.body));
                let api = self.bed.api.clone();
                (pending, thread::spawn(move || api.ask(asked.method, &asked.path, &asked.body)))
            })
            .collect();
        let mut gone = false;
        for (mut pending, asking) in asking {
            pending.contested = true;
            match asking.join().map_err(|_| "a client has panicked")? {
                Ok(task) => pending.task = Some(task),
                Err(Trouble::Gone) => gone = true,
                Err(Trouble::Refused(code, why)) if code != "internal" => {
                    self.refused(&pending.verb, &code, &why);
                    continue;
                }
                Err(trouble) => return Err(trouble.to_string()),
            }
            self.pending.push(pending);
        }
        if gone { self.has_gone() } else { Ok(()) }
    }

    /// One task plugs several VBDs, or unplugs them with force. What cannot be done of some is done of the others.
    pub fn many(&mut self) -> Result<(), String> {
        let plugged = self.random_is(2);
        let held = self.held();
        let fits =
            |vbd: &Vbd| vbd.vm.is_none() && vbd.plugged == plugged && vbd.stopped.is_none() && vbd.sent.is_none();
        let free = self
            .vbds
            .iter()
            .filter(|(_, vbd)| !held.contains(&vbd.vdi) && fits(vbd) && (plugged || !self.is_plugged(&vbd.vdi)));
        // One for each VDI: an older catalogue brings deleted VBDs back, and the second writer of a VDI is refused.
        let of: BTreeMap<String, String> = free.map(|(uuid, vbd)| (vbd.vdi.clone(), uuid.clone())).collect();
        if of.is_empty() {
            return Ok(());
        }
        let (vdis, vbds): (Vec<_>, Vec<_>) = of.into_iter().take(4).unzip();
        for vbd in &vbds {
            self.vbd(vbd)?.client = None;
        }
        let asked = match plugged {
            true => Asked::post("/vbds/unplug", json!({ "vbds": vbds, "force": true })),
            false => Asked::post("/vbds/plug", json!({ "vbds": vbds })),
        };
        self.begin(Verb::Many(vbds), vdis, None, &asked)
    }

    /// The daemon copies its catalogue.
    pub fn copy_catalogue(&mut self) -> Result<(), String> {
        self.count("copy catalogue");
        self.once(&Asked::post("/host/backups", json!({}))).map(drop)
    }

    /// What one of them asks for, if that makes sense.
    fn rival(&mut self, what: Rival, vdi: &str) -> Result<Option<(Pending, Asked)>, String> {
        let name = self.name();
        let now = self.vdi(vdi)?.clone();
        let (plugged, vbd) = (self.is_plugged(vdi), self.own_vbds_of(vdi).first().cloned());
        let (verb, source, asked) = match (what, vbd) {
            (Rival::Snapshot, _) if !now.read_only => {
                let made = now.copied(name.clone(), now.sr, Some(vdi.to_owned()));
                (Verb::Make(made), Some(vdi), Asked::post(format!("/vdis/{vdi}/snapshot"), json!({ "name": name })))
            }
            (Rival::Clone, _) => {
                let made = now.copied(name.clone(), now.sr, None);
                (Verb::Make(made), Some(vdi), Asked::post(format!("/vdis/{vdi}/clone"), json!({ "name": name })))
            }
            (Rival::Copy, _) if !plugged => {
                let description = now.description.clone();
                let made = Vdi { description, ..now.copied(name.clone(), now.sr, None) };
                let body = json!({ "sr": self.srs.get(now.sr).map(|sr| &sr.uuid), "name": name });
                (Verb::Make(made), Some(vdi), Asked::post(format!("/vdis/{vdi}/copy"), body))
            }
            (Rival::Resize, _) if !now.read_only => {
                let size = now.sizes.iter().copied().max().unwrap_or(0) + ((1 + self.random.below(8)) << 20);
                let asked = Asked::post(format!("/vdis/{vdi}/resize"), json!({ "size": size }));
                (Verb::Resize(vdi.to_owned(), size), None, asked)
            }
            // With a VBD it is refused for that alone.
            (Rival::Destroy, None) => {
                let asked = Asked::delete(format!("/vdis/{vdi}"));
                (Verb::Destroy(vdi.to_owned()), None, asked)
            }
            (Rival::Plug, Some(vbd)) => {
                let asked = Asked::post(format!("/vbds/{vbd}/plug"), json!({}));
                (Verb::Plug(vbd), None, asked)
            }
            (Rival::Unplug, Some(vbd)) if plugged => {
                // Who is connected to what is ended is cut off.
                self.vbd(&vbd)?.client = None;
                let asked = Asked::post(format!("/vbds/{vbd}/unplug"), json!({ "force": self.random_is(2) }));
                (Verb::Unplug(vbd), None, asked)
            }
            _ => return Ok(None),
        };
        Ok(Some((Pending::new(verb, vec![vdi.to_owned()], source.map(str::to_owned)), asked)))
    }

    /// Somebody cancels a task that is under way: it is done, or undone. One that somebody gives up is not to be given
    /// up where nothing keeps it from its end.
    pub fn cancel_some(&mut self) -> Result<(), String> {
        let open = self.list("/tasks?open=true")?;
        let Some(task) = self.one_of(&open) else { return Ok(()) };
        let at = uuid(&task)?.to_owned();
        let abandon = !self.troubled && task["problem"].is_null() && self.random_is(3);
        let verb = if abandon { "abandon" } else { "cancel" };
        self.count(verb);
        self.tell(format!("{verb} {} {at}", text(&task["verb"])));
        if !abandon {
            for pending in &mut self.pending {
                pending.contested |= pending.task.as_ref().is_some_and(|task| task["uuid"] == *at);
            }
        }
        self.must_run()?;
        match self.bed.api.ask("POST", &format!("/tasks/{at}/{verb}"), &json!({})) {
            Ok(shown) if abandon => Err(format!("a task that nothing is wrong with is given up: {shown}")),
            Ok(_) => Ok(()),
            Err(Trouble::Gone) => self.has_gone(),
            // It cannot be cancelled where it is, or is over.
            Err(Trouble::Refused(code, why)) if code == "state" => {
                self.tell(why);
                Ok(())
            }
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why),
            Err(trouble) => Err(trouble.to_string()),
        }
    }
}
