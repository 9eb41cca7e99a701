//! The other side of the model: a driver like that of Linux, and the reconnecting side of QEMU.
//!
//! It knows only the back-end's socket and the shared memory. It reuses the pages and descriptors of a request as soon
//! as it is answered, reads a used ring only when its queue is signalled, and checks each answer against the possible
//! contents of a disk on which some requests have failed ([`SectorModel`]).

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};

use super::migration::Migration;
use super::vhost_mock::{EVENT_IDX, FLUSH, FrontEnd, LOG_ALL, PROTOCOL, REGION, VERSION_1, WRITE, region_for};
use super::{Check, QUEUES, SECTORS};

/// Slots in a ring.
const SIZE: u16 = 16;
/// The maximum number of descriptors of a chain.
const CHAIN: u16 = 3;
/// The contents of unused memory.
const POISON: u8 = 0xee;
/// Headers and statuses are in the region of the rings, data in the other one.
const HEADERS: u64 = 0x40000;
const PAGES: u64 = REGION + 0x1000;
/// The distance between the memory of the first and of the second queue.
const APART: u64 = 0x10000;
/// The ranges of memory in use: rings, headers and data.
const USED: [(u64, u64); 3] = [(0, 0x12000), (HEADERS, 2 * APART), (PAGES, 2 * APART)];
const F_LOG_SHMFD: u64 = 1 << 1;
const F_INFLIGHT_SHMFD: u64 = 1 << 12;
const S_OK: u8 = 0;
const S_IOERR: u8 = 1;

/// The type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    Write,
    Read,
    Flush,
    /// Two sectors at once: two requests of one chain.
    Zeroes,
}

/// An unanswered request.
#[derive(Clone, Debug)]
pub struct PendingRequest {
    /// Its number, in the order of submission.
    pub number: u64,
    pub kind: RequestKind,
    /// The sectors, each with its new version, or for a read its current one.
    pub sectors: Vec<(u64, u64)>,
    /// The storage has failed one of its requests at least once: it may be answered with an error.
    pub failed: bool,
    page: u64,
    /// The versions that must be durable when a flush is answered.
    covers: [u64; SECTORS],
}

/// The possible contents of a sector.
#[derive(Clone, Debug, Default)]
pub struct SectorModel {
    /// The version last written successfully, or returned by a read since.
    pub known: u64,
    /// Versions of failed writes, each of which may have happened.
    pub perhaps: Vec<u64>,
}

impl SectorModel {
    /// Returns true if the sector may contain these bytes; its contents are known from now on.
    fn settle(&mut self, sector: u64, bytes: &[u8]) -> bool {
        let found = self.possible(sector, bytes);
        if let Some(version) = found {
            *self = SectorModel { known: version, perhaps: Vec::new() };
        }
        found.is_some()
    }

    /// The version of these bytes, if the sector may contain it. The latest first: no later version has the same bytes.
    pub fn possible(&self, sector: u64, bytes: &[u8]) -> Option<u64> {
        self.perhaps.iter().rev().chain([&self.known]).copied().find(|&version| content(sector, version) == bytes)
    }
}

/// The driver's state of one ring.
struct RingDriver {
    free_heads: Vec<u16>,
    free_pages: Vec<u64>,
    last_used: u16,
}

/// The guest and its QEMU.
pub struct Guest {
    pub front: FrontEnd,
    /// The queue, kick and call of every ring that was started on this connection.
    wires: Vec<(usize, OwnedFd, OwnedFd)>,
    /// QEMU keeps a record of requests in flight.
    recorded: bool,
    event_idx: bool,
    queues: usize,
    region: Option<(Vec<u8>, OwnedFd)>,
    /// The migration in progress.
    migration: Option<Migration>,
    drivers: Vec<RingDriver>,
    /// By queue and head.
    pub pending: BTreeMap<(usize, u16), PendingRequest>,
    offered: u64,
    pub answered: u64,
    /// The number of error answers.
    pub errors: u64,
    /// The last version submitted for each sector.
    written: [u64; SECTORS],
    /// The last version written successfully to each sector.
    acknowledged: [u64; SECTORS],
    pub sector_models: [SectorModel; SECTORS],
}

/// The contents of a version of a sector: zeroes for odd versions, a pattern for even ones.
pub fn content(sector: u64, version: u64) -> Vec<u8> {
    match version {
        0 => vec![0xd5; 512],
        version if version % 2 == 1 => vec![0; 512],
        version => (sector << 32 | version).to_le_bytes().repeat(64),
    }
}

