//! `tapline event`.

use std::ops::ControlFlow;

use api::client::StreamItem;
use api::{Code, Event, ObjectKind, Problem};
use arguments::number;
use serde_json::Value;

use crate::health;
use crate::output::say;
use crate::session::{Session, print_on};
use crate::word;

/// Operations on events.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Print one line per change of an object until interrupted
    ///
    /// Waits for a daemon that is being restarted. A line on stderr reports when events may have been lost.
    Follow {
        /// Start after the event with this number; each line starts with its event's number
        #[arg(long, value_name = "NUMBER", alias = "behind", value_parser = number::<u64>(0..=u64::MAX))]
        after: Option<u64>,
        /// Only show changes of this kind of object; may be given several times
        #[arg(long, value_name = "KIND", value_parser = word::one_of::<ObjectKind>(&word::KINDS))]
        kind: Vec<ObjectKind>,
    },
}

impl Verb {
    /// Runs the verb.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let Verb::Follow { after, kind } = self;
        let mut events = session.client.events(after).await?;
        loop {
            match events.next().await {
                StreamItem::Change(event) if kind.is_empty() || kind.contains(&event.kind) => {
                    if tell(session, &event)?.is_break() {
                        return Ok(());
                    }
                }
                StreamItem::Change(_) => {}
                StreamItem::Reset => say("tapline: events were lost; reload all objects\n"),
                // The token has expired, which the daemon would report on each reconnection.
                StreamItem::Lost(problem) if problem.code == Code::Unauthorized => return Err(problem),
                StreamItem::Lost(problem) => say(&format!("tapline: {problem}; reconnecting\n")),
            }
        }
    }
}

fn tell(session: &Session, event: &Event) -> Result<ControlFlow<()>, Problem> {
    if session.json() {
        return print_on(&format!("{}\n", word::json(event)?));
    }
    let (kind, change) = (word::of(&event.kind), word::of(&event.change));
    let object: Option<Value> = event.object().map_err(|error| Problem::failed("read an event", error))?;
    let known = |name: &str| object.as_ref()?.get(name)?.as_str();
    let name = known("name").or(known("verb")).unwrap_or("-");
    let state = known("state").or(known("power")).unwrap_or_default().to_owned();
    let health = object.as_ref().and_then(|object| serde_json::from_value(object.get("health")?.clone()).ok());
    let state = health::with_state(state, &health.unwrap_or_default());
    let line = format!("{:>6}  {:.0}  {change:<7}  {kind:<4}  {}  {name}  {state}", event.seq, event.at, event.uuid);
    print_on(&format!("{}\n", api::visible(line.trim_end())))
}
