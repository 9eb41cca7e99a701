//! Reconciliation of running disks and the catalogue.
//!
//! A running disk's own report about its files takes precedence over the catalogue, which may have been restored from
//! a backup or may have missed the result of a job. The catalogue is updated where it is certain what happened
//! ([`judge`]); otherwise the VDI becomes `diverged`: its guest keeps running, and nothing is changed, merged or
//! started on it until a user has decided.
//!
//! This runs when the daemon reattaches to its disks, when a disk is plugged, before a verb changes a plugged VDI and
//! after a task on it has ended, when a repository is attached, introduced or scanned, and on request.

mod judge;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use api::{Believed, Code, Difference, DifferenceKind, Problem, Vbd, VbdState, VdiState};
use jiff::Timestamp;
use repo::View;
use repo::catalogue::{Among, Image, ImageState, NewVdi};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::files::{self, Astray, OpenFile};
use crate::disk::live;
use crate::disk::names::ServedLayer;
use crate::disk::process::DiskProcess;
use crate::fault::{self, Planted};
use crate::sr;
use judge::{Follow, RecordedChain, Verdict, judge};

/// Advice about a diverged VDI.
pub const ADVICE: &str = "compare them with 'tapline host reconcile --dry-run' or 'tapline sr scan', then choose which \
    is right: tapline vdi reconcile VDI --believe disk|catalogue";

/// An exiting process closes its sockets slightly before it has exited.
const TO_END: Duration = Duration::from_secs(2);

/// Whether certain differences are applied to the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heal {
    /// Apply them.
    Yes,
    /// Only report.
    No,
}

/// Compares all running disks; returns the differences and what was done about them. A disk that does not respond
/// counts as a difference.
pub async fn all(daemon: &Daemon, heal: Heal) -> Result<Vec<Difference>, Problem> {
    compare(daemon, |view| view.vbds(None, None), heal).await
}

/// Compares the disks of a repository.
pub async fn of_sr(daemon: &Daemon, sr: Uuid) {
    let find = move |view: &View<'_>| {
        let vdis: HashSet<Uuid> = view.vdis(Some(sr))?.iter().map(|vdi| vdi.uuid).collect();
        Ok(view.vbds(None, None)?.into_iter().filter(|vbd| vdis.contains(&vbd.vdi)).collect())
    };
    if let Err(problem) = compare(daemon, find, Heal::Yes).await {
        tracing::warn!(%sr, "its disks could not be compared with the catalogue: {problem}");
    }
}

/// Compares the disks of VDIs that a task has just changed.
pub async fn of_vdis(daemon: &Daemon, vdis: Vec<Uuid>) {
    for vdi in vdis {
        if let Err(problem) = compare(daemon, move |view| view.vbds(None, Some(vdi)), Heal::Yes).await {
            tracing::warn!(%vdi, "its disk could not be compared with the catalogue: {problem}");
        }
    }
}

/// Compares a disk that was just started for a VBD: a file may have grown unnoticed.
pub async fn of_plugged(daemon: &Daemon, vbd: Uuid) {
    if let Err(problem) = of_vbd(daemon, vbd, Heal::Yes).await {
        tracing::warn!(%vbd, "its disk could not be compared with the catalogue: {problem}");
    }
}

