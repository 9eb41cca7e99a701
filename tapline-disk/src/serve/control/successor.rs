//! The process that replaces this one: it is started and receives everything, or is stopped.
//!
//! It knows nothing about when that happens. Invariant: until the new process receives the message 'go', it has written
//! nothing and may exit at any moment.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Instant;

use control::Kind;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use transport::Handover;
use transport::vhost_user::Listener;

use super::blocking_task::BlockingTask;
use super::work::{Work, absolute};
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::serve::admission::share;
use crate::serve::handover::{Channel, ChannelError, Message};
use crate::serve::own_keys::SUCCESSOR;
use crate::serve::page;
use crate::serve::serial;

/// The new process.
#[derive(Debug)]
pub struct Successor {
    channel: Channel,
    /// The process, if it was started here.
    child: Option<Child>,
    /// Its pid, once it has sent hello.
    pub pid: u32,
    /// Its version, once it has sent hello.
    pub program: String,
}

/// The start of a program, in the background.
pub type Start = BlockingTask<std::io::Result<Child>>;

/// Why a handover has failed.
pub enum NotHanded {
    /// The channel to the new process failed.
    Successor(ChannelError),
    /// The disk could not be handed over.
    Disk(Failure),
}

/// The control socket to hand over.
#[derive(Debug)]
pub struct ControlSocket {
    socket: OwnedFd,
    bound: Option<(u64, u64)>,
}

impl ControlSocket {
    /// Duplicates the socket of a listener.
    pub fn of(listener: &Listener) -> std::io::Result<ControlSocket> {
        Ok(ControlSocket { socket: listener.fd().try_clone_to_owned()?, bound: listener.bound() })
    }
}

impl Successor {
    /// Connects to a process started by the client, over this socket.
    pub fn at(socket: OwnedFd, work: &mut Work<'_>) -> Result<Successor, Failure> {
        let channel = Channel::over(socket).map_err(|why| Failure::of(Kind::Invalid, why.to_string()))?;
        let watched = work.engine.watch(channel.as_fd(), false, SUCCESSOR.0);
        watched.map_err(|error| Failure::failed("wait for a new process", &error))?;
        Ok(Successor { channel, child: None, pid: 0, program: String::new() })
    }

    /// Starts a process with the arguments of this one. Its directory, environment, limits and log are inherited.
    pub fn start(program: &Path, work: &mut Work<'_>) -> Result<(Successor, Start), Failure> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) =
            pair.map_err(|errno| Failure::failed("create a socket to a new process", &errno.into()))?;
        let program = program.to_owned();
        let start = work.send(move || spawn(program, theirs))?;
        Ok((Successor::at(ours, work)?, start))
    }

    /// Records that the process was started.
    pub fn started(&mut self, child: std::io::Result<Child>) -> Result<(), Failure> {
        let failed = |error| Failure::failed("start the new program", &error).advise("the disk continues as before");
        self.child = Some(child.map_err(failed)?);
        Ok(())
    }

    /// Returns whether it has sent hello.
    pub fn has_sent_hello(&mut self) -> Result<bool, Failure> {
        match self.channel.try_receive() {
            Ok(None) => Ok(false),
            Ok(Some((Message::Hello { program, pid }, _))) => {
                (self.program, self.pid) = (program, pid);
                Ok(true)
            }
            Ok(Some((message, _))) => Err(self.no_hello(&ChannelError::Strange(format!("{message:?}")))),
            Err(why) => Err(self.no_hello(&why)),
        }
    }

    /// Explains that it did not send hello.
    pub fn no_hello(&mut self, why: &ChannelError) -> Failure {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        let what = match ended {
            Some(status) => format!("the new process exited with {status} before taking over"),
            None => format!("the new process did not start: {why}"),
        };
        let advice = "the disk continues as before; see its log, and check that the new program is tapline-disk";
        Failure::of(Kind::Failed, what).advise(advice)
    }

