//! The other side of the model: a driver like that of Linux, and the reconnecting side of QEMU.
//!
//! Knows nothing about the back-end but its socket and what lies in shared memory. It uses the pages and descriptors of a
//! request again the moment it is answered, looks at the used ring only when it is signalled, and checks each answer.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use disk::Operation;
use rustix::event::{EventfdFlags, eventfd};

use super::vhost_mock::{EVENT_IDX, FLUSH, FrontEnd, PROTOCOL, REGION, VERSION_1, WRITE, region_for};
use super::{Check, SECTORS};

/// Places in the ring, and descriptors of a chain.
const SIZE: u16 = 16;
const CHAIN: u16 = 3;
/// What lies in memory that belongs to nobody.
const POISON: u8 = 0xee;
/// Headers and statuses lie beside the ring, data in the other region.
const HEADERS: u64 = 0x40000;
const PAGES: u64 = REGION + 0x1000;
const F_INFLIGHT_SHMFD: u64 = 1 << 12;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Write,
    Read,
    Flush,
}

/// A request that is not answered.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Its number, in the order in which requests were offered.
    pub number: u64,
    pub kind: Kind,
    pub sector: u64,
    pub version: u64,
    page: u64,
    /// What must be durable when a flush is answered.
    covers: [u64; SECTORS],
}

/// The guest and its QEMU.
pub struct Guest {
    pub front: FrontEnd,
    /// QEMU keeps a record of what is in flight.
    recorded: bool,
    event_idx: bool,
    region: Option<(Vec<u8>, OwnedFd)>,
    free_heads: Vec<u16>,
    free_pages: Vec<u64>,
    pub asked: BTreeMap<u16, Asked>,
    last_used: u16,
    offered: u64,
    pub answered: u64,
    /// The last version written to each sector, and the last that was answered.
    written: [u64; SECTORS],
    pub acknowledged: [u64; SECTORS],
}

/// The bytes that a version of a sector has.
pub fn content(sector: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; 512] } else { (sector << 32 | version).to_le_bytes().repeat(64) }
}

impl Guest {
    /// A guest that has not found its disk yet.
    pub fn new(path: &Path, recorded: bool, event_idx: bool) -> Guest {
        let mut front = FrontEnd::connect(path);
        front.size = SIZE;
        // As a list of free descriptors: the last freed is the first used.
        let free_heads: Vec<u16> = (0..SIZE / CHAIN).map(|index| index * CHAIN).collect();
        let free_pages = (0..8).map(|index| PAGES + 0x1000 * index).collect();
        Guest {
            front,
            recorded,
            event_idx,
            region: None,
            free_heads,
            free_pages,
            asked: BTreeMap::new(),
            last_used: 0,
            offered: 0,
            answered: 0,
            written: [0; SECTORS],
            acknowledged: [0; SECTORS],
        }
    }

    /// Offers a request, if there is a free descriptor for it.
    pub fn offer(&mut self, kind: Kind) {
        let is_used =
            |sector: u64| self.asked.values().any(|asked| asked.kind != Kind::Flush && asked.sector == sector);
        let Some(sector) = (0..SECTORS as u64).find(|&sector| !is_used(sector)) else { return };
        let Some(head) = self.free_heads.pop() else { return };
        let page = self.free_pages.pop().unwrap();
        if kind == Kind::Write {
            self.written[sector as usize] += 1;
        }
        let version = self.written[sector as usize];
        let (at, status) = (HEADERS + 0x100 * u64::from(head), HEADERS + 0x100 * u64::from(head) + 0x80);
        self.front.put(status, &[POISON]);
        let (code, data) = match kind {
            Kind::Write => (1, Some((page, 512, 0))),
            Kind::Read => (0, Some((page, 512, WRITE))),
            Kind::Flush => (4, None),
        };
        if kind == Kind::Write {
            self.front.put(page, &content(sector, version));
        }
        self.front.header(at, code, if kind == Kind::Flush { 0 } else { sector });
        let parts: Vec<_> = [Some((at, 16, 0)), data, Some((status, 1, WRITE))].into_iter().flatten().collect();
        self.front.chain(0, head, &parts);
        let number = self.offered;
        self.offered += 1;
        let covers = self.acknowledged;
        self.asked.insert(head, Asked { number, kind, sector, version, page, covers });
        self.front.offer(0, head);
    }

    /// The unanswered request that a back-end seems to mean.
    pub fn find(&self, operation: Operation, sector: u64) -> Option<&Asked> {
        let kind = match operation {
            Operation::Read => Kind::Read,
            Operation::Write { .. } => Kind::Write,
            _ => Kind::Flush,
        };
        // Flushes look the same: the oldest that is not answered is as good as any.
        let same = |asked: &&Asked| match kind {
            Kind::Flush => asked.kind == kind && self.awaits(asked.number),
            Kind::Read | Kind::Write => asked.kind == kind && asked.sector == sector,
        };
        self.asked.values().filter(same).min_by_key(|asked| asked.number)
    }

