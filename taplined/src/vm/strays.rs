//! QEMU processes of ours that belong to no VM in the catalogue: the daemon was killed between start and record, or
//! the catalogue was restored from a backup or rebuilt. In the first case no caller was informed that they run, so
//! they are killed. In the other, one may be a production server. The caller knows which case it is.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use api::Problem;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use uuid::Uuid;

use super::group;

/// VMs for which machines run, with their processes.
pub type Found = Vec<(Uuid, Vec<i32>)>;

/// Finds such processes. Those of VMs in `starting` are killed, the others are returned; directories without a
/// process are removed, except those of VMs in `keep`.
pub fn look(places: &Path, keep: &BTreeSet<Uuid>, starting: &BTreeSet<Uuid>) -> Result<Found, Problem> {
    let tried = || format!("list {}", places.display());
    let mut found = Found::new();
    for entry in fs::read_dir(places).map_err(|error| Problem::failed(tried(), error))? {
        let entry = entry.map_err(|error| Problem::failed(tried(), error))?;
        let Some(vm) = entry.file_name().to_str().and_then(|name| Uuid::parse_str(name).ok()) else { continue };
        let directory = entry.path();
        let pids = running_in(&directory);
        if !pids.is_empty() && !starting.contains(&vm) {
            found.push((vm, pids));
            continue;
        }
        if keep.contains(&vm) {
            continue;
        }
        for pid in pids {
            kill_one(pid, &directory);
        }
        group::leave(vm);
        fs::remove_dir_all(&directory).map_err(|error| Problem::failed(tried(), error))?;
    }
    Ok(found)
}

/// Processes that run in the directory and have its monitor on their command line: QEMU, but not the shell of a user
/// who inspects it.
fn running_in(directory: &Path) -> Vec<i32> {
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| is_its(*pid, directory)).collect()
}

fn is_its(pid: i32, directory: &Path) -> bool {
    let monitor = format!("id=monitor,path={}", directory.join("monitor").display());
    let there = fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|there| there == directory);
    let words = || fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    there && String::from_utf8_lossy(&words()).contains(&monitor)
}

fn kill_one(pid: i32, directory: &Path) {
    let Some(number) = Pid::from_raw(pid) else { return };
    let killed = pidfd_open(number, PidfdFlags::empty()).and_then(|pidfd| match is_its(pid, directory) {
        // Checked after the pidfd was opened: it refers to the process that was checked.
        true => pidfd_send_signal(pidfd, Signal::KILL),
        false => Ok(()),
    });
    match killed {
        Ok(()) => tracing::warn!(pid, directory = %directory.display(), "killing a QEMU that belongs to no VM"),
        Err(errno) => tracing::error!(pid, "a QEMU that belongs to no VM cannot be killed: {errno}"),
    }
}
