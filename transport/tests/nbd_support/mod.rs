//! A disk in memory behind an NBD server, on a thread with an epoll loop like that of the disk process.
//!
//! A batch is completed in reverse order, so that every client sees replies out of order.

#![allow(dead_code, reason = "each test program uses only part of it")]

use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use disk::{Extent, ExtentKind, Geometry, Operation, Request, Span, Status, Transport};
use rustix::event::epoll;
use rustix::event::{EventfdFlags, eventfd};
use testkit::nbd::wire::Connection;
use transport::nbd::{Address, Config, Export, Server, Tls};
use transport::{Interest, Server as _, Watch, WatchKey};

pub const GEOMETRY: Geometry =
    Geometry { len: 64 << 20, block: 512, physical_block: 4096, discard: 65536, chs: None, read_only: false };

/// The allocation unit.
const UNIT: u64 = 65536;

/// A sparse disk in memory.
#[derive(Default)]
pub struct RamDisk {
    units: BTreeMap<u64, Vec<u8>>,
    /// Every operation, in the order in which it was performed.
    pub done: Vec<(Operation, Span)>,
}

impl RamDisk {
    fn pieces(span: Span) -> impl Iterator<Item = (u64, usize, usize, usize)> {
        let mut at = span.at;
        std::iter::from_fn(move || {
            let left = span.end().checked_sub(at).filter(|&left| left > 0)?;
            let len = left.min(UNIT - at % UNIT);
            let piece = (at / UNIT, size(at % UNIT), size(at - span.at), size(len));
            at += len;
            Some(piece)
        })
    }

    fn perform(&mut self, request: &mut Request) -> Status {
        let changes = matches!(request.operation(), Operation::Patch { .. } | Operation::WriteZeroes { .. });
        let span = if changes { request.asked() } else { request.span() };
        let written = request.asked_memory();
        self.done.push((request.operation(), span));
        for (unit, within, from, len) in Self::pieces(span) {
            match request.operation() {
                Operation::Read => {
                    let memory = request.memory().slice(from, len);
                    match self.units.get(&unit) {
                        Some(bytes) => memory.copy_from(&bytes[within..within + len]),
                        None => memory.fill_zero(),
                    }
                }
                Operation::Write { .. } | Operation::Patch { .. } => {
                    let bytes = self.units.entry(unit).or_insert_with(|| vec![0; size(UNIT)]);
                    written.slice(from, len).copy_to(&mut bytes[within..within + len]);
                }
                Operation::Discard | Operation::WriteZeroes { .. } if len == size(UNIT) => {
                    self.units.remove(&unit);
                }
                Operation::Discard | Operation::WriteZeroes { .. } => {
                    if let Some(bytes) = self.units.get_mut(&unit) {
                        bytes[within..within + len].fill(0);
                    }
                }
                Operation::Extents { .. } => {
                    let kind = if self.units.contains_key(&unit) { ExtentKind::Data } else { ExtentKind::Hole };
                    request.extents_mut().push(Extent { len: u64::try_from(len).unwrap(), kind, depth: 0 });
                }
                Operation::Flush => {}
            }
        }
        Status::Done
    }
}

fn size(len: u64) -> usize {
    usize::try_from(len).unwrap()
}

/// An edge-triggered epoll, as `Watch` requires.
struct Epoll {
    epoll: OwnedFd,
    /// Our own descriptor for each key, to unwatch by key.
    known: BTreeMap<WatchKey, OwnedFd>,
}

impl Watch for Epoll {
    fn watch(&mut self, fd: BorrowedFd<'_>, interest: Interest, key: WatchKey) -> std::io::Result<()> {
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if interest == Interest::ReadWrite {
            flags |= epoll::EventFlags::OUT;
        }
        let data = epoll::EventData::new_u64(key.0);
        if let Some(known) = self.known.get(&key) {
            return Ok(epoll::modify(&self.epoll, known, data, flags)?);
        }
        let known = fd.try_clone_to_owned()?;
        epoll::add(&self.epoll, &known, data, flags)?;
        self.known.insert(key, known);
        Ok(())
    }

    fn forget(&mut self, key: WatchKey) {
        let known = self.known.remove(&key).expect("an unknown key was unwatched");
        epoll::delete(&self.epoll, known).expect("it was watched");
    }
}

/// A disk and its NBD server, which is stopped when dropped.
pub struct Served {
    pub address: Address,
    pub disk: Arc<Mutex<RamDisk>>,
    pub events: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    wake: OwnedFd,
    thread: Option<JoinHandle<()>>,
    directory: tempfile::TempDir,
}

const WAKE: u64 = 1 << 63;

impl Served {
    pub fn unix(geometry: Geometry) -> Served {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Unix(directory.path().join("nbd.sock"));
        Served::at(address, geometry, directory, None)
    }

