//! `vm-start`: plugs all VBDs of a VM, then starts QEMU; or creates a domain, plugs all VBDs, and resumes it. A
//! failed or cancelled start is rolled back. A suspended VM resumes from its memory, and stays suspended if that
//! fails ([`super::suspend`]).

use std::collections::BTreeSet;
use std::fs::File;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ::vm::qemu::account::Account;
use ::vm::qemu::hardware::Hardware;
use ::vm::qemu::machine::QemuVm;
use ::vm::xen::config::Config as DomainConfig;
use ::vm::xen::machine::XenDomain;
use api::{Boot, Code, Power, Problem, Task, VbdState, Vm};
use repo::catalogue::{ADVICE_FOR_SUSPENDED, VmMemory};
use uuid::Uuid;

use super::directory::{account, make_empty, vm_directory};
use super::guest::Guest;
use super::hardware::Plan;
use super::machine::RunningVm;
use super::network::Bridged;
use super::{Operation, domain, end, group, hardware, machine, memory, new_task, seed};
use crate::account::As;
use crate::background;
use crate::catalogue;
use crate::config::Config;
use crate::daemon::Daemon;
use crate::disk::oom;
use crate::disk::paths::DiskPaths;
use crate::fault;
use crate::plug;
use crate::task::{Context, blocking};

/// The time limit for QEMU to respond, with 255 disks and little processor time; after that it never will.
const TO_ANSWER: Duration = Duration::from_secs(120);

/// The specification of a start.
#[derive(Debug)]
struct StartSpec {
    vm: Uuid,
    plan: Plan,
    /// Its cloud-init seed.
    seed: Option<seed::Image>,
    /// Its network card, if that is in a bridge.
    bridged: Option<Bridged>,
    /// VBDs that are not plugged yet.
    unplugged: Vec<Uuid>,
    /// The memory from which its guest resumes.
    memory: Option<VmMemory>,
}

/// Starts a `vm-start` task.
pub async fn start(daemon: &Daemon, vm: Uuid) -> Result<Task, Problem> {
    let operation = daemon.vms.begin(vm)?;
    let known = daemon.catalogue.read(move |view| view.vm(vm)).await?;
    let config = daemon.config.clone();
    check_boot_files(Bridged::of(&config, &known), known).await?;
    if let Some(memory) = daemon.catalogue.read(move |view| view.vm_memory(vm)).await? {
        memory::must_match(daemon, vm, &memory).await?;
        blocking("open a VM's memory", move || memory::open(&memory).map(drop)).await?;
    }
    let order = daemon.catalogue.write(move |tx| {
        let (known, mut vbds) = tx.begin_vm_start(vm)?;
        let memory = tx.vm_memory(vm)?;
        if let Some(memory) = &memory {
            // Others were not plugged when it was saved.
            vbds.retain(|vbd| memory.disks.iter().any(|disk| disk.vbd == vbd.uuid));
        }
        let plan = hardware::of(&config, &known, &vbds)?;
        let plan = match &memory {
            Some(memory) => hardware::as_saved(vm, plan, memory)?,
            None => plan,
        };
        let seed = tx.seed(vm)?.map(|texts| seed::image(&known, &texts)).transpose()?;
        let bridged = Bridged::of(&config, &known);
        let unplugged = vbds.iter().filter(|vbd| vbd.state != VbdState::Plugged).map(|vbd| vbd.uuid).collect();
        Ok(StartSpec { vm, plan, seed, bridged, unplugged, memory })
    });
    let order = order.await?;
    let at_work = daemon.clone();
    let started = daemon.tasks.start(daemon, new_task("vm-start", vm, true), move |context| async move {
        run(&at_work, order, operation, context).await
    });
    match started.await {
        Ok(task) => Ok(task),
        Err(problem) => {
            record_failed_start(daemon, vm);
            Err(problem)
        }
    }
}

