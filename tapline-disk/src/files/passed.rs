//! The descriptors passed to a process started with `--handed`, before it does anything: open files and listening
//! sockets, one per message, on standard input, which is a SOCK_SEQPACKET socket.
//!
//! It knows nothing about images, and opens nothing. Invariant: each descriptor is what its message says, was expected,
//! and occurs once; anything else ends the process before it has begun.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use control::Kind;
use control::handed::{Lent, Message};
use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SocketType, recvmsg, sockopt,
};
use uring::AccessMode;

use crate::files::{Handed, HandedFile};
use crate::process::failure::Failure;

/// Maximum length of a message; the longest contain one path.
pub const MESSAGE_MAX: usize = 64 << 10;

/// Maximum number of descriptors: a chain has at most [`disk::LAYERS_MAX`] layers, each perhaps once for reading and
/// once for writing; a daemon joins up to 200 maps of changed blocks.
const DESCRIPTORS_MAX: usize = 512;

/// Receives everything up to the end message.
pub fn receive(socket: impl AsFd) -> Result<Handed, Failure> {
    if sockopt::socket_type(&socket) != Ok(SocketType::SEQPACKET) {
        return Err(refused("standard input is not a SOCK_SEQPACKET socket"));
    }
    let mut files = Handed::default();
    let mut buffer = vec![0; MESSAGE_MAX];
    for number in 1..=DESCRIPTORS_MAX {
        let in_message = |why: String| refused(format!("message {number}: {why}"));
        let (len, descriptors) = next(&socket, &mut buffer).map_err(in_message)?;
        let bytes = buffer.get(..len).unwrap_or_default();
        let means = serde_json::from_slice(bytes).map_err(|error| in_message(error.to_string()))?;
        if means == Message::End && descriptors.is_empty() {
            return Ok(files);
        }
        take(&mut files, means, descriptors).map_err(in_message)?;
    }
    Err(refused(format!("there were {DESCRIPTORS_MAX} messages, and the last one was not 'end'")))
}

fn refused(why: impl Into<String>) -> Failure {
    Failure::new("receive files and sockets", why.into())
        .advise("with --handed, the parent process must send them on standard input: see docs/control.md")
        .of_kind(Kind::Invalid)
}

/// Receives one message; returns its length and its descriptors.
pub fn next(socket: &impl AsFd, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), String> {
    // Space for one more descriptor than allowed, to detect a second one.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut into = [IoSliceMut::new(buffer)];
        match recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received.map_err(|errno| std::io::Error::from(errno).to_string())?,
        }
    };
    let descriptors = descriptors_of(&mut ancillary);
    match () {
        () if received.flags.contains(ReturnFlags::TRUNC) => Err(format!("it is longer than {MESSAGE_MAX} bytes")),
        () if received.flags.contains(ReturnFlags::CTRUNC) => Err("more than one descriptor came with it".into()),
        () if received.bytes == 0 => Err("the connection was closed before the message that ends it".into()),
        () => Ok((received.bytes, descriptors)),
    }
}

/// Returns the descriptors of a message; other ancillary data is ignored.
pub fn descriptors_of(ancillary: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            descriptors.extend(came);
        }
    }
    descriptors
}

fn take(files: &mut Handed, means: Message, descriptors: Vec<OwnedFd>) -> Result<(), String> {
    let wanted = usize::from(means != Message::End);
    let came = descriptors.len();
    match (means, descriptors.into_iter().next()) {
        (Message::File { path, write }, Some(descriptor)) if came == wanted => {
            files.add(HandedFile::checked(path, write, descriptor)?)
        }
        (Message::Socket { listens, path }, Some(descriptor)) if came == wanted => {
            check_listener(&path, &descriptor)?;
            files.add_listener(listens, path, descriptor)
        }
        (Message::Xen(lent), Some(descriptor)) if came == wanted => {
            check_lent(lent, &descriptor)?;
            files.add_lent(lent, descriptor)
        }
        _ => Err(format!("{came} descriptors came with it, expected {wanted}")),
    }
}