impl Guest {
    /// A guest that has not found its disk yet.
    pub fn new(path: &Path, recorded: bool, event_idx: bool, queues: usize) -> Guest {
        let mut front = FrontEnd::connect(path);
        front.size = SIZE;
        let driver = |queue: u64| RingDriver {
            // The descriptor freed last is used first.
            free_heads: (0..SIZE / CHAIN).map(|index| index * CHAIN).collect(),
            free_pages: (0..8).map(|index| PAGES + APART * queue + 0x1000 * index).collect(),
            last_used: 0,
        };
        Guest {
            front,
            wires: Vec::new(),
            recorded,
            event_idx,
            queues,
            region: None,
            migration: None,
            drivers: (0..QUEUES as u64).map(driver).collect(),
            pending: BTreeMap::new(),
            offered: 0,
            answered: 0,
            errors: 0,
            written: [0; SECTORS],
            acknowledged: [0; SECTORS],
            sector_models: Default::default(),
        }
    }

    /// Submits a request in one of the queues, if there is a free descriptor for it.
    pub fn offer(&mut self, queue: usize, kind: RequestKind) {
        let queue = queue % self.queues;
        let count = match kind {
            RequestKind::Write | RequestKind::Read => 1,
            RequestKind::Flush => 0,
            RequestKind::Zeroes => 2,
        };
        let sectors: Vec<u64> = (0..SECTORS as u64).filter(|&sector| !self.is_used(sector)).take(count).collect();
        let driver = &mut self.drivers[queue];
        if sectors.len() < count || driver.free_heads.is_empty() {
            return;
        }
        let (head, page) = (driver.free_heads.pop().unwrap(), driver.free_pages.pop().unwrap());
        let sectors: Vec<(u64, u64)> = sectors.iter().map(|&sector| (sector, self.version_for(kind, sector))).collect();
        self.lay_out(queue, head, page, kind, &sectors);
        let number = self.offered;
        self.offered += 1;
        let covers = self.acknowledged;
        self.pending.insert((queue, head), PendingRequest { number, kind, sectors, failed: false, page, covers });
        self.front.offer(queue as u16, head);
    }

    fn is_used(&self, sector: u64) -> bool {
        self.pending.values().any(|request| request.sectors.iter().any(|(other, _)| *other == sector))
    }

    /// The version that a request gives to a sector.
    fn version_for(&mut self, kind: RequestKind, sector: u64) -> u64 {
        let written = &mut self.written[sector as usize];
        match kind {
            RequestKind::Write => *written = (*written / 2 + 1) * 2,
            RequestKind::Zeroes => *written = (*written / 2 + 1) * 2 + 1,
            RequestKind::Read | RequestKind::Flush => {}
        }
        *written
    }

    /// Writes a chain.
    fn lay_out(&self, queue: usize, head: u16, page: u64, kind: RequestKind, sectors: &[(u64, u64)]) {
        let at = header_of(queue, head);
        self.front.put(at + 0x80, &[POISON]);
        let first = sectors.first().copied().unwrap_or_default();
        let (code, data) = match kind {
            RequestKind::Write => (1, Some((page, 512, 0))),
            RequestKind::Read => (0, Some((page, 512, WRITE))),
            RequestKind::Flush => (4, None),
            RequestKind::Zeroes => (13, Some((page, 16 * sectors.len() as u32, 0))),
        };
        match kind {
            RequestKind::Write => self.front.put(page, &content(first.0, first.1)),
            RequestKind::Zeroes => {
                let range = |&(sector, _): &(u64, u64)| [&sector.to_le_bytes()[..], &[1, 0, 0, 0], &[0; 4]].concat();
                self.front.put(page, &sectors.iter().flat_map(range).collect::<Vec<u8>>());
            }
            RequestKind::Read | RequestKind::Flush => {}
        }
        self.front.header(at, code, if matches!(kind, RequestKind::Write | RequestKind::Read) { first.0 } else { 0 });
        let parts: Vec<_> = [Some((at, 16, 0)), data, Some((at + 0x80, 1, WRITE))].into_iter().flatten().collect();
        self.front.chain(queue as u16, head, &parts);
    }

    /// Returns true if a request is not answered yet, not even in the used ring.
    pub fn awaits(&self, number: u64) -> bool {
        let found = self.pending.iter().find(|(_, request)| request.number == number);
        let Some((&(queue, head), _)) = found else { return false };
        let used = self.front.used(queue as u16, self.drivers[queue].last_used);
        !used.iter().any(|&(used, _)| used == u32::from(head))
    }

    /// Takes answers of the signalled queues.
    pub fn interrupt(&mut self, durable: &[u64; SECTORS]) -> Check {
        for queue in 0..self.queues {
            let mut wires = self.wires.iter().filter(|(of, ..)| *of == queue);
            if wires.any(|(_, _, call)| FrontEnd::signalled(call) > 0) {
                self.take_answers(queue, durable)?;
            }
        }
        Ok(())
    }

