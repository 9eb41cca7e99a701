//! Requests that are unanswered when a ring, a connection or the process ends, with and without a record of requests in
//! flight; and invalid contents of such a record.
//!
//! `vhost_user::model` explores all kill points for lost and repeated requests.

use std::os::fd::{AsFd, OwnedFd};

use disk::Operation;
use memory::{Mapping, Shared};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use transport::{Server as _, TakeBack as _};

use crate::vhost_mock::{
    Desc, FLUSH, FrontEnd, GEOMETRY, INDIRECT, NEXT, PROTOCOL, REGION, TestBackend, VERSION_1, WRITE, region_for,
};

const FEATURES: u64 = VERSION_1 | FLUSH;
const SIZE: u16 = 16;
/// Descriptors that fit into a record, unless more are requested.
const ROOM: u16 = 1024;
const QUEUE_LEN: u64 = queue_len(ROOM);
const DATA: u64 = 0x41000;

/// Size of one queue's record.
const fn queue_len(descriptors: u16) -> u64 {
    (16 + 16 * descriptors as u64).next_multiple_of(64)
}

/// A back-end and a front-end with a record of requests in flight.
struct RecordedFixture {
    machine: TestBackend,
    front: FrontEnd,
    payload: Vec<u8>,
    file: OwnedFd,
    /// The contents of the file.
    record: Shared,
}

fn recorded() -> RecordedFixture {
    let mut machine = TestBackend::new(GEOMETRY, 2);
    let mut front = FrontEnd::connect(&machine.path());
    front.negotiate(&mut machine, FEATURES);
    let (payload, file) = front.request_region(&mut machine, 2, SIZE);
    let record = Shared::of(Mapping::of_file(file.as_fd(), 0, 2 * QUEUE_LEN as usize).unwrap());
    front.expect(&mut machine, 32, &payload, &[file.as_fd()], 0);
    front.set_up(&mut machine, FEATURES, 1);
    RecordedFixture { machine, front, payload, file, record }
}

/// A recorded fixture with four writes taken, of which the third is completed but not published.
fn one_of_four_done() -> RecordedFixture {
    let mut fixture = recorded();
    fixture.machine.hold = true;
    fixture.offer_writes(0..4);
    fixture.machine.settle();
    answer(&mut fixture.machine, 2);
    fixture
}

impl RecordedFixture {
    /// Kills the process and starts another one, to which the front-end reconnects.
    fn kill(&mut self) {
        let bytes = std::mem::take(&mut self.machine.bytes);
        self.machine = {
            let directory = self.machine.directory.take();
            let path = directory.as_ref().unwrap().path().join("disk.sock");
            self.machine.server.stop(&mut self.machine.watch);
            let mut machine = TestBackend::at(&path, GEOMETRY, 2);
            machine.directory = directory;
            machine
        };
        self.machine.bytes = bytes;
        self.front.reconnect(&self.machine.path());
    }

    /// Negotiates after a reconnection, sends the record and starts queue 0.
    fn resume(&mut self) {
        self.front.negotiate(&mut self.machine, FEATURES);
        self.front.expect(&mut self.machine, 32, &self.payload, &[self.file.as_fd()], 0);
        let base = self.front.get_u16(self.front.used_at(0) + 2);
        self.start(base);
    }

    fn start(&mut self, base: u16) {
        self.front.set_up(&mut self.machine, FEATURES, 0);
        self.front.start_queue(&mut self.machine, 0, base);
    }

    /// Submits writes of one sector each, with heads 0, 3, 6 …
    fn offer_writes(&self, heads: std::ops::Range<u16>) {
        heads.for_each(|index| offer_write(&self.front, index));
    }

    fn state(&self, head: u16) -> [u8; 16] {
        self.record.read(16 + 16 * usize::from(head)).unwrap()
    }

    fn put_state(&self, head: u16, inflight: u8, counter: u64) {
        let mut bytes = [0; 16];
        bytes[0] = inflight;
        bytes[8..].copy_from_slice(&counter.to_le_bytes());
        self.record.write(16 + 16 * usize::from(head), bytes).unwrap();
    }
}