    /// The same, for clients that use TLS.
    pub fn unix_tls(geometry: Geometry, tls: Tls) -> Served {
        let directory = tempfile::tempdir().unwrap();
        let address = Address::Unix(directory.path().join("nbd.sock"));
        Served::at(address, geometry, directory, Some(tls))
    }

    /// The same over TCP.
    pub fn tcp_tls(geometry: Geometry, tls: Tls) -> Served {
        let directory = tempfile::tempdir().unwrap();
        Served::at(Address::Tcp(([127, 0, 0, 1], 0).into()), geometry, directory, Some(tls))
    }

    pub fn tcp(geometry: Geometry) -> Served {
        let directory = tempfile::tempdir().unwrap();
        Served::at(Address::Tcp(([127, 0, 0, 1], 0).into()), geometry, directory, None)
    }

    fn at(address: Address, geometry: Geometry, directory: tempfile::TempDir, tls: Option<Tls>) -> Served {
        let export = Export {
            name: "vdi".into(),
            description: "a disk in memory".into(),
            geometry,
            layered: false,
            bitmaps: Vec::new(),
        };
        let server = Server::bind(Config { address, export, tls }).unwrap();
        let address = server.address().clone();
        let disk = Arc::new(Mutex::new(RamDisk::default()));
        let events = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let thread = {
            let (disk, events, stop) = (disk.clone(), events.clone(), stop.clone());
            let wake = wake.try_clone().unwrap();
            std::thread::spawn(move || serve(server, geometry, &disk, &events, &stop, &wake))
        };
        Served { address, disk, events, stop, wake, thread: Some(thread), directory }
    }

    pub fn path(&self) -> &Path {
        match &self.address {
            Address::Unix(path) => path,
            Address::Tcp(_) => panic!("not a Unix socket"),
        }
    }

    /// A client that has received the greeting and sent nothing.
    pub fn greeted(&self) -> Connection {
        Connection::greeted(self.path()).unwrap()
    }

    /// A client that uses simple replies.
    pub fn simple(&self) -> Connection {
        Connection::simple(self.path()).unwrap()
    }

    /// A client that uses structured replies.
    pub fn structured(&self) -> Connection {
        Connection::structured(self.path()).unwrap()
    }

    /// A client that uses extended headers.
    pub fn extended(&self) -> Connection {
        Connection::extended(self.path()).unwrap()
    }

    /// A file name in the test's own directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn uri(&self) -> String {
        match &self.address {
            Address::Unix(path) => format!("nbd+unix:///?socket={}", path.display()),
            Address::Tcp(address) => format!("nbd://{address}/"),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
        let result = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            result.expect("the server's thread panicked");
        }
    }
}

fn serve(
    mut server: Server,
    geometry: Geometry,
    disk: &Mutex<RamDisk>,
    events: &Mutex<Vec<String>>,
    stop: &AtomicBool,
    wake: &OwnedFd,
) {
    let mut watch = Epoll { epoll: epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(), known: BTreeMap::new() };
    epoll::add(&watch.epoll, wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN).unwrap();
    server.start(&mut watch).unwrap();
    let mut ready = vec![epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) }; 64];
    while !stop.load(Ordering::SeqCst) {
        let mut batch: Vec<Request> = std::iter::from_fn(|| server.pop(&geometry)).collect();
        while let Some(mut request) = batch.pop() {
            let status = disk.lock().unwrap().perform(&mut request);
            server.complete(request, status);
        }
        server.publish().unwrap();
        events.lock().unwrap().extend(server.take_events().iter().map(ToString::to_string));
        let timeout = if server.may_sleep() { None } else { Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }) };
        let count = match epoll::wait(&watch.epoll, ready.as_mut_slice(), timeout) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR) => 0,
            Err(errno) => panic!("epoll_wait: {errno}"),
        };
        for event in &ready[..count] {
            let key = event.data.u64();
            if key != WAKE {
                server.ready(WatchKey(key), &mut watch);
            }
        }
    }
    server.stop(&mut watch);
}

/// Runs a tool, asserts that it succeeds, and returns its output.
pub fn run(package: &str, tool: &str, arguments: &[&str]) -> String {
    let output = output(package, tool, arguments);
    assert!(
        output.status.success(),
        "{tool} {arguments:?} failed:\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

pub fn output(package: &str, tool: &str, arguments: &[&str]) -> Output {
    // With a timeout: if the server lost a reply, the tool would wait forever.
    let output = Command::new("timeout").arg("120").arg(tool).args(arguments).output().unwrap();
    assert!(output.status.code() != Some(127), "cannot run {tool}; install the package {package}");
    output
}
