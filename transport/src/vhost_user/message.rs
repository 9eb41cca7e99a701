//! The messages of the vhost-user protocol: requests of a front-end and the layout of replies.
//!
//! It knows nothing about sockets, memory or rings. Invariant: a [`Message`] that exists has a payload of the right
//! size and exactly the file descriptors that its type requires; those of a refused message are closed.
//!
//! Specification: QEMU, docs/interop/vhost-user.rst. All numbers are in the byte order of the machine.

use std::os::fd::OwnedFd;

use disk::size::in_memory;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The size of a [`Header`].
pub const HEADER_LEN: usize = 12;
/// The largest payload read: a memory table of 8 regions has 264 bytes, a configuration access 268; the rest leaves
/// room for requests of later versions, which are refused by name instead of by size.
pub const MAX_PAYLOAD: usize = 1024;
/// The maximum number of file descriptors in one message: one for each region of a memory table.
pub const MAX_FDS: usize = 8;
/// The maximum number of regions in one SET_MEM_TABLE message (the specification's payload has eight).
pub const MAX_TABLE: usize = 8;
/// The maximum size of configuration space that one message can cover.
pub const MAX_CONFIG: u32 = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;
/// Set in the payload of SET_VRING_KICK, CALL and ERR if the message has no file descriptor.
const VRING_NO_FD: u64 = 1 << 8;
const VRING_INDEX: u64 = 0xff;

/// The start of every message.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Header {
    /// The request: the `id` of the specification.
    pub request: u32,
    /// The version, and whether this is a reply or needs one.
    pub flags: u32,
    /// The size of the payload that follows.
    pub size: u32,
}
const _: () = assert!(size_of::<Header>() == HEADER_LEN);

impl Header {
    /// Returns true for a request of the only known version.
    pub fn is_request(&self) -> bool {
        self.flags & VERSION_MASK == VERSION && self.flags & FLAG_REPLY == 0
    }

    /// Returns true if the front-end waits for a reply even to a request that has none of its own.
    pub fn needs_reply(&self) -> bool {
        self.flags & FLAG_NEED_REPLY != 0
    }

    /// The header of a message that we send with this payload.
    pub fn of(request: u32, flags: u32, payload: &[u8]) -> Header {
        let Ok(size) = u32::try_from(payload.len()) else { unreachable!("a few structures, or MAX_CONFIG bytes") };
        Header { request, flags, size }
    }
}

/// A value of one ring: its size, its next index, or whether it is enabled.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct VringState {
    /// The ring.
    pub queue: u32,
    /// The value.
    pub num: u32,
}
const _: () = assert!(size_of::<VringState>() == 8);

/// The addresses of a ring, in the front-end's process.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct VringAddr {
    /// The ring.
    pub queue: u32,
    /// Bit 0: log writes to the used ring.
    pub flags: u32,
    /// Descriptor table.
    pub desc: u64,
    /// Used ring.
    pub used: u64,
    /// Available ring.
    pub avail: u64,
    /// The guest address at which writes to the used ring are logged.
    pub log: u64,
}
const _: () = assert!(size_of::<VringAddr>() == 40);

/// A region of guest memory as the front-end describes it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct RegionInfo {
    /// Address in the guest.
    pub guest: u64,
    /// Bytes.
    pub len: u64,
    /// Address in the front-end's process.
    pub peer: u64,
    /// Offset in the file.
    pub offset: u64,
}
const _: () = assert!(size_of::<RegionInfo>() == 32);

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct TableHeader {
    regions: u32,
    padding: u32,
}
const _: () = assert!(size_of::<TableHeader>() == 8);

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct SingleRegion {
    padding: u64,
    region: RegionInfo,
}
const _: () = assert!(size_of::<SingleRegion>() == 40);

/// The part of the configuration space that an access refers to.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ConfigWindow {
    /// First byte.
    pub offset: u32,
    /// Number of bytes.
    pub size: u32,
    /// The writer: the guest or a migration.
    pub flags: u32,
}
const _: () = assert!(size_of::<ConfigWindow>() == 12);

/// A region for the record of requests in flight, as described in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InflightInfo {
    /// Bytes to be mapped.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Number of queues.
    pub queues: u16,
    /// Descriptors in each.
    pub size: u16,
}