/// Concurrently compares the disks of VBDs selected from the catalogue.
async fn compare(
    daemon: &Daemon,
    find: impl FnOnce(&View<'_>) -> Result<Vec<Vbd>, Problem> + Send + 'static,
    heal: Heal,
) -> Result<Vec<Difference>, Problem> {
    let vbds = daemon.catalogue.read(find).await?;
    let mut comparing = JoinSet::new();
    for vbd in vbds.into_iter().filter(|vbd| vbd.state == VbdState::Plugged) {
        let daemon = daemon.clone();
        comparing.spawn(async move { (of_vbd(&daemon, vbd.uuid, heal).await, vbd) });
    }
    let mut found = Vec::new();
    while let Some(compared) = comparing.join_next().await {
        match compared.map_err(|error| Problem::failed("compare a disk with the catalogue", error))? {
            (Ok(difference), _) => found.extend(difference),
            // It is compared again before any operation changes it.
            (Err(problem), Vbd { uuid: vbd, vdi, .. }) => {
                tracing::warn!(%vbd, "a disk could not be compared with the catalogue: {problem}");
                let catalogue = daemon.catalogue.read(move |view| Seen::of(view, vdi)).await?.files();
                let known =
                    Difference { vdi: Some(vdi), vbd: Some(vbd), catalogue, ..Difference::new(DifferenceKind::Disk) };
                found.push(Difference { problem: Some(problem), ..known });
            }
        }
    }
    found.sort_by_key(|difference| difference.vdi);
    Ok(found)
}

/// Compares the disk of a VBD with the catalogue.
pub async fn of_vbd(daemon: &Daemon, vbd: Uuid, heal: Heal) -> Result<Option<Difference>, Problem> {
    if fault::planted(Planted::ForgottenMerge) || fault::planted(Planted::OldCatalogue) {
        return Ok(None);
    }
    let (vdi, before) = daemon
        .catalogue
        .read(move |view| {
            let vdi = view.vbd(vbd)?.vdi;
            Ok((vdi, Seen::of(view, vdi)?))
        })
        .await?;
    // VDIs that a task is changing are that task's responsibility.
    if before.claimed {
        return Ok(None);
    }
    let Some(layers) = live::layers(daemon, vbd).await? else { return must_not_run(daemon, vbd).await.map(|()| None) };
    remember(daemon, vbd, &layers);
    let astray = match before.chain.first() {
        Some(image) => files::astray(daemon, image.sr, &layers).await?,
        None => Vec::new(),
    };
    let was_diverged = before.chain.first().is_some_and(|image| image.state == ImageState::Diverged);
    // The whole repository is only read if something differs: this is checked before every verb.
    let verdict = match judge::agree(&before.chain, &layers) {
        true => Verdict::Agree,
        false => judge(&daemon.catalogue.read(move |view| recorded_chain(view, vdi)).await?, &layers),
    };
    if verdict == Verdict::Agree && astray.is_empty() && !was_diverged {
        return Ok(None);
    }
    let (found, catalogue) = (paths(&layers), before.files());
    let mut difference =
        Difference { vdi: Some(vdi), vbd: Some(vbd), found, catalogue, ..Difference::new(DifferenceKind::Disk) };
    if let Verdict::Diverged(why) = &verdict {
        difference.problem = Some(problem(vdi, why));
    }
    if !astray.is_empty() {
        difference.problem = Some(gone(daemon, vbd, &astray).await?);
    }
    if heal == Heal::No {
        return Ok(Some(difference));
    }
    difference.healed = difference.problem.is_none();
    let shown = difference.problem.clone();
    let recorded = daemon.catalogue.write(move |tx| {
        // Another operation has started to change it since the disk was queried, and has newer information.
        if Seen::of(tx, vdi)? != before {
            return Ok(false);
        }
        match verdict {
            _ if !astray.is_empty() => set_state(tx, vdi, ImageState::Diverged)?,
            Verdict::Agree => set_state(tx, vdi, ImageState::Ready)?,
            Verdict::Follow(what) => follow(tx, vdi, &what)?,
            Verdict::Diverged(_) => set_state(tx, vdi, ImageState::Diverged)?,
        }
        let state = tx.vbd(vbd)?.state;
        tx.set_vbd_state(vbd, state, shown.as_ref()).map(|()| true)
    });
    if !recorded.await? {
        return Ok(None);
    }
    match &difference.problem {
        Some(problem) => {
            tracing::error!(%vdi, %vbd, disk = ?difference.found, catalogue = ?difference.catalogue, "{problem}")
        }
        None => {
            let what = "catalogue updated from a running disk";
            tracing::warn!(%vdi, %vbd, disk = ?difference.found, before = ?difference.catalogue, "{what}");
        }
    }
    Ok(Some(difference))
}

/// Refuses if nothing listens at a disk's socket although its process runs. Such a process serves its guest as
/// before, but can no longer be queried or controlled.
async fn must_not_run(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let Some(recorded) = daemon.catalogue.read(move |view| view.vbd_process(vbd)).await? else { return Ok(()) };
    let Some(mut process) = DiskProcess::find(recorded)? else { return Ok(()) };
    if let Ok(ended) = tokio::time::timeout(TO_END, process.ended()).await {
        return ended.map(drop);
    }
    let (socket, pid) = (daemon.disks.socket(vbd), recorded.pid);
    let what =
        format!("nothing listens at {}, but process {pid}, which serves VBD {vbd}, is running", socket.display());
    Err(Problem::new(Code::State, what).advise(
        "its socket was removed; existing connections keep working. When possible, shut its guest down, unplug the VBD \
         with force and plug it again",
    ))
}

/// Refuses a verb on a running disk that differs from the catalogue, which is updated if it is certain what happened.
pub async fn must_agree(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let difference = of_vbd(daemon, vbd, Heal::Yes).await?;
    difference.and_then(|difference| difference.problem).map_or(Ok(()), Err)
}

/// The compared state, which must be unchanged when the catalogue is updated.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    chain: Vec<Image>,
    claimed: bool,
}