impl HandedFile {
    /// Checks that the descriptor is a file and open for exactly this use.
    pub fn checked(path: PathBuf, write: bool, descriptor: OwnedFd) -> Result<HandedFile, String> {
        let name = path.display();
        let failed =
            |errno: Errno| format!("cannot examine the descriptor passed for {name}: {}", std::io::Error::from(errno));
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&descriptor).map_err(failed)?.st_mode);
        if !matches!(kind, FileType::RegularFile | FileType::BlockDevice) {
            return Err(format!("the descriptor passed for {name} is neither a file nor a block device"));
        }
        let wanted = if write { AccessMode::Writing } else { AccessMode::Reading };
        match uring::access_mode(&descriptor) {
            Some(found) if found == wanted => Ok(HandedFile { path, write, descriptor }),
            Some(found) => Err(format!("the descriptor passed for {name} for {wanted} is open for {found}")),
            None => Err(format!("the descriptor passed for {name} is open write-only, for appending or as O_PATH")),
        }
    }
}

fn check_listener(path: &Path, socket: &OwnedFd) -> Result<(), String> {
    let wanted = sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(socket) == Ok(true);
    match wanted {
        true => Ok(()),
        false => Err(format!("the descriptor passed for {} is not a listening Unix stream socket", path.display())),
    }
}

