//! The behaviour of a blkif server towards a well-behaved front end.

use disk::{FileError, Operation};
use transport::blkif::{Config, GrantsPolicy, OnStop};
use transport::{Detach as _, Server as _};
use xen::GrantRef;
use xen::fake::{Access, Counts, Host};

use crate::blkif_mock::memory_io::Order;
use crate::blkif_mock::{
    Abi, BACKEND, FRONTEND, Front, LEN, READ, Rings, TestBackend, WRITE, attach, config, discard, get, indirect,
    remove, set, transfer,
};

const OKAY: i16 = 0;
const ERROR: i16 = -1;
const UNSUPPORTED: i16 = -2;

const POLICIES: [GrantsPolicy; 3] = [GrantsPolicy::Copy, GrantsPolicy::Map, GrantsPolicy::Persistent];

fn machine(config: Config) -> (TestBackend, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    (TestBackend::new(&host, config), Front::new(&host))
}

fn connected(grants: GrantsPolicy, rings: Rings) -> (TestBackend, Front) {
    let (mut machine, mut front) = machine(config(grants));
    front.connect(&mut machine, rings);
    (machine, front)
}

fn every_layout_and_policy() -> impl Iterator<Item = (GrantsPolicy, Rings)> {
    let abis = [Abi::Native, Abi::X86_32, Abi::X86_64];
    let rings = abis.map(|abi| Rings { abi, persistent: true, ..Rings::default() });
    POLICIES.into_iter().flat_map(move |policy| rings.map(|rings| (policy, rings)))
}

fn key(machine: &TestBackend, key: &str) -> Option<String> {
    get(&machine.host, &format!("{BACKEND}/{key}"))
}

#[test]
fn the_features_are_published_before_the_front_end_starts() {
    let (mut machine, _front) = machine(config(GrantsPolicy::Auto));
    machine.settle();
    for (name, value) in [
        ("state", "2"),
        ("sectors", "8192"),
        ("sector-size", "512"),
        ("physical-sector-size", "4096"),
        ("info", "0"),
        ("mode", "w"),
        ("feature-flush-cache", "1"),
        ("feature-barrier", "1"),
        ("feature-discard", "1"),
        ("discard-granularity", "4096"),
        ("discard-alignment", "0"),
        ("discard-secure", "0"),
        ("feature-persistent", "1"),
        ("feature-max-indirect-segments", "256"),
        ("max-ring-page-order", "4"),
        ("max-ring-pages", "16"),
        ("multi-queue-max-queues", "4"),
    ] {
        assert_eq!(key(&machine, name).as_deref(), Some(value), "{name}");
    }
}

#[test]
fn completions_in_reverse_order_are_answered_in_the_order_of_the_requests() {
    for (policy, rings) in every_layout_and_policy() {
        let (mut machine, mut front) = connected(policy, rings);
        machine.file.order = Order::Newest;
        let (_, page) = front.page(1);
        for id in 0..5 {
            front.put(0, &transfer(READ, id, id * 8, &[(page, 0, 7)]));
        }
        front.push(0);
        machine.settle();
        let order: Vec<u64> = front.responses(0).iter().map(|answer| answer.0).collect();
        assert_eq!(order, [0, 1, 2, 3, 4], "{policy:?}");
    }
}

#[test]
fn data_is_transferred_both_ways_in_every_layout_and_mode() {
    for (policy, rings) in every_layout_and_policy() {
        let (mut machine, mut front) = connected(policy, rings);
        let ((first, one), (second, two)) = (front.page(0xaa), front.page(0xbb));
        let parts = [(one, 2, 3), (two, 0, 7)];
        assert_eq!(front.run(&mut machine, &transfer(WRITE, 5, 16, &parts)), OKAY, "{policy:?} {rings:?}");
        assert_eq!(machine.file.bytes[0][16 * 512..18 * 512], [0xaa; 1024]);
        assert_eq!(machine.file.bytes[0][18 * 512..26 * 512], [0xbb; 4096]);
        assert_eq!(machine.file.bytes[0][26 * 512], 26, "no further");
        assert_eq!(front.run(&mut machine, &transfer(READ, 6, 100, &parts)), OKAY);
        assert_eq!(front.guest.read(first, 1024, 1024).unwrap(), [[100; 512], [101; 512]].concat());
        assert_eq!(front.guest.read(first, 2048, 1).unwrap(), [0xaa], "no further");
        assert_eq!(front.guest.read(second, 3584, 512).unwrap(), [109; 512]);
        assert_eq!(machine.seen.len(), 2, "one disk request, however many segments");
    }
}

