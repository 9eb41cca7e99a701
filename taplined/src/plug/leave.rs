//! Replaces the process that serves a Xen guest: the old process leaves the guest's rings as they are, and the new
//! one takes them over (decision 0008). The guest waits until the new process serves, which takes longer than a
//! handover.
//!
//! *If killed in between:* the recorded process is gone, and the next daemon starts another, as after a crash.

use std::time::Instant;

use api::{Code, Problem};
use rustix::process::Signal;
use uuid::Uuid;

use super::cleanup::clear;
use super::handover::Outcome;
use super::plug_spec::PlugSpec;
use super::start::{Incarnation, serve};
use super::steps::Steps;
use crate::daemon::Daemon;
use crate::disk::process::DiskProcess;

/// Stops the old process and starts a new one.
pub async fn replace(daemon: &Daemon, vbd: Uuid, upgrade: &mut Steps, mut old: DiskProcess) -> Outcome {
    // No task is changing its files, and none can begin to: the catalogue is accurate.
    let order = match PlugSpec::of(daemon, vbd).await {
        Ok(order) => order,
        Err(problem) => return (Some(old), Err(problem)),
    };
    let begun = Instant::now();
    match leave(vbd, upgrade, &mut old).await {
        Ok(()) => {}
        Err(problem) => return (Some(old), Err(problem)),
    }
    let mut process = None;
    let mut steps = Steps::of("vbd-restart", &daemon.config, None);
    match serve(daemon, &order, Incarnation::Replacement, &mut steps, &mut process).await {
        Ok(()) => {
            let pause = u64::try_from(begun.elapsed().as_micros()).ok();
            let note = "a Xen guest's I/O waits from the end of the old process until the new one serves";
            (process, Ok((pause, Some(note.into()))))
        }
        Err(problem) => {
            // From here on it is restarted as after a crash.
            if let Err(also) = clear(daemon, vbd, process).await {
                tracing::error!(%vbd, "{also}");
            }
            (None, Err(problem))
        }
    }
}

/// Makes the old process disconnect from its guest, and waits for its exit.
async fn leave(vbd: Uuid, upgrade: &mut Steps, old: &mut DiskProcess) -> Result<(), Problem> {
    let limit = upgrade.limit();
    let left = async {
        old.signal(Signal::USR2)?;
        match tokio::time::timeout(limit, old.ended()).await {
            Ok(ended) => ended.map(drop),
            Err(_) => {
                let what = format!("the process of VBD {vbd} has not exited in {} s", limit.as_secs());
                let advice = "check the storage: once it responds the process exits and another is started";
                Err(Problem::new(Code::Timeout, what).advise(advice))
            }
        }
    };
    upgrade.last_step("leave", left).await
}
