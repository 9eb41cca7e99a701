//! Whether guests run, according to the catalogue: updated from the reports of their machines.
//!
//! A QEMU that hangs may carry out a command long after the daemon has stopped waiting for it, and a guest may stop
//! for other reasons. Invariant: after each report of a stop or a resume, and after each response of a QEMU that was
//! silent, the state is queried and recorded, unless an operation is in progress on the VM, which records the state
//! itself.

use std::sync::Arc;
use std::time::Duration;

use api::{Code, Power, Problem};
use uuid::Uuid;

use super::guest::Guest;
use super::machine::RunningVm;
use crate::background;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};

/// How long QEMU may take to exit after it has closed its monitor.
pub const EXIT: Duration = Duration::from_secs(1);

/// Monitors a guest until the end of its machine.
pub fn follow(daemon: &Daemon, guest: Arc<Guest>) {
    if fault::planted(Planted::LateIsNever) {
        return;
    }
    let daemon = daemon.clone();
    background::spawn(async move {
        loop {
            let changed = tokio::select! {
                _ended = guest.ended() => return,
                changed = guest.power_changed() => changed,
            };
            let settled = match changed {
                Ok(()) => settle(&daemon, &guest).await,
                Err(problem) => {
                    tracing::debug!(vm = %guest.vm, "its power is no longer followed: {problem}");
                    return;
                }
            };
            let Err(problem) = settled else { continue };
            // QEMU closes its monitor some milliseconds before it exits.
            if tokio::time::timeout(EXIT, guest.ended()).await.is_ok() {
                return;
            }
            // The state is queried again when a silent QEMU responds.
            tracing::warn!(vm = %guest.vm, "whether its guest runs is unknown: {problem}");
        }
    });
}

/// Queries and records whether a guest runs.
async fn settle(daemon: &Daemon, guest: &Arc<Guest>) -> Result<(), Problem> {
    let vm = guest.vm;
    loop {
        let before = daemon.vms.operations.idle(vm).await;
        let Some(power) = guest.run(RunningVm::power).await? else { return Ok(()) };
        let operations = daemon.vms.operations.clone();
        let recorded = daemon.catalogue.write(move |tx| {
            if !operations.is_idle_since(before) {
                return Ok(false);
            }
            let Some(known) = tx.find_vm(vm)? else { return Ok(true) };
            let unknown = known.problem.is_some_and(|problem| problem.code == Code::Timeout);
            let follows = matches!(known.power, Power::Running | Power::Paused) && tx.vm_held(vm)?.is_none();
            if follows && (known.power != power || unknown) {
                tracing::info!(%vm, ?power, "its guest was stopped or continued");
                tx.set_vm_power(vm, power, None)?;
            }
            Ok(true)
        });
        if recorded.await? {
            return Ok(());
        }
    }
}

/// Records that it is unknown whether a guest runs. The state is recorded as soon as its QEMU responds.
pub async fn in_doubt(daemon: &Daemon, vm: Uuid, power: Power, late: &Problem) -> Problem {
    let what = format!("whether the guest of VM {vm} runs is unknown: {}", late.detail);
    let problem = Problem::new(Code::Timeout, what).advise(
        "wait: the state is recorded as soon as QEMU answers; find out why it hangs, or shut the VM down with force",
    );
    let shown = problem.clone();
    let recorded = daemon.catalogue.write(move |tx| tx.set_vm_power(vm, power, Some(&shown)));
    if let Err(also) = recorded.await {
        tracing::error!(%vm, "that its state is unknown could not be recorded: {also}");
    }
    problem
}