#[test]
fn responses_carry_the_id_of_their_request() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings { abi: Abi::X86_32, ..Rings::default() });
    let (_, page) = front.page(0);
    front.put(0, &transfer(READ, u64::MAX - 3, 0, &[(page, 0, 7)]));
    front.put(0, &transfer(77, 8, 0, &[(page, 0, 7)]));
    front.put(0, &indirect(WRITE, 9, 0, GrantRef(4000), 12));
    front.push(0);
    machine.settle();
    let mut answers = front.responses(0);
    answers.sort_unstable();
    assert_eq!(answers, [(8, 77, UNSUPPORTED), (9, WRITE, ERROR), (u64::MAX - 3, READ, OKAY)]);
}

#[test]
fn one_indirect_request_transfers_a_mebibyte() {
    for (policy, rings) in every_layout_and_policy() {
        let (mut machine, mut front) = connected(policy, rings);
        let pages: Vec<_> = (0..=255).map(|byte| front.page(byte)).collect();
        let parts: Vec<_> = pages.iter().map(|&(_, grant)| (grant, 0, 7)).collect();
        let descriptors: Vec<u8> =
            parts.iter().flat_map(|part| [&part.0.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat()).collect();
        let list = front.guest.page().unwrap();
        front.guest.write(list, 0, &descriptors).unwrap();
        // Persistent pages are granted writable, as Linux does.
        let access = if policy == GrantsPolicy::Persistent { Access::ReadWrite } else { Access::ReadOnly };
        let list = front.guest.grant(list, access);
        assert_eq!(front.run(&mut machine, &indirect(WRITE, 1, 8, list, 256)), OKAY, "{policy:?}");
        let expected: Vec<u8> = (0..=255).flat_map(|byte| [byte; 4096]).collect();
        assert!(machine.file.bytes[0][4096..4096 + (1 << 20)] == expected, "{policy:?}");
        assert_eq!(machine.seen, [Operation::Write { durable: false }]);
    }
}

#[test]
fn large_rings_and_many_queues_work_at_once() {
    for policy in POLICIES {
        let rings = Rings { order: 4, queues: 4, persistent: true, ..Rings::default() };
        let (mut machine, mut front) = connected(policy, rings);
        assert_eq!(front.slots, 512);
        let (page, grant) = front.page(0);
        for round in 0..3u64 {
            for queue in 0..4 {
                (0..512).for_each(|id| front.put(queue, &transfer(READ, round * 512 + id, id * 8, &[(grant, 0, 0)])));
                front.push(queue);
            }
            machine.settle();
            for queue in 0..4 {
                let mut ids: Vec<u64> = front.responses(queue).iter().map(|answer| answer.0).collect();
                ids.sort_unstable();
                assert_eq!(ids, (round * 512..(round + 1) * 512).collect::<Vec<_>>(), "{policy:?}");
            }
        }
        assert_eq!(front.guest.read(page, 512, 1).unwrap(), [0]);
    }
}

#[test]
fn a_flush_makes_data_durable_and_a_write_does_not() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    let (_, page) = front.page(0x55);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 0, &[(page, 0, 7)])), OKAY);
    assert_ne!(machine.file.past().durable[..4096], [0x55; 4096]);
    assert_eq!(front.run(&mut machine, &transfer(3, 2, 0, &[])), OKAY);
    assert_eq!(machine.file.past().durable[..4096], [0x55; 4096]);
    assert_eq!(front.run(&mut machine, &transfer(3, 3, 64, &[(page, 0, 7)])), OKAY, "a flush with data (FUA)");
    assert_eq!(machine.file.past().durable[64 * 512..72 * 512], [0x55; 4096]);
    machine.file.fault = Box::new(|_| Some(FileError::Failed(5)));
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 4, 0, &[(page, 0, 7)])), ERROR);
}

