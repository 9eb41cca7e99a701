//! `doctor`: checks the configuration of this host and the health of its disks, each with the command that fixes it.
//!
//! It reads the kernel's settings and statistics pages, and requests the health of disks and repositories from the
//! daemon; it changes nothing. Invariant: a check that cannot be made is reported as unknown, not as good.

mod disks;
mod libvirt;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::json;

use crate::failure::Failure;
use crate::output::print_local;
use crate::session::How;
use crate::wrap::{width, wrapped};

/// Arguments of `doctor`.
#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// Directories of images whose file systems are looked at, such as those of repositories
    #[arg(value_name = "DIRECTORY")]
    directories: Vec<PathBuf>,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckState {
    Good,
    Bad,
    Unknown,
}

/// A check and its result.
#[derive(Clone, Debug)]
struct Check {
    state: CheckState,
    text: String,
    /// The command that fixes it.
    mend: Option<String>,
}

/// Where the kernel's settings are found; another directory in tests.
struct Host {
    root: PathBuf,
    /// The daemon's run directory.
    run: PathBuf,
}

/// Runs the command.
pub fn run(doctor: &Doctor, how: How) -> Result<(), Failure> {
    let json = how.json;
    let run = how.run_directory()?;
    let host = Host { root: PathBuf::from("/"), run: run.clone() };
    let mut checks = host.checks();
    checks.extend(doctor.directories.iter().map(|path| direct_io(path)));
    checks.extend(disks::checks(how.local_client()?.as_ref(), &run));
    checks.extend(host.libvirt());
    if json {
        let results: Vec<_> = checks
            .iter()
            .map(|check| {
                let state = match check.state {
                    CheckState::Good => "good",
                    CheckState::Bad => "bad",
                    CheckState::Unknown => "unknown",
                };
                json!({ "state": state, "text": check.text, "mend": check.mend })
            })
            .collect();
        return Ok(print_local(&format!("{}\n", json!({ "checks": results })))?);
    }
    let (mut out, width) = (String::new(), width());
    for check in &checks {
        let mark = match check.state {
            CheckState::Good => "ok  ",
            CheckState::Bad => "BAD ",
            CheckState::Unknown => "?   ",
        };
        out.push_str(&wrapped(&format!("{mark} "), &check.text, width));
        out.push_str(&check.mend.as_ref().map(|mend| wrapped("       ", mend, width)).unwrap_or_default());
    }
    Ok(print_local(&out)?)
}

fn good(text: impl Into<String>) -> Check {
    Check { state: CheckState::Good, text: text.into(), mend: None }
}

fn bad(text: impl Into<String>, mend: impl Into<String>) -> Check {
    Check { state: CheckState::Bad, text: text.into(), mend: Some(mend.into()) }
}

fn unknown(text: impl Into<String>) -> Check {
    Check { state: CheckState::Unknown, text: text.into(), mend: None }
}

impl Host {
    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    fn checks(&self) -> Vec<Check> {
        vec![self.io_uring(), self.aio(), self.locked_memory(), self.clock(), self.huge_pages(), self.files()]
    }

    fn io_uring(&self) -> Check {
        match self.number("proc/sys/kernel/io_uring_disabled") {
            Some(0) => good("io_uring is allowed"),
            Some(1) => bad(
                "io_uring is for a group only (kernel.io_uring_disabled = 1): disks that may not use it take Linux AIO",
                "sysctl -w kernel.io_uring_disabled=0, or put the user of disks into the group kernel.io_uring_group",
            ),
            Some(_) => bad(
                "io_uring is forbidden (kernel.io_uring_disabled = 2): disks use Linux AIO, which is slower on some storage \
                 and not for --cache writeback",
                "sysctl -w kernel.io_uring_disabled=0",
            ),
            None => unknown("whether io_uring is allowed: the kernel has no such setting (before 6.6 it always is)"),
        }
    }

    fn aio(&self) -> Check {
        let (Some(used), Some(most)) = (self.number("proc/sys/fs/aio-nr"), self.number("proc/sys/fs/aio-max-nr"))
        else {
            return unknown("how many requests Linux AIO may have");
        };
        // A disk needs 256 requests.
        match most.saturating_sub(used) / 256 {
            0..64 => bad(
                format!(
                    "Linux AIO has room for few more disks: {used} of {most} requests are taken; others will use io_uring"
                ),
                "sysctl -w fs.aio-max-nr=1048576 (and in /etc/sysctl.d)",
            ),
            more => good(format!("Linux AIO has room for {more} more disks")),
        }
    }

    fn locked_memory(&self) -> Check {
        let limits = self.read("proc/self/limits").unwrap_or_default();
        let line = limits.lines().find(|line| line.starts_with("Max locked memory"));
        let soft = line.and_then(|line| line.split_whitespace().nth(3));
        match soft.map(|soft| (soft, soft.parse::<u64>())) {
            Some(("unlimited", _)) => good("memory can be locked without limit"),
            Some((_, Ok(bytes))) if bytes >= 64 << 20 => good(format!("{} MiB of memory can be locked", bytes >> 20)),
            Some((_, Ok(bytes))) => bad(
                format!(
                    "only {} KiB of memory can be locked here: buffers of io_uring are not registered",
                    bytes >> 10
                ),
                "LimitMEMLOCK=infinity in taplined.service, or ulimit -l unlimited for tapline serve",
            ),
            _ => unknown("how much memory can be locked"),
        }
    }

