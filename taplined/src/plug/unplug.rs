//! Unplugging of VBDs.

use std::time::Duration;

use api::{About, Code, ObjectKind, Power, Problem, Task, Transport, Vbd, VbdState};
use control::ask;
use repo::View;
use repo::catalogue::NewTask;
use rustix::process::Signal;
use uuid::Uuid;

use super::cleanup::clear_and_unplug;
use super::steps::Steps;
use super::supervise;
use crate::catalogue;
use crate::daemon::Daemon;
use crate::disk::paths::DiskPaths;
use crate::disk::process::{DiskProcess, Ended};
use crate::task::Context;
use crate::vm;

/// Interval of polling a disk while an unplug waits for its guest to release it.
const LOOK_AFTER: Duration = Duration::from_millis(200);

/// How long an unplug by force waits for tasks that use the disk before it stops the disk regardless.
const TO_GIVE_WAY: Duration = Duration::from_secs(10);

/// Interval of checking that a disk being stopped by force still responds.
const LOOK_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// How long a disk may take to report its clients.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a task that unplugs a VBD. It cancels a plug in progress.
pub async fn unplug(daemon: &Daemon, vbd: Uuid, force: bool) -> Result<Task, Problem> {
    let now = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
    // Unplugging a VBD whose plug failed clears the problem.
    if now.state == VbdState::Unplugged && now.problem.is_none() {
        return Err(Problem::new(Code::State, format!("VBD {vbd} is not plugged")));
    }
    let served = matches!(now.state, VbdState::Plugged | VbdState::Restarting);
    if served {
        daemon.catalogue.read(move |view| must_not_be_awaited(view, vbd)).await?;
    }
    let about = vec![About { kind: ObjectKind::Vbd, uuid: vbd }];
    let new = NewTask { uuid: Uuid::new_v4(), verb: "vbd-unplug", about, cancellable: true, intent: None };
    let at_work = daemon.clone();
    let work = move |context: Context| async move {
        let vbd = run(&at_work, vbd, force, &context, true).await?;
        serde_json::to_value(vbd).map_err(|error| Problem::failed("encode a VBD", error))
    };
    daemon.tasks.start(daemon, new, work).await
}

/// Unplugs a VBD. `alone`: the task is about this VBD only.
pub async fn run(daemon: &Daemon, vbd: Uuid, force: bool, context: &Context, alone: bool) -> Result<Vbd, Problem> {
    let begun = daemon.plugs.operations.begin_unplug(vbd, force);
    let operation = context.unless_cancelled(begun).await?;
    let now = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
    let mut steps = Steps::of("vbd-unplug", &daemon.config, alone.then(|| context.clone()));
    let begun = matches!(now.state, VbdState::Unplugging | VbdState::Plugging);
    match now.state {
        // Its plug has just been aborted.
        VbdState::Unplugged => {
            return catalogue::record(&daemon.catalogue, move |tx| {
                tx.set_vbd_state(vbd, VbdState::Unplugged, None)?;
                tx.vbd(vbd)
            })
            .await;
        }
        VbdState::Plugged if !force => {
            let gone = async {
                vm::detach(daemon, &now).await?;
                match now.transport {
                    // The nodes have shown it, and its process may have exited with the device.
                    Transport::Blkif => Ok(()),
                    Transport::VhostUser | Transport::Nbd => guest_gone(daemon, &now).await,
                }
            };
            // A guest cannot release a disk while its writes wait for space: the step's name tells the user.
            let wait = steps.step(if now.waits_for_space { "wait for space" } else { "wait" }, gone);
            if let Err(problem) = context.unless_cancelled(operation.unless_cancelled(wait)).await {
                return Err(still_there(daemon, vbd, problem).await);
            }
        }
        VbdState::Plugged | VbdState::Restarting => vm::request_release(daemon, &now).await,
        VbdState::Plugging | VbdState::Unplugging => {}
    }
    let turn = async { Ok(daemon.plugs.workers.turn(super::plug_spec::to_unplug(&now)).await) };
    let _turn = context.unless_cancelled(operation.unless_cancelled(turn)).await?;
    steps.last("stop").await?;
    let problem = match stop(daemon, vbd, force, begun, steps.limit()).await? {
        Ended::Badly(how) => Some(ended_badly(daemon, vbd, &how)),
        Ended::Well | Ended::Unknown => None,
    };
    steps.insist("clear").await;
    let unplugged = clear_and_unplug(daemon, vbd, problem.clone()).await?;
    match problem {
        // With force it is done, at whatever cost: the VBD's problem tells.
        Some(problem) if !force => Err(problem),
        _ => Ok(unplugged),
    }
}

/// Refuses to take a disk away from a VM that is being started: its QEMU is blocked waiting for the disk.
fn must_not_be_awaited(view: &View<'_>, vbd: Uuid) -> Result<(), Problem> {
    let Some(vm) = view.vbd(vbd)?.vm else { return Ok(()) };
    if view.vm(vm)?.power != Power::Starting {
        return Ok(());
    }
    let what = format!("VBD {vbd} was not unplugged: its VM {vm} is being started with it");
    Err(Problem::new(Code::Busy, what)
        .advise("wait for that task or cancel it (see 'tapline task list'), which unplugs the disk"))
}

/// Waits until no client is connected to a disk.
async fn guest_gone(daemon: &Daemon, vbd: &Vbd) -> Result<(), Problem> {
    loop {
        if daemon.disks.ask(vbd.uuid, ask::Layers {}, REPORT_TIMEOUT).await?.peers == Some(0) {
            return Ok(());
        }
        tokio::time::sleep(LOOK_AFTER).await;
    }
}

