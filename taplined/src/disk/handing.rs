//! Passes open files and listening sockets to a disk process, over a socket that is its standard input.
//!
//! The process then needs no permission to open anything itself (`tapline-disk … --handed`). Each message is one
//! packet: a descriptor with a JSON object that says what it is.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;

use ::vm::xen::lend::Lent;
use ::vm::xen::statistics::Files;
use api::Problem;
use control::handed::{Listens, Message};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg, socketpair,
};

use super::control::PassedFile;
use super::redo::RedoLogs;

/// The files and sockets to be passed.
#[derive(Debug, Default)]
pub struct Handing {
    messages: Vec<(Message, OwnedFd)>,
    /// Image files; their redo logs are passed with them.
    files: Vec<PassedFile>,
    /// The process may connect to servers.
    network: bool,
}

/// The daemon's end of the socket, and the messages to send.
#[derive(Debug)]
pub struct Ready {
    messages: Vec<(Message, OwnedFd)>,
    ours: OwnedFd,
}

impl Handing {
    /// None yet, for a process that may connect to servers.
    pub fn with_network() -> Handing {
        Handing { network: true, ..Handing::default() }
    }

    /// Whether the process may connect to servers.
    pub fn has_network(&self) -> bool {
        self.network
    }

    /// Adds the image file that the command line names `path`.
    pub fn file(&mut self, path: &Path, write: bool, file: File) {
        self.files.push(PassedFile { path: path.to_owned(), write, file });
    }

    /// Adds a file that is not an image and has no redo log.
    pub fn plain(&mut self, path: &Path, write: bool, file: File) {
        self.messages.push((Message::File { path: path.to_owned(), write }, file.into()));
    }

    /// Adds a socket that already listens at `path`.
    pub fn listener(&mut self, listens: Listens, path: &Path, socket: OwnedFd) {
        self.messages.push((Message::Socket { listens, path: path.to_owned() }, socket));
    }

    /// Adds the Xen descriptors that the disk of a guest needs.
    pub fn lent(&mut self, lent: Lent) {
        let Lent { grants, channels, store, domains } = lent;
        use control::handed::Lent::{Domains, EventChannels, Grants, Store};
        let all = [(Grants, grants), (EventChannels, channels), (Store, store), (Domains, domains)];
        self.messages.extend(all.map(|(what, descriptor)| (Message::Xen(what), descriptor)));
    }

    /// Returns the standard input of the process, and the messages to be sent when it runs.
    pub fn prepare(self, redo: &RedoLogs) -> Result<(Stdio, Ready), Problem> {
        let logs = redo.of_handed(&self.files)?;
        let said = |PassedFile { path, write, file }| (Message::File { path, write }, OwnedFd::from(file));
        let messages = self.files.into_iter().chain(logs).map(said).chain(self.messages).collect();
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (theirs, ours) = pair.map_err(|errno| Problem::failed("create a socket to a disk process", errno))?;
        Ok((theirs.into(), Ready { messages, ours }))
    }
}

impl Ready {
    /// Adds the statistics files of a Xen guest's disk, whose names contain the pid.
    pub fn statistics(&mut self, files: Files) {
        use control::handed::Lent::{Statistics, StatisticsByPid};
        let all = [(Statistics, files.vbd3), (StatisticsByPid, files.td3)];
        self.messages.extend(all.map(|(what, file)| (Message::Xen(what), OwnedFd::from(file))));
    }

    /// Sends everything. Blocks while the process is slow to receive, and fails if it has exited. Returns the socket,
    /// over which the process may report progress.
    pub fn send(self) -> Result<OwnedFd, Problem> {
        for (said, descriptor) in &self.messages {
            let descriptors = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            if !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
                return Err(Problem::failed("pass a file to a disk process", "no space for one descriptor"));
            }
            self.packet(said, &mut ancillary)?;
        }
        self.packet(&Message::End, &mut SendAncillaryBuffer::default())?;
        Ok(self.ours)
    }

    fn packet(&self, said: &Message, ancillary: &mut SendAncillaryBuffer<'_, '_, '_>) -> Result<(), Problem> {
        // A path that is not UTF-8 cannot be encoded as JSON.
        let failed = |why: std::io::Error| Problem::failed("pass files to a disk process", why);
        let bytes = serde_json::to_vec(said).map_err(|error| failed(error.into()))?;
        let sent = sendmsg(&self.ours, &[IoSlice::new(&bytes)], ancillary, SendFlags::NOSIGNAL);
        sent.map(drop).map_err(|errno| failed(errno.into()))
    }
}

#[cfg(test)]
mod test {
    use std::io::IoSliceMut;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

    use super::*;
    use crate::config::Config;

    #[test]
    fn each_descriptor_is_sent_with_its_description() {
        let mut handing = Handing::default();
        let file = tempfile::tempfile().unwrap();
        handing.file(Path::new("/srv/a b.vhd"), true, file.try_clone().unwrap());
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let room = tempfile::tempdir().unwrap();
        let redo = RedoLogs::of(&Config { run_directory: room.path().to_owned(), ..Config::default() });
        let ready = Ready { ours: pair.0, ..handing.prepare(&redo).unwrap().1 };
        let _ours = ready.send().unwrap();

        let mut said = Vec::new();
        for _ in 0..3 {
            let mut bytes = [0; 4096];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let got = recvmsg(&pair.1, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::empty()).unwrap();
            let descriptors: usize = ancillary
                .drain()
                .map(|message| if let RecvAncillaryMessage::ScmRights(rights) = message { rights.count() } else { 0 })
                .sum();
            said.push((String::from_utf8(bytes[..got.bytes].to_vec()).unwrap(), descriptors));
        }
        assert_eq!(said.remove(0), (r#"{"file":"/srv/a b.vhd","write":true}"#.into(), 1));
        assert!(said[0].0.contains(".redo") && said[0].1 == 1, "its redo log: {said:?}");
        assert_eq!(said[1], (r#"{"end":true}"#.into(), 0));
    }

    #[test]
    fn an_exited_process_is_reported() {
        let mut handing = Handing::default();
        handing.file(Path::new("/a"), false, tempfile::tempfile().unwrap());
        let (theirs, ready) = handing.prepare(&RedoLogs::of(&Config::default())).unwrap();
        drop(theirs);
        assert!(ready.send().is_err());
    }
}
