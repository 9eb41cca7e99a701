//! One client, as it is described to the process that takes the place of this one: what was agreed, and the bytes that
//! are under way in either direction.
//!
//! Knows nothing of how parcels travel. Invariant: a client is handed over between two requests, or within one that it
//! is sending; none of its requests is in the disk.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use disk::{Operation, Span};
use memory::Segments;
use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::command::Ask;
use super::connection::Connection;
use super::export::{Agreed, REQUEST_MAX};
use super::handshake::{ClientFlags, Handshake};
use super::outgoing::Outgoing;
use super::session::{Phase, Session};
use super::transmission::{Receiving, Transmission};
use crate::{HandoverError, Parcel};

/// Of this layout.
const VERSION: u32 = 1;

/// How far a conversation is.
const GREETED: u32 = 0;
const NEGOTIATING: u32 = 1;
const SERVING: u32 = 2;

const FIXED: u32 = 1 << 0;
const NO_ZEROES: u32 = 1 << 1;
const STRUCTURED: u32 = 1 << 2;
const ALLOCATION: u32 = 1 << 3;
/// Part of a write has come; it is to be durable.
const WRITING: u32 = 1 << 4;
const DURABLE: u32 = 1 << 5;
const DEPTH: u32 = 1 << 6;

/// Unsent replies of one client: all that it may hold, and their heads.
const OUTGOING_MAX: u64 = 128 << 20;
const UNREAD_MAX: u64 = 1 << 20;

/// What is told of a client, beside its socket and a file with bytes: replies that are not sent yet, input that was not
/// looked at, and what has come of the write that it is sending.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Told {
    version: u32,
    client: u32,
    phase: u32,
    flags: u32,
    options: u32,
    write_len: u32,
    write_at: u64,
    cookie: u64,
    outgoing: u64,
    unread: u64,
    written: u64,
}

/// A client as it is told.
pub(super) fn told(connection: &Connection) -> Result<Parcel, HandoverError> {
    let failed = |what| move |error: std::io::Error| HandoverError::Failed(what, error);
    let (socket, session, unread) = connection.parts().ok_or(HandoverError::NotNow("a client is leaving"))?;
    let outgoing = session.unsent().unsent();
    let mut told = Told {
        version: VERSION,
        client: connection.client,
        phase: GREETED,
        flags: 0,
        options: 0,
        write_len: 0,
        write_at: 0,
        cookie: 0,
        outgoing: length(&outgoing),
        unread: length(unread),
        written: 0,
    };
    let written = match session.phase() {
        Phase::Negotiating(handshake) => told.negotiating(handshake),
        Phase::Serving(transmission) => told.serving(transmission)?,
        Phase::Over => return Err(HandoverError::NotNow("a client is leaving")),
    };
    told.written = length(&written);
    let file =
        memfd_create("client", MemfdFlags::CLOEXEC).map_err(|errno| failed("make a file in memory")(errno.into()))?;
    let mut file = File::from(file);
    for bytes in [&outgoing, unread, &written] {
        file.write_all(bytes).map_err(failed("write a file in memory"))?;
    }
    let socket = socket.try_clone().map_err(failed("duplicate a client's socket"))?;
    Ok(Parcel { bytes: told.as_bytes().to_vec(), descriptors: vec![socket, file.into()] })
}

impl Told {
    fn set(&mut self, flags: impl IntoIterator<Item = (u32, bool)>) {
        self.flags |= flags.into_iter().filter(|(_, is_set)| *is_set).fold(0, |all, (flag, _)| all | flag);
    }

    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn negotiating(&mut self, handshake: &Handshake) -> Vec<u8> {
        let Handshake { client, options, agreed } = handshake;
        self.phase = if client.is_some() { NEGOTIATING } else { GREETED };
        self.options = *options;
        self.agreed(*agreed);
        self.set(client.iter().flat_map(|client| [(FIXED, client.fixed), (NO_ZEROES, client.no_zeroes)]));
        Vec::new()
    }

    fn agreed(&mut self, agreed: Agreed) {
        let Agreed { structured, allocation, depth } = agreed;
        self.set([(STRUCTURED, structured), (ALLOCATION, allocation), (DEPTH, depth)]);
    }

