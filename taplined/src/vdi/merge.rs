//! `vdi-merge`: merges images without a VDI into their neighbours, to keep chains short.
//!
//! A *run* is a hidden image with exactly one child, together with the hidden images above it that also have one; the
//! image above the run, its *head*, belongs to a VDI or has several children. The run is merged into its lowest
//! image.
//!
//! 1. `merge`: the disk process moves the data of the upper images into the lowest, on a live disk or not. *If
//!    killed:* the chain is as before or, at the very end, the image above is already based on the lowest one; when
//!    requested again, the disk process continues with the rest (docs/control.md). So this step is repeated until it
//!    succeeds, unless that is impossible: then the files show how far it got, and the catalogue is updated from
//!    them.
//! 2. `record`: the chain is shorter in the catalogue.
//! 3. `remove`: the files without data are removed.

mod tree;

use std::collections::HashMap;
use std::ffi::OsString;
use std::pin::pin;
use std::time::{Duration, Instant};

use api::{About, Code, Mode, Problem};
use control::{IsDone, answer, ask};
use repo::catalogue::{Image, ImageState};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::destroy::Reclaim;
use super::file::{physical, remove_file};
use super::{Chain, about_vdi};
use crate::background;
use crate::daemon::Daemon;
use crate::disk::live;
use crate::fault::{self, Planted};
use crate::task::Context;
use crate::task::job::{Job, declare_steps};
use crate::task::wanted::Wanted;
use tree::{Tracked, Tree, runs};

/// How long a disk may take to stop a cancelled merge: writes in flight must become durable.
const TO_CANCEL: Duration = Duration::from_secs(120);

/// Interval of repeating the cancellation.
const CANCEL_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Time limit for stopping one disk's merge before an undo is retried.
const TO_CANCEL_AT_ONCE: Duration = Duration::from_secs(10);

/// The intent of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Merge {
    /// The repository.
    pub sr: Uuid,
    /// The images that are merged, from the top down.
    pub sources: Vec<Uuid>,
    /// The image that receives their data, below the last of them.
    pub target: Uuid,
    /// The child of the first source, if there is one.
    pub above: Option<Uuid>,
    /// The VDI of the first of them, if there is one; it is then moved to the target.
    pub vdi: Option<Uuid>,
    /// The VBD through which a VDI above is being written, if there is one: its disk process does the work.
    pub vbd: Option<Uuid>,
    /// The VDI of that VBD.
    pub live: Option<Uuid>,
}

declare_steps!(
    /// The steps of `vdi-merge`.
    MergeStep { Merge = "merge", Record = "record", Remove = "remove" }
);

impl Job for Merge {
    type Step = MergeStep;

    const VERB: &'static str = "vdi-merge";
    const NO_RETURN: MergeStep = MergeStep::Record;
    const TIDIES: bool = true;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.sr]
    }

    fn about(&self) -> Vec<About> {
        let vdis = self.vdi.iter().chain(&self.live).copied().map(about_vdi);
        let mut about = vec![About { kind: api::ObjectKind::Sr, uuid: self.sr }];
        about.extend(vdis);
        about.dedup();
        about
    }

    async fn step(&self, step: MergeStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            MergeStep::Merge => self.merge(daemon, context).await,
            MergeStep::Record => self.record(daemon).await,
            MergeStep::Remove => self.remove(daemon).await,
        }
    }

    /// The contents are unchanged, whatever data has been moved. Only if the child is already based on the target is
    /// the merge complete, and must be recorded.
    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(vbd) = self.vbd {
            end_live(daemon, vbd).await?;
        }
        let first = self.lowest_shown();
        if daemon.catalogue.read(move |view| view.find_image(first)).await?.is_none() {
            // An earlier daemon has found it complete, and has started to remove the merged images.
            daemon.srs.keep_inventory(self.sr).await?;
            return self.remove(daemon).await;
        }
        if self.is_done(daemon).await? {
            self.record(daemon).await?;
            daemon.srs.keep_inventory(self.sr).await?;
            return self.remove(daemon).await;
        }
        Ok(())
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.sr, "merged": self.sources.len() })
    }
}

impl Merge {
    async fn merge(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let (chain, from, into) = self.layers(daemon).await?;
        if let Some(vbd) = self.vbd {
            return self.merge_live(daemon, context, vbd, &chain, from, into).await;
        }
        let handing = chain.handing(into.saturating_add(1)).await?;
        let merged = daemon.tool.long_image(words(&chain, from, into), handing, |part| context.progress(part));
        context.unless_cancelled(async { Ok(merged.await?) }).await.map(|IgnoredAny| ())
    }