    /// Hands everything over until the deadline. Once the new process has received 'go', this cannot be undone.
    pub fn hand_over(
        &self,
        server: Handover,
        control: &ControlSocket,
        until: Instant,
        work: &mut Work<'_>,
    ) -> Result<(), NotHanded> {
        let send = |message: Message, descriptors: &[&dyn AsFd]| {
            let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            self.channel.send(&message, &descriptors, Some(until)).map_err(NotHanded::Successor)
        };
        for depth in 0..work.disk.layers().len() {
            let name = work.name(depth).map_err(NotHanded::Disk)?.to_string();
            let file = work.file(depth).map_err(NotHanded::Disk)?.1;
            let files: Vec<&dyn AsFd> = file.all_files().map(|file| -> &dyn AsFd { file }).collect();
            send(Message::Layer { name, write: file.options().write }, &files)?;
        }
        if let Some((path, file)) = work.changes.kept(work.disk) {
            let map = work.engine.file(file).ok_or_else(|| NotHanded::Disk(Failure::of(Kind::Failed, "no map")))?;
            send(Message::Changes { path: absolute(path) }, &[map])?;
        }
        for bitmap in work.changes.bitmaps.all() {
            let failed = |error| NotHanded::Disk(Failure::failed("hand over a dirty bitmap", &error));
            let file = bitmap.to_pass().map_err(failed)?;
            let file: Vec<&dyn AsFd> = file.iter().map(|file| -> &dyn AsFd { file }).collect();
            let over = !file.is_empty();
            send(Message::Bitmap { name: bitmap.name.clone(), over, rest: bitmap.rest }, &file)?;
        }
        let logs = redo_log::logs_to_pass();
        let logs = logs.map_err(|error| NotHanded::Disk(Failure::failed("hand over a redo log", &error)))?;
        for (name, log) in logs {
            send(Message::Log { name }, &[&log])?;
        }
        if let Some(file) = work.page.file() {
            send(Message::Log { name: page::NAME.into() }, &[file])?;
        }
        if let Some(file) = work.admission.limiter.sharing().and_then(|sharing| sharing.file()) {
            send(Message::Log { name: share::NAME.into() }, &[file])?;
        }
        send(Message::Limits(Box::new(work.admission.limiter.handed())), &[])?;
        send(Message::Shape(Box::new(work.shaping.clone())), &[])?;
        // Requests that wait for space stay with their guest, and arrive at the new process again.
        let (mut counters, started) = (work.counters(), work.stats.started());
        let came = |taken: u64| taken.saturating_sub(started);
        work.admission
            .waiting_for_space()
            .for_each(|request| counters.given_back(request.operation(), came(request.taken)));
        send(Message::Counters(Box::new(counters)), &[])?;
        send(Message::Listener { control: true, bound: control.bound }, &[&control.socket])?;
        send(Message::Listener { control: false, bound: server.bound }, &[&server.listener])?;
        for parcel in server.peers {
            let descriptors = parcel.descriptors.iter().map(|descriptor| descriptor as &dyn AsFd);
            send(Message::Peer { bytes: parcel.bytes }, &descriptors.collect::<Vec<_>>())?;
        }
        send(Message::All, &[])?;
        match self.channel.receive(Some(until)).map_err(NotHanded::Successor)? {
            (Message::Taken, _) => {}
            (message, _) => return Err(NotHanded::Successor(ChannelError::Strange(format!("{message:?}")))),
        }
        if Instant::now() >= until {
            return Err(NotHanded::Successor(ChannelError::Late));
        }
        if let Some(log) = work.disk.leaf_log() {
            // This process ends normally.
            log.note_in_flight(work.admission.left_in_quarantine());
        }
        send(Message::Go, &[])?;
        *work.replaced = true;
        Ok(())
    }

    /// Ends a process that is not needed.
    pub fn end(&mut self, work: &mut Work<'_>) {
        work.engine.forget(SUCCESSOR.0);
        // A process that has exited receives nothing.
        self.channel.send(&Message::Stay, &[], Some(Instant::now())).ok();
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap_or_default();
            // A process that waits for storage ends when that responds; our guest does not wait for it.
            if !matches!(child.try_wait(), Ok(Some(_))) {
                std::thread::spawn(move || child.wait());
            }
        }
    }
}

/// Starts the program with the arguments of this process. The serial number is added, because it was derived from
/// layers that may have changed.
fn spawn(program: PathBuf, socket: OwnedFd) -> std::io::Result<Child> {
    let option = OsString::from("--take-over");
    let arguments = std::env::args_os().skip(1).filter(|other| *other != option);
    let mut command = Command::new(program);
    command.args(arguments).arg(&option).stdin(socket);
    if let Some(serial) = serial::in_force().filter(|_| !std::env::args_os().any(|other| is_serial(&other))) {
        command.args(["--serial", serial]);
    }
    command.spawn()
}

fn is_serial(word: &OsStr) -> bool {
    word == "--serial" || word.as_encoded_bytes().starts_with(b"--serial=")
}
