//! The process of a disk, observed only from outside.
//!
//! It knows nothing about the requests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The time limit of every wait, by the clock of the machine under test, which counts instructions.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// Number of started processes, for the names of their logs.
static STARTED: AtomicU32 = AtomicU32::new(0);

/// A disk's process.
pub struct DiskProcess {
    child: Child,
    log: PathBuf,
}

/// Resources of a process, none of which it may keep for a disconnected front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holdings {
    pub descriptors: usize,
    pub grant_mappings: usize,
    /// Event channels between domains, of all processes: nothing else creates or closes any during the test.
    pub channels: usize,
}

/// CPU time and wake-ups of a process since its start.
#[derive(Clone, Copy, Debug)]
pub struct ProcessUsage {
    pub cpu: Duration,
    pub wake_ups: u64,
}

impl DiskProcess {
    /// A process that serves `image` to dom0 as `vdev`.
    pub fn start(program: &Path, image: &Path, vdev: &str, options: &[&str]) -> DiskProcess {
        let logs = std::env::var_os("TAPLINE_LOGS").map_or_else(std::env::temp_dir, PathBuf::from);
        let name = std::thread::current().name().unwrap_or("main").replace("::", "-");
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let log = logs.join(format!("{name}-{number}-{vdev}.log"));
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg(format!("raw:{}", image.display()))
            .args(["--xen", &format!("0/{vdev}")])
            .args(options);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        DiskProcess::of(command, &log, vdev)
    }

    /// Starts a command that serves `vdev`, with its messages in the file `log`, and waits until it serves.
    pub fn of(mut command: Command, log: &Path, vdev: &str) -> DiskProcess {
        command.stderr(File::create(log).unwrap());
        let mut process = DiskProcess { child: command.spawn().unwrap(), log: log.to_owned() };
        let began = Instant::now();
        while !process.log_text().contains(&format!("serving {vdev}")) {
            assert!(process.child.try_wait().unwrap().is_none(), "the process has ended: {}", process.log_text());
            assert!(began.elapsed() < TIMEOUT, "the process does not serve: {}", process.log_text());
            sleep(Duration::from_millis(5));
        }
        process
    }

    pub fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn assert_running(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "the process has ended, {ended:?}: {}", self.log_text());
    }

    fn proc(&self, file: &str) -> String {
        let path = format!("/proc/{}/{file}", self.child.id());
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}; {}", self.log_text()))
    }

    pub fn holdings(&self) -> Holdings {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count();
        let grant_mappings = self.proc("maps").matches("gntdev").count();
        Holdings { descriptors, grant_mappings, channels: channels() }
    }

    /// Anonymous memory in KiB, which excludes grant mappings.
    pub fn memory(&self) -> u64 {
        number_after(&self.proc("status"), "RssAnon:")
    }

    pub fn usage(&self) -> ProcessUsage {
        let run: u64 = self.proc("schedstat").split_whitespace().next().unwrap().parse().unwrap();
        let wake_ups = number_after(&self.proc("status"), "voluntary_ctxt_switches:");
        ProcessUsage { cpu: Duration::from_nanos(run), wake_ups }
    }

    /// Waits until it holds exactly `wanted`.
    pub fn await_holdings(&self, wanted: Holdings) {
        let began = Instant::now();
        loop {
            let holds = self.holdings();
            if holds == wanted {
                return;
            }
            assert!(began.elapsed() < TIMEOUT, "it holds {holds:?}; before {wanted:?}: {}", self.log_text());
            sleep(Duration::from_millis(20));
        }
    }

    /// Terminates it, and waits for its successful exit.
    pub fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        let status = self.wait();
        assert!(status.success(), "it ended with {status}: {}", self.log_text());
        assert!(!self.log_text().contains("panicked"), "{}", self.log_text());
    }

    /// Kills it, and waits for its end.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.wait();
    }

    pub fn wait(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            match self.child.try_wait().unwrap() {
                Some(status) => return status,
                None => assert!(began.elapsed() < TIMEOUT, "the process does not end: {}", self.log_text()),
            }
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for DiskProcess {
    fn drop(&mut self) {
        // If the test failed; otherwise the process has ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl ProcessUsage {
    pub fn since(self, before: ProcessUsage) -> ProcessUsage {
        ProcessUsage { cpu: self.cpu - before.cpu, wake_ups: self.wake_ups - before.wake_ups }
    }
}

fn number_after(text: &str, key: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Event channels of dom0 whose other end is bound, according to Xen.
fn channels() -> usize {
    let listed = Command::new("lsevtchn").arg("0").output().expect("lsevtchn, one of Xen's private programs");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.lines().count() > 4, "lsevtchn printed {listed}");
    listed.matches("Interdomain").count()
}

/// Grants in use according to Xen: one line for each in the table that its debug key `g` prints.
pub fn grants_in_use() -> usize {
    let run = |words: &[&str]| {
        let output = Command::new("xl").args(words).output().expect("xl");
        assert!(output.status.success(), "xl {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    run(&["dmesg", "-c"]);
    run(&["debug-keys", "g"]);
    let printed = run(&["dmesg"]);
    assert!(printed.contains("gnttab_usage_print"), "Xen printed {printed}");
    // [0x00c]      0 0x0123456 0x00000001          0 0x0123456 0x19
    printed.lines().filter(|line| line.contains("[0x") && line.matches(" 0x").count() >= 3).count()
}