    fn take_answers(&mut self, queue: usize, durable: &[u64; SECTORS]) -> Check {
        loop {
            let used = self.front.used(queue as u16, self.drivers[queue].last_used);
            for &(head, written) in &used {
                self.drivers[queue].last_used = self.drivers[queue].last_used.wrapping_add(1);
                self.take_answer(queue, head, written, durable)?;
            }
            if self.event_idx {
                let at = self.front.avail_at(queue as u16) + 4 + 2 * u64::from(SIZE);
                self.front.put(at, &self.drivers[queue].last_used.to_le_bytes());
            }
            if used.is_empty() {
                return Ok(());
            }
        }
    }

    fn take_answer(&mut self, queue: usize, head: u32, written: u32, durable: &[u64; SECTORS]) -> Check {
        let found = u16::try_from(head).ok().and_then(|head| Some((head, self.pending.remove(&(queue, head))?)));
        let (head, request) = found.ok_or(format!("answered twice: descriptor {head} of queue {queue} is free"))?;
        let header = header_of(queue, head);
        if let Some(migration) = &self.migration {
            migration.check(&self.front, &[(request.page, 512), (header + 0x80, 1)], |_| false)?;
        }
        match self.front.get(header + 0x80, 1)[0] {
            S_OK => self.check_success(&request, written, durable)?,
            S_IOERR if request.failed && written == 1 => {
                self.errors += 1;
                if matches!(request.kind, RequestKind::Write | RequestKind::Zeroes) {
                    let sector_models = &mut self.sector_models;
                    request.sectors.iter().for_each(|&(sector, new)| sector_models[sector as usize].perhaps.push(new));
                }
            }
            status => return Err(format!("request {} was answered with {status}, {written} bytes", request.number)),
        }
        // Its memory is reused at once.
        self.front.put(request.page, &[POISON; 512]);
        self.front.put(header, &[POISON; 16]);
        self.front.put(header + 0x80, &[POISON]);
        self.drivers[queue].free_heads.push(head);
        self.drivers[queue].free_pages.push(request.page);
        self.answered += 1;
        Ok(())
    }

    /// Checks a successful answer.
    fn check_success(&mut self, request: &PendingRequest, written: u32, durable: &[u64; SECTORS]) -> Check {
        match request.kind {
            RequestKind::Write | RequestKind::Zeroes => {
                for &(sector, version) in &request.sectors {
                    self.acknowledged[sector as usize] = version;
                    self.sector_models[sector as usize] = SectorModel { known: version, perhaps: Vec::new() };
                }
            }
            RequestKind::Read => {
                let sector = request.sectors[0].0;
                let bytes = self.front.get(request.page, 512);
                if written != 513 || !self.sector_models[sector as usize].settle(sector, &bytes) {
                    return Err(format!("read {} of sector {sector} returned impossible contents", request.number));
                }
            }
            RequestKind::Flush if durable.iter().zip(&request.covers).any(|(durable, covered)| durable < covered) => {
                return Err(format!("flush {} was answered before the writes it covers were durable", request.number));
            }
            RequestKind::Flush => {}
        }
        Ok(())
    }

    /// The used index of a queue, which QEMU sends as the base after the death of its back-end.
    pub fn used_index(&self, queue: usize) -> u16 {
        self.front.get_u16(self.front.used_at(queue as u16) + 2)
    }

    /// Reconnects, with the same memory.
    pub fn reconnect(&mut self, path: &Path) {
        self.front.reconnect(path);
        self.wires.clear();
    }

    /// Starts a connection: the messages before the record of requests in flight.
    pub fn negotiate(&mut self) {
        let inflight = if self.recorded { F_INFLIGHT_SHMFD } else { 0 };
        self.front.send(3, 0, &[], &[]);
        self.front.send(16, 0, &((1u64 << 15) | F_LOG_SHMFD | inflight).to_ne_bytes(), &[]);
        self.set_features();
        if self.recorded && self.region.is_none() {
            self.front.send(31, 0, &region_for(0, 0, self.queues as u16, SIZE), &[]);
        }
    }

    /// Requests a region, if a record is used.
    pub fn take_region(&mut self) {
        if self.recorded && self.region.is_none() {
            self.region = self.front.reply_with_file(31);
        }
    }

    /// Sends the memory and starts the rings, each at its base.
    pub fn start(&mut self, bases: &[u16]) {
        for index in 0..2 {
            self.add_memory(index);
        }
        self.send_region();
        (0..self.queues).for_each(|queue| self.start_ring(queue, bases[queue]));
        // QEMU sends the log after it has started the rings, and enables them afterwards.
        if let Some(migration) = &self.migration {
            migration.send_log(&self.front);
        }
        (0..self.queues).for_each(|queue| self.enable_ring(queue));
    }