fn offer_write(front: &FrontEnd, index: u16) {
    offer_write_at(front, index, 3 * index);
}

fn offer_write_at(front: &FrontEnd, index: u16, head: u16) {
    let header = 0x40000 + 0x100 * u64::from(index);
    front.header(header, 1, u64::from(index));
    front.put(DATA + 512 * u64::from(index), &[index as u8 + 1; 512]);
    front.put(header + 0x80, &[0xff]);
    let parts = [(header, 16, 0), (DATA + 512 * u64::from(index), 512, 0), (header + 0x80, 1, WRITE)];
    front.chain(0, head, &parts);
    front.offer(0, head);
}

/// The sectors of held requests, in order.
fn held(machine: &TestBackend) -> Vec<u64> {
    machine.held.iter().map(|request| request.span().at / 512).collect()
}

/// Completes the held request at this position in the queue.
fn answer(machine: &mut TestBackend, index: usize) {
    let request = machine.held.remove(index);
    let at = request.span().at.0 as usize;
    if let Operation::Write { .. } = request.operation() {
        let bytes = request.memory().to_vec();
        machine.bytes[at..at + bytes.len()].copy_from_slice(&bytes);
    }
    use disk::Transport as _;
    machine.server.complete(request, disk::Status::Done);
}

fn publish(machine: &mut TestBackend) {
    use disk::Transport as _;
    machine.server.publish().unwrap();
}

fn heads(front: &FrontEnd) -> Vec<u32> {
    front.used(0, 0).iter().map(|&(head, _)| head).collect()
}

#[test]
fn the_record_has_the_specified_layout_and_a_sealed_size() {
    let mut fixture = recorded();
    assert_eq!(fixture.payload[..8], (2 * QUEUE_LEN).to_ne_bytes());
    assert_eq!(
        fixture.payload[8..],
        [0u64.to_ne_bytes().to_vec(), [2, SIZE, 0, 0].map(u16::to_ne_bytes).concat()].concat()
    );
    assert!(ftruncate(&fixture.file, 0).is_err() && ftruncate(&fixture.file, 1 << 20).is_err(), "sealed");
    let room = (QUEUE_LEN as u16 - 16) / 16;
    assert_eq!((fixture.record.load_u16(8), fixture.record.load_u16(10)), (Some(1), Some(room)), "version, desc_num");
    fixture.machine.hold = true;
    fixture.offer_writes(0..3);
    fixture.machine.settle();
    for (head, counter) in [(0, 0), (3, 1), (6, 2u64)] {
        assert_eq!(fixture.state(head)[..6], [1, 0, 0, 0, 0, 0], "in flight");
        assert_eq!(fixture.state(head)[8..], counter.to_le_bytes());
    }
    answer(&mut fixture.machine, 1);
    answer(&mut fixture.machine, 0);
    assert_eq!(fixture.state(3)[0], 1, "in flight until its answer is published");
    publish(&mut fixture.machine);
    assert_eq!(heads(&fixture.front), [3, 0], "in the order of completion");
    assert_eq!([fixture.state(0)[0], fixture.state(3)[0], fixture.state(6)[0]], [0, 0, 1]);
    assert_eq!(fixture.state(0)[6..8], 3u16.to_le_bytes(), "next");
    assert_eq!(
        (fixture.record.load_u16(12), fixture.record.load_u16(14)),
        (Some(0), Some(2)),
        "last_batch_head, used_idx"
    );
}

#[test]
fn a_successor_takes_requests_in_flight_first_and_in_order() {
    let mut fixture = one_of_four_done();
    publish(&mut fixture.machine);
    answer(&mut fixture.machine, 0);
    fixture.kill();
    fixture.machine.hold = true;
    fixture.offer_writes(4..5);
    fixture.resume();
    assert_eq!(held(&fixture.machine), [0, 1, 3, 4]);
    let events = fixture.machine.events();
    assert!(events.contains("survive a crash") && events.contains("continues with 3 requests"), "{events}");
    assert_eq!(fixture.machine.server.records_in_flight(), Some(true));
    fixture.machine.release();
    assert_eq!(heads(&fixture.front), [6, 0, 3, 9, 12]);
    assert_eq!(fixture.machine.bytes[3 * 512], 4);
}

