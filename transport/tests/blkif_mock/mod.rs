//! Both ends of a blkif device for tests: a back end that serves a raw disk in memory, and a front end that can write
//! anything into its rings and its node.
//!
//! The back end runs only when called, so that tests control the order of events.

#![allow(dead_code, reason = "each test uses only part of it")]
#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]

mod entry;
#[allow(clippy::duplicate_mod, reason = "each mock of the crate's unit tests includes its own copy")]
#[path = "../epoll/mod.rs"]
mod epoll;
mod front;
#[allow(clippy::duplicate_mod, reason = "each mock of the crate's unit tests includes its own copy")]
#[path = "../../../disk/tests/memory_io/mod.rs"]
pub mod memory_io;

use disk::raw::Raw;
use disk::{
    Action, Allocation, Disk, EngineFailed, FileDone, FileError, FileId, FileOffset, FileOp, Geometry, Image, Io,
    Operation, Options, Transport, Until,
};
use transport::Server as _;
use transport::blkif::{Config, GrantsPolicy, OnStop, Server};
use xen::fake::Host;
use xen::{DomId, Store, StoreError};

use epoll::Epoll;
use memory_io::{MemoryIo, Order, Past};

#[allow(unused_imports, reason = "each test uses only part of it")]
pub use entry::{Abi, Entry, READ, Rings, WRITE, discard, indirect, transfer};
#[allow(unused_imports, reason = "each test uses only part of it")]
pub use front::Front;

pub const DOMAIN: DomId = DomId(7);
pub const DEVICE: u32 = 51712;
pub const BACKEND: &str = "/local/domain/0/backend/tap/7/51712";
pub const FRONTEND: &str = "/local/domain/7/device/vbd/51712";

/// Size of the disk.
pub const LEN: u64 = 4 << 20;

/// A back end: a server and its disk.
pub struct TestBackend {
    pub host: Host,
    pub server: Option<Server>,
    pub watch: Epoll,
    pub disk: Disk<Image>,
    /// The first and only file, with a volatile cache.
    pub file: MemoryIo,
    pub geometry: Geometry,
    /// All popped operations.
    pub seen: Vec<Operation>,
    pub log: String,
}

pub fn config(grants: GrantsPolicy) -> Config {
    let geometry = Geometry { len: LEN, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };
    Config {
        domain: DOMAIN,
        device: DEVICE,
        backend: BACKEND.to_owned(),
        geometry,
        read_only: false,
        grants,
        max_ring_pages_order: 4,
        max_queues: 4,
        max_segments: 256,
        on_stop: OnStop::Close,
    }
}

/// Writes what a toolstack writes before either end starts.
pub fn attach(host: &Host) {
    let mut store = host.store(DomId(0)).unwrap();
    for (path, value) in [
        (format!("{BACKEND}/frontend"), FRONTEND),
        (format!("{BACKEND}/online"), "1"),
        (format!("{BACKEND}/state"), "1"),
        (format!("{FRONTEND}/backend"), BACKEND),
        (format!("{FRONTEND}/state"), "1"),
    ] {
        store.write(None, &path, value.as_bytes()).unwrap();
    }
}

/// Makes a store call of the test itself, and retries it if it gets a failure injected for the server.
fn own<T>(host: &Host, call: impl Fn(&mut dyn Store) -> Result<T, StoreError>) -> T {
    let mut store = host.store(DomId(0)).unwrap();
    call(&mut store).or_else(|_| call(&mut store)).unwrap()
}

pub fn get(host: &Host, path: &str) -> Option<String> {
    own(host, |store| store.read(None, path)).map(|value| String::from_utf8(value).unwrap())
}

pub fn set(host: &Host, path: &str, value: &str) {
    own(host, |store| store.write(None, path, value.as_bytes()));
}

pub fn remove(host: &Host, path: &str) {
    own(host, |store| store.remove(None, path));
}

impl TestBackend {
    /// A back end whose server has started.
    pub fn new(host: &Host, config: Config) -> TestBackend {
        let mut machine = TestBackend::idle(host, config.geometry);
        machine.start(config).unwrap();
        machine
    }

