//! `vm-shutdown`, `vm-pause`, `vm-resume`: operations on a running machine.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use api::{Code, Power, Problem, Task, TaskState, Vm, VmShutdown};
use repo::catalogue::ADVICE_FOR_SUSPENDED;
use serde_json::Value;
use uuid::Uuid;

use super::guest::Guest;
use super::machine::RunningVm;
use super::{Operation, end, new_task, power, reach, start};
use crate::catalogue;
use crate::daemon::Daemon;
use crate::fault::{self, Planted};
use crate::task::Context;

/// Starts a task that shuts a VM down. With force it aborts other operations on the VM.
pub async fn shutdown(daemon: &Daemon, vm: Uuid, asked: VmShutdown) -> Result<Task, Problem> {
    let power = daemon.catalogue.read(move |view| view.vm(vm)).await?.power;
    let operation = match (power, daemon.vms.begin(vm)) {
        (Power::Halted, _) => return Err(wrong(vm, "is already halted")),
        (Power::Suspended, _) => {
            return Err(wrong(vm, "is suspended, so nothing runs that could be shut down").advise(ADVICE_FOR_SUSPENDED));
        }
        (Power::Paused, Ok(_)) if !asked.force => {
            let advice = "resume it first, or shut it down with force";
            return Err(wrong(vm, "is paused, so its guest cannot react").advise(advice));
        }
        (_, Ok(operation)) => Some(operation),
        (_, Err(_)) if asked.force => None,
        (_, Err(busy)) => return Err(busy),
    };
    let at_work = daemon.clone();
    let work = move |context: Context| async move {
        let operation = match operation {
            Some(operation) => operation,
            None => take(&at_work, vm, &context).await?,
        };
        finish(&at_work, vm, asked, operation, context).await
    };
    daemon.tasks.start(daemon, new_task("vm-shutdown", vm, true), work).await
}

/// Aborts the operation in progress on a VM and waits for it.
async fn take(daemon: &Daemon, vm: Uuid, context: &Context) -> Result<Operation, Problem> {
    let own = context.uuid();
    let tasks = daemon.catalogue.read(|view| view.tasks(true)).await?;
    let others = tasks.iter().filter(|task| task.uuid != own && task.about.iter().any(|about| about.uuid == vm));
    for task in others.filter(|task| task.state != TaskState::Cancelling) {
        if let Err(problem) = daemon.tasks.cancel(task.uuid).await {
            tracing::debug!(task = %task.uuid, "it ends on its own: {problem}");
        }
    }
    context.unless_cancelled(async { Ok(daemon.vms.operations.wait(vm).await) }).await
}

/// Shuts down a VM that is reserved for this operation. With force its power button is not pressed.
pub async fn finish(
    daemon: &Daemon,
    vm: Uuid,
    asked: VmShutdown,
    operation: Operation,
    mut context: Context,
) -> Result<Value, Problem> {
    let power = daemon.catalogue.read(move |view| view.vm(vm)).await?.power;
    if matches!(power, Power::Halted | Power::Suspended) {
        return shown(daemon.catalogue.read(move |view| view.vm(vm)).await?);
    }
    let guest = reach::reach(daemon, vm).await;
    let recorded = asked.clone();
    daemon.catalogue.write(move |tx| tx.set_vm_stopping(vm, &recorded)).await?;
    let ended = async {
        if !asked.force {
            let guest = guest.as_ref().map_err(Problem::clone)?;
            context.step("ask", true).await?;
            fault::point("vm-shutdown", "ask", false);
            let force_after = asked.force_after.map(|seconds| Duration::from_secs(seconds.into()));
            context.unless_cancelled(ask(guest, force_after)).await?;
        }
        context.step("end", false).await?;
        if !asked.force {
            // From here on neither this nor a restarted daemon waits for the guest.
            let forced = VmShutdown { force: true, ..VmShutdown::default() };
            daemon.catalogue.write(move |tx| tx.set_vm_stopping(vm, &forced)).await?;
        }
        fault::point("vm-shutdown", "end", false);
        match guest {
            Ok(guest) => guest.run(RunningVm::end).await,
            // It does not respond, but can be killed.
            Err(_) => reach::kill(daemon, vm).await,
        }
    };
    if let Err(problem) = ended.await {
        let kept = (problem.code != Code::Cancelled).then(|| problem.clone());
        let power = if power == Power::Stopping { power_before(daemon, vm).await } else { power };
        catalogue::record(&daemon.catalogue, move |tx| tx.set_vm_power(vm, power, kept.as_ref())).await?;
        return Err(problem);
    }
    fault::point("vm-shutdown", "end", true);
    let halted = end::clear(daemon, vm, None, &BTreeSet::new(), &context.regardless()).await?;
    drop(operation);
    shown(halted)
}

