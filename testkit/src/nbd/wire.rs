//! NBD message by message: a connection that sends exactly what a test specifies, be it garbage, and returns replies as
//! they come.
//!
//! The sections named are those of the NBD protocol.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long a reply may take, so that a lost one fails a test instead of hanging it.
const PATIENCE: Duration = Duration::from_secs(120);

const MAGIC: &[u8; 8] = b"IHAVEOPT";

/// NBD_OPT_EXPORT_NAME.
pub const OPTION_EXPORT_NAME: u32 = 1;
/// NBD_OPT_LIST: list the exports.
pub const OPTION_LIST: u32 = 3;
/// NBD_OPT_STARTTLS: continue over TLS.
pub const OPTION_STARTTLS: u32 = 5;
/// NBD_OPT_GO: choose an export and begin.
pub const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;
const OPTION_SET_META_CONTEXT: u32 = 10;
/// NBD_OPT_EXTENDED_HEADERS: lengths of 64 bits.
pub const OPTION_EXTENDED_HEADERS: u32 = 11;

/// NBD_REP_ACK.
const ACK: u32 = 1;
/// NBD_REP_INFO.
const INFO: u32 = 3;
/// NBD_REP_META_CONTEXT.
const META_CONTEXT: u32 = 4;

/// NBD_CMD_FLAG_FUA.
pub const FUA: u16 = 1;
/// NBD_CMD_FLAG_NO_HOLE.
pub const NO_HOLE: u16 = 1 << 1;
/// NBD_CMD_FLAG_REQ_ONE.
pub const REQ_ONE: u16 = 1 << 3;
/// NBD_CMD_FLAG_FAST_ZERO.
pub const FAST_ZERO: u16 = 1 << 4;
/// NBD_CMD_FLAG_PAYLOAD_LEN.
pub const PAYLOAD: u16 = 1 << 5;

/// The commands ("Request types").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Reads bytes.
    Read = 0,
    /// Writes bytes.
    Write = 1,
    /// Ends the connection; the only one without a reply.
    Disconnect = 2,
    /// Makes durable what was answered.
    Flush = 3,
    /// Says that the bytes are not needed.
    Trim = 4,
    /// Reads ahead.
    Cache = 5,
    /// Writes zeros.
    Zeroes = 6,
    /// Asks which bytes are allocated.
    BlockStatus = 7,
}

/// The id of a context, and successive runs: their lengths, and their flags in that context.
pub type ContextRuns = (u32, Vec<(u64, u32)>);

/// A structured reply chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The type of the chunk (NBD_REPLY_TYPE_*).
    pub kind: u16,
    /// Of the request that it answers.
    pub cookie: u64,
    /// The bytes behind its head.
    pub payload: Vec<u8>,
}

/// A request without its data ("Request message").
pub fn request(command: Command, flags: u16, cookie: u64, at: u64, len: u32) -> Vec<u8> {
    let (flags, command) = (flags.to_be_bytes(), (command as u16).to_be_bytes());
    [&0x2560_9513_u32.to_be_bytes()[..], &flags, &command, &cookie.to_be_bytes(), &at.to_be_bytes(), &len.to_be_bytes()]
        .concat()
}

/// An extended reply chunk.
#[derive(Debug, PartialEq, Eq)]
pub struct ExtendedChunk {
    /// Whether it is the last one of its reply (NBD_REPLY_FLAG_DONE).
    pub is_last: bool,
    /// The type of the chunk (NBD_REPLY_TYPE_*).
    pub kind: u16,
    /// Of the request that it answers.
    pub cookie: u64,
    /// The offset of that request.
    pub at: u64,
    /// The bytes behind its head.
    pub payload: Vec<u8>,
}

/// An extended request without its data.
pub fn extended_request(command: Command, flags: u16, cookie: u64, at: u64, len: u64) -> Vec<u8> {
    let (flags, command) = (flags.to_be_bytes(), (command as u16).to_be_bytes());
    [&0x21e4_1c71_u32.to_be_bytes()[..], &flags, &command, &cookie.to_be_bytes(), &at.to_be_bytes(), &len.to_be_bytes()]
        .concat()
}

/// An option ("Option haggling").
pub fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
    [MAGIC, &number.to_be_bytes()[..], &len.to_be_bytes(), data].concat()
}

/// A connection, message by message.
#[derive(Debug)]
pub struct Connection(pub UnixStream);