/// QEMU requests `queue-size` descriptors, and the same number when it reconnects, but lets the driver choose a larger
/// ring: QEMU 10 requests 128, SeaBIOS 1.16.3 uses a ring of 256, Linux one of 1024.
#[test]
fn a_ring_larger_than_requested_is_recorded_and_taken_over() {
    for size in [256, ROOM] {
        let mut fixture = recorded();
        fixture.kill();
        fixture.front.size = size;
        fixture.resume();
        assert_eq!(fixture.machine.server.records_in_flight(), Some(true), "{size}: {}", fixture.machine.events());
        fixture.machine.hold = true;
        let heads = [0, size - 3, SIZE];
        (0..).zip(heads).for_each(|(index, head)| offer_write_at(&fixture.front, index, head));
        fixture.machine.settle();
        answer(&mut fixture.machine, 2);
        publish(&mut fixture.machine);
        assert_eq!(heads.map(|head| fixture.state(head)[0]), [1, 1, 0]);
        fixture.kill();
        fixture.machine.hold = true;
        fixture.resume();
        assert_eq!(held(&fixture.machine), [0, 1], "{size}: {}", fixture.machine.events());
        fixture.machine.release();
        assert_eq!(
            fixture.front.used(0, 0).iter().map(|&(head, _)| head).collect::<Vec<_>>(),
            [16, 0, u32::from(size) - 3]
        );
    }
}

#[test]
fn a_record_has_room_for_the_requested_number_of_descriptors() {
    let mut machine = TestBackend::new(GEOMETRY, 2);
    let mut front = FrontEnd::connect(&machine.path());
    front.negotiate(&mut machine, FEATURES);
    for (queues, requested, room) in [(1, 1, ROOM), (2, ROOM, ROOM), (2, ROOM + 1, ROOM + 1), (1, 32768, 32768)] {
        let (payload, file) = front.request_region(&mut machine, queues, requested);
        let len = u64::from(queues) * queue_len(room);
        assert_eq!(payload, region_for(len, 0, queues, requested));
        front.expect(&mut machine, 32, &payload, &[file.as_fd()], 0);
    }
}

/// The record is from a process that creates records no larger than requested.
#[test]
fn a_record_without_room_to_spare_is_taken_over() {
    let old_len = queue_len(SIZE) as usize;
    let file = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * old_len as u64).unwrap();
    let record = Shared::of(Mapping::of_file(file.as_fd(), 0, 2 * old_len).unwrap());
    for (at, value) in [(8, 1), (10, SIZE), (14, 0)] {
        record.store_u16(old_len + at, value).unwrap();
    }
    for (head, counter) in [(6u16, 4u8), (0, 5)] {
        let at = old_len + 16 + 16 * usize::from(head);
        record.write(at, [1, 0, 0, 0, 0, 0, 0, 0, counter, 0, 0, 0, 0, 0, 0, 0]).unwrap();
    }
    for (size, expected) in [(SIZE, true), (SIZE * 2, false)] {
        let mut machine = TestBackend::new(GEOMETRY, 2);
        let mut front = FrontEnd::connect(&machine.path());
        front.size = size;
        front.negotiate(&mut machine, FEATURES);
        let payload = region_for(2 * old_len as u64, 0, 2, SIZE);
        front.expect(&mut machine, 32, &payload, &[file.as_fd()], 0);
        machine.hold = true;
        front.set_up(&mut machine, FEATURES, 0);
        for (index, head) in [(1, 0), (2, 6)] {
            let header = 0x40000 + 0x100 * index;
            front.header(header, 1, index);
            front.chain(1, head, &[(header, 16, 0), (DATA, 512, 0), (header + 0x80, 1, WRITE)]);
            front.offer(1, head);
        }
        front.start_queue(&mut machine, 1, 0);
        assert_eq!(machine.server.records_in_flight(), Some(expected), "{}", machine.events());
        assert_eq!(held(&machine), if expected { [2, 1] } else { [1, 2] }, "{}", machine.events());
    }
}

