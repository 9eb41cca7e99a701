//! Contents of a driver's rings, and their effects.

use disk::{Geometry, Operation, Status};
use transport::Server as _;

use crate::vhost_mock::{
    Desc, EVENT_IDX, FLUSH, FrontEnd, GEOMETRY, INDIRECT, NEXT, REGION, TestBackend, VERSION_1, WRITE,
};

const FEATURES: u64 = VERSION_1 | FLUSH;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;
const UNANSWERED: u8 = 0xff;

const DATA: u64 = 0x41000;
const STATUS: u64 = 0x40100;
const HEADER: u64 = 0x40000;

fn ready(geometry: Geometry, features: u64, queues: u16) -> (TestBackend, FrontEnd) {
    let mut machine = TestBackend::new(geometry, queues);
    let mut front_end = FrontEnd::connect(&machine.path());
    front_end.set_up(&mut machine, features, queues);
    machine.events();
    // Each queue is signalled once when it starts, because an earlier signal may have been lost.
    assert!(front_end.calls.iter().all(|call| FrontEnd::signalled(call) == 1));
    (machine, front_end)
}

/// Runs one request on a new back-end; returns its status and the used elements.
fn run(kind: u32, sector: u64, data: &[(u64, u32, u16)]) -> (u8, Vec<(u32, u32)>) {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    front_end.request(kind, sector, data);
    machine.settle();
    (front_end.status(), front_end.used(0, 0))
}

/// The message about a protocol violation, and the function that commits it as the driver.
type Violation<'a> = (&'a str, &'a dyn Fn(&FrontEnd));

/// Lets a driver violate the protocol on queue 0 of two; returns the logged events.
fn violate(write: impl Fn(&FrontEnd)) -> String {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 2);
    front_end.header(HEADER, 0, 0);
    front_end.put(STATUS, &[UNANSWERED]);
    write(&front_end);
    machine.settle();
    let events = machine.events();
    assert_eq!(front_end.used(0, 0), [], "{events}");
    assert_eq!(FrontEnd::signalled(&front_end.errs[0]), 1, "signalled at the error fd");

    front_end.header(HEADER, 0, 0);
    front_end.chain(1, 0, &[(HEADER, 16, 0), (DATA, 512, WRITE), (STATUS, 1, WRITE)]);
    front_end.offer(1, 0);
    machine.settle();
    assert_eq!(front_end.used(1, 0), [(0, 513)], "the other queue still works");
    assert_eq!(machine.events(), "", "it is logged once");
    events
}

#[test]
fn a_read_fills_memory_and_counts_the_bytes() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    machine.bytes[512..1536].copy_from_slice(&[7; 1024]);
    front_end.request(0, 1, &[(DATA, 512, WRITE), (DATA + 8192, 512, WRITE)]);
    machine.settle();
    assert_eq!((front_end.status(), front_end.used(0, 0)), (OK, vec![(0, 1025)]));
    assert_eq!(front_end.get(DATA, 513), [vec![7; 512], vec![0]].concat());
    assert_eq!(front_end.get(DATA + 8192, 512), [7; 512]);
    assert_eq!(machine.seen.len(), 1, "one request, however many segments");
}

#[test]
fn a_request_may_cross_regions() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    let at = REGION - 700;
    front_end.put(at, &[9; 4096]);
    front_end.request(1, 8, &[(at, 4096, 0)]);
    machine.settle();
    assert_eq!((front_end.status(), front_end.used(0, 0)), (OK, vec![(0, 1)]));
    assert_eq!(machine.bytes[4096..8192], [9; 4096]);
}

#[test]
fn descriptors_may_be_split_anywhere() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    front_end.header(HEADER, 0, 0);
    machine.bytes[..512].fill(5);
    // The header in three parts, one of them empty; the status after the data in one descriptor.
    let parts = [(HEADER, 3, 0), (HEADER, 0, 0), (HEADER + 3, 13, 0), (DATA, 512 + 1, WRITE)];
    front_end.chain(0, 0, &parts);
    front_end.put(DATA + 512, &[UNANSWERED]);
    front_end.offer(0, 0);
    machine.settle();
    assert_eq!(front_end.used(0, 0), [(0, 513)]);
    assert_eq!(front_end.get(DATA, 513), [vec![5; 512], vec![OK]].concat());
}

#[test]
fn an_indirect_table_is_followed() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    machine.bytes[..512].fill(5);
    front_end.header(HEADER, 0, 0);
    let table = REGION - 24; // Its second descriptor crosses regions.
    front_end.describe(table, Desc { addr: HEADER, len: 16, flags: NEXT, next: 1 });
    front_end.describe(table + 16, Desc { addr: DATA, len: 512, flags: NEXT | WRITE, next: 2 });
    front_end.describe(table + 32, Desc { addr: STATUS, len: 1, flags: WRITE, next: 0 });
    front_end.chain(0, 3, &[(table, 48, INDIRECT)]);
    front_end.offer(0, 3);
    machine.settle();
    assert_eq!(front_end.used(0, 0), [(3, 513)]);
    assert_eq!(front_end.get(DATA, 512), [5; 512]);
}

