//! The program of disk processes: finds and opens it, and explains why it cannot be started.
//!
//! It knows nothing about what the program does. Invariant: the program is found and opened with the daemon's own
//! permissions; the user it then runs as needs no access to its path, only execute permission. It may be below a home
//! directory that is closed to others.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use api::Problem;
use rustix::fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, StatVfsMountFlags, accessat, fstat, fstatvfs, open};
use rustix::io::Errno;

use crate::account::User;
use crate::config::Config;

/// The program's name; it is in this program's directory or in the PATH.
const NAME: &str = "tapline-disk";

/// The beginning of an executable, up to its machine type (ELF, "ELF Header": e_ident, e_type, e_machine).
const HEADER: usize = 20;
const ELF: &[u8] = b"\x7fELF";

/// Where to look for the program. It is looked up on each start, because it may have been replaced.
#[derive(Clone, Debug)]
pub struct Program(PathBuf);

/// The program, open.
#[derive(Debug)]
pub struct Opened {
    path: PathBuf,
    file: OwnedFd,
    /// A script's interpreter opens it by its path.
    is_script: bool,
}

impl Program {
    /// The configured program, or that in this program's directory, or the name.
    pub fn of(config: &Config) -> Program {
        let adjacent = || std::env::current_exe().ok().and_then(|me| me.parent().map(|directory| directory.join(NAME)));
        let named = config.disk_program.clone().or_else(|| adjacent().filter(|path| path.is_file()));
        Program(named.unwrap_or_else(|| NAME.into()))
    }

    /// Opens the program; checks that this machine can run it.
    pub fn open(&self) -> Result<Opened, Problem> {
        let path = self.find();
        let not_started = |why: &dyn std::fmt::Display| Problem::failed(format_args!("start {}", path.display()), why);
        // Nothing is read: a program need not be readable to be run.
        let file = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(|errno| {
            let (why, advice) = why_not_found(&path, errno);
            not_started(&why).advise(advice)
        })?;
        let header = Header::of(Path::new(&place_of(&file)));
        match header.judge(Header::of(Path::new("/proc/self/exe"))) {
            Ok(is_script) => Ok(Opened { path, file, is_script }),
            Err((why, advice)) => Err(not_started(&why).advise(advice)),
        }
    }

    /// The program's path; a bare name is looked up in the PATH.
    fn find(&self) -> PathBuf {
        if self.0.components().count() != 1 || self.0.is_absolute() {
            return self.0.clone();
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = std::env::split_paths(&path).map(|directory| directory.join(&self.0)).find(|path| path.is_file());
        found.unwrap_or_else(|| self.0.clone())
    }
}

impl Opened {
    /// The path to execute: that of the open file.
    pub fn executed(&self) -> OsString {
        if self.is_script { self.path.clone().into() } else { place_of(&self.file).into() }
    }

    /// The path under which the program was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The problem that the program could not be started as this user.
    pub fn not_started(&self, user: Option<User>, error: &io::Error) -> Problem {
        let (why, advice) = self.why_not(user, error);
        Problem::failed(format_args!("start {}", self.path.display()), why).advise(advice)
    }

    fn why_not(&self, user: Option<User>, error: &io::Error) -> (String, String) {
        let elsewhere = format!("or install {NAME} elsewhere and set disk-program");
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::ACCESS) if is_noexec(&self.file) => {
                (format!("{error}: its file system is mounted noexec"), format!("remount it with exec, {elsewhere}"))
            }
            Some(Errno::ACCESS) if !may_execute(&self.file, user) => {
                let uid = user.map_or_else(|| rustix::process::geteuid().as_raw(), |(uid, _)| uid);
                (format!("{error}: uid {uid} may not execute it"), format!("chmod a+x {}", self.path.display()))
            }
            Some(Errno::ACCESS) => {
                (error.to_string(), "check whether a security module denies it (kernel log, audit log)".into())
            }
            // The file itself exists: it is open.
            Some(Errno::NOENT) => (
                format!("{error}: its interpreter or dynamic loader is not installed"),
                format!("install a {NAME} built for this system"),
            ),
            Some(Errno::PERM) => (
                format!("{error}: the daemon may not switch the user of its child processes"),
                "give the daemon CAP_SETUID and CAP_SETGID, or run all of it as a non-root user".into(),
            ),
            Some(Errno::AGAIN | Errno::NOMEM) => (
                error.to_string(),
                "check the host's free memory and the process limits (RLIMIT_NPROC, TasksMax=)".into(),
            ),
            _ => (error.to_string(), format!("install {NAME} in the directory of taplined, {elsewhere}")),
        }
    }
}

/// The path of an open file in the process that has it open, and in its children until they execute it.
fn place_of(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// The beginning of an executable file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Header {
    /// The first bytes.
    Is([u8; HEADER]),
    /// It is shorter than any program, or not a file.
    Short,
    /// The file is not readable: the kernel is to judge.
    Hidden,
}