/// Records, after the request was answered, that a start was not even begun.
fn record_failed_start(daemon: &Daemon, vm: Uuid) {
    // No other operation can have started: the VM is `starting` in the catalogue.
    let Ok(operation) = daemon.vms.begin(vm) else { return };
    let daemon = daemon.clone();
    background::spawn(async move {
        let recorded = catalogue::record(&daemon.catalogue, move |tx| match tx.vm(vm)?.power {
            Power::Starting => tx.set_vm_down(vm, None),
            _ => Ok(()),
        });
        if let Err(problem) = recorded.await {
            tracing::error!(%vm, "its state could not be set to halted: {problem}");
        }
        drop(operation);
    });
}

/// Checks first that the files from which it boots and the bridge of its network card exist.
async fn check_boot_files(bridged: Option<Bridged>, vm: Vm) -> Result<(), Problem> {
    let mut files: Vec<(&str, PathBuf)> = Vec::new();
    if let Boot::Kernel { kernel, initrd, .. } = &vm.boot {
        files.push(("boot.kernel", kernel.as_path().to_owned()));
        files.extend(initrd.as_ref().map(|initrd| ("boot.initrd", initrd.as_path().to_owned())));
    }
    let dvd = vm.platform.get("dvd").and_then(|dvd| dvd.strip_prefix("file:"));
    files.extend(dvd.map(|dvd| ("platform.dvd", dvd.into())));
    let name = vm.name;
    let seen = blocking("check a VM's boot files", move || {
        for (field, path) in files {
            if let Err(error) = File::open(&path) {
                let what = format!("cannot start VM '{name}' ({}): cannot read {}: {error}", vm.uuid, path.display());
                return Err(Problem::new(Code::Invalid, what).field(field));
            }
        }
        bridged.map_or(Ok(()), |bridged| bridged.check_bridge().map(drop))
    });
    seen.await
}

async fn run(
    daemon: &Daemon,
    order: StartSpec,
    operation: Operation,
    mut context: Context,
) -> Result<serde_json::Value, Problem> {
    let vm = order.vm;
    let memory = order.memory.clone();
    let started = match begin(daemon, order, &mut context).await {
        Ok(guest) => record(daemon, &guest, memory.as_ref(), &context).await.map(|started| (guest, started)),
        Err(problem) => Err(problem),
    };
    let problem = match started {
        // From here on it runs or is handled by others: its memory is not loaded again.
        Ok((guest, started)) => return continue_from_memory(daemon, &guest, memory, started, operation).await,
        Err(problem) => problem,
    };
    end_machine(daemon, vm).await;
    let why = (problem.code != Code::Cancelled).then(|| problem.clone());
    if let Err(also) = end::clear(daemon, vm, why, &BTreeSet::new(), &context.regardless()).await {
        tracing::error!(%vm, "cleanup after a failed start is left until the daemon restarts: {also}");
    }
    Err(problem)
}

/// Plugs the unplugged VBDs, and starts the guest.
async fn begin(daemon: &Daemon, order: StartSpec, context: &mut Context) -> Result<Arc<Guest>, Problem> {
    let StartSpec { vm, plan, seed, bridged, unplugged, memory } = order;
    match plan {
        Plan::Qemu(hardware) => {
            let runs_as = create_directory(daemon, vm).await?;
            plug(daemon, unplugged, context).await?;
            start_qemu(daemon, vm, Parts { hardware, seed, bridged, memory }, runs_as, context).await
        }
        Plan::Xen(config) => {
            let guest = make_domain(daemon, vm, config, context).await?;
            plug(daemon, unplugged, context).await?;
            context.step("start", true).await?;
            guest.run(RunningVm::resume).await?;
            fault::point("vm-start", "start", true);
            Ok(guest)
        }
    }
}

/// Chooses the user that a QEMU will run as and creates its directory: disks plugged from then on give that user
/// access.
async fn create_directory(daemon: &Daemon, vm: Uuid) -> Result<As, Problem> {
    let (runs_as, directory) = (daemon.vms.users.choose()?, vm_directory(&daemon.config, vm));
    blocking("create the directory of a VM", move || {
        make_empty(&directory, account(&runs_as).as_ref())?;
        Ok(runs_as)
    })
    .await
}

