//! `tapline event`: prints changes of objects.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::ControlFlow;

use api::client::StreamItem;
use api::{Change, Code, Event, ObjectKind, Problem};
use arguments::number;
use serde_json::Value;
use uuid::Uuid;

use crate::health;
use crate::output::say;
use crate::session::{Session, print_while_read};
use crate::word;

/// Operations on events.
#[derive(clap::Subcommand)]
pub enum EventVerb {
    /// Print one line per change of an object until interrupted
    ///
    /// Waits for a daemon that is being restarted. A line on stderr reports when events may have been lost.
    Follow {
        /// Start after the event with this number; each line starts with its event's number
        #[arg(long, value_name = "NUMBER", value_parser = number::<u64>(0..=u64::MAX))]
        after: Option<u64>,
        /// Only show changes of this kind of object; may be given several times
        #[arg(long, value_name = "KIND", value_parser = word::one_of::<ObjectKind>(&word::KINDS))]
        kind: Vec<ObjectKind>,
    },
}

impl EventVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let EventVerb::Follow { after, kind } = self;
        let mut events = session.client.events(after).await?;
        let mut names = Names::default();
        loop {
            match events.next().await {
                StreamItem::Change(event) if kind.is_empty() || kind.contains(&event.kind) => {
                    if print_event(session, &event, &mut names).await?.is_break() {
                        return Ok(());
                    }
                }
                StreamItem::Change(event) => names.record(&event)?,
                StreamItem::Reset => say("tapline: events were lost; reload all objects\n"),
                // The token has expired; reconnecting would fail every time.
                StreamItem::Lost(problem) if problem.code == Code::Unauthorized => return Err(problem),
                StreamItem::Lost(problem) => say(&format!("tapline: {problem}; reconnecting\n")),
            }
        }
    }
}

/// Names of VMs and VDIs, which events of VBDs do not contain.
#[derive(Debug, Default)]
struct Names(HashMap<Uuid, String>);

impl Names {
    /// Records the name of an object that was created or renamed.
    fn record(&mut self, event: &Event) -> Result<(), Problem> {
        if matches!(event.kind, ObjectKind::Vm | ObjectKind::Vdi) {
            if let Some(name) = object(event)?.as_ref().and_then(|object| object.get("name")?.as_str()) {
                self.0.insert(event.uuid, name.to_owned());
            }
        }
        Ok(())
    }

    /// Returns `VM/VDI`, or the VDI alone; `None` if an object no longer exists.
    async fn of_vbd(&mut self, session: &Session, vbd: &Value) -> Option<String> {
        let uuid = |field: &str| vbd.get(field)?.as_str()?.parse::<Uuid>().ok();
        let vdi = uuid("vdi")?;
        if let Entry::Vacant(unknown) = self.0.entry(vdi) {
            unknown.insert(session.client.vdi(vdi).await.ok()?.name.to_string());
        }
        let vm = uuid("vm");
        if let Some(Entry::Vacant(unknown)) = vm.map(|vm| self.0.entry(vm)) {
            let uuid = *unknown.key();
            unknown.insert(session.client.vm(uuid).await.ok()?.name.to_string());
        }
        let vm = vm.and_then(|vm| self.0.get(&vm)).map(|vm| format!("{vm}/")).unwrap_or_default();
        self.0.get(&vdi).map(|vdi| format!("{vm}{vdi}"))
    }
}

fn object(event: &Event) -> Result<Option<Value>, Problem> {
    event.object().map_err(|error| Problem::failed("read an event", error))
}

async fn print_event(session: &Session, event: &Event, names: &mut Names) -> Result<ControlFlow<()>, Problem> {
    if session.json() {
        return print_while_read(&format!("{}\n", word::json(event)?));
    }
    names.record(event)?;
    let (kind, change) = (word::of(&event.kind), word::of(&event.change));
    let object = object(event)?;
    let of_vbd = match (&object, event.kind, event.change) {
        (Some(vbd), ObjectKind::Vbd, Change::Added | Change::Changed) => names.of_vbd(session, vbd).await,
        _ => None,
    };
    let known = |name: &str| object.as_ref()?.get(name)?.as_str();
    let name = of_vbd.as_deref().or(known("name")).or(known("verb")).unwrap_or("-");
    let state = known("state").or(known("power")).unwrap_or_default().to_owned();
    let health = object.as_ref().and_then(|object| serde_json::from_value(object.get("health")?.clone()).ok());
    let state = health::with_state(state, &health.unwrap_or_default());
    let line = format!("{:>6}  {:.0}  {change:<7}  {kind:<4}  {}  {name}  {state}", event.seq, event.at, event.uuid);
    print_while_read(&format!("{}\n", api::visible(line.trim_end())))
}
