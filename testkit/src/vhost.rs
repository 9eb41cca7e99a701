//! A vhost-user front-end and the driver of its guest, which can send and write anything.
//!
//! It knows nothing of the back-end, and checks of a reply only that it is one.

#![allow(missing_docs, reason = "what has no more to say is named as in the specification")]
#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]

use std::cell::RefCell;
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use memory::{GuestAddr, GuestMemory, Mapping, Region};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
};

/// In which a back-end that lives answers, however busy the machine is.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Addresses of the front-end's process are those of the guest plus this.
pub const PEER: u64 = 0x7f00_0000_0000;
/// Size of each of the two regions, which are adjacent in the guest.
pub const REGION: u64 = 512 << 10;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// VHOST_F_LOG_ALL.
pub const LOG_ALL: u64 = 1 << 26;
pub const VERSION_1: u64 = 1 << 32;
pub const FLUSH: u64 = 1 << 9;
pub const EVENT_IDX: u64 = 1 << 29;
pub const PROTOCOL: u64 = 1 << 30;

/// One descriptor.
#[derive(Clone, Copy)]
pub struct Desc {
    pub addr: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

/// A back-end that runs only when called.
pub trait BackEnd {
    /// Runs until there is nothing more to do.
    fn settle(&mut self);

    /// What has happened since the last call.
    fn events(&mut self) -> String;
}

/// A front-end and the driver of its guest.
pub struct FrontEnd {
    pub stream: UnixStream,
    pub files: Vec<OwnedFd>,
    pub memory: Arc<GuestMemory>,
    pub size: u16,
    pub calls: Vec<OwnedFd>,
    pub kicks: Vec<OwnedFd>,
    pub errs: Vec<OwnedFd>,
    /// A copy of the guest's memory, in which its own writes are: a migration's.
    pub copy: RefCell<Option<Vec<u8>>>,
}

/// The payload of GET_INFLIGHT_FD and SET_INFLIGHT_FD.
pub fn region_for(len: u64, offset: u64, queues: u16, size: u16) -> Vec<u8> {
    let mut bytes = [len, offset].map(u64::to_ne_bytes).concat();
    bytes.extend([queues, size, 0, 0].map(u16::to_ne_bytes).concat());
    bytes
}

fn ring_base(queue: u16) -> u64 {
    0x1000 + u64::from(queue) * 0x8000
}

impl FrontEnd {
    pub fn connect(path: &Path) -> FrontEnd {
        let stream = UnixStream::connect(path).unwrap();
        let mut files = Vec::new();
        let mut regions = Vec::new();
        for index in 0..2 {
            let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, REGION).unwrap();
            let mapping = Arc::new(Mapping::of_file(file.as_fd(), 0, REGION as usize).unwrap());
            let guest = GuestAddr(index * REGION);
            regions.push(Region { guest, peer: PEER + guest.0, len: REGION, offset: 0, mapping });
            files.push(file);
        }
        let memory = Arc::new(GuestMemory::new(regions).unwrap());
        FrontEnd {
            stream,
            files,
            memory,
            size: 16,
            calls: Vec::new(),
            kicks: Vec::new(),
            errs: Vec::new(),
            copy: RefCell::new(None),
        }
    }

    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) {
        let header = [request, flags | 1, payload.len() as u32];
        let mut bytes: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
        bytes.extend(payload);
        self.send_raw(&bytes, fds);
    }

    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        // The server may have disconnected already, which is for the test to detect.
        rustix::net::sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).ok();
    }

    /// The payload of the next reply, if there is one.
    pub fn reply(&mut self, request: u32) -> Option<Vec<u8>> {
        self.stream.set_nonblocking(true).unwrap();
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).ok()?;
        let word = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (request, 5), "the header of a reply");
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload).unwrap();
        Some(payload)
    }

    /// The payload of the next reply, and its file.
    pub fn reply_with_file(&mut self, request: u32) -> Option<(Vec<u8>, OwnedFd)> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 12 + 24];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut room = [IoSliceMut::new(&mut bytes)];
        let received = rustix::net::recvmsg(&self.stream, &mut room, &mut control, flags).ok()?;
        let fd = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        });
        if received.bytes == 0 {
            return None;
        }
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4), received.bytes), (request, 5, 12 + word(8) as usize), "the header of a reply");
        Some((bytes[12..received.bytes].to_vec(), fd?))
    }

    /// Sends a request to a back-end that runs by itself; waits for the payload of the reply.
    pub fn call(&mut self, request: u32, flags: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Vec<u8> {
        self.send(request, flags, payload, fds);
        wait_for(|| self.reply(request))
    }

    /// Disconnects, and reconnects with the same memory. Closing the socket is not enough: a front-end that connects
    /// while the last is connected is refused, and a process started by another test also has our socket open for a
    /// moment.
    pub fn reconnect(&mut self, path: &Path) {
        self.stream.shutdown(Shutdown::Both).ok();
        self.stream = UnixStream::connect(path).unwrap();
        self.kicks.clear();
        self.calls.clear();
        self.errs.clear();
    }

    /// Requests a region for requests in flight; returns the payload that sends it back, and its file.
    pub fn request_region(&mut self, machine: &mut impl BackEnd, queues: u16, size: u16) -> (Vec<u8>, OwnedFd) {
        self.send(31, 0, &region_for(0, 0, queues, size), &[]);
        machine.settle();
        self.reply_with_file(31).unwrap_or_else(|| panic!("no region: {}", machine.events()))
    }

    /// Sends a request, runs the back-end, and reads the reply.
    pub fn query(&mut self, machine: &mut impl BackEnd, request: u32, payload: &[u8]) -> Option<Vec<u8>> {
        self.send(request, 8, payload, &[]);
        machine.settle();
        self.reply(request)
    }

    /// Sends a request that must be acknowledged with `code`.
    pub fn expect(
        &mut self,
        machine: &mut impl BackEnd,
        request: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
        code: u64,
    ) {
        self.send(request, 8, payload, fds);
        machine.settle();
        let reply = self.reply(request);
        assert_eq!(reply.as_deref(), Some(&code.to_ne_bytes()[..]), "{}", machine.events());
    }

    pub fn region(&self, index: u64) -> Vec<u8> {
        let words = [0, index * REGION, REGION, PEER + index * REGION, 0];
        words.iter().flat_map(|word: &u64| word.to_ne_bytes()).collect()
    }

    /// Negotiates features, sends the memory and starts `queues` queues, as QEMU and `blkio` do.
    pub fn set_up(&mut self, machine: &mut impl BackEnd, features: u64, queues: u16) {
        self.negotiate(machine, features);
        for index in 0..2 {
            let region = self.region(index);
            let file = rustix::io::dup(&self.files[index as usize]).unwrap();
            self.expect(machine, 37, &region, &[file.as_fd()], 0);
        }
        for queue in 0..queues {
            self.start_queue(machine, queue, 0);
        }
    }

    pub fn negotiate(&mut self, machine: &mut impl BackEnd, features: u64) {
        self.query(machine, 1, &[]).unwrap();
        self.send(2, 0, &(features | PROTOCOL).to_ne_bytes(), &[]);
        let offered = self.query(machine, 15, &[]).unwrap();
        self.send(16, 0, &offered, &[]);
        machine.settle();
    }

    pub fn start_queue(&mut self, machine: &mut impl BackEnd, queue: u16, base: u16) {
        let number =
            |value: u32| [u32::from(queue), value].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>();
        self.expect(machine, 8, &number(u32::from(self.size)), &[], 0);
        self.expect(machine, 10, &number(u32::from(base)), &[], 0);
        let place = self.place(queue, 0);
        self.expect(machine, 9, &place, &[], 0);
        for (request, kind) in [(12, 0), (13, 1), (14, 2)] {
            let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
            let payload = u64::from(queue).to_ne_bytes();
            self.expect(machine, request, &payload, &[fd.as_fd()], 0);
            [&mut self.kicks, &mut self.calls, &mut self.errs][kind].push(fd);
        }
        self.expect(machine, 18, &number(1), &[], 0);
    }

    /// The payload of SET_VRING_ADDR; the used ring is logged at its own address.
    pub fn place(&self, queue: u16, flags: u32) -> Vec<u8> {
        let mut bytes: Vec<u8> = [u32::from(queue), flags].iter().flat_map(|word| word.to_ne_bytes()).collect();
        for part in [self.desc_at(queue, 0), self.used_at(queue), self.avail_at(queue)] {
            bytes.extend((part + PEER).to_ne_bytes());
        }
        bytes.extend(self.used_at(queue).to_ne_bytes());
        bytes
    }

    pub fn desc_at(&self, queue: u16, index: u16) -> u64 {
        ring_base(queue) + 16 * u64::from(index)
    }

    pub fn avail_at(&self, queue: u16) -> u64 {
        self.desc_at(queue, self.size)
    }

    pub fn used_at(&self, queue: u16) -> u64 {
        (self.avail_at(queue) + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.copy_put(at, bytes);
        self.memory.segments([(GuestAddr(at), bytes.len() as u32)]).unwrap().copy_from(bytes);
    }

    fn copy_put(&self, at: u64, bytes: &[u8]) {
        if let Some(copy) = self.copy.borrow_mut().as_mut() {
            copy[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        }
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        self.memory.segments([(GuestAddr(at), len as u32)]).unwrap().to_vec()
    }

    /// Loads a number that the other side may be storing, without tearing. A copy of two bytes may be two loads.
    pub fn get_u16(&self, at: u64) -> u16 {
        self.memory.shared(GuestAddr(at), 2).and_then(|place| place.load_u16(0)).unwrap()
    }

    /// Stores a number that the other side may be loading; earlier writes are visible by then.
    pub fn put_u16(&self, at: u64, value: u16) {
        self.copy_put(at, &value.to_le_bytes());
        self.memory.shared(GuestAddr(at), 2).and_then(|place| place.store_u16(0, value)).unwrap();
    }

    pub fn describe(&self, at: u64, desc: Desc) {
        let mut bytes = desc.addr.to_le_bytes().to_vec();
        bytes.extend(desc.len.to_le_bytes());
        bytes.extend(desc.flags.to_le_bytes());
        bytes.extend(desc.next.to_le_bytes());
        self.put(at, &bytes);
    }

    /// Links `parts` (address, length, flags) starting at descriptor `head`.
    pub fn chain(&self, queue: u16, head: u16, parts: &[(u64, u32, u16)]) {
        for (index, &(addr, len, flags)) in parts.iter().enumerate() {
            let at = head + index as u16;
            let more = if index + 1 < parts.len() { NEXT } else { 0 };
            self.describe(self.desc_at(queue, at), Desc { addr, len, flags: flags | more, next: at + 1 });
        }
    }

    /// Makes a head available without a notification.
    pub fn offer(&self, queue: u16, head: u16) {
        let avail = self.avail_at(queue);
        let index = self.get_u16(avail + 2);
        self.put(avail + 4 + 2 * u64::from(index % self.size), &head.to_le_bytes());
        self.put_u16(avail + 2, index.wrapping_add(1));
    }

    /// The used elements starting at `from`.
    pub fn used(&self, queue: u16, from: u16) -> Vec<(u32, u32)> {
        let used = self.used_at(queue);
        let count = self.get_u16(used + 2).wrapping_sub(from);
        let element = |index: u16| {
            let at = used + 4 + 8 * u64::from(from.wrapping_add(index) % self.size);
            let bytes = self.get(at, 8);
            let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            (word(0), word(4))
        };
        (0..count).map(element).collect()
    }

    pub fn header(&self, at: u64, kind: u32, sector: u64) {
        let mut bytes = kind.to_le_bytes().to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sector.to_le_bytes());
        self.put(at, &bytes);
    }

    /// A plain request at descriptor 0: header at 0x40000, data at 0x41000, status at 0x40100.
    pub fn request(&self, kind: u32, sector: u64, data: &[(u64, u32, u16)]) {
        self.header(0x40000, kind, sector);
        self.put(0x40100, &[0xff]);
        let mut parts = vec![(0x40000, 16, 0)];
        parts.extend(data);
        parts.push((0x40100, 1, WRITE));
        self.chain(0, 0, &parts);
        self.offer(0, 0);
    }

    pub fn status(&self) -> u8 {
        self.get(0x40100, 1)[0]
    }

    /// How often an eventfd was signalled since the last call.
    pub fn signalled(fd: &OwnedFd) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(fd, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }

    /// Whether the server has disconnected.
    pub fn is_closed(&mut self) -> bool {
        self.stream.set_nonblocking(true).unwrap();
        match self.stream.read(&mut [0; 1]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// Waits for a response, which a live back-end always gives.
pub fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "the disk does not answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}
