//! A vhost-user back-end for tests, which serves a disk in memory, with the front-end that can send and write anything.
//!
//! The back-end runs only when called, so that tests control the order of events.

#![allow(dead_code, reason = "each test uses only part of it")]
#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]

#[allow(clippy::duplicate_mod, reason = "each mock of the crate's unit tests includes its own copy")]
#[path = "../epoll/mod.rs"]
pub mod epoll;

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use disk::{Geometry, Operation, Request, Status, Transport};
use rustix::event::{EventfdFlags, eventfd};
use tempfile::TempDir;
use transport::vhost_user::{self, Config};
use transport::{Interest, Server, Watch, WatchKey};

use epoll::Epoll;
#[allow(unused_imports, reason = "each test uses only part of it")]
pub use testkit::vhost::*;

pub const GEOMETRY: Geometry =
    Geometry { len: 4 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

/// A back-end: a server and its disk.
pub struct TestBackend {
    pub server: vhost_user::Server,
    pub watch: Epoll,
    pub geometry: Geometry,
    pub bytes: Vec<u8>,
    /// All popped operations.
    pub seen: Vec<Operation>,
    /// Requests are held instead of completed.
    pub hold: bool,
    pub held: Vec<Request>,
    /// The status of all requests, which are then not executed.
    pub fault: Option<Status>,
    pub directory: Option<TempDir>,
}

impl TestBackend {
    pub fn new(geometry: Geometry, queues: u16) -> TestBackend {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let mut machine = TestBackend::at(&path, geometry, queues);
        machine.directory = Some(directory);
        machine
    }

    pub fn at(path: &Path, geometry: Geometry, queues: u16) -> TestBackend {
        let config = Config { path: path.into(), queues, serial: "TAPLINE-0001".into(), geometry };
        let mut server = vhost_user::Server::bind(config).unwrap();
        let mut watch = Epoll::new();
        server.start(&mut watch).unwrap();
        let bytes = vec![0; geometry.len as usize];
        TestBackend {
            server,
            watch,
            geometry,
            bytes,
            seen: Vec::new(),
            hold: false,
            held: Vec::new(),
            fault: None,
            directory: None,
        }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.as_ref().unwrap().path().join("disk.sock")
    }

    /// Handles ready descriptors and available requests; sleeps only if `sleep` and there is nothing to do.
    pub fn turn(&mut self, sleep: bool) -> Vec<WatchKey> {
        let keys = self.watch.wait(sleep);
        for &key in &keys {
            self.server.ready(key, &mut self.watch);
        }
        self.work();
        keys
    }

    /// Runs until it is idle.
    pub fn settle(&mut self) {
        while !self.turn(false).is_empty() {}
    }

    fn work(&mut self) {
        while let Some(request) = self.server.pop(&self.geometry) {
            self.seen.push(request.operation());
            if self.hold {
                self.held.push(request);
            } else {
                self.answer(request);
            }
        }
        self.server.publish().unwrap();
    }

    fn answer(&mut self, request: Request) {
        let status = self.fault.unwrap_or_else(|| self.execute(&request));
        self.server.complete(request, status);
    }

    /// Completes the held requests.
    pub fn release(&mut self) {
        for request in std::mem::take(&mut self.held) {
            self.answer(request);
        }
        self.server.publish().unwrap();
    }

    fn execute(&mut self, request: &Request) -> Status {
        let span = request.span();
        let range = &mut self.bytes[span.at.0 as usize..span.end().0 as usize];
        match request.operation() {
            Operation::Read => request.memory().copy_from(range),
            Operation::Write { .. } | Operation::Patch { .. } => request.memory().copy_to(range),
            Operation::WriteZeroes { .. } | Operation::Discard => range.fill(0),
            Operation::Flush | Operation::Extents { .. } => {}
        }
        Status::Done
    }

    pub fn events(&mut self) -> String {
        self.server.take_events().iter().map(|event| format!("{event}\n")).collect()
    }
}

impl BackEnd for TestBackend {
    fn settle(&mut self) {
        TestBackend::settle(self);
    }

    fn events(&mut self) -> String {
        TestBackend::events(self)
    }
}

impl Drop for TestBackend {
    fn drop(&mut self) {
        for request in self.held.drain(..) {
            request.retire();
        }
    }
}

const STOP: WatchKey = WatchKey(u64::MAX);

/// A back-end on its own thread, which sleeps when idle.
pub struct RunningBackend {
    directory: TempDir,
    stop: OwnedFd,
    thread: Option<JoinHandle<Vec<u8>>>,
}

impl RunningBackend {
    pub fn new(geometry: Geometry, queues: u16) -> RunningBackend {
        RunningBackend::with_content(&[], geometry, queues)
    }

    /// A back-end whose disk starts with `content`.
    pub fn with_content(content: &[u8], geometry: Geometry, queues: u16) -> RunningBackend {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.sock");
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut machine = TestBackend::at(&path, geometry, queues);
        machine.bytes[..content.len()].copy_from_slice(content);
        machine.watch.watch(stop.as_fd(), Interest::Read, STOP).unwrap();
        let serve = move || {
            loop {
                let sleep = machine.server.may_sleep();
                if machine.turn(sleep).contains(&STOP) {
                    machine.server.stop(&mut machine.watch);
                    return std::mem::take(&mut machine.bytes);
                }
            }
        };
        RunningBackend { directory, stop, thread: Some(std::thread::spawn(serve)) }
    }

    pub fn path(&self) -> PathBuf {
        self.directory.path().join("disk.sock")
    }

    /// Ends the thread; returns the contents of the disk.
    pub fn stop(&mut self) -> Vec<u8> {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
        self.thread.take().unwrap().join().unwrap()
    }
}