#[test]
fn invalid_requests_are_answered() {
    let word = |at: u64, len: u32, flags: u16| vec![(at, len, flags)];
    let cases = [
        ("unknown type", 99, 0, word(DATA, 512, WRITE), UNSUPP),
        ("legacy barrier", 0x8000_0000, 0, vec![], UNSUPP),
        ("read into readable memory", 0, 0, word(DATA, 512, 0), IOERR),
        ("write from writable memory", 1, 0, word(DATA, 512, WRITE), IOERR),
        ("read of nothing", 0, 0, vec![], IOERR),
        ("write of nothing", 1, 0, vec![], IOERR),
        ("half a sector", 0, 0, word(DATA, 100, WRITE), IOERR),
        ("past the end", 0, GEOMETRY.len / 512, word(DATA, 512, WRITE), IOERR),
        ("far past the end", 0, u64::MAX, word(DATA, 512, WRITE), IOERR),
        ("no such memory", 0, 0, word(2 * REGION, 512, WRITE), IOERR),
        ("memory that ends too soon", 0, 0, word(2 * REGION - 511, 512, WRITE), IOERR),
        ("memory that wraps around", 0, 0, word(u64::MAX - 100, 512, WRITE), IOERR),
        ("discard without ranges", 11, 0, vec![], IOERR),
        ("discard of half a range", 11, 0, word(DATA, 8, 0), IOERR),
        ("discard of 17 ranges", 11, 0, word(DATA, 17 * 16, 0), IOERR),
        ("identify without memory", 8, 0, word(2 * REGION, 20, WRITE), IOERR),
    ];
    for (what, kind, sector, data, status) in cases {
        assert_eq!(run(kind, sector, &data), (status, vec![(0, 1)]), "{what}");
    }
}

#[test]
fn a_truncated_or_misplaced_header_is_answered() {
    for header in [(HEADER, 15, 0), (2 * REGION, 16, 0)] {
        let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
        front_end.put(STATUS, &[UNANSWERED]);
        front_end.chain(0, 0, &[header, (STATUS, 1, WRITE)]);
        front_end.offer(0, 0);
        machine.settle();
        assert_eq!((front_end.status(), front_end.used(0, 0)), (IOERR, vec![(0, 1)]));
    }
}

#[test]
fn a_chain_that_cannot_be_answered_breaks_only_its_own_queue() {
    let cases: [Violation; 9] = [
        ("loop or longer", &|f| {
            f.describe(f.desc_at(0, 0), Desc { addr: HEADER, len: 16, flags: NEXT, next: 0 });
            f.offer(0, 0);
        }),
        ("outside of the descriptor table", &|f| f.offer(0, 16)),
        ("outside of the descriptor table", &|f| {
            f.describe(f.desc_at(0, 0), Desc { addr: HEADER, len: 16, flags: NEXT, next: 16 });
            f.offer(0, 0);
        }),
        ("no place for the status", &|f| {
            f.chain(0, 0, &[(HEADER, 16, 0)]);
            f.offer(0, 0);
        }),
        ("no place for the status", &|f| {
            f.chain(0, 0, &[(HEADER, 16, 0), (DATA, 512, WRITE), (2 * REGION, 1, WRITE)]);
            f.offer(0, 0);
        }),
        ("no place for the status", &|f| {
            f.chain(0, 0, &[(HEADER, 16, 0), (u64::MAX, 2, WRITE)]);
            f.offer(0, 0);
        }),
        ("parts in the wrong order", &|f| {
            f.chain(0, 0, &[(STATUS, 1, WRITE), (HEADER, 16, 0)]);
            f.offer(0, 0);
        }),
        ("index jumped from 0 to 17", &|f| f.put(f.avail_at(0) + 2, &17u16.to_le_bytes())),
        ("index jumped from 0 to 65535", &|f| f.put(f.avail_at(0) + 2, &u16::MAX.to_le_bytes())),
    ];
    for (what, write) in cases {
        let events = violate(write);
        assert!(events.contains(what), "{what}: {events}");
    }
}

