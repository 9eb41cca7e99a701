//! Inventories of attached repositories: compared with the catalogue when a repository is attached, and kept up to date
//! from then on (decision 0021).
//!
//! Invariants: a file with contents that the catalogue does not have is never overwritten automatically; if it cannot
//! be determined which of the two is older, attaching fails before anything is changed. A writer holds the log's lock
//! on the thread that waits for storage, so a late one does not write anything twice.

mod compare;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use api::{Code, Inventory, Problem, Sr, SrBelieve, SrSource, Variant};
use repo::Tx;
use repo::catalogue::TakenIn;
use repo::driver::{Directory, Label};
use repo::inventory::{self, Contents, Log, Read};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::Srs;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};
use compare::Verdict;

/// Interval between attempts to write inventories.
const AGAIN_AFTER: Duration = Duration::from_secs(15);

/// A log and its lock; `None` until the file has been written as a whole.
pub type Slot = Arc<Mutex<Option<Log>>>;

/// The result of comparing an inventory when attaching.
pub struct Examined {
    verdict: Verdict,
    /// Existing files with their physical sizes.
    files: HashMap<String, u64>,
    /// The repository is read-only.
    fixed: bool,
}

impl Srs {
    /// Compares a repository's inventory with the catalogue, without changing anything. If the repository was used
    /// `elsewhere` since, changes recorded in the catalogue but not written to the inventory are void, because the
    /// other host has used it without them.
    pub(super) async fn examine(
        &self,
        sr: &Sr,
        directory: &Arc<Directory>,
        variant: &Variant,
        believe: Option<SrBelieve>,
        elsewhere: bool,
    ) -> Result<Examined, Problem> {
        let (uuid, fixed) = (sr.uuid, variant.read_only);
        let files = HashMap::new();
        if matches!(sr.source, SrSource::Iso { .. }) {
            return Ok(Examined { verdict: Verdict::Nothing, files, fixed });
        }
        let at = directory.clone();
        let read = self.patience.ask(uuid, "read the inventory of", move || inventory::read(&at, uuid)).await?;
        let recorded = self.catalogue.read(move |view| view.inventory(uuid)).await?;
        let ignored = if recorded.is_none() { Planted::ForgottenNames } else { Planted::OldCatalogue };
        let read = if fault::planted(ignored) { Read::Absent } else { read };
        let verdict = compare::compare(sr, read, recorded.as_ref(), believe, elsewhere, fixed)?;
        let files = match &verdict {
            Verdict::TakeIn(_, contents) => {
                let said = contents.clone();
                self.catalogue.read(move |view| view.check_nowhere_else(uuid, &said)).await?;
                let at = directory.clone();
                let entries = self.patience.ask(uuid, "list", move || at.entries()).await?;
                entries.into_iter().filter(|entry| entry.file).map(|entry| (entry.name, entry.physical)).collect()
            }
            Verdict::Rewrite => {
                let at = directory.clone();
                self.patience.ask(uuid, "keep the inventory of", move || inventory::keep_damaged(&at)).await?;
                files
            }
            _ => files,
        };
        Ok(Examined { verdict, files, fixed })
    }

    /// Keeps the log of a repository from now on, in the state that was recorded.
    pub(super) fn keep_log(&self, sr: Uuid, examined: Examined) {
        let log = match examined.verdict {
            Verdict::Nothing => return,
            Verdict::Begin | Verdict::Rewrite => None,
            Verdict::Known(log) | Verdict::TakeIn(log, _) => Some(*log),
        };
        self.catalogue.outbox().wrote(sr, log.as_ref().map(|log| log.generation));
        if !examined.fixed {
            self.logs().insert(sr, Arc::new(Mutex::new(log)));
        }
    }

    /// Stops writing the inventory of a repository.
    pub(super) fn leave_log(&self, sr: Uuid) {
        self.logs().remove(&sr);
    }