impl Header {
    fn of(path: &Path) -> Header {
        let Ok(file) = File::open(path) else { return Header::Hidden };
        let mut bytes = [0; HEADER];
        file.read_exact_at(&mut bytes, 0).map_or(Header::Short, |()| Header::Is(bytes))
    }

    /// Whether it is a script; or why this machine cannot run it, and what to do. `ours` is the header of this
    /// program. Checked before the kernel refuses it: the C library would then run the file as a script.
    fn judge(self, ours: Header) -> Result<bool, (&'static str, &'static str)> {
        // Word size, byte order and processor.
        let kind = |header: &[u8; HEADER]| (header[4], header[5], header[18], header[19]);
        match (self, ours) {
            (Header::Hidden, _) => Ok(false),
            (Header::Is(header), _) if header.starts_with(b"#!") => Ok(true),
            (Header::Is(header), Header::Is(ours)) if header.starts_with(ELF) && kind(&header) != kind(&ours) => {
                Err(("it was built for another architecture", "install a tapline-disk built for this architecture"))
            }
            (Header::Is(header), _) if header.starts_with(ELF) => Ok(false),
            _ => Err((
                "it is not an executable",
                "install tapline-disk in the directory of taplined, or set disk-program",
            )),
        }
    }
}

/// Why there is no program at a path, and what to do.
fn why_not_found(path: &Path, errno: Errno) -> (String, String) {
    let closed = (errno == Errno::ACCESS).then(|| {
        let mut above: Vec<&Path> = path.ancestors().skip(1).filter(|above| !above.as_os_str().is_empty()).collect();
        above.reverse();
        let may_search = |directory: &Path| accessat(CWD, directory, Access::EXEC_OK, AtFlags::EACCESS).is_ok();
        above.into_iter().find(|directory| !may_search(directory))
    });
    match closed.flatten() {
        Some(directory) => (
            format!("{errno}: the daemon has no search permission on the directory {}", directory.display()),
            format!("chmod o+x {}, or install {NAME} elsewhere and set disk-program", directory.display()),
        ),
        None => (errno.to_string(), format!("install {NAME} in the directory of taplined, or set disk-program")),
    }
}

fn is_noexec(file: &OwnedFd) -> bool {
    fstatvfs(file).is_ok_and(|system| system.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

/// Whether a file's permissions allow a user to execute it; the daemon's own user if none is given.
fn may_execute(file: &OwnedFd, user: Option<User>) -> bool {
    let Ok(stat) = fstat(file) else { return true };
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return false;
    }
    let own = || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let (uid, gid) = user.unwrap_or_else(own);
    let mode = Mode::from_raw_mode(stat.st_mode);
    match (stat.st_uid == uid, stat.st_gid == gid) {
        _ if uid == 0 => mode.intersects(Mode::XUSR | Mode::XGRP | Mode::XOTH),
        (true, _) => mode.contains(Mode::XUSR),
        (false, true) => mode.contains(Mode::XGRP),
        (false, false) => mode.contains(Mode::XOTH),
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn header(begin: &[u8]) -> Header {
        let mut bytes = [0; HEADER];
        bytes[..begin.len()].copy_from_slice(begin);
        Header::Is(bytes)
    }

    #[test]
    fn scripts_and_programs_of_this_machine_may_be_run() {
        let ours = Header::of(Path::new("/proc/self/exe"));
        assert_eq!(ours.judge(ours), Ok(false));
        assert_eq!(header(b"#!/bin/sh\n").judge(ours), Ok(true));
        assert_eq!(Header::Hidden.judge(ours), Ok(false));
        assert_eq!(header(b"\x7fELF\x02\x01\x01").judge(ours).unwrap_err().0, "it was built for another architecture");
        for none in [header(b"text"), Header::Short, Header::of(Path::new("/"))] {
            assert_eq!(none.judge(ours).unwrap_err().0, "it is not an executable");
        }
    }

    #[test]
    fn a_failed_start_is_reported_with_its_cause() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("program");
        std::fs::write(&path, "#!/bin/sh\necho this is long enough").unwrap();
        let opened = Program(path.clone()).open().unwrap();
        let problem_of = |user, errno: Errno| opened.not_started(user, &errno.into());
        let denied = problem_of(Some((65_534, 65_534)), Errno::ACCESS);
        assert!(denied.detail.contains("uid 65534 may not execute it"), "{denied}");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let denied = problem_of(Some((65_534, 65_534)), Errno::ACCESS);
        assert!(denied.advice.unwrap().contains("security module"));
        assert!(problem_of(None, Errno::PERM).advice.unwrap().contains("CAP_SETUID"));
        assert!(problem_of(None, Errno::NOENT).detail.contains("not installed"));
    }

    #[test]
    fn a_bare_name_is_looked_up_in_the_path() {
        assert!(Program("true".into()).open().unwrap().path().is_absolute());
        let problem = Program("no-such-program".into()).open().unwrap_err();
        assert!(problem.detail.contains("No such file"), "{problem}");
    }
}