async fn plug(daemon: &Daemon, unplugged: Vec<Uuid>, context: &mut Context) -> Result<(), Problem> {
    context.step("plug", true).await?;
    fault::point("vm-start", "plug", false);
    plug::plug_all(daemon, unplugged, context).await?;
    context.check()?;
    fault::point("vm-start", "plug", true);
    Ok(())
}

/// The data to start a QEMU.
struct Parts {
    hardware: Box<Hardware>,
    seed: Option<seed::Image>,
    bridged: Option<Bridged>,
    memory: Option<VmMemory>,
}

async fn start_qemu(
    daemon: &Daemon,
    vm: Uuid,
    mut parts: Parts,
    runs_as: As,
    context: &mut Context,
) -> Result<Arc<Guest>, Problem> {
    context.step("start", true).await?;
    let accelerator = daemon.vms.accelerator(&daemon.config, account(&runs_as)).await?;
    if parts.memory.is_some() && parts.hardware.accelerator != accelerator {
        let what =
            format!("VM {vm} was suspended under {}, and this host has {accelerator}", parts.hardware.accelerator);
        return Err(Problem::new(Code::State, what).advise(ADVICE_FOR_SUSPENDED));
    }
    parts.hardware.accelerator = accelerator;
    let config = daemon.config.clone();
    let vbds = daemon.catalogue.read(move |view| view.vbds(Some(vm), None)).await?;
    // Not dropped in between: an unrecorded QEMU would be left behind. A cancellation kills one that has not
    // responded.
    let given_up = Arc::new(AtomicBool::new(false));
    let cancelled = given_up.clone();
    let launched = blocking(format!("start VM {vm}"), move || {
        let account = account(&runs_as);
        // Disks that were plugged before the machine existed.
        for (vbd, account) in vbds.iter().flat_map(|vbd| account.as_ref().map(|account| (vbd, account))) {
            DiskPaths::of(&config, vbd.uuid).let_in(vbd.transport, account.uid)?;
        }
        let machine = launch(vm, &config, &parts, account.as_ref(), &|| cancelled.load(Ordering::Relaxed))?;
        if !machine.is_sandboxed() {
            tracing::warn!(%vm, "its QEMU was built without seccomp sandbox support and is confined only by its user");
        }
        if let Ok(pid) = u32::try_from(machine.identity().pid) {
            runs_as.given_to(pid);
            group::enter(vm, pid);
        }
        Ok(machine)
    });
    let mut launched = pin!(launched);
    let launched = tokio::select! {
        launched = &mut launched => launched,
        () = context.cancelled() => {
            given_up.store(true, Ordering::Relaxed);
            // A machine that has responded just now is ended by the rollback.
            launched.await.or_else(|late| context.check().and(Err(late)))
        }
    };
    let machine = launched?;
    u32::try_from(machine.identity().pid).into_iter().for_each(oom::make_normal);
    fault::point("vm-start", "start", true);
    match Guest::of_qemu(vm, machine) {
        Ok(guest) => Ok(Arc::new(guest)),
        Err((mut machine, problem)) => {
            let ended = repo::blocking::start(move || machine.end()).ended().await;
            if !matches!(ended, Ok(Ok(_))) {
                tracing::error!(%vm, "its QEMU could not be stopped; this is retried when the daemon restarts");
            }
            Err(problem)
        }
    }
}

/// Creates a paused domain, which can then be given disks. A domain restored from a file is paused as well: the guest
/// continues in it, with the disks that it gets now.
async fn make_domain(
    daemon: &Daemon,
    vm: Uuid,
    config: DomainConfig,
    context: &mut Context,
) -> Result<Arc<Guest>, Problem> {
    context.step("create", true).await?;
    fault::point("vm-start", "create", false);
    let (xl, directory) = (domain::xl(&daemon.config), vm_directory(&daemon.config, vm));
    // Not dropped in between, as with QEMU.
    let made = blocking(format!("start VM {vm}"), move || {
        make_empty(&directory, None)?;
        let restored = XenDomain::find_restored(&xl, &config.uuid).map_err(machine::by_xen(vm))?;
        let made = restored.map_or_else(|| XenDomain::create_paused(&xl, &config, &directory), Ok);
        made.map_err(machine::by_xen(vm))
    });
    let made = made.await?;
    fault::point("vm-start", "create", true);
    let handle = made.guest().domain.to_string();
    let guest = Arc::new(Guest::of_domain(vm, made));
    daemon.vms.guests().insert(vm, guest.clone());
    daemon.catalogue.write(move |tx| tx.set_vm_run_by(vm, None, Some(&handle))).await?;
    Ok(guest)
}

