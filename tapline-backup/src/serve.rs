//! The export of a backup: one client's conversation, over any stream.
//!
//! The protocol is that of `transport::nbd::Session`; requests are answered here from a [`Reader`], in their order, so
//! that a client holds no more memory than its quota. Knows nothing of listening sockets.

use std::collections::VecDeque;
use std::io::{self, Read, Write};

use backup::Reader;
use disk::size::in_memory;
use disk::{Extent, ExtentKind, Geometry, Operation, Request, Status};
use transport::nbd::{AllDirty, Export, MemoryQuota, Next, Session};

use crate::STDERR;

/// Bytes received or sent at once.
const STAGING: usize = 256 << 10;
/// The unit of a disk.
const SECTOR: u64 = 512;
/// The most extents of an answer: a client continues behind them.
const EXTENTS_MAX: usize = 4096;
/// The part of a disk whose extents are looked up at once.
const LOOKED_UP: u64 = 1 << 30;

/// A backup as an export.
pub struct Exported {
    reader: Reader,
    export: Export,
}

impl Exported {
    /// Under the name of its id, and the empty one.
    pub fn new(reader: Reader) -> Exported {
        let record = reader.record();
        let geometry = Geometry {
            len: record.len.next_multiple_of(SECTOR),
            block: 512,
            physical_block: 4096,
            discard: 4096,
            chs: None,
            read_only: true,
        };
        let description = format!("backup of {}", control::printable(&record.label));
        let export = Export { name: record.id.to_string(), description, geometry, layered: false, bitmaps: Vec::new() };
        Exported { reader, export }
    }

    /// Answers a client until it leaves. An error is that of the stream, or a violation of the protocol.
    pub fn converse(&self, stream: &mut (impl Read + Write)) -> io::Result<()> {
        let mut session = Session::new(0);
        let mut staging = vec![0; STAGING];
        let (mut unread, mut requests) = (Vec::new(), VecDeque::new());
        send(&mut session, stream, &mut staging)?;
        loop {
            let received = session
                .receive(&unread, &self.export, &self.export.geometry, MemoryQuota::default(), &mut requests)
                .map_err(io::Error::other)?;
            unread.drain(..received.used);
            let has_answered = !requests.is_empty() || !session.outgoing().is_empty();
            for mut request in requests.drain(..) {
                let status = self.answer(&mut request);
                session.complete(request, status, &AllDirty, None);
                send(&mut session, stream, &mut staging)?;
            }
            send(&mut session, stream, &mut staging)?;
            match received.next {
                Next::Disconnect | Next::StartTls => return Ok(()),
                // What had to wait for memory has it now.
                Next::Stall if has_answered || received.used > 0 => continue,
                Next::Stall => return Err(io::Error::other("a request is larger than the memory of a client")),
                Next::Receive => {}
            }
            match stream.read(&mut staging) {
                Ok(0) => return Ok(()),
                Ok(len) => unread.extend_from_slice(staging.get(..len).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The stream's time limit: a client may be idle for as long as it likes once it has negotiated.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !session.is_negotiating() => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn answer(&self, request: &mut Request) -> Status {
        let done = match request.operation() {
            Operation::Read => self.read(request),
            Operation::Extents { .. } => self.extents(request),
            Operation::Flush => Ok(()),
            Operation::Write { .. } | Operation::Patch { .. } | Operation::Discard | Operation::WriteZeroes { .. } => {
                return Status::Refused;
            }
        };
        match done {
            Ok(()) => Status::Done,
            Err(error) => {
                STDERR.say(control::in_full(&error));
                Status::Failed
            }
        }
    }

    fn read(&self, request: &Request) -> Result<(), backup::Error> {
        let span = request.span();
        let mut bytes = vec![0; in_memory(span.len)];
        // Behind the last byte of the disk there are zeroes up to the end of its sector.
        let len = self.reader.record().len.saturating_sub(span.at.0).min(span.len);
        self.reader.read_at(span.at.0, bytes.get_mut(..in_memory(len)).unwrap_or_default())?;
        request.memory().copy_from(&bytes);
        Ok(())
    }

    fn extents(&self, request: &mut Request) -> Result<(), backup::Error> {
        let span = request.span();
        let end = span.end().0.min(self.reader.record().len);
        let mut at = span.at.0;
        let mut found = Vec::new();
        while at < end && found.len() < EXTENTS_MAX {
            let part = self.reader.extents(at..(at + LOOKED_UP).min(end))?;
            at += part.iter().map(|extent| extent.len).sum::<u64>();
            found.extend(part);
        }
        found.truncate(EXTENTS_MAX);
        let described: u64 = found.iter().map(|extent| extent.len).sum();
        let kind = |is_zero| if is_zero { ExtentKind::Hole } else { ExtentKind::Data };
        let mut extents: Vec<Extent> =
            found.iter().map(|extent| Extent { len: extent.len, kind: kind(extent.is_zero), depth: 0 }).collect();
        if span.at.0 + described == end && end < span.end().0 {
            extents.push(Extent { len: span.end().0 - end, kind: ExtentKind::Hole, depth: 0 });
        }
        *request.extents_mut() = extents;
        Ok(())
    }
}

fn send(session: &mut Session, stream: &mut impl Write, staging: &mut [u8]) -> io::Result<()> {
    while !session.outgoing().is_empty() {
        let len = session.outgoing().fill(staging);
        stream.write_all(staging.get(..len).unwrap_or_default())?;
        session.outgoing().sent(len);
    }
    Ok(())
}