impl Seen {
    fn of(view: &View<'_>, vdi: Uuid) -> Result<Seen, Problem> {
        // Physical sizes may be measured at any time.
        let chain = view.chain(vdi)?.into_iter().map(|image| Image { physical: 0, ..image }).collect();
        Ok(Seen { chain, claimed: view.claimant(vdi)?.is_some() })
    }

    fn files(&self) -> Vec<String> {
        self.chain.iter().map(|image| image.file.clone()).collect()
    }
}

/// Remembers a disk's files for the next start.
fn remember(daemon: &Daemon, vbd: Uuid, layers: &[ServedLayer]) {
    let before = daemon.disks.open_files.of(vbd);
    let reported = |layer: &ServedLayer| {
        let file = OpenFile::reported(layer.numbers()?, before.get(layer.file()));
        Some((layer.file().to_owned(), file))
    };
    daemon.disks.open_files.set(vbd, layers.iter().filter_map(reported).collect());
}

fn paths(layers: &[ServedLayer]) -> Vec<String> {
    layers.iter().map(|layer| layer.path.display().to_string()).collect()
}

fn recorded_chain(view: &View<'_>, vdi: Uuid) -> Result<RecordedChain, Problem> {
    let chain = view.chain(vdi)?;
    let sr = view.vdi(vdi)?.sr;
    let images = view.images_of_sr(sr)?.into_iter().map(|image| (image.file.clone(), image));
    let by_file: HashMap<String, Image> = images.collect();
    let vdis = view.vdis(Some(sr))?.into_iter();
    let shown = vdis.filter_map(|vdi| Some((by_file.get(&vdi.file)?.uuid, (vdi.uuid, !vdi.read_only)))).collect();
    Ok(RecordedChain { vdi, sr, chain, by_file, shown })
}

/// The problem of a disk that uses files removed from its repository.
async fn gone(daemon: &Daemon, vbd: Uuid, astray: &[Astray]) -> Result<Problem, Problem> {
    let found = daemon.catalogue.read(move |view| {
        let vbd = view.vbd(vbd)?;
        Ok((view.vdi(vbd.vdi)?.sr, vbd))
    });
    let (sr, vbd) = found.await?;
    Ok(files::problem(daemon, &vbd, daemon.srs.directory(sr).await?.path(), astray))
}

fn problem(vdi: Uuid, why: &str) -> Problem {
    let what = format!("the layers of VDI {vdi}'s running disk do not match the catalogue: {why}");
    Problem::new(Code::State, what).advise(ADVICE)
}

/// Records whether a VDI is ready or diverged.
pub fn set_state(tx: &mut repo::Tx<'_>, vdi: Uuid, state: ImageState) -> Result<(), Problem> {
    let image = tx.image(tx.vdi_image(vdi)?)?;
    tx.set_image(&Image { state, ..image })
}