    /// Ensures that the inventory of a repository contains everything recorded so far. A read-only repository has no
    /// inventory to write.
    pub async fn keep_inventory(&self, sr: Uuid) -> Result<(), Problem> {
        if !self.catalogue.outbox().is_behind(sr) {
            return Ok(());
        }
        let directory = self.directory(sr).await?;
        let Some(slot) = self.logs().get(&sr).cloned() else { return Ok(()) };
        let lines = self.catalogue.read(move |view| view.inventory_lines(sr)).await?;
        let (at, log) = (directory.clone(), slot.clone());
        fault::point("inventory", "append", false);
        let appended = self.patience.ask(sr, "write the inventory of", move || {
            let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(log) = log.as_mut().filter(|log| !log.is_doubtful()) else { return Ok(None) };
            match log.append(&at, sr, &lines) {
                Ok(()) => Ok(Some(log.generation)),
                Err(problem) if log.is_doubtful() => {
                    tracing::error!(%sr, "rewriting its inventory: {problem}");
                    Ok(None)
                }
                Err(problem) => Err(problem),
            }
        });
        let generation = match appended.await? {
            Some(generation) => generation,
            None => self.write_inventory(sr, directory, slot).await?,
        };
        fault::point("inventory", "append", true);
        self.catalogue.outbox().wrote(sr, Some(generation));
        Ok(())
    }

    /// Writes a complete inventory: the first time, or when it is unknown how much of the file is durable.
    async fn write_inventory(&self, sr: Uuid, directory: Arc<Directory>, slot: Slot) -> Result<u64, Problem> {
        let Some(recorded) = self.catalogue.read(move |view| view.inventory(sr)).await? else { return Ok(0) };
        let written = self.patience.ask(sr, "write the inventory of", move || {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(log) = slot.as_ref().filter(|log| !log.is_doubtful() && log.generation >= recorded.generation) {
                return Ok(log.generation);
            }
            let mut history = slot.as_ref().map(Log::history).unwrap_or_default();
            let reached = history.back().map(|(generation, _)| *generation);
            let heads = recorded.heads();
            history.extend(heads.into_iter().filter(|(at, _)| reached.is_none_or(|reached| *at > reached)));
            let head = (recorded.generation, recorded.head);
            let log = Log::write(&directory, sr, head, &recorded.contents, history)?;
            Ok(slot.insert(log).generation)
        });
        written.await
    }

    /// The inventory of an attached repository.
    pub async fn inventory(&self, sr: Uuid) -> Result<Inventory, Problem> {
        let directory = self.directory(sr).await?;
        self.patience.ask(sr, "read the inventory of", move || shown(&directory, sr)).await
    }

    /// The inventory of the repository on a storage.
    pub async fn inventory_at(&self, source: &SrSource) -> Result<Inventory, Problem> {
        repo::driver::mount::check(source)?;
        let known = self.catalogue.read(|view| view.srs()).await?;
        if let Some(sr) = known.iter().find(|sr| sr.source == *source && self.open().contains_key(&sr.uuid)) {
            return self.inventory(sr.uuid).await;
        }
        let uuid = Uuid::new_v4();
        let path = self.places.find(uuid, source).await?;
        let read = self.patience.ask(uuid, "read the inventory at", move || {
            let directory = Directory::open(&path)?;
            match Label::read(&directory)? {
                Some(label) => shown(&directory, label.uuid),
                None => Err(Problem::new(Code::NotFound, format!("there is no repository at {path}"))),
            }
        });
        let read = read.await;
        self.places.leave(uuid, source).await?;
        read
    }
}

fn shown(directory: &Directory, sr: Uuid) -> Result<Inventory, Problem> {
    match inventory::read(directory, sr)? {
        Read::Whole(log, contents) => {
            let Contents { words, images, vdis } = *contents;
            Ok(Inventory {
                sr,
                name: words.name,
                description: words.description,
                tags: words.tags,
                other_config: words.other_config,
                generation: log.generation,
                head: log.head,
                images: images.into_values().collect(),
                vdis: vdis.into_values().collect(),
            })
        }
        Read::Damaged(damage) => Err(damage.why),
        Read::Absent => {
            let what = format!("the repository {sr} has no inventory");
            Err(Problem::new(Code::NotFound, what).advise("attach it read-write to create one"))
        }
    }
}

