//! What every test has: a process to be tried, another that must not notice, and what is checked at the end.
//!
//! Knows nothing of what is tried.

use std::ops::Range;
use std::path::{Path, PathBuf};

use xen::kernel::Offered;

use crate::entry::{Abi, READ, Rings, WRITE, transfer};
use crate::front::Front;
use crate::image::{self, Image};
use crate::victim::{Holdings, Victim};
use crate::{OKAY, POLICIES};

/// xvda, over the first RAM disk, and xvdb, over the second.
const TRIED: (&str, u32, &str) = ("xvda", 51712, "/dev/ram0");
const BESIDE: (&str, u32, &str) = ("xvdb", 51728, "/dev/ram1");

/// KiB that a process may keep for the next front end, and for the allocator's sake.
const KEPT: u64 = 2048;

pub const PERSISTENT: Rings = Rings { abi: Abi::X86_64, order: 0, queues: 1, persistent: true };

/// The bed of one test.
pub struct Bed {
    pub victim: Victim,
    pub front: Front,
    pub image: Image,
    pub beside: Beside,
    idle: Holdings,
    memory: u64,
    nodes: usize,
}

/// A disk that is used at the same time, by whom nothing is done wrong.
pub struct Beside {
    pub victim: Victim,
    pub front: Front,
    page: Offered,
    written: u64,
}

impl Bed {
    /// A bed whose process was started with `options` and has seen one front end come and go. `None` where there is no Xen,
    /// which is said.
    pub fn new(options: &[&str]) -> Option<Bed> {
        let Some(program) = std::env::var_os("TAPLINE_DISK").map(PathBuf::from) else {
            println!("not run: it needs Xen; TAPLINE_DISK names the program to be tried there");
            return None;
        };
        let beside = Beside::start(&program);
        let image = Image::filled(TRIED.2.as_ref());
        let mut front = Front::new(TRIED.1);
        let victim = Victim::start(&program, &image.path, TRIED.0, options);
        // It has looked for its front end, and all that it needs for itself is there.
        front.await_backend(&["6"]);
        let bare = victim.holdings();
        front.connect(PERSISTENT);
        let (grant, _page) = one_page(&front);
        assert_eq!(front.run(&transfer(READ, 1, 0, &[(grant, 0, 7)])), OKAY);
        let connected = victim.holdings();
        assert!(connected.grant_mappings > bare.grant_mappings, "a ring is mapped: {connected:?}");
        assert_eq!(connected.channels, bare.channels + 2, "both ends are dom0's");
        front.close();
        victim.await_holdings(bare);
        let (memory, nodes) = (victim.memory(), front.nodes());
        Some(Bed { victim, front, image, beside, idle: bare, memory, nodes })
    }

    /// One bed after the other, each with other grants.
    pub fn each_policy(claim: impl Fn(Bed, &str)) {
        for policy in POLICIES {
            if let Some(bed) = Bed::of_policy(policy) {
                claim(bed, policy);
            }
        }
    }

    /// A bed with these grants, of whose process it is known that it uses them.
    pub fn of_policy(policy: &str) -> Option<Bed> {
        let bed = Bed::new(&["--grants", policy, "--queues", "4"])?;
        let by = match policy {
            "copy" => "grants by copies",
            "persistent" => "grants by mappings that stay",
            "map" => "grants by mapping each time",
            _ => panic!("there is no policy {policy}"),
        };
        assert!(bed.victim.said().contains(by), "{policy}: {}", bed.victim.said());
        Some(bed)
    }

    pub fn connect(&mut self, made: Rings) {
        self.front.connect(made);
    }

    /// Closes, and sees that nothing is held any more.
    pub fn close(&mut self) {
        self.front.close();
        self.victim.await_holdings(self.idle);
    }

    /// That nothing is held for a front end.
    pub fn assert_idle(&mut self) {
        self.victim.assert_lives();
        self.victim.await_holdings(self.idle);
    }

    /// That the process serves who comes next, and has kept nothing of who was there; then ends all. Only these sectors may have
    /// changed.
    pub fn end(mut self, written: &[Range<u64>]) {
        self.victim.assert_lives();
        self.front.connect(PERSISTENT);
        let (grant, page) = one_page(&self.front);
        let expected = self.image.bytes_of(0..8);
        assert_eq!(self.front.run(&transfer(READ, 1, 0, &[(grant, 0, 7)])), OKAY, "who comes next is served");
        assert_eq!(page.bytes.read::<4096>(0).unwrap()[..], expected, "and reads what is there");
        self.close();
        assert_eq!(self.front.nodes(), self.nodes, "nodes in the store");
        let memory = self.victim.memory();
        assert!(memory <= self.memory + KEPT, "{memory} KiB, and {} at the beginning", self.memory);
        self.image.assert_only_written(written);
        self.beside.work();
        let Bed { victim, front, beside, .. } = self;
        victim.end();
        front.leave();
        beside.end();
    }
}

/// A page of zeroes and its grant.
pub fn one_page(front: &Front) -> (xen::GrantRef, Offered) {
    let offered = front.pages(1);
    (offered.pages[0], offered)
}

impl Beside {
    fn start(program: &Path) -> Beside {
        let image = Image::filled(BESIDE.2.as_ref());
        let mut front = Front::new(BESIDE.1);
        let victim = Victim::start(program, &image.path, BESIDE.0, &["--grants", "copy"]);
        front.connect(Rings::default());
        let (_, page) = one_page(&front);
        Beside { victim, front, page, written: 0 }
    }

    /// Writes and reads something of its own.
    pub fn work(&mut self) {
        self.written += 1;
        let (grant, at) = (self.page.pages[0], self.written * 8 % image::SECTORS);
        let mark = self.written.to_le_bytes();
        self.page.bytes.write(4000, mark).unwrap();
        assert_eq!(self.front.run(&transfer(WRITE, 1, at, &[(grant, 0, 7)])), OKAY);
        self.page.bytes.write(4000, [0; 8]).unwrap();
        assert_eq!(self.front.run(&transfer(READ, 2, at, &[(grant, 0, 7)])), OKAY);
        assert_eq!(self.page.bytes.read::<8>(4000), Some(mark), "the disk beside");
    }

    fn end(self) {
        let Beside { victim, mut front, .. } = self;
        front.close();
        victim.end();
        front.leave();
    }
}
