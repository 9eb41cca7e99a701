//! Monitors whether disk processes are stopped, whether requests complete, and whether the storage of repositories
//! responds, for the health of VBDs and repositories ([`api::health`]).
//!
//! It reads statistics pages and the kernel's view of processes; disk processes do no work for it. Invariant: while
//! nothing is plugged it sleeps.

pub mod files;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use api::health::{Delay, Seen};
use api::{ObjectKind, Problem};
use stats::{Delays, Reader};
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use uuid::Uuid;

use crate::config::Config;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::task::blocking;

/// Interval between checks: problems show within two seconds ([`Delays`] needs 1.5 s).
const EVERY: Duration = Duration::from_millis(400);

/// Minimum time between two checks, however many events occur.
const APART: Duration = Duration::from_millis(100);

/// A monitored disk process.
#[derive(Debug, Default)]
struct Watched {
    pid: u32,
    delays: Delays,
    /// Whether it was stopped in the last check: a debugger that attaches stops it briefly.
    stopped: bool,
    seen: Seen,
    /// The same, as recorded in the catalogue.
    recorded: Seen,
}

/// Monitors all disks and repositories, as long as the daemon runs.
pub async fn watch(daemon: Daemon) {
    let mut events = daemon.catalogue.subscribe();
    let mut disks: HashMap<Uuid, Watched> = HashMap::new();
    let mut silent = HashSet::new();
    let mut due = Instant::now();
    let mut list = true;
    loop {
        tokio::select! {
            () = tokio::time::sleep_until(due), if list || !disks.is_empty() => {
                due = Instant::now() + EVERY;
                match look(&daemon, std::mem::take(&mut disks), list).await {
                    Ok(now) => (disks, list) = (now, false),
                    Err(problem) => {
                        tracing::error!("cannot look at disk processes: {problem}");
                        list = true;
                    }
                }
            }
            event = events.recv() => {
                let matters = match event {
                    Ok(event) => event.kind == ObjectKind::Vbd,
                    Err(RecvError::Lagged(_)) => true,
                    Err(RecvError::Closed) => return,
                };
                if matters {
                    list = true;
                    due = due.min(Instant::now() + APART);
                }
            }
            () = daemon.srs.patience.changed() => {
                if let Err(problem) = record_silent(&daemon, &mut silent).await {
                    tracing::error!("whether storage responds could not be recorded: {problem}");
                }
            }
        }
    }
}

/// Checks all disk processes once, and records changes.
async fn look(
    daemon: &Daemon,
    mut disks: HashMap<Uuid, Watched>,
    list: bool,
) -> Result<HashMap<Uuid, Watched>, Problem> {
    if list {
        let plugged = daemon.catalogue.read(|view| view.plugged_processes()).await?;
        let known = |(vbd, pid): (Uuid, u32)| {
            let watched = disks.remove(&vbd).filter(|watched| watched.pid == pid);
            (vbd, watched.unwrap_or_else(|| Watched { pid, ..Watched::default() }))
        };
        disks = plugged.into_iter().map(known).collect();
    }
    let config = daemon.config.clone();
    let mut disks = blocking("look at disk processes", move || {
        disks.iter_mut().for_each(|(vbd, watched)| watched.look(&config, *vbd));
        Ok(disks)
    })
    .await?;
    let changed = disks.iter().filter(|(_, watched)| watched.recorded != watched.seen);
    let changed: Vec<(Uuid, Seen, Seen)> =
        changed.map(|(vbd, watched)| (*vbd, watched.recorded, watched.seen)).collect();
    if changed.is_empty() {
        return Ok(disks);
    }
    let recovered = changed.iter().any(|(_, before, now)| is_stuck(before) && !is_stuck(now));
    let record = changed.clone();
    let recorded = daemon.catalogue.write(move |tx| {
        for (vbd, _, now) in record {
            tx.see_vbd(vbd, |seen| (seen.stopped, seen.delay) = (now.stopped, now.delay))?;
        }
        Ok(())
    });
    match recorded.await {
        Ok(()) => changed.iter().for_each(|(vbd, _, now)| {
            disks.entry(*vbd).and_modify(|watched| watched.recorded = *now);
        }),
        // Retried by the next check.
        Err(problem) => tracing::error!("the state of disk processes could not be recorded: {problem}"),
    }
    if recovered {
        // Their processes may also be marked as not responding.
        daemon.disks.doubted.poll_now();
    }
    Ok(disks)
}

fn is_stuck(seen: &Seen) -> bool {
    seen.stopped || matches!(seen.delay, Delay::AtStorage | Delay::BeforeStorage)
}

impl Watched {
    fn look(&mut self, config: &Config, vbd: Uuid) {
        let stopped = stats::is_stopped(self.pid);
        self.seen.stopped = stopped && std::mem::replace(&mut self.stopped, stopped);
        let page = DiskPaths::of(config, vbd).page();
        // A process that has just started has none yet.
        let Ok(now) = Reader::open(&page).and_then(|reader| reader.snapshot()) else { return };
        self.seen.delay = match self.delays.judge(&now) {
            stats::Delay::None => Delay::None,
            stats::Delay::Slow => Delay::Slow,
            stats::Delay::AtStorage => Delay::AtStorage,
            stats::Delay::BeforeStorage => Delay::BeforeStorage,
        };
    }
}

/// Records which repositories' storage responds or not, where that has changed since `before`.
async fn record_silent(daemon: &Daemon, before: &mut HashSet<Uuid>) -> Result<(), Problem> {
    let now = daemon.srs.patience.silent();
    let changed: Vec<Uuid> = before.symmetric_difference(&now).copied().collect();
    let silent = now.clone();
    let recorded =
        daemon.catalogue.write(move |tx| changed.into_iter().try_for_each(|sr| tx.see_sr(sr, silent.contains(&sr))));
    recorded.await?;
    *before = now;
    Ok(())
}
