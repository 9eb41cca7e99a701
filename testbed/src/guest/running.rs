//! A running guest: QEMU, its console, and the timeout after which a silent guest counts as hung.
//!
//! The protocol of jobs is lines `TAPLINE key=value`, of which `ask=` waits for an answer, and `fail=` or `end=ok`
//! comes last. QEMU is killed on drop.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use vm::qemu::accelerator::Accelerator;

use super::{CPUS, GuestError, at};
use crate::tool;

/// Timeout for a silent guest. A healthy job pauses for some seconds; under TCG on a loaded machine, tens of times
/// longer.
const SILENCE_MAX_SECONDS: u64 = 120;

/// Memory for the initramfs twice (packed and unpacked, 90 MB each), and for fio and the page cache.
pub const MEMORY_MIB: u32 = 768;

/// The kernel's command line. `no_timer_check`: the check counts ticks by the host's clock and panics if the emulator
/// did not run for long enough. `norandmaps`: QEMU before 8.0 translates code again for each other address at which it
/// runs, which takes most of the time of scripts.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check norandmaps";

/// Lines of the console that are shown when a guest has failed.
const LAST_LINES: usize = 12;

/// The command of QEMU without disks. The guest's memory is shared, as vhost-user requires.
pub fn qemu(program: &Path, accelerator: Accelerator, kernel: &Path, initrd: &Path) -> Command {
    let mut command = tool::bound_to_us(program);
    command.args(accelerator.words());
    command.args(["-machine", "q35,memory-backend=memory", "-nodefaults", "-no-user-config"]);
    command.args(["-display", "none", "-no-reboot"]);
    command.args(["-smp", &CPUS.to_string(), "-m", &MEMORY_MIB.to_string()]);
    command.args(["-object", &format!("memory-backend-memfd,id=memory,size={MEMORY_MIB}M,share=on")]);
    command.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
    command.args(["-append", COMMAND_LINE]);
    command
}

/// Adds the disk at `socket` as the guest's next one.
pub fn add_disk(command: &mut Command, number: usize, socket: &str) {
    command.args(["-chardev", &format!("socket,id=disk{number},path={socket}")]);
    command.args(["-device", &format!("vhost-user-blk-pci,chardev=disk{number},num-queues={CPUS}")]);
}

/// An event of the console.
pub enum ConsoleEvent {
    Line(String),
    Nothing,
    /// It was closed: QEMU has exited.
    End,
}

/// A line of the console.
pub enum Line<'a> {
    /// A message of the protocol: key and value.
    Said(&'a str, &'a str),
    /// Any other output.
    Chatter(&'a str),
}

/// The messages of a guest, in order.
#[derive(Debug, Default)]
pub struct Transcript {
    job: String,
    messages: Vec<(String, String)>,
}

impl Transcript {
    /// The last value of `key`.
    pub fn value(&self, key: &'static str) -> Result<&str, GuestError> {
        let last = self.messages.iter().rev().find(|(said, _)| said == key);
        last.map(|(_, value)| value.as_str()).ok_or_else(|| GuestError::Unsaid { job: self.job.clone(), key })
    }

    fn last(&self) -> Option<(&str, &str)> {
        self.messages.last().map(|(key, value)| (key.as_str(), value.as_str()))
    }
}

pub struct Running {
    qemu: Child,
    keyboard: ChildStdin,
    lines: Receiver<String>,
    transcript: Transcript,
    tail: Vec<String>,
    console: PathBuf,
    messages: PathBuf,
    initrd: PathBuf,
    silence_max_seconds: u64,
}

impl Running {
    /// Starts `qemu` in the directory `work`; `initrd`, built for this boot, is removed with it.
    pub(super) fn start(mut qemu: Command, job: &str, work: &Path, initrd: PathBuf) -> Result<Self, GuestError> {
        let console = work.join(format!("{job}.console"));
        let messages = work.join(format!("{job}.qemu"));
        let log = File::create(&console).map_err(at("create", &console))?;
        let errors = File::create(&messages).map_err(at("create", &messages))?;
        qemu.current_dir(work).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let command = tool::line_of(&qemu);
        let failed = |source| GuestError::Start { command, source };
        let mut child = qemu.spawn().map_err(failed)?;
        let (keyboard, screen) = (child.stdin.take(), child.stdout.take());
        let (Some(keyboard), Some(screen)) = (keyboard, screen) else { unreachable!("both were asked for as pipes") };
        Ok(Self {
            qemu: child,
            keyboard,
            lines: read_console(screen, log),
            transcript: Transcript { job: job.to_owned(), messages: Vec::new() },
            tail: Vec::new(),
            console,
            messages,
            initrd,
            silence_max_seconds: SILENCE_MAX_SECONDS,
        })
    }

    /// Sets the timeout for a silent guest.
    pub fn silent_for_at_most(mut self, seconds: u64) -> Self {
        self.silence_max_seconds = seconds;
        self
    }

