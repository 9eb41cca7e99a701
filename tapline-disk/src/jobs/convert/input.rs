//! A raw disk on standard input.
//!
//! It is read once, in order. A pipe does not report its length, and ends in the same way if its writer has failed: its
//! length must therefore be given, and reading less is an error.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Seek, SeekFrom};
use std::os::fd::AsFd;

use control::Kind;
use control::size::Size;
use disk::size::{in_memory, on_disk};
use disk::{DiskOffset, Span};
use memory::Segments;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use super::{check_signal, first_data, would_lose};
use crate::image::raw_lookalike;
use crate::jobs::stream::{Chunk, PIECE};
use crate::process::failure::Failure;
use crate::process::signals::Signal;
use arguments::Convert;

const SECTOR: u64 = 512;

/// Standard input.
pub struct Input {
    file: File,
    /// The number of bytes read.
    at: u64,
    /// The number of bytes that must be read.
    expected: u64,
    /// The size of the disk: whole sectors.
    len: u64,
    /// Whether a disk that looks like another format is accepted.
    trusted: bool,
    is_done: bool,
}

impl Input {
    /// Opens standard input as the disk to convert.
    pub fn open(convert: &Convert, trusted: bool) -> Result<Input, Failure> {
        let stdin = io::stdin();
        if stdin.is_terminal() {
            return Err(failed("it is a terminal").advise("give a file or a pipe: < FILE").of_kind(Kind::Invalid));
        }
        let mut file = File::from(stdin.as_fd().try_clone_to_owned().map_err(failed)?);
        let expected = match (convert.size, len_of(&mut file)) {
            (Some(Size(size)), None) => size,
            (None, Some(len)) => len,
            (Some(Size(size)), Some(len)) if size <= len => size,
            (Some(Size(size)), Some(len)) => return Err(too_short(len, size)),
            (None, None) => {
                return Err(failed("the length of a pipe is not known in advance")
                    .advise("add --size with the size of the disk: less than that is an error, as is more data")
                    .of_kind(Kind::Invalid));
            }
        };
        let len = expected.checked_next_multiple_of(SECTOR).unwrap_or(expected);
        Ok(Input { file, at: 0, expected, len, trusted, is_done: false })
    }

    /// Returns the size of the disk in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Reads the next piece of the disk; `None` at its end.
    pub fn next(&mut self, convert: &Convert, stop: &mut Option<Signal>) -> Result<Option<Chunk>, Failure> {
        if self.is_done {
            return Ok(None);
        }
        if self.at == self.len {
            self.is_done = true;
            return self.must_be_zero(convert, stop).map(|()| None);
        }
        let at = self.at;
        let mut bytes = vec![0; in_memory(PIECE.min(self.len - at))];
        let read = on_disk(self.fill(&mut bytes, convert, stop)?);
        let span = Span { at: DiskOffset(at), len: PIECE.min(self.len - at) };
        if at + read < self.expected.min(at + span.len) {
            self.is_done = true;
            return Err(too_short(at + read, self.expected));
        }
        self.at += span.len;
        self.must_be_raw(convert, at, &bytes)?;
        let bytes = first_data(&bytes).map(|_| Segments::copy_of(&bytes));
        Ok(Some(Chunk { span, bytes, lost: Vec::new() }))
    }

    /// Reads to the end of the input; fails if there is data behind the disk.
    fn must_be_zero(&mut self, convert: &Convert, stop: &mut Option<Signal>) -> Result<(), Failure> {
        let mut bytes = vec![0; in_memory(PIECE)];
        let mut at = self.len;
        loop {
            let read = self.fill(&mut bytes, convert, stop)?;
            let read = bytes.get(..read).unwrap_or_default();
            match first_data(read) {
                _ if read.is_empty() => return Ok(()),
                Some(found) => return Err(would_lose(convert, self.len, at + found)),
                None => at += on_disk(read.len()),
            }
        }
    }

    /// Rejects a disk that begins or ends like an image of another format.
    fn must_be_raw(&self, convert: &Convert, at: u64, bytes: &[u8]) -> Result<(), Failure> {
        let first = if at == 0 { bytes } else { &[0] };
        let last = if self.at == self.len { bytes.last_chunk::<512>() } else { None };
        match raw_lookalike::looks_like(first, last.map(<[u8; 512]>::as_slice).unwrap_or_default()) {
            Some(found) if !self.trusted => Err(raw_lookalike::refusal(&convert.source, found)),
            _ => Ok(()),
        }
    }

    /// Reads until `bytes` are full, or to the end of the input.
    fn fill(&mut self, bytes: &mut [u8], convert: &Convert, stop: &mut Option<Signal>) -> Result<usize, Failure> {
        let mut done = 0;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            self.wait(stop.as_ref())?;
            check_signal(convert, stop)?;
            match self.file.read(rest) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(done)
    }

    /// Waits for input or a signal.
    fn wait(&self, stop: Option<&Signal>) -> Result<(), Failure> {
        let mut events = vec![PollFd::new(&self.file, PollFlags::IN)];
        events.extend(stop.map(|stop| PollFd::new(stop, PollFlags::IN)));
        match poll(&mut events, None) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(failed(io::Error::from(errno))),
        }
    }
}

/// Returns the remaining bytes of a file or a block device; `None` for other kinds of files.
fn len_of(file: &mut File) -> Option<u64> {
    let kind = file.metadata().ok()?.file_type();
    let here = file.stream_position().ok()?;
    let end = file.seek(SeekFrom::End(0)).ok()?;
    file.seek(SeekFrom::Start(here)).ok()?;
    // The end of a character device, such as /dev/zero, is at 0.
    (kind.is_file() || end > 0).then(|| end.saturating_sub(here))
}

fn too_short(has: u64, expected: u64) -> Failure {
    failed(format!("it ended after {has} bytes, but the disk has {expected}"))
        .advise("see whether the program that writes it has failed; or give its size as --size")
}

fn failed(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::new("read the disk from standard input", why)
}
