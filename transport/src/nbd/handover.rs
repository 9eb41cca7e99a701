//! The state of one client as handed over to a successor process: the negotiated options, and the bytes in transit in
//! both directions.
//!
//! It knows nothing about how parcels are transported. Invariant: a client is handed over between two requests, or
//! while it is sending a write; none of its requests is in the disk.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use disk::size::{in_memory, on_disk};
use disk::{DiskOffset, Operation, Span};
use memory::Segments;
use rustix::fs::{MemfdFlags, memfd_create};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::command::DiskRequest;
use super::connection::Connection;
use super::context::{BITMAPS_MAX, Context, Contexts};
use super::export::{Export, Negotiated, REQUEST_MAX};
use super::handshake::{ClientFlags, Encryption, Handshake};
use super::origin::Origin;
use super::outgoing::Outgoing;
use super::session::{Session, SessionPhase};
use super::transmission::{Receiving, Transmission};
use crate::{HandoverError, Parcel};

/// The version of this layout; that of clients with extended headers, which earlier releases must refuse because they
/// would take their requests for others; and that of clients with dirty bitmaps, whose contexts they would forget. The
/// lowest version that describes a client is used, so that earlier releases take over all others.
const VERSION: u32 = 1;
const VERSION_EXTENDED: u32 = 2;
const VERSION_BITMAPS: u32 = 3;

/// Phases of a session.
const GREETED: u32 = 0;
const NEGOTIATING: u32 = 1;
const SERVING: u32 = 2;

const FIXED: u32 = 1 << 0;
const NO_ZEROES: u32 = 1 << 1;
const STRUCTURED: u32 = 1 << 2;
const ALLOCATION: u32 = 1 << 3;
/// A write has been received partially.
const WRITING: u32 = 1 << 4;
/// The partially received write has FUA.
const DURABLE: u32 = 1 << 5;
const DEPTH: u32 = 1 << 6;
const EXTENDED: u32 = 1 << 7;
/// The first bit of those for dirty bitmaps, one for each that the client has requested.
const BITMAPS: u32 = 8;

/// The maximum size of one client's unsent replies: the memory quota of a connection, and headers.
const OUTGOING_MAX: u64 = 128 << 20;
const UNREAD_MAX: u64 = 1 << 20;

/// The fixed-size state of a client. The accompanying file holds unsent replies, unprocessed input, and the received
/// part of the current write.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct ClientState {
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

/// Serializes a client.
pub(super) fn save(connection: &Connection) -> Result<Parcel, HandoverError> {
    let failed = |what| move |error: std::io::Error| HandoverError::Failed(what, error);
    let (socket, session, unread) = connection.state().ok_or(HandoverError::NotNow("a client is disconnecting"))?;
    let outgoing = session.unsent().unsent();
    let mut save = ClientState {
        version: VERSION,
        client: connection.client,
        phase: GREETED,
        flags: 0,
        options: 0,
        write_len: 0,
        write_at: 0,
        cookie: 0,
        outgoing: on_disk(outgoing.len()),
        unread: on_disk(unread.len()),
        written: 0,
    };
    let written = match session.phase() {
        SessionPhase::Negotiating(handshake) => save.negotiating(handshake),
        SessionPhase::Serving(transmission) => save.serving(transmission)?,
        SessionPhase::Closed => return Err(HandoverError::NotNow("a client is disconnecting")),
    };
    save.written = on_disk(written.len());
    let file =
        memfd_create("client", MemfdFlags::CLOEXEC).map_err(|errno| failed("create a file in memory")(errno.into()))?;
    let mut file = File::from(file);
    for bytes in [&outgoing, unread, &written] {
        file.write_all(bytes).map_err(failed("write a file in memory"))?;
    }
    let socket = socket.try_clone().map_err(failed("duplicate a client's socket"))?;
    Ok(Parcel { bytes: save.as_bytes().to_vec(), descriptors: vec![socket, file.into()] })
}

impl ClientState {
    fn set(&mut self, flags: impl IntoIterator<Item = (u32, bool)>) {
        self.flags |= flags.into_iter().filter(|(_, is_set)| *is_set).fold(0, |all, (flag, _)| all | flag);
    }

    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    fn negotiating(&mut self, handshake: &Handshake) -> Vec<u8> {
        // Of a client that uses TLS nothing is handed over.
        let Handshake { client, options, negotiated, encryption: _ } = handshake;
        self.phase = if client.is_some() { NEGOTIATING } else { GREETED };
        self.options = *options;
        self.negotiated(*negotiated);
        self.set(client.iter().flat_map(|client| [(FIXED, client.fixed), (NO_ZEROES, client.no_zeroes)]));
        Vec::new()
    }

