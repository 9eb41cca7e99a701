//! `tapline sr`: storage repositories.

mod calibrate;
mod inventory;
mod shown;
mod source;

use api::{
    Description, ImageFormat, Name, Problem, Scan, SrBelieve, SrCreate, SrDestroyPlan, SrFound, SrIntroduce, SrPatch,
    SrProbe, SrSource,
};
use arguments::number;
use control::SizeRule;
use serde_json::Value;
use uuid::Uuid;

use crate::column::{Layout, table};
use crate::confirm::Confirm;
use crate::label::{ChangeLabels, NewLabels, WithTags};
use crate::output::say;
use crate::session::{Listing, Outcome, Session, Waiting, named, print};
use crate::{removal, word};
use shown::{COLUMNS, FOUND, scanned};
use source::Source;

pub use shown::location;

/// Operations on storage repositories.
#[derive(clap::Subcommand)]
pub enum SrVerb {
    /// Create a repository in an empty directory, or in a new one, and attach it
    Create(Create),
    /// List the repositories
    #[command(visible_alias = "ls")]
    List {
        /// Only those with this name or UUID prefix
        #[arg(value_parser = word::listed("sr"))]
        text: Option<String>,
        #[command(flatten)]
        tags: WithTags,
        #[command(flatten)]
        listing: Listing,
    },
    /// Show a repository: its storage, free space and forecast
    Show {
        /// Name or UUID prefix
        sr: String,
    },
    /// Look for repositories on a storage; changes nothing
    Probe {
        #[command(flatten)]
        source: Source,
        #[command(flatten)]
        waiting: Waiting,
    },
    /// Add an existing repository, or a directory of existing images
    Introduce(Introduce),
    /// Mount a repository's storage and make it usable
    Attach(Attach),
    /// Detach a repository; none of its disks may be plugged
    Detach(OneSr),
    /// Scan all files of a repository and report new and missing ones
    Scan(OneSr),
    /// Measure which I/O sizes the repository's storage handles best; its disks then use them
    Calibrate(calibrate::Calibrate),
    /// Show a repository's own inventory file: names, UUIDs and parents of its disks
    Inventory {
        /// Name or UUID prefix; or a directory (with a slash in it), whether known or not
        sr: String,
    },
    /// Forget a repository; keep its files
    Forget(OneSr),
    /// Destroy a repository with everything in it
    #[command(visible_alias = "rm", aliases = ["delete", "remove"])]
    Destroy(Destroy),
    /// Change a repository's name, description, reserve, share depth or sizes of transfers
    Set(Set),
}

/// Arguments of a verb without options of its own.
#[derive(clap::Args)]
pub struct OneSr {
    /// Name or UUID prefix
    sr: String,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `sr attach`.
#[derive(clap::Args)]
pub struct Attach {
    /// Name or UUID prefix
    sr: String,
    /// Which side to keep if the repository's own inventory and this host's catalogue have diverged, for example after
    /// one of them was restored from a backup; the other side's changes are discarded
    #[arg(long, value_name = "WHOM", value_parser = word::one_of::<SrBelieve>(&["repository", "catalogue"]))]
    believe: Option<SrBelieve>,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `sr create`.
#[derive(clap::Args)]
pub struct Create {
    /// Name of the repository
    name: Name,
    #[command(flatten)]
    source: Source,
    /// Description
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    description: Description,
    /// Bytes to keep free: operations that would use them are refused
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::bytes, default_value = "0")]
    reserve: u64,
    /// Default format of new disks [default: depends on the file system]
    #[arg(long, value_name = "FORMAT", value_parser = word::one_of::<ImageFormat>(&word::FORMATS))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `sr introduce`.
#[derive(clap::Args)]
pub struct Introduce {
    /// Name [default: the recorded name]
    name: Option<Name>,
    #[command(flatten)]
    source: Source,
    /// UUID, as shown by 'sr probe'; if there is no repository yet, it is given this one
    #[arg(long)]
    uuid: Option<Uuid>,
    /// Description [default: the recorded description]
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Bytes to keep free
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::bytes, default_value = "0")]
    reserve: u64,
    #[command(flatten)]
    labels: NewLabels,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `sr destroy`.
#[derive(clap::Args)]
pub struct Destroy {
    /// Name or UUID prefix
    sr: String,
    /// Only report what would be destroyed
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    confirm: Confirm,
    #[command(flatten)]
    waiting: Waiting,
}