#[test]
fn a_record_of_another_size_is_refused_and_changes_nothing() {
    let mut fixture = recorded();
    fixture.kill();
    fixture.front.negotiate(&mut fixture.machine, FEATURES);
    let record_len = 2 * QUEUE_LEN;
    let cases = [
        (region_for(record_len - 1, 0, 2, ROOM), "are needed"),
        (region_for(2 * queue_len(SIZE) - 1, 0, 2, SIZE), "are needed"),
        (region_for(record_len + 1, 0, 2, SIZE), "are needed"),
        (region_for(2 * queue_len(SIZE), record_len, 2, SIZE), "are needed"),
        (region_for(record_len, 4096, 2, SIZE), "are needed"),
        (region_for(record_len, u64::MAX - 100, 2, SIZE), "are needed"),
        (region_for(u64::MAX, 1, 2, SIZE), "are needed"),
        (region_for(record_len, 0, 2, ROOM * 2), "are needed"),
        (region_for(record_len, 0, 3, SIZE), "do not match this disk"),
        (region_for(record_len, 0, 0, SIZE), "do not match this disk"),
        (region_for(record_len, 0, 1, 0), "do not match this disk"),
        (region_for(record_len, 0, u16::MAX, u16::MAX), "do not match this disk"),
    ];
    for (payload, why) in cases {
        fixture.front.expect(&mut fixture.machine, 32, &payload, &[fixture.file.as_fd()], 1);
        let events = fixture.machine.events();
        assert!(events.contains(why), "{events}");
    }
    let (pipe, _other) = rustix::pipe::pipe().unwrap();
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload, &[pipe.as_fd()], 1);
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload, &[], 1);
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload[..19], &[fixture.file.as_fd()], 1);
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload[..20], &[fixture.file.as_fd()], 0);
    fixture.start(0);
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload, &[fixture.file.as_fd()], 1);
    assert!(fixture.machine.events().contains("queue 0 is running"));
}

/// The record is from a later version, which stores its records elsewhere (decision 0016).
#[test]
fn a_record_with_an_unknown_layout_is_refused_and_not_modified() {
    let mut fixture = one_of_four_done();
    publish(&mut fixture.machine);
    fixture.kill();
    fixture.record.write(0, 1u64.to_le_bytes()).unwrap();
    let bytes: [u8; 4096] = fixture.record.read(0).unwrap();
    fixture.front.negotiate(&mut fixture.machine, FEATURES);
    fixture.front.expect(&mut fixture.machine, 32, &fixture.payload, &[fixture.file.as_fd()], 1);
    let events = fixture.machine.events();
    assert!(events.contains("unknown (features 0x1): it was created by a newer version"), "{events}");
    // QEMU does not check the reply: it must not continue without a record.
    fixture.front.send(32, 0, &fixture.payload, &[fixture.file.as_fd()]);
    fixture.machine.settle();
    assert!(fixture.front.is_closed());
    assert!(fixture.record.read(0) == Some(bytes), "the record must not be written to");

    // A version that knows the layout takes it over.
    fixture.record.write(0, [0; 8]).unwrap();
    fixture.kill();
    fixture.machine.hold = true;
    fixture.resume();
    assert_eq!(held(&fixture.machine), [0, 1, 3], "{}", fixture.machine.events());
}

#[test]
fn a_record_of_an_unknown_version_is_kept_even_for_a_larger_ring() {
    for size in [SIZE, SIZE * 2] {
        let mut fixture = recorded();
        fixture.kill();
        let small = region_for(2 * queue_len(SIZE), 0, 2, SIZE);
        fixture.record.store_u16(8, 7).unwrap();
        fixture.front.size = size;
        fixture.front.negotiate(&mut fixture.machine, FEATURES);
        fixture.front.expect(&mut fixture.machine, 32, &small, &[fixture.file.as_fd()], 0);
        fixture.front.set_up(&mut fixture.machine, FEATURES, 0);
        fixture.front.start_queue(&mut fixture.machine, 0, 0);
        let events = fixture.machine.events();
        assert!(events.contains("its version is 7"), "{size}: {events}");
        assert_eq!((fixture.record.load_u16(8), fixture.machine.server.records_in_flight()), (Some(7), None), "{size}");
    }
}

