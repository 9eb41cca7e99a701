//! A front end that can write anything into its rings and its node.

use memory::Shared;
use xen::fake::{Access, Guest, Host, Page};
use xen::{GrantRef, Port};

use super::entry::{Entry, Response, Rings, parse_response};
use super::{BACKEND, DOMAIN, FRONTEND, TestBackend, get, set};

/// One ring.
pub struct Ring {
    pub shared: Shared,
    pub own: Vec<Page>,
    pub pages: Vec<GrantRef>,
    pub port: Port,
    pub submitted: u32,
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

    /// A page filled with a byte, and its grant.
    pub fn page(&self, byte: u8) -> (Page, GrantRef) {
        let page = self.guest.page().unwrap();
        self.guest.write(page, 0, &[byte; 4096]).unwrap();
        (page, self.guest.grant(page, Access::ReadWrite))
    }

    pub fn write_state(&self, state: u32) {
        set(&self.host, &format!("{FRONTEND}/state"), &state.to_string());
    }

    pub fn backend_state(&self) -> String {
        get(&self.host, &format!("{BACKEND}/state")).unwrap_or_default()
    }

    /// Creates rings and writes their keys.
    pub fn initialise(&mut self, made: Rings) {
        self.made = made;
        let pages = 1usize << made.order;
        self.slots = made.abi.slots(pages);
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
        self.write_state(3);
    }

    fn ring(&self, pages: usize) -> Ring {
        let own = self.guest.pages(pages).unwrap();
        let shared = self.guest.shared(&own).unwrap();
        shared.store_u32(4, 1).unwrap();
        shared.store_u32(12, 1).unwrap();
        let pages = own.iter().map(|&page| self.guest.grant(page, Access::ReadWrite)).collect();
        Ring { shared, own, pages, port: self.guest.offer(), submitted: 0, read: 0 }
    }

    /// Performs the whole handshake.
    pub fn connect(&mut self, machine: &mut TestBackend, made: Rings) {
        machine.settle();
        assert_eq!(self.backend_state(), "2", "{}", machine.log);
        self.initialise(made);
        machine.settle();
        assert_eq!(self.backend_state(), "4", "{}", machine.log);
        self.write_state(4);
        machine.settle();
    }

    /// Performs the whole handshake, as a front end that does not know persistent grants unless `made` has them, and
    /// does not remove the keys of an earlier one.
    pub fn connect_as_linux(&mut self, machine: &mut TestBackend, made: Rings) {
        machine.settle();
        let kept = ["feature-persistent"].map(|key| (key, get(&self.host, &format!("{FRONTEND}/{key}"))));
        self.initialise(made);
        if !made.persistent {
            for (key, before) in kept {
                let path = format!("{FRONTEND}/{key}");
                before.map_or_else(|| super::remove(&self.host, &path), |before| set(&self.host, &path, &before));
            }
        }
        machine.settle();
        assert_eq!(self.backend_state(), "4", "{}", machine.log);
        self.write_state(4);
        machine.settle();
    }

    /// Closes, and removes its rings and keys.
    pub fn close(&mut self, machine: &mut TestBackend) {
        self.write_state(5);
        machine.settle();
        self.write_state(6);
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
        let ring = &mut self.rings[queue];
        self.made.abi.write(&ring.shared, self.made.abi.offset(self.slots, ring.submitted), entry);
        ring.submitted += 1;
    }

    /// Announces the entries written, and notifies.
    pub fn push(&mut self, queue: usize) {
        let ring = &self.rings[queue];
        ring.shared.store_u32(0, ring.submitted).unwrap();
        self.guest.signal(ring.port).unwrap();
    }

    pub fn submit(&mut self, queue: usize, entry: &Entry) {
        self.put(queue, entry);
        self.push(queue);
    }

    /// Responses since the last call.
    pub fn responses(&mut self, queue: usize) -> Vec<Response> {
        let ring = &mut self.rings[queue];
        let to = ring.shared.load_u32(8).unwrap();
        let mut responses = Vec::new();
        while ring.read != to {
            responses.push(parse_response(&ring.shared.read(self.made.abi.offset(self.slots, ring.read)).unwrap()));
            ring.read += 1;
        }
        ring.shared.store_u32(12, ring.read + 1).unwrap();
        responses
    }

    /// Runs one request and returns its status.
    pub fn run(&mut self, machine: &mut TestBackend, entry: &Entry) -> i16 {
        self.submit(0, entry);
        machine.settle();
        let responses = self.responses(0);
        assert_eq!(responses.len(), 1, "{}", machine.log);
        responses[0].2
    }
}
