//! Invariants checked, with random requests, completions, limits, shares, full storage, recalls and stops of the disk,
//! in simulated time:
//! - each request leaves once, started, refused, failed or returned, and is counted once before it is started;
//! - a flush is held by no limit and no share, and requests that need no space never wait behind those that do;
//! - a write does not overtake one that waits for space, and the first is not retried too often;
//! - in quarantine at most one request is in flight, and none during the pause;
//! - a request that its peer takes back is returned, and not started;
//! - while a request is held that no completion will release, there is a deadline; when that has passed, something
//!   happens.

use std::cell::Cell;
use std::collections::BTreeMap;

use control::limits::Limits;
use disk::redo::{HEADER_LEN, IDENTITY_LEN, Mark, Owner};
use disk::{DiskOffset, Geometry, Operation, RedoLog, Span};
use fastrand::Rng;
use memory::{Segments, Shared};
use shares::{Page, Slot, Usable};

use super::share::Sharing;
use super::*;

/// The faults that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A flush waits for a limit of writes.
    LimitsFlush,
    /// A write overtakes the one that is being retried.
    OvertakesProbe,
    /// A request that its peer takes back stays held.
    KeepsRecalled,
    /// The first request that waits for space is retried all the time.
    RetriesInThePast,
    /// The deadline has always passed.
    IsAlwaysDue,
    /// Two requests of the quarantine are in flight.
    TwoInQuarantine,
    /// Only the first request is retried when there is space.
    RetriesOnlyTheFirst,
}

thread_local! {
    static PLANTED: Cell<Option<Planted>> = const { Cell::new(None) };
}

/// Returns whether the fault is planted in this thread.
pub fn is_planted(fault: Planted) -> bool {
    PLANTED.get() == Some(fault)
}

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;
const STEPS: usize = 300;
const BATCH: usize = 16;
const WRITE: Operation = Operation::Write { durable: false };
const GEOMETRY: Geometry =
    Geometry { len: 1 << 30, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };

/// Another disk on the storage, with a slot in its page.
const OTHER: shares::Owner = shares::Owner { pid: 1, started: 7 };

/// The place of a request, as known to its peer and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Held for a limit or the share.
    Pace,
    /// Held until there is space.
    Space,
    InFlight {
        /// Whether it is being retried.
        is_probe: bool,
    },
}

/// A disk and its peers.
struct World {
    admission: Admission,
    log: RedoLog,
    random: Rng,
    now: u64,
    next: u64,
    /// All requests that have arrived and not left.
    places: BTreeMap<Token, Place>,
    counted: BTreeMap<Token, u32>,
    in_flight: BTreeMap<Token, Request>,
    wanted: Vec<Token>,
    peers: Peers,
    other: Option<(Page, usize)>,
    storage_is_full: bool,
    /// When the first was last refused, unless there was a hint of space since.
    refused_at: Option<u64>,
    /// Whether requests behind a first one that has found space may start.
    space_found: bool,
    rests_until: u64,
    closed: bool,
}

fn log_after(deaths: u64, left: u64) -> (RedoLog, u64) {
    let shared = Shared::of_words((HEADER_LEN + 256) / 8);
    let open = || {
        let owner = Owner { identity: [7; IDENTITY_LEN], stamps: Vec::new(), session: [1; 16] };
        RedoLog::open(shared.clone(), &owner, &mut [0; 512].as_slice()).unwrap()
    };
    let log = open();
    log.note_in_flight(left);
    let request = made(Operation::Read, 0, 512, 0);
    for _ in 0..deaths {
        log.note_alone(Mark::of(&request));
        log.note_at_work(true);
        let _counted = open().suspect();
    }
    request.retire();
    (open(), if left > 0 && deaths == 1 { 250 * MS } else { 0 })
}

fn made(operation: Operation, at: u64, len: u64, token: u64) -> Request {
    let memory = match operation {
        Operation::Read | WRITE => Segments::zeroed(usize::try_from(len).unwrap()),
        _ => Segments::empty(),
    };
    let span = Span { at: DiskOffset(at), len };
    Request::new(operation, span, memory, Token(token), &GEOMETRY).unwrap()
}

