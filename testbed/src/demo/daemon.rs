//! The life of a disk with the daemon: a repository, a VDI and a VBD by name, while a real guest writes to it.
//!
//! Uses `tapline`'s nouns and verbs. The daemon and its disks are stopped on drop; their directory remains, so that a
//! failed run can be examined.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use vm::qemu::hardware::Boot;

use super::story::{Amount, Failure, Story, bytes_used};
use crate::guest::{Job, MEMORY_MIB};
use crate::tool;

const SIZE: &str = "4G";
const GROWN: &str = "5G";
const GROWN_BYTES: u64 = 5 << 30;

/// Timeout for the daemon to listen and for chains to be merged, sufficient on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(120);

const POLL: Duration = Duration::from_millis(50);

/// The demo's daemon.
struct Daemon {
    programs: PathBuf,
    config: PathBuf,
    log: PathBuf,
    socket: PathBuf,
    /// The directory of its sockets, whose path must be short, unlike that of a checkout.
    run: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    fn start(programs: &Path, work: &Path) -> Result<Daemon, Failure> {
        let run = std::env::temp_dir().join(format!("tapline-demo-{}", std::process::id()));
        let config = work.join("taplined.toml");
        let text = format!(
            "state-directory = {:?}\nrun-directory = {run:?}\nlog-directory = {:?}\n",
            work.join("state"),
            work.join("log")
        );
        fs::write(&config, text).map_err(|source| file("write", &config, source))?;
        let (programs, log, socket) = (programs.to_owned(), work.join("taplined.log"), run.join("taplined.sock"));
        let mut daemon = Daemon { programs, config, log, socket, run, process: None };
        daemon.run()?;
        Ok(daemon)
    }

    fn run(&mut self) -> Result<(), Failure> {
        let log = File::options().create(true).append(true).open(&self.log);
        let log = log.map_err(|source| file("write", &self.log, source))?;
        let mut command = tool::bound_to_us(self.programs.join("taplined"));
        command.arg("--config").arg(&self.config).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(command.spawn().map_err(|source| file("start", &self.config, source))?);
        let until = Instant::now() + PATIENCE;
        while self.ask(&["host", "show"]).is_err() {
            if Instant::now() > until {
                return self.ask(&["host", "show"]).map(drop);
            }
            thread::sleep(POLL);
        }
        Ok(())
    }

    /// Kills the daemon with SIGKILL.
    fn kill(&mut self) -> Result<(), Failure> {
        let Some(mut process) = self.process.take() else { return Ok(()) };
        process
            .kill()
            .and_then(|()| process.wait())
            .map_err(|source| file("kill the daemon of", &self.config, source))?;
        Ok(())
    }

    /// Runs `tapline WORDS`; returns its output.
    fn ask(&self, words: &[&str]) -> Result<String, Failure> {
        let mut command = Command::new(self.programs.join("tapline"));
        Ok(tool::text(command.args(words).env("TAPLINE_SOCKET", &self.socket))?)
    }

    /// Runs `tapline WORDS`; parses its output as JSON.
    fn show(&self, words: &[&str]) -> Result<Value, Failure> {
        let text = self.ask(&[words, &["--json"]].concat())?;
        serde_json::from_str(&text).map_err(|_| Failure::Counters)
    }

    /// The only VBD of the demo.
    fn vbd(&self) -> Result<Value, Failure> {
        Ok(self.show(&["vbd", "list"])?[0].take())
    }

