//! Disk processes that serve VBDs which are unplugged in the catalogue or missing from it, for example after it was
//! restored from a backup. Guests may be using them, so they are adopted if their identity is clear, and otherwise
//! not touched.

use api::{Difference, DifferenceKind, Mode, Problem, Transport, Vbd, VbdState, Vdi};
use repo::View;
use repo::catalogue::Process;
use uuid::Uuid;

use super::{cleanup, limit, share, supervise};
use crate::daemon::Daemon;
use crate::disk::live;
use crate::disk::names::ServedLayer;
use crate::disk::paths::DiskPaths;
use crate::disk::process::DiskProcess;
use crate::disk::serving::{self, Words};
use crate::task::blocking;

/// The result of an attempt to adopt processes.
pub enum Found {
    /// This process serves the VBD, which is now plugged in the catalogue.
    Taken(DiskProcess),
    /// They are left alone.
    Left,
}

/// Adopts the disks of VBDs that are missing from the catalogue. They are found when their repository becomes known
/// again after the catalogue was lost.
pub async fn adopt_unknown(daemon: &Daemon) -> Result<(), Problem> {
    for (vbd, processes, _) in unplugged(daemon).await?.into_iter().filter(|(_, _, known)| known.is_none()) {
        if let Found::Taken(process) = adopt_stray(daemon, vbd, processes, &[]).await {
            supervise::begin(daemon, vbd, Some(process));
        }
    }
    Ok(())
}

/// Processes by their VBDs, which are unplugged or not in the catalogue.
async fn unplugged(daemon: &Daemon) -> Result<Vec<(Uuid, Vec<DiskProcess>, Option<Vbd>)>, Problem> {
    let config = daemon.config.clone();
    let running = blocking("find disk processes", move || serving::all(&config)).await?;
    // Read afterwards: a process is started only for a VBD that is in the catalogue.
    let vbds = daemon.catalogue.read(|view| view.vbds(None, None)).await?;
    let with_known = running.into_iter().map(|(vbd, processes)| {
        let known = vbds.iter().find(|known| known.uuid == vbd);
        (vbd, processes, known.cloned())
    });
    Ok(with_known.filter(|(_, _, known)| known.as_ref().is_none_or(|vbd| vbd.state == VbdState::Unplugged)).collect())
}

/// The differences: processes that serve VBDs which are unplugged, or not in the catalogue.
pub async fn all(daemon: &Daemon) -> Result<Vec<Difference>, Problem> {
    let mut found = Vec::new();
    for (vbd, processes, known) in unplugged(daemon).await? {
        for process in processes {
            let identity = process.identity();
            // One that has exited belonged to a VBD that was just unplugged.
            if DiskProcess::find(identity)?.is_none() {
                continue;
            }
            let what = format!("process {} serves VBD {vbd}, which is not plugged", identity.pid);
            let problem = Problem::new(api::Code::State, what).advise(
                "a guest may be using it: the daemon adopts it when it starts, if its files belong to a VDI. If no \
                 guest uses it, kill it",
            );
            let vdi = known.as_ref().map(|known| known.vdi);
            let at = Difference { vdi, vbd: Some(vbd), ..Difference::new(DifferenceKind::Process) };
            found.push(Difference { problem: Some(problem), ..at });
        }
    }
    Ok(found)
}

/// Adopts the process that serves a VBD, which is unplugged in the catalogue or missing. Conflicting VBDs that are
/// plugged in the catalogue and `unserved` are unplugged: in reality that happened before this one was plugged.
pub async fn adopt_stray(daemon: &Daemon, vbd: Uuid, processes: Vec<DiskProcess>, unserved: &[Vbd]) -> Found {
    let pids: Vec<u32> = processes.iter().map(|process| process.identity().pid).collect();
    match try_adopt(daemon, vbd, processes, unserved).await {
        Ok(process) => {
            let pid = process.identity().pid;
            tracing::warn!(%vbd, pid, "adopting the disk process of a VBD that the catalogue did not have as plugged");
            Found::Taken(process)
        }
        Err(why) => {
            tracing::error!(
                %vbd, ?pids,
                "not touching the running disk process of a VBD that is not plugged: {why}; if no guest uses it, kill \
                 it"
            );
            Found::Left
        }
    }
}

