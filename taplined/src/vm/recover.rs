//! Recovery when the daemon starts: machines that kept running without a daemon, and the unfinished work of its
//! predecessor.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::vm::qemu::process::Process;
use api::{Code, Driver, Power, Problem, Vm};
use uuid::Uuid;

use super::end::Ended;
use super::reach::{adopt, kill};
use super::{domain, end, guest, is_being_suspended, memory, network, new_task, stop, strays, vm_directory};
use crate::background;
use crate::daemon::Daemon;
use crate::disk::process::DiskProcess;
use crate::task::blocking;

/// Interval of contacting a machine that does not respond.
const REACH_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// Adopts running machines, and completes or rolls back unfinished work. VBDs that were `plugged_since` the recorded
/// state stay plugged if their VM has ended: it used other processes for them, so they were plugged after its end.
pub async fn recover(daemon: &Daemon, plugged_since: &BTreeSet<Uuid>) -> Result<(), Problem> {
    let vms = daemon.catalogue.read(|view| Ok((view.vms()?, view.may_be_older()?)));
    let (vms, older) = vms.await?;
    let runs = |vm: &&Vm| matches!(vm.power, Power::Running | Power::Paused | Power::Stopping);
    let of = |chosen: &dyn Fn(&Vm) -> bool| vms.iter().filter(|vm| chosen(vm)).map(|vm| vm.uuid).collect();
    let run: BTreeSet<Uuid> = of(&|vm| runs(&vm));
    // An older catalogue's transitional states say nothing about a machine that runs now.
    let starting: BTreeSet<Uuid> = of(&|vm| vm.power == Power::Starting && !older);
    let doubtful: BTreeSet<Uuid> = of(&|vm| matches!(vm.power, Power::Starting | Power::Stopping) && older);
    let all = daemon.config.vm_directories();
    let looked = blocking("find QEMU processes that belong to no VM", move || strays::look(&all, &run, &starting));
    let mut left = BTreeSet::new();
    for (vm, pids) in looked.await? {
        if (doubtful.contains(&vm) || !is_recorded(daemon, vm, &pids).await?) && !adopt_stray(daemon, vm, &pids).await {
            left.insert(vm);
        }
    }
    for vm in vms.iter().filter(|vm| vm.driver == Driver::Xen && (!runs(vm) || doubtful.contains(&vm.uuid))) {
        if !stray_domain(daemon, vm, older).await {
            left.insert(vm.uuid);
        }
    }
    let vms = daemon.catalogue.read(|view| view.vms()).await?;
    // Machines that are left alone keep their disks.
    for vm in vms.into_iter().filter(|vm| has_machine(vm) && !left.contains(&vm.uuid)) {
        one(daemon, vm, plugged_since, older).await?;
    }
    daemon.vms.found.store(true, Ordering::Relaxed);
    if !older {
        memory::sweep(daemon).await?;
    }
    sweep(daemon, left).await
}

/// Whether a VM has a machine, or did when the catalogue was last written.
fn has_machine(vm: &Vm) -> bool {
    !matches!(vm.power, Power::Halted | Power::Suspended)
}

/// Removes the tap interfaces of machines that have ended. Those that are ending remove theirs by themselves.
async fn sweep(daemon: &Daemon, mut run: BTreeSet<Uuid>) -> Result<(), Problem> {
    let vms = daemon.catalogue.read(|view| view.vms()).await?;
    run.extend(vms.iter().filter(|vm| has_machine(vm)).map(|vm| vm.uuid));
    let (config, known) = (daemon.config.clone(), vms.iter().map(|vm| vm.uuid).collect());
    let swept = move || {
        network::sweep(&config, &known, &run);
        Ok(())
    };
    blocking("remove tap interfaces of earlier machines", swept).await
}

/// Whether one of these processes is the one recorded for a VM.
async fn is_recorded(daemon: &Daemon, vm: Uuid, pids: &[i32]) -> Result<bool, Problem> {
    let recorded = daemon.catalogue.read(move |view| view.vm_process(vm)).await?;
    let known = recorded.as_ref().and_then(guest::identity).filter(|known| pids.contains(&known.pid));
    Ok(known.is_some_and(|known| matches!(Process::find(&known), Ok(Some(_)))))
}

