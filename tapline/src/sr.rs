//! `tapline sr`.

mod inventory;
mod shown;
mod source;

use api::{Description, ImageFormat, Name, Problem, Scan, SrBelieve, SrCreate, SrFound, SrIntroduce, SrPatch, SrProbe};
use uuid::Uuid;

use crate::confirm::Confirm;
use crate::session::{Listing, Outcome, Session, Waiting, print};
use crate::{removal, word};
use shown::{COLUMNS, FOUND, scanned};
use source::Source;

/// What can be done with storage repositories.
#[derive(clap::Subcommand)]
pub enum Verb {
    /// Make a repository in a place where there is none, and attach it
    Create(Create),
    /// List the repositories
    List {
        /// Only those of this name, or whose UUID begins so
        text: Option<String>,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a repository: what it lies on, how full it is and when it will be full
    Show {
        /// Its name or the beginning of its UUID
        sr: String,
    },
    /// Look for repositories in a place, and change nothing
    Probe {
        #[command(flatten)]
        source: Source,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Make a repository known that exists, or a directory of images that others have made
    Introduce(Introduce),
    /// Make a repository usable: what it lies on is mounted
    Attach(Attach),
    /// Let what a repository lies on go; none of its disks may be plugged
    Detach(One),
    /// Look at all files of a repository, and tell what has appeared and what is missing
    Scan(One),
    /// Show what a repository says of itself in its own file: names, identities, what stands on what
    Inventory {
        /// Its name or the beginning of its UUID; or a directory, with a slash in it, whether known or not
        sr: String,
    },
    /// Make a repository unknown; all that it holds stays as it is
    Forget(One),
    /// Destroy a repository with all that it holds
    Destroy(Destroy),
    /// Change a repository's name, description or reserve
    Set(Set),
}

/// A verb without options of its own.
#[derive(clap::Args)]
pub struct One {
    /// Its name or the beginning of its UUID
    sr: String,
    #[command(flatten)]
    waiting: Waiting,
}

/// Attaches a repository.
#[derive(clap::Args)]
pub struct Attach {
    /// Its name or the beginning of its UUID
    sr: String,
    /// Whose word counts if the repository's own file and this host's catalogue have diverged, as after a backup of one
    /// of them was put back: that of the repository, or that of the catalogue. What the other one says is given up
    #[arg(long, value_name = "WHOM", value_parser = word::one_of::<SrBelieve>(&["repository", "catalogue"]))]
    believe: Option<SrBelieve>,
    #[command(flatten)]
    waiting: Waiting,
}

/// Makes a repository.
#[derive(clap::Args)]
pub struct Create {
    /// Its name
    name: Name,
    #[command(flatten)]
    source: Source,
    /// Its description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    /// Bytes to leave free: nothing new is begun that would take them
    #[arg(long, value_name = "SIZE", value_parser = word::bytes, default_value = "0")]
    reserve: u64,
    /// The format of new disks for which none is named [default: what suits the file system]
    #[arg(long, value_name = "FORMAT", value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    waiting: Waiting,
}

/// Makes a repository known.
#[derive(clap::Args)]
pub struct Introduce {
    /// Its name [default: the one that it has]
    name: Option<Name>,
    #[command(flatten)]
    source: Source,
    /// Its UUID, as «sr probe» shows it; if there is no repository there yet, it is given one
    #[arg(long)]
    uuid: Option<Uuid>,
    /// Its description [default: the one that it has]
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Bytes to leave free
    #[arg(long, value_name = "SIZE", value_parser = word::bytes, default_value = "0")]
    reserve: u64,
    #[command(flatten)]
    waiting: Waiting,
}

/// Destroys a repository.
#[derive(clap::Args)]
pub struct Destroy {
    /// Its name or the beginning of its UUID
    sr: String,
    /// Only tell what would be destroyed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Changes a repository.
#[derive(clap::Args)]
#[command(group = word::changes(&["name", "description", "reserve"]))]
#[group(skip)]
pub struct Set {
    /// Its name or the beginning of its UUID
    sr: String,
    /// Its new name
    #[arg(long)]
    name: Option<Name>,
    /// Its new description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Bytes to leave free from now on
    #[arg(long, value_name = "SIZE", value_parser = word::bytes)]
    reserve: Option<u64>,
}

impl Verb {
    /// Does it.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            Verb::Create(create) => create.run(session).await,
            Verb::List { text, listing } => session.list(&client.srs(text.as_deref()).await?, COLUMNS, &listing),
            Verb::Show { sr } => session.show(&client.sr(session.sr(&sr).await?).await?, COLUMNS),
            Verb::Probe { source, waiting } => probe(session, source, waiting).await,
            Verb::Introduce(introduce) => introduce.run(session).await,
            Verb::Attach(Attach { sr, believe, waiting }) => {
                session.did(client.sr_attach(session.sr(&sr).await?, believe).await?, waiting).await
            }
            Verb::Detach(One { sr, waiting }) => {
                session.did(client.sr_detach(session.sr(&sr).await?).await?, waiting).await
            }
            Verb::Inventory { sr } => inventory::show(session, &sr).await,
            Verb::Scan(One { sr, waiting }) => scan(session, &sr, waiting).await,
            Verb::Forget(One { sr, waiting }) => {
                session.did(client.sr_forget(session.sr(&sr).await?).await?, waiting).await
            }
            Verb::Destroy(destroy) => destroy.run(session).await,
            Verb::Set(Set { sr, name, description, reserve }) => {
                let patch = SrPatch { name, description, reserve };
                let sr = client.sr_set(session.sr(&sr).await?, &patch).await?;
                if session.json() { session.value(&sr) } else { Ok(()) }
            }
        }
    }
}

impl Create {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Create { name, source, description, reserve, format, waiting } = self;
        let asked = SrCreate { name, description, source: source.place(session)?, reserve, format };
        session.made(session.client.sr_create(&asked).await?, waiting).await
    }
}

impl Introduce {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Introduce { name, source, uuid, description, reserve, waiting } = self;
        let asked = SrIntroduce { uuid, name, description, source: source.place(session)?, reserve };
        session.made(session.client.sr_introduce(&asked).await?, waiting).await
    }
}

impl Destroy {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let sr = session.client.sr(session.sr(&self.sr).await?).await?;
        if self.dry_run {
            return removal::told(session, session.client.sr_destroy(sr.uuid, true).await?, self.waiting).await;
        }
        self.confirm.ask(&format!("destroy the sr «{}» ({}) with all that it holds", sr.name, sr.uuid))?;
        session.did(session.client.sr_destroy(sr.uuid, false).await?, self.waiting).await
    }
}

async fn probe(session: &Session, source: Source, waiting: Waiting) -> Result<(), Problem> {
    let answer = session.client.sr_probe(&SrProbe { source: source.place(session)? }).await?;
    match session.outcome(answer, waiting).await? {
        Outcome::Done(found) => {
            let found: Vec<SrFound> =
                serde_json::from_value(found).map_err(|error| Problem::failed("read what was found", error))?;
            print(&crate::column::table(&found, FOUND, true, None))
        }
        Outcome::Told => Ok(()),
    }
}

async fn scan(session: &Session, sr: &str, waiting: Waiting) -> Result<(), Problem> {
    let answer = session.client.sr_scan(session.sr(sr).await?).await?;
    match session.outcome(answer, waiting).await? {
        Outcome::Done(scan) => {
            let scan: Scan =
                serde_json::from_value(scan).map_err(|error| Problem::failed("read what the scan found", error))?;
            print(&api::visible(&scanned(&scan)))
        }
        Outcome::Told => Ok(()),
    }
}
