//! A client of QEMU's monitor protocol (QMP): commands with their replies, and events.
//!
//! It knows nothing about machines and disks. Invariant: every call returns within its timeout; a reply is matched to
//! its command by id; a monitor that has disconnected or violates the protocol is not used again.

mod wire;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use serde_json::{Value, json};
use thiserror::Error;

use self::wire::{Lines, WireError};
use crate::socket;

/// The limit on events that the caller has not taken: a guest must not be able to exhaust memory.
const EVENTS_MAX: usize = 1024;

/// How often it is checked whether the caller still wants the greeting of a QEMU that has not sent it.
const SLICE: Duration = Duration::from_millis(100);

/// Something that QEMU said unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What: `SHUTDOWN`, `DEVICE_DELETED`, …
    pub name: String,
    /// More about it.
    pub data: Value,
}

/// Why a command has no answer.
#[derive(Debug, Error)]
pub enum QmpError {
    /// No process listens there.
    #[error("cannot connect to QEMU's monitor at {}: is QEMU running?", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// It has closed the connection.
    #[error("QEMU's monitor closed the connection during {during}: QEMU has exited")]
    Gone {
        /// The command.
        during: String,
    },
    /// The connection failed.
    #[error("cannot talk to QEMU's monitor during {during}")]
    Broken {
        /// The command.
        during: String,
        /// The system's error.
        source: io::Error,
    },
    /// The time is over. QEMU may still do it.
    #[error("QEMU's monitor has not answered {during} in {} s: QEMU hangs, or another client holds its monitor", after.as_secs_f32())]
    Late {
        /// The command.
        during: String,
        /// The timeout.
        after: Duration,
    },
    /// It sent something that is not QMP.
    #[error("the process at QEMU's monitor socket does not speak QMP ({what}): {said}")]
    Nonsense {
        /// What is wrong with it.
        what: &'static str,
        /// The beginning of it.
        said: String,
    },
    /// QEMU has refused the command.
    #[error("QEMU refused {command}: {description}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's class of the error: `GenericError`, `DeviceNotFound`, …
        class: String,
        /// QEMU's message.
        description: String,
    },
    /// An answer is not of the form that QEMU documents.
    #[error("QEMU's answer to {command} has no {missing}: {said}")]
    Answer {
        /// The command.
        command: String,
        /// The missing feature.
        missing: &'static str,
        /// The beginning of it.
        said: String,
    },
    /// An earlier command found the monitor dead.
    #[error("QEMU's monitor was lost earlier: {why}")]
    Lost {
        /// How it was found.
        why: String,
    },
}

impl QmpError {
    /// QEMU has refused with an error of this class.
    pub fn is_refusal(&self, of: &str) -> bool {
        matches!(self, Self::Refused { class, .. } if class == of)
    }

    /// There was no answer in time: QEMU may still do it.
    pub fn is_late(&self) -> bool {
        matches!(self, Self::Late { .. })
    }

    /// QEMU is gone, or its monitor is.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Gone { .. } | Self::Broken { .. } | Self::Lost { .. })
    }
}

/// A connection to a monitor.
#[derive(Debug)]
pub struct Client {
    lines: Lines,
    number: u64,
    events: VecDeque<Event>,
    events_lost: u64,
    /// Why it is no longer used.
    lost: Option<String>,
}

