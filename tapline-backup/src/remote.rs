//! NBD exports as sources and destinations.
//!
//! The client connects again after a loss (decision 0060). Invariant: what is restored is durable when
//! [`ExportSink::finish`] returns.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use backup::{Extent, Sink, Source};
use disk::size::{in_memory, on_disk};
use disk::{Action, Allocation, FileError, FileOffset};
use nbd::tls::directory;
use nbd::uri::Uri;
use uring::{Remote, RemoteOptions};

use crate::STDERR;
use crate::failure::{Exit, Failure};
use crate::stop;

/// How long a server that is away is waited for: long enough for a restart of it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that are written at once: so that several requests of the client are in flight.
const WRITE: usize = 4 << 20;
/// Bytes that are compared with zero at once.
const CHECK: u64 = 4 << 20;

/// Opens an export.
pub fn open(uri: &Uri, write: bool, patience: Duration) -> Result<Remote, Failure> {
    Remote::open(uri, options(uri, write, patience)?).map_err(|error| {
        let advice = format!("check that its server runs and has this export: nbdinfo '{uri}'");
        Failure::new(Exit::Failed, error.to_string()).advise(advice)
    })
}

fn options(uri: &Uri, write: bool, patience: Duration) -> Result<RemoteOptions, Failure> {
    Ok(RemoteOptions {
        write,
        tls: uri.tls.as_ref().map(directory::of_client).transpose()?,
        patience: Some(patience),
        may_wait: true,
        stopping: || stop::cancelled().load(Ordering::Relaxed),
        report: |line| STDERR.say(line),
    })
}

fn failed(error: FileError) -> io::Error {
    match error {
        FileError::NoSpace => io::ErrorKind::StorageFull.into(),
        FileError::Unsupported => io::ErrorKind::Unsupported.into(),
        FileError::Failed(errno) => io::Error::from_raw_os_error(errno),
    }
}

/// What the server says has changed, as `qemu:dirty-bitmap:NAME`.
pub fn dirty(uri: &Uri, bitmap: &str) -> Result<Vec<Range<u64>>, Failure> {
    let context = format!("qemu:dirty-bitmap:{bitmap}");
    let remote = Remote::of_context(uri, &context, options(uri, false, PATIENCE)?)
        .map_err(|error| Failure::new(Exit::Failed, error.to_string()))?;
    let mut changed: Vec<Range<u64>> = Vec::new();
    let mut at = 0;
    while at < remote.size() {
        let described = remote.described(at);
        if described.is_empty() {
            let what = format!("cannot read the changes at {at}: {uri} does not offer {context}, or does not answer");
            return Err(Failure::new(Exit::Failed, what)
                .advise(format!("export the bitmap: qemu-nbd -B {bitmap}; or back up without --bitmap")));
        }
        for extent in described {
            if extent.flags & 1 != 0 {
                match changed.last_mut() {
                    Some(last) if last.end == at => last.end += extent.len,
                    _ => changed.push(at..at + extent.len),
                }
            }
            at += extent.len;
        }
    }
    Ok(changed)
}

/// An export that is read.
pub struct ExportSource(Remote);

impl ExportSource {
    /// The export must not change while it is read.
    pub fn new(remote: Remote) -> ExportSource {
        ExportSource(remote)
    }
}

impl Source for ExportSource {
    fn len(&self) -> u64 {
        self.0.size()
    }

    fn extents(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        Ok(extents(&self.0, range))
    }

    fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.0.wait_to_read(at, buffer).map_err(failed)
    }
}

fn extents(remote: &Remote, range: Range<u64>) -> Vec<Extent> {
    let mut extents = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let (len, is_zero) = match remote.allocated(at, range.end - at) {
            Allocation::Data(len) => (len, false),
            Allocation::Hole(len) => (len, true),
        };
        // After an answer of nothing the same question would follow without end.
        let (len, is_zero) = if len == 0 { (range.end - at, false) } else { (len.min(range.end - at), is_zero) };
        extents.push(Extent { len, is_zero });
        at += len;
    }
    extents
}

/// The offset of the first byte of an export that is not zero.
pub fn first_data(remote: &Remote) -> Result<Option<u64>, Failure> {
    let mut at = 0;
    while at < remote.size() {
        if stop::cancelled().load(Ordering::Relaxed) {
            return Err(backup::Error::Cancelled.into());
        }
        let end = (at + CHECK).min(remote.size());
        for extent in extents(remote, at..end) {
            if !extent.is_zero {
                let mut bytes = vec![0; in_memory(extent.len)];
                let read = remote.wait_to_read(at, &mut bytes);
                read.map_err(|error| Failure::cannot(format_args!("read the destination at {at}"), failed(error)))?;
                if let Some(index) = bytes.iter().position(|byte| *byte != 0) {
                    return Ok(Some(at + on_disk(index)));
                }
            }
            at += extent.len;
        }
    }
    Ok(None)
}

/// An export that is written from its beginning to its end.
pub struct ExportSink {
    remote: Remote,
    /// All of it is zero.
    is_blank: bool,
    /// Offset of the buffered bytes, and these.
    at: u64,
    buffer: Vec<u8>,
    /// The end of what was written or zeroed.
    end: u64,
}

impl ExportSink {
    /// `is_blank` if every byte of the export is zero.
    pub fn new(remote: Remote, is_blank: bool) -> ExportSink {
        ExportSink { remote, is_blank, at: 0, buffer: Vec::new(), end: 0 }
    }

    fn write_buffer(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.remote.wait_to_write(self.at, &self.buffer).map_err(failed)?;
        self.buffer.clear();
        Ok(())
    }

    fn zero_now(&mut self, at: u64, len: u64) -> io::Result<()> {
        let action = Action::Deallocate { at: FileOffset(at), len };
        match self.remote.wait_for(action) {
            Err(FileError::Unsupported) => {}
            done => return done.map_err(failed),
        }
        let mut done = 0;
        while done < len {
            let part = (len - done).min(on_disk(WRITE));
            self.remote.wait_to_write(at + done, &vec![0; in_memory(part)]).map_err(failed)?;
            done += part;
        }
        Ok(())
    }

    /// Writes what is left, zeroes the rest of the export, and makes all of it durable.
    pub fn finish(mut self) -> Result<(), Failure> {
        let finished = self.write_buffer().and_then(|()| match self.remote.size() - self.end {
            0 => Ok(()),
            _ if self.is_blank => Ok(()),
            rest => self.zero_now(self.end, rest),
        });
        finished
            .and_then(|()| self.remote.wait_for(Action::SyncData).map_err(failed))
            .map_err(|error| Failure::cannot("finish writing the destination", error))
    }
}

impl Sink for ExportSink {
    fn write(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let follows = self.at + on_disk(self.buffer.len()) == at;
        if !follows || self.buffer.len() + bytes.len() > WRITE {
            self.write_buffer()?;
        }
        if self.buffer.is_empty() {
            self.at = at;
        }
        self.buffer.extend_from_slice(bytes);
        self.end = at + on_disk(bytes.len());
        Ok(())
    }

    fn zero(&mut self, at: u64, len: u64) -> io::Result<()> {
        self.write_buffer()?;
        self.end = at + len;
        if self.is_blank { Ok(()) } else { self.zero_now(at, len) }
    }
}
