//! Starts a disk process in the background and waits until it serves.
//!
//! Invariant: if a process exits instead of serving, its last output is reported; one that does not start serving in
//! time is stopped.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use control::{Error, printable};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use xen::Store;

use vm::xen::device::{Device, State, text};
use vm::xen::wait::{self, Wait};

/// Maximum number of bytes of its output that are shown.
const OUTPUT_MAX: u64 = 4096;

/// How long a process that is stopped may take to exit before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The process to start.
#[derive(Debug)]
pub struct Launch {
    /// The program of disk processes.
    pub program: PathBuf,
    /// Its arguments.
    pub words: Vec<OsString>,
    /// Its working directory; `None`: ours.
    pub directory: Option<PathBuf>,
    /// The file to which its standard error is appended.
    pub log: PathBuf,
}

/// A disk process in the background.
#[derive(Debug)]
pub struct Launched {
    child: Child,
    process: OwnedFd,
    log: PathBuf,
    /// Offset in the log at which its output begins.
    from: u64,
}

impl Launch {
    /// Starts the process, which outlives us and our terminal.
    pub fn start(&self) -> Result<Launched, Error> {
        let log_failed = |error: io::Error| Error::cannot(format!("write the log {}", self.log.display()), error);
        if let Some(directory) = self.log.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            fs::create_dir_all(directory).map_err(log_failed)?;
        }
        let log = File::options().append(true).create(true).open(&self.log).map_err(log_failed)?;
        let from = log.metadata().map_err(log_failed)?.len();
        let failed = |error: io::Error| Error::cannot(format!("start {}", self.program.display()), error);
        let mut command = Command::new(&self.program);
        command.args(&self.words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).process_group(0);
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        let mut child = command.spawn().map_err(failed)?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let opened = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from));
        match opened.unwrap_or_else(|| Err(io::ErrorKind::InvalidData.into())) {
            Ok(process) => Ok(Launched { child, process, log: self.log.clone(), from }),
            Err(error) => {
                child.kill().and_then(|()| child.wait().map(drop)).map_err(failed)?;
                Err(failed(error))
            }
        }
    }
}

impl Launched {
    /// Waits until the backend's node shows that the disk is served. On failure the process has been stopped.
    pub fn wait_serving(&mut self, store: &mut dyn Store, device: &Device, patience: Duration) -> Result<(), Error> {
        self.wait(store, device, patience, |store| {
            Ok(device.states(store, None)?.0.is_some_and(|state| state != State::INITIALISING))
        })
    }

    /// Waits until the backend's node contains this process's pid, in place of its predecessor's. On failure the
    /// process has been stopped.
    pub fn wait_taken_over(&mut self, store: &mut dyn Store, device: &Device, patience: Duration) -> Result<(), Error> {
        let pid = self.pid().to_string();
        self.wait(store, device, patience, |store| {
            let named = text(store, None, &format!("{}/tapline/pid", device.backend()))?;
            Ok(named.is_some_and(|named| named == pid))
        })
    }

    fn wait(
        &mut self,
        store: &mut dyn Store,
        device: &Device,
        patience: Duration,
        serves: impl Fn(&mut dyn Store) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let paths = [device.backend()];
        let child = &mut self.child;
        let serving = Wait { paths: &paths, patience, also: Some(self.process.as_fd()) }.until(store, |store| {
            if let Some(status) = child.try_wait().map_err(|error| Error::cannot("check the disk's process", error))? {
                return Ok(Some(Err(status.to_string())));
            }
            Ok(serves(store)?.then_some(Ok(())))
        });
        let (why, what) = match serving {
            Ok(Some(Ok(()))) => return Ok(()),
            Ok(Some(Err(status))) => (format!("its process exited: {status}"), None),
            Ok(None) => (format!("its process did not start serving in {} s", patience.as_secs()), None),
            Err(failure) => (String::new(), Some(failure)),
        };
        self.end()?;
        Err(what.unwrap_or_else(|| {
            let words = self.last_output();
            let words = if words.is_empty() { String::new() } else { format!("; it printed:\n{words}") };
            Error::cannot(format!("serve {device}"), format!("{why}{words}"))
                .advise(format!("its log is {}", self.log.display()))
        }))
    }

