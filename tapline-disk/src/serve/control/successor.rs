//! The process that replaces this one: it is started and receives everything, or is stopped.
//!
//! It knows nothing about when that happens. Invariant: until the new process is told to go, it has written nothing and
//! may exit at any moment.

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
use super::work::Work;
use crate::image::redo_log;
use crate::process::failure::Failure;
use crate::serve::admission::share;
use crate::serve::handover::{Channel, ChannelError, Said};
use crate::serve::own_keys::SUCCESSOR;
use crate::serve::page;
use crate::serve::serial;

/// The new process.
#[derive(Debug)]
pub struct Successor {
    channel: Channel,
    /// If it was started here.
    child: Option<Child>,
    /// Its pid and version, once it has said hello.
    pub pid: u32,
    /// See [`Successor::pid`].
    pub program: String,
}

/// The start of a program, in the background.
pub type Start = BlockingTask<std::io::Result<Child>>;

/// Why nothing was handed over.
pub enum NotHanded {
    /// By the new process.
    Successor(ChannelError),
    /// By the disk.
    Disk(Failure),
}

/// The control socket, as it is handed over.
#[derive(Debug)]
pub struct ControlSocket {
    socket: OwnedFd,
    bound: Option<(u64, u64)>,
}

impl ControlSocket {
    /// That of a listener.
    pub fn of(listener: &Listener) -> std::io::Result<ControlSocket> {
        Ok(ControlSocket { socket: listener.fd().try_clone_to_owned()?, bound: listener.bound() })
    }
}

impl Successor {
    /// A process started by the client, at the other end of this socket.
    pub fn at(socket: OwnedFd, work: &mut Work<'_>) -> Result<Successor, Failure> {
        let channel = Channel::over(socket).map_err(|why| Failure::of(Kind::Invalid, why.to_string()))?;
        let watched = work.engine.watch(channel.as_fd(), false, SUCCESSOR.0);
        watched.map_err(|error| Failure::failed("wait for a new process", &error))?;
        Ok(Successor { channel, child: None, pid: 0, program: String::new() })
    }

    /// One that is being started here, with the words of this process. Its directory, environment, limits and log are
    /// those of this process.
    pub fn start(program: &Path, work: &mut Work<'_>) -> Result<(Successor, Start), Failure> {
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (ours, theirs) =
            pair.map_err(|errno| Failure::failed("create a socket to a new process", &errno.into()))?;
        let program = program.to_owned();
        let start = work.send(move || spawn(program, theirs))?;
        Ok((Successor::at(ours, work)?, start))
    }

    /// It was started.
    pub fn started(&mut self, child: std::io::Result<Child>) -> Result<(), Failure> {
        let failed = |error| Failure::failed("start the new program", &error).advise("the disk continues as before");
        self.child = Some(child.map_err(failed)?);
        Ok(())
    }

    /// Whether it has said hello.
    pub fn is_here(&mut self) -> Result<bool, Failure> {
        match self.channel.hear_now() {
            Ok(None) => Ok(false),
            Ok(Some((Said::Hello { program, pid }, _))) => {
                (self.program, self.pid) = (program, pid);
                Ok(true)
            }
            Ok(Some((said, _))) => Err(self.not_come(&ChannelError::Strange(format!("{said:?}")))),
            Err(why) => Err(self.not_come(&why)),
        }
    }

    /// It did not say hello.
    pub fn not_come(&mut self, why: &ChannelError) -> Failure {
        let ended = self.child.as_mut().and_then(|child| child.try_wait().ok().flatten());
        let what = match ended {
            Some(status) => format!("the new process exited with {status} before taking over"),
            None => format!("the new process did not start: {why}"),
        };
        let advice = "the disk continues as before; see its log, and check that the new program is tapline-disk";
        Failure::of(Kind::Failed, what).advise(advice)
    }

