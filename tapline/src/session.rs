//! A running command: its connection to the daemon and its output.
//!
//! Objects go to stdout as text or as the API's JSON; everything else goes to stderr.

mod explained;

use std::cell::{Cell, RefCell};
use std::io::{self, IsTerminal};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Duration;

use api::client::{Answer, Client};
use api::{AbsolutePath, Code, ObjectKind, Problem, Task, TaskState};
use arguments::number;
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use crate::column::{Column, Layout, Names, alone, table};
use crate::endpoint::EndpointOptions;
use crate::output;
use crate::wait;
use crate::word::HostPath;

/// Options of all commands that use the daemon; they may also precede the noun.
#[derive(Clone, Debug, clap::Args)]
pub struct How {
    #[command(flatten)]
    endpoint: EndpointOptions,
    /// Print the response as JSON, and an error, on stderr, too; for a long-running verb, the task
    #[arg(long, global = true, display_order = 900)]
    pub json: bool,
}

impl How {
    /// Refuses options that select a daemon, for commands that use none.
    pub fn refuse_endpoint(&self) -> Result<(), Problem> {
        if !self.endpoint.is_given() {
            return Ok(());
        }
        let what = "--socket, --connect, --ca and --token-file only apply to commands that ask the daemon";
        Err(Problem::new(Code::Invalid, what).advise("leave them out; this command runs on this host"))
    }
}

impl How {
    /// The run directory of the daemon on this host.
    pub fn run_directory(&self) -> Result<PathBuf, Problem> {
        self.endpoint.run_directory()
    }

    /// A client of the daemon on this host, for commands about this host; `None` if the environment selects a daemon on
    /// another host.
    pub fn local_client(self) -> Result<Option<Client>, Problem> {
        if self.endpoint.is_network_given() {
            let what = "--connect, --ca and --token-file do not apply: this command shows the disks of this host";
            return Err(Problem::new(Code::Invalid, what).advise("leave them out"));
        }
        // A missing token for the other host does not matter.
        Ok(self.endpoint.client().ok().filter(|(_, is_remote)| !is_remote).map(|(client, _)| client))
    }
}

/// The option of long-running verbs.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Waiting {
    /// Return as soon as the task has begun, and print its UUID
    #[arg(long)]
    no_wait: bool,
}

impl Waiting {
    /// Refuses not to wait for `what`.
    pub fn must_wait(self, what: &str) -> Result<(), Problem> {
        if !self.no_wait {
            return Ok(());
        }
        Err(Problem::new(Code::Invalid, format!("{what} ends with this command: it does not continue without it"))
            .advise("leave out --no-wait"))
    }
}

/// Options of list verbs.
#[derive(Clone, Debug, clap::Args)]
pub struct Listing {
    /// How to print: a table, a wide one with all columns and full UUIDs, JSON, names or UUIDs only
    #[arg(short, long, value_enum, value_name = "FORM", conflicts_with_all = ["wide", "quiet"])]
    output: Option<Form>,
    /// Show these columns, by their headings
    #[arg(long, value_name = "HEADING,…", value_delimiter = ',')]
    columns: Vec<String>,
    /// Sort by this column; with '-' before it, from the greatest down
    #[arg(long, value_name = "HEADING", allow_hyphen_values = true)]
    sort: Option<String>,
    /// Print UUIDs only, one per line
    #[arg(short, long, conflicts_with = "wide")]
    quiet: bool,
    /// As --output wide
    #[arg(long)]
    wide: bool,
    /// Print again at this interval in seconds until interrupted
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = "2",
        value_parser = number::<u64>(1..=86_400))]
    watch: Option<u64>,
}

/// Values of `--output`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Form {
    /// A table with the columns that fit.
    Table,
    /// A table with all columns and full UUIDs.
    Wide,
    /// JSON, as in the API.
    Json,
    /// Names, one per line.
    Name,
    /// UUIDs, one per line.
    Uuid,
}

impl Listing {
    fn form(&self) -> Form {
        match (self.output, self.quiet, self.wide) {
            (Some(form), ..) => form,
            (None, true, _) => Form::Uuid,
            (None, false, true) => Form::Wide,
            (None, false, false) => Form::Table,
        }
    }
}

/// A running command.
#[derive(Debug)]
pub struct Session {
    /// The client of the daemon.
    pub client: Client,
    /// Whether the daemon may be on another host.
    remote: bool,
    json: bool,
    /// Delay until the command is to be run again.
    again: Cell<Option<Duration>>,
    named_objects: RefCell<Vec<NamedObject>>,
    /// Printed if the next task takes more than a moment.
    note: RefCell<Option<String>>,
}