#[test]
fn a_barrier_runs_alone_and_is_durable() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    let (_, page) = front.page(0x55);
    machine.file.hold = true;
    for (id, operation) in [WRITE, WRITE, 2, WRITE, 2, WRITE].into_iter().enumerate() {
        let parts = [(page, 0, 7)];
        let parts = if id == 4 { &parts[..0] } else { &parts[..] };
        front.put(0, &transfer(operation, id as u64, 8 * id as u64, parts));
    }
    front.push(0);
    machine.settle();
    assert_eq!(machine.seen.len(), 2, "the barrier must wait for earlier requests");
    machine.file.hold = false;
    machine.settle();
    let order: Vec<u64> = front.responses(0).iter().map(|answer| answer.0).collect();
    assert_eq!(order[2..], [2, 3, 4, 5], "not one after the other");
    assert_eq!(
        machine.seen[2..5],
        [Operation::Write { durable: true }, Operation::Write { durable: false }, Operation::Flush]
    );
    assert_eq!(machine.file.past().durable[..3 * 4096], [0x55; 3 * 4096]);
}

#[test]
fn a_discard_must_be_in_range_and_not_secure() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    assert_eq!(front.run(&mut machine, &discard(0, 1, 8, 16)), OKAY);
    assert_eq!(machine.file.bytes[0][4096..12288], [0; 8192]);
    assert_eq!(front.run(&mut machine, &discard(1, 2, 8, 16)), UNSUPPORTED);
    for (sector, count) in [(LEN / 512, 1), (0, LEN / 512 + 1), (u64::MAX, 1), (1, u64::MAX), (0, 0)] {
        assert_eq!(front.run(&mut machine, &discard(0, 3, sector, count)), ERROR, "{sector} {count}");
    }
}

#[test]
fn a_read_only_disk_announces_that_and_refuses_writes() {
    let (mut machine, mut front) = machine(Config { read_only: true, ..config(GrantsPolicy::Copy) });
    front.connect(&mut machine, Rings::default());
    assert_eq!((key(&machine, "info").unwrap(), key(&machine, "mode").unwrap()), ("4".to_owned(), "r".to_owned()));
    assert_eq!(key(&machine, "feature-discard").as_deref(), Some("0"));
    let (_, page) = front.page(0x55);
    let read_only = front.guest.page().unwrap();
    let before = machine.file.bytes[0].clone();
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 0, &[(page, 0, 7)])), ERROR);
    assert_eq!(front.run(&mut machine, &transfer(2, 2, 0, &[(page, 0, 7)])), ERROR);
    assert_eq!(front.run(&mut machine, &discard(0, 3, 0, 8)), ERROR);
    assert_eq!(front.run(&mut machine, &transfer(READ, 4, 0, &[(page, 0, 7)])), OKAY);
    assert!(machine.file.bytes[0] == before && front.guest.read(read_only, 0, 1).unwrap() == [0]);
}

#[test]
fn a_pass_makes_one_copy_call_and_maps_pages_once() {
    for (policy, first, later) in [(GrantsPolicy::Copy, 1, 1), (GrantsPolicy::Persistent, 1, 0)] {
        let (mut machine, mut front) = connected(policy, Rings { persistent: true, ..Rings::default() });
        let pages: Vec<_> = (0..30).map(|_| front.page(1).1).collect();
        for expected in [first, later] {
            let before = machine.host.calls(xen::fake::Subsystem::Grants);
            for (index, &page) in pages.iter().enumerate() {
                front.put(0, &transfer(WRITE, 0, 8 * index as u64, &[(page, 0, 7)]));
            }
            front.push(0);
            machine.settle();
            assert_eq!(front.responses(0).len(), 30);
            assert_eq!(machine.host.calls(xen::fake::Subsystem::Grants) - before, expected, "{policy:?}");
        }
    }
}

