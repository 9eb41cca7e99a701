//! A guest with a ring of its own over vhost-user, and the QEMU side that reconnects when its disk's process has died.
//!
//! It reuses pages and descriptors immediately after their completion, as Linux does, and checks every completion.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::vhost::{FLUSH, FrontEnd, PATIENCE, PROTOCOL, VERSION_1, WRITE, region_for, wait_for};

/// Bytes of a request.
pub const BLOCK: usize = 4096;
/// For a disk of 16 MiB.
const BLOCKS: u64 = 4096;
/// Requests at once.
pub const DEPTH: u16 = 128;
/// Places in the ring, and descriptors of a chain.
const SIZE: u16 = 512;
const CHAIN: u16 = 3;
const HEADERS: u64 = 0x40000;
const PAGES: u64 = 0x50000;
const POISON: u8 = 0xee;

/// The operations of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes a new version of a block.
    Write,
    /// Reads a block.
    Read,
    /// Flushes the disk.
    Flush,
}

struct Asked {
    kind: Kind,
    block: u64,
    version: u64,
}

/// The guest: a driver of one ring, which checks what comes back.
pub struct Driver {
    front: FrontEnd,
    path: PathBuf,
    recorded: bool,
    region: Option<(Vec<u8>, OwnedFd)>,
    /// A stack: the last freed is the first reused.
    free: Vec<u16>,
    asked: BTreeMap<u16, Asked>,
    last_used: u16,
    /// For each block the version that was last written, and whether a request is at it.
    versions: BTreeMap<u64, u64>,
    /// Requests that were answered.
    pub answered: u64,
    /// Requests of this block may fail, once each.
    pub may_fail: Option<u64>,
    /// Requests that have failed, as they may.
    pub failed: u64,
}

/// The bytes of a version of a block.
pub fn content(block: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; BLOCK] } else { [block, version].map(u64::to_le_bytes).concat().repeat(BLOCK / 16) }
}

impl Driver {
    /// A guest whose QEMU supports the inflight region, or does not.
    pub fn connect(path: &Path, recorded: bool) -> Driver {
        let mut front = FrontEnd::connect(path);
        front.size = SIZE;
        let mut driver = Driver {
            front,
            path: path.to_owned(),
            recorded,
            region: None,
            free: (0..DEPTH).map(|index| index * CHAIN).collect(),
            asked: BTreeMap::new(),
            last_used: 0,
            versions: BTreeMap::new(),
            answered: 0,
            may_fail: None,
            failed: 0,
        };
        driver.start(0);
        driver
    }

    /// Reconnects after the process has died: the ring's base is the used index, since no other is known.
    pub fn connect_again(&mut self) {
        self.front.reconnect(&self.path);
        let base = self.front.get_u16(self.front.used_at(0) + 2);
        self.start(base);
    }

