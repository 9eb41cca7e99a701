//! Guests of a disk served over vhost-user: the independent client `blkio`, and a minimal front-end with a channel for
//! messages from the back-end.

#![allow(dead_code, reason = "each test uses its part")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use blkio::{Blkio, Blkioq, Completion, MemoryRegion, ReqFlags};
use memory::{GuestAddr, GuestMemory, Mapping, Region};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use stats::Kind;
use testkit::vhost::{PROTOCOL, VERSION_1};

use crate::tool::nbd::Peer;

/// The bytes of memory shared with the disk.
const SHARED: usize = 64 << 10;

/// A guest with one queue, which executes one request at a time unless stated otherwise.
pub struct Vhost {
    queue: Blkioq,
    blkio: Blkio,
    memory: Arc<GuestMemory>,
    mapping: Arc<Mapping>,
    _file: OwnedFd,
}

impl Vhost {
    pub fn connect(path: &Path) -> Vhost {
        let (blkio, queue, mapping, file) = connect(path, 256, SHARED);
        let len = u64::try_from(SHARED).unwrap();
        let region = Region { guest: GuestAddr(0), peer: 0, len, offset: 0, mapping: Arc::clone(&mapping) };
        let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
        Vhost { queue, blkio, memory, mapping, _file: file }
    }

    /// Returns the size of the disk in the configuration space.
    pub fn capacity(&self) -> u64 {
        self.blkio.get_u64("capacity").unwrap()
    }

    /// Starts a write without waiting for it.
    pub fn begin_write(&mut self, at: u64, data: &[u8]) {
        self.segments(data.len()).copy_from(data);
        self.queue.write(at, self.mapping.base(), data.len(), 0, ReqFlags::empty());
        assert!(self.completions(0).is_empty(), "answered at once");
    }

    /// Waits for at least `least` completions; returns their results.
    pub fn completions(&mut self, least: usize) -> Vec<i32> {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; 8];
        let found = self.queue.do_io(&mut completions, least, None, None).unwrap();
        // SAFETY: `do_io` has filled the first `found` of them.
        completions[..found].iter().map(|completion| unsafe { completion.assume_init_ref() }.ret).collect()
    }

    fn segments(&self, len: usize) -> memory::Segments {
        self.memory.segments([(GuestAddr(0), u32::try_from(len).unwrap())]).unwrap()
    }

    fn wait(&mut self) -> io::Result<()> {
        match self.completions(1).as_slice() {
            [0] => Ok(()),
            [error] => Err(io::Error::from_raw_os_error(-error)),
            more => panic!("one request, and {more:?}"),
        }
    }
}

impl Peer for Vhost {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.segments(data.len()).copy_from(data);
        self.queue.write(at, self.mapping.base(), data.len(), 0, ReqFlags::empty());
        self.wait()
    }

    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.queue.read(at, self.mapping.base(), len, 0, ReqFlags::empty());
        self.wait()?;
        Ok(self.segments(len).to_vec())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.queue.flush(0, ReqFlags::empty());
        self.wait()
    }
}

/// A guest that has many long reads in flight at once, all into the same memory.
pub struct Many {
    queue: Blkioq,
    _blkio: Blkio,
    mapping: Arc<Mapping>,
    _file: OwnedFd,
    len: usize,
}

impl Many {
    /// Connects a guest whose reads have `len` bytes.
    pub fn connect(path: &Path, len: u64) -> Many {
        let len = usize::try_from(len).unwrap();
        // Room for reads that begin a little later.
        let (blkio, queue, mapping, file) = connect(path, 1024, len + 4096);
        Many { queue, _blkio: blkio, mapping, _file: file, len }
    }

    /// Prepares a read into memory that is misaligned by this many bytes.
    pub fn read(&mut self, at: u64, askew: usize) {
        self.queue.read(at, self.mapping.base().wrapping_add(askew), self.len, 0, ReqFlags::empty());
    }

    /// Submits the prepared requests; returns how many have completed since the last call, all successfully.
    pub fn completed(&mut self) -> usize {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; 256];
        let found = self.queue.do_io(&mut completions, 0, None, None).unwrap();
        // SAFETY: `do_io` has filled the first `found` of them.
        assert!(completions[..found].iter().all(|completion| unsafe { completion.assume_init_ref() }.ret == 0));
        found
    }
}

/// A guest that knows when it has offered each request and when it has seen its completion.
pub struct Timed {
    queue: Blkioq,
    _blkio: Blkio,
    mapping: Arc<Mapping>,
    _file: OwnedFd,
    asked: Vec<Asked>,
    open: usize,
}

/// A request of such a guest.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub kind: Kind,
    pub at: u64,
    pub len: u64,
    /// The time just before it was offered.
    pub before: u64,
    /// The time just after its completion was seen; zero if there was none.
    pub after: u64,
}

