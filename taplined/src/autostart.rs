//! Autostart of VMs, and of disks of machines that are managed elsewhere, when the host boots.
//!
//! 1. The commit that notes the host's new boot also records everything that is to be started
//!    ([`repo::Tx::note_boot`]). *If killed after this:* the next daemon continues with the rest.
//! 2. Objects are started in the requested order, those with the same number together, each by an ordinary task that
//!    is retried after a pause if it fails. Then the object is removed from the list; a final failure is recorded as
//!    its problem.
//!
//! A restart of the daemon alone starts nothing: what was stopped on purpose stays stopped.

use std::time::Duration;

use api::{Code, Power, Problem, VbdState};
use repo::catalogue::ToStart;
use tokio::task::JoinSet;

use crate::background;
use crate::daemon::Daemon;
use crate::{plug, vm};

/// Starts the objects with autostart in the background.
pub async fn begin(daemon: &Daemon) -> Result<(), Problem> {
    let all = daemon.catalogue.read(|view| view.to_start()).await?;
    if !all.is_empty() {
        tracing::info!(count = all.len(), "the host has booted: starting VMs and VBDs with autostart");
        background::spawn(run(daemon.clone(), all));
    }
    Ok(())
}

async fn run(daemon: Daemon, all: Vec<ToStart>) {
    for together in all.chunk_by(|one, next| one.autostart().order == next.autostart().order) {
        let mut starting = JoinSet::new();
        for one in together {
            starting.spawn(start(daemon.clone(), *one));
        }
        while starting.join_next().await.is_some() {}
        let delay = together.iter().map(|one| one.autostart().delay).max().unwrap_or(0);
        tokio::time::sleep(Duration::from_secs(delay.into())).await;
    }
}

/// Starts one object and removes it from the list.
async fn start(daemon: Daemon, one: ToStart) {
    let (uuid, tries) = (one.uuid(), one.autostart().tries);
    let mut tried: u8 = 0;
    let outcome = loop {
        tried = tried.saturating_add(1);
        let Err(problem) = try_once(&daemon, one).await else { break Ok(()) };
        if daemon.tasks.is_stopping() {
            // The next daemon continues with it.
            return;
        }
        tracing::warn!(%uuid, tried, tries, "autostart failed: {problem}");
        if tried >= tries || matches!(problem.code, Code::Cancelled | Code::NotFound) {
            break Err(problem);
        }
        tokio::time::sleep(Duration::from_secs(daemon.config.autostart.retry_after.into())).await;
        // The autostart may have been withdrawn.
        match daemon.catalogue.read(|view| view.to_start()).await {
            Ok(wanted) if !wanted.iter().any(|other| other.uuid() == uuid) => return,
            Ok(_) => {}
            Err(problem) => tracing::error!(%uuid, "cannot tell whether autostart is still wanted: {problem}"),
        }
    };
    let recorded = daemon.catalogue.write(move |tx| {
        tx.end_start(uuid)?;
        match outcome {
            Err(problem) if problem.code != Code::Cancelled => record_failure(tx, one, tried, &problem),
            _ => Ok(()),
        }
    });
    if let Err(problem) = recorded.await {
        tracing::error!(%uuid, "the result of autostart could not be recorded: {problem}");
    }
}

/// Records the reason on an object that could not be started, unless it was started by other means.
fn record_failure(tx: &mut repo::Tx<'_>, one: ToStart, tried: u8, why: &Problem) -> Result<(), Problem> {
    let what = format!("autostart failed after {tried} tries: {why}");
    let problem = Problem::new(why.code, what).advise(why.advice.clone().unwrap_or_else(|| "start it".into()));
    match one {
        ToStart::Vm(uuid, _)
            if tx.find_vm(uuid)?.is_some_and(|vm| matches!(vm.power, Power::Halted | Power::Suspended)) =>
        {
            tx.set_vm_down(uuid, Some(&problem))
        }
        ToStart::Vbd(uuid, _) if tx.find_vbd(uuid)?.is_some_and(|vbd| vbd.state == VbdState::Unplugged) => {
            tx.set_vbd_state(uuid, VbdState::Unplugged, Some(&problem))
        }
        _ => Ok(()),
    }
}

/// Starts one object, unless it has been started in the meantime.
async fn try_once(daemon: &Daemon, one: ToStart) -> Result<(), Problem> {
    let begun = match one {
        ToStart::Vm(uuid, _) => {
            // Its power-off at the host's shutdown may not be recorded yet.
            daemon.vms.settled(uuid).await;
            match daemon.catalogue.read(move |view| view.vm(uuid)).await?.power {
                Power::Running | Power::Paused | Power::Starting => return Ok(()),
                Power::Halted | Power::Stopping | Power::Suspended => vm::start(daemon, uuid).await?,
            }
        }
        ToStart::Vbd(uuid, _) => match daemon.catalogue.read(move |view| view.vbd(uuid)).await?.state {
            VbdState::Plugged | VbdState::Plugging | VbdState::Restarting => return Ok(()),
            VbdState::Unplugged | VbdState::Unplugging => plug::plug(daemon, uuid).await?,
        },
    };
    daemon.tasks.success_of(begun.uuid).await.map(drop)
}
