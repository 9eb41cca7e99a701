//! Log lines on standard error or in a file: a disk being served, or a daemon, must not die because of its log.
//!
//! It knows nothing about their contents. Invariants: logging never fails, never panics, and does not wait for a reader
//! that has stopped reading; a line that could not be written is counted, and the next successful one is preceded by
//! the number of lost lines. It cannot avoid blocking on a file whose storage hangs: only a thread could wait for that,
//! and that would be one more for each disk.

#![forbid(unsafe_code)]
// These macros panic if nothing can be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod at_once;
mod lines;
pub mod panics;

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use lines::Lines;

/// How long the last lines of a program wait for a slow reader.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The standard error of one program. All output of a program must go through one value, which counts lost lines.
#[derive(Debug)]
pub struct Stderr {
    program: &'static str,
    lines: Lines,
}

impl Stderr {
    /// The standard error of a program, whose name is the prefix of each line.
    pub const fn of(program: &'static str) -> Stderr {
        Stderr { program, lines: Lines::new() }
    }

    /// Writes one line, with the program's name in front.
    pub fn say(&self, line: impl Display) {
        self.write(format!("{}: {line}\n", self.program).as_bytes());
    }

    /// Writes complete lines unchanged.
    pub fn write(&self, lines: &[u8]) {
        self.lines.write(lines, |lost| self.notice(lost), |bytes| at_once::write(io::stderr(), bytes));
    }

    /// Writes the last lines of a program unchanged. Waits for a slow reader, but not for long. Returns whether they
    /// were written.
    pub fn write_last(&self, lines: &str) -> bool {
        let until = Instant::now() + LAST_WORDS;
        self.lines.write(lines.as_bytes(), |lost| self.notice(lost), |bytes| write_until(until, bytes))
    }

    /// Logs the last line of a program, as [`Stderr::write_last`] does.
    pub fn say_last(&self, line: impl Display) -> bool {
        self.write_last(&format!("{}: {line}\n", self.program))
    }

    /// Logs the number of lost lines, if there are any and that can be written now.
    pub fn tell_losses(&self) {
        self.write(b"");
    }

    fn notice(&self, lost: u64) -> String {
        format!("{}: {}\n", self.program, in_words(lost))
    }
}

/// A message that lines were lost.
pub fn in_words(lost: u64) -> String {
    let lines = if lost == 1 { "line" } else { "lines" };
    format!("{lost} {lines} could not be logged")
}

fn write_until(until: Instant, bytes: &[u8]) -> io::Result<usize> {
    loop {
        match at_once::write(io::stderr(), bytes) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(error);
                }
                let timeout = Timespec::try_from(left).map_err(|_| error)?;
                let stderr = io::stderr();
                poll(&mut [PollFd::new(&stderr, PollFlags::OUT)], Some(&timeout))?;
            }
            written => return written,
        }
    }
}