impl Client {
    /// Connects and agrees on the protocol, in all within `timeout`.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, QmpError> {
        Self::connect_unless(path, timeout, &|| false)
    }

    /// The same, but only until the caller has `given_up`.
    pub fn connect_unless(path: &Path, timeout: Duration, given_up: &dyn Fn() -> bool) -> Result<Self, QmpError> {
        let deadline = Deadline::after(timeout);
        let stream = connected(path, deadline)?;
        let mut client =
            Self { lines: Lines::new(stream), number: 0, events: VecDeque::new(), events_lost: 0, lost: None };
        let greeting = client.greeting(deadline, given_up)?;
        if greeting.get("QMP").is_none() {
            return Err(nonsense("no greeting", &greeting));
        }
        client.until("qmp_capabilities", &json!({}), None, deadline)?;
        Ok(client)
    }

    fn greeting(&mut self, deadline: Deadline, given_up: &dyn Fn() -> bool) -> Result<Value, QmpError> {
        loop {
            let slice = Deadline { at: deadline.at.min(Instant::now() + SLICE), ..deadline };
            match self.line("its greeting", slice) {
                Err(error) if error.is_late() && Instant::now() < deadline.at && !given_up() => {}
                greeting => return greeting,
            }
        }
    }

    /// QEMU's answer to `command`.
    pub fn execute(&mut self, command: &str, arguments: &Value, timeout: Duration) -> Result<Value, QmpError> {
        self.until(command, arguments, None, Deadline::after(timeout))
    }

    /// The same for a command that takes a file.
    pub fn execute_with(
        &mut self,
        command: &str,
        arguments: &Value,
        file: BorrowedFd<'_>,
        timeout: Duration,
    ) -> Result<Value, QmpError> {
        self.until(command, arguments, Some(file), Deadline::after(timeout))
    }

    /// Received events that were not waited for.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// Whether an event was received that was not taken and is `wanted`.
    pub fn has_event(&self, wanted: impl FnMut(&Event) -> bool) -> bool {
        self.events.iter().any(wanted)
    }

    /// Drops received events that are not `wanted`.
    pub fn retain_events(&mut self, wanted: impl FnMut(&Event) -> bool) {
        self.events.retain(wanted);
    }

    /// The number of the process that listens at the monitor.
    pub fn peer(&self) -> io::Result<i32> {
        Ok(socket_peercred(&self.lines)?.pid.as_raw_nonzero().get())
    }

    /// How many events were dropped because they were not taken.
    pub fn events_lost(&self) -> u64 {
        self.events_lost
    }

    /// Waits for an event that `wanted` accepts and takes it; `None` when the time is up.
    pub fn wait_event(
        &mut self,
        timeout: Duration,
        mut wanted: impl FnMut(&Event) -> bool,
    ) -> Result<Option<Event>, QmpError> {
        let deadline = Deadline::after(timeout);
        let mut seen = 0;
        loop {
            if let Some(found) = self.events.iter().skip(seen).position(&mut wanted) {
                return Ok(self.events.remove(seen + found));
            }
            seen = self.events.len();
            match self.line("an event", deadline) {
                Ok(line) => {
                    if !self.keep_event(&line) {
                        // The answer to a command that was given up.
                        continue;
                    }
                    seen = seen.min(self.events.len().saturating_sub(1));
                }
                Err(QmpError::Late { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
        }
    }

    fn until(
        &mut self,
        command: &str,
        arguments: &Value,
        file: Option<BorrowedFd<'_>>,
        deadline: Deadline,
    ) -> Result<Value, QmpError> {
        self.number += 1;
        let number = self.number;
        let mut words = json!({ "execute": command, "arguments": arguments, "id": number }).to_string();
        words.push('\n');
        self.alive()?;
        let sent = match file {
            Some(file) => self.lines.send_with(words.as_bytes(), file, deadline.at),
            None => self.lines.send(words.as_bytes(), deadline.at),
        };
        sent.map_err(|error| self.lose(error, command, deadline.timeout))?;
        loop {
            let mut line = self.line(command, deadline)?;
            if self.keep_event(&line) {
                continue;
            }
            match line.get("id").and_then(Value::as_u64) {
                Some(id) if id == number => {}
                // The answer to a command that was given up.
                Some(id) if id < number => continue,
                _ => return Err(self.give_up(nonsense("an unexpected reply", &line))),
            }
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
            return Err(refusal(command, &line));
        }
    }

    /// The next line that is JSON.
    fn line(&mut self, during: &str, deadline: Deadline) -> Result<Value, QmpError> {
        self.alive()?;
        let line = self.lines.next(deadline.at).map_err(|error| self.lose(error, during, deadline.timeout))?;
        serde_json::from_slice(&line).map_err(|_| {
            self.give_up(QmpError::Nonsense { what: "not JSON", said: shortened(&String::from_utf8_lossy(&line)) })
        })
    }

    /// Keeps `line` if it is an event.
    fn keep_event(&mut self, line: &Value) -> bool {
        let Some(name) = line.get("event").and_then(Value::as_str) else { return false };
        if self.events.len() >= EVENTS_MAX {
            self.events.pop_front();
            self.events_lost += 1;
        }
        let data = line.get("data").cloned().unwrap_or_default();
        self.events.push_back(Event { name: name.to_owned(), data });
        true
    }

    fn alive(&self) -> Result<(), QmpError> {
        self.lost.as_ref().map_or(Ok(()), |why| Err(QmpError::Lost { why: why.clone() }))
    }

    /// Handles a failure of the connection. After a timeout the monitor can be used again; any other failure is final.
    fn lose(&mut self, error: WireError, during: &str, timeout: Duration) -> QmpError {
        let during = during.to_owned();
        let error = match error {
            WireError::Late => return QmpError::Late { during, after: timeout },
            WireError::Ended => QmpError::Gone { during },
            WireError::Failed(source) => QmpError::Broken { during, source },
            WireError::TooLong(said) => QmpError::Nonsense { what: "an overlong line", said: shortened(&said) },
        };
        self.give_up(error)
    }

    fn give_up(&mut self, error: QmpError) -> QmpError {
        self.lost = Some(error.to_string());
        error
    }
}

impl AsFd for Client {
    /// Readable when an event has come, or the end.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.lines.as_fd()
    }
}

/// When a call has to end, and how long it was given.
#[derive(Clone, Copy, Debug)]
struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    fn after(timeout: Duration) -> Self {
        let now = Instant::now();
        // A timeout beyond what the clock can say is a day.
        Self { at: now.checked_add(timeout).unwrap_or(now + Duration::from_secs(86_400)), timeout }
    }
}

/// If another client holds the monitor, connecting only waits.
fn connected(path: &Path, deadline: Deadline) -> Result<UnixStream, QmpError> {
    socket::connect(path, deadline.at).map_err(|error| match error {
        Errno::AGAIN => QmpError::Late { during: "the connection".to_owned(), after: deadline.timeout },
        error => QmpError::Connect { path: path.to_owned(), source: error.into() },
    })
}

fn refusal(command: &str, line: &Value) -> QmpError {
    let Some(error) = line.get("error") else { return nonsense("neither an answer nor an error", line) };
    let text = |key| error.get(key).and_then(Value::as_str).unwrap_or("(nothing)").to_owned();
    QmpError::Refused { command: command.to_owned(), class: text("class"), description: text("desc") }
}

fn nonsense(what: &'static str, line: &Value) -> QmpError {
    QmpError::Nonsense { what, said: shortened(&line.to_string()) }
}

/// Enough to recognise it.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod test;