async fn still_there(daemon: &Daemon, vbd: Uuid, problem: Problem) -> Problem {
    if problem.code != Code::Timeout {
        return problem;
    }
    let full = daemon.catalogue.read(move |view| view.vbd(vbd)).await.is_ok_and(|vbd| vbd.waits_for_space);
    if full {
        let what = format!("VBD {vbd} was not unplugged: its guest is waiting for space in the repository");
        let advice = "make space (tapline sr list shows how much there is), then unplug it; or unplug it with force: \
                      writes that are waiting are then lost";
        return Problem::new(Code::NoSpace, what).advise(advice);
    }
    Problem::new(Code::InUse, format!("VBD {vbd} was not unplugged: its guest or a client is still connected"))
        .advise("detach it inside the guest, or unplug it with force: unflushed data may then be lost")
}

/// Records that it is being unplugged, after which no task may start to use it. Running tasks come to their end
/// first.
async fn begin(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    loop {
        let recorded = daemon.catalogue.write(move |tx| {
            let vdi = tx.vbd(vbd)?.vdi;
            if tx.at_work(vdi)?.is_some() {
                return Ok(Some(vdi));
            }
            must_not_be_awaited(tx, vbd)?;
            tx.set_vbd_state(vbd, VbdState::Unplugging, None).map(|()| None)
        });
        match recorded.await? {
            Some(vdi) => daemon.tasks.leave(vdi).await?,
            None => return Ok(()),
        }
    }
}

/// Like [`begin`], within a time limit; returns whether it was recorded.
async fn begin_within(daemon: &Daemon, vbd: Uuid, limit: Duration) -> Result<bool, Problem> {
    match tokio::time::timeout(limit, begin(daemon, vbd)).await {
        Ok(recorded) => recorded.map(|()| true),
        // A commit that was sent will be made: this one comes after it.
        Err(_) => daemon.catalogue.write(move |tx| Ok(tx.vbd(vbd)?.state == VbdState::Unplugging)).await,
    }
}

/// Stops the process, which flushes first; returns its exit status, if there was a process.
async fn stop(daemon: &Daemon, vbd: Uuid, force: bool, begun: bool, limit: Duration) -> Result<Ended, Problem> {
    if !begun {
        let patience = if force { limit.min(TO_GIVE_WAY) } else { limit };
        match begin_within(daemon, vbd, patience).await? {
            true => {}
            false if force => {
                // Tasks that use an unresponsive process wait for it and end when it does.
                if let Some(mut process) = daemon.plugs.release(vbd).await {
                    tracing::warn!(%vbd, "killing a disk process because a task does not end while it lives");
                    process.kill().await?;
                }
                let recorded = begin_within(daemon, vbd, limit).await;
                if let Err(problem) = recorded.and_then(|begun| if begun { Ok(()) } else { Err(at_work(vbd, limit)) }) {
                    // It is still plugged, and is served again.
                    supervise::begin(daemon, vbd, None);
                    return Err(problem);
                }
            }
            false => return Err(at_work(vbd, limit)),
        }
    }
    let Some(mut process) = process_of(daemon, vbd).await? else { return Ok(Ended::Unknown) };
    process.signal(Signal::TERM)?;
    let ended = async {
        tokio::select! {
            ended = process.ended() => Some(ended),
            // A process that does not even receive the request to stop is not waited for.
            () = silent(daemon, vbd), if force => None,
        }
    };
    match tokio::time::timeout(limit, ended).await {
        Ok(Some(ended)) => ended,
        Ok(None) | Err(_) if force => {
            process.kill().await?;
            process.ended().await
        }
        Ok(None) | Err(_) => {
            supervise::end(daemon, vbd, process);
            let what = format!("the process of VBD {vbd} has not exited in {} s", limit.as_secs());
            let advice = "check the storage: the process exits once it responds; or unplug with force";
            Err(Problem::new(Code::Timeout, what).advise(advice))
        }
    }
}

/// The process of a VBD, no longer supervised. If it was not supervised, the recorded one: a VBD must never be
/// unplugged in the catalogue while its process runs.
async fn process_of(daemon: &Daemon, vbd: Uuid) -> Result<Option<DiskProcess>, Problem> {
    if let Some(process) = daemon.plugs.release(vbd).await {
        return Ok(Some(process));
    }
    let recorded = daemon.catalogue.read(move |view| view.vbd_process(vbd)).await?;
    Ok(recorded.map(DiskProcess::find).transpose()?.flatten())
}

/// Waits until a disk accepts requests but does not respond. A stopping disk accepts none, however long its last flush
/// takes.
async fn silent(daemon: &Daemon, vbd: Uuid) {
    loop {
        tokio::time::sleep(LOOK_AGAIN_AFTER).await;
        if daemon.disks.is_silent(vbd, REPORT_TIMEOUT).await {
            return;
        }
    }
}

fn at_work(vbd: Uuid, limit: Duration) -> Problem {
    let what = format!("a task using VBD {vbd} has not ended in {} s", limit.as_secs());
    Problem::new(Code::Busy, what)
        .advise("wait for the task or cancel it (see 'tapline task list'), or unplug with force")
}

fn ended_badly(daemon: &Daemon, vbd: Uuid, how: &str) -> Problem {
    let place = DiskPaths::of(&daemon.config, vbd);
    let what = format!("VBD {vbd} is unplugged, but its process did not exit cleanly ({how})");
    let advice = format!("see its log, {}, and check its VDI before using it again", place.log().display());
    Problem::new(Code::Failed, what).advise(advice)
}