#[test]
fn a_bad_indirect_table_breaks_its_queue() {
    let table = 0x50000;
    let inner = |f: &FrontEnd, flags, next| f.describe(table, Desc { addr: HEADER, len: 16, flags, next });
    let cases: [Violation; 6] = [
        ("bad indirect", &|f| {
            inner(f, INDIRECT, 0);
            f.chain(0, 0, &[(table, 16, INDIRECT)]);
        }),
        ("bad indirect", &|f| f.chain(0, 0, &[(table, 0, INDIRECT)])),
        ("bad indirect", &|f| f.chain(0, 0, &[(table, 17, INDIRECT)])),
        ("bad indirect", &|f| f.chain(0, 0, &[(table, 16, INDIRECT), (STATUS, 1, WRITE)])),
        ("bad indirect", &|f| {
            inner(f, NEXT, 1);
            f.chain(0, 0, &[(table, 16, INDIRECT)]);
        }),
        ("loop or longer", &|f| {
            inner(f, NEXT, 0);
            f.chain(0, 0, &[(table, 1 << 20, INDIRECT)]);
        }),
    ];
    for (what, write) in cases {
        let events = violate(|f| {
            write(f);
            f.offer(0, 0);
        });
        assert!(events.contains(what), "{what}: {events}");
    }
}

#[test]
fn a_chain_offered_twice_breaks_its_queue() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    machine.hold = true;
    front_end.request(0, 0, &[(DATA, 512, WRITE)]);
    front_end.offer(0, 0);
    machine.settle();
    assert_eq!(machine.held.len(), 1);
    assert!(machine.events().contains("made available a second time"));
    machine.release();
    assert_eq!(front_end.used(0, 0), [], "a broken queue is not written to");
}

#[test]
fn the_serial_number_has_twenty_bytes() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    front_end.put(DATA, &[0xee; 32]);
    front_end.request(8, 0, &[(DATA, 32, WRITE)]);
    machine.settle();
    assert_eq!((front_end.status(), front_end.used(0, 0)), (OK, vec![(0, 21)]));
    let expected = [b"TAPLINE-0001".to_vec(), vec![0; 8], vec![0xee; 12]].concat();
    assert_eq!(front_end.get(DATA, 32), expected);
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [sector.to_le_bytes().to_vec(), sectors.to_le_bytes().to_vec(), flags.to_le_bytes().to_vec()].concat()
}

#[test]
fn ranges_become_requests_that_are_answered_once() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    machine.hold = true;
    front_end.put(DATA, &[range(0, 8, 1), range(16, 8, 0), range(32, 8, 1)].concat());
    front_end.request(13, 0, &[(DATA, 20, 0), (DATA + 20, 28, 0)]);
    machine.settle();
    let zeroes = |free| Operation::WriteZeroes { free, durable: false };
    assert_eq!(machine.seen, [zeroes(true), zeroes(false), zeroes(true)]);
    assert_eq!(machine.held.iter().map(|request| request.span().at.0).collect::<Vec<_>>(), [0, 8192, 16384]);

    let last = machine.held.split_off(2);
    machine.fault = Some(Status::NoSpace);
    machine.release();
    assert_eq!(front_end.used(0, 0), [], "one is missing");
    machine.fault = None;
    machine.held = last;
    machine.release();
    assert_eq!((front_end.status(), front_end.used(0, 0)), (IOERR, vec![(0, 1)]), "the worst of them");
}

#[test]
fn one_bad_range_fails_the_request_before_anything_is_done() {
    for (bad, status) in [
        (range(0, 8, 2), UNSUPP),
        (range(GEOMETRY.len / 512, 1, 0), IOERR),
        (range(u64::MAX, u32::MAX, 0), IOERR),
        (range(0, (1 << 22) + 1, 0), IOERR),
    ] {
        let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
        front_end.put(DATA, &[range(0, 8, 0), bad].concat());
        front_end.request(13, 0, &[(DATA, 32, 0)]);
        machine.settle();
        assert_eq!((front_end.status(), front_end.used(0, 0)), (status, vec![(0, 1)]));
        assert_eq!(machine.seen, []);
    }
}

#[test]
fn a_driver_that_cannot_flush_gets_durable_writes() {
    for (features, durable) in [(VERSION_1, true), (VERSION_1 | FLUSH, false)] {
        let (mut machine, front_end) = ready(GEOMETRY, features, 1);
        front_end.request(1, 0, &[(DATA, 512, 0)]);
        machine.settle();
        front_end.put(DATA, &range(0, 8, 0));
        front_end.request(13, 0, &[(DATA, 16, 0)]);
        machine.settle();
        assert_eq!(machine.seen, [Operation::Write { durable }, Operation::WriteZeroes { free: false, durable }]);
    }
}

#[test]
fn a_read_only_disk_answers_writes_with_an_error() {
    let (mut machine, front_end) = ready(Geometry { read_only: true, ..GEOMETRY }, FEATURES, 1);
    front_end.request(1, 0, &[(DATA, 512, 0)]);
    machine.settle();
    assert_eq!((front_end.status(), machine.seen.len()), (IOERR, 0));
}