/// The range of the dirty log in its file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LogInfo {
    /// Bytes.
    pub len: u64,
    /// Offset in the file.
    pub offset: u64,
}
const _: () = assert!(size_of::<LogInfo>() == 16);

#[repr(C)]
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawInflight {
    len: u64,
    offset: u64,
    queues: u16,
    size: u16,
    /// QEMU sends and expects its compiler's padding; the specification has none.
    padding: u32,
}
const _: () = assert!(size_of::<RawInflight>() == 24);
/// Size of the payload according to the specification.
const INFLIGHT_LEN: usize = 20;

/// A message as received: header, payload, file descriptors.
pub struct Frame {
    /// The header.
    pub header: Header,
    /// The payload, with the length given in the header.
    pub payload: Vec<u8>,
    /// The accompanying file descriptors.
    pub fds: Vec<OwnedFd>,
}

/// The file descriptor of a ring, or an indication that there is none.
#[derive(Debug)]
pub struct VringFd {
    /// The ring.
    pub queue: u32,
    /// Absent if the front-end polls, or requires polling.
    pub fd: Option<OwnedFd>,
}

/// A well-formed request of the front-end.
#[derive(Debug)]
#[allow(missing_docs, reason = "the names are the specification's")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(RegionInfo, OwnedFd)>),
    SetLogBase(LogInfo, OwnedFd),
    SetLogFd(OwnedFd),
    SetVringNum(VringState),
    SetVringAddr(VringAddr),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(VringFd),
    SetVringCall(VringFd),
    SetVringErr(VringFd),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd(OwnedFd),
    GetConfig(ConfigWindow),
    SetConfig,
    ResetDevice,
    GetInflightFd(InflightInfo),
    SetInflightFd(InflightInfo, OwnedFd),
    GetMaxMemSlots,
    AddMemReg(RegionInfo, OwnedFd),
    RemMemReg(RegionInfo),
}

/// Why a frame is not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A request that this server does not know.
    #[error("request {0} is unknown")]
    Unknown(u32),
    /// The payload has the wrong size.
    #[error("request {request} has a payload of {len} bytes")]
    Payload {
        /// The request.
        request: u32,
        /// Its payload's size.
        len: usize,
    },
    /// Too few or too many file descriptors.
    #[error("request {request} came with {count} file descriptors")]
    Fds {
        /// The request.
        request: u32,
        /// The number of file descriptors received.
        count: usize,
    },
}

impl Message {
    /// Parses a frame. File descriptors that the message does not require make it malformed.
    pub fn parse(frame: Frame) -> Result<Message, Malformed> {
        let mut body = FrameBody { request: frame.header.request, payload: &frame.payload, fds: frame.fds };
        let message = match frame.header.request {
            1 => Message::GetFeatures,
            2 => Message::SetFeatures(body.read()?),
            3 => Message::SetOwner,
            4 => Message::ResetOwner,
            5 => Message::SetMemTable(body.table()?),
            6 => Message::SetLogBase(body.read()?, body.one_fd()?),
            7 => Message::SetLogFd(body.one_fd()?),
            8 => Message::SetVringNum(body.read()?),
            9 => Message::SetVringAddr(body.read()?),
            10 => Message::SetVringBase(body.read()?),
            11 => Message::GetVringBase(body.read()?),
            12 => Message::SetVringKick(body.vring_fd()?),
            13 => Message::SetVringCall(body.vring_fd()?),
            14 => Message::SetVringErr(body.vring_fd()?),
            15 => Message::GetProtocolFeatures,
            16 => Message::SetProtocolFeatures(body.read()?),
            17 => Message::GetQueueNum,
            18 => Message::SetVringEnable(body.read()?),
            21 => Message::SetBackendReqFd(body.one_fd()?),
            24 => Message::GetConfig(body.config()?),
            25 => body.config().map(|_| Message::SetConfig)?,
            31 => Message::GetInflightFd(body.inflight()?),
            32 => Message::SetInflightFd(body.inflight()?, body.one_fd()?),
            34 => Message::ResetDevice,
            36 => Message::GetMaxMemSlots,
            37 => Message::AddMemReg(body.read::<SingleRegion>()?.region, body.one_fd()?),
            38 => body.removed_region()?,
            unknown => return Err(Malformed::Unknown(unknown)),
        };
        body.end(message)
    }
}

