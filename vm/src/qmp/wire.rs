//! Lines on a socket, each with a deadline and a maximum length.
//!
//! It knows nothing about their contents. A line that is incomplete when the time is up is finished by the next call.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// The longest answer, of query-pci for 255 disks, has 300 KiB.
pub const LINE_MAX: usize = 4 << 20;

/// Bytes read at once.
const CHUNK: usize = 16 << 10;

/// Why there is no line.
#[derive(Debug)]
pub enum WireError {
    /// The time is over.
    Late,
    /// The other side has closed.
    Ended,
    /// The operating system's error.
    Failed(io::Error),
    /// A line beyond the bound; its beginning.
    TooLong(String),
}

/// A non-blocking socket, and the data read from it but not returned yet.
#[derive(Debug)]
pub struct Lines {
    stream: UnixStream,
    read: Vec<u8>,
    /// Bytes of `read` that have no end of a line in them.
    searched: usize,
}

impl Lines {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, read: Vec::new(), searched: 0 }
    }

    /// Sends all of `bytes`.
    pub fn send(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<(), WireError> {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(PollFlags::OUT, deadline)?,
                Err(error) => end_or_failure(error)?,
            }
        }
        Ok(())
    }

    /// The same, with a file: it goes with the first byte.
    pub fn send_with(&mut self, bytes: &[u8], file: BorrowedFd<'_>, deadline: Instant) -> Result<(), WireError> {
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            let files = [file];
            if !control.push(SendAncillaryMessage::ScmRights(&files)) {
                return Err(WireError::Failed(ErrorKind::InvalidInput.into()));
            }
            match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
                Ok(sent) => return self.send(bytes.get(sent..).unwrap_or_default(), deadline),
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT, deadline)?,
                Err(error) => end_or_failure(error.into())?,
            }
        }
    }

    /// The next line, without its line end.
    pub fn next(&mut self, deadline: Instant) -> Result<Vec<u8>, WireError> {
        loop {
            if let Some(line) = self.buffered() {
                return Ok(line);
            }
            if self.read.len() > LINE_MAX {
                let beginning = self.read.iter().take(1024).copied().collect::<Vec<u8>>();
                return Err(WireError::TooLong(String::from_utf8_lossy(&beginning).into_owned()));
            }
            let mut chunk = [0; CHUNK];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(WireError::Ended),
                Ok(len) => self.read.extend_from_slice(chunk.get(..len).unwrap_or_default()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait(PollFlags::IN, deadline)?,
                Err(error) => end_or_failure(error)?,
            }
        }
    }

    fn buffered(&mut self) -> Option<Vec<u8>> {
        let rest = self.read.get(self.searched..).unwrap_or_default();
        let Some(end) = rest.iter().position(|&byte| byte == b'\n') else {
            self.searched = self.read.len();
            return None;
        };
        let mut line: Vec<u8> = self.read.drain(..=self.searched + end).collect();
        self.searched = 0;
        while line.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
            line.pop();
        }
        Some(line)
    }

    fn wait(&self, flags: PollFlags, deadline: Instant) -> Result<(), WireError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(WireError::Late);
        }
        let timeout = Timespec::try_from(left).ok();
        match poll(&mut [PollFd::new(&self.stream, flags)], timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(WireError::Failed(error.into())),
        }
    }
}

impl AsFd for Lines {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// A peer that was killed resets the connection or breaks the pipe, which also means its end.
fn end_or_failure(error: io::Error) -> Result<(), WireError> {
    match error.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Err(WireError::Ended),
        _ => Err(WireError::Failed(error)),
    }
}