fn launch(
    vm: Uuid,
    config: &Config,
    parts: &Parts,
    account: Option<&Account>,
    given_up: &dyn Fn() -> bool,
) -> Result<QemuVm, Problem> {
    let directory = vm_directory(config, vm);
    // The remains of a failed start are removed with the rest of the machine.
    parts.bridged.as_ref().map_or(Ok(()), |bridged| bridged.connect(account))?;
    // After the disks were plugged: they belong to this VM from then on.
    let memory = parts.memory.as_ref().map(memory::open).transpose()?;
    let start = || {
        let (program, memory) = (&config.qemu_program, memory.as_ref());
        QemuVm::start_as(account, program, &parts.hardware, &directory, TO_ANSWER, memory, given_up)
            .map_err(|error| machine::qemu_problem(vm, &error))
    };
    match &parts.seed {
        Some(seed) => seed.lend(&directory, start),
        None => start(),
    }
}

/// Records that the machine runs; later plugs of disks find it. The memory from which it was started is forgotten in
/// the same commit: the guest stays paused until that is durable.
async fn record(
    daemon: &Daemon,
    guest: &Arc<Guest>,
    memory: Option<&VmMemory>,
    context: &Context,
) -> Result<Vm, Problem> {
    let vm = guest.vm;
    daemon.vms.guests().insert(vm, guest.clone());
    context.check()?;
    let run_by = guest.process().cloned();
    let monitor = vm_directory(&daemon.config, vm).join("monitor").to_string_lossy().into_owned();
    let resumed = memory.map(|memory| (memory.id, memory.ran));
    fault::point("vm-start", "record", false);
    let recorded = daemon.catalogue.write(move |tx| {
        if let Some((id, ran)) = resumed {
            tx.forget_vm_memory(vm)?;
            tx.set_vm_held(vm, ran.then_some(id))?;
        }
        // A domain is recorded at its creation.
        if let Some(process) = run_by {
            tx.set_vm_run_by(vm, Some(&process), Some(&monitor))?;
        }
        let power = if resumed.is_none_or(|(_, ran)| ran) { Power::Running } else { Power::Paused };
        tx.set_vm_power(vm, power, None)?;
        tx.vm(vm)
    });
    let recorded = recorded.await?;
    fault::point("vm-start", "record", true);
    end::watch(daemon, guest.clone());
    Ok(recorded)
}

/// Resumes a guest that was started from memory, unless it was paused when that was saved.
async fn continue_from_memory(
    daemon: &Daemon,
    guest: &Arc<Guest>,
    memory: Option<VmMemory>,
    started: Vm,
    operation: Operation,
) -> Result<serde_json::Value, Problem> {
    let vm = guest.vm;
    if let Some(memory) = memory {
        let outcome = if memory.ran { guest.run(RunningVm::resume).await } else { Ok(()) };
        fault::point("vm-start", "continue", true);
        let said = outcome.clone().err();
        let recorded = catalogue::record(&daemon.catalogue, move |tx| {
            tx.set_vm_held(vm, None)?;
            match &said {
                Some(problem) => tx.set_vm_power(vm, Power::Paused, Some(problem)),
                None => Ok(()),
            }
        });
        recorded.await?;
        memory::forget_file(Some(memory.file)).await;
        outcome?;
    }
    drop(operation);
    serde_json::to_value(started).map_err(|error| Problem::failed("encode a VM", error))
}

/// Ends the machine of a failed start.
async fn end_machine(daemon: &Daemon, vm: Uuid) {
    let Some(guest) = daemon.vms.guest(vm) else { return };
    match guest.run(RunningVm::end).await {
        Ok(()) => tracing::info!(%vm, "its VM process was stopped"),
        Err(problem) => tracing::error!(%vm, "its VM process stays until the daemon restarts: {problem}"),
    }
}
