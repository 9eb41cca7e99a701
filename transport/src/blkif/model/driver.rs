//! A model of Linux's guest driver, in its worst case: it reuses the pages, references, ids and slots of a request as
//! soon as it is answered.
//!
//! It knows nothing about the back end beyond the protocol. Invariants checked: each request is answered once, and
//! successfully; reads return the data written; only pages of requests are accessed; nothing stays mapped without its
//! consent; the back end notifies it of responses, and writes Closing only after the front end has.

use std::collections::BTreeMap;

use fastrand::Rng;
use xen::GrantRef;
use xen::fake::{Access, Page};

use super::blkif_mock::{BACKEND, Entry, FRONTEND, Front, READ, Rings, WRITE, get, indirect, set, transfer};

/// The number of regions of the disk; requests in flight are for different regions.
const REGIONS: usize = 12;
/// The number of pages of a region.
const PAGES: usize = 2;
const DEPTH: usize = 7;

/// The size of the disk.
pub const DISK_LEN: u64 = (REGIONS * PAGES * 4096) as u64;

/// A page of the driver, and its grant.
#[derive(Clone, Copy)]
struct DriverPage {
    page: Page,
    grant: GrantRef,
    /// The byte that it is filled with.
    byte: u8,
}

struct SubmittedRequest {
    operation: u8,
    region: usize,
    data: [DriverPage; PAGES],
    list: Option<DriverPage>,
}

/// The phase of one kernel's driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DriverPhase {
    /// It waits for the backend's features.
    Starting,
    Initialised,
    Connected,
    Closing,
    Closed,
    /// There is no further kernel.
    Ended,
}

pub struct Driver {
    pub front: Front,
    pub random: Rng,
    /// The ring configurations that this kernel and its successors choose, as far as they are offered.
    kernels: Vec<Rings>,
    phase: DriverPhase,
    persistent: bool,
    indirect: bool,
    submitted: BTreeMap<(usize, u64), SubmittedRequest>,
    left: usize,
    /// The byte that each region is filled with.
    disk: [u8; REGIONS],
    free: Vec<DriverPage>,
    next_byte: u8,
    /// A protocol violation by the back end.
    pub wrong: Option<String>,
}

/// The number of requests per kernel.
pub const REQUESTS: usize = 24;

impl Driver {
    pub fn new(front: Front, kernels: &[Rings], seed: u64) -> Driver {
        let (phase, left, disk) = (DriverPhase::Starting, REQUESTS, [0; REGIONS]);
        let (persistent, indirect, submitted, free, next_byte) = (false, false, BTreeMap::new(), Vec::new(), 1);
        let (random, kernels) = (Rng::with_seed(seed), kernels.to_vec());
        Driver {
            front,
            random,
            kernels,
            phase,
            persistent,
            indirect,
            submitted,
            left,
            disk,
            free,
            next_byte,
            wrong: None,
        }
    }

    pub fn has_ended(&self) -> bool {
        self.phase == DriverPhase::Ended
    }

    /// Compares the image with the expected contents, region by region.
    pub fn check_image(&mut self, bytes: &[u8]) {
        for (region, &byte) in self.disk.iter().enumerate() {
            let at = region * PAGES * 4096;
            if bytes[at..at + PAGES * 4096].iter().any(|&found| found != byte) {
                self.wrong = Some(format!("region {region} of the image differs from the data written"));
            }
        }
    }

