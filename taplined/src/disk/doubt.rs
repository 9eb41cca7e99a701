//! Polls a disk process that has not responded in time until it does, and marks the VBD in the meantime.
//!
//! Only disks that have not answered a request, or whose process appears hung, are polled: an idle disk is never
//! woken.

use std::collections::HashSet;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use api::{Code, Problem, VbdState};
use jiff::Timestamp;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;

/// Timeout for a response, and the pause before the next poll, which doubles each time.
const TO_ANSWER: Duration = Duration::from_secs(2);
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const AGAIN_AFTER_MAX: Duration = Duration::from_secs(60);

/// VBDs whose processes do not respond.
#[derive(Debug, Default)]
pub struct Doubted {
    vbds: Mutex<HashSet<Uuid>>,
    /// Wakes the tasks that wait before the next poll.
    wake: Notify,
}

impl Doubted {
    fn vbds(&self) -> MutexGuard<'_, HashSet<Uuid>> {
        self.vbds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls silent processes now: one of them may respond again.
    pub fn poll_now(&self) {
        self.wake.notify_waiters();
    }
}

/// Polls a disk that has not responded in time until it responds or has exited.
pub fn doubt(daemon: &Daemon, vbd: Uuid) {
    if !daemon.disks.doubted.vbds().insert(vbd) {
        return;
    }
    let daemon = daemon.clone();
    background::spawn(async move {
        if let Err(problem) = poll_until_it_responds(&daemon, vbd).await {
            tracing::error!(%vbd, "cannot tell whether its process responds: {problem}");
        }
        daemon.disks.doubted.vbds().remove(&vbd);
    });
}

async fn poll_until_it_responds(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    let (since, mut pause) = (Timestamp::now(), AGAIN_AFTER);
    let mut before = None;
    loop {
        let silent = daemon.disks.is_silent(vbd, TO_ANSWER).await;
        let now = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?;
        let Some(now) = now.filter(|now| now.state == VbdState::Plugged) else { return Ok(()) };
        let problem = silent.then(|| not_responding(vbd, now.pid, since));
        set_problem(daemon, vbd, before, problem.clone()).await?;
        let Some(problem) = problem else { return Ok(()) };
        tracing::warn!(%vbd, "{problem}");
        before = Some(problem);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            // Its storage may have recovered.
            () = daemon.disks.doubted.wake.notified() => {}
        }
        pause = pause.saturating_mul(2).min(AGAIN_AFTER_MAX);
    }
}

/// Sets or clears the problem of a plugged VBD. A problem that another operation recorded in the meantime stays.
async fn set_problem(
    daemon: &Daemon,
    vbd: Uuid,
    before: Option<Problem>,
    problem: Option<Problem>,
) -> Result<(), Problem> {
    let recorded = daemon.catalogue.write(move |tx| match tx.find_vbd(vbd)? {
        Some(now) if now.state == VbdState::Plugged && now.problem == before => {
            tx.set_vbd_state(vbd, now.state, problem.as_ref())
        }
        _ => Ok(()),
    });
    recorded.await
}

fn not_responding(vbd: Uuid, pid: Option<u32>, since: Timestamp) -> Problem {
    let process = pid.map_or("its process".into(), |pid| format!("process {pid}, {}", condition(pid)));
    let what = format!("the disk of VBD {vbd} has not responded since {since:.0} ({process})");
    Problem::new(Code::Timeout, what).advise(
        "check its storage: the disk resumes when the storage responds. To stop it regardless, unplug it with force",
    )
}

/// The state of a process, and where it waits in the kernel (proc_pid_stat(5), proc_pid_wchan(5)).
fn condition(pid: u32) -> String {
    let state = match stats::process_status(pid).and_then(|stat| stat.chars().next()) {
        Some('D') => "waiting for storage",
        Some('T' | 't') => "stopped by a signal or a debugger",
        Some('R') => "running",
        Some('S') => "sleeping",
        _ => "in an unknown state",
    };
    match fs::read_to_string(format!("/proc/{pid}/wchan")) {
        Ok(wchan) if !wchan.is_empty() && wchan != "0" => format!("{state}, in {wchan}"),
        _ => state.into(),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_process_state_is_described() {
        // The first thread waits for the one that runs this test.
        let own = condition(std::process::id());
        assert!(own.starts_with("sleeping") || own.starts_with("running"), "{own}");
        assert_eq!(condition(u32::MAX), "in an unknown state");
    }
}
