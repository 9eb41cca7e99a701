//! Turns requests about VDIs into jobs: preconditions are checked here, and held by leases and claims from the commit
//! that records the intent.

mod copies;
mod replacements;
mod tracking;

use api::{
    Code, ImageFormat, Labels, Mode, Problem, Sr, Task, Vdi, VdiClone, VdiCreate, VdiDestroyPlan, VdiResize, VdiRevert,
    VdiSnapshot, VdiState, Versions,
};
use control::size::readable;
use jiff::Timestamp;
use repo::Tx;
use repo::catalogue::{Among, must_divide};
use uuid::Uuid;

use super::leaf::{Leaf, writer_of};
use super::snapshot::{Branch, KeptState, Own};
use super::target::Target;
use super::tracking::next_map;
use super::{
    Chain, Create, Destroy, Resize, Revert, format_for, hold, must_be_ready, must_be_shallow, must_be_unplugged,
    versions_for,
};
use crate::daemon::Daemon;
use crate::disk::live;
use crate::fault::{self, Planted};
use crate::reconcile;
use crate::task::wanted::Want;
pub use copies::{block_size, copy, export, import};
pub use replacements::{hold_replacement, must_be_unwritten, plan_replacement, replaceable};
pub use tracking::{changed, data_destroy, disable, enable, proven};

/// The physical size of a new image before anything is written to it.
const EMPTY: u64 = 1 << 20;

/// Maximum size of a VHD (decision 0004).
const VHD_MAX: u64 = 2040 << 30;

/// A VDI, its repository and its image. Cleanup tasks among its images are interrupted, and cannot start while the
/// returned value exists.
async fn find(daemon: &Daemon, vdi: Uuid) -> Result<(Vdi, Sr, Uuid, Want), Problem> {
    daemon.catalogue.read(move |view| view.check_not_of_memory(vdi, "used or changed")).await?;
    // Giving way requires the disk to stop its merge.
    if let Some(vbd) = writer_of(&look(daemon, vdi).await?.0) {
        live::must_answer_now(daemon, vbd).await?;
    }
    let want = daemon.tasks.give_way(vdi).await?;
    let (found, sr, image) = look(daemon, vdi).await?;
    let Some(vbd) = writer_of(&found) else { return Ok((found, sr, image, want)) };
    live::unless_stuck(daemon, vbd, reconcile::must_agree(daemon, vbd)).await?;
    let (found, sr, image) = look(daemon, vdi).await?;
    Ok((found, sr, image, want))
}

/// Like [`find`], for reading only: merges are not stopped.
async fn look(daemon: &Daemon, vdi: Uuid) -> Result<(Vdi, Sr, Uuid), Problem> {
    let found = daemon.catalogue.read(move |view| {
        let found = view.vdi(vdi)?;
        let (sr, image) = (view.sr(found.sr)?, view.vdi_image(vdi)?);
        Ok((found, sr, image))
    });
    found.await
}

/// Refuses a size that an image of this format cannot have.
pub fn must_hold(format: ImageFormat, size: u64) -> Result<(), Problem> {
    if format == ImageFormat::Vhd && size > VHD_MAX {
        let what = format!("a VHD has at most {}, but {} were requested", readable(VHD_MAX), readable(size));
        return Err(Problem::new(Code::Invalid, what).field("size").advise("use the format qcow2 or raw"));
    }
    Ok(())
}

