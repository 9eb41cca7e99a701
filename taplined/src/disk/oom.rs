//! OOM scores of processes (proc_pid_oom_score_adj(5)).
//!
//! It knows processes only by pid. A process inherits the score of its parent and keeps it when the parent exits, so
//! the setting holds for disks that the next daemon reattaches to.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// The default score.
const NORMAL: i16 = 0;

/// Whether it has been logged that scores cannot be set.
static SAID: AtomicBool = AtomicBool::new(false);

/// Sets the OOM score of a disk's process. Failure is only logged.
pub fn protect(pid: u32, score: i16) {
    if let Err(error) = set(pid, score) {
        let what = "cannot set the OOM score of a disk process";
        match SAID.swap(true, Ordering::Relaxed) {
            false => tracing::warn!(pid, score, "{what}: {error}"),
            true => tracing::debug!(pid, score, "{what}: {error}"),
        }
    }
}

/// Resets the OOM score of a process that is less important than the daemon, from which it would inherit.
pub fn make_normal(pid: u32) {
    let ours = std::fs::read_to_string("/proc/self/oom_score_adj").ok().and_then(|text| text.trim().parse().ok());
    if ours.is_some_and(|score: i16| score < NORMAL) {
        if let Err(error) = set(pid, NORMAL) {
            tracing::warn!(
                pid,
                "cannot reset a process's OOM score; the OOM killer spares it as it does the daemon: {error}"
            );
        }
    }
}

fn set(pid: u32, score: i16) -> io::Result<()> {
    std::fs::write(format!("/proc/{pid}/oom_score_adj"), format!("{score}\n"))
}
