//! A front end on real Xen that can write anything into its rings and its node.
//!
//! It does nothing by itself: a test decides what it writes and when. Every wait is bounded.

use std::sync::Arc;
use std::time::Instant;

use memory::Shared;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xen::kernel::{Evtchn, Gntalloc, GrantedPages};
use xen::xenstored::XenstoredClient;
use xen::{DomId, EventChannels, GrantRef, Port, Store, StoreError};

use crate::disk_process::TIMEOUT;
use crate::entry::{Entry, Response, Rings, parse_response};

/// dom0, which runs both ends.
pub const OURS: DomId = DomId(0);

/// One ring.
pub struct Ring {
    pub shared: Arc<Shared>,
    pub pages: Vec<GrantRef>,
    pub port: Port,
    pub submitted: u32,
    pub read: u32,
}

/// The front end.
pub struct Front {
    pub store: XenstoredClient,
    pub channels: Evtchn,
    pub memory: Gntalloc,
    pub node: String,
    pub backend: String,
    pub rings: Vec<Ring>,
    pub made: Rings,
    pub slots: u32,
}

impl Front {
    /// A front end of disk `number`, which has written nothing yet. Removes the nodes of a failed test.
    pub fn new(number: u32) -> Front {
        let mut store = XenstoredClient::connect().unwrap();
        let node = format!("/local/domain/0/device/vbd/{number}");
        let backend = format!("/local/domain/0/backend/tapline/0/{number}");
        [&node, &backend].into_iter().for_each(|node| store.remove(None, node).unwrap());
        store.watch(&format!("{backend}/state"), "backend").unwrap();
        let channels = Evtchn::open().unwrap();
        let memory = Gntalloc::open().unwrap();
        Front { store, channels, memory, node, backend, rings: Vec::new(), made: Rings::default(), slots: 0 }
    }

    /// Writes the keys that a toolstack writes.
    pub fn write_toolstack_keys(&mut self) {
        let backend = self.backend.clone();
        self.put_keys(&[("backend", backend), ("backend-id", "0".to_owned()), ("state", "1".to_owned())]);
    }

    pub fn set(&mut self, key: &str, value: &[u8]) {
        self.store.write(None, &format!("{}/{key}", self.node), value).unwrap();
    }

    pub fn unset(&mut self, key: &str) {
        self.store.remove(None, &format!("{}/{key}", self.node)).unwrap();
    }

    pub fn write_state(&mut self, state: u32) {
        self.set("state", state.to_string().as_bytes());
    }

    /// Writes keys in one transaction.
    fn put_keys(&mut self, keys: &[(&str, String)]) {
        loop {
            let within = self.store.begin().unwrap();
            for (key, value) in keys {
                self.store.write(Some(within), &format!("{}/{key}", self.node), value.as_bytes()).unwrap();
            }
            match self.store.end(within, true) {
                Err(StoreError::Again) => {}
                result => return result.unwrap(),
            }
        }
    }

    pub fn backend_state(&mut self) -> String {
        let value = self.store.read(None, &format!("{}/state", self.backend)).unwrap();
        String::from_utf8(value.unwrap_or_default()).unwrap()
    }

    /// Waits until the back end is in one of these states.
    pub fn await_backend(&mut self, wanted: &[&str]) -> String {
        let began = Instant::now();
        loop {
            let state = self.backend_state();
            if wanted.contains(&state.as_str()) {
                return state;
            }
            assert!(began.elapsed() < TIMEOUT, "the back end is in state {state}; expected {wanted:?}");
            wait(self.store.fd(), 1000);
            while self.store.take_event().unwrap().is_some() {}
        }
    }

    /// Allocates zeroed pages, and grants them.
    pub fn pages(&self, count: u32) -> GrantedPages {
        self.memory.grant(OURS, count, false).unwrap()
    }

    /// Creates rings and returns their keys.
    pub fn make_rings(&mut self, made: Rings) -> Vec<(String, String)> {
        self.made = made;
        let pages = 1u32 << made.order;
        self.slots = made.abi.slots(pages as usize);
        self.rings = (0..made.queues).map(|_| self.ring(pages)).collect();
        let mut keys = vec![("feature-persistent".to_owned(), u32::from(made.persistent).to_string())];
        keys.extend(made.abi.protocol().map(|protocol| ("protocol".to_owned(), protocol.to_owned())));
        if made.order > 0 {
            keys.push(("ring-page-order".to_owned(), made.order.to_string()));
        }
        if made.queues > 1 {
            keys.push(("multi-queue-num-queues".to_owned(), made.queues.to_string()));
        }
        for (index, ring) in self.rings.iter().enumerate() {
            let before = if made.queues > 1 { format!("queue-{index}/") } else { String::new() };
            for (page, grant) in ring.pages.iter().enumerate() {
                let number = if made.order > 0 { page.to_string() } else { String::new() };
                keys.push((format!("{before}ring-ref{number}"), grant.0.to_string()));
            }
            keys.push((format!("{before}event-channel"), ring.port.0.to_string()));
        }
        keys
    }

    /// Creates rings, writes their keys and the state Initialised.
    pub fn initialise(&mut self, made: Rings) {
        let mut keys = self.make_rings(made);
        keys.push(("state".to_owned(), "3".to_owned()));
        let keys: Vec<(&str, String)> = keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        self.put_keys(&keys);
    }

    fn ring(&self, pages: u32) -> Ring {
        let GrantedPages { pages, bytes } = self.pages(pages);
        bytes.store_u32(4, 1).unwrap();
        bytes.store_u32(12, 1).unwrap();
        Ring { shared: Arc::new(bytes), pages, port: self.channels.offer(OURS).unwrap(), submitted: 0, read: 0 }
    }

