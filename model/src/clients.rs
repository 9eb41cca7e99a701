//! Several clients: requests repeated with an idempotency key, clients that disconnect before the response, concurrent
//! requests for the same VDI, and tasks that another client cancels.

use std::collections::BTreeMap;
use std::thread;

use serde_json::{Value, json};
use testbed::daemon::api::{Trouble, uuid};

use super::check::text;
use super::verbs::{NO_TASK, Request};
use super::world::{Pending, PendingVerb, Vbd, Vdi, World};

/// Requests that are sent concurrently.
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
    /// A new idempotency key.
    pub fn key(&mut self) -> String {
        format!("model-{}", self.stamp())
    }

    /// Sends a request that begins a task. With a key, the client may disconnect at once, and the request is repeated
    /// after a death of the daemon, or only to check that the response is the same.
    pub fn request_task(&mut self, request: &Request, key: Option<&str>) -> Result<Result<Value, Trouble>, String> {
        self.ensure_daemon()?;
        self.log(format!("{} {} {}{}", request.method, request.path, request.body, key.unwrap_or_default()));
        if let Some(key) = key.filter(|_| self.random_is(3)) {
            self.count("leave");
            if self.bed.api.ask_and_leave(request.method, &request.path, &request.body, key).is_err() {
                self.note_daemon_gone()?;
            }
        }
        let first = self.request_until_answered(request, key)?;
        let (Some(_), Ok(task)) = (key, &first) else { return Ok(first) };
        if self.random_is(2) {
            return Ok(first);
        }
        self.count("ask again");
        match self.request_until_answered(request, key)? {
            Ok(again) if again["uuid"] == task["uuid"] => Ok(first),
            // There is no space in which the daemon could look up the key.
            Err(Trouble::Refused(code, _)) if self.bed.is_full() && code != "internal" => Ok(first),
            again => Err(format!("repeated with a key: {again:?}; it was answered {task}")),
        }
    }

    fn request_until_answered(
        &mut self,
        request: &Request,
        key: Option<&str>,
    ) -> Result<Result<Value, Trouble>, String> {
        loop {
            self.ensure_daemon()?;
            match self.bed.api.ask_with(request.method, &request.path, &request.body, key) {
                Err(Trouble::Gone) => {
                    self.note_daemon_gone()?;
                    if key.is_none() {
                        return Ok(Err(Trouble::Gone));
                    }
                }
                answered => return Ok(answered),
            }
        }
    }

    /// Sends several requests for the same VDI concurrently. Each is done or refused; a refused one must leave nothing.
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
            .filter_map(|(pending, _)| if let PendingVerb::Resize(_, size) = pending.verb { Some(size) } else { None })
            .collect();
        for (pending, _) in &mut all {
            if let PendingVerb::Make(made) = &mut pending.verb {
                made.sizes.extend(&grown);
            }
        }
        self.count("race");
        self.request_concurrently(all)
    }

    /// Sends all requests over separate connections.
    pub fn request_concurrently(&mut self, all: Vec<(Pending, Request)>) -> Result<(), String> {
        self.ensure_daemon()?;
        let asking: Vec<_> = all
            .into_iter()
            .map(|(pending, request)| {
                self.log(format!("at one time: {} {} {}", request.method, request.path, request.body));
                let api = self.bed.api.clone();
                (pending, thread::spawn(move || api.ask(request.method, &request.path, &request.body)))
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
        if gone { self.note_daemon_gone() } else { Ok(()) }
    }

    /// Plugs or unplugs several VBDs in one task, unplugging with force. A failure of some must not affect the others.
    pub fn plug_many(&mut self) -> Result<(), String> {
        let plugged = self.random_is(2);
        let held = self.held();
        let fits =
            |vbd: &Vbd| vbd.vm.is_none() && vbd.plugged == plugged && vbd.stopped.is_none() && vbd.sent.is_none();
        let free = self
            .vbds
            .iter()
            .filter(|(_, vbd)| !held.contains(&vbd.vdi) && fits(vbd) && (plugged || !self.is_plugged(&vbd.vdi)));
        // One VBD per VDI: an older catalogue restores deleted VBDs, and a VDI's second writer is refused.
        let of: BTreeMap<String, String> = free.map(|(uuid, vbd)| (vbd.vdi.clone(), uuid.clone())).collect();
        if of.is_empty() {
            return Ok(());
        }
        let (vdis, vbds): (Vec<_>, Vec<_>) = of.into_iter().take(4).unzip();
        for vbd in &vbds {
            self.vbd(vbd)?.client = None;
        }
        let request = match plugged {
            true => Request::post("/vbds/unplug", json!({ "vbds": vbds, "force": true })),
            false => Request::post("/vbds/plug", json!({ "vbds": vbds })),
        };
        self.begin(PendingVerb::Many(vbds), vdis, None, &request)
    }

    /// Has the daemon back up its catalogue.
    pub fn back_up_by_daemon(&mut self) -> Result<(), String> {
        self.count("copy catalogue");
        self.once(&Request::post("/host/backups", json!({}))).map(drop)
    }

    /// Builds the request of a rival, if it is possible now.
    fn rival(&mut self, what: Rival, vdi: &str) -> Result<Option<(Pending, Request)>, String> {
        let name = self.name();
        let now = self.vdi(vdi)?.clone();
        let (plugged, vbd) = (self.is_plugged(vdi), self.own_vbds_of(vdi).first().cloned());
        let (verb, source, request) = match (what, vbd) {
            (Rival::Snapshot, _) if !now.read_only => {
                let made = now.copied(name.clone(), now.sr, Some(vdi.to_owned()));
                (
                    PendingVerb::Make(made),
                    Some(vdi),
                    Request::post(format!("/vdis/{vdi}/snapshot"), json!({ "name": name })),
                )
            }
            (Rival::Clone, _) => {
                let made = now.copied(name.clone(), now.sr, None);
                (
                    PendingVerb::Make(made),
                    Some(vdi),
                    Request::post(format!("/vdis/{vdi}/clone"), json!({ "name": name })),
                )
            }
            (Rival::Copy, _) if !plugged => {
                let description = now.description.clone();
                let made = Vdi { description, ..now.copied(name.clone(), now.sr, None) };
                let body = json!({ "sr": self.srs.get(now.sr).map(|sr| &sr.uuid), "name": name });
                (PendingVerb::Make(made), Some(vdi), Request::post(format!("/vdis/{vdi}/copy"), body))
            }
            (Rival::Resize, _) if !now.read_only => {
                let size = now.sizes.iter().copied().max().unwrap_or(0) + ((1 + self.random.below(8)) << 20);
                let request = Request::post(format!("/vdis/{vdi}/resize"), json!({ "size": size }));
                (PendingVerb::Resize(vdi.to_owned(), size), None, request)
            }
            // With a VBD it would be refused in any case.
            (Rival::Destroy, None) => {
                let request = Request::delete(format!("/vdis/{vdi}"));
                (PendingVerb::Destroy(vdi.to_owned()), None, request)
            }
            (Rival::Plug, Some(vbd)) => {
                let request = Request::post(format!("/vbds/{vbd}/plug"), json!({}));
                (PendingVerb::Plug(vbd), None, request)
            }
            (Rival::Unplug, Some(vbd)) if plugged => {
                // Clients of a disk that is unplugged are disconnected.
                self.vbd(&vbd)?.client = None;
                let request = Request::post(format!("/vbds/{vbd}/unplug"), json!({ "force": self.random_is(2) }));
                (PendingVerb::Unplug(vbd), None, request)
            }
            _ => return Ok(None),
        };
        Ok(Some((Pending::new(verb, vec![vdi.to_owned()], source.map(str::to_owned)), request)))
    }

    /// Cancels a task in progress: it is done, or rolled back. Abandoning it must be refused if it can still end by
    /// itself.
    pub fn cancel_some(&mut self) -> Result<(), String> {
        let open = self.list("/tasks?open=true")?;
        let Some(task) = self.one_of(&open) else { return Ok(()) };
        let at = uuid(&task)?.to_owned();
        let abandon = !self.troubled && task["problem"].is_null() && self.random_is(3);
        let verb = if abandon { "abandon" } else { "cancel" };
        self.count(verb);
        self.log(format!("{verb} {} {at}", text(&task["verb"])));
        if !abandon {
            for pending in &mut self.pending {
                pending.contested |= pending.task.as_ref().is_some_and(|task| task["uuid"] == *at);
            }
        }
        self.ensure_daemon()?;
        match self.bed.api.ask("POST", &format!("/tasks/{at}/{verb}"), &json!({})) {
            Ok(shown) if abandon => Err(format!("a task that nothing is wrong with is given up: {shown}")),
            Ok(_) => Ok(()),
            Err(Trouble::Gone) => self.note_daemon_gone(),
            // It cannot be cancelled in this state, or has ended.
            Err(Trouble::Refused(code, why)) if code == "state" => {
                self.log(why);
                Ok(())
            }
            Err(Trouble::Refused(code, why)) => self.excuse(&NO_TASK, &code, &why),
            Err(trouble) => Err(trouble.to_string()),
        }
    }
}