#[test]
fn a_record_can_be_requested_only_if_negotiated() {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front = FrontEnd::connect(&machine.path());
    front.send(2, 0, &(FEATURES | PROTOCOL).to_ne_bytes(), &[]);
    front.send(16, 0, &(1u64 << 3).to_ne_bytes(), &[]);
    let file = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    front.expect(&mut machine, 32, &region_for(4096, 0, 1, SIZE), &[file.as_fd()], 1);
    front.send(31, 0, &region_for(0, 0, 1, SIZE), &[]);
    machine.settle();
    assert!(front.is_closed());
    for (queues, size) in [(2, SIZE), (0, SIZE), (1, 0), (u16::MAX, u16::MAX)] {
        front.reconnect(&machine.path());
        front.negotiate(&mut machine, FEATURES);
        front.send(31, 0, &region_for(0, 0, queues, size), &[]);
        machine.settle();
        assert!(front.is_closed(), "{queues} queues of {size}");
    }
}

/// The message about a damaged record, and the function that damages it as the front-end.
type RecordDamage<'a> = (&'a str, &'a dyn Fn(&RecordedFixture));

#[test]
fn a_damaged_record_breaks_only_its_own_queue_and_the_reason_is_logged() {
    let damages: [RecordDamage; 9] = [
        ("version is 7", &|fixture| fixture.record.store_u16(8, 7).unwrap()),
        ("it has 3 descriptors", &|fixture| fixture.record.store_u16(10, 3).unwrap()),
        ("it has 65535 descriptors", &|fixture| fixture.record.store_u16(10, u16::MAX).unwrap()),
        ("used index is 65000; the ring's is 1", &|fixture| {
            fixture.record.store_u16(14, 65000).unwrap();
            fixture.put_state(3, 1, 1);
        }),
        ("it contains the invalid descriptor 16", &|fixture| {
            fixture.record.store_u16(14, 0).unwrap();
            fixture.record.store_u16(12, SIZE).unwrap();
        }),
        ("state of descriptor 2 is invalid", &|fixture| fixture.put_state(2, 2, 9)),
        ("two requests have the counter 9", &|fixture| (5..7).for_each(|head| fixture.put_state(head, 1, 9))),
        ("two requests have the counter 18446744073709551615", &|fixture| fixture.put_state(2, 1, u64::MAX)),
        ("it has 16 requests; the driver waits for 0", &|fixture| {
            (0..SIZE).for_each(|head| fixture.put_state(head, 1, u64::from(head)))
        }),
    ];
    for (what, damage) in damages {
        let mut fixture = recorded();
        fixture.offer_writes(0..1);
        fixture.machine.settle();
        fixture.kill();
        damage(&fixture);
        fixture.resume();
        fixture.machine.settle();
        let events = fixture.machine.events();
        assert!(events.contains("queue 0 is broken") && events.contains(what), "{what}: {events}");
        fixture.offer_writes(1..2);
        fixture.machine.settle();
        assert_eq!(fixture.front.used(0, 0).len(), 1, "{what}: the broken queue is not accessed");
        fixture.front.start_queue(&mut fixture.machine, 1, 0);
        fixture.front.header(0x4f000, 4, 0);
        fixture.front.chain(1, 0, &[(0x4f000, 16, 0), (0x4f080, 1, WRITE)]);
        fixture.front.offer(1, 0);
        fixture.machine.settle();
        assert_eq!(fixture.front.used(1, 0).len(), 1, "{what}: the other queue still works");
    }
}