impl Connection {
    /// Connected, greeted by the server, and the client's flags sent ("Fixed newstyle negotiation").
    pub fn greeted(socket: &Path) -> io::Result<Connection> {
        let mut connection = Connection(UnixStream::connect(socket)?);
        connection.0.set_read_timeout(Some(PATIENCE))?;
        connection.0.set_write_timeout(Some(PATIENCE))?;
        if !connection.receive(18)?.starts_with(&[b"NBDMAGIC", &MAGIC[..]].concat()) {
            return Err(wrong("this is no NBD server"));
        }
        connection.send(&3_u32.to_be_bytes())?;
        Ok(connection)
    }

    /// Ready for requests with simple replies.
    pub fn simple(socket: &Path) -> io::Result<Connection> {
        let mut connection = Connection::greeted(socket)?;
        connection.go()?;
        Ok(connection)
    }

    /// Ready for requests with structured replies and `base:allocation`.
    pub fn structured(socket: &Path) -> io::Result<Connection> {
        let mut connection = Connection::greeted(socket)?;
        connection.option(OPTION_STRUCTURED_REPLY, &[])?;
        connection.expect(ACK)?;
        connection.option(OPTION_SET_META_CONTEXT, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation")?;
        connection.expect(META_CONTEXT)?;
        connection.expect(ACK)?;
        connection.go()?;
        Ok(connection)
    }

    /// Ready for requests with extended headers and `base:allocation`, whose id is 1.
    pub fn extended(socket: &Path) -> io::Result<Connection> {
        let mut connection = Connection::greeted(socket)?;
        connection.option(OPTION_EXTENDED_HEADERS, &[])?;
        connection.expect(ACK)?;
        connection.option(OPTION_SET_META_CONTEXT, b"\0\0\0\0\0\0\0\x01\0\0\0\x0fbase:allocation")?;
        connection.expect(META_CONTEXT)?;
        connection.expect(ACK)?;
        connection.go()?;
        Ok(connection)
    }

    /// Ready for requests with structured replies, or with extended headers, and these contexts; returns their ids.
    pub fn with_contexts(socket: &Path, extended: bool, names: &[&str]) -> io::Result<(Connection, Vec<u32>)> {
        let mut connection = Connection::greeted(socket)?;
        connection.option(if extended { OPTION_EXTENDED_HEADERS } else { OPTION_STRUCTURED_REPLY }, &[])?;
        connection.expect(ACK)?;
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes();
        let queries = names.iter().flat_map(|name| [&count(name.len())[..], name.as_bytes()].concat());
        let query = [&[0; 4][..], &count(names.len()), &queries.collect::<Vec<u8>>()].concat();
        connection.option(OPTION_SET_META_CONTEXT, &query)?;
        let mut found = Vec::new();
        loop {
            match connection.option_reply()? {
                (META_CONTEXT, context) => found.push(context),
                (ACK, _) => break,
                (refused, _) => return Err(wrong(&format!("contexts are refused: {refused:#x}"))),
            }
        }
        let id_of = |name: &&str| {
            let context = found.iter().find(|context| context.get(4..) == Some(name.as_bytes()));
            let id = context.and_then(|context| context.first_chunk()).map(|id| u32::from_be_bytes(*id));
            id.ok_or_else(|| wrong(&format!("there is no context {name}")))
        };
        let ids = names.iter().map(id_of).collect::<io::Result<_>>()?;
        connection.go()?;
        Ok((connection, ids))
    }

    /// The reply to a request for the extents of `len` bytes: for each context its id, and the runs with their flags.
    pub fn block_status(&mut self, flags: u16, at: u64, len: u32) -> io::Result<Vec<ContextRuns>> {
        self.request(Command::BlockStatus, flags, 7, at, len)?;
        let mut contexts = Vec::new();
        loop {
            let head = self.array::<20>()?;
            // NBD_REPLY_TYPE_BLOCK_STATUS.
            let [0x66, 0x8e, 0x33, 0xef, 0, is_last, 0, 5, .., a, b, c, d] = head else {
                return Err(wrong(&format!("this is no block status: {head:x?}")));
            };
            let payload = self.receive(usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX))?;
            let words = payload.chunks(4).map(|word| word.iter().fold(0u32, |all, byte| all << 8 | u32::from(*byte)));
            let words: Vec<u32> = words.collect();
            let Some((id, runs)) = words.split_first() else { return Err(wrong("a block status without a context")) };
            let runs = runs.chunks_exact(2).map(|run| (run.first(), run.last()));
            contexts.push((*id, runs.filter_map(|(len, flags)| Some((u64::from(*len?), *flags?))).collect()));
            if is_last == 1 {
                return Ok(contexts);
            }
        }
    }

