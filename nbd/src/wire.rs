//! The NBD protocol as bytes: its numbers and its fixed structures, all big-endian.
//!
//! Section names are those of the protocol document (`doc/proto.md` of the NetworkBlockDevice project). It knows
//! nothing about sockets, states or disks. Constants and fields have the names of that document, without `NBD_`.

#![expect(missing_docs, reason = "the sections that are named have the documentation of their constants")]

use zerocopy::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

// "Newstyle negotiation".
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

// "Handshake flags": ours, and the client's reply to them.
pub const FLAG_FIXED_NEWSTYLE: u16 = 1 << 0;
pub const FLAG_NO_ZEROES: u16 = 1 << 1;
pub const CLIENT_FIXED_NEWSTYLE: u32 = 1 << 0;
pub const CLIENT_NO_ZEROES: u32 = 1 << 1;
/// The number of zeroes after the reply to EXPORT_NAME unless both sides negotiated NO_ZEROES.
pub const EXPORT_NAME_ZEROES: usize = 124;

// "Option types".
pub const OPT_EXPORT_NAME: u32 = 1;
pub const OPT_ABORT: u32 = 2;
pub const OPT_LIST: u32 = 3;
pub const OPT_STARTTLS: u32 = 5;
pub const OPT_INFO: u32 = 6;
pub const OPT_GO: u32 = 7;
pub const OPT_STRUCTURED_REPLY: u32 = 8;
pub const OPT_LIST_META_CONTEXT: u32 = 9;
pub const OPT_SET_META_CONTEXT: u32 = 10;
pub const OPT_EXTENDED_HEADERS: u32 = 11;

// "Option reply types".
pub const REP_ACK: u32 = 1;
pub const REP_SERVER: u32 = 2;
pub const REP_INFO: u32 = 3;
pub const REP_META_CONTEXT: u32 = 4;
pub const REP_ERR_UNSUP: u32 = (1 << 31) + 1;
pub const REP_ERR_POLICY: u32 = (1 << 31) + 2;
pub const REP_ERR_INVALID: u32 = (1 << 31) + 3;
pub const REP_ERR_TLS_REQD: u32 = (1 << 31) + 5;
pub const REP_ERR_UNKNOWN: u32 = (1 << 31) + 6;
pub const REP_ERR_EXT_HEADER_REQD: u32 = (1 << 31) + 10;
/// Every type of a reply with this bit is an error.
pub const REP_IS_ERROR: u32 = 1 << 31;

// NBD_REP_INFO: the information about an export.
pub const INFO_EXPORT: u16 = 0;
pub const INFO_NAME: u16 = 1;
pub const INFO_DESCRIPTION: u16 = 2;
pub const INFO_BLOCK_SIZE: u16 = 3;

// "Transmission flags".
pub const HAS_FLAGS: u16 = 1 << 0;
pub const READ_ONLY: u16 = 1 << 1;
pub const SEND_FLUSH: u16 = 1 << 2;
pub const SEND_FUA: u16 = 1 << 3;
pub const SEND_TRIM: u16 = 1 << 5;
pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
pub const SEND_DF: u16 = 1 << 7;
pub const CAN_MULTI_CONN: u16 = 1 << 8;
pub const SEND_CACHE: u16 = 1 << 10;
pub const SEND_FAST_ZERO: u16 = 1 << 11;
pub const BLOCK_STATUS_PAYLOAD: u16 = 1 << 12;

// "Transmission phase".
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
pub const EXTENDED_CHUNK_MAGIC: u32 = 0x6e8a_278c;

// "Request types".
pub const CMD_READ: u16 = 0;
pub const CMD_WRITE: u16 = 1;
pub const CMD_DISC: u16 = 2;
pub const CMD_FLUSH: u16 = 3;
pub const CMD_TRIM: u16 = 4;
pub const CMD_CACHE: u16 = 5;
pub const CMD_WRITE_ZEROES: u16 = 6;
pub const CMD_BLOCK_STATUS: u16 = 7;

// "Command flags".
pub const CMD_FLAG_FUA: u16 = 1 << 0;
pub const CMD_FLAG_NO_HOLE: u16 = 1 << 1;
pub const CMD_FLAG_DF: u16 = 1 << 2;
pub const CMD_FLAG_REQ_ONE: u16 = 1 << 3;
pub const CMD_FLAG_FAST_ZERO: u16 = 1 << 4;
pub const CMD_FLAG_PAYLOAD_LEN: u16 = 1 << 5;

// "Structured reply flags" and "Structured reply types".
pub const CHUNK_DONE: u16 = 1 << 0;
pub const CHUNK_NONE: u16 = 0;
pub const CHUNK_OFFSET_DATA: u16 = 1;
pub const CHUNK_OFFSET_HOLE: u16 = 2;
pub const CHUNK_BLOCK_STATUS: u16 = 5;
pub const CHUNK_BLOCK_STATUS_EXT: u16 = 6;
pub const CHUNK_ERROR: u16 = (1 << 15) + 1;
/// Every type of a chunk with this bit is an error.
pub const CHUNK_IS_ERROR: u16 = 1 << 15;