#[test]
fn an_inconsistent_index_matters_only_if_requests_are_in_flight() {
    let mut fixture = recorded();
    fixture.offer_writes(0..2);
    fixture.machine.settle();
    fixture.kill();
    fixture.record.store_u16(14, 65000).unwrap();
    fixture.resume();
    fixture.offer_writes(2..3);
    fixture.machine.settle();
    assert_eq!((heads(&fixture.front), fixture.record.load_u16(14)), (vec![0, 3, 6], Some(3)));
}

#[test]
fn changes_to_the_record_while_a_ring_runs_are_ignored() {
    let mut fixture = recorded();
    fixture.machine.hold = true;
    fixture.offer_writes(0..4);
    fixture.machine.settle();
    for at in (0..QUEUE_LEN as usize).step_by(8) {
        fixture.record.write(at, [0xff; 8]).unwrap();
    }
    fixture.machine.release();
    assert_eq!(heads(&fixture.front), [0, 3, 6, 9]);
    assert_eq!(fixture.machine.events().matches("broken").count(), 0);
}

#[test]
fn a_record_shared_by_two_disks_harms_neither_process() {
    let mut fixture = recorded();
    let mut other = recorded();
    other.kill();
    (other.payload, other.file) = (fixture.payload.clone(), fixture.file.try_clone().unwrap());
    other.resume();
    for round in 0..3 {
        fixture.offer_writes(round..round + 1);
        other.offer_writes(round..round + 1);
        fixture.machine.settle();
        other.machine.settle();
    }
    assert_eq!((heads(&fixture.front), heads(&other.front)), (vec![0, 3, 6], vec![0, 3, 6]));
    fixture.kill();
    fixture.resume();
    other.kill();
    other.resume();
    assert!(fixture.machine.server.is_connected() && other.machine.server.is_connected());
}

#[test]
fn only_a_ring_larger_than_its_record_is_served_in_order() {
    for (size, is_recorded) in [(SIZE / 2, true), (SIZE * 2, true), (ROOM * 2, false)] {
        let mut fixture = recorded();
        fixture.kill();
        fixture.front.size = size;
        fixture.resume();
        assert_eq!(fixture.machine.server.records_in_flight(), Some(is_recorded), "{}", fixture.machine.events());
        fixture.machine.hold = true;
        fixture.offer_writes(0..2);
        fixture.machine.settle();
        answer(&mut fixture.machine, 1);
        publish(&mut fixture.machine);
        assert_eq!(heads(&fixture.front), if is_recorded { vec![3] } else { vec![] });
        fixture.machine.release();
        assert_eq!(heads(&fixture.front), if is_recorded { vec![3, 0] } else { vec![0, 3] });
    }
}

#[test]
fn the_record_of_another_ring_is_cleared_by_a_larger_one() {
    let mut fixture = recorded();
    fixture.machine.hold = true;
    fixture.offer_writes(0..1);
    fixture.machine.settle();
    fixture.kill();
    let used = fixture.front.get_u16(fixture.front.used_at(0) + 2);
    for size in [ROOM * 2, SIZE] {
        fixture.front.size = size;
        fixture.front.negotiate(&mut fixture.machine, FEATURES);
        fixture.front.expect(&mut fixture.machine, 32, &fixture.payload, &[fixture.file.as_fd()], 0);
        // Its driver initialises each ring.
        for at in [fixture.front.avail_at(0) + 2, fixture.front.used_at(0) + 2] {
            fixture.front.put(at, &used.to_ne_bytes());
        }
        fixture.start(used);
        fixture.offer_writes(0..1);
        fixture.machine.settle();
        assert_eq!(fixture.front.used(0, used).len(), 1, "{size}: {}", fixture.machine.events());
        fixture.kill();
    }
}

#[test]
fn a_reset_clears_requests_in_flight() {
    let mut fixture = recorded();
    fixture.machine.hold = true;
    fixture.offer_writes(0..1);
    fixture.machine.settle();
    fixture.front.send(34, 8, &[], &[]);
    fixture.machine.settle();
    fixture.machine.server.give_back(fixture.machine.held.pop().unwrap());
    publish(&mut fixture.machine);
    fixture.machine.settle();
    assert_eq!(fixture.front.reply(34).unwrap(), [0; 8]);
    // The driver initialises its ring.
    for at in [fixture.front.avail_at(0) + 2, fixture.front.used_at(0) + 2] {
        fixture.front.put(at, &[0; 2]);
    }
    fixture.front.start_queue(&mut fixture.machine, 0, 0);
    assert!(held(&fixture.machine).is_empty());
    fixture.offer_writes(1..2);
    fixture.machine.settle();
    assert_eq!(held(&fixture.machine), [1]);
}