/// Arguments of `sr set`.
#[derive(clap::Args)]
#[command(group = word::changes(&[
    "name", "description", "reserve", "share_depth", "io_split", "io_merge", "tag", "no_tag", "config", "no_config",
]))]
#[group(skip)]
pub struct Set {
    /// Name or UUID prefix
    sr: String,
    /// New name
    #[arg(long)]
    name: Option<Name>,
    /// New description
    #[arg(long, value_name = "TEXT")]
    description: Option<Description>,
    /// Bytes to keep free from now on
    #[arg(long, value_name = "SIZE", allow_hyphen_values = true, value_parser = word::bytes)]
    reserve: Option<u64>,
    /// Requests in flight of all its plugged disks together, beyond which a disk waits that has had more than others:
    /// about what the storage can do at once [default when created: 128]
    #[arg(long, value_name = "N", value_parser = number::<u32>(1..=4096))]
    share_depth: Option<u32>,
    /// Split larger transfers of its disks into pieces of this size, a power of two; none; or auto: as a
    /// calibration has found [default when created: auto]
    #[arg(long, value_name = "SIZE|none|auto")]
    io_split: Option<SizeRule>,
    /// Merge adjacent transfers of its disks up to this size, a power of two; none; or auto [default when created:
    /// auto]
    #[arg(long, value_name = "SIZE|none|auto")]
    io_merge: Option<SizeRule>,
    #[command(flatten)]
    labels: ChangeLabels,
}

impl SrVerb {
    /// Runs the verb and prints its output.
    pub async fn run(self, session: &Session) -> Result<(), Problem> {
        let client = &session.client;
        match self {
            SrVerb::Create(create) => create.run(session).await,
            SrVerb::List { text, tags, listing } => {
                session.list(&client.srs_tagged(text.as_deref(), &tags.tag).await?, COLUMNS, &listing)
            }
            SrVerb::Show { sr } => session.show(&client.sr(session.sr(&sr).await?).await?, COLUMNS),
            SrVerb::Probe { source, waiting } => probe(session, source, waiting).await,
            SrVerb::Introduce(introduce) => introduce.run(session).await,
            SrVerb::Attach(Attach { sr, believe, waiting }) => {
                session.complete(client.sr_attach(session.sr(&sr).await?, believe).await?, waiting).await
            }
            SrVerb::Detach(OneSr { sr, waiting }) => {
                session.complete(client.sr_detach(session.sr(&sr).await?).await?, waiting).await
            }
            SrVerb::Inventory { sr } => inventory::show(session, &sr).await,
            SrVerb::Calibrate(calibrate) => calibrate.run(session).await,
            SrVerb::Scan(OneSr { sr, waiting }) => scan(session, &sr, waiting).await,
            SrVerb::Forget(OneSr { sr, waiting }) => {
                session.complete(client.sr_forget(session.sr(&sr).await?).await?, waiting).await
            }
            SrVerb::Destroy(destroy) => destroy.run(session).await,
            SrVerb::Set(set) => set.run(session).await,
        }
    }
}

impl Set {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Set { sr, name, description, reserve, share_depth, io_split, io_merge, labels } = self;
        let uuid = session.sr(&sr).await?;
        let now = match labels.changes_some() {
            true => session.client.sr(uuid).await.map(|sr| (sr.tags, sr.other_config))?,
            false => Default::default(),
        };
        let (tags, other_config) = labels.of(now)?;
        let (split, merge) = (io_split.map(rule), io_merge.map(rule));
        let patch = SrPatch { name, description, reserve, share_depth, split, merge, tags, other_config };
        let sr = session.client.sr_set(uuid, &patch).await?;
        if session.json() { session.value(&sr) } else { Ok(()) }
    }
}

/// Converts a rule to the API's type.
fn rule(rule: SizeRule) -> api::SizeRule {
    match rule {
        SizeRule::None => api::SizeRule::None,
        SizeRule::Bytes(bytes) => api::SizeRule::Bytes(bytes),
        SizeRule::Auto => api::SizeRule::Auto,
    }
}