    fn negotiated(&mut self, negotiated: Negotiated) {
        let Negotiated { structured, extended, contexts } = negotiated;
        let (allocation, depth) = (contexts.has(Context::Allocation), contexts.has(Context::Depth));
        self.set([(STRUCTURED, structured), (EXTENDED, extended), (ALLOCATION, allocation), (DEPTH, depth)]);
        self.flags |= u32::from(contexts.bitmaps()) << BITMAPS;
        self.version = self.lowest_version();
    }

    /// The lowest version that has what the flags say.
    fn lowest_version(&self) -> u32 {
        match () {
            () if self.flags >> BITMAPS != 0 => VERSION_BITMAPS,
            () if self.has(EXTENDED) => VERSION_EXTENDED,
            () => VERSION,
        }
    }

    /// Records the transmission phase; returns the received bytes of the current write.
    fn serving(&mut self, transmission: &Transmission) -> Result<Vec<u8>, HandoverError> {
        self.phase = SERVING;
        let (negotiated, receiving) = transmission.state().ok_or(HandoverError::NotNow("requests are in flight"))?;
        self.negotiated(negotiated);
        match receiving {
            Receiving::Header => Ok(Vec::new()),
            Receiving::Discard { .. } => Err(HandoverError::NotNow("a client is sending the data of a refused write")),
            Receiving::Data { origin, request, memory, filled } => {
                let durable = request.operation == Operation::Write { durable: true };
                self.set([(WRITING, true), (DURABLE, durable)]);
                (self.cookie, self.write_at) = (origin.cookie, request.span.at.0);
                let Ok(len) = u32::try_from(memory.len()) else {
                    unreachable!("a write has at most REQUEST_MAX bytes")
                };
                self.write_len = len;
                let mut written = vec![0; *filled];
                memory.slice(0, *filled).copy_to(&mut written);
                Ok(written)
            }
        }
    }

    /// Returns true if everything in it means something for this export.
    fn is_known(&self, export: &Export) -> bool {
        let offered: Contexts = export.contexts().map(|(context, _)| context).collect();
        let missing = self.flags >> BITMAPS & !u32::from(offered.bitmaps());
        self.version == self.lowest_version() && missing == 0
    }

    fn restored_options(&self) -> Negotiated {
        Negotiated { structured: self.has(STRUCTURED), extended: self.has(EXTENDED), contexts: self.contexts() }
    }

    fn contexts(&self) -> Contexts {
        let others = [(ALLOCATION, Context::Allocation), (DEPTH, Context::Depth)];
        let others = others.into_iter().filter(|(flag, _)| self.has(*flag)).map(|(_, context)| context);
        let bitmaps = self.flags >> BITMAPS;
        let is_requested = |index: &usize| bitmaps >> index & 1 == 1;
        others.chain((0..BITMAPS_MAX).filter(is_requested).map(Context::Bitmap)).collect()
    }

