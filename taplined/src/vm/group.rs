//! A cgroup for each machine, below the daemon's own, so that its resource usage is accounted separately, and an
//! administrator can limit or kill it.
//!
//! It sets no limits and enables no controllers, so that the daemon can stay in its own cgroup (cgroups(7), "no
//! internal processes"). Invariant: a machine without a cgroup runs all the same, and the log tells why.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

/// Moves the process of a machine, with all its threads, into a cgroup of its own.
pub fn enter(vm: Uuid, pid: u32) {
    let entered = own().and_then(|own| enter_below(&own, vm, pid));
    if let Err(why) = entered {
        tracing::info!(%vm, "its QEMU stays in the daemon's cgroup: {why}");
    }
}

/// Removes the cgroup of a machine that has ended.
pub fn leave(vm: Uuid) {
    let Ok(own) = own() else { return };
    match fs::remove_dir(group(&own, vm)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::info!(%vm, "its cgroup could not be removed: {error}");
        }
        _ => {}
    }
}

fn group(own: &Path, vm: Uuid) -> PathBuf {
    own.join(format!("tapline-vm-{vm}"))
}

fn enter_below(own: &Path, vm: Uuid, pid: u32) -> Result<(), String> {
    let group = group(own, vm);
    let said = |error: io::Error| format!("{}: {error}", group.display());
    match fs::create_dir(&group) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(said(error)),
        _ => {}
    }
    fs::write(group.join("cgroup.procs"), pid.to_string()).map_err(said)
}

/// The daemon's own cgroup (v2).
fn own() -> Result<PathBuf, String> {
    let read = |path: &str| fs::read_to_string(path).map_err(|error| format!("{path}: {error}"));
    own_in(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?)
        .ok_or_else(|| "cgroup v2 is not available".into())
}

/// Finds the cgroup in the mounts (proc_pid_mountinfo(5)) and the process's control groups (cgroups(7)).
fn own_in(mounts: &str, groups: &str) -> Option<PathBuf> {
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    let mounted = mounts.lines().find_map(|line| {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        system.starts_with("cgroup2 ").then_some((root, at))
    })?;
    let (root, at) = mounted;
    let below = Path::new(group).strip_prefix(root).ok()?;
    Some(Path::new(at).join(below))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_own_group_is_found_where_it_is_mounted() {
        let hybrid = "31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n";
        let found = own_in(hybrid, "9:name=systemd:/\n0::/system.slice/taplined.service\n");
        assert_eq!(found, Some("/sys/fs/cgroup/unified/system.slice/taplined.service".into()));
        let container = "41 31 0:38 /docker/7 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        assert_eq!(own_in(container, "0::/docker/7/inner\n"), Some("/sys/fs/cgroup/inner".into()));
        assert_eq!(own_in(container, "0::/elsewhere\n"), None);
        assert_eq!(own_in("31 24 0:27 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n", "0::/\n"), None);
        assert_eq!(own_in(hybrid, "4:memory:/\n"), None);
    }
}