    fn set_features(&self) {
        let events = if self.event_idx { EVENT_IDX } else { 0 };
        let log = if self.migration.is_some() { LOG_ALL } else { 0 };
        self.front.send(2, 0, &(VERSION_1 | FLUSH | PROTOCOL | events | log).to_ne_bytes(), &[]);
    }

    fn set_place(&self, queue: usize) {
        self.front.send(9, 0, &self.front.place(queue as u16, u32::from(self.migration.is_some())), &[]);
    }

    /// Begins a migration, with QEMU's order of messages; or replaces its log.
    pub fn begin_log(&mut self) {
        match &mut self.migration {
            Some(migration) => {
                migration.replace_log();
                migration.send_log(&self.front);
            }
            None => {
                self.migration.insert(Migration::new()).send_log(&self.front);
                self.set_features();
                (0..self.queues).for_each(|queue| self.set_place(queue));
            }
        }
    }

    /// Copies the guest's memory for the first time.
    pub fn begin_copy(&self) {
        let mut copy = self.front.copy.borrow_mut();
        if copy.is_none() {
            *copy = Some(self.front.get(0, 2 * REGION as usize));
        }
    }

    /// Ends the migration.
    pub fn end_log(&mut self) {
        if self.migration.take().is_some() {
            self.front.copy.replace(None);
            self.set_features();
            (0..self.queues).for_each(|queue| self.set_place(queue));
        }
    }

    /// Takes the reply to SET_LOG_BASE, which must exist unless the back-end is dead.
    pub fn take_log_reply(&mut self, dead: bool, why: impl FnOnce() -> String) -> Check {
        match self.migration.is_none() || self.front.reply(6).is_some() || dead {
            true => Ok(()),
            false => Err(format!("SET_LOG_BASE is not answered: {}", why())),
        }
    }

    /// Checks that all writes of the back-end are logged. The data and status of unanswered requests may be missing:
    /// such requests are performed again if the back-end was killed before it logged them.
    pub fn check_log(&self) -> Check {
        let Some(migration) = &self.migration else { return Ok(()) };
        let is_open = |addr: u64| {
            self.pending.iter().any(|(&(queue, head), request)| {
                addr == header_of(queue, head) + 0x80 || (request.page..request.page + 512).contains(&addr)
            })
        };
        migration.check(&self.front, &USED, is_open)
    }

    /// Sends the record of requests in flight, if there is one, as QEMU does before it starts the first ring.
    pub fn send_region(&self) {
        if let Some((payload, file)) = &self.region {
            self.front.send(32, 0, payload, &[file.as_fd()]);
        }
    }

    pub fn add_memory(&self, index: usize) {
        self.front.send(37, 0, &self.front.region(index as u64), &[self.front.files[index].as_fd()]);
    }

    pub fn remove_memory(&self, index: usize) {
        self.front.send(38, 0, &self.front.region(index as u64), &[]);
    }

    /// Replaces all of the memory at once.
    pub fn replace_memory(&self) {
        let regions = [0, 1].map(|index| self.front.region(index)[8..].to_vec()).concat();
        let files = [self.front.files[0].as_fd(), self.front.files[1].as_fd()];
        self.front.send(5, 0, &[[2u32, 0].map(u32::to_ne_bytes).concat(), regions].concat(), &files);
    }

    /// Requests a ring to stop.
    pub fn stop_ring(&self, queue: usize) {
        self.front.send(11, 0, &[queue as u32, 0].map(u32::to_ne_bytes).concat(), &[]);
    }

    /// Starts a ring at index `base`.
    pub fn start_ring(&mut self, queue: usize, base: u16) {
        let number = |value: u16| [queue as u32, u32::from(value)].map(u32::to_ne_bytes).concat();
        self.front.send(8, 0, &number(SIZE), &[]);
        self.front.send(10, 0, &number(base), &[]);
        self.set_place(queue);
        let [kick, call] = [0, 1].map(|_| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap());
        let index = (queue as u64).to_ne_bytes();
        self.front.send(12, 0, &index, &[kick.as_fd()]);
        self.front.send(13, 0, &index, &[call.as_fd()]);
        self.wires.push((queue, kick, call));
    }

    pub fn enable_ring(&self, queue: usize) {
        self.front.send(18, 0, &[queue as u32, 1].map(u32::to_ne_bytes).concat(), &[]);
    }
}

/// The address of a chain's header; its status is 0x80 bytes after it.
fn header_of(queue: usize, head: u16) -> u64 {
    HEADERS + APART * queue as u64 + 0x100 * u64::from(head)
}
