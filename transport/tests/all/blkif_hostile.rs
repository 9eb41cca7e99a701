//! Misbehaviour of a guest towards a blkif server, and its consequences.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use fastrand::Rng;
use transport::blkif::GrantsPolicy;
use xen::GrantRef;
use xen::fake::{Access, Counts, Host, Subsystem};

use crate::blkif_mock::{
    Abi, BACKEND, FRONTEND, Front, READ, Rings, TestBackend, WRITE, attach, config, get, indirect, remove, set,
    transfer,
};

const OKAY: i16 = 0;
const ERROR: i16 = -1;

const POLICIES: [GrantsPolicy; 3] = [GrantsPolicy::Copy, GrantsPolicy::Map, GrantsPolicy::Persistent];
const PERSISTENT: Rings = Rings { abi: Abi::X86_64, order: 0, queues: 1, persistent: true };

fn connected(grants: GrantsPolicy, rings: Rings) -> (TestBackend, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (TestBackend::new(&host, config(grants)), Front::new(&host));
    front.connect(&mut machine, rings);
    (machine, front)
}

#[test]
fn a_bad_grant_fails_only_its_own_request() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, PERSISTENT);
        let (_, good) = front.page(7);
        let (_, revoked) = front.page(8);
        front.guest.revoke(revoked);
        let sealed = front.guest.page().unwrap();
        let sealed = front.guest.grant(sealed, Access::ReadOnly);
        let bad = GrantRef(123_456);
        let entries = [
            transfer(WRITE, 0, 0, &[(good, 0, 7)]),
            transfer(WRITE, 1, 8, &[(good, 0, 7), (bad, 0, 7)]),
            transfer(WRITE, 2, 16, &[(revoked, 0, 7)]),
            transfer(READ, 3, 0, &[(sealed, 0, 7)]),
            indirect(READ, 4, 0, bad, 12),
            transfer(READ, 5, 0, &[(good, 0, 7)]),
        ];
        let before = machine.file.bytes[0].clone();
        entries.iter().for_each(|entry| front.put(0, entry));
        front.push(0);
        machine.settle();
        let mut answers: Vec<_> = front.responses(0).iter().map(|answer| (answer.0, answer.2)).collect();
        answers.sort_unstable();
        let expected = [OKAY, ERROR, ERROR, ERROR, ERROR, OKAY];
        assert_eq!(answers.iter().map(|answer| answer.1).collect::<Vec<_>>(), expected, "{policy:?}");
        assert!(machine.file.bytes[0][4096..] == before[4096..], "{policy:?}: a refused write must write nothing");
        front.close(&mut machine);
        assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0));
    }
}

/// With persistent grants, the page of the descriptors stays mapped from the first request.
#[test]
fn invalid_descriptors_are_refused() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, PERSISTENT);
        let (list, grant) = front.page(0xff);
        assert_eq!(front.run(&mut machine, &indirect(READ, 1, 0, grant, 12)), ERROR);
        let (_, good) = front.page(0);
        let whole = [&good.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat();
        front.guest.write(list, 0, &[&good.0.to_le_bytes()[..], &[0, 8, 0, 0]].concat()).unwrap();
        assert_eq!(front.run(&mut machine, &indirect(READ, 2, 0, grant, 1)), ERROR, "a ninth sector");
        front.guest.write(list, 0, &[&whole[..], &good.0.to_le_bytes()[..], &[3, 2, 0, 0]].concat()).unwrap();
        assert_eq!(
            front.run(&mut machine, &indirect(READ, 3, 0, grant, 2)),
            ERROR,
            "the second one ends before it begins"
        );
        front.guest.write(list, 0, &[&whole[..], &[0xfe, 0xff, 0xff, 0xff, 0, 7, 0, 0]].concat()).unwrap();
        assert_eq!(front.run(&mut machine, &indirect(READ, 4, 0, grant, 2)), ERROR, "the second one is not granted");
        assert_eq!(front.run(&mut machine, &indirect(READ, 5, 0, grant, 257)), ERROR, "more segments than offered");
        assert_eq!(front.run(&mut machine, &indirect(READ, 6, 8191, grant, 1)), ERROR, "past the end");
        assert_eq!(front.run(&mut machine, &indirect(READ, 7, u64::MAX, grant, 1)), ERROR);
        assert_eq!(front.run(&mut machine, &indirect(READ, 8, 0, grant, 1)), OKAY, "{policy:?}");
    }
}