    /// Waits until the chain of a VDI has been merged to one file.
    fn wait_for_one_file(&self, vdi: &str) -> Result<(), Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let depth = self.show(&["vdi", "show", vdi])?["depth"].take();
            if depth == 1 {
                return Ok(());
            }
            if Instant::now() > until {
                let claim = "what destroyed snapshots leave is merged by itself".to_owned();
                return Err(Failure::Claim { claim, found: format!("{depth} images") });
            }
            thread::sleep(POLL);
        }
    }

    /// The number of reads counted by the guest's kernel, once it exceeds `before`.
    fn reads_in_the_guest(&self, before: u64) -> Result<u64, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let samples = self.show(&["top", "-n", "1", "-i", "0.2", "--pages", &self.run.to_string_lossy()])?;
            let guest = &samples["disks"][0]["guest"];
            let reads = guest["completed"].as_u64().unwrap_or(0);
            if reads > before {
                return Ok(reads);
            }
            if Instant::now() > until {
                return Err(Failure::Unasked(guest.to_string()));
            }
            thread::sleep(POLL);
        }
    }

    /// Unplugs everything and stops the daemon.
    fn stop(mut self) -> Result<(), Failure> {
        self.ask(&["host", "drain"])?;
        if let Some(mut process) = self.process.take() {
            kill_process(Pid::from_child(&process), Signal::TERM)
                .map_err(|errno| file("stop the daemon of", &self.config, errno.into()))?;
            let ended = process.wait().map_err(|source| file("wait for the daemon of", &self.config, source))?;
            if !ended.success() {
                let claim = "the daemon exits cleanly when it is stopped".to_owned();
                return Err(Failure::Claim { claim, found: ended.to_string() });
            }
        }
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.process.is_some() {
            // After a failed run: remaining disks are stopped by force; a failure of that is reported.
            if let Err(failure) = self.ask(&["host", "drain", "--timeout", "0"]).and_then(|_| self.kill()) {
                eprintln!("disks of {} may still be served: {failure}", self.run.display());
            }
        }
        if let Err(error) = fs::remove_dir_all(&self.run) {
            eprintln!("cannot remove {}: {error}", self.run.display());
        }
    }
}

fn file(what: &'static str, path: &Path, source: std::io::Error) -> Failure {
    Failure::File { what, path: path.to_owned(), source }
}

