//! A running command: the daemon it talks to, and how it shows the responses.
//!
//! Objects go to stdout, as text for people or as the API's own JSON; everything else goes to stderr.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;

use api::client::{Answer, Client};
use api::{AbsolutePath, Code, Problem, Task, TaskState};
use serde::Serialize;
use serde_json::Value;

use crate::column::{Column, alone, table};
use crate::endpoint::EndpointOptions;
use crate::output;
use crate::wait;
use crate::word::HostPath;

/// Options common to all nouns of the daemon.
#[derive(Clone, Debug, clap::Args)]
pub struct How {
    #[command(flatten)]
    endpoint: EndpointOptions,
    /// Print the API's response as JSON; for a long-running verb, the task
    #[arg(long, global = true)]
    json: bool,
}

/// The option of long-running verbs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Waiting {
    /// Return as soon as the task has begun, and print its UUID
    #[arg(long)]
    no_wait: bool,
}

/// Options of list verbs.
#[derive(Clone, Debug, clap::Args)]
pub struct Listing {
    /// Show all columns and full UUIDs regardless of the terminal's width
    #[arg(long)]
    pub wide: bool,
}

/// A running command.
#[derive(Debug)]
pub struct Session {
    /// The client of the daemon.
    pub client: Client,
    /// Whether the daemon may be on another host.
    remote: bool,
    json: bool,
}

/// The result of a verb that may be long-running.
pub enum Outcome {
    /// The verb completed with this result.
    Done(Value),
    /// Everything has already been printed.
    Told,
}

impl Session {
    /// Creates a session from its options.
    pub fn new(how: How) -> Result<Session, Problem> {
        let (client, remote) = how.endpoint.client()?;
        Ok(Session { client, remote, json: how.json })
    }

    /// A path on the daemon's host, which is this host unless the daemon is reached over the network.
    pub fn path(&self, path: HostPath) -> Result<AbsolutePath, Problem> {
        if self.remote && path.relative {
            let what = format!("'{}' is a relative path, but the daemon may run on another host", path.typed);
            return Err(Problem::new(Code::Invalid, what)
                .advise("give the absolute path of a file or directory on the daemon's host"));
        }
        Ok(path.whole)
    }

    /// Whether the output is JSON, for programs.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Shows objects in a table.
    pub fn list<T: Serialize>(&self, objects: &[T], columns: &[Column<T>], listing: &Listing) -> Result<(), Problem> {
        if self.json {
            return self.value(&objects);
        }
        print(&table(objects, columns, listing.wide, terminal_width()))
    }

    /// Shows an object with all its fields.
    pub fn show<T: Serialize>(&self, object: &T, columns: &[Column<T>]) -> Result<(), Problem> {
        if self.json { self.value(object) } else { print(&alone(object, columns)) }
    }

    /// Prints a value as JSON.
    pub fn value(&self, value: &impl Serialize) -> Result<(), Problem> {
        let text = serde_json::to_string_pretty(value).map_err(|error| Problem::failed("print JSON", error))?;
        print(&format!("{text}\n"))
    }

    /// Waits for a verb to complete unless `--no-wait` was given, and returns the result that remains to be printed.
    pub async fn outcome<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<Outcome, Problem> {
        match answer {
            Answer::Done(object) if self.json => self.value(&object).map(|()| Outcome::Told),
            Answer::Done(object) => {
                let value = serde_json::to_value(object).map_err(|error| Problem::failed("read the answer", error))?;
                Ok(Outcome::Done(value))
            }
            Answer::Begun(task) if waiting.no_wait && self.json => self.value(&task).map(|()| Outcome::Told),
            Answer::Begun(task) if waiting.no_wait => print(&format!("{}\n", task.uuid)).map(|()| Outcome::Told),
            Answer::Begun(task) => self.see_to_end(*task).await,
        }
    }

    async fn see_to_end(&self, task: Task) -> Result<Outcome, Problem> {
        let task = wait::until_over(&self.client, task).await?;
        if self.json {
            self.value(&task)?;
        }
        match task.state {
            TaskState::Done if self.json => Ok(Outcome::Told),
            TaskState::Done => Ok(Outcome::Done(task.result.unwrap_or_default())),
            _ => Err(wait::why(&task)),
        }
    }

    /// For verbs that create an object: prints its UUID, which is in the response and in a task's result alike.
    pub async fn made<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        match self.outcome(answer, waiting).await? {
            Outcome::Done(object) => match object.get("uuid").and_then(Value::as_str) {
                Some(uuid) => print(&format!("{uuid}\n")),
                None => Ok(()),
            },
            Outcome::Told => Ok(()),
        }
    }

    /// For verbs without output on success.
    pub async fn did<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        self.outcome(answer, waiting).await.map(drop)
    }
}

/// Prints to stdout. A closed pipe, as with `head`, is not an error.
pub fn print(text: &str) -> Result<(), Problem> {
    print_on(text).map(drop)
}

/// Prints to stdout and reports whether there is still a reader.
pub fn print_on(text: &str) -> Result<ControlFlow<()>, Problem> {
    output::print(text).map_err(|error| Problem::failed("print", error))
}

/// The terminal's width in columns; `None` if stdout is not a terminal.
fn terminal_width() -> Option<u16> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}