/// Checks that the descriptor is a device of the kernel, or, for xenstore, possibly a socket.
fn check_lent(lent: Lent, descriptor: &OwnedFd) -> Result<(), String> {
    let failed =
        |errno: Errno| format!("cannot examine the descriptor passed for {lent:?}: {}", std::io::Error::from(errno));
    let kind = FileType::from_raw_mode(rustix::fs::fstat(descriptor).map_err(failed)?.st_mode);
    let may_be_a_socket = matches!(lent, Lent::Store | Lent::Domains);
    if matches!(lent, Lent::Statistics | Lent::StatisticsByPid) {
        return match (kind, uring::access_mode(descriptor)) {
            (FileType::RegularFile, Some(AccessMode::Writing)) => Ok(()),
            _ => Err(format!("the descriptor passed for {lent:?} is not a file open for writing")),
        };
    }
    match kind {
        FileType::CharacterDevice => Ok(()),
        FileType::Socket if may_be_a_socket && sockopt::socket_type(descriptor) == Ok(SocketType::STREAM) => Ok(()),
        _ if may_be_a_socket => Err(format!("the descriptor passed for {lent:?} is not a xenstore connection")),
        _ => Err(format!("the descriptor passed for {lent:?} is not a device")),
    }
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::IoSlice;
    use std::os::unix::net::UnixListener;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, sendmsg, socketpair};

    use super::*;

    struct Bed {
        room: tempfile::TempDir,
        ours: OwnedFd,
        theirs: OwnedFd,
    }

    fn bed() -> Bed {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let room = tempfile::tempdir().unwrap();
        std::fs::write(room.path().join("image"), [0; 512]).unwrap();
        Bed { room, ours, theirs }
    }

    impl Bed {
        fn open(&self, write: bool) -> OwnedFd {
            File::options().read(true).write(write).open(self.room.path().join("image")).unwrap().into()
        }

        fn send(&self, text: &str, descriptors: &[&OwnedFd]) {
            let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !descriptors.is_empty() {
                assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
            }
            sendmsg(&self.theirs, &[IoSlice::new(text.as_bytes())], &mut ancillary, SendFlags::empty()).unwrap();
        }

        /// Returns the result of the messages sent so far, followed by the end message.
        fn outcome(self) -> Result<Handed, String> {
            self.send(r#"{"end":true}"#, &[]);
            drop(self.theirs);
            receive(&self.ours).map_err(|failure| {
                assert_eq!(failure.kind(), Kind::Invalid);
                failure.what().to_owned()
            })
        }
    }

    #[test]
    fn a_file_may_be_passed_for_reading_and_writing_and_a_socket_per_use() {
        let bed = bed();
        bed.send(r#"{"file":"/a","write":false}"#, &[&bed.open(false)]);
        bed.send(r#"{"file":"/a","write":true}"#, &[&bed.open(true)]);
        let listener = OwnedFd::from(UnixListener::bind(bed.room.path().join("socket")).unwrap());
        bed.send(r#"{"listen":"vhost-user","path":"/s"}"#, &[&listener]);
        bed.send(r#"{"listen":"control","path":"/s"}"#, &[&listener]);
        // Xen's descriptors are devices and a connection.
        let device = OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
        let connection = OwnedFd::from(std::os::unix::net::UnixStream::pair().unwrap().0);
        for (what, lent) in
            [("grants", &device), ("event-channels", &device), ("store", &connection), ("domains", &device)]
        {
            bed.send(&format!(r#"{{"xen":"{what}"}}"#), &[lent]);
        }
        bed.send(r#"{"xen":"statistics"}"#, &[&bed.open(true)]);
        bed.send(r#"{"xen":"statistics-by-pid"}"#, &[&bed.open(true)]);
        bed.outcome().unwrap();
    }

    #[test]
    fn every_invalid_message_is_rejected() {
        let long = format!(r#"{{"file":"/{}"}}"#, "a".repeat(MESSAGE_MAX));
        let cases: [(&str, &[bool], &str); 18] = [
            (r#"{"file":"/a","write":true}"#, &[], "0 descriptors"),
            (r#"{"file":"/a","write":true}"#, &[true, true], "2 descriptors"),
            (r#"{"file":"/a","write":true}"#, &[true; 8], "more than one descriptor"),
            (r#"{"file":"/a","write":true}"#, &[false], "open for reading"),
            (r#"{"file":"/a","write":false}"#, &[true], "open for writing"),
            (r#"{"file":"/a"}"#, &[true], "it must have 'file' and 'write'"),
            (r#"{"file":"a","write":true}"#, &[true], "an absolute path"),
            (r#"{"file":"/a","write":true,"cache":"none"}"#, &[true], "cache"),
            (r#"{"listen":"nbd","path":"/a"}"#, &[true], "not a listening Unix stream socket"),
            (r#"{"listen":"http","path":"/a"}"#, &[true], "http"),
            (r#"{"xen":"grants"}"#, &[true], "not a device"),
            (r#"{"xen":"statistics"}"#, &[false], "not a file open for writing"),
            (r#"{"xen":"store"}"#, &[true], "not a xenstore connection"),
            (r#"{"xen":"store","path":"/a"}"#, &[true], "it must have 'file' and 'write'"),
            (r#"{"end":true}"#, &[true], "1 descriptors"),
            (r#"{"end":false}"#, &[], "it must have"),
            ("{", &[], "EOF"),
            (&long, &[], "longer than 65536 bytes"),
        ];
        for (text, descriptors, why) in cases {
            let bed = bed();
            let descriptors: Vec<OwnedFd> = descriptors.iter().map(|&write| bed.open(write)).collect();
            bed.send(text, &descriptors.iter().collect::<Vec<_>>());
            let said = bed.outcome().unwrap_err();
            assert!(said.contains("message 1") && said.contains(why), "{text:.60}: {said}");
        }
    }

    #[test]
    fn duplicate_files_and_a_closed_connection_are_rejected() {
        let one = bed();
        (0..2).for_each(|_| one.send(r#"{"file":"/a","write":true}"#, &[&one.open(true)]));
        assert!(one.outcome().unwrap_err().contains("/a for writing was passed twice"));
        let other = bed();
        drop(other.theirs);
        assert!(receive(&other.ours).unwrap_err().what().contains("closed before"));
        let file = other.room.path().join("image");
        assert!(receive(File::open(file).unwrap()).unwrap_err().what().contains("not a SOCK_SEQPACKET socket"));
    }

    #[test]
    fn files_open_for_appending_or_write_only_are_rejected() {
        for mut options in [File::options().append(true).to_owned(), File::options().write(true).to_owned()] {
            let bed = bed();
            let file = OwnedFd::from(options.open(bed.room.path().join("image")).unwrap());
            options.create(false);
            bed.send(r#"{"file":"/a","write":true}"#, &[&file]);
            assert!(bed.outcome().unwrap_err().contains("write-only, for appending"));
        }
    }
}
