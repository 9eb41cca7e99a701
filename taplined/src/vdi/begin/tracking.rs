//! Requests about changed blocks: `vdi-cbt-enable`, `vdi-cbt-disable`, and the blocks that have changed between two
//! states of a VDI.

use std::ffi::OsString;

use api::{ChangedExtent, ChangesFormat, Code, ImageFormat, Problem, Task, Vdi, VdiChanges};
use control::tracking::{ChangedRange, ListedChanges};
use repo::Tx;
use uuid::Uuid;

use super::super::DataDestroy;
use super::super::maps::{History, OpenMaps};
use super::super::tracking::{DisableTracking, EnableTracking};
use super::{find, just_changed, must_be_destroyable, must_be_ready, writer_of};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::vdi::hold;

/// Starts a `vdi-cbt-enable` task.
pub async fn enable(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    must_be_ready(&vdi)?;
    must_be_trackable(&vdi)?;
    let vbd = writer_of(&vdi);
    if vdi.cbt.as_ref().is_some_and(|tracking| tracking.enabled && (vbd.is_none() || !tracking.maps.is_empty())) {
        let what = format!("the changed blocks of VDI {uuid} are recorded already");
        return Err(Problem::new(Code::State, what).advise("see: tapline vdi cbt show"));
    }
    let job = EnableTracking { vdi: uuid, sr: vdi.sr, vbd, map: Uuid::new_v4() };
    daemon.tasks.start_job(daemon, job, move |job, task, tx: &mut Tx<'_>| hold(tx, job.vdi, task, vbd)).await
}

fn must_be_trackable(vdi: &Vdi) -> Result<(), Problem> {
    let refused = |code, why: &str, advice: &str| {
        Err(Problem::new(code, format!("the changed blocks of VDI {} cannot be recorded: {why}", vdi.uuid))
            .advise(advice))
    };
    match vdi.format {
        _ if vdi.read_only => refused(Code::ReadOnly, "it is read-only", "enable tracking on the VDI that is written"),
        // Its snapshots share blocks with it, and do not end the interval of a map.
        ImageFormat::Raw => refused(Code::Unsupported, "it is raw", "copy it to the format qcow2 or vhd"),
        ImageFormat::Vhd | ImageFormat::Qcow2 => Ok(()),
    }
}

/// Starts a `vdi-cbt-disable` task.
pub async fn disable(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, _, _, _want) = find(daemon, uuid).await?;
    if !vdi.cbt.as_ref().is_some_and(|tracking| tracking.enabled) {
        let what = format!("the changed blocks of VDI {uuid} are not recorded");
        return Err(Problem::new(Code::State, what).advise("see: tapline vdi cbt show"));
    }
    let vbd = writer_of(&vdi);
    let job = DisableTracking { vdi: uuid, sr: vdi.sr, vbd };
    daemon.tasks.start_job(daemon, job, move |job, task, tx: &mut Tx<'_>| hold(tx, job.vdi, task, vbd)).await
}

/// Starts a `vdi-data-destroy` task.
pub async fn data_destroy(daemon: &Daemon, uuid: Uuid) -> Result<Task, Problem> {
    let (vdi, sr, image, _want) = find(daemon, uuid).await?;
    must_be_destroyable(daemon, &vdi, &sr).await?;
    let job = DataDestroy { vdi: uuid, sr: vdi.sr, image, without: Uuid::new_v4() };
    let held = |job: &DataDestroy, task, tx: &mut Tx<'_>| {
        hold(tx, job.vdi, task, None)?;
        tx.check_data_destroyable(job.vdi)?;
        if tx.vdi_image(job.vdi)? == job.image { Ok(()) } else { Err(just_changed(job.vdi)) }
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// The parts of `to` that may differ from its earlier snapshot `from`.
pub async fn changed(daemon: &Daemon, to: Uuid, from: Uuid, format: ChangesFormat) -> Result<VdiChanges, Problem> {
    daemon.catalogue.read(move |view| view.vdi(from)).await.map_err(|problem| problem.field("from"))?;
    let opened = History::of(daemon, to).await?.open(daemon, from).await?;
    let format = if format == ChangesFormat::Xapi { vec!["--format", "xapi"] } else { Vec::new() };
    let ListedChanges { size, block, changed, ranges, bitmap, .. } = list(daemon, opened, &format).await?;
    let extent = |range: ChangedRange| ChangedExtent { start: range.start, length: range.length };
    let extents = ranges.map(|ranges| ranges.into_iter().map(extent).collect());
    Ok(VdiChanges { from, to, size, block, changed, extents, bitmap })
}

/// Verifies maps, and lists what they name.
async fn list(daemon: &Daemon, opened: OpenMaps, format: &[&str]) -> Result<ListedChanges, Problem> {
    let OpenMaps { files, expected } = opened;
    let expected = serde_json::to_string(&expected).map_err(|error| Problem::failed("list changed blocks", error))?;
    let (mut handing, mut words) = (Handing::default(), vec![OsString::from("changes")]);
    for (path, file) in files {
        words.push(path.clone().into());
        handing.plain(&path, false, file);
    }
    words.extend(["--expect".into(), expected.into()]);
    words.extend(format.iter().map(OsString::from));
    Ok(daemon.tool.image(words, handing).await?)
}

/// Those of some earlier snapshots since which all changes are known, up to the state of `history`. They come with the
/// numbers of maps, the most first: the maps of each are the last ones of those before it, so that what proves those
/// proves its own. The log has the reasons why others are not known.
pub async fn proven(daemon: &Daemon, history: &History, mut earlier: Vec<(Uuid, usize)>) -> Vec<(Uuid, usize)> {
    let (mut unproven, mut proven, mut next) = (0, earlier.len(), 0);
    while let Some((from, _)) = earlier.get(next).filter(|_| unproven < proven) {
        match prove(daemon, history, *from).await {
            Ok(()) => proven = next,
            Err(problem) => {
                let vdi = history.to.uuid;
                tracing::warn!(%vdi, %from, "its changes are not offered to a client of the NBD address: {problem}");
                unproven = next + 1;
            }
        }
        next = unproven.midpoint(proven);
    }
    earlier.split_off(proven)
}

/// Fails unless maps lead from the snapshot `from` to the state of `history`, and name all changes.
async fn prove(daemon: &Daemon, history: &History, from: Uuid) -> Result<(), Problem> {
    let opened = history.open(daemon, from).await?;
    list(daemon, opened, &["--format", "total"]).await.map(drop)
}
