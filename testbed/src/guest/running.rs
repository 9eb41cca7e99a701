//! A guest that runs: QEMU, the console it speaks on, and the deadline after which silence means that it hangs.
//!
//! Knows nothing of jobs but their protocol: lines `TAPLINE key=value`, of which `ask=` waits for an answer, `fail=`
//! and `end=ok` come last. However it ends, QEMU does not outlive the value.

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

/// The longest pause of a healthy job is a few seconds; a loaded machine under TCG is tens of times slower.
const SILENCE_MAX_SECONDS: u64 = 120;

/// Initramfs twice (packed and unpacked, 90 MB each), and what fio and the page cache take.
pub const MEMORY_MIB: u32 = 768;

/// What every guest is told. Whether its timer works it would find out by counting ticks while the host's clock goes
/// on, and panics where the emulator has not run for long enough. Programs are always at the same addresses: QEMU
/// before 8.0 translates code again for each other address at which it runs, which takes most of the time of scripts.
pub const COMMAND_LINE: &str = "console=ttyS0 quiet panic=-1 mitigations=off no_timer_check norandmaps";

/// Enough of a console to see why a guest broke.
const LAST_LINES: usize = 12;

/// QEMU without a disk. The guest's memory is shared, as vhost-user needs it to be.
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

/// Adds the disk behind `socket` as the guest's next one.
pub fn add_disk(command: &mut Command, number: usize, socket: &str) {
    command.args(["-chardev", &format!("socket,id=disk{number},path={socket}")]);
    command.args(["-device", &format!("vhost-user-blk-pci,chardev=disk{number},num-queues={CPUS}")]);
}

/// What a console says in some time.
pub enum Heard {
    Line(String),
    Nothing,
    /// It is closed: QEMU has ended.
    End,
}

/// One line of the console.
pub enum Line<'a> {
    /// Said to us.
    Said(&'a str, &'a str),
    /// Said to nobody in particular.
    Chatter(&'a str),
}

/// What a guest said, in order.
#[derive(Debug, Default)]
pub struct Transcript {
    job: String,
    said: Vec<(String, String)>,
}

impl Transcript {
    /// The last value said for `key`.
    pub fn value(&self, key: &'static str) -> Result<&str, GuestError> {
        let last = self.said.iter().rev().find(|(said, _)| said == key);
        last.map(|(_, value)| value.as_str()).ok_or_else(|| GuestError::Unsaid { job: self.job.clone(), key })
    }

    fn last(&self) -> Option<(&str, &str)> {
        self.said.last().map(|(key, value)| (key.as_str(), value.as_str()))
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
    /// Starts `qemu` in the directory `work`; `initrd`, made for this boot, goes with it.
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
            transcript: Transcript { job: job.to_owned(), said: Vec::new() },
            tail: Vec::new(),
            console,
            messages,
            initrd,
            silence_max_seconds: SILENCE_MAX_SECONDS,
        })
    }

    /// Another deadline than two minutes.
    pub fn silent_for_at_most(mut self, seconds: u64) -> Self {
        self.silence_max_seconds = seconds;
        self
    }

    /// Follows the guest to its end. `heard` is given every line; what an `ask=` asks for is done when `heard` returns
    /// from it. `Break` ends the guest as a power failure would.
    pub fn follow<E: From<GuestError>>(
        mut self,
        mut heard: impl FnMut(Line<'_>) -> Result<ControlFlow<()>, E>,
    ) -> Result<Transcript, E> {
        loop {
            let silence = Duration::from_secs(self.silence_max_seconds);
            let line = match self.listen(silence)? {
                Heard::Line(line) => line,
                Heard::Nothing => return Err(self.silent(self.silence_max_seconds).into()),
                Heard::End => return Ok(self.ended()?),
            };
            let flow = match said(&line) {
                Some((key, value)) => {
                    let flow = heard(Line::Said(key, value))?;
                    if key == "ask" {
                        self.answer();
                    }
                    flow
                }
                None => heard(Line::Chatter(&line))?,
            };
            if flow.is_break() {
                return Ok(std::mem::take(&mut self.transcript));
            }
        }
    }

    /// What the console says within so long. What an `ask=` asks for goes on when it is [answered](Running::answer).
    pub fn listen(&mut self, at_most: Duration) -> Result<Heard, GuestError> {
        match self.lines.recv_timeout(at_most) {
            Ok(line) => {
                self.tail.push(line.clone());
                if let Some((key, value)) = said(&line) {
                    self.transcript.said.push((key.to_owned(), value.to_owned()));
                }
                Ok(Heard::Line(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(Heard::End),
            Err(RecvTimeoutError::Timeout) => Ok(Heard::Nothing),
        }
    }

    /// The failure of a guest that has been silent for so long.
    pub fn silent(&self, seconds: u64) -> GuestError {
        GuestError::Silent { job: self.transcript.job.clone(), seconds, console: self.console.clone() }
    }

    /// Has the guest go on after an `ask=`.
    pub fn answer(&mut self) {
        // A guest that is gone shows as the end of its console; the broken pipe is a part of its last words.
        if let Err(error) = self.keyboard.write_all(b"go\n").and_then(|()| self.keyboard.flush()) {
            self.tail.push(format!("(it takes no answer: {error})"));
        }
    }

    /// Ends the guest as a power failure would.
    pub fn cut_power(&mut self) -> Result<(), GuestError> {
        self.qemu.kill().map_err(|source| GuestError::Start { command: "kill QEMU".to_owned(), source })
    }

    /// Judges a guest whose console has closed.
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
        // 90 MB that nobody looks at, for each boot of a run that is kept.
        if let Err(error) = fs::remove_file(&self.initrd) {
            eprintln!("cannot remove {}: {error}", self.initrd.display());
        }
    }
}

/// The key and value of a line meant for us.
pub fn said(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("TAPLINE ")?.split_once('=')
}

/// Copies the console into `log` and hands out its lines, until QEMU closes it.
fn read_console(screen: ChildStdout, mut log: File) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut line = Vec::new();
        for byte in BufReader::new(screen).bytes().map_while(Result::ok) {
            // fio's progress ends its lines with a carriage return alone.
            if byte != b'\n' && byte != b'\r' {
                line.push(byte);
                continue;
            }
            let text = String::from_utf8_lossy(&std::mem::take(&mut line)).into_owned();
            // A console that cannot be kept is no reason to stop the guest; its last lines are in memory.
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
        assert_eq!(said("TAPLINE fail=fio ended with 1 = bad"), Some(("fail", "fio ended with 1 = bad")));
        assert_eq!(said("[    3.1] reboot: TAPLINE end=ok"), None);
        assert_eq!(said("TAPLINE"), None);
    }
}
