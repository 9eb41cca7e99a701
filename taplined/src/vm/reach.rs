//! Finds the machine of a running VM, which an earlier daemon may have started: to control it, or to end it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ::vm::qemu::machine::{MachineError, QemuVm};
use ::vm::qemu::process::{Identity, Process};
use api::{Code, Driver, Power, Problem, Transport, Vbd, VbdState};
use uuid::Uuid;

use super::guest::{self, Guest};
use super::machine::{RunningVm, qemu_problem};
use super::{domain, end, hardware, is_being_suspended, vm_directory};
use crate::daemon::Daemon;
use crate::task::blocking;

/// The time limit for the response of an adopted machine, which gets at most two requests.
const TO_ANSWER: Duration = Duration::from_secs(5);

/// Time for a machine to exit after its monitor was closed.
const TO_END: Duration = Duration::from_secs(3);

/// The machine of a running VM. An unreachable one is retried.
pub async fn reach(daemon: &Daemon, vm: Uuid) -> Result<Arc<Guest>, Problem> {
    if let Some(guest) = daemon.vms.guest(vm) {
        return Ok(guest);
    }
    let found = adopt(daemon, vm).await.map_err(|problem| {
        problem.advise("check that no other client holds its monitor, or shut the VM down with force")
    })?;
    found.ok_or_else(|| Problem::new(Code::State, format!("VM {vm} has ended")))
}

/// Reattaches to the machine of a VM; `None` if it has ended.
pub async fn adopt(daemon: &Daemon, vm: Uuid) -> Result<Option<Arc<Guest>>, Problem> {
    let driver = daemon.catalogue.read(move |view| view.vm(vm)).await?.driver;
    let found = match driver {
        Driver::Qemu => find_qemu(daemon, vm).await?,
        Driver::Xen => domain::find(daemon, vm).await?.map(|domain| Guest::of_domain(vm, domain)),
    };
    let Some(guest) = found.map(Arc::new) else { return Ok(None) };
    let mut paused = guest.run(RunningVm::is_paused).await?;
    // A guest whose memory is being saved stays paused: the job decides what happens to it.
    if paused && !is_being_suspended(daemon, vm).await? {
        // The previous daemon may have been saving its memory.
        guest.run(RunningVm::end_save).await?;
        paused = !end_hold(daemon, &guest).await?;
    }
    daemon.vms.guests().insert(vm, guest.clone());
    end::watch(daemon, guest.clone());
    record(daemon, vm, paused).await?;
    tracing::info!(%vm, paused, "reattached");
    Ok(Some(guest))
}

/// Resumes a guest that the previous daemon had paused for a moment ([`super::moment`]); returns whether it had. The
/// record of an older catalogue is obsolete.
async fn end_hold(daemon: &Daemon, guest: &Arc<Guest>) -> Result<bool, Problem> {
    let vm = guest.vm;
    let read = daemon.catalogue.read(move |view| Ok((view.vm_held(vm)?, view.may_be_older()?)));
    let (Some(held_for), older) = read.await? else { return Ok(false) };
    if !older {
        tracing::info!(%vm, %held_for, "resuming its guest, which was paused for a moment");
        guest.run(RunningVm::resume).await?;
    }
    daemon.catalogue.write(move |tx| tx.set_vm_held(vm, None)).await?;
    Ok(!older)
}

