//! `sr create` and `sr introduce`: turn a directory into a repository, either empty or with its existing contents.
//!
//! 1. `label`: the storage is mounted if necessary, the label is written, and the repository is opened once as a
//!    check. *Rollback:* the label is removed, unless it existed before.
//! 2. `record`: it is in the catalogue and attached. There is no rollback, because it may be in use from then on.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use api::{About, Code, ImageFormat, ObjectKind, OtherConfig, Problem, Sr, SrState, Tags, Variant};
use control::size::readable;
use repo::Tx;
use repo::catalogue::Among;
use repo::driver::{self, Attached, Directory, Label};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::Srs;
use super::inventory::Examined;
use super::probe::no_directory;
use crate::daemon::Daemon;
use crate::task::Context;
use crate::task::job::{Job, declare_steps};

/// Creates a repository in an empty directory.
pub type Create = Make<false>;
/// Turns existing contents into a repository.
pub type Introduce = Make<true>;

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Make<const KEPT: bool> {
    /// The repository to create.
    pub sr: Sr,
    /// The format of new VDIs, if one was specified.
    pub format: Option<ImageFormat>,
    /// Whether it already has its label.
    pub labelled: bool,
    /// Whether the request, rather than the repository, gave the name.
    pub named: bool,
    /// Whether the request gave the description.
    pub described: bool,
    /// Whether the request gave the tags.
    pub tagged: bool,
    /// Whether the request gave `other_config`.
    pub configured: bool,
    /// This daemon has found nothing there: there is nothing to roll back, and no reason to wait for a server again.
    #[serde(skip)]
    pub unreached: Arc<AtomicBool>,
    /// The directories that this daemon created for it, outermost first.
    #[serde(skip)]
    pub created: Arc<OnceLock<Vec<PathBuf>>>,
}

/// The properties given by the request; the others are taken from the repository.
#[derive(Debug)]
pub struct Given {
    /// Whether it has a name.
    pub name: bool,
    /// Whether it has a description.
    pub description: bool,
    /// Its tags.
    pub tags: Option<Tags>,
    /// Its `other_config` strings.
    pub other_config: Option<OtherConfig>,
}

impl<const KEPT: bool> Make<KEPT> {
    /// Creates the job for `sr`; `labelled` if its directory is already a repository.
    pub fn new(sr: Sr, format: Option<ImageFormat>, labelled: bool, given: Given) -> Make<KEPT> {
        let (tagged, configured) = (given.tags.is_some(), given.other_config.is_some());
        let (tags, other_config) = (given.tags.unwrap_or_default(), given.other_config.unwrap_or_default());
        Make {
            sr: Sr { tags, other_config, ..sr },
            format,
            labelled,
            named: given.name,
            described: given.description,
            tagged,
            configured,
            unreached: Arc::default(),
            created: Arc::default(),
        }
    }

    /// Refuses what already exists, in the commit that records the intent.
    pub fn prepare(&self, tx: &mut Tx<'_>, task: Uuid) -> Result<(), Problem> {
        let known = tx.srs()?;
        let found = known.iter().find(|other| other.uuid == self.sr.uuid || other.source == self.sr.source);
        if let Some(other) = found {
            return Err(is_known(other));
        }
        // A repository that is introduced keeps its own name: the other one may be on another host as well.
        if !self.named {
            return Ok(());
        }
        let name = &self.sr.name;
        let tried = if KEPT { format!("introduce SR '{name}'") } else { format!("create SR '{name}'") };
        tx.take_name(Among::Srs, name, task, &tried)
    }

    /// Whether it gets a label: a library never does.
    fn labels(&self) -> bool {
        !self.labelled && !matches!(self.sr.source, api::SrSource::Iso { .. })
    }

