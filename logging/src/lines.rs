//! Writes lines, and counts lost ones.
//!
//! It knows nothing about where they go. Invariants: a line that was not written completely is counted; a partly
//! written line is terminated before the next one; the number of lost lines is reported once, before any line after the
//! loss.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The state of lost lines.
#[derive(Debug, Default)]
pub struct Lines {
    lost: AtomicU64,
    /// The last line was written only partly.
    torn: AtomicBool,
}

impl Lines {
    /// The state before the first line: none is lost.
    pub const fn new() -> Lines {
        Lines { lost: AtomicU64::new(0), torn: AtomicBool::new(false) }
    }

    /// Writes complete lines with `write`, which accepts some bytes as [`io::Write::write`] does. If lines were lost,
    /// the line from `notice` is written first. No lock is held meanwhile: code that panics in here may call it again.
    /// Returns whether these lines were written.
    pub fn write(
        &self,
        lines: &[u8],
        notice: impl Fn(u64) -> String,
        mut write: impl FnMut(&[u8]) -> io::Result<usize>,
    ) -> bool {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        if lost > 0 || self.torn.load(Ordering::Relaxed) {
            let end = if self.torn.swap(false, Ordering::Relaxed) { "\n" } else { "" };
            let told = if lost > 0 { format!("{end}{}", notice(lost)) } else { end.to_owned() };
            if !self.all(told.as_bytes(), &mut write) {
                self.torn.fetch_or(!end.is_empty(), Ordering::Relaxed);
                self.lose(lost.saturating_add(count(lines)));
                return false;
            }
        }
        let written = self.all(lines, &mut write);
        if !written {
            self.lose(count(lines));
        }
        written
    }

    /// Returns whether everything was written.
    fn all(&self, mut bytes: &[u8], write: &mut impl FnMut(&[u8]) -> io::Result<usize>) -> bool {
        let mut begun = false;
        while !bytes.is_empty() {
            match write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(written) if written > 0 => {
                    begun = true;
                    bytes = bytes.get(written..).unwrap_or_default();
                }
                _ => {
                    self.torn.fetch_or(begun, Ordering::Relaxed);
                    return false;
                }
            }
        }
        true
    }

    fn lose(&self, lines: u64) {
        self.lost.fetch_add(lines, Ordering::Relaxed);
    }
}

fn count(lines: &[u8]) -> u64 {
    u64::try_from(lines.split_inclusive(|byte| *byte == b'\n').count()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use super::*;

    /// A writer with limited space.
    struct Room(String, usize);

    impl Room {
        fn take(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if self.1 == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let taken = bytes.len().min(self.1);
            self.1 -= taken;
            self.0.push_str(std::str::from_utf8(&bytes[..taken]).unwrap());
            Ok(taken)
        }
    }

    fn say(lines: &Lines, room: &mut Room, line: &str) {
        lines.write(line.as_bytes(), |lost| format!("{lost} lost\n"), |bytes| room.take(bytes));
    }

    #[test]
    fn lost_lines_are_counted_and_reported_once_before_the_next_line() {
        let (lines, mut room) = (Lines::new(), Room(String::new(), 4));
        for line in ["one\n", "two\n", "three\nfour\n"] {
            say(&lines, &mut room, line);
        }
        room.1 = 100;
        say(&lines, &mut room, "five\n");
        say(&lines, &mut room, "six\n");
        assert_eq!(room.0, "one\n3 lost\nfive\nsix\n");
    }

    #[test]
    fn a_partly_written_line_is_lost_and_terminated_before_the_next() {
        let (lines, mut room) = (Lines::new(), Room(String::new(), 2));
        say(&lines, &mut room, "one\n");
        // There is space for the end of that line and a part of the notice.
        room.1 = 3;
        say(&lines, &mut room, "two\n");
        room.1 = 100;
        say(&lines, &mut room, "three\n");
        assert_eq!(room.0, "on\n1 \n2 lost\nthree\n");
    }

    #[test]
    fn lost_lines_can_be_reported_without_a_new_line() {
        let (lines, mut room) = (Lines::new(), Room(String::new(), 0));
        say(&lines, &mut room, "one\n");
        room.1 = 100;
        say(&lines, &mut room, "");
        say(&lines, &mut room, "");
        assert_eq!(room.0, "1 lost\n");
    }

    #[test]
    fn an_interrupted_write_is_continued() {
        let (lines, mut interrupted, mut written) = (Lines::new(), false, 0);
        lines.write(
            b"one\n",
            |_| panic!("nothing is lost"),
            |bytes| {
                if !std::mem::replace(&mut interrupted, true) {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                written += bytes.len();
                Ok(bytes.len())
            },
        );
        assert_eq!(written, 4);
    }
}
