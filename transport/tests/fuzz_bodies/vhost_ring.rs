//! A driver that writes anything into its rings and its memory, at any time.
//!
//! Invariants checked: no panic; no more requests in flight than the ring has slots, counting ranges; stopping the
//! queue is always answered once the requests in flight have completed; the next front-end is served.
//!
//! Input: one byte of features (bit 2: a record of requests in flight is kept), then records of one byte and its
//! arguments (see `step`).

use std::os::fd::{AsFd, OwnedFd};

use memory::{Mapping, Shared};

use crate::vhost_mock::{Desc, EVENT_IDX, FLUSH, FrontEnd, GEOMETRY, REGION, TestBackend, VERSION_1, WRITE};

const SIZE: u16 = 16;

/// Runs one input.
pub fn run(data: &[u8]) {
    let mut input = Input { rest: data };
    let features_byte = input.byte();
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front_end = FrontEnd::connect(&machine.path());
    front_end.size = SIZE;
    let flush = if features_byte & 1 == 0 { FLUSH } else { 0 };
    let events = if features_byte & 2 == 0 { EVENT_IDX } else { 0 };
    let features = VERSION_1 | flush | events;
    let record = recorded(features_byte, features, &mut machine, &mut front_end);
    front_end.set_up(&mut machine, features, 1);

    while !input.rest.is_empty() {
        match input.byte() {
            // The connection is lost and reestablished.
            248.. => {
                machine.release();
                front_end.reconnect(&machine.path());
                machine.settle();
                machine.release();
                front_end.negotiate(&mut machine, features);
                if let Some((payload, file, _)) = &record {
                    front_end.expect(&mut machine, 32, payload, &[file.as_fd()], 0);
                }
                front_end.set_up(&mut machine, features, 0);
                let base = front_end.get_u16(front_end.used_at(0) + 2);
                front_end.start_queue(&mut machine, 0, base);
            }
            // Arbitrary bytes in the record.
            kind @ 240..248 => {
                let (at, value) = (usize::from(input.byte()) * 2, input.word());
                if let Some((.., record)) = &record {
                    let wide = [[0; 6].as_slice(), &value.to_le_bytes()].concat().try_into().unwrap();
                    let place = if kind % 2 == 0 { record.store_u16(at, value) } else { record.write::<8>(at, wide) };
                    place.unwrap_or_default();
                }
            }
            kind => step(kind, &mut input, &mut machine, &front_end),
        }
        assert!(machine.held.len() <= usize::from(SIZE) * 16, "{} requests in flight", machine.held.len());
    }

    // A queue can always be stopped.
    machine.hold = false;
    front_end.send(11, 0, &[0; 8], &[]);
    machine.settle();
    machine.release();
    machine.settle();
    assert!(front_end.reply(11).is_some(), "the queue does not stop");
    drop(front_end);
    let mut next = FrontEnd::connect(&machine.path());
    next.set_up(&mut machine, VERSION_1, 1);
    next.request(4, 0, &[]);
    machine.settle();
    assert_eq!(next.used(0, 0).len(), 1, "the next front-end is served");
}

/// Requests a record of requests in flight if the features byte selects it. Returns the message that sends it, its
/// file, and its contents.
fn recorded(
    byte: u8,
    features: u64,
    machine: &mut TestBackend,
    front_end: &mut FrontEnd,
) -> Option<(Vec<u8>, OwnedFd, Shared)> {
    if byte & 4 == 0 {
        return None;
    }
    front_end.negotiate(machine, features);
    let (payload, file) = front_end.request_region(machine, 1, SIZE);
    front_end.expect(machine, 32, &payload, &[file.as_fd()], 0);
    let record = Shared::of(Mapping::of_file(file.as_fd(), 0, 16 + 16 * usize::from(SIZE)).unwrap());
    Some((payload, file, record))
}

/// The next action of a driver, selected by the low three bits of a byte.
fn step(kind: u8, input: &mut Input<'_>, machine: &mut TestBackend, front_end: &FrontEnd) {
    match kind & 7 {
        // A mostly valid request: type, sector, length of the data in sectors.
        0 => {
            let (kind, sector, sectors) = (input.byte(), input.byte(), input.byte() % 16);
            let flags = if kind == 1 || kind > 10 { 0 } else { WRITE };
            front_end.request(u32::from(kind), u64::from(sector), &[(0x41000, u32::from(sectors) * 512, flags)]);
        }
        // A descriptor of the ring.
        1 => {
            let index = u16::from(input.byte()) % SIZE;
            front_end.describe(front_end.desc_at(0, index), input.descriptor());
        }
        // A descriptor in memory, for an indirect table, or the range of a discard.
        2 => {
            let index = u64::from(input.byte());
            front_end.describe(0x41000 + 16 * index, input.descriptor());
        }
        3 => front_end.offer(0, u16::from(input.byte())),
        4 => front_end.put(front_end.avail_at(0) + 2, &u16::from(input.byte()).to_le_bytes()),
        5 => machine.hold = !machine.hold,
        6 => machine.release(),
        // Arbitrary bytes near the ring and the requests.
        _ => {
            let at = u64::from(input.word()) * 16 % (REGION - 16);
            let bytes = [input.word(), input.word()].map(u16::to_le_bytes).concat();
            front_end.put(at, &bytes);
        }
    }
    machine.settle();
    machine.server.take_events();
}

struct Input<'a> {
    rest: &'a [u8],
}

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        *first
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Addresses mostly within memory, lengths mostly nonzero.
    fn descriptor(&mut self) -> Desc {
        let addr = u64::from(self.word()) * 16;
        let addr = if addr < 0xf_0000 { addr } else { u64::MAX - addr };
        let len = u32::from(self.word());
        let flags = u16::from(self.byte() & 7);
        Desc { addr, len, flags, next: u16::from(self.byte()) % (SIZE + 1) }
    }
}