#[test]
fn an_entry_is_not_read_again_after_it_was_taken() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    let (page, grant) = front.page(0x11);
    let list = front.guest.page().unwrap();
    front.guest.write(list, 0, &[&grant.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat()).unwrap();
    let listed = front.guest.grant(list, Access::ReadOnly);
    machine.file.hold = true;
    front.put(0, &transfer(WRITE, 1, 0, &[(grant, 0, 7)]));
    front.put(0, &indirect(WRITE, 2, 64, listed, 1));
    front.push(0);
    machine.settle();
    // Everything that the guest can change is changed while the requests are in flight.
    front.guest.write(page, 0, &[0x22; 4096]).unwrap();
    front.guest.write(list, 0, &[0xff; 4096]).unwrap();
    (0..32).for_each(|slot| front.rings[0].shared.write(64 + slot * 112, [0xee; 112]).unwrap());
    machine.file.hold = false;
    machine.settle();
    let mut answers = front.responses(0);
    answers.sort_unstable();
    assert_eq!(answers, [(1, WRITE, OKAY), (2, WRITE, OKAY)]);
    assert_eq!(machine.file.bytes[0][..4096], [0x11; 4096]);
    assert_eq!(machine.file.bytes[0][64 * 512..72 * 512], [0x11; 4096]);
}

#[test]
fn an_out_of_range_index_ends_only_its_own_queue() {
    for index in [33, 1000, u32::MAX, 1 << 31] {
        let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings { queues: 2, ..Rings::default() });
        let (_, page) = front.page(7);
        machine.take_log();
        front.rings[0].shared.store_u32(0, index).unwrap();
        front.guest.signal(front.rings[0].port).unwrap();
        machine.settle();
        assert_eq!(machine.log.matches("is broken by its front end").count(), 1, "{}", machine.log);
        assert_eq!(front.responses(0), []);
        front.submit(1, &transfer(WRITE, 1, 0, &[(page, 0, 7)]));
        machine.settle();
        assert_eq!(front.responses(1), [(1, WRITE, OKAY)], "the other queue still works");
        front.close(&mut machine);
        front.write_state(1);
        front.connect(&mut machine, Rings::default());
        assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 0, &[(page, 0, 7)])), OKAY, "the next front end works");
    }
}

#[test]
fn results_of_a_broken_queue_are_discarded() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, PERSISTENT);
        let (_, page) = front.page(7);
        machine.file.hold = true;
        front.submit(0, &transfer(READ, 1, 0, &[(page, 0, 7)]));
        machine.settle();
        front.rings[0].shared.store_u32(0, 500).unwrap();
        front.guest.signal(front.rings[0].port).unwrap();
        machine.settle();
        machine.file.hold = false;
        machine.settle();
        assert_eq!(front.responses(0), []);
        front.close(&mut machine);
        assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0));
    }
}

#[test]
fn a_flood_of_notifications_wakes_once() {
    let (mut machine, front) = connected(GrantsPolicy::Copy, Rings::default());
    machine.settle();
    let before = machine.host.calls(Subsystem::Channels);
    for _ in 0..10 {
        (0..1000).for_each(|_| front.guest.signal(front.rings[0].port).unwrap());
        machine.settle();
    }
    let calls = machine.host.calls(Subsystem::Channels) - before;
    assert!(calls <= 40, "{calls} calls for ten floods");
    assert!(!machine.turn(), "asleep");
}

#[test]
fn a_flood_of_invalid_requests_is_answered_one_ring_at_a_time() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings { order: 4, ..Rings::default() });
    for round in 0..20u64 {
        (0..512).for_each(|id: u16| front.put(0, &transfer(id as u8 | 8, round, u64::MAX, &[])));
        front.push(0);
        machine.settle();
        let answers = front.responses(0);
        assert_eq!(answers.len(), 512);
        assert!(answers.iter().all(|&(id, _, status)| id == round && status < 0));
    }
    assert_eq!(machine.seen, []);
}