    async fn merge_live(
        &self,
        daemon: &Daemon,
        context: &Context,
        vbd: Uuid,
        chain: &Chain,
        from: usize,
        into: usize,
    ) -> Result<(), Problem> {
        let verb = ask::Merge { from, into, follow: true, expect: Some(chain.names()), ..ask::Merge::default() };
        let files = || async {
            // If the task was cancelled in the meantime, a replacement process does not get the request again.
            context.check()?;
            chain.files_below(into).await
        };
        let on_progress = |merge: answer::Merge| {
            merge.progress().into_iter().for_each(|progress| context.progress(progress.part()));
        };
        let mut merged = pin!(live::follow(daemon, vbd, verb, files, on_progress));
        tokio::select! {
            merged = &mut merged => return merged.map(drop),
            () = context.cancelled() => {}
        }
        // It stops when writes in flight are durable, and reports the result: it may even have completed. The disk
        // accepts other verbs then.
        let begun = Instant::now();
        while begun.elapsed() < TO_CANCEL {
            let cancelled = live::ask(daemon, vbd, ask::MergeCancel {}, Vec::new()).await;
            // It has just ended, or the disk has not yet received the request to begin.
            if let Some(problem) = cancelled.err().map(Problem::from).filter(|none| none.code != Code::State) {
                return Err(problem);
            }
            if let Ok(ended) = tokio::time::timeout(CANCEL_AGAIN_AFTER, &mut merged).await {
                return ended.map(drop);
            }
        }
        Err(does_not_end(vbd))
    }

    /// The chain from the image above down (that of the whole VDI, if it is live), and the range of layers to merge.
    async fn layers(&self, daemon: &Daemon) -> Result<(Chain, usize, usize), Problem> {
        let first = self.sources.first().copied().unwrap_or(self.target);
        let chain = match self.live {
            Some(vdi) => Chain::of_vdi(daemon, vdi).await?,
            None => Chain::of_image(daemon, self.above.unwrap_or(first)).await?,
        };
        let place = |image| chain.images.iter().position(|other| other.uuid == image);
        match (place(first), place(self.target)) {
            (Some(from), Some(into)) if from < into => Ok((chain, from, into)),
            _ => Err(Problem::new(Code::State, "the chain changed; retry")),
        }
    }

    /// Whether all data has been moved and the image above, if any, is based on the target. The process that has the
    /// disk open knows; without one, the files tell.
    async fn is_done(&self, daemon: &Daemon) -> Result<bool, Problem> {
        if fault::planted(Planted::ForgottenMerge) && self.above.is_none() {
            return Ok(false);
        }
        if let Some(vbd) = self.vbd {
            if let Some(layers) = live::layers(daemon, vbd).await? {
                let (first, target) = (self.lowest_shown(), self.target);
                let images = daemon.catalogue.read(move |view| Ok((view.find_image(first)?, view.image(target)?)));
                let (first, target) = images.await?;
                let has = |image: &Image| layers.iter().any(|layer| layer.names(&image.file));
                return Ok(has(&target) && !first.is_some_and(|first| has(&first)));
            }
        }
        let (chain, from, into) = match self.layers(daemon).await {
            Ok(layers) => layers,
            // The catalogue already has the shorter chain.
            Err(other) if other.code == Code::State => return Ok(false),
            Err(problem) => return Err(problem),
        };
        let handing = chain.handing(into.saturating_add(1)).await?;
        let mut words = words(&chain, from, into);
        words.push("--is-done".into());
        let IsDone { done } = daemon.tool.image(words, handing).await?;
        Ok(done)
    }

    async fn record(&self, daemon: &Daemon) -> Result<(), Problem> {
        let job = self.clone();
        let target = self.target;
        let file = daemon.catalogue.read(move |view| view.image(target)).await?.file;
        let physical = physical(daemon, self.sr, &file).await?;
        daemon.catalogue.write(move |tx| job.record_in(tx, physical)).await
    }

    fn record_in(&self, tx: &mut repo::Tx<'_>, physical: u64) -> Result<(), Problem> {
        let mut target = tx.image(self.target)?;
        target.physical = physical;
        if let Some(first) = self.sources.first().and_then(|first| tx.find_image(*first).transpose()) {
            target.size = target.size.max(first?.size);
        }
        tx.set_image(&target)?;
        if let Some(above) = self.above {
            let mut above = tx.image(above)?;
            above.parent = Some(self.target);
            tx.set_image(&above)?;
        }
        if let Some(vdi) = self.vdi {
            tx.set_vdi_image(vdi, self.target)?;
        }
        Ok(())
    }

