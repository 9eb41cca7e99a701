//! An image that is served over NBD by a child, `tapline-disk`, for as long as this process needs it.
//!
//! Invariant: the child ends with this process, whatever that dies of: it watches the other end of its standard input.
//! It parses images that anybody may have written, so it is confined where that is possible (`handing`), and never
//! finds the keys of a bucket in its environment. It is in a process group of its own, so that Ctrl-C ends this process
//! first, which then ends the child.

mod handing;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use control::ImageName;
use nbd::uri::{Place, Uri};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::failure::{Exit, Failure};
use crate::stop;
use handing::Handing;

const PROGRAM: &str = "tapline-disk";
const SOCKET: &str = "nbd.sock";
const PROBE_EVERY: Duration = Duration::from_millis(5);

/// A served image.
pub struct Served {
    child: Child,
    /// Its standard input, which must outlive it: waiting closes one that is left in `child`.
    #[expect(dead_code, reason = "held until it is dropped")]
    input: Option<OwnedFd>,
    image: ImageName,
    /// Its socket and its messages.
    room: TempDir,
}

impl Served {
    /// Starts to serve an image, and waits until clients can connect.
    pub fn start(image: &ImageName, parents: &[String], write: bool) -> Result<Served, Failure> {
        let failed = |error: io::Error| Failure::cannot(format_args!("serve {image}"), error);
        let room = tempfile::Builder::new().prefix("tapline-backup-").tempdir().map_err(failed)?;
        let log = File::create(room.path().join("log")).map_err(failed)?;
        let parents = parents.iter().map(|parent| parent.parse()).collect::<Result<Vec<ImageName>, _>>();
        let parents = parents.map_err(|error| Failure::new(Exit::Usage, error.to_string()))?;
        let absolute = |name: &ImageName| name.map_paths(|path| std::path::absolute(path));
        let opened = absolute(image).map_err(failed)?;
        let parents = parents.iter().map(absolute).collect::<io::Result<Vec<ImageName>>>().map_err(failed)?;

        let socket = room.path().join(SOCKET);
        let mut command = program()?;
        command.arg("serve").arg(opened.word()).arg("--nbd").arg(&socket);
        for parent in &parents {
            command.arg("--parent").arg(parent.word());
        }
        if !write {
            command.arg("--read-only");
        }
        // Through the page cache: not all file systems have O_DIRECT, with which the sector size of the storage would
        // also be that of the disk.
        command.args(["--cache", "writeback", "--end-with-input"]);
        command.stdout(Stdio::null()).stderr(log).process_group(0);
        let all: Vec<&ImageName> = std::iter::once(&opened).chain(&parents).collect();
        let (child, input) = match handing::is_possible(&all) {
            true => {
                command.args(["--handed", "--confine", "--unknown"]);
                let listener = UnixListener::bind(&socket).map_err(failed)?;
                let handing = Handing::of(&opened, &parents, write, (&socket, listener.into()));
                let (handing, stdin) = handing.map_err(failed)?;
                let child = command.stdin(stdin).spawn().map_err(failed)?;
                // Our copy of its end.
                drop(command);
                // The messages of one that refuses them say why.
                (child, handing.send())
            }
            false => {
                let mut child = command.stdin(Stdio::piped()).spawn().map_err(failed)?;
                let input = child.stdin.take().map(OwnedFd::from);
                (child, input.ok_or_else(|| io::Error::other("it has no standard input")))
            }
        };
        // If it could not be sent everything, it ends.
        let (input, sent) = match input {
            Ok(input) => (Some(input), Ok(())),
            Err(error) => (None, Err(error)),
        };
        let mut served = Served { child, input, image: image.clone(), room };
        served.wait_until_served().and_then(|()| sent.map_err(failed))?;
        Ok(served)
    }