    /// Performs the whole handshake, from any state.
    pub fn connect(&mut self, made: Rings) {
        self.forget();
        self.write_toolstack_keys();
        self.await_backend(&["2"]);
        self.initialise(made);
        self.await_backend(&["4"]);
        self.write_state(4);
    }

    /// Closes, and removes its rings and keys.
    pub fn close(&mut self) {
        self.write_state(5);
        self.await_backend(&["5"]);
        self.write_state(6);
        self.await_backend(&["6"]);
        self.forget();
    }

    /// Drops its rings and removes its keys, without writing a state.
    pub fn forget(&mut self) {
        for ring in self.rings.drain(..) {
            self.channels.unbind(ring.port).unwrap();
        }
        // All except those of the toolstack.
        for key in self.store.list(None, &self.node).unwrap().unwrap_or_default() {
            if !["backend", "backend-id", "state"].contains(&key.as_str()) {
                self.unset(&key);
            }
        }
    }

    /// Writes an entry without announcing it.
    pub fn put(&mut self, queue: usize, entry: &Entry) {
        let ring = &mut self.rings[queue];
        self.made.abi.write(&ring.shared, self.made.abi.offset(self.slots, ring.submitted), entry);
        ring.submitted = ring.submitted.wrapping_add(1);
    }

    /// Announces the entries written, and notifies.
    pub fn push(&mut self, queue: usize) {
        let submitted = self.rings[queue].submitted;
        self.announce(queue, submitted);
    }

    /// Stores a producer index, which may be invalid, and notifies.
    pub fn announce(&mut self, queue: usize, submitted: u32) {
        self.rings[queue].shared.store_u32(0, submitted).unwrap();
        self.signal(queue);
    }

    pub fn signal(&mut self, queue: usize) {
        self.channels.notify(self.rings[queue].port).unwrap();
    }

    /// The available responses. Their unused bytes must be zero.
    pub fn responses(&mut self, queue: usize) -> Vec<Response> {
        let (abi, slots) = (self.made.abi, self.slots);
        let ring = &mut self.rings[queue];
        let to = ring.shared.load_u32(8).unwrap();
        assert!(
            to.wrapping_sub(ring.read) <= ring.submitted.wrapping_sub(ring.read),
            "more responses than requests: {to}"
        );
        let mut answers = Vec::new();
        while ring.read != to {
            let at = abi.offset(slots, ring.read);
            let bytes: [u8; 12] = ring.shared.read(at).unwrap();
            assert_eq!(bytes[9], 0, "padding of the response");
            if abi.response_len() == 16 {
                assert_eq!(ring.shared.read::<4>(at + 12), Some([0; 4]), "end of the response");
            }
            answers.push(parse_response(&bytes));
            ring.read = ring.read.wrapping_add(1);
        }
        answers
    }

    /// Waits for at least `count` responses. Requests a notification for the last of them instead of polling.
    pub fn await_answers(&mut self, queue: usize, count: usize) -> Vec<Response> {
        let began = Instant::now();
        let mut answers = self.responses(queue);
        while answers.len() < count {
            let ring = &self.rings[queue];
            let missing = (count - answers.len()) as u32;
            ring.shared.store_u32(12, ring.read.wrapping_add(missing)).unwrap();
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            let more = self.responses(queue);
            if more.is_empty() {
                assert!(began.elapsed() < TIMEOUT, "{} responses of {count}", answers.len());
                self.wait_for_notification(1000);
            }
            answers.extend(more);
        }
        answers
    }

    /// Waits for a notification.
    pub fn wait_for_notification(&mut self, wait_ms: i64) {
        wait(self.channels.fd(), wait_ms);
        let mut ports = Vec::new();
        self.channels.take(&mut ports).unwrap();
        // A port that is closed now cannot be unmasked.
        ports.into_iter().for_each(|port| drop(self.channels.unmask(port)));
    }

    /// Submits entries, and returns their responses, ordered by id.
    pub fn run_all(&mut self, queue: usize, entries: &[Entry]) -> Vec<Response> {
        entries.iter().for_each(|entry| self.put(queue, entry));
        self.push(queue);
        let mut answers = self.await_answers(queue, entries.len());
        assert_eq!(answers.len(), entries.len());
        answers.sort_unstable();
        answers
    }

    /// Runs one request, and returns its status.
    pub fn run(&mut self, entry: &Entry) -> i16 {
        self.run_all(0, std::slice::from_ref(entry))[0].2
    }

    /// Number of nodes at and below both ends.
    pub fn nodes(&mut self) -> usize {
        let (backend, node) = (self.backend.clone(), self.node.clone());
        count_nodes(&mut self.store, &backend) + count_nodes(&mut self.store, &node)
    }

    /// Removes both ends' nodes.
    pub fn remove_nodes(mut self) {
        self.forget();
        self.store.remove(None, &self.node).unwrap();
        self.store.remove(None, &self.backend).unwrap();
    }
}

fn count_nodes(store: &mut XenstoredClient, path: &str) -> usize {
    let children = store.list(None, path).unwrap();
    children.map_or(0, |children| {
        1 + children.iter().map(|child| count_nodes(store, &format!("{path}/{child}"))).sum::<usize>()
    })
}

/// Waits, for a bounded time, until there is something to read.
fn wait(fd: std::os::fd::BorrowedFd<'_>, wait_ms: i64) {
    let timeout = Timespec { tv_sec: wait_ms / 1000, tv_nsec: wait_ms % 1000 * 1_000_000 };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap();
}
