//! A model of Linux's guest driver, made nastier: it reuses pages, references, numbers and slots as soon as they are
//! answered.
//!
//! It knows nothing about the back end beyond the protocol. Invariants checked: each request is answered once, and
//! successfully; reads return what was written; no page is accessed that no request names; nothing stays mapped without
//! its consent; the back end notifies it of responses, and writes Closing only after the front end has.

use std::collections::BTreeMap;

use fastrand::Rng;
use xen::GrantRef;
use xen::fake::{Access, Page};

use super::blkif_mock::{BACKEND, Entry, FRONTEND, Front, READ, Rings, WRITE, get, indirect, set, transfer};

/// Regions of the disk, of two pages each, so that no two requests overlap.
const REGIONS: usize = 12;
const PAGES: usize = 2;
const DEPTH: usize = 7;

/// Size of the disk.
pub const DISK_LEN: u64 = (REGIONS * PAGES * 4096) as u64;

/// A page and its grant.
#[derive(Clone, Copy)]
struct OwnPage {
    page: Page,
    grant: GrantRef,
    /// The byte that it is filled with.
    byte: u8,
}

struct Submitted {
    operation: u8,
    region: usize,
    data: [OwnPage; PAGES],
    list: Option<OwnPage>,
}

/// What the driver does after a number of requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It waits for the backend's features.
    Begins,
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
    /// The ring configurations of this kernel and its successors, if they are offered.
    kernels: Vec<Rings>,
    phase: Phase,
    persistent: bool,
    indirect: bool,
    submitted: BTreeMap<(usize, u64), Submitted>,
    left: usize,
    /// The byte that each region is filled with.
    disk: [u8; REGIONS],
    free: Vec<OwnPage>,
    next_byte: u8,
    /// A protocol violation by the back end.
    pub wrong: Option<String>,
}

/// Requests per kernel.
pub const REQUESTS: usize = 24;

impl Driver {
    pub fn new(front: Front, kernels: &[Rings], seed: u64) -> Driver {
        let (phase, left, disk) = (Phase::Begins, REQUESTS, [0; REGIONS]);
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
        self.phase == Phase::Ended
    }

    /// Compares the whole disk with the expected bytes, region by region.
    pub fn assert_on_disk(&mut self, bytes: &[u8]) {
        for (region, &byte) in self.disk.iter().enumerate() {
            let at = region * PAGES * 4096;
            if bytes[at..at + PAGES * 4096].iter().any(|&there| there != byte) {
                self.wrong = Some(format!("region {region} of the image differs from what was written"));
            }
        }
    }