/// Starts a `vdi-create` task.
pub async fn create(daemon: &Daemon, asked: VdiCreate) -> Result<Task, Problem> {
    let sr = asked.sr;
    let sr = daemon.catalogue.read(move |view| view.sr(sr)).await.map_err(|problem| problem.field("sr"))?;
    let format = format_for(&sr, asked.format)?;
    must_hold(format, asked.size.bytes())?;
    let block = asked.logical_block_size.unwrap_or_default();
    must_divide(block, asked.size.bytes()).map_err(|problem| problem.field("size"))?;
    daemon.srs.room(sr.uuid, EMPTY).await?;
    let chosen = asked.uuid;
    let job = Create(Target {
        vdi: chosen.unwrap_or_else(Uuid::new_v4),
        image: Uuid::new_v4(),
        sr: sr.uuid,
        name: asked.name,
        name_is_default: false,
        description: asked.description,
        labels: Labels { tags: asked.tags, other_config: asked.other_config },
        size: asked.size.bytes(),
        format,
        logical_block_size: block,
    });
    let unique = !asked.allow_duplicate_name;
    let held = move |job: &Create, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        let Target { sr, name, .. } = &job.0;
        if unique { take_new_name(tx, *sr, name, task, &format!("create VDI '{name}'")) } else { Ok(()) }
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// Reserves the name of a VDI that a task creates.
fn take_new_name(tx: &mut Tx<'_>, sr: Uuid, name: &api::Name, task: Uuid, tried: &str) -> Result<(), Problem> {
    let taken = tx.take_name(Among::Vdis(sr), name, task, tried);
    taken.map_err(|problem| match problem.advice.clone() {
        Some(advice) => problem.advise(format!("{advice}; or allow_duplicate_name (--allow-duplicate-name)")),
        None => problem,
    })
}

/// Reserves the UUID that a client has chosen for a new object.
fn take(tx: &mut Tx<'_>, chosen: Option<Uuid>, task: Uuid) -> Result<(), Problem> {
    chosen.map_or(Ok(()), |uuid| tx.take_uuid(uuid, task))
}

/// Starts a `vdi-resize` task.
pub async fn resize(daemon: &Daemon, uuid: Uuid, asked: VdiResize) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    let size = asked.size.bytes();
    if vdi.read_only {
        let what = format!("VDI {uuid} is read-only");
        return Err(Problem::new(Code::ReadOnly, what).advise("clone it, and resize the clone"));
    }
    if size < vdi.size {
        let what = format!("VDI {uuid} has {} and cannot shrink to {}", readable(vdi.size), readable(size));
        return Err(Problem::new(Code::Unsupported, what)
            .field("size")
            .advise("create a smaller VDI and copy its contents there"));
    }
    must_hold(vdi.format, size)?;
    must_divide(vdi.logical_block_size.unwrap_or_default(), size).map_err(|problem| problem.field("size"))?;
    let vbd = writer_of(&vdi);
    let job = Resize { vdi: uuid, sr: vdi.sr, size, vbd };
    daemon.tasks.start_job(daemon, job, move |job, task, tx| hold(tx, job.vdi, task, vbd)).await
}

/// The common part of `vdi-snapshot` and `vdi-clone`: the state to keep, and the new leaf of the VDI if it needs one.
pub async fn state(
    daemon: &Daemon,
    uuid: Uuid,
    chosen: Option<Uuid>,
    name: Option<api::Name>,
    (description, labels): (api::Description, Labels),
    writable: bool,
) -> Result<(KeptState, Want), Problem> {
    let (vdi, sr, image, want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    daemon.srs.room(sr.uuid, EMPTY).await?;
    let versions = versions_for(&sr, &vdi)?;
    let vbd = writer_of(&vdi);
    let chain = versions == Versions::Chain;
    let is_tracked = vdi.cbt.as_ref().is_some_and(|tracking| tracking.enabled && !tracking.maps.is_empty());
    let map = match vbd {
        Some(vbd) if chain => next_map(daemon, &vdi, vbd).await?,
        None if chain && is_tracked => Some(Uuid::new_v4()),
        _ => None,
    };
    // A read-only VDI needs no new leaf before other images are based on it.
    let leaf = (chain && !vdi.read_only).then(|| Leaf {
        vdi: uuid,
        sr: sr.uuid,
        below: image,
        image: Uuid::new_v4(),
        format: vdi.format,
        vbd,
        map,
    });
    // A snapshot takes the image itself, unless the VDI continues to use it.
    let own = (!chain || writable || leaf.is_none()).then(|| Own { image: Uuid::new_v4(), reflink: !chain });
    if chain {
        must_be_shallow(&vdi)?;
    }
    let state = KeptState {
        of: uuid,
        sr: sr.uuid,
        image,
        format: vdi.format,
        size: vdi.size,
        vbd,
        vdi: chosen.unwrap_or_else(Uuid::new_v4),
        name,
        description,
        labels,
        leaf,
        own,
        at: Timestamp::now(),
        scheduled: false,
        for_backup: false,
    };
    Ok((state, want))
}

fn just_changed(vdi: Uuid) -> Problem {
    Problem::new(Code::Busy, format!("VDI {vdi} has just been changed")).advise("try again")
}

/// Reserves the VDI: a read-only one can be the base of several concurrent clones; a writable one is leased
/// exclusively.
pub fn hold_state(state: &KeptState, task: Uuid, tx: &mut Tx<'_>, tried: &str) -> Result<(), Problem> {
    if let Some(name) = &state.name {
        tx.take_name(Among::Vdis(state.sr), name, task, &format!("{tried} VDI {} as '{name}'", state.of))?;
    }
    if tx.vdi_image(state.of)? != state.image {
        return Err(just_changed(state.of));
    }
    if tx.vdi(state.of)?.read_only {
        return tx.take_lease(state.of, task, Mode::ReadOnly);
    }
    hold(tx, state.of, task, state.vbd)
}

/// Starts a `vdi-snapshot` task.
pub async fn snapshot(daemon: &Daemon, uuid: Uuid, asked: VdiSnapshot) -> Result<Task, Problem> {
    let chosen = asked.uuid;
    let labels = Labels { tags: asked.tags, other_config: asked.other_config };
    let (state, _want) = state(daemon, uuid, chosen, asked.name, (asked.description, labels), false).await?;
    let held = move |job: &Branch<false>, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        hold_state(&job.0, task, tx, "snapshot")
    };
    daemon.tasks.start_job(daemon, Branch::<false>(state), held).await
}