    fn clock(&self) -> Check {
        let path = "sys/devices/system/clocksource/clocksource0";
        match self.read(&format!("{path}/current_clocksource")).as_deref() {
            Some(clock @ ("tsc" | "kvm-clock" | "hyperv_clocksource_tsc_page")) => {
                good(format!("the clock is {clock}"))
            }
            Some(clock) => bad(
                format!("the clock is {clock}: each look at the time is a system call"),
                format!("echo tsc > /{path}/current_clocksource, if the kernel offers it; see dmesg | grep -i tsc"),
            ),
            None => unknown("which clock the kernel uses"),
        }
    }

    fn huge_pages(&self) -> Check {
        match self.read("sys/kernel/mm/transparent_hugepage/enabled") {
            Some(text) if text.contains("[always]") => bad(
                "transparent huge pages are \"always\": a disk process may take more memory than it uses",
                "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
            ),
            Some(_) => good("transparent huge pages are for programs that ask for them"),
            None => unknown("how transparent huge pages are used"),
        }
    }

    fn files(&self) -> Check {
        let text = self.read("proc/sys/fs/file-nr").unwrap_or_default();
        let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match numbers.as_slice() {
            [open, _, most] if open.saturating_mul(10) > most.saturating_mul(9) => bad(
                format!("{open} of {most} files are open on this host"),
                format!("sysctl -w fs.file-max={}", most.saturating_mul(4)),
            ),
            [open, _, _] => good(format!("{open} files are open, far from the limit")),
            _ => unknown("how many files are open"),
        }
    }
}

/// Checks whether files in a directory can be opened with O_DIRECT, as disks do by default.
fn direct_io(directory: &Path) -> Check {
    use rustix::fs::{CWD, Mode, OFlags, openat};
    let shown = directory.display();
    // An unnamed file disappears when it is closed.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::DIRECT;
    match openat(CWD, directory, flags, Mode::RUSR | Mode::WUSR) {
        Ok(_) => good(format!("{shown} takes O_DIRECT")),
        Err(rustix::io::Errno::INVAL) => bad(
            format!("{shown} refuses O_DIRECT: disks there need --cache writeback, which is not the default"),
            "move the images to ext4, XFS, btrfs, or a tmpfs of Linux 6.6 and later",
        ),
        Err(rustix::io::Errno::OPNOTSUPP) => {
            unknown(format!("whether {shown} takes O_DIRECT: its file system has no unnamed files"))
        }
        Err(errno) => unknown(format!("whether {shown} takes O_DIRECT: {errno}")),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    pub fn host(files: &[(&str, &str)]) -> (tempfile::TempDir, Host) {
        let room = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = room.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let root = room.path().to_owned();
        (room, Host { root, run: "/run/tapline".into() })
    }

    fn states(host: &Host) -> Vec<CheckState> {
        host.checks().iter().map(|check| check.state).collect()
    }

    #[test]
    fn a_well_configured_host_has_nothing_to_fix() {
        let (_room, host) = host(&[
            ("proc/sys/kernel/io_uring_disabled", "0\n"),
            ("proc/sys/fs/aio-nr", "0\n"),
            ("proc/sys/fs/aio-max-nr", "1048576\n"),
            ("proc/self/limits", "Max locked memory         unlimited            unlimited            bytes\n"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n"),
            ("proc/sys/fs/file-nr", "1000\t0\t100000\n"),
        ]);
        assert_eq!(states(&host), [CheckState::Good; 6], "{:?}", host.checks());
    }

    #[test]
    fn each_bad_setting_is_found_with_its_fix() {
        let (_room, host) = host(&[
            ("proc/sys/kernel/io_uring_disabled", "2\n"),
            ("proc/sys/fs/aio-nr", "65000\n"),
            ("proc/sys/fs/aio-max-nr", "65536\n"),
            ("proc/self/limits", "Max locked memory         8388608              8388608              bytes\n"),
            ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
            ("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never\n"),
            ("proc/sys/fs/file-nr", "99000\t0\t100000\n"),
        ]);
        assert_eq!(states(&host), [CheckState::Bad; 6]);
        assert!(host.checks().iter().all(|check| check.mend.is_some()));
    }

    #[test]
    fn settings_that_cannot_be_read_are_unknown() {
        let (_room, host) = host(&[]);
        assert_eq!(states(&host), [CheckState::Unknown; 6]);
        assert_eq!(direct_io(Path::new("/nowhere")).state, CheckState::Unknown);
    }

    #[test]
    fn checking_a_directory_leaves_it_unchanged() {
        let room = tempfile::tempdir().unwrap();
        let check = direct_io(room.path());
        assert!(check.text.contains("O_DIRECT"), "{check:?}");
        assert_ne!(direct_io(Path::new("/proc")).state, CheckState::Good);
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 0);
    }
}