    fn wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    fn offered(&self, key: &str) -> u32 {
        get(&self.front.host, &format!("{BACKEND}/{key}")).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// Reacts to the back end's state. Returns true if it did.
    pub fn follow_backend(&mut self) -> bool {
        let state = self.front.backend_state();
        match (self.phase, state.as_str()) {
            (DriverPhase::Starting, "2") => self.initialise(),
            (DriverPhase::Initialised, "4") => self.connect(),
            (DriverPhase::Initialised | DriverPhase::Connected, "5" | "6") => {
                self.wrong(format!("the back end writes state {state} while the front end uses it"))
            }
            (DriverPhase::Connected, _) if self.left == 0 => {
                // Some requests are in flight while it closes.
                self.front.write_state(5);
                self.phase = DriverPhase::Closing;
            }
            (DriverPhase::Closing, "5" | "6") => {
                self.front.write_state(6);
                self.phase = DriverPhase::Closed;
            }
            (DriverPhase::Closed, "6") => self.start_next_kernel(),
            _ => return false,
        }
        true
    }

    fn initialise(&mut self) {
        let wanted = self.kernels[0];
        let queues = wanted.queues.min(self.offered("multi-queue-max-queues").max(1));
        let order = wanted.order.min(self.offered("max-ring-page-order"));
        // A driver without persistent grants does not write that key.
        let before = get(&self.front.host, &format!("{FRONTEND}/feature-persistent"));
        self.front.initialise(Rings { queues, order, ..wanted });
        if !wanted.persistent {
            let path = format!("{FRONTEND}/feature-persistent");
            let host = &self.front.host;
            before.map_or_else(|| super::blkif_mock::remove(host, &path), |before| set(host, &path, &before));
        }
        self.phase = DriverPhase::Initialised;
    }

    fn connect(&mut self) {
        self.persistent = self.kernels[0].persistent && self.offered("feature-persistent") == 1;
        self.indirect = self.offered("feature-max-indirect-segments") >= PAGES as u32;
        self.front.write_state(4);
        self.phase = DriverPhase::Connected;
    }

    /// Checks that the back end has released all pages of this kernel, and starts the next one.
    fn start_next_kernel(&mut self) {
        if !self.submitted.is_empty() {
            self.wrong("the back end has closed without answering all requests");
        }
        for ring in self.front.rings.drain(..) {
            for &page in &ring.pages {
                if !self.front.guest.revoke(page) {
                    self.wrong.get_or_insert("a ring is mapped after Closed".into());
                }
            }
            self.front.guest.close(ring.port);
        }
        for own in std::mem::take(&mut self.free) {
            if self.persistent && !self.front.guest.revoke(own.grant) {
                self.wrong("a page is mapped after Closed");
            }
        }
        self.kernels.remove(0);
        if self.kernels.is_empty() {
            self.phase = DriverPhase::Ended;
            return;
        }
        (self.phase, self.left) = (DriverPhase::Starting, REQUESTS);
        self.front.write_state(1);
    }

    /// Takes responses and submits more requests, at any point of the back end's work.
    pub fn act(&mut self) {
        if !matches!(self.phase, DriverPhase::Connected | DriverPhase::Closing | DriverPhase::Closed) {
            return;
        }
        for queue in 0..self.front.rings.len() {
            let port = self.front.rings[queue].port;
            if self.front.guest.signalled(port) {
                for (id, operation, status) in self.front.responses(queue) {
                    self.take_response((queue, id), operation, status);
                }
            }
        }
        while self.phase == DriverPhase::Connected
            && self.left > 0
            && self.submitted.len() < DEPTH
            && self.random.usize(..3) > 0
        {
            self.submit();
        }
    }

    fn take_response(&mut self, id: (usize, u64), operation: u8, status: i16) {
        let Some(SubmittedRequest { operation: requested, region, data, list }) = self.submitted.remove(&id) else {
            return self.wrong(format!("a response to {id:?}, which is unknown or already answered"));
        };
        if (requested, 0) != (operation, status) {
            self.wrong(format!(
                "{id:?}, operation {requested}, is answered with status {status} for operation {operation}"
            ));
        }
        match requested {
            READ => {
                let expected = self.disk[region];
                if data.iter().any(|own| self.byte_of(own.page) != Some(expected)) {
                    self.wrong(format!("a read of region {region} returned wrong or stale data"));
                }
            }
            _ => self.disk[region] = data[0].byte,
        }
        data.into_iter().chain(list).for_each(|own| self.set_free(own));
    }

    fn byte_of(&self, page: Page) -> Option<u8> {
        let bytes = self.front.guest.read(page, 0, 4096).unwrap();
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Frees a page, which gets other contents at once.
    fn set_free(&mut self, own: DriverPage) {
        let own = DriverPage { byte: self.byte(), ..own };
        if !self.persistent && !self.front.guest.revoke(own.grant) {
            self.wrong("a page is still mapped after its response without the guest's consent");
            return;
        }
        self.front.guest.write(own.page, 0, &[own.byte; 4096]).unwrap();
        self.free.push(own);
    }

    fn byte(&mut self) -> u8 {
        self.next_byte = self.next_byte.checked_add(1).unwrap_or(1);
        self.next_byte
    }

    /// A page for a request: the one freed last, with the reference of another free page if possible.
    fn take_page(&mut self) -> DriverPage {
        let Some(mut own) = self.free.pop() else {
            let page = self.front.guest.page().unwrap();
            return DriverPage { page, grant: self.front.guest.grant(page, Access::ReadWrite), byte: 0 };
        };
        if self.byte_of(own.page) != Some(own.byte) {
            self.wrong("a page was written to without a request");
        }
        if !self.persistent {
            if let Some(other) = self.free.last_mut() {
                std::mem::swap(&mut other.grant, &mut own.grant);
            }
            self.front.guest.grant_as(own.grant, own.page, Access::ReadWrite);
        }
        own
    }

    fn submit(&mut self) {
        let region = self.random.usize(..REGIONS);
        if self.submitted.values().any(|request| request.region == region) {
            return;
        }
        let queue = self.random.usize(..self.front.rings.len());
        let operation = if self.random.usize(..3) == 0 { READ } else { WRITE };
        let mut data = [self.take_page(), self.take_page()];
        let byte = self.byte();
        for own in &mut data {
            own.byte = byte;
            self.front.guest.write(own.page, 0, &[byte; 4096]).unwrap();
        }
        // The lowest free id, as in Linux.
        let id = (0..).find(|&id| !self.submitted.contains_key(&(queue, id))).unwrap();
        let sector = (region * PAGES * 8) as u64;
        let list = (self.indirect && self.random.usize(..4) == 0).then(|| self.take_page());
        let entry = match list {
            Some(list) => {
                let one = |own: &DriverPage| [&own.grant.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat();
                let descriptors: Vec<u8> = data.iter().flat_map(one).collect();
                self.front.guest.write(list.page, 0, &descriptors).unwrap();
                indirect(operation, id, sector, list.grant, PAGES as u16)
            }
            None => transfer(operation, id, sector, &data.map(|own| (own.grant, 0, 7))),
        };
        self.submitted.insert((queue, id), SubmittedRequest { operation, region, data, list });
        self.left -= 1;
        self.push(queue, &entry);
    }

    /// Announces a request, and notifies the back end if it has requested that.
    fn push(&mut self, queue: usize, entry: &Entry) {
        self.front.put(queue, entry);
        let ring = &self.front.rings[queue];
        ring.shared.store_u32(0, ring.submitted).unwrap();
        if ring.submitted.wrapping_sub(ring.shared.load_u32(4).unwrap()) < 1 {
            self.front.guest.signal(ring.port).unwrap();
        }
    }
}