    fn wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    fn offered(&self, key: &str) -> u32 {
        get(&self.front.host, &format!("{BACKEND}/{key}")).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// Checks the back end's state. Returns whether it changed.
    pub fn look(&mut self) -> bool {
        let says = self.front.backend_state();
        match (self.phase, says.as_str()) {
            (Phase::Begins, "2") => self.initialise(),
            (Phase::Initialised, "4") => self.connect(),
            (Phase::Initialised | Phase::Connected, "5" | "6") => {
                self.wrong(format!("it writes state {says} while the front end uses it"))
            }
            (Phase::Connected, _) if self.left == 0 => {
                // Some requests are in flight while it closes.
                self.front.write_state(5);
                self.phase = Phase::Closing;
            }
            (Phase::Closing, "5" | "6") => {
                self.front.write_state(6);
                self.phase = Phase::Closed;
            }
            (Phase::Closed, "6") => self.leave(),
            _ => return false,
        }
        true
    }

    fn initialise(&mut self) {
        let wish = self.kernels[0];
        let queues = wish.queues.min(self.offered("multi-queue-max-queues").max(1));
        let order = wish.order.min(self.offered("max-ring-page-order"));
        // A driver without persistent grants does not write that key.
        let before = get(&self.front.host, &format!("{FRONTEND}/feature-persistent"));
        self.front.initialise(Rings { queues, order, ..wish });
        if !wish.persistent {
            let path = format!("{FRONTEND}/feature-persistent");
            let host = &self.front.host;
            before.map_or_else(|| super::blkif_mock::remove(host, &path), |before| set(host, &path, &before));
        }
        self.phase = Phase::Initialised;
    }

    fn connect(&mut self) {
        self.persistent = self.kernels[0].persistent && self.offered("feature-persistent") == 1;
        self.indirect = self.offered("feature-max-indirect-segments") >= PAGES as u32;
        self.front.write_state(4);
        self.phase = Phase::Connected;
    }

    /// The back end has finished with this kernel, so it must have released its pages.
    fn leave(&mut self) {
        if !self.submitted.is_empty() {
            self.wrong("it has closed without answering all requests");
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
            self.phase = Phase::Ended;
            return;
        }
        (self.phase, self.left) = (Phase::Begins, REQUESTS);
        self.front.write_state(1);
    }

    /// Takes responses and submits more requests, at any point of the back end's work.
    pub fn act(&mut self) {
        if !matches!(self.phase, Phase::Connected | Phase::Closing | Phase::Closed) {
            return;
        }
        for queue in 0..self.front.rings.len() {
            let port = self.front.rings[queue].port;
            if self.front.guest.signalled(port) {
                for (id, operation, status) in self.front.responses(queue) {
                    self.answered((queue, id), operation, status);
                }
            }
        }
        while self.phase == Phase::Connected
            && self.left > 0
            && self.submitted.len() < DEPTH
            && self.random.usize(..3) > 0
        {
            self.submit();
        }
    }

    fn answered(&mut self, which: (usize, u64), operation: u8, status: i16) {
        let Some(Submitted { operation: asked, region, data, list }) = self.submitted.remove(&which) else {
            return self.wrong(format!("a response to {which:?}, which is unknown or already answered"));
        };
        if (asked, 0) != (operation, status) {
            self.wrong(format!(
                "{which:?}, operation {asked}, is answered with status {status} for operation {operation}"
            ));
        }
        match asked {
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

    /// Another user has the page from now on.
    fn set_free(&mut self, own: OwnPage) {
        let own = OwnPage { byte: self.byte(), ..own };
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

    /// A page for a request: one that was used just now; its reference may have belonged to another of these.
    fn own(&mut self) -> OwnPage {
        let Some(mut own) = self.free.pop() else {
            let page = self.front.guest.page().unwrap();
            return OwnPage { page, grant: self.front.guest.grant(page, Access::ReadWrite), byte: 0 };
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
        if self.submitted.values().any(|asked| asked.region == region) {
            return;
        }
        let queue = self.random.usize(..self.front.rings.len());
        let operation = if self.random.usize(..3) == 0 { READ } else { WRITE };
        let mut data = [self.own(), self.own()];
        let byte = self.byte();
        for own in &mut data {
            own.byte = byte;
            self.front.guest.write(own.page, 0, &[byte; 4096]).unwrap();
        }
        // The lowest free one, as Linux does.
        let id = (0..).find(|&id| !self.submitted.contains_key(&(queue, id))).unwrap();
        let sector = (region * PAGES * 8) as u64;
        let list = (self.indirect && self.random.usize(..4) == 0).then(|| self.own());
        let entry = match list {
            Some(list) => {
                let one = |own: &OwnPage| [&own.grant.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat();
                let descriptors: Vec<u8> = data.iter().flat_map(one).collect();
                self.front.guest.write(list.page, 0, &descriptors).unwrap();
                indirect(operation, id, sector, list.grant, PAGES as u16)
            }
            None => transfer(operation, id, sector, &data.map(|own| (own.grant, 0, 7))),
        };
        self.submitted.insert((queue, id), Submitted { operation, region, data, list });
        self.left -= 1;
        self.push(queue, &entry);
    }

    /// Announces a request, and notifies the back end if it asked for that.
    fn push(&mut self, queue: usize, entry: &Entry) {
        self.front.put(queue, entry);
        let ring = &self.front.rings[queue];
        ring.shared.store_u32(0, ring.submitted).unwrap();
        if ring.submitted.wrapping_sub(ring.shared.load_u32(4).unwrap()) < 1 {
            self.front.guest.signal(ring.port).unwrap();
        }
    }
}