// "Metadata contexts": `base:allocation`.
pub const STATE_HOLE: u32 = 1 << 0;
pub const STATE_ZERO: u32 = 1 << 1;
/// In `qemu:dirty-bitmap:NAME` (QEMU's docs/interop/nbd.txt).
pub const STATE_DIRTY: u32 = 1 << 0;

/// "String values": no name or query is longer than this.
pub const STRING_MAX: usize = 4096;

/// "Error values".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    NotPermitted,
    Io,
    Invalid,
    NoSpace,
    NotSupported,
    ShuttingDown,
}

impl Errno {
    pub fn number(self) -> u32 {
        match self {
            Errno::NotPermitted => 1,
            Errno::Io => 5,
            Errno::Invalid => 22,
            Errno::NoSpace => 28,
            Errno::NotSupported => 95,
            Errno::ShuttingDown => 108,
        }
    }
}

/// The first bytes of a connection, sent by the server.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Greeting {
    pub magic: U64,
    pub option_magic: U64,
    pub flags: U16,
}
const _: () = assert!(size_of::<Greeting>() == 18);

/// The header of every option of the client.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OptionHeader {
    pub magic: U64,
    pub option: U32,
    pub len: U32,
}
const _: () = assert!(size_of::<OptionHeader>() == 16);

/// The header of every reply to an option, except EXPORT_NAME.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct OptionReply {
    pub magic: U64,
    pub option: U32,
    pub kind: U32,
    pub len: U32,
}
const _: () = assert!(size_of::<OptionReply>() == 20);

/// The reply to EXPORT_NAME.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportNameReply {
    pub size: U64,
    pub flags: U16,
}
const _: () = assert!(size_of::<ExportNameReply>() == 10);

/// NBD_INFO_EXPORT.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct ExportInfo {
    pub kind: U16,
    pub size: U64,
    pub flags: U16,
}
const _: () = assert!(size_of::<ExportInfo>() == 12);

/// NBD_INFO_BLOCK_SIZE.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct BlockSizeInfo {
    pub kind: U16,
    pub minimum: U32,
    pub preferred: U32,
    pub maximum: U32,
}
const _: () = assert!(size_of::<BlockSizeInfo>() == 14);

/// "Request message".
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct RequestHeader {
    pub magic: U32,
    pub flags: U16,
    pub kind: U16,
    pub cookie: U64,
    pub at: U64,
    pub len: U32,
}
const _: () = assert!(size_of::<RequestHeader>() == 28);

/// "Request message", once extended headers are negotiated. With `CMD_FLAG_PAYLOAD_LEN`, `len` bytes follow it.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedRequestHeader {
    pub magic: U32,
    pub flags: U16,
    pub kind: U16,
    pub cookie: U64,
    pub at: U64,
    pub len: U64,
}
const _: () = assert!(size_of::<ExtendedRequestHeader>() == 32);

/// "Simple reply message".
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct SimpleReply {
    pub magic: U32,
    pub error: U32,
    pub cookie: U64,
}
const _: () = assert!(size_of::<SimpleReply>() == 16);

/// "Structured reply chunk message", whose payload of `len` bytes follows.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct ChunkHeader {
    pub magic: U32,
    pub flags: U16,
    pub kind: U16,
    pub cookie: U64,
    pub len: U32,
}
const _: () = assert!(size_of::<ChunkHeader>() == 20);

/// "Extended reply chunk message", whose payload of `len` bytes follows. `at` is that of the request.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedChunkHeader {
    pub magic: U32,
    pub flags: U16,
    pub kind: U16,
    pub cookie: U64,
    pub at: U64,
    pub len: U64,
}
const _: () = assert!(size_of::<ExtendedChunkHeader>() == 32);

/// One extent in NBD_REPLY_TYPE_BLOCK_STATUS.
#[derive(IntoBytes, Immutable, Unaligned)]
#[repr(C)]
pub struct Descriptor {
    pub len: U32,
    pub state: U32,
}
const _: () = assert!(size_of::<Descriptor>() == 8);

/// One extent in NBD_REPLY_TYPE_BLOCK_STATUS_EXT, whose array follows the context's id and the number of extents.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ExtendedDescriptor {
    pub len: U64,
    pub state: U64,
}
const _: () = assert!(size_of::<ExtendedDescriptor>() == 16);

/// The value of a length field for bytes that we send: replies to options, and messages in replies to requests.
pub fn length(bytes: &[u8]) -> u32 {
    let Ok(len) = u32::try_from(bytes.len()) else { unreachable!("a few strings of at most STRING_MAX bytes") };
    len
}
