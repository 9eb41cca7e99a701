//! A front end on real Xen that can write anything into its rings and its node.
//!
//! It does nothing by itself: a test says what is written and when. Every wait is bounded.

use std::sync::Arc;
use std::time::Instant;

use memory::Shared;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use xen::daemon::Daemon;
use xen::kernel::{Evtchn, Gntalloc, Offered};
use xen::{DomId, EventChannels, GrantRef, Port, Store, StoreError};

use crate::entry::{Answer, Entry, Rings, answer};
use crate::victim::PATIENCE;

/// dom0, which is both ends.
pub const OURS: DomId = DomId(0);

/// One ring.
pub struct Ring {
    pub shared: Arc<Shared>,
    pub pages: Vec<GrantRef>,
    pub port: Port,
    pub asked: u32,
    pub read: u32,
}

/// The front end.
pub struct Front {
    pub store: Daemon,
    pub channels: Evtchn,
    pub memory: Gntalloc,
    pub node: String,
    pub backend: String,
    pub rings: Vec<Ring>,
    pub made: Rings,
    pub slots: u32,
}

impl Front {
    /// A front end of disk `number`, which has said nothing yet. What a test that failed has left is removed.
    pub fn new(number: u32) -> Front {
        let mut store = Daemon::connect().unwrap();
        let node = format!("/local/domain/0/device/vbd/{number}");
        let backend = format!("/local/domain/0/backend/tapline/0/{number}");
        [&node, &backend].into_iter().for_each(|node| store.remove(None, node).unwrap());
        store.watch(&format!("{backend}/state"), "backend").unwrap();
        let channels = Evtchn::open().unwrap();
        let memory = Gntalloc::open().unwrap();
        Front { store, channels, memory, node, backend, rings: Vec::new(), made: Rings::default(), slots: 0 }
    }

    /// Writes the keys that a toolstack writes.
    pub fn appear(&mut self) {
        let backend = self.backend.clone();
        self.put_keys(&[("backend", backend), ("backend-id", "0".to_owned()), ("state", "1".to_owned())]);
    }

    pub fn set(&mut self, key: &str, value: &[u8]) {
        self.store.write(None, &format!("{}/{key}", self.node), value).unwrap();
    }

    pub fn unset(&mut self, key: &str) {
        self.store.remove(None, &format!("{}/{key}", self.node)).unwrap();
    }

    pub fn say(&mut self, state: u32) {
        self.set("state", state.to_string().as_bytes());
    }

    /// Writes keys at once.
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

    pub fn backend_says(&mut self) -> String {
        let value = self.store.read(None, &format!("{}/state", self.backend)).unwrap();
        String::from_utf8(value.unwrap_or_default()).unwrap()
    }

    /// Waits until the back end says one of these.
    pub fn await_backend(&mut self, wanted: &[&str]) -> String {
        let began = Instant::now();
        loop {
            let says = self.backend_says();
            if wanted.contains(&says.as_str()) {
                return says;
            }
            assert!(began.elapsed() < PATIENCE, "the back end says {says} and should say {wanted:?}");
            wait(self.store.fd(), 1000);
            while self.store.take_event().unwrap().is_some() {}
        }
    }

    /// Pages of zeroes, granted.
    pub fn pages(&self, count: u32) -> Offered {
        self.memory.grant(OURS, count, false).unwrap()
    }

    /// The keys of rings that it makes.
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

    /// Makes rings, writes where they are, and that it has initialised.
    pub fn initialise(&mut self, made: Rings) {
        let mut keys = self.make_rings(made);
        keys.push(("state".to_owned(), "3".to_owned()));
        let keys: Vec<(&str, String)> = keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        self.put_keys(&keys);
    }

    fn ring(&self, pages: u32) -> Ring {
        let Offered { pages, bytes } = self.pages(pages);
        bytes.store_u32(4, 1).unwrap();
        bytes.store_u32(12, 1).unwrap();
        Ring { shared: Arc::new(bytes), pages, port: self.channels.offer(OURS).unwrap(), asked: 0, read: 0 }
    }

    /// The whole handshake, from whatever there was.
    pub fn connect(&mut self, made: Rings) {
        self.forget();
        self.appear();
        self.await_backend(&["2"]);
        self.initialise(made);
        self.await_backend(&["4"]);
        self.say(4);
    }

    /// Closes, and forgets its rings and keys.
    pub fn close(&mut self) {
        self.say(5);
        self.await_backend(&["5"]);
        self.say(6);
        self.await_backend(&["6"]);
        self.forget();
    }

