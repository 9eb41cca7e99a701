//! The machine: QEMU with Xen in it, once booted and saved, and started from there for every test.
//!
//! Knows nothing of what a test does. dom0 takes an archive from its second disk, runs `run.sh` of it and leaves
//! another archive on the third. Time counts the machine's instructions (`-icount`), so a slow host trips no timeout in
//! it; only the deadline given to us is the host's. However we end, QEMU ends with us.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::BedError;
use super::images::{DOM0_INITRD, DOM0_ROOT, HYPERVISOR, Images, KERNEL};
use crate::guest::at;
use crate::guest::image;
use crate::progress::Progress;
use crate::tool;

/// Two guests of 320 MB, eight disks of 16 MB in dom0's memory, and what backends take.
const MEMORY_MIB: u32 = 2048;
const DOM0_MIB: u32 = 1024;

/// 4 ns an instruction; less, and Xen's waits for its timers cost minutes. Idle time is the host's: if it were skipped,
/// then also while a disk of QEMU is at work on a busy host, and the toolstack's patience would end in an instant.
const TIME: [&str; 4] = ["-icount", "shift=2,sleep=on", "-rtc", "base=2024-01-01,clock=vm"];

/// Without what crashes or misleads: dom0 does not survive smap, smep, pku and la57 under translation; with erms and
/// fsrm Linux copies by an instruction that counts as one a byte.
const CPU: &str = "max,-smap,-smep,-pku,-la57,-erms,-fsrm";

/// Translation loses the state of the FPU when Xen switches it lazily.
const XEN: &str = "console=com1 com1=115200 loglvl=warning guest_loglvl=warning bootscrub=0 spec-ctrl=no,eager-fpu";
const DOM0: &str = "console=hvc0 panic=-1 quiet mitigations=off norandmaps";

/// A quiet machine boots in 30 s.
const BOOT_SECONDS_MAX: u64 = 600;

/// What the machine's third disk takes of a test.
const OUT_MIB: u64 = 64;
const DROP_MIB: u64 = 128;

/// dom0 keeps to the first processor, so that a guest can have the second one for itself.
const XEN_APART: &str = " dom0_max_vcpus=1 dom0_vcpus_pin";

const STATE: &str = "state";
const ROOT: &str = "root.qcow2";

/// The processors of the machine. One thread translates for all of them, and its clock counts the instructions of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Processors {
    /// One for dom0 and guests.
    #[default]
    Shared,
    /// One for dom0, and one that guests may be bound to.
    Apart,
}

impl Processors {
    fn count(self) -> &'static str {
        match self {
            Self::Shared => "1",
            Self::Apart => "2",
        }
    }

    /// Xen's own words.
    fn words(self) -> String {
        match self {
            Self::Shared => XEN.to_owned(),
            Self::Apart => format!("{XEN}{XEN_APART}"),
        }
    }

    fn directory(self) -> &'static str {
        match self {
            Self::Shared => "saved",
            Self::Apart => "saved-apart",
        }
    }
}

/// A machine that was booted and saved, waiting for its second disk to hold something.
pub struct Saved {
    images: PathBuf,
    directory: PathBuf,
    processors: Processors,
}

/// How a run ended.
pub struct Ended {
    /// The exit code of `run.sh`; none if the machine ended otherwise.
    pub code: Option<u32>,
    pub console: String,
}

impl Saved {
    /// The saved machine in `cache`, booted when it is not there or of other images.
    pub fn obtain(
        cache: &Path,
        images: &Images,
        processors: Processors,
        progress: &Progress,
    ) -> Result<Self, BedError> {
        let directory = cache.join(processors.directory());
        let saved = Self { images: images.directory.clone(), directory, processors };
        let list = saved.directory.join("inputs");
        let version = tool::text(Command::new("qemu-system-x86_64").arg("--version"))?;
        let key =
            format!("{version}{MEMORY_MIB} {DOM0_MIB} {TIME:?} {CPU} {} {DOM0}\n{}", processors.words(), images.inputs);
        if fs::read_to_string(&list).is_ok_and(|list| list == key) {
            return Ok(saved);
        }
        if saved.directory.exists() {
            fs::remove_dir_all(&saved.directory).map_err(at("remove", &saved.directory))?;
        }
        fs::create_dir_all(&saved.directory).map_err(at("create", &saved.directory))?;
        progress.detail("booting Xen and dom0, once (half a minute)");
        saved.boot_and_save()?;
        image::replace(&list, key.as_bytes())?;
        Ok(saved)
    }

