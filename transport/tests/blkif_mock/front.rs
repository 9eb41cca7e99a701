//! A front end that can write anything. Its offsets are its own, from io/blkif.h.

use memory::Shared;
use xen::fake::{Access, Guest, Host, Page};
use xen::{GrantRef, Port};

use super::{BACKEND, DOMAIN, FRONTEND, Machine, get, set};

pub const READ: u8 = 0;
pub const WRITE: u8 = 1;

/// The compiler of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    Native,
    X86_32,
    X86_64,
}

impl Abi {
    pub fn protocol(self) -> Option<&'static str> {
        match self {
            Abi::Native => None,
            Abi::X86_32 => Some("x86_32-abi"),
            Abi::X86_64 => Some("x86_64-abi"),
        }
    }

    fn len(self) -> usize {
        if self == Abi::X86_32 { 108 } else { 112 }
    }

    /// Bytes that stand between the first four and `id`.
    fn hole(self) -> usize {
        if self == Abi::X86_32 { 0 } else { 4 }
    }
}

/// An entry in 32-bit layout; the hole is put in when it is written.
pub type Entry = [u8; 108];

fn entry(head: [u8; 4], id: u64, sector: u64, rest: &[u8]) -> Entry {
    let mut entry = [0; 108];
    entry[..4].copy_from_slice(&head);
    entry[4..12].copy_from_slice(&id.to_le_bytes());
    entry[12..20].copy_from_slice(&sector.to_le_bytes());
    entry[20..20 + rest.len()].copy_from_slice(rest);
    entry
}

pub fn segments(segments: &[(GrantRef, u8, u8)]) -> Vec<u8> {
    let one = |&(page, first, last): &(GrantRef, u8, u8)| {
        let [a, b, c, d] = page.0.to_le_bytes();
        [a, b, c, d, first, last, 0, 0]
    };
    segments.iter().flat_map(one).collect()
}

pub fn transfer(operation: u8, id: u64, sector: u64, parts: &[(GrantRef, u8, u8)]) -> Entry {
    entry([operation, parts.len() as u8, 0, 0], id, sector, &segments(parts))
}

pub fn discard(flag: u8, id: u64, sector: u64, count: u64) -> Entry {
    entry([5, flag, 0, 0], id, sector, &count.to_le_bytes())
}

pub fn indirect(operation: u8, id: u64, sector: u64, page: GrantRef, count: u16) -> Entry {
    let [low, high] = count.to_le_bytes();
    let mut rest = vec![0; 4];
    rest.extend(page.0.to_le_bytes());
    entry([6, operation, low, high], id, sector, &rest)
}

/// What rings a front end makes.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    pub abi: Abi,
    pub order: u32,
    pub queues: u32,
    pub persistent: bool,
}

impl Default for Rings {
    fn default() -> Rings {
        Rings { abi: Abi::X86_64, order: 0, queues: 1, persistent: false }
    }
}

/// One ring.
pub struct Ring {
    pub shared: Shared,
    pub pages: Vec<GrantRef>,
    pub port: Port,
    pub asked: u32,
    pub read: u32,
}

/// The front end.
pub struct Front {
    pub host: Host,
    pub guest: Guest,
    pub rings: Vec<Ring>,
    pub made: Rings,
    pub slots: u32,
}

impl Front {
    pub fn new(host: &Host) -> Front {
        let guest = host.guest(DOMAIN);
        Front { host: host.clone(), guest, rings: Vec::new(), made: Rings::default(), slots: 0 }
    }

    /// A page of a byte, and its grant.
    pub fn page(&self, byte: u8) -> (Page, GrantRef) {
        let page = self.guest.page().unwrap();
        self.guest.write(page, 0, &[byte; 4096]).unwrap();
        (page, self.guest.grant(page, Access::ReadWrite))
    }

    pub fn say(&self, state: u32) {
        set(&self.host, &format!("{FRONTEND}/state"), &state.to_string());
    }

    pub fn backend_says(&self) -> String {
        get(&self.host, &format!("{BACKEND}/state")).unwrap_or_default()
    }