/// The state of a VM after an aborted shutdown that an earlier daemon had started.
async fn power_before(daemon: &Daemon, vm: Uuid) -> Power {
    let paused = match daemon.vms.guest(vm) {
        Some(guest) => guest.run(RunningVm::is_paused).await.unwrap_or(false),
        None => false,
    };
    if paused { Power::Paused } else { Power::Running }
}

/// Interval of pressing the power button again: firmware and a booting operating system ignore it.
const PRESS_AGAIN: Duration = Duration::from_secs(10);

/// Presses the power button, and waits until the guest has powered off, up to the time limit if there is one.
async fn ask(guest: &Arc<Guest>, force_after: Option<Duration>) -> Result<(), Problem> {
    if let Err(refused) = press(guest).await {
        tracing::warn!(vm = %guest.vm, "{refused}");
        return match force_after {
            Some(_) => Ok(()),
            // QEMU also refuses while it exits.
            None => tokio::time::timeout(power::EXIT, guest.ended()).await.unwrap_or(Err(refused)),
        };
    }
    let Some(patience) = force_after else { return press_until_off(guest).await };
    match tokio::time::timeout(patience, press_until_off(guest)).await {
        Ok(ended) => ended,
        Err(_) => {
            tracing::warn!(vm = %guest.vm, "its guest has not powered off in {} s; stopping it", patience.as_secs());
            Ok(())
        }
    }
}

/// Presses the power button once. A QEMU that has not responded in time may press it later.
async fn press(guest: &Arc<Guest>) -> Result<(), Problem> {
    match guest.run(RunningVm::ask_to_power_off).await {
        Err(late) if late.code == Code::Timeout => {
            tracing::warn!(vm = %guest.vm, "{late}");
            Ok(())
        }
        pressed => pressed,
    }
}

/// Waits until the guest has powered off, and repeatedly presses its power button.
async fn press_until_off(guest: &Arc<Guest>) -> Result<(), Problem> {
    loop {
        if let Ok(ended) = tokio::time::timeout(PRESS_AGAIN, guest.ended()).await {
            return ended;
        }
        if let Err(refused) = press(guest).await {
            // The guest may be powering off since the first press.
            tracing::debug!(vm = %guest.vm, "{refused}");
        }
    }
}

/// Starts a task that pauses a guest, in memory.
pub async fn pause(daemon: &Daemon, vm: Uuid) -> Result<Task, Problem> {
    change(daemon, vm, "vm-pause", Power::Running, Power::Paused, RunningVm::pause).await
}

/// Starts a task that resumes a paused or suspended guest.
pub async fn resume(daemon: &Daemon, vm: Uuid) -> Result<Task, Problem> {
    if daemon.catalogue.read(move |view| view.vm(vm)).await?.power == Power::Suspended {
        return start::start(daemon, vm).await;
    }
    change(daemon, vm, "vm-resume", Power::Paused, Power::Running, RunningVm::resume).await
}

/// An operation on a machine.
type Change = fn(&mut RunningVm) -> Result<(), Problem>;

async fn change(
    daemon: &Daemon,
    vm: Uuid,
    verb: &'static str,
    from: Power,
    to: Power,
    work: Change,
) -> Result<Task, Problem> {
    let operation = daemon.vms.begin(vm)?;
    let power = daemon.catalogue.read(move |view| view.vm(vm)).await?.power;
    let refused = || wrong(vm, if from == Power::Running { "is not running" } else { "is not paused" });
    if !matches!(power, Power::Running | Power::Paused) {
        return Err(refused());
    }
    let guest = reach::reach(daemon, vm).await?;
    // A stale record is no reason for a refusal: the machine decides.
    if power != from && guest.run(RunningVm::power).await? != Some(from) {
        return Err(refused());
    }
    let at_work = daemon.clone();
    let work = move |_: Context| async move {
        if let Err(problem) = guest.run(work).await {
            return Err(match problem.code {
                Code::Timeout if !fault::planted(Planted::LateIsNever) => {
                    power::in_doubt(&at_work, vm, power, &problem).await
                }
                _ => problem,
            });
        }
        let changed = catalogue::record(&at_work.catalogue, move |tx| {
            tx.set_vm_power(vm, to, None)?;
            tx.vm(vm)
        });
        let changed = changed.await?;
        drop(operation);
        shown(changed)
    };
    daemon.tasks.start(daemon, new_task(verb, vm, false), work).await
}

fn wrong(vm: Uuid, what: &str) -> Problem {
    Problem::new(Code::State, format!("VM {vm} {what}"))
}

fn shown(vm: Vm) -> Result<Value, Problem> {
    serde_json::to_value(vm).map_err(|error| Problem::failed("encode a VM", error))
}