    /// A back end without a server.
    pub fn idle(host: &Host, geometry: Geometry) -> TestBackend {
        let raw = Raw::new(geometry.len, geometry.block, geometry.read_only).unwrap();
        let disk = Disk::new(vec![Image::Raw(raw)], Options::default()).unwrap();
        let bytes: Vec<u8> = (0..geometry.len).map(|at| (at / 512 % 251) as u8).collect();
        let past = Some(Past::new(bytes.clone()));
        // Responses are neither in the order of the requests nor in reverse order.
        let file = MemoryIo { bounded: true, order: Order::Middle, past, ..MemoryIo::new(vec![bytes]) };
        let (watch, seen, log) = (Epoll::new(), Vec::new(), String::new());
        TestBackend { host: host.clone(), server: None, watch, disk, file, geometry, seen, log }
    }

    pub fn start(&mut self, config: Config) -> Result<(), String> {
        self.server = None;
        self.watch = Epoll::new();
        let store = Box::new(self.host.store(DomId(0)).unwrap());
        let channels = Box::new(self.host.channels().unwrap());
        let server = Server::new(config, store, Box::new(self.host.grants()), channels);
        let mut server = server.map_err(|error| error.to_string())?;
        server.start(&mut self.watch).map_err(|error| error.to_string())?;
        self.server = Some(server);
        Ok(())
    }

    /// Does all available work. Returns whether there was any.
    pub fn turn(&mut self) -> bool {
        self.turn_after(false)
    }

    fn turn_after(&mut self, sleep: bool) -> bool {
        let Some(server) = &mut self.server else { return false };
        let keys = self.watch.wait(sleep);
        for &key in &keys {
            server.ready(key, &mut self.watch);
        }
        let mut busy = !keys.is_empty();
        while let Some(request) = server.pop(&self.geometry) {
            self.seen.push(request.operation());
            self.disk.submit(request, &mut self.file);
            busy = true;
        }
        let mut done = Vec::new();
        self.file.reap(Until::Now, &mut done).unwrap();
        for done in done {
            self.disk.settle(done, &mut self.file);
            self.disk.retry(&mut self.file);
            busy = true;
        }
        while let Some((request, status)) = self.disk.answer() {
            server.complete(request, status);
            busy = true;
        }
        server.publish().unwrap();
        for event in server.take_events() {
            self.log += &format!("{event}\n");
        }
        busy || !server.may_sleep()
    }

    /// Runs until it would sleep.
    pub fn settle(&mut self) {
        let turns = (0..1000).take_while(|_| self.turn()).count();
        assert!(turns < 1000, "the server never goes to sleep");
    }

    /// Runs, sleeping in between, until the condition holds.
    pub fn settle_when(&mut self, mut done: impl FnMut(&TestBackend) -> bool) {
        for _ in 0..1000 {
            self.settle();
            if done(self) {
                return;
            }
            self.turn_after(true);
        }
        panic!("the condition never becomes true: {}", self.log);
    }

    /// The process is dead: its operations end before another process starts, performed or not. Later ones are not.
    pub fn die(&mut self, mut is_done: impl FnMut() -> bool) {
        for op in self.file.queue.clone().into_iter().filter(|_| is_done()) {
            self.file.perform(op).result.unwrap();
        }
        self.file.fault = Box::new(|_| Some(FileError::Failed(5)));
        self.file.hold = false;
    }

    pub fn stop(&mut self) {
        self.server.as_mut().unwrap().stop(&mut self.watch);
        self.file.hold = false;
        self.settle();
        self.server = None;
    }

    pub fn take_log(&mut self) -> String {
        std::mem::take(&mut self.log)
    }
}

impl Drop for TestBackend {
    fn drop(&mut self) {
        // Requests in flight end, as they do in a stopping process.
        self.file.hold = false;
        for _ in 0..1000 {
            let mut done = Vec::new();
            self.file.reap(Until::Now, &mut done).unwrap();
            for done in done {
                self.disk.settle(done, &mut self.file);
                self.disk.retry(&mut self.file);
            }
            while let Some((request, _)) = self.disk.answer() {
                request.retire();
            }
        }
    }
}