impl Create {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Create { name, source, description, reserve, format, labels, waiting } = self;
        let (tags, other_config) = labels.values()?;
        let source = source.resolve(session)?;
        let request = SrCreate { uuid: None, name, description, source, reserve, format, tags, other_config };
        let Outcome::Done(sr) = session.outcome(session.client.sr_create(&request).await?, waiting).await? else {
            return Ok(());
        };
        if let Some(directory) = sr.get("created_directory").and_then(Value::as_str) {
            say(&format!("created the directory {}\n", api::visible(directory)));
        }
        sr.get("uuid").and_then(Value::as_str).map_or(Ok(()), |uuid| print(&format!("{uuid}\n")))
    }
}

impl Introduce {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let Introduce { name, source, uuid, description, reserve, labels, waiting } = self;
        let source = source.resolve(session)?;
        let (tags, other_config) = labels.values()?;
        // Labels that are not given stay as the repository has them.
        let (tags, other_config) =
            (Some(tags).filter(|tags| !tags.is_empty()), Some(other_config).filter(|map| !map.is_empty()));
        let request = SrIntroduce { uuid, name, description, source, reserve, tags, other_config };
        // Otherwise it was a plain directory of images, which a scan turns into disks.
        let labelled = request.uuid.is_some() || matches!(request.source, SrSource::Iso { .. });
        match session.outcome(session.client.sr_introduce(&request).await?, waiting).await? {
            Outcome::Done(sr) => {
                let Some(uuid) = sr.get("uuid").and_then(Value::as_str) else { return Ok(()) };
                print(&format!("{uuid}\n"))?;
                if labelled {
                    return Ok(());
                }
                match Uuid::parse_str(uuid) {
                    Ok(uuid) => scan_of(session, uuid).await.map(|report| say(&report)),
                    Err(error) => Err(Problem::failed("read the answer", error)),
                }
            }
            Outcome::Printed if labelled => Ok(()),
            Outcome::Printed => {
                say("the images in it become disks with 'tapline sr scan'\n");
                Ok(())
            }
        }
    }
}

impl Destroy {
    async fn run(self, session: &Session) -> Result<(), Problem> {
        let sr = session.client.sr(session.sr(&self.sr).await?).await?;
        if self.dry_run {
            let what = named("repository", sr.name.as_str(), sr.uuid);
            let plan = session.client.sr_destroy(sr.uuid, true).await?;
            return removal::show::<SrDestroyPlan>(session, &what, plan, self.waiting).await;
        }
        self.confirm
            .ask(&format!("destroy {} with everything in it", named("repository", sr.name.as_str(), sr.uuid)))?;
        session.complete(session.client.sr_destroy(sr.uuid, false).await?, self.waiting).await
    }
}

async fn probe(session: &Session, source: Source, waiting: Waiting) -> Result<(), Problem> {
    let answer = session.client.sr_probe(&SrProbe { source: source.resolve(session)? }).await?;
    match session.outcome(answer, waiting).await? {
        Outcome::Done(found) => {
            let found: Vec<SrFound> =
                serde_json::from_value(found).map_err(|error| Problem::failed("parse the probe's result", error))?;
            print(&table(&found, FOUND, &Layout { wide: true, ..Layout::default() })?)
        }
        Outcome::Printed => Ok(()),
    }
}

async fn scan(session: &Session, sr: &str, waiting: Waiting) -> Result<(), Problem> {
    let sr = session.sr(sr).await?;
    match session.outcome(session.client.sr_scan(sr).await?, waiting).await? {
        Outcome::Done(scan) => print(&scan_report(session, sr, scan).await?),
        Outcome::Printed => Ok(()),
    }
}

/// Scans a repository and waits; returns the report.
async fn scan_of(session: &Session, sr: Uuid) -> Result<String, Problem> {
    let scan = session.finish(session.client.sr_scan(sr).await?).await?;
    scan_report(session, sr, scan).await
}

/// The report of a scan, with a description of each disk.
async fn scan_report(session: &Session, sr: Uuid, scan: Value) -> Result<String, Problem> {
    let scan: Scan = serde_json::from_value(scan).map_err(|error| Problem::failed("parse the scan's result", error))?;
    let vdis = match scan.appeared.iter().any(|placed| placed.vdi.is_some()) {
        true => session.client.vdis(Some(sr), None).await?,
        false => Vec::new(),
    };
    Ok(api::visible(&scanned(&scan, &vdis)).into_owned())
}
