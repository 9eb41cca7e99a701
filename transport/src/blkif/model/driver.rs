//! A guest's driver as Linux's is, and worse: pages, references, numbers and slots are used again the moment they are
//! answered.
//!
//! Knows nothing of the back end but what it says. Invariants checked: each request is answered once, and well; what
//! was written is read; no page is touched that nobody has asked about; nothing stays mapped without its consent; the
//! back end tells of its answers, and says Closing to nobody who has not begun with that.

use std::collections::BTreeMap;

use xen::GrantRef;
use xen::fake::{Access, Page};

use super::blkif_mock::{BACKEND, Entry, FRONTEND, Front, READ, Rings, WRITE, get, indirect, set, transfer};

/// Places on the disk, of two pages each, so that none has two requests at once.
const PLACES: usize = 12;
const PAGES: usize = 2;
const DEPTH: usize = 7;

/// Bytes of the disk.
pub const DISK_LEN: u64 = (PLACES * PAGES * 4096) as u64;

/// A number that seems to be one of chance.
pub struct Dice(pub u64);

impl Dice {
    pub fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % end
    }
}

/// A page and its grant.
#[derive(Clone, Copy)]
struct Own {
    page: Page,
    grant: GrantRef,
    /// The byte that it is full of.
    byte: u8,
}

struct Asked {
    operation: u8,
    place: usize,
    data: [Own; PAGES],
    list: Option<Own>,
}

/// What it does after it has asked for so much.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// It waits to hear what there is.
    Begins,
    Initialised,
    Connected,
    Closing,
    Closed,
    /// There is no other kernel.
    Ended,
}

pub struct Driver {
    pub front: Front,
    pub dice: Dice,
    /// The rings of this kernel and of those that follow it, if they are offered.
    kernels: Vec<Rings>,
    phase: Phase,
    persistent: bool,
    indirect: bool,
    asked: BTreeMap<(usize, u64), Asked>,
    left: usize,
    /// What each place is full of.
    disk: [u8; PLACES],
    free: Vec<Own>,
    next_byte: u8,
    /// What the back end did that it must not.
    pub wrong: Option<String>,
}

/// Requests of each kernel.
pub const REQUESTS: usize = 24;