fn needs_space(operation: Operation) -> bool {
    matches!(operation, Operation::Write { .. } | Operation::WriteZeroes { .. })
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Rng::with_seed(seed);
        let left = if random.bool() { random.u64(1..40) } else { 0 };
        let (log, rests_until) = log_after(random.u64(0..3), left);
        let mut limiter = Limiter::new(Limits::default(), 0);
        let other = random.bool().then(|| {
            let page = Page::new(4).unwrap();
            limiter.set_sharing(Some(Sharing::in_page(page.file().try_clone().unwrap()).unwrap()));
            let slot = page.claim(OTHER, Usable::Free).unwrap();
            (page, slot)
        });
        let mut admission = Admission::new(limiter, true);
        admission.begin(Some(&log), 0, 0);
        World {
            admission,
            log,
            random,
            now: 0,
            next: 1,
            places: BTreeMap::new(),
            counted: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            wanted: Vec::new(),
            peers: Peers::Here,
            other,
            storage_is_full: false,
            refused_at: None,
            space_found: false,
            rests_until,
            closed: false,
        }
    }

    fn state(&self) -> DiskState {
        DiskState { in_flight: self.in_flight.len(), is_quiet: self.in_flight.is_empty(), is_working: false }
    }

    fn waits_for_space(&self) -> bool {
        self.places.values().any(|place| matches!(place, Place::Space | Place::InFlight { is_probe: true }))
    }

    fn random_request(&mut self) -> Request {
        let token = self.next;
        self.next += 1;
        let len = [512, 4096, 64 << 10][self.random.usize(0..3)];
        let at = 4096 * self.random.u64(0..2);
        match self.random.u32(0..10) {
            0..4 => made(WRITE, at, len, token),
            4 => made(Operation::WriteZeroes { free: true, durable: false }, at, len, token),
            5 => made(Operation::Discard, at, len, token),
            6 => made(Operation::Flush, 0, 0, token),
            _ => made(Operation::Read, at, len, token),
        }
    }

    /// Accepts a batch of new requests, like the event loop.
    fn arrive(&mut self) -> Result<(), String> {
        if self.closed || self.peers != Peers::Here {
            return Ok(());
        }
        self.admission.limiter.allot(self.in_flight.len(), self.now);
        let batch = self.admission.batch(BATCH, self.state(), self.now);
        if batch > 0 && self.now < self.rests_until {
            return Err("a request is taken while the quarantine rests".into());
        }
        for _ in 0..self.random.usize(0..=batch) {
            let request = self.random_request();
            self.arrive_one(request)?;
        }
        Ok(())
    }

    fn arrive_one(&mut self, mut request: Request) -> Result<(), String> {
        let (token, operation, in_quarantine) =
            (request.token(), request.operation(), self.admission.is_in_quarantine());
        let counted = &mut self.counted;
        let arrival =
            self.admission.arrive(&mut request, self.now, |request| *counted.entry(request.token()).or_default() += 1);
        match arrival {
            Arrival::Start => {
                let overtakes = needs_space(operation) && self.waits_for_space();
                self.begin(request, false)?;
                if overtakes { Err(format!("{token:?} overtakes a request that waits for space")) } else { Ok(()) }
            }
            Arrival::Hold(reason) => {
                let held = match reason {
                    Reason::Pace => Place::Pace,
                    Reason::Space => Place::Space,
                };
                self.admission.hold(request, reason, self.now);
                self.places.insert(token, held);
                match reason {
                    Reason::Pace if operation == Operation::Flush || in_quarantine => {
                        Err(format!("{operation:?} is held by a limit"))
                    }
                    Reason::Space if !needs_space(operation) => Err(format!("{operation:?} is held for space")),
                    Reason::Pace | Reason::Space => Ok(()),
                }
            }
            Arrival::Fail => {
                self.admission.failed(Some(&self.log));
                self.leave(request)
            }
        }
    }

    fn begin(&mut self, request: Request, is_probe: bool) -> Result<(), String> {
        let token = request.token();
        self.places.insert(token, Place::InFlight { is_probe });
        self.in_flight.insert(token, request);
        if self.counted.get(&token) != Some(&1) {
            return Err(format!("{token:?} is begun and counted {:?} times", self.counted.get(&token)));
        }
        match self.admission.is_in_quarantine() && self.in_flight.len() > 1 {
            true => Err(format!("{} requests of the quarantine are in flight", self.in_flight.len())),
            false => Ok(()),
        }
    }

    /// Removes a request that is completed or returned.
    fn leave(&mut self, request: Request) -> Result<(), String> {
        let token = request.retire();
        self.places.remove(&token);
        self.counted.remove(&token);
        Ok(())
    }

    /// Starts all released requests, like the event loop; returns their number.
    fn release(&mut self) -> Result<usize, String> {
        self.give_back()?;
        let mut count = 0;
        loop {
            let counted = &mut self.counted;
            let count_one = |request: &mut Request, _: Waited| *counted.entry(request.token()).or_default() += 1;
            let Some(released) = self.admission.next(self.in_flight.len(), self.peers, self.now, count_one) else {
                break;
            };
            count += 1;
            match released {
                Released::Start(request) => self.released(request)?,
                Released::Refuse(request) if self.closed || self.peers == Peers::Gone => self.leave(request)?,
                Released::Refuse(request) => {
                    self.leave(request)?;
                    return Err("a request is refused that can wait".into());
                }
            }
        }
        // Requests released by a limit may have to wait for space now.
        for (token, place) in &mut self.places {
            if *place == Place::Pace && self.counted.contains_key(token) {
                *place = Place::Space;
                count += 1;
            }
        }
        self.space_found = false;
        Ok(count)
    }

    fn released(&mut self, request: Request) -> Result<(), String> {
        let token = request.token();
        let was = self.places.get(&token).copied();
        let is_probe = was == Some(Place::Space) && !self.space_found;
        self.begin(request, is_probe)?;
        if self.wanted.contains(&token) {
            return Err(format!("{token:?} is begun, which its peer wants back"));
        }
        let is_early = self.refused_at.is_some_and(|at| self.now < at + 5 * SECOND);
        match is_probe && is_early {
            true => Err(format!("{token:?} is retried too early")),
            false => Ok(()),
        }
    }

    /// Completes a random request of the disk.
    fn complete(&mut self) -> Result<(), String> {
        let tokens: Vec<Token> = self.in_flight.keys().copied().collect();
        let Some(&token) = tokens.get(self.random.usize(0..tokens.len().max(1))) else { return Ok(()) };
        let Some(request) = self.in_flight.remove(&token) else { return Ok(()) };
        let is_probe = self.places.get(&token) == Some(&Place::InFlight { is_probe: true });
        let no_space = self.storage_is_full
            && (needs_space(request.operation()) || request.operation() == Operation::Flush && self.random.bool());
        let status = if no_space { Status::NoSpace } else { Status::Done };
        let answered = match self.admission.concerns(status) {
            true => self.admission.completed(request, status, self.now),
            false => Some((request, status)),
        };
        match answered {
            Some((request, status)) => {
                self.leave(request)?;
                self.space_found |= is_probe;
                self.admission.answered(1, Some(&self.log));
                match status == Status::NoSpace && !self.closed {
                    true => Err("a request that can wait for space is answered".into()),
                    false => Ok(()),
                }
            }
            None => {
                if is_probe || !self.waits_for_space() {
                    self.refused_at = Some(self.now);
                }
                self.places.insert(token, Place::Space);
                if no_space { Ok(()) } else { Err(format!("{token:?} is held, which is done")) }
            }
        }
    }

    /// Makes peers take back some of their requests.
    fn recall(&mut self) -> Result<(), String> {
        let some: Vec<Token> = self.places.keys().copied().filter(|_| self.random.u32(0..4) == 0).collect();
        self.wanted.extend(some);
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), String> {
        let wanted = self.wanted.clone();
        for Recalled { request, counted } in self.admission.recall(|token| wanted.contains(&token)) {
            let token = request.token();
            let was_counted = self.counted.contains_key(&token);
            if !self.wanted.contains(&token) || was_counted != counted {
                request.retire();
                return Err(format!("{token:?} is given back; counted: {counted}, {was_counted}"));
            }
            self.leave(request)?;
        }
        let held = self
            .places
            .iter()
            .find(|(token, place)| self.wanted.contains(token) && matches!(place, Place::Pace | Place::Space));
        held.map_or(Ok(()), |(token, place)| Err(format!("{token:?} is not given back: {place:?}")))
    }

    /// Publishes a random state of the other disk.
    fn publish_other(&mut self) {
        let Some((page, slot)) = &self.other else { return };
        let slot_now = Slot {
            in_flight: self.random.u32(0..8),
            waits: self.random.bool(),
            time: self.random.u64(0..1 << 36),
            answered: self.random.u64(0..100),
        };
        page.say(*slot, slot_now, 100);
    }

    fn set_limits(&mut self) {
        let limits = ["", "iops=100", "write-iops=10", "read-iops=1000,burst=1ms", "bandwidth=1M", "iops=100000"];
        let limits = limits[self.random.usize(0..limits.len())];
        let limits = if limits.is_empty() { Limits::default() } else { limits.parse().unwrap() };
        self.admission.limiter.set(limits, self.now);
    }

    fn may_have_space(&mut self) {
        self.admission.may_have_space();
        if !self.places.values().any(|place| *place == Place::InFlight { is_probe: true }) {
            self.refused_at = None;
        }
    }

    fn close(&mut self) -> Result<(), String> {
        self.closed = true;
        self.admission.close();
        self.release()?;
        match self.admission.held() {
            0 => Ok(()),
            // The one that is being retried.
            1 if self.waits_for_space() && !self.in_flight.is_empty() => Ok(()),
            held => Err(format!("{held} requests are held when the disk ends")),
        }
    }

    /// Advances the time to the deadline, or less. A deadline in the past requires that something can be done.
    fn wait(&mut self) -> Result<(), String> {
        self.admission.limiter.allot(self.in_flight.len(), self.now);
        let held = self.places.values().any(|place| matches!(place, Place::Pace | Place::Space));
        let least = self.now + self.random.u64(0..20 * MS);
        match self.admission.deadline(self.in_flight.len(), self.now) {
            Some(at) if at <= self.now => match self.release()? {
                0 => return Err("the deadline has come, and there is nothing to do".into()),
                _ => return Ok(()),
            },
            Some(at) if self.random.bool() || self.in_flight.is_empty() => self.now = at,
            None if held && self.in_flight.is_empty() => return Err("there is no deadline for what is held".into()),
            Some(_) | None => self.now = least,
        }
        self.release().map(drop)
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.u32(0..100) {
            0..35 => self.arrive()?,
            35..70 => self.complete()?,
            70..80 => self.wait()?,
            80..82 => self.recall()?,
            82..86 => self.set_limits(),
            86..92 => self.publish_other(),
            92..94 => self.storage_is_full = !self.storage_is_full,
            94..97 => self.may_have_space(),
            _ => self.peers = [Peers::Here, Peers::Here, Peers::Finishing, Peers::Gone][self.random.usize(0..4)],
        }
        self.release()?;
        self.admission.limiter.turned(0, self.in_flight.len(), self.now);
        Ok(())
    }

    fn live(&mut self) -> Result<(), String> {
        for _ in 0..self.random.usize(1..STEPS) {
            self.step()?;
        }
        if self.random.bool() {
            self.close()?;
        }
        self.storage_is_full = false;
        self.peers = Peers::Here;
        self.admission.limiter.set(Limits::default(), self.now);
        if let Some((page, slot)) = &self.other {
            page.say(*slot, Slot::default(), 100);
        }
        self.release()?;
        for _ in 0..10_000 {
            if self.places.is_empty() {
                return Ok(());
            }
            if self.in_flight.is_empty() {
                self.wait()?
            } else {
                self.complete()?
            }
            self.release()?;
        }
        Err(format!("{:?} do not leave", self.places))
    }
}

/// Runs one random history; returns the violated invariant.
fn explore(seed: u64) -> Result<(), String> {
    let mut world = World::new(seed);
    let lived = world.live();
    if lived.is_err() {
        // The unfinished requests would panic when dropped.
        std::mem::forget(world);
    }
    lived
}

/// The number of random histories.
const LIVES: u64 = 120;

#[test]
fn requests_pass_in_order_and_leave_once() {
    for seed in 0..LIVES {
        explore(seed).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    }
}

#[test]
fn every_planted_fault_is_found() {
    let all = [
        Planted::LimitsFlush,
        Planted::OvertakesProbe,
        Planted::KeepsRecalled,
        Planted::RetriesInThePast,
        Planted::IsAlwaysDue,
        Planted::TwoInQuarantine,
        Planted::RetriesOnlyTheFirst,
    ];
    for planted in all {
        PLANTED.set(Some(planted));
        let found = (0..LIVES).find_map(|seed| explore(seed).err());
        PLANTED.set(None);
        println!("{planted:?}: {}", found.unwrap_or_else(|| panic!("{planted:?} is not found")));
    }
}