/// Updates the catalogue from the disk.
fn follow(tx: &mut repo::Tx<'_>, vdi: Uuid, what: &Follow) -> Result<(), Problem> {
    for (depth, image) in what.chain.iter().enumerate().rev() {
        let state = if depth == 0 { ImageState::Ready } else { image.state };
        let image = Image { state, ..image.clone() };
        match tx.find_image(image.uuid)? {
            Some(_) => tx.set_image(&image)?,
            None => tx.add_image(&image)?,
        }
    }
    if let Some(leaf) = what.chain.first() {
        if tx.vdi_image(vdi)? != leaf.uuid && tx.vdi(vdi)?.cbt.is_some() {
            tx.change_tracking(vdi, |tracking| tracking.end("the catalogue was older than the running disk"))?;
        }
        tx.set_vdi_image(vdi, leaf.uuid)?;
    }
    let shown = tx.vdi(vdi)?;
    for image in &what.kept {
        // With a VDI, it is visible and not merged.
        let name = tx.free_name(Among::Vdis(shown.sr), &shown.name, " (found)")?;
        tx.add_vdi(&NewVdi {
            uuid: Uuid::new_v4(),
            image: *image,
            name,
            description: api::Description::default(),
            labels: api::Labels::default(),
            read_only: true,
            snapshot: Some((vdi, Some(Timestamp::now()))),
            scheduled: false,
            for_backup: false,
            logical_block_size: shown.logical_block_size,
        })?;
    }
    for image in &what.doubtful {
        let image = tx.image(*image)?;
        tx.set_image(&Image { state: ImageState::Damaged, ..image })?;
    }
    // Their files stay: a scan reports them.
    for image in &what.left {
        tx.remove_image(image.uuid)?;
    }
    Ok(())
}

/// Resolves a diverged VDI as the user has decided.
pub async fn decide(daemon: &Daemon, vdi: Uuid, choice: Believed) -> Result<(), Problem> {
    let found = daemon.catalogue.read(move |view| view.vdi(vdi)).await?;
    if found.state != VdiState::Diverged {
        let what = format!("VDI {vdi} is not diverged");
        return Err(Problem::new(Code::State, what).advise("compare running disks first: tapline host reconcile"));
    }
    match (choice, found.users.first()) {
        (Believed::Disk, Some(user)) => accept_disk(daemon, vdi, user.vbd).await,
        (Believed::Disk, None) => {
            let what = format!("the disk of VDI {vdi} is not running, so its layers cannot be queried");
            Err(Problem::new(Code::State, what)
                .advise("examine its files with 'tapline sr scan' and 'tapline image info'"))
        }
        (Believed::Catalogue, Some(user)) => {
            let what = format!("VBD {} still serves VDI {vdi} from other files", user.vbd);
            Err(Problem::new(Code::InUse, what).advise("unplug it first; the next plug uses the catalogue's files"))
        }
        (Believed::Catalogue, None) => match sr::same_file::shared(daemon, vdi).await? {
            Some(still) => Err(still),
            None => daemon.catalogue.write(move |tx| set_state(tx, vdi, ImageState::Ready)).await,
        },
    }
}

async fn accept_disk(daemon: &Daemon, vdi: Uuid, vbd: Uuid) -> Result<(), Problem> {
    let layers = live::layers(daemon, vbd).await?;
    let layers = layers.ok_or_else(|| Problem::new(Code::State, format!("the disk of VBD {vbd} does not respond")))?;
    let sr = daemon.catalogue.read(move |view| view.vdi(vdi)).await?.sr;
    let astray = files::astray(daemon, sr, &layers).await?;
    if !astray.is_empty() {
        return Err(gone(daemon, vbd, &astray).await?);
    }
    let followed = daemon.catalogue.write(move |tx| {
        if tx.claimant(vdi)?.is_some() {
            return Err(Problem::new(Code::Busy, format!("a task is working on VDI {vdi}")).advise("try again"));
        }
        let what = judge::follow(&recorded_chain(tx, vdi)?, &layers).map_err(|why| problem(vdi, &why))?;
        follow(tx, vdi, &what)?;
        let state = tx.vbd(vbd)?.state;
        tx.set_vbd_state(vbd, state, None)
    });
    followed.await
}