    fn boot_and_save(&self) -> Result<(), BedError> {
        let root = self.directory.join(ROOT);
        overlay(&self.images.join(DOM0_ROOT), "raw", &root)?;
        let (given, out) = (self.directory.join("drop.img"), self.directory.join("out.img"));
        blank(&given, DROP_MIB)?;
        blank(&out, OUT_MIB)?;
        let socket = self.directory.join("monitor");
        let mut command = self.qemu(&root, &given, &out);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        let deadline = Instant::now() + Duration::from_secs(BOOT_SECONDS_MAX);
        let mut running = Running::start(command, &self.directory.join("console"))?;
        running.follow(deadline, |line| line.starts_with("TAPLINE ready"))?;
        if !running.tail.last().is_some_and(|line| line.starts_with("TAPLINE ready")) {
            return Err(BedError::NoBoot { console: running.console.clone(), said: running.said() });
        }
        let state = self.directory.join(STATE);
        let mut monitor = Monitor::connect(&socket)?;
        monitor.run("migrate-set-parameters", serde_json::json!({ "max-bandwidth": 10u64 << 30 }))?;
        monitor.run("migrate", serde_json::json!({ "uri": format!("exec:cat >'{}'", state.display()) }))?;
        while Instant::now() < deadline {
            match monitor.run("query-migrate", serde_json::Value::Null)?["status"].as_str() {
                Some("completed") => {
                    // It may go without an answer; that it goes is what counts.
                    drop(monitor.run("quit", serde_json::Value::Null));
                    return running.wait();
                }
                Some("failed" | "cancelled") => break,
                _ => thread::sleep(Duration::from_millis(100)),
            }
        }
        Err(BedError::Monitor { what: "save the machine".to_owned() })
    }

    /// Starts the machine, has dom0 run `run.sh` of the directory `given`, and puts what it left in /out into
    /// `work`/out. `heard` is given every line of the console; `plugin` is a word for QEMU.
    pub fn run(
        &self,
        given: &Path,
        work: &Path,
        most: Duration,
        plugin: Option<&str>,
        mut heard: impl FnMut(&str),
    ) -> Result<Ended, BedError> {
        let deadline = Instant::now() + most;
        let (root, archive, out) = (work.join(ROOT), work.join("drop.img"), work.join("out.img"));
        overlay(&self.directory.join(ROOT), "qcow2", &root)?;
        // Of one time and one owner: they end in dom0's caches, and a run should be like another.
        let mut tar = Command::new("tar");
        tar.args(["-c", "--owner=0", "--group=0", "--sort=name", "--mtime=@0", "-f"])
            .arg(&archive)
            .arg("-C")
            .arg(given);
        tool::text(tar.arg("."))?;
        lengthen(&archive, DROP_MIB)?;
        blank(&out, OUT_MIB)?;
        let mut command = self.qemu(&root, &archive, &out);
        command.arg("-incoming").arg(format!("exec:cat '{}'", self.directory.join(STATE).display()));
        if let Some(plugin) = plugin {
            command.args(["-plugin", plugin]);
        }
        let mut running = Running::start(command, &work.join("console"))?;
        let followed = running.follow(deadline, |line| {
            heard(line);
            false
        });
        let ended = Ended { code: running.tail.iter().rev().find_map(|line| end_in(line)), console: running.said() };
        drop(running);
        followed?;
        if ended.code.is_some() {
            let directory = work.join("out");
            fs::create_dir_all(&directory).map_err(at("create", &directory))?;
            tool::text(Command::new("tar").arg("-x").arg("-C").arg(&directory).arg("-f").arg(&out))?;
        }
        for image in [root, archive, out] {
            fs::remove_file(&image).map_err(at("remove", &image))?;
        }
        Ok(ended)
    }

    fn qemu(&self, root: &Path, drop: &Path, out: &Path) -> Command {
        let mut command = tool::bound_to_us("qemu-system-x86_64");
        // Names of images stand among words divided by commas; from here they have none.
        command.current_dir(&self.images);
        command.args(["-accel", "tcg,thread=single", "-cpu", CPU, "-smp", self.processors.count()]);
        command.args(["-m", &MEMORY_MIB.to_string()]);
        command.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]).args(TIME);
        command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
        command.args([
            "-kernel",
            HYPERVISOR,
            "-append",
            &format!("{} dom0_mem={DOM0_MIB}M,max:{DOM0_MIB}M", self.processors.words()),
        ]);
        command.args(["-initrd", &format!("{KERNEL} {DOM0},{DOM0_INITRD}")]);
        for (name, file, form, more) in
            [("root", root, "qcow2", ""), ("drop", drop, "raw", ",readonly=on"), ("out", out, "raw", "")]
        {
            // A comma in a path is written twice.
            let file = file.display().to_string().replace(',', ",,");
            command.args([
                "-drive",
                &format!("if=none,id={name},file={file},format={form},cache=unsafe,aio=threads{more}"),
            ]);
            command.args(["-device", &format!("virtio-blk-pci,drive={name}")]);
        }
        command
    }
}

fn end_in(line: &str) -> Option<u32> {
    line.strip_prefix("TAPLINE end=")?.trim().parse().ok()
}