/// The remaining parts of a frame while its message is parsed.
struct FrameBody<'a> {
    request: u32,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl FrameBody<'_> {
    fn wrong_size(&self) -> Malformed {
        Malformed::Payload { request: self.request, len: self.payload.len() }
    }

    fn wrong_fds(&self) -> Malformed {
        Malformed::Fds { request: self.request, count: self.fds.len() }
    }

    /// The whole payload as a `T`.
    fn read<T: FromBytes>(&self) -> Result<T, Malformed> {
        T::read_from_bytes(self.payload).map_err(|_| self.wrong_size())
    }

    fn one_fd(&mut self) -> Result<OwnedFd, Malformed> {
        match self.fds.pop() {
            Some(fd) if self.fds.is_empty() => Ok(fd),
            Some(fd) => {
                self.fds.push(fd);
                Err(self.wrong_fds())
            }
            None => Err(self.wrong_fds()),
        }
    }

    fn vring_fd(&mut self) -> Result<VringFd, Malformed> {
        let word: u64 = self.read()?;
        let queue = u32::try_from(word & VRING_INDEX).map_err(|_| self.wrong_size())?;
        let fd = if word & VRING_NO_FD == 0 { Some(self.one_fd()?) } else { None };
        Ok(VringFd { queue, fd })
    }

    fn table(&mut self) -> Result<Vec<(RegionInfo, OwnedFd)>, Malformed> {
        let (head, rest) = TableHeader::read_from_prefix(self.payload).map_err(|_| self.wrong_size())?;
        let count = in_memory(head.regions.into());
        // QEMU sends only the existing regions; others send all eight, with unused ones empty.
        let needed = count.checked_mul(size_of::<RegionInfo>()).filter(|&len| count <= MAX_TABLE && len <= rest.len());
        if needed.is_none() {
            return Err(self.wrong_size());
        }
        if self.fds.len() != count {
            return Err(self.wrong_fds());
        }
        let regions =
            rest.chunks_exact(size_of::<RegionInfo>()).filter_map(|raw| RegionInfo::read_from_bytes(raw).ok());
        Ok(regions.take(count).zip(self.fds.drain(..)).collect())
    }

    fn config(&self) -> Result<ConfigWindow, Malformed> {
        let (window, bytes) = ConfigWindow::read_from_prefix(self.payload).map_err(|_| self.wrong_size())?;
        let fits = usize::try_from(window.size) == Ok(bytes.len());
        if fits { Ok(window) } else { Err(self.wrong_size()) }
    }

    fn inflight(&self) -> Result<InflightInfo, Malformed> {
        let mut bytes = [0; size_of::<RawInflight>()];
        if ![INFLIGHT_LEN, bytes.len()].contains(&self.payload.len()) {
            return Err(self.wrong_size());
        }
        for (byte, found) in bytes.iter_mut().zip(self.payload) {
            *byte = *found;
        }
        let RawInflight { len, offset, queues, size, .. } = zerocopy::transmute!(bytes);
        Ok(InflightInfo { len, offset, queues, size })
    }

    /// "For compatibility with existing incorrect implementations, the back-end MAY accept messages with one
    /// file descriptor" (which is closed unused): `blkio` is one of them.
    fn removed_region(&mut self) -> Result<Message, Malformed> {
        let region = self.read::<SingleRegion>()?.region;
        if self.fds.len() == 1 {
            self.fds.clear();
        }
        Ok(Message::RemMemReg(region))
    }

    fn end(self, message: Message) -> Result<Message, Malformed> {
        if self.fds.is_empty() { Ok(message) } else { Err(self.wrong_fds()) }
    }
}

/// The payload of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// A number; as an acknowledgement, zero for success.
    Number(u64),
    /// A value of one ring.
    Vring(VringState),
    /// A part of the configuration space; `None` reports an error.
    Config(Option<(ConfigWindow, Vec<u8>)>),
    /// A region for the record of requests in flight; its file is sent with the reply.
    Inflight(InflightInfo),
}