    /// Whether a request is not answered yet, also not in the used ring.
    pub fn awaits(&self, number: u64) -> bool {
        let Some((&head, _)) = self.asked.iter().find(|(_, asked)| asked.number == number) else { return false };
        !self.front.used(0, self.last_used).iter().any(|&(used, _)| used == u32::from(head))
    }

    /// Takes answers, if it was signalled.
    pub fn interrupt(&mut self, durable: &[u64; SECTORS]) -> Check {
        if !self.front.calls.iter().any(|call| FrontEnd::signalled(call) > 0) {
            return Ok(());
        }
        loop {
            let used = self.front.used(0, self.last_used);
            for &(head, written) in &used {
                self.last_used = self.last_used.wrapping_add(1);
                self.take_answer(head, written, durable)?;
            }
            if self.event_idx {
                let at = self.front.avail_at(0) + 4 + 2 * u64::from(SIZE);
                self.front.put(at, &self.last_used.to_le_bytes());
            }
            if used.is_empty() {
                return Ok(());
            }
        }
    }

    fn take_answer(&mut self, head: u32, written: u32, durable: &[u64; SECTORS]) -> Check {
        let found = u16::try_from(head).ok().and_then(|head| Some((head, self.asked.remove(&head)?)));
        let (head, asked) = found.ok_or(format!("answered twice: descriptor {head} is free"))?;
        let status = HEADERS + 0x100 * u64::from(head) + 0x80;
        if self.front.get(status, 1) != [0] {
            return Err(format!("request {} was answered with {:?}", asked.number, self.front.get(status, 1)));
        }
        let sector = asked.sector as usize;
        match asked.kind {
            Kind::Write => self.acknowledged[sector] = asked.version,
            Kind::Read if written != 513 || self.front.get(asked.page, 512) != content(asked.sector, asked.version) => {
                return Err(format!("read {} of sector {sector} has other bytes than were written", asked.number));
            }
            Kind::Read => {}
            Kind::Flush if durable.iter().zip(&asked.covers).any(|(durable, covered)| durable < covered) => {
                return Err(format!("flush {} was answered before what it covers was durable", asked.number));
            }
            Kind::Flush => {}
        }
        // All of it is used for something else at once.
        self.front.put(asked.page, &[POISON; 512]);
        self.front.put(status - 0x80, &[POISON; 16]);
        self.front.put(status, &[POISON]);
        self.free_heads.push(head);
        self.free_pages.push(asked.page);
        self.answered += 1;
        Ok(())
    }

    /// The used index, which QEMU takes for the base when its back-end has died.
    pub fn used_index(&self) -> u16 {
        self.front.get_u16(self.front.used_at(0) + 2)
    }

    /// Begins a connection: what is said before the record of what is in flight.
    pub fn negotiate(&mut self) {
        let events = if self.event_idx { EVENT_IDX } else { 0 };
        let features = VERSION_1 | FLUSH | PROTOCOL | events;
        self.front.send(3, 0, &[], &[]);
        self.front.send(16, 0, &((1u64 << 15) | if self.recorded { F_INFLIGHT_SHMFD } else { 0 }).to_ne_bytes(), &[]);
        self.front.send(2, 0, &features.to_ne_bytes(), &[]);
        if self.recorded && self.region.is_none() {
            self.front.send(31, 0, &region_for(0, 0, 1, SIZE), &[]);
        }
    }

    /// Takes the region that it has asked for, if it has.
    pub fn take_region(&mut self) {
        if self.recorded && self.region.is_none() {
            self.region = self.front.reply_with_file(31);
        }
    }

    /// Hands over memory and starts the ring at `base`.
    pub fn start(&mut self, base: u16) {
        for index in 0..2 {
            self.add_memory(index);
        }
        self.start_ring(base);
    }

    pub fn add_memory(&self, index: usize) {
        self.front.send(37, 0, &self.front.region(index as u64), &[self.front.files[index].as_fd()]);
    }

    pub fn remove_memory(&self, index: usize) {
        self.front.send(38, 0, &self.front.region(index as u64), &[]);
    }

    /// All of the memory at once.
    pub fn replace_memory(&self) {
        let regions = [0, 1].map(|index| self.front.region(index)[8..].to_vec()).concat();
        let files = [self.front.files[0].as_fd(), self.front.files[1].as_fd()];
        self.front.send(5, 0, &[[2u32, 0].map(u32::to_ne_bytes).concat(), regions].concat(), &files);
    }

    /// Starts the ring, with the record of what is in flight if there is one, as QEMU does each time.
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
        self.front.send(18, 0, &number(1), &[]);
        self.front.kicks.push(kick);
        self.front.calls.push(call);
    }
}