fn overlay(base: &Path, form: &str, file: &Path) -> Result<(), BedError> {
    let mut command = Command::new("qemu-img");
    tool::text(command.args(["create", "-q", "-f", "qcow2", "-F", form, "-b"]).arg(base).arg(file))?;
    Ok(())
}

fn blank(file: &Path, mib: u64) -> Result<(), BedError> {
    fs::write(file, "").map_err(at("write", file))?;
    lengthen(file, mib)
}

/// Gives `file` the size of the disk that was there when the machine was saved.
fn lengthen(file: &Path, mib: u64) -> Result<(), BedError> {
    let opened = File::options().write(true).open(file).map_err(at("open", file))?;
    let len = opened.metadata().map_err(at("look at", file))?.len();
    if len > mib << 20 {
        return Err(BedError::TooMuch { file: file.to_owned(), len, mib });
    }
    Ok(opened.set_len(mib << 20).map_err(at("lengthen", file))?)
}

/// QEMU, and the console it writes.
struct Running {
    qemu: Child,
    lines: Receiver<String>,
    tail: Vec<String>,
    console: PathBuf,
}

impl Running {
    fn start(mut qemu: Command, console: &Path) -> Result<Self, BedError> {
        let log = File::create(console).map_err(at("create", console))?;
        let errors = log.try_clone().map_err(at("open", console))?;
        qemu.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let command = tool::line_of(&qemu);
        let mut child = qemu.spawn().map_err(|source| BedError::Start { command, source })?;
        let Some(screen) = child.stdout.take() else { unreachable!("it was asked for as a pipe") };
        Ok(Self { qemu: child, lines: read_console(screen, log), tail: Vec::new(), console: console.to_owned() })
    }

    /// Follows the console until `enough` says so or QEMU ends.
    fn follow(&mut self, deadline: Instant, mut enough: impl FnMut(&str) -> bool) -> Result<(), BedError> {
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    let stop = enough(&line);
                    self.tail.push(line);
                    if stop {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => return Err(BedError::Late { said: self.said() }),
            }
        }
    }

    fn wait(&mut self) -> Result<(), BedError> {
        self.qemu.wait().map_err(at("end", Path::new("QEMU")))?;
        Ok(())
    }

    fn said(&self) -> String {
        self.tail.join("\n")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.qemu.kill().and_then(|()| self.qemu.wait()) {
            eprintln!("cannot end QEMU, process {}: {error}", self.qemu.id());
        }
    }
}

/// Copies the console into `log`, with the seconds since the start, and hands out its lines.
fn read_console(screen: ChildStdout, mut log: File) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    let started = Instant::now();
    thread::spawn(move || {
        for line in BufReader::new(screen).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).replace(['\r', '\0'], "");
            // A console that cannot be kept is no reason to stop; its lines are in memory.
            if let Err(error) = writeln!(log, "{:7.2} {text}", started.elapsed().as_secs_f64()) {
                eprintln!("cannot log the console: {error}: {text}");
            }
            if !text.trim().is_empty() && sender.send(text).is_err() {
                return;
            }
        }
    });
    lines
}

/// QEMU's control socket (QMP): one command, one answer; events in between are passed over.
struct Monitor {
    lines: BufReader<UnixStream>,
}

impl Monitor {
    fn connect(socket: &Path) -> Result<Self, BedError> {
        let stream = UnixStream::connect(socket).map_err(at("connect to", socket))?;
        let mut monitor = Self { lines: BufReader::new(stream) };
        monitor.answer("greet")?;
        monitor.run("qmp_capabilities", serde_json::Value::Null)?;
        Ok(monitor)
    }

    fn run(&mut self, name: &str, arguments: serde_json::Value) -> Result<serde_json::Value, BedError> {
        let mut command = serde_json::json!({ "execute": name });
        if !arguments.is_null() {
            command["arguments"] = arguments;
        }
        let failed = |_| BedError::Monitor { what: name.to_owned() };
        writeln!(self.lines.get_mut(), "{command}").map_err(failed)?;
        self.answer(name)
    }

    fn answer(&mut self, name: &str) -> Result<serde_json::Value, BedError> {
        let failed = || BedError::Monitor { what: name.to_owned() };
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).map_err(|_| failed())? == 0 {
                return Err(failed());
            }
            let mut answer: serde_json::Value = serde_json::from_str(&line).map_err(|_| failed())?;
            if answer.get("error").is_some() {
                return Err(BedError::Monitor { what: format!("{name}: {}", answer["error"]["desc"]) });
            }
            for key in ["return", "QMP"] {
                if let Some(value) = answer.get_mut(key) {
                    return Ok(value.take());
                }
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_code_is_in_the_last_word_to_us() {
        assert_eq!(end_in("TAPLINE end=0"), Some(0));
        assert_eq!(end_in("[dom] TAPLINE end=0"), None);
        assert_eq!(end_in("TAPLINE end=ok"), None);
    }
}