#[test]
fn requests_beyond_the_memory_limit_wait_in_the_ring() {
    // One queue or several: they share the memory limit of one disk.
    for (order, queues, each) in [(2, 1, 128), (0, 4, 32)] {
        let rings = Rings { order, queues, ..Rings::default() };
        let queues = queues as usize;
        let (mut machine, mut front) = connected(GrantsPolicy::Copy, rings);
        let (_, page) = front.page(9);
        let list = front.guest.page().unwrap();
        let one = [&page.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat();
        front.guest.write(list, 0, &one.repeat(256)).unwrap();
        let list = front.guest.grant(list, Access::ReadOnly);
        machine.file.hold = true;
        for queue in 0..queues {
            (0..each).for_each(|id| front.put(queue, &indirect(READ, id, 0, list, 256)));
            front.push(queue);
        }
        machine.settle();
        assert!(machine.seen.len() <= 33, "{} MiB in flight", machine.seen.len());
        machine.file.hold = false;
        machine.settle();
        let answers: usize = (0..queues).map(|queue| front.responses(queue).len()).sum();
        assert_eq!(answers, 128);
    }
}

#[test]
fn invalid_keys_are_refused_and_the_next_front_end_works() {
    let bad: [(&str, Option<&str>); 12] = [
        ("ring-page-order", Some("5")),
        ("ring-page-order", Some("-1")),
        ("ring-page-order", Some("")),
        ("num-ring-pages", Some("3")),
        ("multi-queue-num-queues", Some("0")),
        ("multi-queue-num-queues", Some("5")),
        ("multi-queue-num-queues", Some("2")),
        ("protocol", Some("vax-abi")),
        ("ring-ref", None),
        ("ring-ref", Some("99999999")),
        ("event-channel", None),
        ("event-channel", Some("77777")),
    ];
    for (key, value) in bad {
        let host = Host::new().unwrap();
        attach(&host);
        let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
        machine.settle();
        let path = format!("{FRONTEND}/{key}");
        front.initialise(Rings::default());
        match value {
            Some(value) => set(&host, &path, value),
            None => remove(&host, &path),
        }
        machine.settle();
        // Refusals by Xen are retried a few times.
        machine.settle_when(|_| front.backend_state() != "2");
        assert_eq!(front.backend_state(), "5", "{key} {value:?}");
        assert!(machine.log.contains("cannot be connected"), "{key}: {}", machine.log);
        assert_eq!((host.counts().mapped, host.counts().bound), (0, 0), "{key}");
        let logged = machine.log.len();
        (0..10).for_each(|_| set(&host, &format!("{FRONTEND}/state"), "3"));
        machine.settle();
        assert_eq!(machine.log.len(), logged, "it must not be retried");
        remove(&host, &path);
        front.close(&mut machine);
        remove(&host, &format!("{FRONTEND}/num-ring-pages"));
        front.write_state(1);
        front.connect(&mut machine, Rings::default());
    }
}

#[test]
fn values_of_a_refused_front_end_cannot_forge_log_lines() {
    for key in ["protocol", "ring-page-order"] {
        let host = Host::new().unwrap();
        attach(&host);
        let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
        machine.settle();
        machine.take_log();
        front.initialise(Rings::default());
        set(&host, &format!("{FRONTEND}/{key}"), &("\u{1b}[2J\nall is well".to_owned() + &"x".repeat(1000)));
        machine.settle();
        assert_eq!(machine.log.lines().count(), 1, "{key}: {}", machine.log);
        assert!(machine.log.contains("cannot be connected") && machine.log.len() < 300, "{key}: {}", machine.log);
        assert!(!machine.log.contains('\u{1b}'), "{key}: {}", machine.log);
    }
}

#[test]
fn keys_left_by_an_earlier_front_end_are_ignored() {
    let host = Host::new().unwrap();
    attach(&host);
    let mut front = Front::new(&host);
    front.initialise(Rings { queues: 2, order: 1, ..Rings::default() });
    front.write_state(1);
    let mut machine = TestBackend::new(&host, config(GrantsPolicy::Copy));
    machine.settle();
    assert_eq!((front.backend_state().as_str(), host.counts().mapped, host.counts().bound), ("2", 0, 0));
    front.forget();
    front.connect(&mut machine, Rings::default());
    assert_eq!(host.counts().mapped, 1);
}

#[test]
fn random_state_sequences_leak_nothing_and_end_in_a_connection() {
    for seed in 1..40u64 {
        let host = Host::new().unwrap();
        attach(&host);
        let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Persistent)), Front::new(&host));
        machine.settle();
        front.initialise(PERSISTENT);
        let mut random = Rng::with_seed(seed);
        for _ in 0..60 {
            match random.u8(..12) {
                10 => remove(&host, &format!("{FRONTEND}/state")),
                11 => set(&host, &format!("{BACKEND}/state"), &random.u8(..7).to_string()),
                state => set(&host, &format!("{FRONTEND}/state"), &state.to_string()),
            }
            if random.bool() {
                machine.settle();
            }
        }
        machine.settle();
        front.close(&mut machine);
        assert_eq!((host.counts().mapped, host.counts().bound), (0, 0), "seed {seed}");
        front.write_state(1);
        front.connect(&mut machine, PERSISTENT);
        let (_, page) = front.page(1);
        assert_eq!(front.run(&mut machine, &transfer(READ, 1, 0, &[(page, 0, 7)])), OKAY, "seed {seed}");
        drop(machine);
        assert_eq!(host.counts(), Counts::default(), "seed {seed}");
    }
}