/// An object that the user has named on the command line.
#[derive(Debug)]
struct NamedObject {
    uuid: Uuid,
    /// The nouns that precede its UUID in the daemon's messages.
    nouns: &'static [&'static str],
    shown: String,
}

/// Formats an object by its name and UUID.
pub fn named(noun: &str, name: &str, uuid: Uuid) -> String {
    format!("{noun} \"{name}\" ({uuid})")
}

/// The result of a verb that may be long-running.
pub enum Outcome {
    /// The verb completed with this result.
    Done(Value),
    /// Everything has already been printed.
    Printed,
}

impl Session {
    /// Whether the daemon is reached over the network.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// Creates a session from its options.
    pub fn new(how: How) -> Result<Session, Problem> {
        let (client, remote) = how.endpoint.client()?;
        Ok(Session {
            client,
            remote,
            json: how.json,
            again: Cell::new(None),
            named_objects: RefCell::default(),
            note: RefCell::default(),
        })
    }

    /// Remembers how the user has named an object, for [`Session::explaining`]. Returns its UUID.
    pub fn remember_name(&self, kind: ObjectKind, noun: &str, uuid: Uuid, name: &str) -> Uuid {
        let nouns: &[&str] = match kind {
            ObjectKind::Sr => &["SR", "repository"],
            ObjectKind::Vdi => &["VDI"],
            ObjectKind::Vbd => &["VBD"],
            ObjectKind::Vm => &["VM"],
            ObjectKind::Host | ObjectKind::Task => &[],
        };
        self.named_objects.borrow_mut().push(NamedObject { uuid, nouns, shown: named(noun, name, uuid) });
        uuid
    }

    /// Sets the note that is printed if the next task takes more than a moment.
    pub fn note(&self, text: String) {
        self.note.replace(Some(text));
    }

    /// A path on the daemon's host; a relative one is refused if the daemon is reached over the network.
    pub fn path(&self, path: HostPath) -> Result<AbsolutePath, Problem> {
        if self.remote && path.relative {
            let what = format!("'{}' is a relative path, but the daemon may run on another host", path.typed);
            return Err(Problem::new(Code::Invalid, what)
                .advise("give the absolute path of a file or directory on the daemon's host"));
        }
        Ok(path.whole)
    }

    /// Whether the output is JSON.
    pub fn json(&self) -> bool {
        self.json
    }

    /// Delay until the command is to be run again, if any.
    pub fn again(&self) -> Option<Duration> {
        self.again.get()
    }

    /// Shows objects as a list.
    pub fn list<T: Serialize>(&self, objects: &[T], columns: &[Column<T>], listing: &Listing) -> Result<(), Problem> {
        self.show_all(objects, columns, listing, &Names::new())
    }

    /// Shows objects as a list; in tables, references to objects of these kinds are shown as names. `names` are those
    /// already known.
    pub async fn list_named<T: Serialize>(
        &self,
        objects: &[T],
        columns: &[Column<T>],
        listing: &Listing,
        kinds: &[ObjectKind],
        mut names: Names,
    ) -> Result<(), Problem> {
        if !self.json && listing.form() == Form::Table && !objects.is_empty() {
            names.extend(self.names(kinds).await?);
        }
        self.show_all(objects, columns, listing, &names)
    }

    fn show_all<T: Serialize>(
        &self,
        objects: &[T],
        columns: &[Column<T>],
        listing: &Listing,
        names: &Names,
    ) -> Result<(), Problem> {
        self.again.set(listing.watch.map(Duration::from_secs));
        let terminal = io::stdout().is_terminal();
        if listing.watch.is_some() && terminal {
            print("\x1b[H\x1b[2J")?;
        }
        let form = if self.json { Form::Json } else { listing.form() };
        let layout = Layout {
            wide: form == Form::Wide,
            columns: &listing.columns,
            sort: listing.sort.as_deref(),
            ..layout(names)
        };
        match form {
            Form::Json => self.value(&objects),
            Form::Name => print(&lines(objects, &["name", "uuid"])?),
            Form::Uuid => print(&lines(objects, &["uuid", "name"])?),
            Form::Table | Form::Wide => print(&table(objects, columns, &layout)?),
        }
    }

    /// Prints rows that are not objects of the API as a table.
    pub fn rows<T>(&self, rows: &[T], columns: &[Column<T>], names: &Names) -> Result<(), Problem> {
        print(&table(rows, columns, &layout(names))?)
    }