    /// Follows the guest to its end. `on_line` is called for every line; when it returns from an `ask=`, the guest is
    /// answered. `Break` ends the guest like a power failure.
    pub fn follow<E: From<GuestError>>(
        mut self,
        mut on_line: impl FnMut(Line<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<Transcript, E> {
        loop {
            let silence = Duration::from_secs(self.silence_max_seconds);
            let line = match self.listen(silence)? {
                ConsoleEvent::Line(line) => line,
                ConsoleEvent::Nothing => return Err(self.silent(self.silence_max_seconds).into()),
                ConsoleEvent::End => return Ok(self.ended()?),
            };
            let flow = match protocol_line(&line) {
                Some((key, value)) => {
                    let flow = on_line(Line::Said(key, value))?;
                    if key == "ask" {
                        self.answer();
                    }
                    flow
                }
                None => on_line(Line::Chatter(&line))?,
            };
            if flow.is_break() {
                return Ok(std::mem::take(&mut self.transcript));
            }
        }
    }

    /// Waits for an event of the console for at most this time. After an `ask=`, the guest waits until it is
    /// [answered](Running::answer).
    pub fn listen(&mut self, at_most: Duration) -> Result<ConsoleEvent, GuestError> {
        match self.lines.recv_timeout(at_most) {
            Ok(line) => {
                self.tail.push(line.clone());
                if let Some((key, value)) = protocol_line(&line) {
                    self.transcript.messages.push((key.to_owned(), value.to_owned()));
                }
                Ok(ConsoleEvent::Line(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(ConsoleEvent::End),
            Err(RecvTimeoutError::Timeout) => Ok(ConsoleEvent::Nothing),
        }
    }

    /// The failure of a guest that was silent for this time.
    pub fn silent(&self, seconds: u64) -> GuestError {
        GuestError::Silent { job: self.transcript.job.clone(), seconds, console: self.console.clone() }
    }

    /// Lets the guest continue after an `ask=`.
    pub fn answer(&mut self) {
        // If the guest has ended, its console is closed as well; the broken pipe is added to the log.
        if let Err(error) = self.keyboard.write_all(b"go\n").and_then(|()| self.keyboard.flush()) {
            self.tail.push(format!("(it takes no answer: {error})"));
        }
    }

    /// Ends the guest like a power failure.
    pub fn cut_power(&mut self) -> Result<(), GuestError> {
        self.qemu.kill().map_err(|source| GuestError::Start { command: "kill QEMU".to_owned(), source })
    }

    /// Determines the result of a guest whose console was closed.
    pub fn ended(&mut self) -> Result<Transcript, GuestError> {
        let (job, console) = (self.transcript.job.clone(), self.console.clone());
        match self.transcript.last() {
            Some(("end", "ok")) => Ok(std::mem::take(&mut self.transcript)),
            Some(("fail", why)) => Err(GuestError::Job { job, why: why.to_owned(), console }),
            _ => {
                let messages = fs::read_to_string(&self.messages).unwrap_or_default();
                let said = format!("{}\n{}", self.tail.join("\n"), messages);
                Err(GuestError::Broke { job, said: tool::last_lines(&said, LAST_LINES), console })
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Err(error) = self.qemu.kill().and_then(|()| self.qemu.wait()) {
            eprintln!("cannot end QEMU, process {}: {error}", self.qemu.id());
        }
        // 90 MB that are not needed, for each boot of a run that is kept.
        if let Err(error) = fs::remove_file(&self.initrd) {
            eprintln!("cannot remove {}: {error}", self.initrd.display());
        }
    }
}

/// The key and value of a protocol line.
pub fn protocol_line(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("TAPLINE ")?.split_once('=')
}

/// Copies the console into `log` and sends its lines, until QEMU closes it.
fn read_console(screen: ChildStdout, mut log: File) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut line = Vec::new();
        for byte in BufReader::new(screen).bytes().map_while(Result::ok) {
            // Lines of fio's progress end with a carriage return only.
            if byte != b'\n' && byte != b'\r' {
                line.push(byte);
                continue;
            }
            let text = String::from_utf8_lossy(&std::mem::take(&mut line)).into_owned();
            // A console that cannot be logged is no reason to stop the guest; its last lines are in memory.
            if let Err(error) = writeln!(log, "{text}") {
                eprintln!("cannot log the console: {error}: {text}");
            }
            if !text.trim().is_empty() && sender.send(text).is_err() {
                return;
            }
        }
    });
    lines
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_lines_of_the_protocol_are_said_to_us() {
        assert_eq!(protocol_line("TAPLINE fail=fio ended with 1 = bad"), Some(("fail", "fio ended with 1 = bad")));
        assert_eq!(protocol_line("[    3.1] reboot: TAPLINE end=ok"), None);
        assert_eq!(protocol_line("TAPLINE"), None);
    }
}
