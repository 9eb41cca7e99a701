//! Monitors whether the image files of plugged disks are still in their repositories, and the repositories where they
//! were.
//!
//! It compares names with the files that the processes have open, without contacting them. A difference is verified
//! before it is recorded ([`reconcile::of_vbd`], [`Srs::measure`](crate::sr::Srs::measure)). Invariants: while
//! nothing is plugged it sleeps; storage that does not respond blocks only the check of its own repository.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{Code, ObjectKind, Problem};
use tokio::sync::broadcast::error::RecvError;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;
use crate::disk::files::{self, Astray};
use crate::disk::live;
use crate::reconcile::{self, Heal};

/// Interval between checks: a missing file shows within two seconds.
const EVERY: Duration = Duration::from_secs(1);

/// State between checks.
#[derive(Debug, Default)]
struct Noted {
    /// Repositories that are being checked.
    busy: HashSet<Uuid>,
    /// Missing files that are already recorded, by disk.
    astray: HashMap<Uuid, Vec<Astray>>,
}

fn lock(noted: &Mutex<Noted>) -> MutexGuard<'_, Noted> {
    noted.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Monitors the files of all plugged disks, as long as the daemon runs.
pub async fn watch(daemon: Daemon) {
    let noted = Arc::<Mutex<Noted>>::default();
    loop {
        let mut events = daemon.catalogue.subscribe();
        let plugged = match daemon.catalogue.read(|view| view.plugged_by_sr()).await {
            Ok(plugged) => plugged,
            Err(problem) => {
                tracing::error!("cannot tell which disks are plugged: {problem}");
                tokio::time::sleep(EVERY).await;
                continue;
            }
        };
        let known: HashSet<Uuid> = plugged.values().flatten().copied().collect();
        lock(&noted).astray.retain(|vbd, _| known.contains(vbd));
        if plugged.is_empty() {
            loop {
                match events.recv().await {
                    Ok(event) if event.kind != ObjectKind::Vbd => continue,
                    Ok(_) | Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return,
                }
            }
            continue;
        }
        for (sr, vbds) in plugged {
            if lock(&noted).busy.insert(sr) {
                let (daemon, noted) = (daemon.clone(), noted.clone());
                background::spawn(async move {
                    if let Err(problem) = look(&daemon, sr, vbds, &noted).await {
                        tracing::debug!(%sr, "the files of its disks could not be examined: {problem}");
                    }
                    lock(&noted).busy.remove(&sr);
                });
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Checks the files of these disks of a repository once.
async fn look(daemon: &Daemon, sr: Uuid, vbds: Vec<Uuid>, noted: &Mutex<Noted>) -> Result<(), Problem> {
    // A lost repository is monitored elsewhere.
    let Ok(directory) = daemon.srs.directory(sr).await else { return Ok(()) };
    let known: Vec<_> = vbds.into_iter().map(|vbd| (vbd, daemon.disks.open_files.of(vbd))).collect();
    let looked = daemon.srs.patience.ask(sr, "examine the files of its disks", move || {
        directory.still_there()?;
        known.into_iter().map(|(vbd, known)| Ok((vbd, files::look(&directory, &known)?))).collect::<Result<Vec<_>, _>>()
    });
    let looked = match looked.await {
        Err(problem) if problem.code == Code::State => {
            daemon.srs.measure_now(sr).await;
            return Ok(());
        }
        looked => looked?,
    };
    for (vbd, astray) in looked {
        let before = lock(noted).astray.get(&vbd).cloned().unwrap_or_default();
        if before != astray {
            compare(daemon, vbd, astray, noted).await?;
        }
    }
    Ok(())
}

/// Compares a disk whose files seem to be missing, or back, with the catalogue. A disk that cannot be compared now,
/// or is being changed by a task, is compared again after the next check.
async fn compare(daemon: &Daemon, vbd: Uuid, astray: Vec<Astray>, noted: &Mutex<Noted>) -> Result<(), Problem> {
    let is_recorded = live::unless_stuck(daemon, vbd, reconcile::of_vbd(daemon, vbd, Heal::Yes)).await?.is_some();
    match astray.is_empty() {
        true => drop(lock(noted).astray.remove(&vbd)),
        false if is_recorded => drop(lock(noted).astray.insert(vbd, astray)),
        false => {}
    }
    Ok(())
}
