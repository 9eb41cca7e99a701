//! What a confined child gets: the files of its images and the socket at which it listens, as open descriptors. It can
//! then open nothing itself, neither a key nor other images.
//!
//! Knows nothing about images. Invariant: a child is confined only where it would find the same without: it gets no
//! redo log, so there may be none that a process has left (docs/decisions/0063).

use std::fs::{self, Metadata, OpenOptions};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use control::handed::{Listens, Message};
use control::{ImageName, redo_name};
use rustix::fs::{major, minor};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};
use rustix::process::geteuid;

/// The descriptors for a child.
pub struct Handing {
    messages: Vec<(Message, OwnedFd)>,
    ours: OwnedFd,
}

impl Handing {
    /// Opens the files of an image, for writing if `write`, and of its parents. Their names must be absolute. Returns
    /// with it the child's standard input.
    pub fn of(
        image: &ImageName,
        parents: &[ImageName],
        write: bool,
        listener: (&Path, OwnedFd),
    ) -> io::Result<(Handing, OwnedFd)> {
        let mut messages = Vec::new();
        let of_parents = parents.iter().map(|parent| (parent, false));
        for (name, write) in std::iter::once((image, write)).chain(of_parents) {
            for path in name.paths() {
                let file =
                    OpenOptions::new().read(true).write(write).open(path).map_err(|error| named(path, &error))?;
                messages.push((Message::File { path: path.to_owned(), write }, file.into()));
            }
        }
        let (path, socket) = listener;
        messages.push((Message::Socket { listens: Listens::Nbd, path: path.to_owned() }, socket));
        let (theirs, ours) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Handing { messages, ours }, theirs))
    }

    /// Sends everything to the child, which runs. Returns the end of its standard input, which it watches.
    pub fn send(self) -> io::Result<OwnedFd> {
        for (message, descriptor) in &self.messages {
            let descriptors = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
                return Err(io::Error::other("no space for one descriptor"));
            }
            self.packet(message, &mut ancillary)?;
        }
        self.packet(&Message::End, &mut SendAncillaryBuffer::default())?;
        Ok(self.ours)
    }

    fn packet(&self, message: &Message, ancillary: &mut SendAncillaryBuffer<'_, '_, '_>) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        sendmsg(&self.ours, &[IoSlice::new(&bytes)], ancillary, SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Whether a child can be confined that serves these images. Not one with a parent at an NBD server, to which it
/// connects, or whose path is not UTF-8, which a message cannot contain; nor while a process of this user that has died
/// has left a redo log, which may be that of one of the images under another name.
pub fn is_possible(images: &[&ImageName]) -> bool {
    let is_file = |name: &&ImageName| !name.is_at_server() && name.paths().all(|path| path.to_str().is_some());
    images.iter().all(is_file) && !has_left_logs(&redo_name::directory(geteuid().as_raw()))
}

/// Whether there is a redo log with content that no process holds; also if that cannot be found out. Nothing is locked
/// for it: a process that begins would find its own log in use.
fn has_left_logs(directory: &Path) -> bool {
    let look = || -> io::Result<bool> {
        for entry in directory.read_dir()? {
            let found = entry?.metadata()?;
            if found.len() > 0 && !is_held(&found, &fs::read_to_string("/proc/locks")?) {
                return Ok(true);
            }
        }
        Ok(false)
    };
    match look() {
        Ok(left) => left,
        Err(error) => error.kind() != io::ErrorKind::NotFound,
    }
}

/// Whether a process has locked a file by flock(2), according to `locks` (proc_locks(5)).
fn is_held(file: &Metadata, locks: &str) -> bool {
    let file = format!("{:02x}:{:02x}:{}", major(file.dev()), minor(file.dev()), file.ino());
    let is_its = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        words.next() == Some("FLOCK") && words.nth(3) == Some(&file)
    };
    locks.lines().any(is_its)
}

#[cfg(test)]
mod test {
    use std::fs::File;

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    #[test]
    fn only_a_log_with_content_that_no_process_holds_is_left() {
        // In memory, as the logs: other file systems have numbers that /proc/locks does not show.
        let room = tempfile::tempdir_in("/dev/shm").unwrap();
        let directory = room.path().join("redo");
        assert!(!has_left_logs(&directory));
        fs::create_dir(&directory).unwrap();
        File::create(directory.join("empty.redo")).unwrap();
        assert!(!has_left_logs(&directory));
        let log = directory.join("1-2.redo");
        fs::write(&log, "something").unwrap();
        assert!(has_left_logs(&directory));
        let held = File::open(&log).unwrap();
        flock(&held, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(!has_left_logs(&directory));
        fs::write(directory.join("file"), "").unwrap();
        assert!(has_left_logs(&directory.join("file")));
    }
}
