//! What a starting daemon finds: machines that kept running without a daemon, and work left half done by its
//! predecessor.

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ::vm::qemu::machine::{MachineError, QemuVm};
use ::vm::qemu::process::{Identity, Process};
use api::{Code, Driver, Power, Problem, Transport, Vbd, VbdState, Vm};
use repo::catalogue::Journalled;
use uuid::Uuid;

use super::end::Ended;
use super::guest::{self, Guest};
use super::machine::{RunningVm, qemu_problem};
use super::stop;
use super::suspend::Suspend;
use super::{domain, end, hardware, memory, network, new_task, strays, vm_directory};
use crate::daemon::Daemon;
use crate::disk::process::DiskProcess;
use crate::task::blocking;
use crate::task::job::Job;

/// The time limit for the response of an adopted machine, which gets at most two requests.
const TO_ANSWER: Duration = Duration::from_secs(5);

/// How often a machine that has not answered is tried again.
const REACH_AGAIN_AFTER: Duration = Duration::from_secs(10);

/// For a machine whose monitor has gone to be gone itself.
const TO_END: Duration = Duration::from_secs(3);

/// Adopts running machines, and completes or rolls back unfinished work. VBDs that were `plugged_since` the recorded
/// state stay plugged if their VM has ended: it used other processes for them, so they were plugged after its end.
pub async fn recover(daemon: &Daemon, plugged_since: &BTreeSet<Uuid>) -> Result<(), Problem> {
    let vms = daemon.catalogue.read(|view| Ok((view.vms()?, view.may_be_older()?)));
    let (vms, older) = vms.await?;
    let runs = |vm: &&Vm| matches!(vm.power, Power::Running | Power::Paused | Power::Stopping);
    let of = |chosen: &dyn Fn(&Vm) -> bool| vms.iter().filter(|vm| chosen(vm)).map(|vm| vm.uuid).collect();
    let run: BTreeSet<Uuid> = of(&|vm| runs(&vm));
    // What a VM was about to become at the time of an older catalogue says nothing about a machine that runs now.
    let starting: BTreeSet<Uuid> = of(&|vm| vm.power == Power::Starting && !older);
    let doubtful: BTreeSet<Uuid> = of(&|vm| matches!(vm.power, Power::Starting | Power::Stopping) && older);
    let all = daemon.config.vm_directories();
    let looked = blocking("find QEMU processes that belong to no VM", move || strays::look(&all, &run, &starting));
    let mut left = BTreeSet::new();
    for (vm, pids) in looked.await? {
        if (doubtful.contains(&vm) || !is_recorded(daemon, vm, &pids).await?) && !take_in(daemon, vm, &pids).await {
            left.insert(vm);
        }
    }
    for vm in vms.iter().filter(|vm| vm.driver == Driver::Xen && (!runs(vm) || doubtful.contains(&vm.uuid))) {
        if !stray_domain(daemon, vm, older).await {
            left.insert(vm.uuid);
        }
    }
    let vms = daemon.catalogue.read(|view| view.vms()).await?;
    // The disks of a machine that is left alone are, too.
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

/// Whether one of these processes is the one that the catalogue has for a VM.
async fn is_recorded(daemon: &Daemon, vm: Uuid, pids: &[i32]) -> Result<bool, Problem> {
    let recorded = daemon.catalogue.read(move |view| view.vm_process(vm)).await?;
    let known = recorded.as_ref().and_then(guest::identity).filter(|known| pids.contains(&known.pid));
    Ok(known.is_some_and(|known| matches!(Process::find(&known), Ok(Some(_)))))
}

/// A QEMU runs for a VM that is halted in the catalogue, had another one, or is not in it: that of a VM that is known
/// is the VM's, any other is left alone. Returns whether it was taken in.
async fn take_in(daemon: &Daemon, vm: Uuid, pids: &[i32]) -> bool {
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
        // It has gone on from that already.
        tx.forget_vm_memory(vm)?;
        tx.set_vm_run_by(vm, Some(&process), Some(&monitor))?;
        tx.set_vm_power(vm, Power::Running, None)
    });
    recorded.await
}

/// The domain of a VM that is not running according to the catalogue, if there is one: if it was being started, no
/// caller was told that it runs, and it is destroyed; otherwise, and if the catalogue is `older` than it may be, it
/// belongs to the VM. Returns whether that is settled.
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

/// Adopts the machine of a VM, or does the rest of what was under way with it. VBDs in `keep` stay plugged if it has
/// ended, and if the catalogue is `older` also if it had not been started yet or was being stopped.
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
            // Continues that shutdown. Its guest has the whole time again: a clock may have been set in between.
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

/// VBDs that stay plugged although what was under way with their VM is completed.
fn keep_of(older: bool, keep: &BTreeSet<Uuid>) -> BTreeSet<Uuid> {
    if older { keep.clone() } else { BTreeSet::new() }
}

/// Whether the journal has a job that saves the memory of a VM, and is not undone.
async fn is_being_suspended(daemon: &Daemon, vm: Uuid) -> Result<bool, Problem> {
    let is_it = move |entry: Journalled| {
        entry.task.verb == Suspend::VERB && entry.task.about.iter().any(|about| about.uuid == vm)
    };
    daemon.catalogue.read(move |view| Ok(view.journal()?.into_iter().any(is_it))).await
}

