//! Plugging of VBDs.

use api::{About, Code, ObjectKind, Problem, Task, Vbd, VbdState};
use repo::catalogue::NewTask;
use uuid::Uuid;

use super::cleanup::{clear, forget};
use super::operation::{Kind, Operation};
use super::plug_spec::PlugSpec;
use super::start::{Incarnation, serve};
use super::steps::Steps;
use super::supervise;
use super::xen_disk::XenDisk;
use crate::background;
use crate::catalogue;
use crate::daemon::Daemon;
use crate::reconcile;
use crate::sr;
use crate::task::Context;
use crate::vm;

/// A plug that has taken its lease and has not started yet.
#[derive(Debug)]
pub struct Begun {
    /// The VBD.
    pub vbd: Uuid,
    operation: Operation,
    /// Its process had died: a running guest still has the device.
    again: bool,
}

/// The reason for a plug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlugReason {
    /// A request for this VBD; refused while its VM is being started or stopped.
    Request,
    /// The start of its VM.
    VmStart,
}

/// Starts a task that plugs a VBD.
pub async fn plug(daemon: &Daemon, vbd: Uuid) -> Result<Task, Problem> {
    let begun = begin(daemon, vbd, PlugReason::Request).await?;
    let about = vec![About { kind: ObjectKind::Vbd, uuid: vbd }];
    let new = NewTask { uuid: Uuid::new_v4(), verb: "vbd-plug", about, cancellable: true, intent: None };
    let at_work = daemon.clone();
    let started = daemon.tasks.start(daemon, new, move |context| async move {
        let vbd = finish(&at_work, begun, &context, true).await?;
        serde_json::to_value(vbd).map_err(|error| Problem::failed("encode a VBD", error))
    });
    match started.await {
        Ok(task) => Ok(task),
        Err(problem) => {
            record_failed_plug_later(daemon, vbd, problem.clone());
            Err(problem)
        }
    }
}

/// Takes the lease, or returns why that is impossible.
pub async fn begin(daemon: &Daemon, vbd: Uuid, reason: PlugReason) -> Result<Begun, Problem> {
    let operation = daemon.plugs.operations.begin(vbd, Kind::Plug)?;
    let now = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
    let again = now.state == VbdState::Restarting;
    if again || now.state == VbdState::Unplugged {
        // An explicit plug replaces the automatic retry. An unplugged VBD may still be in cleanup.
        if let Some(process) = daemon.plugs.release(vbd).await {
            supervise::begin(daemon, vbd, Some(process));
        }
    }
    let begun = || {
        daemon.catalogue.write(move |tx| {
            let now = tx.vbd(vbd)?;
            if reason == PlugReason::Request {
                tx.check_vm_settled(&now)?;
            }
            XenDisk::of(tx, &now)?;
            tx.begin_plug(vbd)
        })
    };
    if let Err(problem) = begun().await {
        if problem.code != Code::InUse {
            return Err(of_file(daemon, now.vdi, problem).await);
        }
        // Cleanup tasks are interrupted.
        let _want = daemon.tasks.give_way(now.vdi).await?;
        begun().await?;
    }
    Ok(Begun { vbd, operation, again })
}

/// Completes the plug, and rolls it back if it fails or is cancelled. `alone`: the task is about this VBD only.
pub async fn finish(daemon: &Daemon, begun: Begun, context: &Context, alone: bool) -> Result<Vbd, Problem> {
    let vbd = begun.vbd;
    let mut process = None;
    let mut steps = Steps::of("vbd-plug", &daemon.config, alone.then(|| context.clone()));
    let work = async {
        let order = PlugSpec::of(daemon, vbd).await?;
        // Before anything is served: a guest that has not released the previous disk would connect to the new one.
        if !begun.again {
            vm::expect_room(daemon, &order.vbd).await?;
        }
        let _turn = daemon.plugs.workers.turn(order.request()).await;
        match serve(daemon, &order, Incarnation::First, &mut steps, &mut process).await {
            // The lock of a file with two names: the disk process knows only one of them.
            Err(problem) if problem.code == Code::InUse => Err(of_file(daemon, order.vbd.vdi, problem).await),
            served => served,
        }
    };
    let served = context.unless_cancelled(begun.operation.unless_cancelled(work)).await;
    if served.is_ok() {
        reconcile::of_plugged(daemon, vbd).await;
    }
    let plugged = match served {
        // Not cancellable: QEMU blocks while it negotiates with the disk.
        Ok(()) => vm::attach(daemon, vbd, begun.again).await,
        Err(problem) => Err(problem),
    };
    let plugged = match plugged {
        Ok(()) => daemon.catalogue.write(move |tx| tx.end_plug(vbd)).await,
        Err(problem) => Err(problem),
    };
    match &plugged {
        Ok(_) => supervise::begin(daemon, vbd, process),
        Err(problem) => {
            // The lease is released when no process has a file open any more, however long that takes.
            match clear(daemon, vbd, process).await {
                Ok(()) => {
                    forget(daemon, vbd).await;
                    record_failed_plug(daemon, vbd, problem).await;
                }
                Err(also) => tracing::error!(%vbd, "cleanup after a failed plug is left for the unplug: {also}"),
            }
        }
    }
    plugged
}

/// The reason why a VDI cannot be plugged: `problem`, unless its file also belongs to another VDI.
async fn of_file(daemon: &Daemon, vdi: Uuid, problem: Problem) -> Problem {
    if !matches!(problem.code, Code::State | Code::InUse) {
        return problem;
    }
    sr::same_file::shared(daemon, vdi).await.ok().flatten().unwrap_or(problem)
}

/// Records that a plug was not started; the caller does not wait until the catalogue accepts that.
fn record_failed_plug_later(daemon: &Daemon, vbd: Uuid, why: Problem) {
    // No other operation can have started: the VBD is `plugging` in the catalogue.
    let Ok(operation) = daemon.plugs.operations.begin(vbd, Kind::Plug) else { return };
    let daemon = daemon.clone();
    background::spawn(async move {
        let recorded = catalogue::record(&daemon.catalogue, move |tx| match tx.vbd(vbd)?.state {
            VbdState::Plugging => tx.end_unplug(vbd, Some(&why)).map(drop),
            _ => Ok(()),
        });
        if let Err(problem) = recorded.await {
            tracing::error!(%vbd, "its state could not be set to unplugged: {problem}");
        }
        drop(operation);
    });
}

/// Records that a plug failed or was cancelled.
pub async fn record_failed_plug(daemon: &Daemon, vbd: Uuid, why: &Problem) {
    let why = (why.code != Code::Cancelled).then(|| why.clone());
    let recorded = catalogue::record(&daemon.catalogue, move |tx| tx.end_unplug(vbd, why.as_ref())).await;
    if let Err(problem) = recorded {
        // The VBD stays `plugging`: an unplug or the next daemon tries again.
        tracing::error!(%vbd, "its state could not be set to unplugged: {problem}");
    }
}