/// Adopts a running QEMU of a VM that is halted in the catalogue or had another one; leaves it alone if the VM is
/// unknown. Returns whether it was adopted.
async fn adopt_stray(daemon: &Daemon, vm: Uuid, pids: &[i32]) -> bool {
    let recorded = record_run(daemon, vm, pids).await;
    match &recorded {
        Ok(()) => tracing::warn!(%vm, ?pids, "adopting the QEMU of a VM that the catalogue did not have as running"),
        Err(why) => tracing::error!(
            %vm, ?pids,
            "not touching a running QEMU of a VM that is not running by the catalogue: {why}; if it is not in use, \
             kill it"
        ),
    }
    recorded.is_ok()
}

async fn record_run(daemon: &Daemon, vm: Uuid, pids: &[i32]) -> Result<(), Problem> {
    let [pid] = *pids else { return Err(Problem::new(Code::State, "there is more than one")) };
    let tried = format!("adopt the QEMU of VM {vm}");
    let found = Process::with_pid(pid).map_err(|error| Problem::failed(tried, error))?;
    let process = guest::process(vm, found.identity())?;
    let monitor = vm_directory(&daemon.config, vm).join("monitor").to_string_lossy().into_owned();
    let recorded = daemon.catalogue.write(move |tx| {
        // The guest has already continued from it.
        tx.forget_vm_memory(vm)?;
        tx.set_vm_run_by(vm, Some(&process), Some(&monitor))?;
        tx.set_vm_power(vm, Power::Running, None)
    });
    recorded.await
}

/// Handles the domain of a VM that is not running according to the catalogue, if there is one: if it was being
/// started, no caller was informed that it runs, and it is destroyed; otherwise, or if the catalogue may be `older`,
/// it belongs to the VM. Returns whether that succeeded.
async fn stray_domain(daemon: &Daemon, known: &Vm, older: bool) -> bool {
    let vm = known.uuid;
    let done = match (domain::find(daemon, vm).await, known.power) {
        (Ok(None), _) => return true,
        (Ok(Some(domain)), Power::Starting) if !older => domain::destroy(vm, domain).await.map(|()| "destroying it"),
        (Ok(Some(domain)), _) => {
            let handle = domain.guest().domain.to_string();
            let recorded = daemon.catalogue.write(move |tx| {
                tx.set_vm_run_by(vm, None, Some(&handle))?;
                tx.set_vm_power(vm, Power::Running, None)
            });
            recorded.await.map(|()| "adopting it")
        }
        (Err(problem), _) => Err(problem),
    };
    match &done {
        Ok(what) => tracing::warn!(%vm, "there is a domain for a VM that is not running by the catalogue: {what}"),
        Err(problem) => tracing::error!(%vm, "cannot tell whether it has a stale domain: {problem}"),
    }
    done.is_ok()
}