    /// The bytes of the write that is being sent.
    fn serving(&mut self, transmission: &Transmission) -> Result<Vec<u8>, HandoverError> {
        self.phase = SERVING;
        let (agreed, receiving) = transmission.parts().ok_or(HandoverError::NotNow("requests are under way"))?;
        self.agreed(agreed);
        match receiving {
            Receiving::Header => Ok(Vec::new()),
            Receiving::Waste { .. } => Err(HandoverError::NotNow("a client is sending what was refused")),
            Receiving::Data { cookie, ask, memory, filled } => {
                let durable = ask.operation == Operation::Write { durable: true };
                self.set([(WRITING, true), (DURABLE, durable)]);
                (self.cookie, self.write_at) = (*cookie, ask.span.at);
                // At most REQUEST_MAX.
                self.write_len = u32::try_from(memory.len()).unwrap_or(0);
                let mut written = vec![0; *filled];
                memory.slice(0, *filled).copy_to(&mut written);
                Ok(written)
            }
        }
    }

    fn taken(&self) -> Agreed {
        Agreed { structured: self.has(STRUCTURED), allocation: self.has(ALLOCATION), depth: self.has(DEPTH) }
    }

    /// How far the conversation is, with what has come of a write.
    fn phase(&self, written: &[u8], prefix: u64) -> Option<Phase> {
        let client = ClientFlags { fixed: self.has(FIXED), no_zeroes: self.has(NO_ZEROES) };
        let client = (self.phase == NEGOTIATING).then_some(client);
        match self.phase {
            GREETED | NEGOTIATING => {
                Some(Phase::Negotiating(Handshake { client, options: self.options, agreed: self.taken() }))
            }
            SERVING => Some(Phase::Serving(Transmission::resumed(self.taken(), prefix, self.receiving(written)?))),
            _ => None,
        }
    }

    fn receiving(&self, written: &[u8]) -> Option<Receiving> {
        if !self.has(WRITING) {
            return Some(Receiving::Header);
        }
        let len = usize::try_from(self.write_len)
            .ok()
            .filter(|&len| self.write_len <= REQUEST_MAX && written.len() <= len)?;
        let memory = Segments::zeroed(len);
        memory.slice(0, written.len()).copy_from(written);
        let operation = Operation::Write { durable: self.has(DURABLE) };
        let span = Span { at: self.write_at, len: u64::from(self.write_len) };
        let ask = Ask { operation, span, then_flush: false, one_extent: false, fast: false, silent: false };
        Some(Receiving::Data { cookie: self.cookie, ask, memory, filled: written.len() })
    }
}

/// A client that was told of; `prefix` makes the upper bits of its tokens from its number.
pub(super) fn take(parcel: Parcel, prefix: impl FnOnce(u32) -> u64) -> Result<Connection, HandoverError> {
    let refused = || HandoverError::Refused("a client is handed over in a way that is not understood here".into());
    let told = Told::read_from_bytes(&parcel.bytes).ok().filter(|told| told.version == VERSION).ok_or_else(refused)?;
    let [socket, file] = <[OwnedFd; 2]>::try_from(parcel.descriptors).map_err(|_| refused())?;
    let limits = [(told.outgoing, OUTGOING_MAX), (told.unread, UNREAD_MAX), (told.written, u64::from(REQUEST_MAX))];
    if limits.iter().any(|(len, most)| len > most) {
        return Err(refused());
    }
    let file = File::from(file);
    let mut at = 0;
    let mut piece = |len: u64| {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let read = file.read_exact_at(&mut bytes, at);
        at = at.saturating_add(len);
        read.map(|()| bytes).map_err(|error| HandoverError::Failed("read what a client is owed", error))
    };
    let (outgoing, unread, written) = (piece(told.outgoing)?, piece(told.unread)?, piece(told.written)?);
    let prefix = prefix(told.client);
    let phase = told.phase(&written, prefix).ok_or_else(refused)?;
    let mut replies = Outgoing::default();
    replies.push(outgoing, Segments::empty());
    Ok(Connection::resumed(told.client, Session::resumed(phase, replies, prefix), socket, unread))
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use zerocopy::FromZeros;

    use super::*;

    #[test]
    fn the_next_process_keeps_to_what_was_agreed_on() {
        for bits in 0..8 {
            let agreed = Agreed { structured: bits & 1 != 0, allocation: bits & 2 != 0, depth: bits & 4 != 0 };
            let mut told = Told::new_zeroed();
            told.agreed(agreed);
            assert_eq!(told.taken(), agreed);
        }
        // As a process says it that has not heard of depths.
        let told = Told { flags: STRUCTURED | ALLOCATION, ..Told::new_zeroed() };
        assert_eq!(told.taken(), Agreed { structured: true, allocation: true, depth: false });
    }
}