impl Driver {
    pub fn new(front: Front, kernels: &[Rings], seed: u64) -> Driver {
        let (phase, left, disk) = (Phase::Begins, REQUESTS, [0; PLACES]);
        let (persistent, indirect, asked, free, next_byte) = (false, false, BTreeMap::new(), Vec::new(), 1);
        let (dice, kernels) = (Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1), kernels.to_vec());
        Driver { front, dice, kernels, phase, persistent, indirect, asked, left, disk, free, next_byte, wrong: None }
    }

    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// What the whole disk is full of, place by place.
    pub fn assert_on_disk(&mut self, bytes: &[u8]) {
        for (place, &byte) in self.disk.iter().enumerate() {
            let at = place * PAGES * 4096;
            if bytes[at..at + PAGES * 4096].iter().any(|&there| there != byte) {
                self.wrong = Some(format!("place {place} of the image is not what was written"));
            }
        }
    }

    fn wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    fn offered(&self, key: &str) -> u32 {
        get(&self.front.host, &format!("{BACKEND}/{key}")).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// Looks at what the back end says. Whether that was news.
    pub fn look(&mut self) -> bool {
        let says = self.front.backend_says();
        match (self.phase, says.as_str()) {
            (Phase::Begins, "2") => self.initialise(),
            (Phase::Initialised, "4") => self.connect(),
            (Phase::Initialised | Phase::Connected, "5" | "6") => self.wrong(format!("it says {says} to who uses it")),
            (Phase::Connected, _) if self.left == 0 => {
                // Some requests are under way while it closes.
                self.front.say(5);
                self.phase = Phase::Closing;
            }
            (Phase::Closing, "5" | "6") => {
                self.front.say(6);
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
        // One that has never heard of persistent grants does not write of them.
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
        self.front.say(4);
        self.phase = Phase::Connected;
    }

    /// The back end is done with this kernel: so it must be with its pages.
    fn leave(&mut self) {
        if !self.asked.is_empty() {
            self.wrong("it has closed and owes answers");
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
        self.front.say(1);
    }

    /// Takes its answers and asks for more, in the middle of whatever the back end does.
    pub fn act(&mut self) {
        if !matches!(self.phase, Phase::Connected | Phase::Closing | Phase::Closed) {
            return;
        }
        for queue in 0..self.front.rings.len() {
            let port = self.front.rings[queue].port;
            if self.front.guest.signalled(port) {
                for (id, operation, status) in self.front.answers(queue) {
                    self.answered((queue, id), operation, status);
                }
            }
        }
        while self.phase == Phase::Connected && self.left > 0 && self.asked.len() < DEPTH && self.dice.below(3) > 0 {
            self.ask();
        }
    }

    fn answered(&mut self, which: (usize, u64), operation: u8, status: i16) {
        let Some(Asked { operation: asked, place, data, list }) = self.asked.remove(&which) else {
            return self.wrong(format!("an answer to {which:?}, which was not asked or has one"));
        };
        if (asked, 0) != (operation, status) {
            self.wrong(format!("{which:?}, operation {asked}, is answered with {status} to {operation}"));
        }
        match asked {
            READ => {
                let expected = self.disk[place];
                if data.iter().any(|own| self.byte_of(own.page) != Some(expected)) {
                    self.wrong(format!("place {place} is read as it never was, or as it is not any more"));
                }
            }
            _ => self.disk[place] = data[0].byte,
        }
        data.into_iter().chain(list).for_each(|own| self.set_free(own));
    }

    fn byte_of(&self, page: Page) -> Option<u8> {
        let bytes = self.front.guest.read(page, 0, 4096).unwrap();
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Somebody else has the page from now on.
    fn set_free(&mut self, own: Own) {
        let own = Own { byte: self.byte(), ..own };
        if !self.persistent && !self.front.guest.revoke(own.grant) {
            self.wrong("a page is mapped after its answer, which the guest has not agreed to");
            return;
        }
        self.front.guest.write(own.page, 0, &[own.byte; 4096]).unwrap();
        self.free.push(own);
    }

    fn byte(&mut self) -> u8 {
        self.next_byte = self.next_byte.checked_add(1).unwrap_or(1);
        self.next_byte
    }

    /// A page for a request: one that was used a moment ago; its reference may be another's of these.
    fn own(&mut self) -> Own {
        let Some(mut own) = self.free.pop() else {
            let page = self.front.guest.page().unwrap();
            return Own { page, grant: self.front.guest.grant(page, Access::ReadWrite), byte: 0 };
        };
        if self.byte_of(own.page) != Some(own.byte) {
            self.wrong("a page was written to that nobody has asked to be");
        }
        if !self.persistent {
            if let Some(other) = self.free.last_mut() {
                std::mem::swap(&mut other.grant, &mut own.grant);
            }
            self.front.guest.grant_as(own.grant, own.page, Access::ReadWrite);
        }
        own
    }

    fn ask(&mut self) {
        let place = self.dice.below(PLACES);
        if self.asked.values().any(|asked| asked.place == place) {
            return;
        }
        let queue = self.dice.below(self.front.rings.len());
        let operation = if self.dice.below(3) == 0 { READ } else { WRITE };
        let mut data = [self.own(), self.own()];
        let byte = self.byte();
        for own in &mut data {
            own.byte = byte;
            self.front.guest.write(own.page, 0, &[byte; 4096]).unwrap();
        }
        // The lowest that is free, as Linux does.
        let id = (0..).find(|&id| !self.asked.contains_key(&(queue, id))).unwrap();
        let sector = (place * PAGES * 8) as u64;
        let list = (self.indirect && self.dice.below(4) == 0).then(|| self.own());
        let entry = match list {
            Some(list) => {
                let one = |own: &Own| [&own.grant.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat();
                let descriptors: Vec<u8> = data.iter().flat_map(one).collect();
                self.front.guest.write(list.page, 0, &descriptors).unwrap();
                indirect(operation, id, sector, list.grant, PAGES as u16)
            }
            None => transfer(operation, id, sector, &data.map(|own| (own.grant, 0, 7))),
        };
        self.asked.insert((queue, id), Asked { operation, place, data, list });
        self.left -= 1;
        self.push(queue, &entry);
    }

    /// Announces a request, and signals it if that is wished for.
    fn push(&mut self, queue: usize, entry: &Entry) {
        self.front.put(queue, entry);
        let ring = &self.front.rings[queue];
        ring.shared.store_u32(0, ring.asked).unwrap();
        if ring.asked.wrapping_sub(ring.shared.load_u32(4).unwrap()) < 1 {
            self.front.guest.signal(ring.port).unwrap();
        }
    }
}
