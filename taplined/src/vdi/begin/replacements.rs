//! Requests that give a VDI other content as a whole: the image that takes the place of its present one.

use api::{Code, LogicalBlockSize, Problem, Vdi, VdiState};
use repo::Tx;
use repo::catalogue::must_divide;
use uuid::Uuid;

use super::super::{Replacement, format_for, hold, must_be_ready, must_be_unplugged};
use super::{find, just_changed, must_hold, must_not_be_written};
use crate::daemon::Daemon;
use crate::task::wanted::Want;

/// The new image of a VDI, for content of `size` bytes that was written with sectors of the size `block`, if that is
/// known. Refused if the VDI cannot be given it; one whose files are missing or damaged can.
pub async fn plan_replacement(
    daemon: &Daemon,
    uuid: Uuid,
    size: u64,
    block: Option<LogicalBlockSize>,
) -> Result<(Replacement, Want), Problem> {
    let (vdi, sr, old, want) = find(daemon, uuid).await?;
    must_be_replaceable(&vdi)?;
    must_not_be_written(daemon, &vdi).await?;
    let format = format_for(&sr, Some(vdi.format))?;
    must_hold(format, size)?;
    let block = block.filter(|block| must_divide(*block, size).is_ok()).or(vdi.logical_block_size);
    must_divide(block.unwrap_or_default(), size)?;
    let new = Uuid::new_v4();
    Ok((Replacement { vdi: uuid, sr: sr.uuid, old, new, format, size, logical_block_size: block }, want))
}

/// A VDI whose content can be replaced now; others are refused.
pub async fn replaceable(daemon: &Daemon, uuid: Uuid) -> Result<Vdi, Problem> {
    let found = daemon.catalogue.read(move |view| {
        view.check_not_of_memory(uuid, "restored")?;
        view.vdi(uuid)
    });
    let vdi = found.await?;
    must_be_replaceable(&vdi).map(|()| vdi)
}

fn must_be_replaceable(vdi: &Vdi) -> Result<(), Problem> {
    if let Some(disk) = vdi.snapshot_of {
        let what = format!("VDI {} is a snapshot, and snapshots stay as they are", vdi.uuid);
        return Err(Problem::new(Code::State, what).advise(format!("restore its disk instead, VDI {disk}")));
    }
    if vdi.read_only {
        let what = format!("VDI {} is read-only", vdi.uuid);
        return Err(
            Problem::new(Code::ReadOnly, what).advise("make it writable: tapline vdi set VDI --read-only false")
        );
    }
    if vdi.state == VdiState::Diverged {
        must_be_ready(vdi)?;
    }
    must_be_unplugged(vdi, "restored")
}

/// Reserves a VDI whose content is to be replaced, as it was when that was planned.
pub fn hold_replacement(job: &Replacement, task: Uuid, tx: &mut Tx<'_>) -> Result<(), Problem> {
    hold(tx, job.vdi, task, None)?;
    match tx.vdi_image(job.vdi)? == job.old {
        true => Ok(()),
        false => Err(just_changed(job.vdi)),
    }
}

/// Refuses a VDI if a process that the catalogue does not know has its file open for writing.
pub async fn must_be_unwritten(daemon: &Daemon, vdi: Uuid) -> Result<(), Problem> {
    let vdi = daemon.catalogue.read(move |view| view.vdi(vdi)).await?;
    must_not_be_written(daemon, &vdi).await
}