/// Starts a `vdi-snapshot` task for a backup, which has recorded the UUID of the snapshot; with the time now, by the
/// clock of schedules.
pub async fn backup_snapshot(
    daemon: &Daemon,
    uuid: Uuid,
    (chosen, at): (Uuid, Timestamp),
    description: api::Description,
) -> Result<Task, Problem> {
    let words = (description, Labels::default());
    let (state, _want) = state(daemon, uuid, Some(chosen), None, words, false).await?;
    let held = move |job: &Branch<false>, task, tx: &mut Tx<'_>| {
        tx.take_backup_uuid(chosen, task)?;
        hold_state(&job.0, task, tx, "snapshot")
    };
    daemon.tasks.start_job(daemon, Branch::<false>(KeptState { at, for_backup: true, ..state }), held).await
}

/// Starts a `vdi-snapshot` task for the schedule of the VDI, due at this time.
pub async fn scheduled_snapshot(daemon: &Daemon, uuid: Uuid, at: Timestamp) -> Result<Task, Problem> {
    let words = (api::Description::default(), Labels::default());
    let (state, _want) = state(daemon, uuid, None, None, words, false).await?;
    let held = |job: &Branch<false>, task, tx: &mut Tx<'_>| hold_state(&job.0, task, tx, "snapshot");
    daemon.tasks.start_job(daemon, Branch::<false>(KeptState { at, scheduled: true, ..state }), held).await
}

/// Starts a `vdi-clone` task.
pub async fn clone(daemon: &Daemon, uuid: Uuid, asked: VdiClone) -> Result<Task, Problem> {
    let chosen = asked.uuid;
    let labels = Labels { tags: asked.tags, other_config: asked.other_config };
    let (state, _want) = state(daemon, uuid, chosen, asked.name, (asked.description, labels), true).await?;
    let held = move |job: &Branch<true>, task, tx: &mut Tx<'_>| {
        take(tx, chosen, task)?;
        hold_state(&job.0, task, tx, "clone")
    };
    daemon.tasks.start_job(daemon, Branch::<true>(state), held).await
}

/// Starts a `vdi-revert` task.
pub async fn revert(daemon: &Daemon, uuid: Uuid, asked: VdiRevert) -> Result<Task, Problem> {
    let (job, _wants) = plan_revert(daemon, uuid, asked.snapshot).await?;
    daemon.tasks.start_job(daemon, job, hold_revert).await
}

/// Reserves both VDIs of a revert.
pub fn hold_revert(job: &Revert, task: Uuid, tx: &mut Tx<'_>) -> Result<(), Problem> {
    hold(tx, job.vdi, task, None)?;
    tx.take_lease(job.snapshot, task, Mode::ReadOnly)
}

/// The job that reverts a VDI to `kept`; refused if that is impossible.
pub async fn plan_revert(daemon: &Daemon, uuid: Uuid, kept: Uuid) -> Result<(Revert, [Want; 2]), Problem> {
    let (vdi, sr, old, want) = find(daemon, uuid).await?;
    let (snapshot, _, state, wanted_too) = find(daemon, kept).await.map_err(|problem| problem.field("snapshot"))?;
    if snapshot.snapshot_of != Some(uuid) {
        let what = format!("VDI {kept} is not a snapshot of VDI {uuid}");
        return Err(Problem::new(Code::Invalid, what).field("snapshot").advise("give one of its snapshots"));
    }
    must_be_ready(&snapshot)?;
    must_be_unplugged(&vdi, "reverted")?;
    must_not_be_written(daemon, &vdi).await?;
    daemon.srs.room(sr.uuid, EMPTY).await?;
    let reflink = versions_for(&sr, &snapshot)? == Versions::Reflink;
    if !reflink {
        must_be_shallow(&snapshot)?;
    }
    let job = Revert {
        vdi: uuid,
        sr: sr.uuid,
        snapshot: kept,
        state,
        size: snapshot.size,
        old,
        new: Uuid::new_v4(),
        format: snapshot.format,
        reflink,
    };
    Ok((job, [want, wanted_too]))
}

/// Starts a `vdi-merge` task for the first run in the chain of a VDI.
pub async fn merge(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, sr, _, want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    let runs = super::merge::runs_of(daemon, sr.uuid).await?;
    let chain = Chain::of_vdi(daemon, uuid).await?;
    let own = runs.into_iter().find(|run| chain.images.iter().any(|image| image.uuid == run.target));
    let Some(run) = own else {
        let what = format!("the chain of VDI {uuid} has nothing to merge: all of its images are needed");
        return Err(
            Problem::new(Code::State, what).advise("destroy unneeded snapshots; their images can then be merged")
        );
    };
    // A merge is what was requested, so nothing must prevent it.
    drop(want);
    super::merge::start(daemon, run).await
}