    /// Creates the directory of a new repository if it does not exist.
    async fn create_directory(&self, srs: &Srs) -> Result<(), Problem> {
        let api::SrSource::Dir { path } = &self.sr.source else { return Ok(()) };
        let path = path.clone();
        let created = srs.patience.ask(self.sr.uuid, "create", move || driver::create_directory(&path)).await?;
        for directory in &created {
            tracing::info!(sr = %self.sr.uuid, "created the directory {}", directory.display());
        }
        // A repeated step finds the directories of the first attempt.
        if !created.is_empty() {
            self.created.set(created).unwrap_or_default();
        }
        Ok(())
    }

    async fn label(&self, daemon: &Daemon) -> Result<(), Problem> {
        let srs = &daemon.srs;
        if !KEPT && !self.labelled {
            self.create_directory(srs).await?;
        }
        let found = srs.place_of(&self.sr).await;
        self.unreached.store(found.is_err(), Ordering::Relaxed);
        let path = found?;
        if self.labels() {
            let label = Label::new(self.sr.uuid, self.sr.name.clone(), self.format);
            let made = srs.patience.ask(self.sr.uuid, "make", move || driver::make(&path, &label, KEPT)).await;
            made.map_err(no_directory("check that its storage is mounted"))?;
        }
        // A repository that cannot be attached is refused while a rollback is possible.
        let Attached { directory, variant } = srs.open_it(&self.sr).await?;
        let directory = Arc::new(directory);
        if self.sr.reserve > 0 {
            let measured = directory.clone();
            let capacity = srs.patience.ask(self.sr.uuid, "measure", move || measured.capacity()).await?;
            must_fit(self.sr.reserve, capacity.size)?;
        }
        srs.examine(&self.sr, &directory, &variant, None, false).await.map(drop)
    }

    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (uuid, srs) = (self.sr.uuid, &daemon.srs);
        let mut sr = self.sr.clone();
        let examined = match self.open(srs).await {
            Ok((directory, variant, examined)) => {
                srs.keep(uuid, directory);
                sr.variant = Some(variant);
                Some(examined)
            }
            // It was available a moment ago, so it is marked as lost and retried.
            Err(problem) => {
                tracing::error!(sr = %uuid, "lost the repository right after it was created: {problem}");
                sr.state = SrState::Lost;
                None
            }
        };
        let job = self.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            let known = tx.find_sr(uuid)?.is_some();
            match (known, &examined) {
                (true, _) => {}
                (false, None) => tx.add_sr(&sr)?,
                (false, Some(examined)) => job.add(tx, &sr, examined)?,
            }
            Ok(examined)
        });
        match recorded.await {
            Ok(examined) => examined.into_iter().for_each(|examined| srs.keep_log(uuid, examined)),
            Err(problem) => {
                srs.close_directory(uuid).await?;
                return Err(problem);
            }
        }
        srs.measure_now(uuid).await;
        if KEPT && srs.open().contains_key(&uuid) {
            super::doubtful::hold(daemon, uuid).await;
            (srs.when_attached.reconcile)(daemon.clone(), uuid).await;
        }
        Ok(())
    }

    async fn open(&self, srs: &Srs) -> Result<(Arc<Directory>, Variant, Examined), Problem> {
        let Attached { directory, variant } = srs.open_it(&self.sr).await?;
        let directory = Arc::new(directory);
        let before = srs.discard_void_state(&self.sr, &directory, &variant).await?;
        let examined = srs.examine(&self.sr, &directory, &variant, None, false).await?;
        srs.record_last_host(self.sr.uuid, &directory, before).await;
        Ok((directory, variant, examined))
    }

    /// Adds it with everything in its inventory; properties given in the request take precedence.
    fn add(&self, tx: &mut Tx<'_>, sr: &Sr, examined: &Examined) -> Result<(), Problem> {
        tx.add_sr(sr)?;
        examined.record(tx, sr.uuid, false)?;
        let Some(words) = examined.words() else { return Ok(()) };
        let name = Some(sr.name.clone()).filter(|name| self.named && *name != words.name);
        let description = Some(sr.description.clone()).filter(|text| self.described && *text != words.description);
        let tags = Some(sr.tags.clone()).filter(|tags| self.tagged && *tags != words.tags);
        let other_config = Some(sr.other_config.clone()).filter(|map| self.configured && *map != words.other_config);
        let patch = api::SrPatch { name, description, tags, other_config, ..api::SrPatch::default() };
        tx.set_sr_words(sr.uuid, &patch).map(drop)
    }

    async fn unlabel(&self, daemon: &Daemon) -> Result<(), Problem> {
        let (srs, uuid) = (&daemon.srs, self.sr.uuid);
        let path = srs.place_of(&self.sr).await?;
        if !self.labels() {
            return Ok(());
        }
        srs.patience.ask(uuid, "remove the label of", move || driver::unmake(&path, uuid)).await
    }
}