    /// Disconnects. Closing the socket is not enough while another test forks a process, which has it open too for a
    /// moment.
    pub fn leave(&self) {
        self.front.stream.shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// All messages of a front-end at a start.
    fn start(&mut self, base: u16) {
        let inflight = if self.recorded { 1 << 12 } else { 0 };
        self.front.send(2, 0, &(VERSION_1 | FLUSH | PROTOCOL).to_ne_bytes(), &[]);
        self.front.send(16, 0, &((1u64 << 3) | (1 << 15) | inflight).to_ne_bytes(), &[]);
        if self.recorded && self.region.is_none() {
            self.front.send(31, 0, &region_for(0, 0, 1, SIZE), &[]);
            self.region = Some(wait_for(|| self.front.reply_with_file(31)));
        }
        for index in 0..2 {
            self.front.send(37, 0, &self.front.region(index), &[self.front.files[index as usize].as_fd()]);
        }
        self.start_ring(base);
    }

    /// Starts the ring.
    pub fn start_ring(&mut self, base: u16) {
        if let Some((payload, file)) = &self.region {
            self.front.send(32, 0, payload, &[file.as_fd()]);
        }
        let number = |value: u16| [0, u32::from(value)].map(u32::to_ne_bytes).concat();
        self.front.send(8, 0, &number(SIZE), &[]);
        self.front.send(10, 0, &number(base), &[]);
        let place = self.front.place(0, 0);
        self.front.send(9, 0, &place, &[]);
        let [kick, call] = [0, 1].map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        self.front.send(12, 0, &[0; 8], &[kick.as_fd()]);
        self.front.send(13, 0, &[0; 8], &[call.as_fd()]);
        (self.front.kicks, self.front.calls) = (vec![kick], vec![call]);
        // With a reply, which shows that all of it was accepted.
        assert_eq!(self.front.call(18, 8, &number(1), &[]), [0; 8]);
    }

    /// Stops the ring; returns where to continue, once the back-end has replied.
    pub fn stop_ring(&mut self) -> u16 {
        let reply = self.front.call(11, 0, &[0; 8], &[]);
        u16::from_ne_bytes([reply[4], reply[5]])
    }

    /// Submits a request, if there is space for it and no other request is at its block.
    pub fn offer(&mut self, kind: Kind, block: u64) {
        self.prepare(kind, block);
        self.kick();
    }

    /// Notifies the disk of offered requests.
    pub fn kick(&self) {
        rustix::io::write(&self.front.kicks[0], &1u64.to_ne_bytes()).unwrap();
    }

    /// Offers a request without notifying the disk.
    pub fn prepare(&mut self, kind: Kind, block: u64) {
        if self.asked.values().any(|asked| asked.kind != Kind::Flush && asked.block == block) {
            return;
        }
        let Some(head) = self.free.pop() else { return };
        let version = self.versions.entry(block).or_default();
        *version += u64::from(kind == Kind::Write);
        let version = *version;
        let (header, page) = places(head);
        self.front.put(header + 0x80, &[POISON]);
        let (code, data) = match kind {
            Kind::Write => (1, Some((page, BLOCK as u32, 0))),
            Kind::Read => (0, Some((page, BLOCK as u32, WRITE))),
            Kind::Flush => (4, None),
        };
        if kind == Kind::Write {
            self.front.put(page, &content(block, version));
        }
        self.front.header(header, code, if kind == Kind::Flush { 0 } else { block * BLOCK as u64 / 512 });
        let parts: Vec<_> =
            [Some((header, 16, 0)), data, Some((header + 0x80, 1, WRITE))].into_iter().flatten().collect();
        self.front.chain(0, head, &parts);
        self.asked.insert(head, Asked { kind, block, version });
        self.front.offer(0, head);
    }

    /// Returns the number of requests in flight.
    pub fn unanswered(&self) -> usize {
        self.asked.len()
    }

    /// Waits for a notification, up to this time, and collects the completions.
    pub fn interrupt(&mut self, at_most: Duration) {
        let time =
            Timespec { tv_sec: i64::try_from(at_most.as_secs()).unwrap(), tv_nsec: i64::from(at_most.subsec_nanos()) };
        if poll(&mut [PollFd::new(&self.front.calls[0], PollFlags::IN)], Some(&time)).unwrap() == 0 {
            return;
        }
        FrontEnd::signalled(&self.front.calls[0]);
        let used = self.front.used(0, self.last_used);
        let (count, open) = (used.len(), self.asked.len());
        assert!(count <= open, "{count} answers to {open} requests, from {} of the used ring on", self.last_used);
        for (head, written) in used {
            self.last_used = self.last_used.wrapping_add(1);
            self.take_answer(head as u16, written);
        }
    }

    /// Offers something new, and collects completions.
    pub fn work(&mut self, random: &mut Rng) {
        for _ in 0..random.u8(..64) {
            let kind = match random.u8(..10) {
                0 => Kind::Flush,
                1..4 => Kind::Read,
                _ => Kind::Write,
            };
            self.offer(kind, random.u64(..BLOCKS));
        }
        self.interrupt(Duration::from_micros(random.u64(..500)));
    }

    /// Waits until all requests have completed.
    pub fn drain(&mut self) {
        let begun = Instant::now();
        while !self.asked.is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{} requests are never answered", self.asked.len());
            self.interrupt(Duration::from_secs(1));
        }
    }

    fn take_answer(&mut self, head: u16, written: u32) {
        let asked = self.asked.remove(&head);
        let Asked { kind, block, version } =
            asked.unwrap_or_else(|| panic!("answered twice: descriptor {head} is free"));
        let (header, page) = places(head);
        let failed = kind != Kind::Flush && self.may_fail == Some(block) && self.front.get(header + 0x80, 1) == [1];
        self.failed += u64::from(failed);
        assert!(failed || self.front.get(header + 0x80, 1) == [0], "{kind:?} of block {block}");
        if kind == Kind::Read && !failed {
            assert_eq!(written, BLOCK as u32 + 1);
            assert!(
                self.front.get(page, BLOCK) == content(block, version),
                "block {block} is not of version {version}"
            );
        }
        // A request that is still being executed reads and leaves garbage.
        self.front.put(page, &[POISON; BLOCK]);
        self.front.put(header, &[POISON; 16]);
        self.free.push(head);
        self.answered += 1;
    }

    /// Compares an image with what was written; nothing is in flight.
    pub fn check(&self, image: &[u8]) {
        self.check_but(image, None);
    }

    /// Compares the same, except for a block that has another version than the one written last.
    pub fn check_but(&self, image: &[u8], other: Option<(u64, u64)>) {
        for (&block, &version) in &self.versions {
            let version = other.filter(|other| other.0 == block).map_or(version, |other| other.1);
            let at = block as usize * BLOCK;
            assert!(image[at..at + BLOCK] == content(block, version), "block {block} is not of version {version}");
        }
    }
}

fn places(head: u16) -> (u64, u64) {
    let index = u64::from(head / CHAIN);
    (HEADERS + 0x100 * index, PAGES + BLOCK as u64 * index)
}