impl Reply {
    /// Encodes the reply to `request` for the socket.
    pub fn encode(&self, request: u32) -> Vec<u8> {
        let payload = match self {
            Reply::Number(number) => number.as_bytes().to_vec(),
            Reply::Vring(state) => state.as_bytes().to_vec(),
            Reply::Inflight(InflightInfo { len, offset, queues, size }) => {
                RawInflight { len: *len, offset: *offset, queues: *queues, size: *size, padding: 0 }.as_bytes().to_vec()
            }
            Reply::Config(None) => Vec::new(),
            Reply::Config(Some((window, bytes))) => [window.as_bytes(), bytes].concat(),
        };
        [Header::of(request, VERSION | FLAG_REPLY, &payload).as_bytes(), &payload].concat()
    }
}

/// Returns true if the reply to this request has a format of its own.
pub fn has_own_reply(request: u32) -> bool {
    // GET_FEATURES, GET_VRING_BASE, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_CONFIG, GET_INFLIGHT_FD,
    // GET_MAX_MEM_SLOTS, and SET_LOG_BASE.
    matches!(request, 1 | 6 | 11 | 15 | 17 | 24 | 31 | 36)
}

/// Encodes a message of the back-end without payload.
pub fn backend_request(request: u32) -> Vec<u8> {
    Header { request, flags: VERSION, size: 0 }.as_bytes().to_vec()
}

#[cfg(test)]
mod test {
    use super::*;

    fn frame(request: u32, payload: &[u8], fds: usize) -> Frame {
        let fds = (0..fds).map(|_| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap()).collect();
        Frame {
            header: Header { request, flags: 1, size: u32::try_from(payload.len()).unwrap() },
            payload: payload.to_vec(),
            fds,
        }
    }

    #[test]
    fn a_kick_needs_a_file_descriptor_or_the_no_fd_flag() {
        assert!(matches!(
            Message::parse(frame(12, 3u64.as_bytes(), 1)),
            Ok(Message::SetVringKick(VringFd { queue: 3, fd: Some(_) }))
        ));
        assert!(matches!(
            Message::parse(frame(12, 0x103u64.as_bytes(), 0)),
            Ok(Message::SetVringKick(VringFd { queue: 3, fd: None }))
        ));
        assert!(matches!(Message::parse(frame(12, 3u64.as_bytes(), 0)), Err(Malformed::Fds { count: 0, .. })));
        assert!(matches!(Message::parse(frame(12, 3u64.as_bytes(), 2)), Err(Malformed::Fds { count: 2, .. })));
        assert!(matches!(Message::parse(frame(12, 0x103u64.as_bytes(), 1)), Err(Malformed::Fds { count: 1, .. })));
    }

    #[test]
    fn a_memory_table_has_one_file_descriptor_per_region() {
        let mut payload = [2u32, 0].as_bytes().to_vec();
        payload.resize(8 + 64, 0);
        assert!(matches!(Message::parse(frame(5, &payload, 2)), Ok(Message::SetMemTable(table)) if table.len() == 2));
        assert!(matches!(Message::parse(frame(5, &payload, 1)), Err(Malformed::Fds { .. })));
        assert!(matches!(Message::parse(frame(5, &payload[..40], 2)), Err(Malformed::Payload { .. })));
        payload[0] = 9;
        payload.resize(8 + 9 * 32, 0);
        assert!(matches!(Message::parse(frame(5, &payload, 8)), Err(Malformed::Payload { .. })));
    }

    #[test]
    fn a_configuration_access_has_the_announced_number_of_bytes() {
        let window = ConfigWindow { offset: 0, size: 8, flags: 0 };
        let mut payload = window.as_bytes().to_vec();
        assert!(matches!(Message::parse(frame(24, &payload, 0)), Err(Malformed::Payload { .. })));
        payload.resize(20, 0);
        assert!(matches!(Message::parse(frame(24, &payload, 0)), Ok(Message::GetConfig(found)) if found == window));
    }

    #[test]
    fn an_unexpected_file_descriptor_is_refused() {
        assert_eq!(Message::parse(frame(1, &[], 1)).err(), Some(Malformed::Fds { request: 1, count: 1 }));
        assert_eq!(Message::parse(frame(99, &[], 0)).err(), Some(Malformed::Unknown(99)));
    }

    #[test]
    fn a_reply_has_its_request_and_size() {
        assert_eq!(Reply::Number(5).encode(17), [17, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Reply::Config(None).encode(24), [24, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]);
    }
}