declare_steps!(
    /// The steps of `sr-create` and `sr-introduce`.
    MakeStep { Label = "label", Record = "record" }
);

impl<const KEPT: bool> Job for Make<KEPT> {
    type Step = MakeStep;

    const VERB: &'static str = if KEPT { "sr-introduce" } else { "sr-create" };
    const NO_RETURN: MakeStep = MakeStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr.uuid]
    }

    /// The job itself attaches it.
    fn needs(&self) -> Vec<Uuid> {
        Vec::new()
    }

    fn about(&self) -> Vec<About> {
        vec![About { kind: ObjectKind::Sr, uuid: self.sr.uuid }]
    }

    async fn step(&self, step: MakeStep, daemon: &Daemon, _context: &Context) -> Result<(), Problem> {
        match step {
            MakeStep::Label => self.label(daemon).await,
            MakeStep::Record => self.record(daemon).await,
        }
    }

    /// Storage that cannot be reached keeps its label: the directory can be introduced later, and the rollback does
    /// not wait for a server that is gone.
    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if !self.unreached.load(Ordering::Relaxed) {
            if let Err(problem) = self.unlabel(daemon).await {
                tracing::warn!(sr = %self.sr.uuid, "its label may remain: {problem}");
            }
        }
        if let Some(created) = self.created.get().cloned() {
            let removed = move || {
                driver::remove_created(&created);
                Ok(())
            };
            daemon.srs.patience.ask(self.sr.uuid, "remove the directory of", removed).await?;
        }
        daemon.srs.leave_place(&self.sr).await;
        Ok(())
    }

    fn result(&self) -> Value {
        match self.created.get().and_then(|created| created.last()) {
            Some(directory) => json!({ "uuid": self.sr.uuid, "created_directory": directory }),
            None => json!({ "uuid": self.sr.uuid }),
        }
    }
}

/// The problem of creating or introducing a repository that is already known.
pub fn is_known(sr: &Sr) -> Problem {
    let what = format!("that is the repository '{}' ({}), which is already known", sr.name, sr.uuid);
    Problem::new(Code::Exists, what).field("source").advise("attach it, or forget it first")
}

/// Refuses a reserve as large as the storage.
pub fn must_fit(reserve: u64, size: u64) -> Result<(), Problem> {
    if reserve == 0 || reserve < size {
        return Ok(());
    }
    let what =
        format!("a reserve of {} leaves nothing of the storage, which has {}", readable(reserve), readable(size));
    Err(Problem::new(Code::Invalid, what).field("reserve").advise("give a smaller reserve"))
}

/// A repository before it is created.
pub fn new_sr(uuid: Uuid, name: api::Name, description: api::Description, source: api::SrSource, reserve: u64) -> Sr {
    let created = jiff::Timestamp::now();
    let state = SrState::Attached;
    let (tags, other_config) = Default::default();
    Sr {
        uuid,
        name,
        description,
        tags,
        other_config,
        source,
        state,
        health: api::Health::healthy(),
        variant: None,
        space: None,
        reserve,
        share_depth: api::SHARE_DEPTH,
        split: api::SizeRule::default(),
        merge: api::SizeRule::default(),
        policy: None,
        problem: None,
        created,
    }
}
