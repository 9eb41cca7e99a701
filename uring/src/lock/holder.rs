//! The holder of a lock that conflicts with ours, for error messages: whether it writes, and which program it is.
//!
//! The kernel does not report a process for a lock of an open file description, but lists the locks of each descriptor
//! in /proc/PID/fdinfo. The program stays unknown if it runs on another host or as another user, or if /proc is not
//! accessible.

use std::fs;
use std::os::fd::BorrowedFd;

use rustix::fs::Stat;

use super::{AGAINST_READER, RESIZES, WRITES, bytes, conflicting, whole_file};
use crate::AccessMode;

/// The holder of a conflicting lock.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    /// How it uses the file.
    pub access: AccessMode,
    /// Its description, as the subject of a sentence.
    pub program: String,
    /// Its lock, unless it was released meanwhile.
    lock: Option<libc::flock>,
}

impl Holder {
    /// The holder of a lock that conflicts with a lock of the whole file. If the lock was released meanwhile, it is
    /// reported as a writer's.
    pub fn of(file: BorrowedFd<'_>, kind: libc::c_int) -> Holder {
        if let Some(writer) = single_byte(file, &[WRITES, RESIZES]) {
            return writer;
        }
        let lock = conflicting(file, whole_file(kind));
        let reads = lock.is_some_and(|lock| libc::c_int::from(lock.l_type) == libc::F_RDLCK);
        let access = if reads { AccessMode::Reading } else { AccessMode::Writing };
        Holder { access, program: "another process".into(), lock }
    }

    /// The holder of a lock that excludes a reader.
    pub fn against_reader(file: BorrowedFd<'_>) -> Option<Holder> {
        single_byte(file, &AGAINST_READER)
    }

    /// Adds the name and id of its process, if they can be found.
    pub fn named(self, file: BorrowedFd<'_>) -> Holder {
        let found = self.lock.and_then(|lock| process(&lock, &rustix::fs::fstat(file).ok()?));
        Holder { program: found.unwrap_or(self.program), ..self }
    }
}

/// The holder of a lock on one of these bytes, but not of the whole file.
fn single_byte(file: BorrowedFd<'_>, places: &[libc::off_t]) -> Option<Holder> {
    let is_byte = |lock: &libc::flock| (lock.l_start, lock.l_len) != (0, 0);
    let on = |&byte: &libc::off_t| conflicting(file, bytes(libc::F_WRLCK, byte, 1)).filter(is_byte);
    let lock = places.iter().find_map(on)?;
    let program = "QEMU, or a program that locks images as QEMU does,".into();
    Some(Holder { access: AccessMode::Writing, program, lock: Some(lock) })
}

/// The name and id of another process on this machine that has this lock on this file.
fn process(lock: &libc::flock, file: &Stat) -> Option<String> {
    let kind = if libc::c_int::from(lock.l_type) == libc::F_RDLCK { "READ" } else { "WRITE" };
    let end = match lock.l_len {
        0 => "EOF".to_owned(),
        len => (lock.l_start + len - 1).to_string(),
    };
    let (start, inode) = (lock.l_start.to_string(), file.st_ino.to_string());
    // lock:	1: OFDLCK ADVISORY  READ -1 fe:00:9978035 100 101
    let is_it = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [of, _, "OFDLCK", _, found, _, place, from, to] = words[..] else { return false };
        let place = place.rsplit(':').next();
        of == "lock:" && found == kind && from == start && to == end && place == Some(inode.as_str())
    };
    let own = std::process::id();
    let ids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for id in ids.filter(|&id: &u32| id != own) {
        for open in fs::read_dir(format!("/proc/{id}/fdinfo")).into_iter().flatten().flatten() {
            let described = fs::read_to_string(open.path()).unwrap_or_default();
            if !described.lines().any(is_it) {
                continue;
            }
            // Inode numbers are unique only within a file system.
            let through = format!("/proc/{id}/fd/{}", open.file_name().to_string_lossy());
            let same = |stat: Stat| (stat.st_dev, stat.st_ino) == (file.st_dev, file.st_ino);
            if rustix::fs::stat(through).is_ok_and(same) {
                let name = fs::read_to_string(format!("/proc/{id}/comm")).ok()?;
                return Some(format!("{} (process {id})", name.trim_end().escape_debug()));
            }
        }
    }
    None
}
