//! The fixture of every test: the process under test, another one that must not be affected, and the final checks.
//!
//! It knows nothing about the individual tests.

use std::ops::Range;
use std::path::{Path, PathBuf};

use xen::kernel::GrantedPages;

use crate::disk_process::{DiskProcess, Holdings};
use crate::entry::{Abi, READ, Rings, WRITE, transfer};
use crate::front::Front;
use crate::image::{self, Image};
use crate::{OKAY, POLICIES};

/// xvda, on the first RAM disk, and xvdb, on the second.
const TESTED: (&str, u32, &str) = ("xvda", 51712, "/dev/ram0");
const BYSTANDER: (&str, u32, &str) = ("xvdb", 51728, "/dev/ram1");

/// KiB of memory that a process may retain for the next front end and in the allocator.
const RETAINED_MAX: u64 = 2048;

pub const PERSISTENT: Rings = Rings { abi: Abi::X86_64, order: 0, queues: 1, persistent: true };

/// The fixture of one test.
pub struct Fixture {
    pub process: DiskProcess,
    pub front: Front,
    pub image: Image,
    pub bystander: Bystander,
    idle: Holdings,
    memory: u64,
    nodes: usize,
}

/// A disk used concurrently by a well-behaved front end.
pub struct Bystander {
    pub process: DiskProcess,
    pub front: Front,
    page: GrantedPages,
    written: u64,
}

impl Fixture {
    /// A fixture whose process was started with `options` and has served one front end. Without Xen, prints a message
    /// and returns `None`.
    pub fn new(options: &[&str]) -> Option<Fixture> {
        let Some(program) = std::env::var_os("TAPLINE_DISK").map(PathBuf::from) else {
            println!("skipped: needs Xen; TAPLINE_DISK names the program to test there");
            return None;
        };
        let bystander = Bystander::start(&program);
        let image = Image::filled(TESTED.2.as_ref());
        let mut front = Front::new(TESTED.1);
        let process = DiskProcess::start(&program, &image.path, TESTED.0, options);
        // It has found its front end, and has all the resources that it needs for itself.
        front.await_backend(&["6"]);
        let bare = process.holdings();
        front.connect(PERSISTENT);
        let (grant, _page) = one_page(&front);
        assert_eq!(front.run(&transfer(READ, 1, 0, &[(grant, 0, 7)])), OKAY);
        let connected = process.holdings();
        assert!(connected.grant_mappings > bare.grant_mappings, "a ring must be mapped: {connected:?}");
        assert_eq!(connected.channels, bare.channels + 2, "both ends are in dom0");
        front.close();
        process.await_holdings(bare);
        let (memory, nodes) = (process.memory(), front.nodes());
        Some(Fixture { process, front, image, bystander, idle: bare, memory, nodes })
    }

    /// Runs a test once with each grants policy.
    pub fn each_policy(test: impl Fn(Fixture, &str)) {
        for policy in POLICIES {
            if let Some(fixture) = Fixture::of_policy(policy) {
                test(fixture, policy);
            }
        }
    }

    /// A fixture with this grants policy; checks that the process uses it.
    pub fn of_policy(policy: &str) -> Option<Fixture> {
        let fixture = Fixture::new(&["--grants", policy, "--queues", "4"])?;
        let mode = match policy {
            "copy" => "grants by copies",
            "persistent" => "grants by persistent mapping",
            "map" => "grants by per-request mapping",
            _ => panic!("there is no policy {policy}"),
        };
        assert!(fixture.process.log_text().contains(mode), "{policy}: {}", fixture.process.log_text());
        Some(fixture)
    }

    pub fn connect(&mut self, made: Rings) {
        self.front.connect(made);
    }

    /// Closes the front end, and waits until the process holds nothing for it.
    pub fn close(&mut self) {
        self.front.close();
        self.process.await_holdings(self.idle);
    }

    /// Asserts that the process runs and holds nothing for a front end.
    pub fn assert_idle(&mut self) {
        self.process.assert_running();
        self.process.await_holdings(self.idle);
    }

    /// Checks that the process serves the next front end, holds nothing for the previous ones, and has changed only the
    /// sectors in `written`; then ends everything.
    pub fn end(mut self, written: &[Range<u64>]) {
        self.process.assert_running();
        self.front.connect(PERSISTENT);
        let (grant, page) = one_page(&self.front);
        let expected = self.image.bytes_of(0..8);
        assert_eq!(self.front.run(&transfer(READ, 1, 0, &[(grant, 0, 7)])), OKAY, "the next front end is served");
        assert_eq!(page.bytes.read::<4096>(0).unwrap()[..], expected, "it reads the right data");
        self.close();
        assert_eq!(self.front.nodes(), self.nodes, "nodes in the store");
        let memory = self.process.memory();
        assert!(memory <= self.memory + RETAINED_MAX, "{memory} KiB, {} at the beginning", self.memory);
        self.image.assert_only_written(written);
        self.bystander.work();
        let Fixture { process, front, bystander, .. } = self;
        process.end();
        front.remove_nodes();
        bystander.end();
    }
}

/// A zeroed page and its grant.
pub fn one_page(front: &Front) -> (xen::GrantRef, GrantedPages) {
    let offered = front.pages(1);
    (offered.pages[0], offered)
}

impl Bystander {
    fn start(program: &Path) -> Bystander {
        let image = Image::filled(BYSTANDER.2.as_ref());
        let mut front = Front::new(BYSTANDER.1);
        let process = DiskProcess::start(program, &image.path, BYSTANDER.0, &["--grants", "copy"]);
        front.connect(Rings::default());
        let (_, page) = one_page(&front);
        Bystander { process, front, page, written: 0 }
    }

    /// Writes and reads data of its own.
    pub fn work(&mut self) {
        self.written += 1;
        let (grant, at) = (self.page.pages[0], self.written * 8 % image::SECTORS);
        let mark = self.written.to_le_bytes();
        self.page.bytes.write(4000, mark).unwrap();
        assert_eq!(self.front.run(&transfer(WRITE, 1, at, &[(grant, 0, 7)])), OKAY);
        self.page.bytes.write(4000, [0; 8]).unwrap();
        assert_eq!(self.front.run(&transfer(READ, 2, at, &[(grant, 0, 7)])), OKAY);
        assert_eq!(self.page.bytes.read::<8>(4000), Some(mark), "the other disk");
    }

    fn end(self) {
        let Bystander { process, mut front, .. } = self;
        front.close();
        process.end();
        front.remove_nodes();
    }
}