impl Timed {
    /// Connects a guest whose requests have up to `len_max` bytes.
    pub fn connect(path: &Path, len_max: u64) -> Timed {
        let (blkio, queue, mapping, file) = connect(path, 1024, usize::try_from(len_max).unwrap());
        Timed { queue, _blkio: blkio, mapping, _file: file, asked: Vec::new(), open: 0 }
    }

    /// Offers a request.
    pub fn ask(&mut self, kind: Kind, at: u64, len: u64) {
        let (number, bytes, none) = (self.asked.len(), usize::try_from(len).unwrap(), ReqFlags::empty());
        let before = stats::monotonic();
        match kind {
            Kind::Read => self.queue.read(at, self.mapping.base(), bytes, number, none),
            Kind::Write => self.queue.write(at, self.mapping.base(), bytes, number, none),
            Kind::Flush => self.queue.flush(number, none),
            Kind::Discard => self.queue.discard(at, len, number, none),
            Kind::WriteZeroes => self.queue.write_zeroes(at, len, number, none),
        }
        self.asked.push(Asked { kind, at, len, before, after: 0 });
        self.open += 1;
    }

    /// Notifies the disk, and waits for at least this many completions.
    pub fn take(&mut self, least: usize) {
        let mut completions = [const { MaybeUninit::<Completion>::uninit() }; 64];
        let found = self.queue.do_io(&mut completions, least, None, None).unwrap();
        let after = stats::monotonic();
        for completion in &completions[..found] {
            // SAFETY: `do_io` has filled the first `found` of them.
            let completion = unsafe { completion.assume_init_ref() };
            let asked = &mut self.asked[completion.user_data];
            assert_eq!((completion.ret, asked.after), (0, 0), "{asked:?}");
            asked.after = after;
        }
        self.open -= found;
    }

    /// Returns the number of requests in flight.
    pub fn open(&self) -> usize {
        self.open
    }

    /// Returns all requests, in the order in which they were offered.
    pub fn asked(&self) -> &[Asked] {
        &self.asked
    }
}

/// Connects a client with a queue of that size, and `shared` bytes of memory that the disk can access.
fn connect(path: &Path, size: i32, shared: usize) -> (Blkio, Blkioq, Arc<Mapping>, OwnedFd) {
    let mut blkio = Blkio::new("virtio-blk-vhost-user").unwrap();
    blkio.set_str("path", path.to_str().unwrap()).unwrap();
    blkio.connect().unwrap();
    blkio.set_i32("queue-size", size).unwrap();
    let queue = blkio.start().unwrap().queues.pop().unwrap();
    let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, u64::try_from(shared).unwrap()).unwrap();
    let mapping = Arc::new(Mapping::of_file(file.as_fd(), 0, shared).unwrap());
    let addr = mapping.base().addr();
    let region = MemoryRegion { addr, iova: 0, len: shared, fd: file.as_raw_fd(), fd_offset: 0, flags: 0 };
    blkio.map_mem_region(&region).unwrap();
    (blkio, queue, mapping, file)
}

/// A front-end without queues, for what `blkio` does not support.
pub struct FrontEnd {
    front: testkit::vhost::FrontEnd,
    /// Messages sent by the back-end on its own.
    pub channel: UnixStream,
}

// QEMU, docs/interop/vhost-user.rst, "Front-end message types" and "Protocol features".
const SET_FEATURES: u32 = 2;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const NEED_REPLY: u32 = 8;

impl FrontEnd {
    /// Connects with all offered features, and a channel.
    pub fn connect(path: &Path) -> FrontEnd {
        let (channel, theirs) = UnixStream::pair().unwrap();
        let mut front = testkit::vhost::FrontEnd::connect(path);
        front.send(SET_FEATURES, 0, &(VERSION_1 | PROTOCOL).to_ne_bytes(), &[]);
        let offered = front.call(GET_PROTOCOL_FEATURES, 0, &[], &[]);
        front.send(SET_PROTOCOL_FEATURES, 0, &offered, &[]);
        let reply = front.call(SET_BACKEND_REQ_FD, NEED_REPLY, &[], &[theirs.as_fd()]);
        assert_eq!(reply, [0; 8], "the channel is refused");
        FrontEnd { front, channel }
    }

    /// Returns the size of the disk in the configuration space.
    pub fn capacity(&mut self) -> u64 {
        let window = [[0, 8, 0].map(u32::to_ne_bytes).concat(), vec![0; 8]].concat();
        let reply = self.front.call(GET_CONFIG, 0, &window, &[]);
        u64::from_le_bytes(reply[12..].try_into().unwrap()) * 512
    }
}
