//! Lines for people, on standard error or in a file: a disk that is served, or a daemon, must not die of its log.
//!
//! It knows nothing of who says what. Invariants: to say something never fails, never panics, and does not wait for a
//! reader who has stopped reading; a line that could not be written is counted, and the next one that can be says first
//! how many are missing. What it cannot help is a file on storage that does not answer: only a thread could wait for
//! that, and it would be one more for each disk.

#![forbid(unsafe_code)]
// They panic where nothing can be written.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod at_once;
mod lines;
pub mod panics;

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use lines::Lines;

/// How long the last words of a program wait for a reader who is slow.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Standard error, for one program. All that a program says is to go through one value, which counts what is lost.
#[derive(Debug)]
pub struct Stderr {
    program: &'static str,
    lines: Lines,
}

impl Stderr {
    /// The standard error of a program, whose name each line begins with.
    pub const fn of(program: &'static str) -> Stderr {
        Stderr { program, lines: Lines::new() }
    }

    /// Says a line.
    pub fn say(&self, line: impl Display) {
        self.write(format!("{}: {line}\n", self.program).as_bytes());
    }

    /// Writes lines that are whole as they are.
    pub fn write(&self, lines: &[u8]) {
        self.lines.write(lines, |lost| self.notice(lost), |bytes| at_once::write(io::stderr(), bytes));
    }

    /// Writes the last lines of a program as they are. A reader who is slow is waited for, but not for long. Whether
    /// they were written.
    pub fn write_last(&self, lines: &str) -> bool {
        let until = Instant::now() + LAST_WORDS;
        self.lines.write(lines.as_bytes(), |lost| self.notice(lost), |bytes| write_until(until, bytes))
    }

    /// Says the last line of a program, as [`Stderr::write_last`] does.
    pub fn say_last(&self, line: impl Display) -> bool {
        self.write_last(&format!("{}: {line}\n", self.program))
    }

    /// Says how many lines are missing, if some are and that can be written now.
    pub fn tell_losses(&self) {
        self.write(b"");
    }

    fn notice(&self, lost: u64) -> String {
        format!("{}: {}\n", self.program, in_words(lost))
    }
}

/// That lines are missing.
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