    /// Hands everything over until then. Once the new process is told to go there is no way back.
    pub fn hand_over(
        &self,
        server: Handover,
        control: &ControlSocket,
        until: Instant,
        work: &mut Work<'_>,
    ) -> Result<(), NotHanded> {
        let say = |said: Said, descriptors: &[&dyn AsFd]| {
            let descriptors: Vec<_> = descriptors.iter().map(|descriptor| descriptor.as_fd()).collect();
            self.channel.say(&said, &descriptors, Some(until)).map_err(NotHanded::Successor)
        };
        for depth in 0..work.disk.layers().len() {
            let name = work.name(depth).map_err(NotHanded::Disk)?.to_string();
            let file = work.file(depth).map_err(NotHanded::Disk)?.1;
            let files: Vec<&dyn AsFd> = file.all_files().map(|file| -> &dyn AsFd { file }).collect();
            say(Said::Layer { name, write: file.options().write }, &files)?;
        }
        let logs = redo_log::to_be_handed();
        let logs = logs.map_err(|error| NotHanded::Disk(Failure::failed("hand over a redo log", &error)))?;
        for (name, log) in logs {
            say(Said::Log { name }, &[&log])?;
        }
        if let Some(file) = work.page.file() {
            say(Said::Log { name: page::NAME.into() }, &[file])?;
        }
        if let Some(file) = work.admission.limiter.sharing().and_then(|sharing| sharing.file()) {
            say(Said::Log { name: share::NAME.into() }, &[file])?;
        }
        say(Said::Limits(Box::new(work.admission.limiter.handed())), &[])?;
        say(Said::Shape(Box::new(work.shaping.clone())), &[])?;
        // What waits for space stays with its guest, and comes to the new process again.
        let (mut counters, started) = (work.counters(), work.stats.started());
        let came = |taken: u64| taken.saturating_sub(started);
        work.admission
            .waiting_for_space()
            .for_each(|request| counters.given_back(request.operation(), came(request.taken)));
        say(Said::Counters(Box::new(counters)), &[])?;
        say(Said::Listener { control: true, bound: control.bound }, &[&control.socket])?;
        say(Said::Listener { control: false, bound: server.bound }, &[&server.listener])?;
        for parcel in server.peers {
            let beside = parcel.descriptors.iter().map(|descriptor| descriptor as &dyn AsFd);
            say(Said::Peer { bytes: parcel.bytes }, &beside.collect::<Vec<_>>())?;
        }
        say(Said::All, &[])?;
        match self.channel.hear(Some(until)).map_err(NotHanded::Successor)? {
            (Said::Taken, _) => {}
            (said, _) => return Err(NotHanded::Successor(ChannelError::Strange(format!("{said:?}")))),
        }
        if Instant::now() >= until {
            return Err(NotHanded::Successor(ChannelError::Late));
        }
        if let Some(log) = work.disk.leaf_log() {
            // This process ends well, and has died of nothing.
            log.note_in_flight(work.admission.left_in_quarantine());
        }
        say(Said::Go, &[])?;
        *work.replaced = true;
        Ok(())
    }

    /// It is not needed.
    pub fn end(&mut self, work: &mut Work<'_>) {
        work.engine.forget(SUCCESSOR.0);
        // One that has ended hears nothing.
        self.channel.say(&Said::Stay, &[], Some(Instant::now())).ok();
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap_or_default();
            // One that waits for its storage ends when that answers, and our guest does not wait for it.
            if !matches!(child.try_wait(), Ok(Some(_))) {
                std::thread::spawn(move || child.wait());
            }
        }
    }
}

/// Starts the program with the words of this one. What followed from its layers when it was started is said: they may
/// be others now.
fn spawn(program: PathBuf, socket: OwnedFd) -> std::io::Result<Child> {
    let word = OsString::from("--take-over");
    let words = std::env::args_os().skip(1).filter(|other| *other != word);
    let mut command = Command::new(program);
    command.args(words).arg(&word).stdin(socket);
    if let Some(serial) = serial::in_force().filter(|_| !std::env::args_os().any(|other| is_serial(&other))) {
        command.args(["--serial", serial]);
    }
    command.spawn()
}

fn is_serial(word: &OsStr) -> bool {
    word == "--serial" || word.as_encoded_bytes().starts_with(b"--serial=")
}