/// Finds the machine of a VM again; none if it has ended.
pub async fn adopt(daemon: &Daemon, vm: Uuid) -> Result<Option<Arc<Guest>>, Problem> {
    let driver = daemon.catalogue.read(move |view| view.vm(vm)).await?.driver;
    let found = match driver {
        Driver::Qemu => find_qemu(daemon, vm).await?,
        Driver::Xen => domain::find(daemon, vm).await?.map(|domain| Guest::of_domain(vm, domain)),
    };
    let Some(guest) = found.map(Arc::new) else { return Ok(None) };
    let mut paused = guest.tell(RunningVm::is_paused).await?;
    // A guest whose memory is saved stays held: the job that does so decides what becomes of it.
    if paused && !is_being_suspended(daemon, vm).await? {
        // The previous daemon may have been saving its memory.
        guest.tell(RunningVm::end_save).await?;
        paused = !end_hold(daemon, &guest).await?;
    }
    daemon.vms.guests().insert(vm, guest.clone());
    end::watch(daemon, guest.clone());
    record(daemon, vm, paused).await?;
    tracing::info!(%vm, paused, "reattached");
    Ok(Some(guest))
}

/// Resumes a guest that the previous daemon had paused for a moment ([`super::moment`]); whether it had. What an older
/// catalogue says of that is long over.
async fn end_hold(daemon: &Daemon, guest: &Arc<Guest>) -> Result<bool, Problem> {
    let vm = guest.vm;
    let read = daemon.catalogue.read(move |view| Ok((view.vm_held(vm)?, view.may_be_older()?)));
    let (Some(held_for), older) = read.await? else { return Ok(false) };
    if !older {
        tracing::info!(%vm, %held_for, "resuming its guest, which was paused for a moment");
        guest.tell(RunningVm::resume).await?;
    }
    daemon.catalogue.write(move |tx| tx.set_vm_held(vm, None)).await?;
    Ok(!older)
}

/// Finds the QEMU of a VM again; none if it has ended.
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
            let_go_of_unplugged(vm, &mut machine, &vbds);
        }
        Ok(Some(machine))
    });
    let Some(machine) = adopted.await? else { return Ok(None) };
    Guest::of_qemu(vm, machine).map(Some).map_err(|(_, problem)| problem)
}

/// From now on the end of a machine is seen that could not be spoken to, and it is spoken to as soon as it answers.
async fn watch_unreached(daemon: &Daemon, vm: Uuid) -> Result<(), Problem> {
    let process = daemon.catalogue.read(move |view| view.vm_process(vm)).await?;
    let Some(mut process) = process.map(|known| DiskProcess::find(known.process)).transpose()?.flatten() else {
        return Ok(());
    };
    let daemon = daemon.clone();
    tokio::spawn(async move {
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

/// Tries to reach a machine that has not answered, unless an operation with its VM does so itself.
async fn reach_again(daemon: &Daemon, vm: Uuid) {
    let Ok(_operation) = daemon.vms.begin(vm) else { return };
    if daemon.vms.guest(vm).is_none() {
        // Its end is seen by who waits for that.
        if let Err(problem) = adopt(daemon, vm).await {
            tracing::debug!(%vm, "it is still unreachable: {problem}");
        }
    }
}

/// A process that was killed lets go of its monitor first, and of its memory after; it is there until then.
fn is_ending(identity: &Identity) -> bool {
    match Process::find(identity) {
        Ok(Some(process)) => matches!(process.wait(TO_END), Ok(true)),
        Ok(None) => true,
        Err(_) => false,
    }
}

/// The guest may have been paused or resumed by somebody else in the meantime.
async fn record(daemon: &Daemon, vm: Uuid, paused: bool) -> Result<(), Problem> {
    let recorded = daemon.catalogue.write(move |tx| match tx.vm(vm)?.power {
        Power::Stopping | Power::Starting | Power::Halted | Power::Suspended => Ok(()),
        Power::Running | Power::Paused if paused => tx.set_vm_power(vm, Power::Paused, None),
        Power::Running | Power::Paused => tx.set_vm_power(vm, Power::Running, None),
    });
    recorded.await
}

/// A daemon may have ended between the plug of a device and its record; its disk is not served any more. `vbds` are
/// those of all VMs, and of none.
fn let_go_of_unplugged(vm: Uuid, machine: &mut QemuVm, vbds: &[Vbd]) {
    let plugged = |vbd: &&Vbd| vbd.state != VbdState::Unplugged;
    // Of a disk that an older catalogue did not have, only the process was found, and not which VM uses it.
    if vbds.iter().filter(plugged).any(|vbd| vbd.vm.is_none() && vbd.transport == Transport::VhostUser) {
        return;
    }
    let has = vbds.iter().filter(plugged).filter(|vbd| vbd.vm == Some(vm));
    let has: Vec<_> = has.filter_map(|vbd| hardware::position_of(vbd).ok()).collect();
    let asked = machine.disks().and_then(|disks| {
        let stray = disks.into_iter().filter(|position| !has.contains(position));
        stray.map(|position| machine.begin_unplug(position)).collect::<Result<Vec<()>, _>>()
    });
    if let Err(error) = asked {
        tracing::warn!("{}", qemu_problem(vm, &error));
    }
}

/// The machine of a VM that runs. One that could not be reached before is tried again.
pub async fn reach(daemon: &Daemon, vm: Uuid) -> Result<Arc<Guest>, Problem> {
    if let Some(guest) = daemon.vms.guest(vm) {
        return Ok(guest);
    }
    let found = adopt(daemon, vm).await.map_err(|problem| {
        problem.advise("check that no other client holds its monitor, or shut the VM down with force")
    })?;
    found.ok_or_else(|| Problem::new(Code::State, format!("VM {vm} has ended")))
}

/// Ends a machine that is not to be spoken to.
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

/// Kills a process, if it is there; whether it has ended.
fn kill_process(identity: &Identity) -> io::Result<bool> {
    let Some(process) = Process::find(identity)? else { return Ok(true) };
    process.kill()?;
    process.wait(TO_ANSWER)
}