impl Story<'_> {
    /// A guest on a VBD, which must notice neither operations on its VDI nor the death of the daemon.
    pub fn through_the_daemon(&mut self, amount: &Amount) -> Result<(), Failure> {
        self.progress.step("the same through the daemon: an SR, a VDI and a VBD by name");
        let place = self.work.join("sr");
        fs::create_dir(&place).map_err(|source| file("create", &place, source))?;
        let mut daemon = Daemon::start(self.programs, self.work)?;
        daemon.ask(&["sr", "create", "demo", "--dir", &place.to_string_lossy()])?;
        daemon.ask(&["vdi", "create", "web", "--sr", "demo", "--size", SIZE, "--format", "qcow2"])?;
        daemon.ask(&["vbd", "create", "--vdi", "web", "--queues", "2"])?;
        let vbd = daemon.vbd()?["uuid"].as_str().unwrap_or_default().to_owned();
        daemon.ask(&["vbd", "plug", &vbd])?;
        let served = daemon.vbd()?;
        let (socket, process) = (served["socket"].as_str().unwrap_or_default().to_owned(), served["pid"].clone());

        let job = Job {
            name: "daemon",
            script: include_str!("../../guest/jobs/live.sh"),
            parameters: vec![
                ("FILL_MIB", amount.fill_mib.to_string()),
                ("LOAD_SECONDS", (amount.load_seconds + 6).to_string()),
            ],
        };
        self.progress.live("the guest boots");
        let mut used = Vec::new();
        let running = self.guest.boot(&job, &[&socket], self.work)?;
        let transcript = running.follow(|line| {
            match self.show(&line) {
                Some(("ask", "snapshot-1")) => drop(daemon.ask(&["vdi", "snapshot", "web", "--name", "first"])?),
                Some(("ask", "snapshot-2")) => {
                    daemon.kill()?;
                    daemon.run()?;
                    daemon.ask(&["vdi", "snapshot", "web", "--name", "second"])?;
                }
                Some(("ask", "merge")) => {
                    daemon.ask(&["vdi", "destroy", "first", "--yes"])?;
                    daemon.ask(&["vdi", "destroy", "second", "--yes"])?;
                    daemon.wait_for_one_file("web")?;
                }
                Some(("ask", "grow")) => drop(daemon.ask(&["vdi", "resize", "web", "--size", GROWN])?),
                Some(("ask", "trim-before" | "trim-after")) => {
                    let file = daemon.show(&["vdi", "show", "web"])?["file"].take();
                    used.push(bytes_used(&place.join(file.as_str().unwrap_or_default()))?);
                }
                _ => {}
            }
            Ok::<_, Failure>(ControlFlow::Continue(()))
        })?;
        let again = daemon.vbd()?["pid"].take();
        self.claim("the daemon was killed and started again, the disk's process went on", again == process, || {
            format!("process {again}, it was {process}")
        })?;
        self.holds("fio verified all that it wrote while its VDI was kept twice and both snapshots destroyed");
        self.holds("what the snapshots left was merged under the guest by itself: the chain is one file");
        let grown = transcript.value("grown")?;
        self.claim("the guest saw its VDI grow to 5 GiB", grown == GROWN_BYTES.to_string(), || grown.into())?;
        let [before, after] = *used else { return Err(Failure::Counters) };
        let found = || format!("{before} bytes used before, {after} after");
        self.claim("fstrim gave space back to the repository", after < before, found)?;
        self.after_the_guest(daemon, &vbd, &place)
    }

    /// A VM of the daemon whose guest runs `tapline-guest`: the disk's statistics include the guest's.
    pub fn guest_of_the_daemon(&mut self) -> Result<(), Failure> {
        self.progress.step("a VM of the daemon whose guest says what it counts");
        let place = self.work.join("sr");
        fs::create_dir(&place).map_err(|source| file("create", &place, source))?;
        let mut daemon = Daemon::start(self.programs, self.work)?;
        daemon.ask(&["sr", "create", "demo", "--dir", &place.to_string_lossy()])?;
        daemon.ask(&["vdi", "create", "web", "--sr", "demo", "--size", "64M", "--format", "qcow2"])?;
        let job = Job { name: "reader", script: include_str!("../../guest/jobs/reader.sh"), parameters: Vec::new() };
        let Boot::Kernel { kernel, initrd, command_line } = self.guest.boot_of(&job, self.work)? else {
            unreachable!("a guest is a kernel")
        };
        let (kernel, initrd) = (kernel.to_string_lossy(), initrd.unwrap_or_default());
        let initrd = initrd.to_string_lossy();
        let memory = format!("{MEMORY_MIB}M");
        let hardware = ["--memory", &memory, "--kernel", &kernel, "--initrd", &initrd, "--cmdline", &command_line];
        daemon.ask(&[&["vm", "create", "web"], &hardware[..]].concat())?;
        daemon.ask(&["vbd", "create", "--vdi", "web", "--vm", "web"])?;
        daemon.ask(&["vm", "start", "web"])?;
        let first = daemon.reads_in_the_guest(0)?;
        self.claim("the guest's own counters are in the statistics of its disk", first > 0, || first.to_string())?;
        daemon.kill()?;
        daemon.run()?;
        let later = daemon.reads_in_the_guest(first)?;
        let claim = "another daemon queries the guest as the first one did";
        self.claim(claim, later > first, || format!("{later} reads, {first} before"))?;
        daemon.ask(&["vm", "shutdown", "web", "--force"])?;
        daemon.stop()
    }

    /// Checks the VDI at rest.
    fn after_the_guest(&mut self, daemon: Daemon, vbd: &str, place: &Path) -> Result<(), Failure> {
        daemon.ask(&["vbd", "unplug", vbd])?;
        daemon.ask(&["vbd", "destroy", vbd])?;
        let exported = self.work.join("web.vhd");
        daemon.ask(&["vdi", "export", "web", &exported.to_string_lossy(), "--format", "vhd"])?;
        let image = daemon.show(&["vdi", "show", "web"])?["file"].take();
        let image = place.join(image.as_str().unwrap_or_default());
        tool::text(Command::new("qemu-img").args(["compare", "-f", "qcow2", "-F", "vpc"]).arg(&image).arg(&exported))?;
        self.holds("QEMU reads the same bytes out of the VDI and out of its export as VHD");
        daemon.ask(&["vdi", "destroy", "web", "--yes"])?;
        daemon.ask(&["sr", "destroy", "demo", "--yes"])?;
        let left = fs::read_dir(place).map_err(|source| file("look into", place, source))?.count();
        self.claim("the destroyed repository leaves an empty directory", left == 0, || format!("{left} files"))?;
        daemon.stop()
    }
}