    /// The phase of the session, with the received part of a write.
    fn phase(&self, written: &[u8], needs_tls: bool, prefix: u64) -> Option<SessionPhase> {
        let client = ClientFlags { fixed: self.has(FIXED), no_zeroes: self.has(NO_ZEROES) };
        let client = (self.phase == NEGOTIATING).then_some(client);
        match self.phase {
            GREETED | NEGOTIATING => Some(SessionPhase::Negotiating(Handshake {
                client,
                options: self.options,
                negotiated: self.restored_options(),
                encryption: if needs_tls { Encryption::Required } else { Encryption::Unavailable },
            })),
            SERVING => Some(SessionPhase::Serving(Transmission::resumed(
                self.restored_options(),
                prefix,
                self.receiving(written)?,
            ))),
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
        let span = Span { at: DiskOffset(self.write_at), len: u64::from(self.write_len) };
        let request = DiskRequest {
            operation,
            span,
            rest: 0,
            flush_after: false,
            one_extent: false,
            fast: false,
            discard_result: false,
        };
        let origin = Origin { cookie: self.cookie, at: self.write_at };
        Some(Receiving::Data { origin, request, memory, filled: written.len() })
    }
}

/// Restores a client of an export; `prefix` computes the upper bits of its tokens from its number. A client that is
/// served without TLS is refused if `needs_tls`.
pub(super) fn restore(
    parcel: Parcel,
    export: &Export,
    needs_tls: bool,
    prefix: impl FnOnce(u32) -> u64,
) -> Result<Connection, HandoverError> {
    let refused = || HandoverError::Refused("the state of a client has an unknown format".into());
    let save = ClientState::read_from_bytes(&parcel.bytes).ok().filter(|save| save.is_known(export));
    let save = save.ok_or_else(refused)?;
    if needs_tls && save.phase == SERVING {
        return Err(HandoverError::Refused("a client is served without TLS, which is required now".into()));
    }
    let [socket, file] = <[OwnedFd; 2]>::try_from(parcel.descriptors).map_err(|_| refused())?;
    let limits = [(save.outgoing, OUTGOING_MAX), (save.unread, UNREAD_MAX), (save.written, u64::from(REQUEST_MAX))];
    if limits.iter().any(|(len, max)| len > max) {
        return Err(refused());
    }
    let file = File::from(file);
    let mut at = 0;
    let mut read_chunk = |len: u64| {
        let mut bytes = vec![0; in_memory(len)];
        let read = file.read_exact_at(&mut bytes, at);
        at = at.saturating_add(len);
        read.map(|()| bytes).map_err(|error| HandoverError::Failed("read the state of a client", error))
    };
    let (outgoing, unread, written) = (read_chunk(save.outgoing)?, read_chunk(save.unread)?, read_chunk(save.written)?);
    let prefix = prefix(save.client);
    let phase = save.phase(&written, needs_tls, prefix).ok_or_else(refused)?;
    let mut replies = Outgoing::default();
    replies.push(outgoing, Segments::empty());
    Ok(Connection::resumed(save.client, Session::resumed(phase, replies, prefix), socket, unread))
}

#[cfg(test)]
mod test {
    use disk::Geometry;
    use zerocopy::FromZeros;

    use super::*;

    fn export(bitmaps: usize) -> Export {
        let geometry =
            Geometry { len: 1 << 30, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let bitmaps = (0..bitmaps).map(|index| index.to_string()).collect();
        Export { name: String::new(), description: String::new(), geometry, layered: true, bitmaps }
    }

    #[test]
    fn the_successor_keeps_the_negotiated_options() {
        let all = [Context::Allocation, Context::Depth, Context::Bitmap(0), Context::Bitmap(BITMAPS_MAX - 1)];
        for bits in 0..64 {
            let is_set = |bit: usize| bits >> bit & 1 == 1;
            let contexts: Contexts =
                all.into_iter().enumerate().filter(|(bit, _)| is_set(*bit)).map(|(_, one)| one).collect();
            let negotiated = Negotiated { structured: is_set(4), extended: is_set(5), contexts };
            let mut save = ClientState::new_zeroed();
            save.negotiated(negotiated);
            assert_eq!((save.restored_options(), save.is_known(&export(BITMAPS_MAX))), (negotiated, true));
            // Releases without extended headers accept version 1 only, those without dirty bitmaps 2 as well.
            let has_bitmaps = contexts.bitmaps() != 0;
            assert_eq!((save.version < 3, save.version == 1), (!has_bitmaps, !has_bitmaps && !is_set(5)));
        }
        // As written by a version without depths.
        let save = ClientState { flags: STRUCTURED | ALLOCATION, ..ClientState::new_zeroed() };
        let found = save.restored_options();
        assert_eq!(found, Negotiated { structured: true, extended: false, contexts: Contexts::ALLOCATION });
    }

    #[test]
    fn unknown_versions_flags_and_bitmaps_are_refused() {
        let save = |version, flags| ClientState { version, flags, ..ClientState::new_zeroed() };
        let bitmap = |index: u32| 1 << (BITMAPS + index);
        assert!(save(3, bitmap(1)).is_known(&export(2)));
        // A release that does not know the bits of bitmaps wrote this, or the export has lost a bitmap.
        for (wrong, bitmaps) in [
            (save(1, bitmap(0)), 1),
            (save(2, EXTENDED | bitmap(0)), 1),
            (save(3, EXTENDED), 1),
            (save(4, bitmap(0)), 1),
            (save(3, bitmap(1)), 1),
            (save(3, bitmap(0)), 0),
            (save(3, bitmap(16)), BITMAPS_MAX),
        ] {
            assert!(!wrong.is_known(&export(bitmaps)), "{wrong:?}");
        }
    }
}