    /// Waits until it answers or ends; it opens storage, which may take any time. A client can connect before that.
    fn wait_until_served(&mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::cannot("wait for tapline-disk", error);
        let mut connected: Option<UnixStream> = None;
        loop {
            if let Some(status) = self.child.try_wait().map_err(failed)? {
                return Err(self.refused(status));
            }
            if stop::cancelled().load(Ordering::Relaxed) {
                return Err(backup::Error::Cancelled.into());
            }
            let Some(stream) = &mut connected else {
                match UnixStream::connect(self.socket()) {
                    Ok(stream) => {
                        stream.set_read_timeout(Some(PROBE_EVERY)).map_err(failed)?;
                        connected = Some(stream);
                    }
                    Err(_) => std::thread::sleep(PROBE_EVERY),
                }
                continue;
            };
            match stream.read(&mut [0]) {
                // The first byte of its greeting.
                Ok(1..) => return Ok(()),
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Ok(_) | Err(_) => connected = None,
            }
        }
    }

    fn socket(&self) -> PathBuf {
        self.room.path().join(SOCKET)
    }

    /// The export of the image.
    pub fn uri(&self) -> Result<Uri, Failure> {
        let text = nbd::uri::of_socket(&self.socket());
        let uri: Result<Uri, _> = text.parse();
        let is_right = |uri: &Uri| matches!(&uri.place, Place::Unix(path) if *path == self.socket());
        uri.ok().filter(is_right).ok_or_else(|| Failure::new(Exit::Failed, format!("cannot name the socket {text}")))
    }

    /// Ends the child, and waits until it has closed the image.
    pub fn end(mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::cannot("wait for tapline-disk", error);
        self.signal(Signal::TERM);
        let status = self.child.wait().map_err(failed)?;
        if status.success() { Ok(()) } else { Err(self.refused(status)) }
    }

    fn signal(&self, signal: Signal) {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // It has ended already.
            kill_process(pid, signal).unwrap_or_default();
        }
    }

    /// The reason that the child gave: its messages begin with the name of the program, like ours.
    fn refused(&self, status: ExitStatus) -> Failure {
        let said = fs::read_to_string(self.room.path().join("log")).unwrap_or_default();
        reported(&format!("serve {}", self.image), &said, status)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.signal(Signal::TERM);
            // It cannot be left running: its socket is removed.
            self.child.wait().map(drop).unwrap_or_default();
        }
    }
}

/// Creates an image, which must not exist.
pub fn create(image: &ImageName, len: u64) -> Result<(), Failure> {
    let mut command = program()?;
    command.args(["image", "create", &image.to_string(), "--size", &len.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let output = command.output().map_err(|error| Failure::cannot(format_args!("create {image}"), error))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(reported(&format!("create {image}"), &String::from_utf8_lossy(&output.stderr), output.status)),
    }
}

fn program() -> Result<Command, Failure> {
    match control::installed::program(PROGRAM) {
        Ok(path) => {
            let mut command = Command::new(path);
            // It parses images that anybody may have written: keys to a bucket are not for it.
            for (name, _) in std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"AWS_")) {
                command.env_remove(name);
            }
            Ok(command)
        }
        Err(error) => Err(Failure::cannot(format_args!("run {PROGRAM}"), error)
            .advise(format!("install {PROGRAM} in the directory of tapline-backup or in the PATH"))),
    }
}

fn reported(tried: &str, said: &str, status: ExitStatus) -> Failure {
    let lines: Vec<&str> = said.lines().map(without_name).collect();
    let advice = lines.iter().filter_map(|line| line.strip_prefix("  ")).next_back();
    let why = lines.iter().rfind(|line| !line.starts_with("  ") && !line.is_empty());
    let failure = Failure::new(
        Exit::Failed,
        match why {
            Some(why) => format!("cannot {tried}: {why}"),
            None => format!("cannot {tried}: {PROGRAM} has ended ({status})"),
        },
    );
    match advice {
        Some(advice) => failure.advise(advice),
        None => failure,
    }
}

/// A line without the name of the program, which stands before ours, too.
fn without_name(line: &str) -> &str {
    let names = ["tapline-disk: ", "tapline: "];
    names.iter().find_map(|name| line.strip_prefix(name)).unwrap_or(line)
}