    /// Begins the transmission phase with the default export; returns its size.
    pub fn go(&mut self) -> io::Result<u64> {
        self.option(OPTION_GO, &[0; 6])?;
        let mut size = 0;
        loop {
            match self.option_reply()? {
                (ACK, _) => return Ok(size),
                // NBD_INFO_EXPORT.
                (INFO, data) if data.starts_with(&[0, 0]) => {
                    size = data.iter().skip(2).take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte));
                }
                (refused, _) if refused >= 1 << 31 => return Err(wrong(&format!("it is refused: {refused:#x}"))),
                _ => {}
            }
        }
    }

    /// Sends bytes, whatever they are.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all(bytes)
    }

    /// Receives bytes, whatever they are.
    pub fn receive(&mut self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    /// Whether the server ends the connection; remaining data is skipped.
    pub fn is_disconnected(&mut self) -> bool {
        match self.0.read_to_end(&mut Vec::new()) {
            Ok(_) => true,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    /// Sends an option.
    pub fn option(&mut self, number: u32, data: &[u8]) -> io::Result<()> {
        self.send(&option(number, data))
    }

    /// The reply to an option: its type and data.
    pub fn option_reply(&mut self) -> io::Result<(u32, Vec<u8>)> {
        let head = self.array::<20>()?;
        let [.., a, b, c, d, e, f, g, h] = head;
        let len = u32::from_be_bytes([e, f, g, h]);
        Ok((u32::from_be_bytes([a, b, c, d]), self.receive(usize::try_from(len).unwrap_or(usize::MAX))?))
    }

    fn expect(&mut self, kind: u32) -> io::Result<()> {
        match self.option_reply()? {
            (found, data) if found == kind && (kind != ACK || data.is_empty()) => Ok(()),
            (found, _) => Err(wrong(&format!("an option is answered with {found:#x} instead of {kind:#x}"))),
        }
    }

    /// Sends a request without data.
    pub fn request(&mut self, command: Command, flags: u16, cookie: u64, at: u64, len: u32) -> io::Result<()> {
        self.send(&request(command, flags, cookie, at, len))
    }

    /// A reply ("Simple reply message") without its data: error number and cookie.
    pub fn simple_reply(&mut self) -> io::Result<(u32, u64)> {
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = self.array::<16>()?;
        if [m0, m1, m2, m3] != 0x6744_6698_u32.to_be_bytes() {
            return Err(wrong("this is no simple reply"));
        }
        Ok((u32::from_be_bytes([e0, e1, e2, e3]), u64::from_be_bytes(cookie)))
    }

    /// A reply in one chunk ("Structured reply chunk message").
    pub fn chunk(&mut self) -> io::Result<Chunk> {
        let head = self.array::<20>()?;
        // The magic number, and NBD_REPLY_FLAG_DONE.
        let [0x66, 0x8e, 0x33, 0xef, 0, 1, k0, k1, c0, c1, c2, c3, c4, c5, c6, c7, len @ ..] = head else {
            return Err(wrong("this is no reply in one chunk"));
        };
        let len = usize::try_from(u32::from_be_bytes(len)).unwrap_or(usize::MAX);
        let (kind, cookie) = (u16::from_be_bytes([k0, k1]), u64::from_be_bytes([c0, c1, c2, c3, c4, c5, c6, c7]));
        Ok(Chunk { kind, cookie, payload: self.receive(len)? })
    }

    /// A chunk with an extended header ("Extended reply chunk message").
    pub fn extended_chunk(&mut self) -> io::Result<ExtendedChunk> {
        let head = self.array::<32>()?;
        let Some((&[0x6e, 0x8a, 0x27, 0x8c, 0, flags, k0, k1], numbers)) = head.split_first_chunk() else {
            return Err(wrong("this is no extended chunk"));
        };
        let number =
            |from: usize| numbers.iter().skip(from).take(8).fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
        let len = usize::try_from(number(16)).map_err(io::Error::other)?;
        let (is_last, kind) = (flags & 1 != 0, u16::from_be_bytes([k0, k1]));
        Ok(ExtendedChunk { is_last, kind, cookie: number(0), at: number(8), payload: self.receive(len)? })
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// A message that no server may send.
pub(super) fn wrong(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