    /// Makes rings and writes where they are.
    pub fn initialise(&mut self, made: Rings) {
        self.made = made;
        let pages = 1usize << made.order;
        let room = (pages * 4096 - 64) / made.abi.len();
        self.slots = 1 << room.ilog2();
        self.rings = (0..made.queues).map(|_| self.ring(pages)).collect();
        let put = |key: &str, value: &str| set(&self.host, &format!("{FRONTEND}/{key}"), value);
        if let Some(protocol) = made.abi.protocol() {
            put("protocol", protocol);
        }
        put("feature-persistent", if made.persistent { "1" } else { "0" });
        if made.order > 0 {
            put("ring-page-order", &made.order.to_string());
        }
        if made.queues > 1 {
            put("multi-queue-num-queues", &made.queues.to_string());
        }
        for (index, ring) in self.rings.iter().enumerate() {
            let before = if made.queues > 1 { format!("queue-{index}/") } else { String::new() };
            for (page, grant) in ring.pages.iter().enumerate() {
                let number = if made.order > 0 { page.to_string() } else { String::new() };
                put(&format!("{before}ring-ref{number}"), &grant.0.to_string());
            }
            put(&format!("{before}event-channel"), &ring.port.0.to_string());
        }
        self.say(3);
    }

    fn ring(&self, pages: usize) -> Ring {
        let own = self.guest.pages(pages).unwrap();
        let shared = self.guest.shared(&own).unwrap();
        shared.store_u32(4, 1).unwrap();
        shared.store_u32(12, 1).unwrap();
        let pages = own.iter().map(|&page| self.guest.grant(page, Access::ReadWrite)).collect();
        Ring { shared, pages, port: self.guest.offer(), asked: 0, read: 0 }
    }

    /// The whole handshake.
    pub fn connect(&mut self, machine: &mut Machine, made: Rings) {
        machine.settle();
        assert_eq!(self.backend_says(), "2", "{}", machine.log);
        self.initialise(made);
        machine.settle();
        assert_eq!(self.backend_says(), "4", "{}", machine.log);
        self.say(4);
        machine.settle();
    }

    /// Closes, and forgets its rings and keys.
    pub fn close(&mut self, machine: &mut Machine) {
        self.say(5);
        machine.settle();
        self.say(6);
        machine.settle();
        self.forget();
    }

    pub fn forget(&mut self) {
        for ring in self.rings.drain(..) {
            for page in ring.pages {
                self.guest.revoke(page);
            }
            self.guest.close(ring.port);
        }
        for key in ["protocol", "ring-page-order", "multi-queue-num-queues"] {
            super::remove(&self.host, &format!("{FRONTEND}/{key}"));
        }
    }

    /// Writes an entry without announcing it.
    pub fn put(&mut self, queue: usize, entry: &Entry) {
        let (abi, slot) = (self.made.abi, self.rings[queue].asked & (self.slots - 1));
        let ring = &mut self.rings[queue];
        let at = 64 + slot as usize * abi.len();
        let mut bytes = [0; 112];
        bytes[..4].copy_from_slice(&entry[..4]);
        bytes[4 + abi.hole()..108 + abi.hole()].copy_from_slice(&entry[4..]);
        match abi.hole() {
            0 => ring.shared.write(at, *entry).unwrap(),
            _ => ring.shared.write(at, bytes).unwrap(),
        }
        ring.asked += 1;
    }

    /// Announces what was written, and signals.
    pub fn push(&mut self, queue: usize) {
        let ring = &self.rings[queue];
        ring.shared.store_u32(0, ring.asked).unwrap();
        self.guest.signal(ring.port).unwrap();
    }

    pub fn ask(&mut self, queue: usize, entry: &Entry) {
        self.put(queue, entry);
        self.push(queue);
    }

    /// Answers that came since the last look: id, operation, status.
    pub fn answers(&mut self, queue: usize) -> Vec<(u64, u8, i16)> {
        let len = self.made.abi.len();
        let ring = &mut self.rings[queue];
        let to = ring.shared.load_u32(8).unwrap();
        let mut answers = Vec::new();
        while ring.read != to {
            let at = 64 + (ring.read & (self.slots - 1)) as usize * len;
            let bytes: [u8; 12] = ring.shared.read(at).unwrap();
            let id = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            answers.push((id, bytes[8], i16::from_le_bytes([bytes[10], bytes[11]])));
            ring.read += 1;
        }
        ring.shared.store_u32(12, ring.read + 1).unwrap();
        answers
    }

    /// One request, answered.
    pub fn run(&mut self, machine: &mut Machine, entry: &Entry) -> i16 {
        self.ask(0, entry);
        machine.settle();
        let answers = self.answers(0);
        assert_eq!(answers.len(), 1, "{}", machine.log);
        answers[0].2
    }
}
