//! The end of a VM: detected if it was not requested, and followed up in any case. Its VBDs are unplugged, and it
//! becomes halted.

use std::collections::BTreeSet;
use std::sync::Arc;

use api::{Power, Problem, Vbd, VbdState, Vm};
use uuid::Uuid;

use super::guest::Guest;
use super::machine::{End, RunningVm};
use super::network::Bridged;
use super::{Operation, group, memory, new_task, power, start, vm_directory};
use crate::background;
use crate::catalogue;
use crate::daemon::Daemon;
use crate::fault;
use crate::plug;
use crate::task::{Context, blocking};

/// Watches for the end of a machine from now on, and until then whether its guest runs. An operation in progress on
/// the VM handles the end itself.
pub fn watch(daemon: &Daemon, guest: Arc<Guest>) {
    power::follow(daemon, guest.clone());
    let daemon = daemon.clone();
    background::spawn(async move {
        if let Err(problem) = guest.ended().await {
            tracing::error!(vm = %guest.vm, "{problem}");
            return;
        }
        let operation = daemon.vms.operations.wait(guest.vm).await;
        let still = daemon.vms.guest(guest.vm).is_some_and(|now| Arc::ptr_eq(&now, &guest));
        if !still {
            return;
        }
        let end = guest.run(RunningVm::ended).await;
        let ended = match end {
            Ok(Some(End::Reboots)) => Ended { again: true, ..Ended::default() },
            Ok(Some(End::Badly(problem))) | Err(problem) => Ended::because(problem),
            Ok(Some(End::PoweredOff) | None) => Ended::default(),
        };
        halt(&daemon, guest.vm, ended, operation).await;
    });
}

/// How a VM ended.
#[derive(Debug, Default)]
pub struct Ended {
    /// The reason, if it was not requested.
    pub why: Option<Problem>,
    /// Whether its guest reboots and must be started again.
    pub again: bool,
    /// VBDs that stay plugged: they were not plugged for this machine.
    pub keep: BTreeSet<Uuid>,
}

impl Ended {
    /// For a VM that has ended badly.
    pub fn because(problem: Problem) -> Self {
        Ended { why: Some(problem), ..Ended::default() }
    }
}

/// Completes the end of a VM, in a task of its own.
pub async fn halt(daemon: &Daemon, vm: Uuid, ended: Ended, operation: Operation) {
    let Ended { why, again, keep } = ended;
    match &why {
        Some(problem) => tracing::warn!(%vm, "{problem}"),
        None => tracing::info!(%vm, again, "its guest has powered off"),
    }
    let at_work = daemon.clone();
    let started = daemon.tasks.start(daemon, new_task("vm-end", vm, false), move |context| async move {
        let halted = clear(&at_work, vm, why, &keep, &context.regardless()).await?;
        drop(operation);
        if again {
            start::start(&at_work, vm).await?;
        }
        serde_json::to_value(halted).map_err(|error| Problem::failed("encode a VM", error))
    });
    if let Err(problem) = started.await {
        tracing::error!(%vm, "it has ended, but its disks stay plugged until the daemon restarts: {problem}");
    }
}

/// Unplugs the VBDs of a VM without a machine, except those in `keep`, and records that it is halted, and why. A disk
/// that cannot be unplugged yet does not prevent that: it is unplugged later, and not plugged again before.
pub async fn clear(
    daemon: &Daemon,
    vm: Uuid,
    why: Option<Problem>,
    keep: &BTreeSet<Uuid>,
    context: &Context,
) -> Result<Vm, Problem> {
    let (kept, keep) = (why.clone(), keep.clone());
    let plugged = catalogue::record(&daemon.catalogue, move |tx| {
        // From here on none of them is plugged automatically.
        tx.set_vm_power(vm, Power::Stopping, kept.as_ref())?;
        let known = tx.vm(vm)?;
        let vbds = tx.vbds(Some(vm), None)?;
        let goes = |vbd: &Vbd| vbd.state != VbdState::Unplugged && !keep.contains(&vbd.uuid);
        Ok((known, vbds.into_iter().filter(goes).map(|vbd| vbd.uuid).collect::<Vec<_>>()))
    });
    let (known, plugged) = plugged.await?;
    daemon.vms.guests().remove(&vm);
    fault::point("vm-end", "unplug", false);
    let held = memory::held(daemon, &plugged).await?;
    let unplugged = plug::unplug_all(daemon, plugged, context).await;
    fault::point("vm-end", "unplug", true);
    let (directory, bridged) = (vm_directory(&daemon.config, vm), Bridged::of(&daemon.config, &known));
    let removed = blocking("remove the directory of a VM", move || {
        group::leave(vm);
        let removed = match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Problem::failed(format_args!("remove {}", directory.display()), error))
            }
            _ => Ok(()),
        };
        removed.and(bridged.map_or(Ok(()), |bridged| bridged.disconnect()))
    });
    let why = why.or(unplugged.err()).or(removed.await.err());
    // No process has its disks open any more, and later writes to them are not its guest's.
    let memory = memory::with_disks(daemon, vm, &held).await?;
    let halted = catalogue::record(&daemon.catalogue, move |tx| {
        tx.set_vm_run_by(vm, None, None)?;
        if let Some(memory) = &memory {
            tx.set_vm_memory(vm, memory)?;
        }
        tx.set_vm_down(vm, why.as_ref())?;
        tx.vm(vm)
    });
    halted.await
}
