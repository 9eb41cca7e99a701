//! An image that is served over NBD by a child, `tapline-disk`, for as long as this process needs it.
//!
//! Invariant: the child ends with this process, whatever that dies of: it watches the other end of its standard input.
//! It is in a process group of its own, so that Ctrl-C ends this process first, which then ends the child.

use std::fs::{self, File};
use std::io;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use control::ImageName;
use nbd::uri::{Place, Uri};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::failure::{Exit, Failure};
use crate::stop;

const PROGRAM: &str = "tapline-disk";
const PROBE_EVERY: Duration = Duration::from_millis(5);

/// A served image.
pub struct Served {
    child: Child,
    /// Its standard input, which must outlive it: waiting closes one that is left in `child`.
    #[expect(dead_code, reason = "held until it is dropped")]
    input: Option<ChildStdin>,
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
        let mut command = program()?;
        command.arg("serve").arg(image.to_string()).arg("--nbd").arg(room.path().join("nbd.sock"));
        for parent in parents {
            command.args(["--parent", parent]);
        }
        if !write {
            command.arg("--read-only");
        }
        // Through the page cache: not all file systems have O_DIRECT, with which the sector size of the storage would
        // also be that of the disk.
        command.args(["--cache", "writeback"]);
        command.arg("--end-with-input").stdin(Stdio::piped()).stdout(Stdio::null()).stderr(log).process_group(0);
        let mut child = command.spawn().map_err(failed)?;
        let input = child.stdin.take();
        let mut served = Served { child, input, image: image.clone(), room };
        served.wait_for_socket()?;
        Ok(served)
    }

    fn wait_for_socket(&mut self) -> Result<(), Failure> {
        let failed = |error: io::Error| Failure::cannot("wait for tapline-disk", error);
        // Until it listens or ends; it opens storage, which may take any time.
        while UnixStream::connect(self.socket()).is_err() {
            if let Some(status) = self.child.try_wait().map_err(failed)? {
                return Err(self.refused(status));
            }
            if stop::cancelled().load(Ordering::Relaxed) {
                return Err(backup::Error::Cancelled.into());
            }
            std::thread::sleep(PROBE_EVERY);
        }
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.room.path().join("nbd.sock")
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