#[test]
fn no_data_page_stays_mapped_without_persistent_grants() {
    let (mut machine, mut front) = connected(GrantsPolicy::Auto, Rings::default());
    let (_, page) = front.page(1);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 0, 0, &[(page, 0, 7)])), OKAY);
    assert!(front.guest.revoke(page), "it must not be mapped");
    assert_eq!(machine.host.counts().mapped, 1, "only the ring is mapped");
}

#[test]
fn a_new_size_is_announced_by_rewriting_the_connected_state() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    let mut store = machine.host.store(xen::DomId(7)).unwrap();
    xen::Store::watch(&mut store, &format!("{BACKEND}/state"), "size").unwrap();
    xen::Store::take_event(&mut store).unwrap();
    let grown = disk::Geometry { len: 2 * LEN, ..machine.geometry };
    machine.server.as_mut().unwrap().resized(&grown, &mut machine.watch);
    assert!(xen::Store::take_event(&mut store).unwrap().is_some());
    assert_eq!((key(&machine, "sectors").as_deref(), front.backend_state().as_str()), (Some("16384"), "4"));
    machine.settle();
    let (_, page) = front.page(1);
    assert_eq!(front.run(&mut machine, &transfer(READ, 0, 0, &[(page, 0, 7)])), OKAY);
}

#[test]
fn a_thousand_front_ends_leak_nothing() {
    for policy in POLICIES {
        let (mut machine, mut front) = machine(config(policy));
        machine.settle();
        let rest = machine.host.counts();
        let (_, page) = front.page(3);
        for round in 0..334 {
            front.write_state(1);
            let rings = Rings { order: round % 3, queues: 1 + round % 2, persistent: true, ..Rings::default() };
            front.connect(&mut machine, rings);
            front.submit(0, &transfer(WRITE, 1, 0, &[(page, 0, 7)]));
            machine.settle();
            assert_eq!(front.responses(0), [(1, WRITE, OKAY)], "round {round}");
            front.close(&mut machine);
            assert_eq!((machine.host.counts(), front.backend_state()), (rest, "6".to_owned()), "round {round}");
        }
        drop(machine);
        assert_eq!(front.host.counts(), Counts::default());
    }
}

#[test]
fn a_closing_front_end_gets_its_responses_first() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, Rings { persistent: true, ..Rings::default() });
        let (_, page) = front.page(3);
        machine.file.hold = true;
        front.submit(0, &transfer(READ, 1, 0, &[(page, 0, 7)]));
        machine.settle();
        // One request is announced but not yet taken when its driver closes right away.
        front.submit(0, &transfer(READ, 2, 8, &[(page, 0, 7)]));
        front.write_state(6);
        machine.settle();
        assert_eq!((front.backend_state().as_str(), machine.host.counts().bound), ("4", 1), "{policy:?}");
        assert_eq!(machine.seen.len(), 2);
        front.submit(0, &transfer(READ, 3, 0, &[(page, 0, 7)]));
        machine.settle();
        assert_eq!(machine.seen.len(), 2, "requests after closing must be ignored");
        machine.file.hold = false;
        machine.settle();
        let mut answers = front.responses(0);
        answers.sort_unstable();
        assert_eq!(answers, [(1, READ, OKAY), (2, READ, OKAY)]);
        let counts = machine.host.counts();
        assert_eq!((front.backend_state().as_str(), counts.mapped, counts.bound), ("6", 0, 0));
    }
}

#[test]
fn no_front_end_connects_while_old_requests_are_in_flight() {
    for policy in POLICIES {
        let (mut machine, mut front) = connected(policy, Rings { persistent: true, ..Rings::default() });
        let (_, page) = front.page(3);
        machine.file.hold = true;
        front.submit(0, &transfer(READ, 1, 0, &[(page, 0, 7)]));
        machine.settle();
        // It restarts without its requests: its old ring must not be written to.
        front.write_state(1);
        machine.settle();
        assert_eq!((front.backend_state().as_str(), machine.host.counts().bound), ("4", 0), "{policy:?}");
        machine.file.hold = false;
        machine.settle();
        assert_eq!((front.backend_state().as_str(), machine.host.counts().mapped), ("2", 0));
        front.connect(&mut machine, Rings::default());
    }
}

