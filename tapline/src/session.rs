//! A command under way: the daemon it asks and how it shows what it is told.
//!
//! Objects go to stdout, as text for people or as the API's own JSON; everything else goes to stderr.

use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;

use api::client::{Answer, Client};
use api::{AbsolutePath, Code, Problem, Task, TaskState};
use serde::Serialize;
use serde_json::Value;

use crate::column::{Column, alone, table};
use crate::place::Place;
use crate::wait;
use crate::word::HostPath;

/// Options that every noun of the daemon has.
#[derive(Clone, Debug, clap::Args)]
pub struct How {
    #[command(flatten)]
    place: Place,
    /// Print what the API answers, as JSON; of a verb that takes time, the task
    #[arg(long, global = true)]
    json: bool,
}

/// The option of verbs that take time.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Waiting {
    /// Return as soon as it has begun, and print the task's UUID
    #[arg(long)]
    no_wait: bool,
}

/// The options of a list.
#[derive(Clone, Debug, clap::Args)]
pub struct Listing {
    /// Show all columns and whole UUIDs, however wide the terminal is
    #[arg(long)]
    pub wide: bool,
}

/// A command under way.
#[derive(Debug)]
pub struct Session {
    /// The daemon.
    pub client: Client,
    /// Whether the daemon may be another host's.
    remote: bool,
    json: bool,
}

/// How a verb that may take time has come out.
pub enum Outcome {
    /// It is done, and this came of it.
    Done(Value),
    /// All is said.
    Told,
}

impl Session {
    /// As the options say.
    pub fn new(how: How) -> Result<Session, Problem> {
        let (client, remote) = how.place.client()?;
        Ok(Session { client, remote, json: how.json })
    }

    /// A path of the daemon's host, which is this one unless it is asked over the network.
    pub fn path(&self, path: HostPath) -> Result<AbsolutePath, Problem> {
        if self.remote && path.relative {
            let what = format!("«{}» is a path from where you are, which may not be the daemon's host", path.typed);
            return Err(Problem::new(Code::Invalid, what).advise("write the whole path of a file or directory there"));
        }
        Ok(path.whole)
    }

    /// Whether programs read what is printed.
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

    /// Shows an object with all that is known of it.
    pub fn show<T: Serialize>(&self, object: &T, columns: &[Column<T>]) -> Result<(), Problem> {
        if self.json { self.value(object) } else { print(&alone(object, columns)) }
    }

    /// Prints as JSON.
    pub fn value(&self, value: &impl Serialize) -> Result<(), Problem> {
        let text = serde_json::to_string_pretty(value).map_err(|error| Problem::failed("print JSON", error))?;
        print(&format!("{text}\n"))
    }

    /// Sees a verb to its end, unless it is not to be waited for. What is left to tell, for people, is what came of it.
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

    /// For a verb that makes an object: prints its UUID, which the answer and the result of a task have alike.
    pub async fn made<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        match self.outcome(answer, waiting).await? {
            Outcome::Done(object) => match object.get("uuid").and_then(Value::as_str) {
                Some(uuid) => print(&format!("{uuid}\n")),
                None => Ok(()),
            },
            Outcome::Told => Ok(()),
        }
    }

    /// For a verb after which there is nothing to say.
    pub async fn did<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        self.outcome(answer, waiting).await.map(drop)
    }
}

/// Prints to stdout. A reader that has seen enough, as `head` has, is no failure.
pub fn print(text: &str) -> Result<(), Problem> {
    print_on(text).map(drop)
}

/// Prints to stdout while there is a reader: what follows something ends with who reads it.
pub fn print_on(text: &str) -> Result<ControlFlow<()>, Problem> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(Problem::failed("print", error)),
    }
}

/// Says something beside what is printed, on stderr. That nobody hears it changes nothing.
pub fn say(text: &str) {
    io::stderr().write_all(api::visible(text).as_bytes()).unwrap_or_default();
}

/// Columns of the terminal that stdout is; none if it is something else.
fn terminal_width() -> Option<u16> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}