    /// The pid of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the process, which does not serve the guest yet.
    fn end(&mut self) -> Result<(), Error> {
        let failed = |error: io::Error| Error::cannot("stop the disk's process", error);
        if self.child.try_wait().map_err(failed)?.is_some() {
            return Ok(());
        }
        pidfd_send_signal(&self.process, Signal::TERM).map_err(|errno| failed(errno.into()))?;
        if !wait::readable(&self.process, EXIT_TIMEOUT)? {
            self.child.kill().map_err(failed)?;
        }
        self.child.wait().map(drop).map_err(failed)
    }

    fn last_output(&self) -> String {
        let words = read_from(&self.log, self.from).unwrap_or_default();
        words.lines().map(|line| format!("    {}", printable(line))).collect::<Vec<String>>().join("\n")
    }
}

/// Reads a file from an offset to its end, at most the last [`OUTPUT_MAX`] bytes.
fn read_from(path: &Path, from: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(from.max(end.saturating_sub(OUTPUT_MAX))))?;
    let mut bytes = Vec::new();
    file.take(OUTPUT_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod test {
    use super::*;
    use vm::xen::fake::{WRITABLE, machine, say};
    use vm::xen::give::announce;

    fn shell(directory: &tempfile::TempDir, script: &str) -> Launch {
        let words = ["-c", script].map(OsString::from).to_vec();
        Launch { program: "sh".into(), words, directory: None, log: directory.path().join("logs/disk.log") }
    }

    #[test]
    fn a_process_that_exits_instead_is_reported_with_its_output() {
        let directory = tempfile::tempdir().unwrap();
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let log = directory.path().join("logs/disk.log");
        fs::create_dir_all(log.parent().unwrap()).unwrap();
        fs::write(&log, "of an earlier one\n").unwrap();
        let mut launched = shell(&directory, "echo cannot open it >&2; exit 4").start().unwrap();
        let failure = launched.wait_serving(&mut store, &device, Duration::from_secs(60)).unwrap_err();
        assert!(failure.message.ends_with("exit status: 4; it printed:\n    cannot open it"), "{failure}");
        assert!(!failure.message.contains("earlier"));
        assert_eq!(failure.advice.as_deref(), Some(format!("its log is {}", log.display()).as_str()));
    }

    #[test]
    fn a_process_that_does_not_start_serving_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let (_host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let mut launched = shell(&directory, "exec sleep 1000").start().unwrap();
        let failure = launched.wait_serving(&mut store, &device, Duration::ZERO).unwrap_err();
        assert!(failure.message.contains("did not start serving in 0 s"), "{failure}");
        assert!(launched.child.try_wait().unwrap().is_some());
        // A disk served by another process is not served by this one.
        say(&mut store, &device.backend(), "4");
        store.write(None, &format!("{}/tapline/pid", device.backend()), b"1").unwrap();
        let mut launched = shell(&directory, "exec sleep 1000").start().unwrap();
        assert!(launched.wait_taken_over(&mut store, &device, Duration::ZERO).is_err());
        assert!(launched.child.try_wait().unwrap().is_some());
    }

    #[test]
    fn a_served_disk_is_not_touched() {
        let directory = tempfile::tempdir().unwrap();
        let (host, mut store, device) = machine();
        announce(&mut store, &device, WRITABLE).unwrap();
        let mut launched = shell(&directory, "exec sleep 1000").start().unwrap();
        let (mut other, node) = (host.store(xen::DomId(0)).unwrap(), device.backend());
        let server = std::thread::spawn(move || say(&mut other, &node, "2"));
        launched.wait_serving(&mut store, &device, Duration::from_secs(60)).unwrap();
        server.join().unwrap();
        let named = format!("{}/tapline/pid", device.backend());
        store.write(None, &named, launched.pid().to_string().as_bytes()).unwrap();
        launched.wait_taken_over(&mut store, &device, Duration::from_secs(60)).unwrap();
        assert_eq!(launched.child.try_wait().unwrap(), None);
        launched.end().unwrap();
    }
}