#[test]
fn a_vanished_guest_or_node_leaks_nothing() {
    for (removed, state) in [(FRONTEND, Some("6")), (BACKEND, None)] {
        let (mut machine, mut front) =
            connected(GrantsPolicy::Persistent, Rings { persistent: true, ..Rings::default() });
        let (_, page) = front.page(3);
        assert_eq!(front.run(&mut machine, &transfer(READ, 1, 0, &[(page, 0, 7)])), OKAY);
        remove(&machine.host, removed);
        machine.settle();
        assert_eq!(get(&machine.host, &format!("{BACKEND}/state")).as_deref(), state);
        assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0));
        assert_eq!(machine.server.as_ref().unwrap().is_over(), state.is_none());
    }
}

#[test]
fn the_toolstack_can_detach_the_device() {
    let (mut machine, mut front) = connected(GrantsPolicy::Copy, Rings::default());
    set(&machine.host, &format!("{BACKEND}/online"), "0");
    set(&machine.host, &format!("{BACKEND}/state"), "5");
    machine.settle();
    assert!(machine.server.as_ref().unwrap().is_connected(), "connected until the front end releases the device");
    front.close(&mut machine);
    assert_eq!(front.backend_state(), "6");
    assert!(machine.server.as_ref().unwrap().is_over());
}

#[test]
fn a_stopping_server_waits_a_bounded_time() {
    let (mut machine, front) = connected(GrantsPolicy::Copy, Rings::default());
    machine.stop();
    assert!(machine.log.contains("stays connected: the guest still uses the device"), "{}", machine.log);
    assert_eq!(front.backend_state(), "5");
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    assert_eq!(front.backend_state(), "4", "the next process takes it over");
    front.write_state(6);
    machine.stop();
    assert_eq!((front.backend_state().as_str(), machine.host.counts().bound), ("6", 0));
}

#[test]
fn a_successor_answers_the_unanswered_requests() {
    for rings in [Rings::default(), Rings { abi: Abi::X86_32, queues: 2, order: 1, ..Rings::default() }] {
        let (mut machine, mut front) = machine(Config { on_stop: OnStop::Leave, ..config(GrantsPolicy::Copy) });
        front.connect(&mut machine, rings);
        let (_, page) = front.page(3);
        let mut unanswered = std::collections::BTreeSet::new();
        for round in 0..20u64 {
            machine.file.hold = round % 2 == 0;
            for id in 0..5 {
                front.put(0, &transfer(WRITE, round * 5 + id, 8 * id, &[(page, 0, 7)]));
                unanswered.insert(round * 5 + id);
            }
            front.push(0);
            machine.settle();
            for (id, _, status) in front.responses(0) {
                assert!(unanswered.remove(&id) && status == OKAY, "answered twice, or never submitted: {id}");
            }
            // The process is killed: its requests complete on the disk and are not answered.
            machine = successor(machine, Config { on_stop: OnStop::Leave, ..config(GrantsPolicy::Copy) });
            assert!(
                machine.log.contains("taken over") || {
                    machine.settle();
                    machine.log.contains("taken over")
                }
            );
        }
        machine.settle();
        front.responses(0).iter().for_each(|answer| assert!(unanswered.remove(&answer.0)));
        assert!(unanswered.is_empty(), "{unanswered:?} are unanswered");
    }
}

/// Starts another process with the file contents of the killed one.
fn successor(mut killed: TestBackend, config: Config) -> TestBackend {
    let mut machine = TestBackend::idle(&killed.host, killed.geometry);
    killed.server = None;
    machine.file.bytes.clone_from(&killed.file.bytes);
    drop(killed);
    machine.start(config).unwrap();
    machine
}
