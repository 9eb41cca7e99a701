//! A daemon's part for a disk process: opens its files, listens for it, and passes the descriptors.

#![allow(dead_code, reason = "each test uses its part")]

use std::fs::{DirBuilder, File};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};
use serde_json::{Value, json};

use super::served::Disk;
use super::{Room, Said, TAPLINE};

/// The directory of the files as named to the process. Nothing is there.
pub const NOWHERE: &str = "/nowhere";

/// A file to be passed.
pub struct Handed {
    pub path: String,
    pub write: bool,
    pub descriptor: OwnedFd,
}

impl Handed {
    /// Opens a file of the room, under a path that does not exist.
    pub fn open(room: &Room, file: &str, write: bool) -> Handed {
        let descriptor = File::options().read(true).write(write).open(room.file(file)).unwrap().into();
        Handed { path: format!("{NOWHERE}/{file}"), write, descriptor }
    }

    /// Creates an empty file, like a daemon.
    pub fn create(room: &Room, file: &str) -> Handed {
        File::create_new(room.file(file)).unwrap();
        Handed::open(room, file, true)
    }

    /// Opens the redo log of a file, where processes without passed files find it too.
    pub fn redo_log(room: &Room, file: &str) -> Handed {
        let path = room.redo_log_path(file);
        DirBuilder::new().recursive(true).mode(0o700).create(room.file("redo")).unwrap();
        let log = File::options().read(true).write(true).create(true).truncate(false).open(&path).unwrap();
        Handed { path: path.to_str().unwrap().into(), write: true, descriptor: log.into() }
    }

    pub fn described(&self) -> Value {
        json!({ "path": self.path, "write": self.write })
    }
}

/// Sends bytes and descriptors at once.
pub fn send_with_descriptors(socket: &impl AsFd, text: &str, descriptors: &[&OwnedFd]) {
    let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(128))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    }
    // The test notices if the peer has exited already.
    sendmsg(socket, &[IoSlice::new(text.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL).ok();
}

/// A command, and the daemon's end of the socket through which it receives files.
pub struct Hand {
    pub command: Command,
    daemon: OwnedFd,
}

impl Hand {
    /// A command with `--handed`.
    pub fn to(words: &str) -> Hand {
        Hand::to_program(Path::new(TAPLINE), words)
    }

    /// A command with a copy of the program.
    pub fn to_program(program: &Path, words: &str) -> Hand {
        let (daemon, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let mut command = Command::new(program);
        command.args(words.split_whitespace()).arg("--handed").stdin(Stdio::from(theirs));
        Hand { command, daemon }
    }

    pub fn file(self, file: &Handed) -> Hand {
        let text = json!({ "file": file.path, "write": file.write }).to_string();
        self.message(&text, &[&file.descriptor])
    }

    pub fn files(self, files: &[Handed]) -> Hand {
        files.iter().fold(self, Hand::file)
    }

    /// Listens in the room, and passes the socket under a path that does not exist.
    pub fn listen(self, room: &Room, what: &str, socket: &str) -> Hand {
        let listener = OwnedFd::from(UnixListener::bind(room.file(socket)).unwrap());
        let text = json!({ "listen": what, "path": format!("{NOWHERE}/{socket}") }).to_string();
        self.message(&text, &[&listener])
    }

    pub fn message(self, text: &str, descriptors: &[&OwnedFd]) -> Hand {
        send_with_descriptors(&self.daemon, text, descriptors);
        self
    }

    /// Returns a job with all of its files passed, for a test that runs it itself, and the daemon's end of the socket,
    /// which can end it.
    pub fn apart(self) -> (Command, OwnedFd) {
        let Hand { command, daemon } = self.message(r#"{"end":true}"#, &[]);
        (command, daemon)
    }

    /// Runs a job to its end.
    pub fn run(self) -> Said {
        let Hand { mut command, daemon } = self.message(r#"{"end":true}"#, &[]);
        let said = Said::of(&command.output().unwrap());
        drop(daemon);
        said
    }

    /// Runs a job that must succeed; returns its output.
    pub fn done(self) -> String {
        let said = self.run();
        assert_eq!(said.code, Some(0), "{said:?}");
        said.out
    }

    /// Serves a disk.
    pub fn serve(self) -> Disk {
        let Hand { command, daemon } = self.message(r#"{"end":true}"#, &[]);
        let disk = Disk::start(command);
        assert!(Path::new(NOWHERE).symlink_metadata().is_err());
        drop(daemon);
        disk
    }
}