    /// Gives its rings up and removes its keys, without a word.
    pub fn forget(&mut self) {
        for ring in self.rings.drain(..) {
            self.channels.unbind(ring.port).unwrap();
        }
        // All but what the toolstack wrote.
        for key in self.store.list(None, &self.node).unwrap().unwrap_or_default() {
            if !["backend", "backend-id", "state"].contains(&key.as_str()) {
                self.unset(&key);
            }
        }
    }

    /// Writes an entry without announcing it.
    pub fn put(&mut self, queue: usize, entry: &Entry) {
        let ring = &mut self.rings[queue];
        self.made.abi.write(&ring.shared, self.made.abi.place(self.slots, ring.asked), entry);
        ring.asked = ring.asked.wrapping_add(1);
    }

    /// Announces what was written, and signals.
    pub fn push(&mut self, queue: usize) {
        let asked = self.rings[queue].asked;
        self.announce(queue, asked);
    }

    /// Announces any number of requests, and signals.
    pub fn announce(&mut self, queue: usize, asked: u32) {
        self.rings[queue].shared.store_u32(0, asked).unwrap();
        self.signal(queue);
    }

    pub fn signal(&mut self, queue: usize) {
        self.channels.notify(self.rings[queue].port).unwrap();
    }

    /// Answers that are there. What of one has no meaning is zero.
    pub fn answers(&mut self, queue: usize) -> Vec<Answer> {
        let (abi, slots) = (self.made.abi, self.slots);
        let ring = &mut self.rings[queue];
        let to = ring.shared.load_u32(8).unwrap();
        assert!(to.wrapping_sub(ring.read) <= ring.asked.wrapping_sub(ring.read), "more answers than requests: {to}");
        let mut answers = Vec::new();
        while ring.read != to {
            let at = abi.place(slots, ring.read);
            let bytes: [u8; 12] = ring.shared.read(at).unwrap();
            assert_eq!(bytes[9], 0, "a hole of the answer");
            if abi.response_len() == 16 {
                assert_eq!(ring.shared.read::<4>(at + 12), Some([0; 4]), "the end of the answer");
            }
            answers.push(answer(&bytes));
            ring.read = ring.read.wrapping_add(1);
        }
        answers
    }

    /// Waits for so many answers, or a few more. Asks to be signalled when the last of them is there, and else does not look.
    pub fn await_answers(&mut self, queue: usize, count: usize) -> Vec<Answer> {
        let began = Instant::now();
        let mut answers = self.answers(queue);
        while answers.len() < count {
            let ring = &self.rings[queue];
            let missing = (count - answers.len()) as u32;
            ring.shared.store_u32(12, ring.read.wrapping_add(missing)).unwrap();
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
            let more = self.answers(queue);
            if more.is_empty() {
                assert!(began.elapsed() < PATIENCE, "{} answers of {count}", answers.len());
                self.hear(1000);
            }
            answers.extend(more);
        }
        answers
    }

    /// Waits for a signal.
    pub fn hear(&mut self, wait_ms: i64) {
        wait(self.channels.fd(), wait_ms);
        let mut ports = Vec::new();
        self.channels.take(&mut ports).unwrap();
        // One that was given up meanwhile cannot be unmasked.
        ports.into_iter().for_each(|port| drop(self.channels.unmask(port)));
    }

    /// The answers to these, in the order of their ids.
    pub fn run_all(&mut self, queue: usize, entries: &[Entry]) -> Vec<Answer> {
        entries.iter().for_each(|entry| self.put(queue, entry));
        self.push(queue);
        let mut answers = self.await_answers(queue, entries.len());
        assert_eq!(answers.len(), entries.len());
        answers.sort_unstable();
        answers
    }

    /// The status of one request.
    pub fn run(&mut self, entry: &Entry) -> i16 {
        self.run_all(0, std::slice::from_ref(entry))[0].2
    }

    /// Nodes at and below both ends'.
    pub fn nodes(&mut self) -> usize {
        let (backend, node) = (self.backend.clone(), self.node.clone());
        count_nodes(&mut self.store, &backend) + count_nodes(&mut self.store, &node)
    }

    /// Removes both ends' nodes.
    pub fn leave(mut self) {
        self.forget();
        self.store.remove(None, &self.node).unwrap();
        self.store.remove(None, &self.backend).unwrap();
    }
}

fn count_nodes(store: &mut Daemon, path: &str) -> usize {
    let children = store.list(None, path).unwrap();
    children.map_or(0, |children| {
        1 + children.iter().map(|child| count_nodes(store, &format!("{path}/{child}"))).sum::<usize>()
    })
}

/// Waits until there is something to read, a bounded time.
fn wait(fd: std::os::fd::BorrowedFd<'_>, wait_ms: i64) {
    let timeout = Timespec { tv_sec: wait_ms / 1000, tv_nsec: wait_ms % 1000 * 1_000_000 };
    poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).unwrap();
}