/// A front-end without a record, with four writes taken.
fn unrecorded() -> (TestBackend, FrontEnd) {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front = FrontEnd::connect(&machine.path());
    front.set_up(&mut machine, FEATURES, 1);
    machine.hold = true;
    (0..4).for_each(|index| offer_write(&front, index));
    machine.settle();
    (machine, front)
}

#[test]
fn without_a_record_requests_are_answered_in_order() {
    let (mut machine, front) = unrecorded();
    assert!(machine.events().contains("requests are answered in order"));
    assert_eq!(machine.server.records_in_flight(), Some(false));
    answer(&mut machine, 2);
    answer(&mut machine, 1);
    publish(&mut machine);
    assert!(heads(&front).is_empty());
    answer(&mut machine, 0);
    publish(&mut machine);
    assert_eq!(heads(&front), [0, 3, 6]);
}

#[test]
fn without_a_record_the_used_index_determines_what_was_answered() {
    let (mut machine, mut front) = unrecorded();
    answer(&mut machine, 0);
    publish(&mut machine);
    // The front-end has read the used index before that, and reconnects with the value it has seen.
    front.stream.shutdown(std::net::Shutdown::Both).unwrap();
    machine.settle();
    machine.release();
    front.reconnect(&machine.path());
    front.set_up(&mut machine, FEATURES, 1);
    assert_eq!(held(&machine), [1, 2, 3], "unanswered requests, once");
    machine.release();
    assert_eq!(heads(&front), [0, 3, 6, 9]);
}

#[test]
fn a_queue_with_waiting_requests_stops_at_once() {
    let (mut machine, mut front) = unrecorded();
    answer(&mut machine, 0);
    answer(&mut machine, 1);
    assert!(!machine.held.iter().any(|request| machine.server.recalls(request.token())));
    front.send(11, 0, &[0; 8], &[]);
    machine.settle();
    assert!(machine.held.iter().all(|request| machine.server.recalls(request.token())));
    assert!(front.reply(11).is_none(), "requests in flight must be waited for");
    for request in std::mem::take(&mut machine.held) {
        machine.server.give_back(request);
    }
    publish(&mut machine);
    machine.settle();
    assert_eq!(front.reply(11).unwrap()[4..], 1u32.to_ne_bytes(), "the first unanswered request");
    assert_eq!(heads(&front), [0]);
    front.start_queue(&mut machine, 0, 1);
    assert_eq!(held(&machine), [1, 2, 3]);
    machine.release();
    assert_eq!(heads(&front), [0, 3, 6, 9]);
}

#[test]
fn with_a_record_requests_given_back_stay_in_flight() {
    let mut fixture = one_of_four_done();
    fixture.front.send(11, 0, &[0; 8], &[]);
    fixture.machine.settle();
    for request in std::mem::take(&mut fixture.machine.held) {
        fixture.machine.server.give_back(request);
    }
    publish(&mut fixture.machine);
    fixture.machine.settle();
    assert_eq!(fixture.front.reply(11).unwrap()[4..], 4u32.to_ne_bytes());
    assert_eq!((heads(&fixture.front), fixture.state(0)[0], fixture.state(6)[0]), (vec![6], 1, 0));
    fixture.front.start_queue(&mut fixture.machine, 0, 4);
    assert_eq!(held(&fixture.machine), [0, 1, 3]);
    fixture.machine.release();
    assert_eq!(heads(&fixture.front), [6, 0, 3, 9]);
}