/// Adopts the machine of a VM, or completes its unfinished operation. VBDs in `keep` stay plugged if it has ended
/// and, if the catalogue is `older`, also if it had not been started yet or was being stopped.
async fn one(daemon: &Daemon, vm: Vm, keep: &BTreeSet<Uuid>, older: bool) -> Result<(), Problem> {
    let uuid = vm.uuid;
    let saved = daemon.catalogue.read(move |view| view.vm_memory(uuid)).await?.is_some();
    if is_being_suspended(daemon, uuid).await? {
        // The job finds the machine itself: its guest must not run in the meantime.
        return Ok(());
    }
    if saved && vm.power == Power::Stopping {
        let operation = daemon.vms.begin(uuid)?;
        kill(daemon, uuid).await?;
        end::halt(daemon, uuid, Ended { keep: keep_of(older, keep), ..Ended::default() }, operation).await;
        return Ok(());
    }
    let operation = daemon.vms.begin(uuid)?;
    let keep_if_older = || keep_of(older, keep);
    if vm.power == Power::Starting {
        let what = format!("VM {uuid} was not started: the daemon stopped during the start");
        let why = Problem::new(Code::Failed, what).advise("start it again");
        end::halt(daemon, uuid, Ended { keep: keep_if_older(), ..Ended::because(why) }, operation).await;
        return Ok(());
    }
    match (adopt(daemon, uuid).await, vm.power) {
        (Ok(None), Power::Stopping) => {
            let ended = Ended { why: vm.problem, keep: keep_if_older(), ..Ended::default() };
            end::halt(daemon, uuid, ended, operation).await;
        }
        (Ok(None), _) => {
            let what =
                format!("VM {uuid} is halted: it ended while the daemon was not running; the exit status is unknown");
            let why = Problem::new(Code::Failed, what).advise("start it again");
            end::halt(daemon, uuid, Ended { keep: keep.clone(), ..Ended::because(why) }, operation).await;
        }
        (_, Power::Stopping) => {
            // Continues that shutdown. Its guest gets the full time again: a clock may have been set in between.
            let asked = daemon.catalogue.read(move |view| view.vm_shutdown(uuid)).await?.unwrap_or_default();
            let at_work = daemon.clone();
            let work = move |context| async move { stop::finish(&at_work, uuid, asked, operation, context).await };
            daemon.tasks.start(daemon, new_task("vm-shutdown", uuid, true), work).await?;
        }
        (Ok(Some(_)), _) => {}
        (Err(problem), _) => {
            tracing::error!(vm = %uuid, "it is running but unreachable: {problem}");
            daemon.catalogue.write(move |tx| tx.set_vm_power(uuid, vm.power, Some(&problem))).await?;
            watch_unreached(daemon, uuid).await?;
        }
    }
    Ok(())
}

/// The VBDs that stay plugged although the operation in progress on their VM is completed.
fn keep_of(older: bool, keep: &BTreeSet<Uuid>) -> BTreeSet<Uuid> {
    if older { keep.clone() } else { BTreeSet::new() }
}

/// Monitors the end of an unreachable machine, and contacts it again periodically.
async fn watch_unreached(daemon: &Daemon, vm: Uuid) -> Result<(), Problem> {
    let process = daemon.catalogue.read(move |view| view.vm_process(vm)).await?;
    let Some(mut process) = process.map(|known| DiskProcess::find(known.process)).transpose()?.flatten() else {
        return Ok(());
    };
    let daemon = daemon.clone();
    background::spawn(async move {
        let ended = loop {
            match tokio::time::timeout(REACH_AGAIN_AFTER, process.ended()).await {
                Ok(ended) => break ended,
                Err(_) if daemon.vms.guest(vm).is_some() => return,
                Err(_) => reach_again(&daemon, vm).await,
            }
        };
        if let Err(problem) = ended {
            tracing::error!(%vm, "{problem}");
            return;
        }
        let operation = daemon.vms.operations.wait(vm).await;
        let now = daemon.catalogue.read(move |view| view.vm(vm)).await;
        // It may have been reached since, or ended.
        let left = now.is_ok_and(|now| now.pid == Some(process.identity().pid)) && daemon.vms.guest(vm).is_none();
        if left {
            let what = format!("VM {vm} is halted: its QEMU exited; the exit status is unknown");
            let why = Problem::new(Code::Failed, what).advise("start it again");
            end::halt(&daemon, vm, Ended::because(why), operation).await;
        }
    });
    Ok(())
}

/// Contacts an unresponsive machine, unless an operation in progress on its VM does so itself.
async fn reach_again(daemon: &Daemon, vm: Uuid) {
    let Ok(_operation) = daemon.vms.begin(vm) else { return };
    if daemon.vms.guest(vm).is_none() {
        // Its end is detected by the caller.
        if let Err(problem) = adopt(daemon, vm).await {
            tracing::debug!(%vm, "it is still unreachable: {problem}");
        }
    }
}