async fn try_adopt(
    daemon: &Daemon,
    vbd: Uuid,
    processes: Vec<DiskProcess>,
    unserved: &[Vbd],
) -> Result<DiskProcess, String> {
    let alone: [DiskProcess; 1] = processes.try_into().map_err(|_| "there is more than one")?;
    let [process] = alone;
    let words = Words::of(process.identity().pid).ok_or("its command line cannot be read")?;
    let layers = live::layers(daemon, vbd).await.map_err(|problem| problem.to_string())?;
    let layers = layers.ok_or("it does not respond")?;
    let place = DiskPaths::of(&daemon.config, vbd);
    let identity = process.identity();
    let transport = words.transport;
    let known = daemon.catalogue.read(move |view| match view.find_vbd(vbd)? {
        Some(known) => Ok((known, true)),
        None => Ok((new(vbd, &vdi_of(view, &layers)?, &words), false)),
    });
    let (mut known, recorded) = known.await.map_err(|problem| problem.to_string())?;
    if !recorded {
        known.limits = limit::of_process(daemon, vbd).await;
        known.share_weight = share::weight_of_process(daemon, vbd).await.unwrap_or(known.share_weight);
    }
    unplug_conflicting(daemon, &known, unserved).await.map_err(|problem| problem.to_string())?;
    let taken = daemon.catalogue.write(move |tx| {
        if tx.find_vbd(vbd)?.is_some() != recorded {
            return Err(Problem::new(api::Code::State, "another task has adopted it meanwhile"));
        }
        if !recorded {
            tx.add_vbd(&known)?;
        }
        plugged(tx, vbd, identity, &place.shown(transport)?)
    });
    taken.await.map_err(|problem| problem.to_string())?;
    if recorded {
        // The recorded limits apply, like all other changeable properties.
        limit::resend(daemon, vbd);
    }
    Ok(process)
}

/// Unplugs VBDs that cannot be plugged at the same time as a VBD whose disk is running.
async fn unplug_conflicting(daemon: &Daemon, running: &Vbd, unserved: &[Vbd]) -> Result<(), Problem> {
    let excludes =
        |other: &&Vbd| other.vdi == running.vdi && (other.mode == Mode::ReadWrite || running.mode == Mode::ReadWrite);
    for other in unserved.iter().filter(excludes) {
        let (vbd, instead) = (other.uuid, running.uuid);
        let what = format!("VBD {vbd} is not plugged: VBD {instead} is serving its VDI");
        let why = Problem::new(api::Code::State, what).advise("unplug the other one before plugging this one");
        tracing::warn!(%vbd, "{why}");
        cleanup::clear_and_unplug(daemon, vbd, Some(why)).await?;
    }
    Ok(())
}

/// The VDI whose disk has these layers: the first of them that is the image of a writable VDI, else the leaf's.
fn vdi_of(view: &View<'_>, layers: &[ServedLayer]) -> Result<Vdi, Problem> {
    let mut first = None;
    for sr in view.srs()? {
        let images = view.images_of_sr(sr.uuid)?;
        for (depth, layer) in layers.iter().enumerate() {
            let Some(image) = images.iter().find(|image| layer.names(&image.file)) else { continue };
            let Some(vdi) = view.vdi_of_image(image.uuid)?.map(|vdi| view.vdi(vdi)).transpose()? else { continue };
            if !vdi.read_only {
                return Ok(vdi);
            }
            first = first.or((depth == 0).then_some(vdi));
        }
    }
    first.ok_or_else(|| Problem::new(api::Code::NotFound, "its files belong to no VDI in the catalogue"))
}

fn new(uuid: Uuid, vdi: &Vdi, words: &Words) -> Vbd {
    let mode = if words.read_only { Mode::ReadOnly } else { Mode::ReadWrite };
    let Words { transport, queues, for_nbd_address, .. } = *words;
    Vbd { uuid, mode, queues, for_nbd_address, ..Vbd::unplugged(vdi.uuid, transport) }
}

/// Records that a VBD is plugged and served by a process, whatever its recorded state.
pub async fn record(daemon: &Daemon, vbd: &Vbd, by: Process) -> Result<(), Problem> {
    let (uuid, at) = (vbd.uuid, DiskPaths::of(&daemon.config, vbd.uuid).shown(vbd.transport)?);
    daemon.catalogue.write(move |tx| plugged(tx, uuid, by, &at)).await
}

fn plugged(tx: &mut repo::Tx<'_>, vbd: Uuid, by: Process, at: &api::AbsolutePath) -> Result<(), Problem> {
    let known = tx.vbd(vbd)?;
    if known.transport == Transport::Blkif && known.vm.is_none() {
        return Err(Problem::new(api::Code::State, "the domain that it serves is unknown"));
    }
    tx.take_lease(known.vdi, vbd, known.mode)?;
    tx.set_vbd_served(vbd, by, at)?;
    tx.set_vbd_state(vbd, VbdState::Plugged, None)
}