#[test]
fn the_next_front_end_is_accepted_once_waiting_requests_are_given_back() {
    let (mut machine, front) = unrecorded();
    drop(front);
    let mut next = FrontEnd::connect(&machine.path());
    machine.settle();
    assert_eq!(machine.server.peers(), 0);
    for request in std::mem::take(&mut machine.held) {
        assert!(machine.server.recalls(request.token()));
        machine.server.give_back(request);
    }
    machine.hold = false;
    machine.settle();
    next.set_up(&mut machine, FEATURES, 1);
    assert_eq!(machine.server.peers(), 1);
}

/// They are answered once the memory is mapped again. A regression test.
#[test]
fn completions_wait_while_the_memory_of_their_ring_is_removed() {
    for is_recorded in [true, false] {
        let (mut machine, mut front) = if is_recorded {
            let mut fixture = recorded();
            fixture.machine.hold = true;
            fixture.offer_writes(0..4);
            fixture.machine.settle();
            (fixture.machine, fixture.front)
        } else {
            unrecorded()
        };
        for done in [1, 2] {
            let region = front.region(0);
            front.expect(&mut machine, 38, &region, &[], 0);
            for _ in 0..done {
                answer(&mut machine, 0);
            }
            publish(&mut machine);
            let file = rustix::io::dup(&front.files[0]).unwrap();
            front.expect(&mut machine, 37, &region, &[file.as_fd()], 0);
        }
        machine.release();
        assert_eq!(heads(&front), [0, 3, 6, 9]);
        assert!(FrontEnd::signalled(&front.calls[0]) > 0);
    }
}

#[test]
fn a_request_waits_if_any_part_of_its_memory_was_removed() {
    // In the second region; the third parts are the status and, in the last case, a table of descriptors.
    let far = REGION + 0x1000;
    let [header, data, status] = [0x40000, 0x41000, 0x40100];
    for (header, data, status, is_indirect) in [
        (far, data, status, false),
        (header, far, status, false),
        (header, data, far, false),
        (header, data, status, true),
    ] {
        let mut machine = TestBackend::new(GEOMETRY, 1);
        let mut front = FrontEnd::connect(&machine.path());
        front.set_up(&mut machine, FEATURES, 1);
        let region = front.region(1);
        front.header(header, 1, 0);
        front.put(data, &[7; 512]);
        let parts = [(header, 16, 0), (data, 512, 0), (status, 1, WRITE)];
        if is_indirect {
            for (index, &(addr, len, flags)) in (0u16..).zip(&parts) {
                let flags = if index < 2 { flags | NEXT } else { flags };
                front.describe(far + 16 * u64::from(index), Desc { addr, len, flags, next: index + 1 });
            }
            front.chain(0, 0, &[(far, 48, INDIRECT)]);
        } else {
            front.chain(0, 0, &parts);
        }
        front.expect(&mut machine, 38, &region, &[], 0);
        front.offer(0, 0);
        machine.settle();
        assert!(heads(&front).is_empty());
        let file = rustix::io::dup(&front.files[1]).unwrap();
        front.expect(&mut machine, 37, &region, &[file.as_fd()], 0);
        assert_eq!((heads(&front), front.get(status, 1)), (vec![0], vec![0]));
        assert_eq!(machine.bytes[..512], [7; 512]);
    }
}

#[test]
fn requests_of_a_mebibyte_use_guest_memory_in_place() {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front = FrontEnd::connect(&machine.path());
    front.size = 1024;
    front.set_up(&mut machine, FEATURES, 1);
    machine.hold = true;
    // 256 requests with data in both regions.
    for index in 0..256 {
        front.header(0x40000, 0, 0);
        front.chain(0, 4 * index, &[(0x40000, 16, 0), (0x41000, 0xbf000, WRITE), (0x40800, 1, WRITE)]);
        front.offer(0, 4 * index);
    }
    machine.settle();
    assert_eq!(machine.held.len(), 256);
    let (guest, parts) = (front.memory.clone(), &machine.held);
    assert_eq!(guest.regions().len(), 2);
    assert!(parts.iter().all(|request| request.memory().len() == 0xbf000 && request.memory().parts().len() <= 2));
    machine.release();
    assert_eq!(front.used(0, 0).len(), 256);
}