impl Examined {
    /// Records the result, in the commit in which the repository is attached. With `outdated`, unfinished tasks of an
    /// older catalogue are ended and returned: their outcome is in the repository.
    pub(super) fn record(
        &self,
        tx: &mut Tx<'_>,
        sr: Uuid,
        outdated: bool,
    ) -> Result<Option<(TakenIn, Vec<Uuid>)>, Problem> {
        match &self.verdict {
            Verdict::Nothing | Verdict::Known(_) => Ok(None),
            Verdict::Begin | Verdict::Rewrite => tx.begin_inventory(sr).map(|()| None),
            Verdict::TakeIn(log, contents) => {
                let ended = if outdated { end_outdated(tx, sr)? } else { Vec::new() };
                // Running disks are compared after this, when they are adopted: a process's own report of its chain
                // takes precedence.
                tx.take_in(sr, (log.generation, &log.head), contents, &self.files).map(|taken| Some((taken, ended)))
            }
        }
    }

    /// The name and description recorded in the repository.
    pub(super) fn words(&self) -> Option<&inventory::Words> {
        match &self.verdict {
            Verdict::TakeIn(_, contents) => Some(&contents.words),
            _ => None,
        }
    }
}

/// Ends jobs of an older catalogue: rolling one back would remove what it has created since.
fn end_outdated(tx: &mut Tx<'_>, sr: Uuid) -> Result<Vec<Uuid>, Problem> {
    let mut ended = Vec::new();
    let vdis: Vec<Uuid> = tx.vdis(Some(sr))?.iter().map(|vdi| vdi.uuid).collect();
    for entry in tx.journal()? {
        let about = entry.task.about.iter().any(|about| about.uuid == sr || vdis.contains(&about.uuid));
        if about || entry.intent.to_string().contains(&sr.to_string()) {
            let what = "the catalogue was older than the repository; only the repository has this task's result";
            let problem = Problem::new(Code::Failed, what).advise("check the VDI, and repeat the request if necessary");
            tracing::warn!(task = %entry.task.uuid, verb = entry.task.verb, %sr, "ended: {problem}");
            tx.end_task(entry.task.uuid, Err(problem))?;
            ended.push(entry.task.uuid);
        }
    }
    Ok(ended)
}

/// Logs the number of updates.
pub(super) fn log_update(sr: &Sr, taken: &TakenIn) {
    let TakenIn { added, changed, removed, missing } = taken;
    let counts = [added, changed, removed, missing].map(Vec::len);
    tracing::warn!(
        sr = %sr.uuid, name = %sr.name, added = counts[0], changed = counts[1], removed = counts[2], missing = counts[3],
        "the catalogue was brought up to date from the repository's inventory"
    );
}

/// Keeps the inventories of attached repositories up to date, for the lifetime of the daemon.
pub async fn keep_inventories(daemon: Daemon) {
    let outbox = daemon.catalogue.outbox();
    loop {
        let attached: Vec<Uuid> = daemon.srs.logs().keys().copied().collect();
        let mut writing = JoinSet::new();
        for sr in outbox.behind().into_iter().filter(|sr| attached.contains(sr)) {
            let daemon = daemon.clone();
            writing.spawn(async move { daemon.srs.keep_inventory(sr).await.map_err(|problem| (sr, problem)) });
        }
        let mut failed = false;
        while let Some(written) = writing.join_next().await {
            if let Ok(Err((sr, problem))) = written {
                failed = true;
                tracing::error!(%sr, "its inventory is out of date; retrying: {problem}");
            }
        }
        match failed {
            false => outbox.more().await,
            true => drop(tokio::time::timeout(AGAIN_AFTER, outbox.more()).await),
        }
    }
}