/// Runs a device's lifecycle in which call `nth` of `part` fails; returns the number of calls of `part`.
fn run_lifecycle(policy: GrantsPolicy, part: Subsystem, nth: u64) -> u64 {
    let host = Host::new().unwrap();
    attach(&host);
    let mut front = Front::new(&host);
    let (_, page) = front.page(1);
    let mut machine = TestBackend::idle(&host, config(policy).geometry);
    host.fail(part, nth);
    // A server that fails to start reports that, and is started again.
    if machine.start(config(policy)).is_err() {
        machine.start(config(policy)).unwrap();
    }
    machine.settle();
    front.initialise(Rings { queues: 2, ..PERSISTENT });
    machine.settle();
    let answered = if front.backend_state() == "4" {
        front.write_state(4);
        machine.settle();
        (0..4).for_each(|id| front.put(0, &transfer((id % 2) as u8, id, 0, &[(page, 0, 7)])));
        front.push(0);
        machine.settle();
        front.responses(0).len()
    } else {
        0
    };
    let calls = host.calls(part);
    host.fail(part, u64::MAX >> 1);
    front.close(&mut machine);
    assert_eq!((host.counts().mapped, host.counts().bound), (0, 0), "{policy:?} {part:?} {nth}");
    front.write_state(1);
    front.connect(&mut machine, PERSISTENT);
    assert_eq!(front.run(&mut machine, &transfer(READ, 9, 0, &[(page, 0, 7)])), OKAY, "{policy:?} {part:?} {nth}");
    // All of them or, if the server could not connect, none; never some.
    assert!(answered == 4 || answered == 0, "{policy:?} {part:?} {nth}: {answered}");
    assert_eq!(get(&host, &format!("{BACKEND}/state")).as_deref(), Some("4"));
    drop(machine);
    assert_eq!(host.counts(), Counts::default(), "{policy:?} {part:?} {nth}");
    calls
}

#[test]
fn after_any_failed_call_nothing_leaks_and_the_next_front_end_works() {
    for policy in POLICIES {
        for part in [Subsystem::Grants, Subsystem::Channels, Subsystem::Store] {
            let calls = run_lifecycle(policy, part, u64::MAX >> 1);
            assert!(calls > 0);
            (1..=calls).for_each(|nth| assert!(run_lifecycle(policy, part, nth) > 0));
        }
    }
}

/// Words of an entry in 64-bit layout and their alternative values: every mixture of both writes to sectors 64 to 71,
/// or is invalid.
fn flipped_words(at: usize, page: GrantRef) -> [(usize, u32, u32); 5] {
    [
        (at, u32::from_le_bytes([WRITE, 1, 0, 0]), u32::from_le_bytes([0xff, 255, 0, 0])),
        (at + 16, 64, 8192),
        (at + 20, 0, u32::MAX),
        (at + 24, page.0, u32::MAX),
        (at + 28, u32::from_le_bytes([0, 7, 0, 0]), u32::from_le_bytes([7, 0xff, 0xff, 0xff])),
    ]
}

/// Stops the thread on drop, also if the test fails, because the scope waits for it.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn concurrently_changed_entries_are_processed_in_either_state_or_refused() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, PERSISTENT);
        let (_, page) = front.page(0x77);
        let before = machine.file.bytes[0].clone();
        let ring = front.guest.shared(&front.rings[0].own).unwrap();
        let words: Vec<_> = (0..32).flat_map(|slot| flipped_words(64 + slot * 112, page)).collect();
        let (mut begun, mut rounds, stop, changes) = (0, 0, AtomicBool::new(false), AtomicU32::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    words.iter().for_each(|&(at, one, _)| ring.store_u32(at, one).unwrap());
                    words.iter().for_each(|&(at, _, other)| ring.store_u32(at, other).unwrap());
                    changes.fetch_add(1, Ordering::Relaxed);
                }
            });
            let stop_at_last = StopOnDrop(&stop);
            // On a busy machine the thread may not run for a long time.
            while rounds < 300 || (changes.load(Ordering::Relaxed) < 1000 && rounds < 100_000) {
                (0..32).for_each(|id| front.put(0, &transfer(WRITE, id, 64, &[(page, 0, 7)])));
                front.push(0);
                machine.settle();
                begun += machine.seen.len();
                machine.seen.clear();
                rounds += 1;
            }
            drop(stop_at_last);
        });
        assert!(changes.into_inner() >= 1000, "{policy:?}: the entries were not changed concurrently");
        let ring = &front.rings[0];
        assert_eq!(ring.shared.load_u32(8), Some(ring.submitted), "{policy:?}: each must be answered once");
        assert!(begun > 0, "{policy:?}: no request was valid");
        let (from, to) = (64 * 512, 72 * 512);
        assert!(machine.file.bytes[0][..from] == before[..from], "{policy:?}");
        assert!(machine.file.bytes[0][to..] == before[to..], "{policy:?}");
        front.close(&mut machine);
        assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0), "{policy:?}");
    }
}