/// Reattaches to the QEMU of a VM; `None` if it has ended.
async fn find_qemu(daemon: &Daemon, vm: Uuid) -> Result<Option<Guest>, Problem> {
    let found =
        daemon.catalogue.read(move |view| Ok((view.vm_process(vm)?, view.vbds(None, None)?, view.may_be_older()?)));
    let (process, vbds, older) = found.await?;
    let Some(identity) = process.as_ref().and_then(guest::identity) else { return Ok(None) };
    let directory = vm_directory(&daemon.config, vm);
    let adopted = blocking(format!("reattach to VM {vm}"), move || {
        let mut machine = match QemuVm::adopt(&identity, &directory, TO_ANSWER) {
            Ok(machine) => machine,
            Err(MachineError::Gone { .. }) => return Ok(None),
            Err(_) if is_ending(&identity) => return Ok(None),
            Err(error) => return Err(qemu_problem(vm, &error)),
        };
        match machine.status() {
            Ok(_) => {}
            Err(_) if is_ending(&identity) => return Ok(None),
            Err(error) => return Err(qemu_problem(vm, &error)),
        }
        if !older {
            detach_unserved(vm, &mut machine, &vbds);
        }
        Ok(Some(machine))
    });
    let Some(machine) = adopted.await? else { return Ok(None) };
    Guest::of_qemu(vm, machine).map(Some).map_err(|(_, problem)| problem)
}

/// Whether a process is exiting: a killed one closes its monitor first, then frees its memory, and exists until then.
fn is_ending(identity: &Identity) -> bool {
    match Process::find(identity) {
        Ok(Some(process)) => matches!(process.wait(TO_END), Ok(true)),
        Ok(None) => true,
        Err(_) => false,
    }
}

/// Records the state of the guest, which may have been paused or resumed by other means in the meantime.
async fn record(daemon: &Daemon, vm: Uuid, paused: bool) -> Result<(), Problem> {
    let recorded = daemon.catalogue.write(move |tx| match tx.vm(vm)?.power {
        Power::Stopping | Power::Starting | Power::Halted | Power::Suspended => Ok(()),
        Power::Running | Power::Paused if paused => tx.set_vm_power(vm, Power::Paused, None),
        Power::Running | Power::Paused => tx.set_vm_power(vm, Power::Running, None),
    });
    recorded.await
}

/// Detaches disks that are not served: a daemon may have ended between the plug of a device and its record. `vbds`
/// are all VBDs.
fn detach_unserved(vm: Uuid, machine: &mut QemuVm, vbds: &[Vbd]) {
    let plugged = |vbd: &&Vbd| vbd.state != VbdState::Unplugged;
    // Of a disk that an older catalogue did not have, only the process was found, not the VM that uses it.
    if vbds.iter().filter(plugged).any(|vbd| vbd.vm.is_none() && vbd.transport == Transport::VhostUser) {
        return;
    }
    let has = vbds.iter().filter(plugged).filter(|vbd| vbd.vm == Some(vm));
    let has: Vec<_> = has.filter_map(|vbd| hardware::position_of(vbd).ok()).collect();
    let requested = machine.disks().and_then(|disks| {
        let stray = disks.into_iter().filter(|position| !has.contains(position));
        stray.map(|position| machine.begin_unplug(position)).collect::<Result<Vec<()>, _>>()
    });
    if let Err(error) = requested {
        tracing::warn!("{}", qemu_problem(vm, &error));
    }
}

/// Kills the machine of a VM without contacting it.
pub async fn kill(daemon: &Daemon, vm: Uuid) -> Result<(), Problem> {
    if daemon.catalogue.read(move |view| view.vm(vm)).await?.driver == Driver::Xen {
        return match domain::find(daemon, vm).await? {
            Some(domain) => domain::destroy(vm, domain).await,
            None => Ok(()),
        };
    }
    let process = daemon.catalogue.read(move |view| view.vm_process(vm)).await?;
    let Some(identity) = process.as_ref().and_then(guest::identity) else { return Ok(()) };
    let tried = format!("kill the QEMU of VM {vm}");
    blocking(tried.clone(), move || match kill_process(&identity) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Problem::failed(tried, "it does not exit: it is waiting in the kernel for storage")),
        Err(error) => Err(Problem::failed(tried, error)),
    })
    .await
}

/// Kills a process, if it exists; returns whether it has exited.
fn kill_process(identity: &Identity) -> io::Result<bool> {
    let Some(process) = Process::find(identity)? else { return Ok(true) };
    process.kill()?;
    process.wait(TO_ANSWER)
}
