//! The machine: QEMU with Xen, booted and saved once, and restored for every test.
//!
//! Knows nothing about tests. dom0 takes an archive from its second disk, runs its `run.sh` and writes another archive
//! to the third. Time in the machine counts instructions (`-icount`), so a slow host triggers no timeout in it; only
//! our deadline is in the host's time. QEMU is killed when this process ends.

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

/// Memory for two guests of 320 MB, eight disks of 16 MB in dom0's memory, and backends.
const MEMORY_MIB: u32 = 2048;
const DOM0_MIB: u32 = 1024;

/// 4 ns per instruction; with less, Xen's waits for its timers would cost minutes. Idle time is the host's: if it were
/// skipped, this would also happen while a disk of QEMU is active on a busy host, and the toolstack's timeouts would
/// expire at once.
const TIME: [&str; 4] = ["-icount", "shift=2,sleep=on", "-rtc", "base=2024-01-01,clock=vm"];

/// Features that crash or mislead are disabled: dom0 does not survive smap, smep, pku and la57 under emulation; with
/// erms and fsrm Linux copies by an instruction that counts as one per byte.
const CPU: &str = "max,-smap,-smep,-pku,-la57,-erms,-fsrm";

/// Eager FPU switching, because emulation loses the FPU's state when Xen switches it lazily.
const XEN: &str = "console=com1 com1=115200 loglvl=warning guest_loglvl=warning bootscrub=0 spec-ctrl=no,eager-fpu";
const DOM0: &str = "console=hvc0 panic=-1 quiet mitigations=off norandmaps";

/// Timeout of a boot, which takes 30 s on a quiet machine.
const BOOT_SECONDS_MAX: u64 = 600;

/// Sizes in MiB of the machine's third and second disks, for a test's output and input.
const OUT_MIB: u64 = 64;
const DROP_MIB: u64 = 128;

/// dom0 stays on the first processor, so that a guest can have the second one for itself.
const XEN_APART: &str = " dom0_max_vcpus=1 dom0_vcpus_pin";

const STATE: &str = "state";
const ROOT: &str = "root.qcow2";

/// The processors of the machine. One thread emulates all of them, and its clock counts the instructions of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Processors {
    /// One processor for dom0 and guests.
    #[default]
    Shared,
    /// One processor for dom0, and one for guests.
    Apart,
}

impl Processors {
    fn count(self) -> &'static str {
        match self {
            Self::Shared => "1",
            Self::Apart => "2",
        }
    }

    /// The command line of Xen.
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

/// A machine that was booted and saved, and that waits for data on its second disk.
pub struct Saved {
    images: PathBuf,
    directory: PathBuf,
    processors: Processors,
}

/// The end of a run.
pub struct Ended {
    /// The exit code of `run.sh`; `None` if the machine ended otherwise.
    pub code: Option<u32>,
    pub console: String,
}

impl Saved {
    /// The saved machine in `cache`, booted if it is missing or has other images.
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
                    // QEMU may exit without a response.
                    drop(monitor.run("quit", serde_json::Value::Null));
                    return running.wait();
                }
                Some("failed" | "cancelled") => break,
                _ => thread::sleep(Duration::from_millis(100)),
            }
        }
        Err(BedError::Monitor { what: "save the machine".to_owned() })
    }

    /// Starts the machine, lets dom0 run `run.sh` of the directory `given`, and puts its output in /out into
    /// `work`/out. `on_line` is called for every line of the console; `plugin` is an option of QEMU.
    pub fn run(
        &self,
        given: &Path,
        work: &Path,
        most: Duration,
        plugin: Option<&str>,
        mut on_line: impl FnMut(&str),
    ) -> Result<Ended, BedError> {
        let deadline = Instant::now() + most;
        let (root, archive, out) = (work.join(ROOT), work.join("drop.img"), work.join("out.img"));
        overlay(&self.directory.join(ROOT), "qcow2", &root)?;
        // With fixed times and owners, because they end up in dom0's caches, and runs should be alike.
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
            on_line(line);
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
            // Commas in a path are doubled.
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

/// Extends `file` to the size of the disk when the machine was saved.
fn lengthen(file: &Path, mib: u64) -> Result<(), BedError> {
    let opened = File::options().write(true).open(file).map_err(at("open", file))?;
    let len = opened.metadata().map_err(at("look at", file))?.len();
    if len > mib << 20 {
        return Err(BedError::TooMuch { file: file.to_owned(), len, mib });
    }
    Ok(opened.set_len(mib << 20).map_err(at("lengthen", file))?)
}

/// A running QEMU with its console.
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
        let Some(screen) = child.stdout.take() else { unreachable!("it was requested as a pipe") };
        Ok(Self { qemu: child, lines: read_console(screen, log), tail: Vec::new(), console: console.to_owned() })
    }

    /// Reads the console until `enough` returns true or QEMU exits.
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

/// Copies the console into `log` with timestamps, and sends its lines.
fn read_console(screen: ChildStdout, mut log: File) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    let started = Instant::now();
    thread::spawn(move || {
        for line in BufReader::new(screen).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).replace(['\r', '\0'], "");
            // A console that cannot be logged is no reason to stop; its lines are in memory.
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

/// A client of QMP, QEMU's control socket: one command, one response; events are skipped.
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
