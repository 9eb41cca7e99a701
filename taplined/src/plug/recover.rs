//! Recovery when the daemon starts: disks that kept running without a daemon, and the unfinished work of its
//! predecessor.
//!
//! A process is killed only if the catalogue is the latest one and shows that no client was informed of the process. An
//! older one, such as a backup taken during a plug or an unplug, says nothing about processes that run now.

use std::collections::{BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use api::{Code, Problem, Vbd, VbdState};
use repo::catalogue::Process;
use rustix::process::Signal;
use uuid::Uuid;

use super::settle::{Rest, record, settle};
use super::stray::{self, Found};
use super::{cleanup, limit, space, supervise};
use crate::background;
use crate::daemon::Daemon;
use crate::disk::paths;
use crate::disk::process::DiskProcess;
use crate::disk::serving;
use crate::fault::{self, Planted};
use crate::reconcile::{self, Heal};
use crate::task::blocking;

/// The file in the run directory with the boot ID under which a daemon last ran.
const BOOT: &str = "boot";

/// Reattaches to disks, restarts those that died in the meantime, and completes unfinished work. Returns the VBDs
/// that were plugged, or got another process, since the catalogue's state was recorded.
pub async fn recover(daemon: &Daemon) -> Result<BTreeSet<Uuid>, Problem> {
    background::spawn(space::notify_of_space(daemon.clone(), daemon.srs.relieved()));
    let rebooted = has_rebooted(daemon).await?;
    let found = daemon.catalogue.read(|view| {
        let vbds = view.vbds(None, None)?;
        vbds.into_iter().map(|vbd| view.vbd_process(vbd.uuid).map(|process| (vbd, process))).collect()
    });
    let found: Vec<(Vbd, Option<Process>)> = found.await?;
    let older = daemon.catalogue.read(|view| view.may_be_older()).await?;
    let config = daemon.config.clone();
    let mut running = blocking("find disk processes", move || serving::all(&config)).await?;
    let (mut known, mut unserved, mut since) = (HashSet::new(), Vec::new(), BTreeSet::new());
    for (mut vbd, process) in found.into_iter().filter(|(vbd, _)| vbd.state != VbdState::Unplugged) {
        // After a reboot its pid may belong to another process.
        let process = process.filter(|_| !rebooted);
        known.insert(vbd.uuid);
        let process = process.map(DiskProcess::find).transpose()?.flatten();
        let recorded = process.as_ref().map(DiskProcess::identity);
        let (others, before) = (running.remove(&vbd.uuid).unwrap_or_default(), vbd.state);
        let process = match older {
            false => alone(daemon, &vbd, process, others).await?,
            true => serving_by_older(daemon, &mut vbd, process, others).await?,
        };
        if process.is_none() && !rebooted && matches!(vbd.state, VbdState::Plugged | VbdState::Restarting) {
            unserved.push(vbd);
            continue;
        }
        if process.as_ref().is_some_and(|serves| Some(serves.identity()) != recorded || vbd.state != before) {
            since.insert(vbd.uuid);
        }
        let runs = process.is_some() && vbd.state == VbdState::Plugged;
        one(daemon, &vbd, process, rebooted).await?;
        if runs {
            limit::resend(daemon, vbd.uuid);
        }
    }
    // If the catalogue is an older one, a VDI may be served through another VBD by now; then the running processes
    // are right. Otherwise the remaining processes belong to VBDs that are unplugged or no longer exist.
    for (vbd, processes) in running {
        known.insert(vbd);
        if fault::planted(Planted::KilledStrays) {
            for mut stray in processes {
                stray.kill().await?;
            }
            continue;
        }
        if let Found::Taken(process) = stray::adopt_stray(daemon, vbd, processes, &unserved).await {
            since.insert(vbd);
            supervise::begin(daemon, vbd, Some(process));
        }
    }
    for vbd in unserved {
        let now = daemon.catalogue.read(move |view| view.vbd(vbd.uuid)).await?;
        one(daemon, &now, None, rebooted).await?;
    }
    // Before any merge or other operation that relies on the catalogue.
    reconcile::all(daemon, Heal::Yes).await?;
    let (config, keep) = (daemon.config.clone(), known);
    blocking("remove files that belong to no VBD", move || remove_strays(&paths::all(&config), &keep)).await?;
    Ok(since)
}

/// Returns the only process of a VBD: the recorded one, or one that was to replace it and may have done so; `None` if
/// neither exists. Kills all others.
async fn alone(
    daemon: &Daemon,
    vbd: &Vbd,
    recorded: Option<DiskProcess>,
    running: Vec<DiskProcess>,
) -> Result<Option<DiskProcess>, Problem> {
    let known = recorded.as_ref().map(DiskProcess::identity);
    let others: Vec<DiskProcess> = running.into_iter().filter(|other| Some(other.identity()) != known).collect();
    if vbd.state != VbdState::Plugged {
        // Started by a daemon that died before recording it: it has not been passed anything.
        for mut other in others {
            other.kill().await?;
        }
        return Ok(recorded);
    }
    let serves = settle(&daemon.disks, vbd.uuid, recorded, others, Rest::Killed).await?;
    if let Some(other) = serves.as_ref().map(DiskProcess::identity).filter(|serves| Some(*serves) != known) {
        note_other(daemon, vbd, other).await?;
    }
    Ok(serves)
}

/// Like [`alone`], for a catalogue that is older than the processes: a process of a VBD that was being plugged,
/// restarted or unplugged at that time may serve a guest now, or no client was informed that it ended. If there is
/// one, the VBD is plugged.
async fn serving_by_older(
    daemon: &Daemon,
    vbd: &mut Vbd,
    recorded: Option<DiskProcess>,
    running: Vec<DiskProcess>,
) -> Result<Option<DiskProcess>, Problem> {
    let known = recorded.as_ref().map(DiskProcess::identity);
    let Some(serves) = settle(&daemon.disks, vbd.uuid, recorded, running, Rest::Left).await? else { return Ok(None) };
    let (identity, before) = (serves.identity(), vbd.state);
    if before != VbdState::Plugged {
        stray::record(daemon, vbd, identity).await?;
        vbd.state = VbdState::Plugged;
        tracing::warn!(
            vbd = %vbd.uuid, pid = identity.pid, ?before,
            "adopting its disk process: the catalogue, which has it in another state, is older"
        );
    } else if Some(identity) != known {
        note_other(daemon, vbd, identity).await?;
    }
    Ok(Some(serves))
}

async fn note_other(daemon: &Daemon, vbd: &Vbd, serves: Process) -> Result<(), Problem> {
    tracing::info!(vbd = %vbd.uuid, pid = serves.pid, "it is served by a different process than the recorded one");
    record(daemon, vbd.uuid, serves).await
}

/// Whether the host was booted since the last start of a daemon. In that case the autostart objects are recorded in
/// the same commit.
async fn has_rebooted(daemon: &Daemon) -> Result<bool, Problem> {
    let path = "/proc/sys/kernel/random/boot_id";
    let now = fs::read_to_string(path).map_err(|error| Problem::failed(format_args!("read {path}"), error))?;
    let now = now.trim().to_owned();
    // Distinguishes a reboot from a catalogue of before this boot that was restored since.
    let mark = daemon.config.run_directory.join(BOOT);
    let first = fs::read_to_string(&mark).map_or(true, |marked| marked != now);
    let (again, noted) = (daemon.config.autostart.plugged, now.clone());
    let rebooted = daemon.catalogue.write(move |tx| tx.note_boot(&noted, first, again)).await?;
    // After the commit: if the daemon dies in between, the next one starts these objects.
    fs::write(&mark, now).map_err(|error| Problem::failed(format_args!("write {}", mark.display()), error))?;
    Ok(rebooted)
}

async fn one(daemon: &Daemon, vbd: &Vbd, process: Option<DiskProcess>, rebooted: bool) -> Result<(), Problem> {
    let uuid = vbd.uuid;
    match (vbd.state, process) {
        (VbdState::Unplugged, _) => {}
        (_, None) if rebooted => {
            let what = format!("VBD {uuid} is no longer plugged: the host was rebooted");
            finish(daemon, uuid, Problem::new(Code::State, what).advise("plug it again")).await?;
        }
        (VbdState::Plugging, process) => {
            cleanup::clear(daemon, uuid, process).await?;
            let what = format!("VBD {uuid} was not plugged: the daemon stopped during the plug");
            finish(daemon, uuid, Problem::new(Code::Failed, what).advise("plug it again")).await?;
        }
        (VbdState::Unplugging, Some(process)) => {
            process.signal(Signal::TERM)?;
            supervise::end(daemon, uuid, process);
        }
        (VbdState::Unplugging, None) => drop(cleanup::clear_and_unplug(daemon, uuid, None).await?),
        (VbdState::Plugged | VbdState::Restarting, process) => {
            tracing::info!(vbd = %uuid, found = process.is_some(), "plugged");
            if process.is_some() && vbd.state == VbdState::Restarting {
                // It was restarted, and the daemon stopped before it responded: restart it once more, to be certain
                // of its state.
                cleanup::clear(daemon, uuid, process).await?;
                supervise::begin(daemon, uuid, None);
            } else {
                supervise::begin(daemon, uuid, process);
            }
        }
    }
    Ok(())
}

async fn finish(daemon: &Daemon, vbd: Uuid, why: Problem) -> Result<(), Problem> {
    tracing::warn!(%vbd, "{why}");
    cleanup::clear_and_unplug(daemon, vbd, Some(why)).await.map(drop)
}

/// Removes directories of VBDs that are not served: unplugged or removed ones.
fn remove_strays(places: &Path, known: &HashSet<Uuid>) -> Result<(), Problem> {
    let tried = || format!("list {}", places.display());
    let entries = fs::read_dir(places).map_err(|error| Problem::failed(tried(), error))?;
    for entry in entries {
        let entry = entry.map_err(|error| Problem::failed(tried(), error))?;
        let vbd = entry.file_name().to_str().and_then(|name| Uuid::parse_str(name).ok());
        if vbd.is_some_and(|vbd| !known.contains(&vbd)) {
            tracing::warn!(directory = %entry.path().display(), "removing the files of a VBD that is not served");
            fs::remove_dir_all(entry.path()).map_err(|error| Problem::failed(tried(), error))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn directories_without_vbd_are_removed() {
        let room = tempfile::tempdir().unwrap();
        let (known, stray) = (Uuid::new_v4(), Uuid::new_v4());
        for name in [known.to_string(), stray.to_string(), "other".into()] {
            fs::create_dir(room.path().join(name)).unwrap();
        }
        remove_strays(room.path(), &HashSet::from([known])).unwrap();
        assert!(room.path().join(known.to_string()).exists() && room.path().join("other").exists());
        assert!(!room.path().join(stray.to_string()).exists());
    }
}