/// Starts a `vdi-destroy` task.
pub async fn destroy(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (job, _want) = plan_destroy(daemon, uuid).await?;
    daemon.tasks.start_job(daemon, job, hold_destroy).await
}

/// Reserves a VDI that is to be destroyed as it was when that was planned.
pub fn hold_destroy(job: &Destroy, task: Uuid, tx: &mut Tx<'_>) -> Result<(), Problem> {
    let vdi = tx.vdi(job.vdi)?;
    if tx.vdi_image(job.vdi)? != job.image || maps_of(&vdi) != job.maps {
        return Err(just_changed(job.vdi));
    }
    hold(tx, job.vdi, task, None)
}

/// The maps of changed blocks that go with a VDI.
fn maps_of(vdi: &Vdi) -> Vec<Uuid> {
    let Some(cbt) = &vdi.cbt else { return Vec::new() };
    cbt.maps.iter().map(|map| map.uuid).chain(cbt.unneeded.iter().copied()).collect()
}

/// Like [`destroy`], for a snapshot taken by the schedule of its VDI, unless a user has since pinned it.
pub async fn destroy_scheduled(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (job, _want) = plan_destroy(daemon, uuid).await?;
    let held = |job: &Destroy, task, tx: &mut Tx<'_>| {
        must_be_scheduled(true, tx.vdi(job.vdi)?.scheduled, "VDI", job.vdi)?;
        hold_destroy(job, task, tx)
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// Refuses to destroy, for a schedule, a snapshot that no longer belongs to it.
pub fn must_be_scheduled(wanted: bool, is: bool, noun: &str, uuid: Uuid) -> Result<(), Problem> {
    if is || !wanted || fault::planted(Planted::TakenByHand) {
        return Ok(());
    }
    Err(Problem::new(Code::State, format!("{noun} {uuid} is to stay, whatever its schedule says")))
}

/// The job that destroys a VDI; refused if that is impossible.
pub async fn plan_destroy(daemon: &Daemon, uuid: Uuid) -> Result<(Destroy, Want), Problem> {
    let (vdi, sr, image, want) = find(daemon, uuid).await?;
    must_be_destroyable(daemon, &vdi, &sr).await?;
    Ok((Destroy { vdi: vdi.uuid, sr: sr.uuid, image, maps: maps_of(&vdi) }, want))
}

/// What `vdi-destroy` would remove. Running operations are not affected.
pub async fn destroy_plan(daemon: &Daemon, uuid: Uuid) -> Result<VdiDestroyPlan, Problem> {
    daemon.catalogue.read(move |view| view.check_not_of_memory(uuid, "destroyed")).await?;
    let (vdi, sr, image) = look(daemon, uuid).await?;
    must_be_destroyable(daemon, &vdi, &sr).await?;
    let children = daemon.catalogue.read(move |view| view.children(image)).await?;
    let (removes, freed) = match children.len() {
        0 if vdi.state == VdiState::NoData => (Vec::new(), 0),
        0 => (vec![vdi.file], vdi.physical_utilisation),
        // An image with children stays, hidden, until it can be merged with them.
        _ => (Vec::new(), 0),
    };
    Ok(VdiDestroyPlan { removes, freed, needed_by: children.len() as u64 })
}

/// Refuses to remove the file of a VDI that a process unknown to the catalogue has open for writing: it may serve a
/// guest of another host whose daemon has died.
async fn must_not_be_written(daemon: &Daemon, vdi: &Vdi) -> Result<(), Problem> {
    let (directory, file) = (daemon.srs.directory(vdi.sr).await?, vdi.file.clone());
    daemon.srs.patience.ask(vdi.sr, "check for users of a file of", move || directory.must_not_be_written(&file)).await
}

async fn must_be_destroyable(daemon: &Daemon, vdi: &Vdi, sr: &Sr) -> Result<(), Problem> {
    must_be_unplugged(vdi, "destroyed")?;
    must_not_be_written(daemon, vdi).await?;
    if sr.is_read_only() {
        return Err(Problem::new(Code::ReadOnly, format!("SR {} is read-only", sr.name)));
    }
    let uuid = vdi.uuid;
    let vbds = daemon.catalogue.read(move |view| view.vbds(None, Some(uuid))).await?;
    match vbds.first() {
        None => Ok(()),
        Some(vbd) => {
            let what = format!("VDI {uuid} is used by VBD {}", vbd.uuid);
            Err(Problem::new(Code::InUse, what).advise("destroy its VBDs first"))
        }
    }
}
