//! Shuts down all VMs and unplugs everything in bounded time, for the shutdown of the host.

use std::time::Duration;

use api::{Power, Problem, Task, VbdState, VmShutdown};
use repo::catalogue::NewTask;
use serde_json::json;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::plug::unplug_each;
use crate::task::Context;
use crate::vm;

/// Time limit for a forced shutdown of a VM and the unplug of its disks.
const TO_END: Duration = Duration::from_secs(30);

/// Starts a task that shuts down all VMs and unplugs all VBDs. `patience` is how long guests may take to power off,
/// or external guests to release their disks; then the disks are stopped, after flushing all acknowledged writes.
pub async fn drain(daemon: &Daemon, patience: Duration) -> Result<Task, Problem> {
    let new = NewTask { uuid: Uuid::new_v4(), verb: "host-drain", about: Vec::new(), cancellable: true, intent: None };
    let at_work = daemon.clone();
    let work = move |context: Context| async move {
        at_work.catalogue.write(|tx| tx.note_drained()).await?;
        end_vms(&at_work, patience).await?;
        let gently = tokio::time::timeout(patience, async {
            let vbds = left(&at_work).await?;
            Ok::<usize, Problem>(unplug_each(&at_work, vbds, false, &context).await.len())
        });
        let asked = gently.await;
        let vbds = left(&at_work).await?;
        let forced = vbds.len();
        if asked.is_err() {
            tracing::warn!(forced, "guests have not released their disks in {} s", patience.as_secs());
        }
        for (vbd, outcome) in unplug_each(&at_work, vbds, true, &context).await {
            if let Err(problem) = outcome {
                tracing::error!(%vbd, "it could not be unplugged: {problem}");
            }
        }
        let remain = left(&at_work).await?;
        match remain.len() {
            0 => Ok(json!({ "forced": forced })),
            count => Err(Problem::failed("unplug all VBDs", format_args!("{count} remain; see the log"))),
        }
    };
    daemon.tasks.start(daemon, new, work).await
}

/// Shuts down all VMs concurrently. Failures are logged; the disks of such VMs are stopped by force.
async fn end_vms(daemon: &Daemon, patience: Duration) -> Result<(), Problem> {
    let vms = daemon.catalogue.read(|view| view.vms()).await?;
    let timeout = Some(u32::try_from(patience.as_secs()).unwrap_or(u32::MAX));
    let mut ending = Vec::new();
    for vm in vms.into_iter().filter(|vm| !matches!(vm.power, Power::Halted | Power::Suspended)) {
        // A paused guest does not notice the power button.
        let asked = VmShutdown { force: patience.is_zero() || vm.power == Power::Paused, force_after: timeout };
        match vm::shutdown(daemon, vm.uuid, asked).await {
            Ok(task) => ending.push(task.uuid),
            Err(problem) => tracing::error!(vm = %vm.uuid, "it could not be shut down: {problem}"),
        }
    }
    for task in ending {
        let task = daemon.tasks.wait(task, patience.saturating_add(TO_END)).await?;
        if let Some(problem) = task.problem {
            tracing::error!(task = %task.uuid, "a VM could not be shut down: {problem}");
        }
    }
    Ok(())
}

/// VBDs that are not unplugged.
async fn left(daemon: &Daemon) -> Result<Vec<Uuid>, Problem> {
    let vbds = daemon.catalogue.read(|view| view.vbds(None, None)).await?;
    Ok(vbds.into_iter().filter(|vbd| vbd.state != VbdState::Unplugged).map(|vbd| vbd.uuid).collect())
}