    /// Removes the sources from the top down: they have no children except each other.
    async fn remove(&self, daemon: &Daemon) -> Result<(), Problem> {
        for source in self.sources.iter().copied() {
            let Some(image) = daemon.catalogue.read(move |view| view.find_image(source)).await? else { continue };
            remove_file(daemon, self.sr, &image.file).await?;
            daemon.catalogue.write(move |tx| tx.remove_image(source)).await?;
        }
        Ok(())
    }

    /// Whether this is still a run: it was found in an earlier state of the catalogue.
    fn is_still_a_run(&self, view: &repo::View<'_>) -> Result<bool, Problem> {
        let mut child = self.above;
        for (depth, image) in self.sources.iter().chain([&self.target]).enumerate() {
            let shown_by = if depth == 0 { self.vdi } else { None };
            let children: Vec<Uuid> = view.children(*image)?.iter().map(|child| child.uuid).collect();
            let known = view.find_image(*image)?.is_some();
            if !known || view.vdi_of_image(*image)? != shown_by || children != Vec::from_iter(child) {
                return Ok(false);
            }
            child = Some(*image);
        }
        Ok(true)
    }

    /// The lowest image that a VDI may use: all below it are hidden.
    fn lowest_shown(&self) -> Uuid {
        self.sources.first().copied().unwrap_or(self.target)
    }

    /// Prepares the merge: no other operation changes or uses any of these files from now on.
    pub fn prepare(&self, task: Uuid, wanted: &Wanted, tx: &mut repo::Tx<'_>) -> Result<(), Problem> {
        if !self.is_still_a_run(tx)? {
            let what = "the chain changed in the meantime";
            return Err(Problem::new(Code::Busy, what).advise("Tapline retries automatically"));
        }
        for image in self.sources.iter().chain([&self.target]).chain(&self.above) {
            tx.claim(*image, task)?;
        }
        // The VDI of the first source, if it has one, and all VDIs above it.
        for vdi in tx.vdis_above(self.lowest_shown())? {
            if wanted.is(vdi) {
                return Err(
                    Problem::new(Code::Busy, format!("VDI {vdi} is reserved by another operation")).advise("try again")
                );
            }
            if Some(vdi) == self.live {
                super::hold(tx, vdi, task, self.vbd)?;
            } else {
                tx.take_lease(vdi, task, Mode::ReadWrite)?;
            }
        }
        Ok(())
    }
}

/// Stops a disk's merge, if one is running. An earlier daemon may have requested it: if it completed unnoticed, the
/// merged files would be left over.
async fn end_live(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let begun = Instant::now();
    while begun.elapsed() < TO_CANCEL_AT_ONCE {
        match daemon.disks.ask(vbd, ask::MergeCancel {}, TO_CANCEL_AT_ONCE).await {
            // It stops when writes in flight are durable.
            Ok(_) => tokio::time::sleep(CANCEL_AGAIN_AFTER).await,
            // No merge is running, or the disk no longer exists.
            Err(none) if matches!(none.code, Code::State | Code::Failed) => return Ok(()),
            Err(problem) => return Err(problem),
        }
    }
    Err(does_not_end(vbd))
}

fn does_not_end(vbd: Uuid) -> Problem {
    Problem::new(Code::Timeout, format!("the disk of VBD {vbd} does not stop a cancelled merge"))
}

/// The arguments of `image merge` for layers of a chain.
fn words(chain: &Chain, from: usize, into: usize) -> Vec<OsString> {
    let mut words = vec!["merge".into()];
    words.extend(chain.words());
    words.extend(["--from".into(), from.to_string().into(), "--into".into(), into.to_string().into()]);
    words
}

/// Cleans up after a job in a repository.
pub fn tidy_up(daemon: &Daemon, sr: Uuid, done: bool) {
    if done {
        daemon.postponed.done(sr);
        collect(daemon, sr);
    } else {
        postpone(daemon, sr);
    }
}

/// Starts, in the background, the removal of images in a repository that are no longer needed.
pub fn collect(daemon: &Daemon, sr: Uuid) {
    let daemon = daemon.clone();
    background::spawn(async move {
        if !collect_now(&daemon, sr).await {
            postpone(&daemon, sr);
        }
    });
}

