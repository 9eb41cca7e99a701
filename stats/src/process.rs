//! Facts about a process from the kernel (proc_pid_stat(5), proc_pid_maps(5)).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::snapshot::Snapshot;

const ENOENT: i32 = 2;
const ESRCH: i32 = 3;

/// The status of a process, from field 3 on, which is its state: `T` if it is stopped by a signal, `t` if by a
/// debugger. `None` if there is no such process.
pub fn process_status(pid: u32) -> Option<String> {
    status_in(&format!("/proc/{pid}"))
}

/// The status of a thread of a process, from field 3 on.
pub fn thread_status(pid: u32, thread: u32) -> Option<String> {
    status_in(&format!("/proc/{pid}/task/{thread}"))
}

/// Whether a process is stopped, by a signal or a debugger.
pub fn is_stopped(pid: u32) -> bool {
    process_status(pid).is_some_and(|status| status.starts_with(['T', 't']))
}

/// Whether a process has the page at `page` mapped, as the one that writes it has; a process with the same pid that
/// began later has not. `None` if that cannot be found out: only root may look at other users' processes.
fn is_written_by(pid: u32, page: &Path) -> Option<bool> {
    let file = std::fs::metadata(page).ok()?;
    let maps = match std::fs::read_to_string(format!("/proc/{pid}/maps")) {
        Ok(maps) => maps,
        Err(error) if matches!(error.raw_os_error(), Some(ESRCH | ENOENT)) => return Some(false),
        Err(_) => return None,
    };
    // Some file systems show another device number there than stat(2): the inode has to do.
    let inode = file.ino().to_string();
    Some(maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode)))
}

impl Snapshot {
    /// Whether the process that wrote this reading of `page` has ended: no process has that pid, or another one, which
    /// does not map the page. If that cannot be found out, it has not.
    pub fn writer_has_ended(&self, page: &Path) -> bool {
        self.pid.is_none_or(|pid| is_written_by(pid, page) == Some(false))
    }
}

fn status_in(directory: &str) -> Option<String> {
    let stat = std::fs::read_to_string(format!("{directory}/stat")).ok()?;
    // The name of the program, in parentheses, is field 2 and may hold anything.
    Some(stat.rsplit_once(") ")?.1.to_owned())
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_stopped_process_is_noticed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(!is_stopped(child.id()));
        assert!(Command::new("kill").args(["-STOP", &child.id().to_string()]).status().unwrap().success());
        while !is_stopped(child.id()) {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_stopped(child.id()));
    }

    #[test]
    fn only_the_process_that_maps_a_page_writes_it() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("a.page");
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        let page = crate::Page::begin(file, crate::Source::Kernel, "{}").unwrap();
        assert_eq!(is_written_by(std::process::id(), &path), Some(true));
        drop(page);
        assert_eq!(is_written_by(std::process::id(), &path), Some(false));
        let mut child = Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        assert_eq!(is_written_by(child.id(), &path), Some(false));
        assert_eq!(is_written_by(std::process::id(), &room.path().join("none.page")), None);
    }
}