    /// The names of all objects of these kinds.
    async fn names(&self, kinds: &[ObjectKind]) -> Result<Names, Problem> {
        let mut names = Names::new();
        for kind in kinds {
            match kind {
                ObjectKind::Sr => {
                    names.extend(self.client.srs(None).await?.into_iter().map(|sr| (sr.uuid, sr.name.to_string())));
                }
                ObjectKind::Vdi => {
                    let vdis = self.client.vdis(None, None).await?;
                    names.extend(vdis.into_iter().map(|vdi| (vdi.uuid, vdi.name.to_string())));
                }
                ObjectKind::Vm => {
                    names.extend(self.client.vms(None).await?.into_iter().map(|vm| (vm.uuid, vm.name.to_string())));
                }
                ObjectKind::Host | ObjectKind::Vbd | ObjectKind::Task => {}
            }
        }
        Ok(names)
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

    /// Waits for a verb to complete unless `--no-wait` was given; returns the result if it remains to be printed.
    pub async fn outcome<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<Outcome, Problem> {
        match answer {
            Answer::Done(object) if self.json => self.value(&object).map(|()| Outcome::Printed),
            Answer::Done(object) => {
                let value = serde_json::to_value(object).map_err(|error| Problem::failed("read the answer", error))?;
                Ok(Outcome::Done(value))
            }
            Answer::Begun(task) if waiting.no_wait && self.json => self.value(&task).map(|()| Outcome::Printed),
            Answer::Begun(task) if waiting.no_wait => print(&format!("{}\n", task.uuid)).map(|()| Outcome::Printed),
            Answer::Begun(task) => self.wait_for_result(*task).await,
        }
    }

    /// Waits for a verb that is one step of a command; returns its result.
    pub async fn finish<T: Serialize>(&self, answer: Answer<T>) -> Result<Value, Problem> {
        match answer {
            Answer::Done(object) => {
                serde_json::to_value(object).map_err(|error| Problem::failed("read the answer", error))
            }
            Answer::Begun(task) => {
                let task = wait::until_over(&self.client, *task, self.note.take()).await?;
                match task.state {
                    TaskState::Done => Ok(task.result.unwrap_or_default()),
                    _ => Err(wait::failure(&task)),
                }
            }
        }
    }

    async fn wait_for_result(&self, task: Task) -> Result<Outcome, Problem> {
        let task = wait::until_over(&self.client, task, self.note.take()).await?;
        if self.json {
            self.value(&task)?;
        }
        if let Some(warning) = warning_of(&task) {
            output::say(&format!("tapline: warning: {warning}\n"));
        }
        match task.state {
            TaskState::Done if self.json => Ok(Outcome::Printed),
            TaskState::Done => Ok(Outcome::Done(task.result.unwrap_or_default())),
            _ => Err(wait::failure(&task)),
        }
    }

    /// Completes a verb that creates an object and prints its UUID, which is in the response or the task's result.
    pub async fn print_created<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        match self.outcome(answer, waiting).await? {
            Outcome::Done(object) => match object.get("uuid").and_then(Value::as_str) {
                Some(uuid) => print(&format!("{uuid}\n")),
                None => Ok(()),
            },
            Outcome::Printed => Ok(()),
        }
    }

    /// Completes a verb that has no output on success.
    pub async fn complete<T: Serialize>(&self, answer: Answer<T>, waiting: Waiting) -> Result<(), Problem> {
        self.outcome(answer, waiting).await.map(drop)
    }
}

/// The warning in the result of a completed task.
fn warning_of(task: &Task) -> Option<&str> {
    task.result.as_ref()?.get("warning")?.as_str()
}

/// The layout of tables.
fn layout(names: &Names) -> Layout<'_> {
    let bold = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|no| no.is_empty());
    Layout { width: terminal_width(), names: Some(names), bold, ..Layout::default() }
}

/// Prints the first of these fields that each object has, one per line.
fn lines<T: Serialize>(objects: &[T], fields: &[&str]) -> Result<String, Problem> {
    let mut text = String::new();
    for object in objects {
        let value = serde_json::to_value(object).map_err(|error| Problem::failed("read the answer", error))?;
        let known = fields.iter().find_map(|field| value.get(field).and_then(Value::as_str));
        text.push_str(&api::visible(known.unwrap_or_default()));
        text.push('\n');
    }
    Ok(text)
}

/// The runtime of requests to the daemon, with a single thread.
pub fn runtime() -> Result<tokio::runtime::Runtime, Problem> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Problem::failed("start the async runtime", error))
}

/// Prints to stdout. A closed pipe, as with `head`, is not an error.
pub fn print(text: &str) -> Result<(), Problem> {
    print_while_read(text).map(drop)
}

/// Prints to stdout; breaks if the reader is gone.
pub fn print_while_read(text: &str) -> Result<ControlFlow<()>, Problem> {
    output::print(text).map_err(|error| Problem::failed("print", error))
}

/// The terminal's width in columns; `None` if stdout is not a terminal.
fn terminal_width() -> Option<u16> {
    let out = io::stdout();
    let size = out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten()?;
    Some(size.ws_col).filter(|columns| *columns > 0)
}
