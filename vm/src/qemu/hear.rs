//! Reads the standard output of a program, within a bounded time.
//!
//! It knows nothing about its meaning. Invariant: neither a hanging program nor endless output blocks the reader.

use std::io::{self, Read};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// The output.
pub(super) struct Heard {
    pub(super) said: Vec<u8>,
    /// The output ended, was enough, or reached its limit before the time was up.
    pub(super) in_time: bool,
}

/// Reads until the end of the output, `most` bytes, or until `enough` returns true, for at most `patience`.
pub(super) fn hear(
    child: &mut Child,
    patience: Duration,
    most: usize,
    enough: impl Fn(&[u8]) -> bool,
) -> io::Result<Heard> {
    let deadline = Instant::now() + patience;
    let mut said = Vec::new();
    let Some(words) = child.stdout.as_mut() else { return Ok(Heard { said, in_time: true }) };
    while said.len() < most {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Heard { said, in_time: false });
        }
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&*words, PollFlags::IN)], Some(&timeout)) {
            // The time is over, or a signal has come.
            Ok(0) | Err(Errno::INTR) => continue,
            ready => ready?,
        };
        let mut chunk = [0; 4096];
        let len = words.read(&mut chunk)?;
        said.extend_from_slice(chunk.get(..len).unwrap_or_default());
        if len == 0 || enough(&said) {
            break;
        }
    }
    Ok(Heard { said, in_time: true })
}