/// Retries after a pause.
fn postpone(daemon: &Daemon, sr: Uuid) {
    let Some(pause) = daemon.postponed.begin(sr) else { return };
    let daemon = daemon.clone();
    background::spawn(async move {
        tokio::time::sleep(pause).await;
        daemon.postponed.waited(sr);
        collect(&daemon, sr);
    });
}

/// The images of a repository, the VDIs by their images, and the leaves that are tracked.
async fn images(daemon: &Daemon, sr: Uuid) -> Result<(Vec<Image>, HashMap<Uuid, Uuid>, Tracked), Problem> {
    let asked = daemon.catalogue.read(move |view| {
        let mut tracked = Tracked::default();
        for (vdi, image, tracking) in view.tracked_vdis(sr)? {
            if !tracking.enabled || tracking.maps.is_empty() {
                continue;
            }
            tracked.all.insert(image);
            if super::leaf::writer_of(&view.vdi(vdi)?).is_none() {
                tracked.halted.insert(image);
            }
        }
        Ok((view.images_of_sr(sr)?, view.vdis_by_image(sr)?, tracked))
    });
    asked.await
}

/// All merges that would shorten chains of a repository.
pub async fn runs_of(daemon: &Daemon, sr: Uuid) -> Result<Vec<Merge>, Problem> {
    let (images, shown_by, tracked) = images(daemon, sr).await?;
    Ok(runs(&images, &shown_by, &tracked))
}

/// Starts all cleanup jobs; returns false if one was prevented by another operation.
async fn collect_now(daemon: &Daemon, sr: Uuid) -> bool {
    begin_all(daemon, sr).await.unwrap_or_else(|problem| {
        // Its repository may be unavailable: this runs again when it is attached.
        tracing::info!(%sr, "unneeded images stay for now: {problem}");
        true
    })
}

async fn begin_all(daemon: &Daemon, sr: Uuid) -> Result<bool, Problem> {
    if daemon.catalogue.read(move |view| view.attached_sr(sr)).await?.is_read_only() {
        return Ok(true);
    }
    let (images, shown_by, tracked) = images(daemon, sr).await?;
    let tree = Tree::of(&images, &shown_by, &tracked);
    let unused = |image: &&Image| {
        let needed = image.kept || shown_by.contains_key(&image.uuid) || !tree.children(image.uuid).is_empty();
        matches!(image.state, ImageState::Ready | ImageState::NoData) && !needed
    };
    let mut all = true;
    for image in images.iter().filter(unused) {
        let job = Reclaim { sr, image: image.uuid };
        let started = daemon.tasks.start_job(daemon, job, |job, task, tx| tx.claim(job.image, task)).await;
        all &= was_begun(sr, started)?;
    }
    for merge in runs(&images, &shown_by, &tracked) {
        all &= was_begun(sr, start(daemon, merge).await)?;
    }
    Ok(all)
}

/// Whether a job was started; false if an object that it would change is in use.
fn was_begun(sr: Uuid, started: Result<api::Task, Problem>) -> Result<bool, Problem> {
    match started {
        Ok(_) => Ok(true),
        Err(problem) if matches!(problem.code, Code::Busy | Code::InUse) => {
            tracing::debug!(%sr, "not now: {problem}");
            Ok(false)
        }
        Err(problem) => Err(problem),
    }
}

/// Starts a merge, through the disk process if a VDI above is being written.
pub async fn start(daemon: &Daemon, mut merge: Merge) -> Result<api::Task, Problem> {
    let top = merge.lowest_shown();
    let users = daemon.catalogue.read(move |view| {
        let vdis = view.vdis_above(top)?;
        vdis.into_iter().map(|vdi| view.vdi(vdi)).collect::<Result<Vec<_>, Problem>>()
    });
    for vdi in users.await? {
        if let Some(vbd) = super::leaf::writer_of(&vdi) {
            if merge.vbd.is_some() {
                return Err(Problem::new(Code::InUse, "several VDIs that use these images are plugged"));
            }
            crate::reconcile::must_agree(daemon, vbd).await?;
            (merge.vbd, merge.live) = (Some(vbd), Some(vdi.uuid));
        }
    }
    let wanted = daemon.tasks.wanted.clone();
    daemon.tasks.start_job(daemon, merge, move |job, task, tx| job.prepare(task, &wanted, tx)).await
}