#[test]
fn each_result_has_its_status() {
    let cases = [
        (Status::Failed, IOERR),
        (Status::NoSpace, IOERR),
        (Status::Refused, IOERR),
        (Status::Unsupported, UNSUPP),
        (Status::Done, OK),
    ];
    for (outcome, status) in cases {
        let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
        machine.fault = Some(outcome);
        front_end.request(4, 0, &[]);
        machine.settle();
        assert_eq!((front_end.status(), front_end.used(0, 0)), (status, vec![(0, 1)]));
    }
}

#[test]
fn a_batch_is_published_and_signalled_once() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    machine.hold = true;
    front_end.header(HEADER, 4, 0);
    for head in 0..8 {
        front_end.chain(0, 2 * head, &[(HEADER, 16, 0), (STATUS + u64::from(head), 1, WRITE)]);
        front_end.offer(0, 2 * head);
    }
    machine.settle();
    machine.release();
    assert_eq!(front_end.used(0, 0).len(), 8);
    assert_eq!(FrontEnd::signalled(&front_end.calls[0]), 1);
}

#[test]
fn a_driver_can_suppress_interrupts() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!(FrontEnd::signalled(&front_end.calls[0]), 1);
    front_end.put(front_end.avail_at(0), &1u16.to_le_bytes());
    front_end.request(4, 0, &[]);
    machine.settle();
    assert_eq!((front_end.used(0, 0).len(), FrontEnd::signalled(&front_end.calls[0])), (2, 0));
}

#[test]
fn the_event_index_selects_the_answer_to_signal() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES | EVENT_IDX, 1);
    let used_event = front_end.avail_at(0) + 4 + 2 * u64::from(front_end.size);
    let mut signals = Vec::new();
    for event in [0u16, 5, 5, 3, 5] {
        front_end.put(used_event, &event.to_le_bytes());
        front_end.request(4, 0, &[]);
        machine.settle();
        signals.push(FrontEnd::signalled(&front_end.calls[0]));
    }
    // Answers 1 to 5: the first is always signalled, the fourth was waited for.
    assert_eq!(signals, [1, 0, 0, 1, 0]);
}

#[test]
fn notifications_are_off_while_awake_and_on_before_sleep() {
    let (mut machine, front_end) = ready(GEOMETRY, FEATURES, 1);
    let flags = front_end.used_at(0);
    assert!(machine.server.may_sleep());
    assert_eq!(front_end.get_u16(flags), 0);
    front_end.request(4, 0, &[]);
    assert!(!machine.server.may_sleep(), "a request without a kick is noticed");
    machine.settle();
    assert_eq!(front_end.get_u16(flags), 1);
    assert!(machine.server.may_sleep());
    assert_eq!(front_end.get_u16(flags), 0);
}

#[test]
fn a_busy_queue_does_not_starve_the_others() {
    let (mut machine, mut front_end) = {
        let mut machine = TestBackend::new(GEOMETRY, 2);
        let mut front_end = FrontEnd::connect(&machine.path());
        front_end.size = 64;
        front_end.set_up(&mut machine, FEATURES, 2);
        (machine, front_end)
    };
    machine.hold = true;
    front_end.header(HEADER, 4, 0);
    for queue in 0..2 {
        for head in 0..32 {
            front_end.chain(queue, 2 * head, &[(HEADER, 16, 0), (STATUS, 1, WRITE)]);
            front_end.offer(queue, 2 * head);
        }
    }
    machine.settle();
    let queue_of = |token: disk::Token| token.0 >> 16 & 0xffff;
    let queues: Vec<u64> = machine.held.iter().map(|request| queue_of(request.token())).collect();
    assert_eq!(queues.len(), 64);
    for turns in queues.windows(17) {
        assert!(turns.iter().any(|&queue| queue != turns[0]), "17 in a row: {queues:?}");
    }
    assert!(!front_end.is_closed());
}

#[test]
fn a_ring_is_continued_where_it_was_stopped() {
    let mut machine = TestBackend::new(GEOMETRY, 1);
    let mut front_end = FrontEnd::connect(&machine.path());
    front_end.negotiate(&mut machine, FEATURES);
    front_end.set_up(&mut machine, FEATURES, 0);
    let base = u16::MAX - 1;
    front_end.put(front_end.avail_at(0) + 2, &base.to_le_bytes());
    front_end.put(front_end.used_at(0) + 2, &base.to_le_bytes());
    front_end.start_queue(&mut machine, 0, base);
    for _ in 0..4 {
        front_end.request(4, 0, &[]);
        machine.settle();
    }
    assert_eq!(front_end.used(0, base).len(), 4);
    let stopped = front_end.query(&mut machine, 11, &[0; 8]).unwrap();
    assert_eq!(stopped[4..], 2u32.to_ne_bytes());
}
