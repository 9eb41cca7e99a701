//! The states of both ends when a device is left, refused, closed or removed, and a disk with large blocks.

use disk::Geometry;
use transport::blkif::{Config, GrantsPolicy};
use transport::{Detach as _, Server as _};
use xen::fake::{Counts, Host, Subsystem};
use xen::{DomId, Store as _};

use crate::blkif_mock::{
    BACKEND, FRONTEND, Front, LEN, READ, Rings, TestBackend, WRITE, attach, config, get, remove, set, transfer,
};

const OKAY: i16 = 0;
const ERROR: i16 = -1;

const ERROR_NODE: &str = "/local/domain/0/error/backend/tap/7/51712/error";

fn machine(config: Config) -> (TestBackend, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    (TestBackend::new(&host, config), Front::new(&host))
}

#[test]
fn a_leaving_server_answers_its_requests_and_another_continues() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    let (_, page) = front.page(3);
    machine.file.hold = true;
    for id in 0..5 {
        front.put(0, &transfer(WRITE, id, 8 * id, &[(page, 0, 7)]));
    }
    front.push(0);
    machine.settle();
    machine.server.as_mut().unwrap().leave();
    front.put(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
    front.push(0);
    machine.stop();
    let mut answered: Vec<u64> = front.responses(0).iter().map(|answer| answer.0).collect();
    answered.sort_unstable();
    assert_eq!(answered, [0, 1, 2, 3, 4], "requests taken are answered, and no more are taken");
    assert_eq!(machine.host.counts(), Counts::default());
    assert_eq!((front.backend_state().as_str(), machine.log.contains("does not release")), ("4", false));

    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    assert!(machine.log.contains("taken over"), "{}", machine.log);
    assert_eq!(front.responses(0), [(5, WRITE, OKAY)]);
    assert_eq!(machine.file.bytes[0][..6 * 4096], [3; 6 * 4096]);
}

#[test]
fn the_reason_for_a_refusal_is_in_the_store_until_a_front_end_connects() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    machine.settle();
    front.initialise(Rings::default());
    set(&machine.host, &format!("{FRONTEND}/protocol"), &"\u{1b}[2Jvax-abi".repeat(300));
    machine.settle();
    assert_eq!(front.backend_state(), "5");
    let error = get(&machine.host, ERROR_NODE).unwrap();
    assert!(error.starts_with("22 ") && error.contains("must be x86_64-abi or x86_32-abi"), "{error}");
    assert!(error.len() <= 256 && !error.contains('\u{1b}'), "{error}");
    assert!(!machine.log.contains('\u{1b}') && machine.log.len() < 1000, "{}", machine.log);

    front.close(&mut machine);
    front.write_state(1);
    front.connect(&mut machine, Rings::default());
    assert_eq!(get(&machine.host, ERROR_NODE), None);
}

#[test]
fn a_close_requested_by_the_toolstack_survives_a_resize() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    set(&machine.host, &format!("{BACKEND}/online"), "0");
    set(&machine.host, &format!("{BACKEND}/state"), "5");
    let grown = Geometry { len: 2 * LEN, ..machine.geometry };
    machine.server.as_mut().unwrap().resized(&grown, &mut machine.watch);
    assert_eq!(front.backend_state(), "5");
    assert_eq!(get(&machine.host, &format!("{BACKEND}/sectors")).as_deref(), Some("16384"));
}

/// The toolstack removes the device, or closes it, at every point: between any two store calls of the server.
#[test]
fn concurrent_writes_of_the_toolstack_are_not_overwritten() {
    for closing in [false, true] {
        for nth in 1.. {
            let host = Host::new().unwrap();
            attach(&host);
            let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
            machine.settle();
            front.initialise(Rings::default());
            let before = host.calls(xen::fake::Subsystem::Store);
            host.when(xen::fake::Subsystem::Store, nth, move |store| match closing {
                true => {
                    store.write(None, &format!("{BACKEND}/online"), b"0").unwrap();
                    store.write(None, &format!("{BACKEND}/state"), b"5").unwrap();
                }
                false => store.remove(None, BACKEND).unwrap(),
            });
            machine.settle();
            let calls = host.calls(xen::fake::Subsystem::Store) - before;
            if calls < nth {
                assert!(nth > 20, "only {nth} calls");
                break;
            }
            let ended = machine.server.as_ref().unwrap().is_over();
            match closing {
                true => assert_eq!(front.backend_state(), "5", "before call {nth}"),
                false => assert_eq!((get(&host, BACKEND), ended), (None, true), "before call {nth}"),
            }
        }
    }
}

/// In io/blkif.h since Xen 4.20, and always in Linux's front end, sectors have 512 bytes, and blocks only restrict
/// alignment.
#[test]
fn the_size_of_a_disk_with_large_blocks_is_in_512_byte_sectors() {
    let geometry = Geometry { block: 4096, ..config(GrantsPolicy::Copy).geometry };
    let (mut machine, mut front) = machine(Config { geometry, ..config(GrantsPolicy::Copy) });
    front.connect(&mut machine, Rings::default());
    let keys =
        ["sectors", "sector-size", "physical-sector-size"].map(|key| get(&machine.host, &format!("{BACKEND}/{key}")));
    assert_eq!(keys.each_ref().map(Option::as_deref), [Some("8192"), Some("4096"), Some("4096")]);
    let (page, grant) = front.page(0);
    assert_eq!(front.run(&mut machine, &transfer(READ, 1, 16, &[(grant, 0, 7)])), OKAY);
    assert_eq!(front.guest.read(page, 0, 1).unwrap(), [16], "the sixteenth 512-byte sector");
    assert_eq!(front.run(&mut machine, &transfer(READ, 2, LEN / 512 - 8, &[(grant, 0, 7)])), OKAY);
    for (sector, first, last) in [(1, 0, 7), (0, 0, 0), (0, 1, 7), (LEN / 512, 0, 7)] {
        let request = transfer(READ, 3, sector, &[(grant, first, last)]);
        assert_eq!(front.run(&mut machine, &request), ERROR, "{sector} {first} {last}");
    }
}

#[test]
fn removing_the_node_ends_the_server_and_it_is_not_recreated() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    let mut store = machine.host.store(DomId(0)).unwrap();
    remove(&machine.host, BACKEND);
    machine.server.as_mut().unwrap().resized(&machine.geometry, &mut machine.watch);
    machine.settle();
    machine.stop();
    assert_eq!(store.read(None, BACKEND).unwrap(), None);
    assert_eq!(store.list(None, "/local/domain/0/backend/tap/7").unwrap(), Some(Vec::new()));
}

/// A connected front end with five submitted writes, which the storage holds back.
fn with_held_writes() -> (TestBackend, Front, xen::GrantRef) {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    let (_, page) = front.page(3);
    machine.file.hold = true;
    for id in 0..5 {
        front.submit(0, &transfer(WRITE, id, 8 * id, &[(page, 0, 7)]));
    }
    machine.settle();
    (machine, front, page)
}

/// The ids of the answered requests; each must have succeeded.
fn answered(front: &mut Front) -> Vec<u64> {
    let answers = front.responses(0);
    assert!(answers.iter().all(|&(_, _, status)| status == OKAY), "{answers:?}");
    let mut ids: Vec<u64> = answers.iter().map(|answer| answer.0).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn a_stopping_server_answers_until_its_front_end_has_closed() {
    let (mut machine, mut front, page) = with_held_writes();
    let close = |machine: &mut TestBackend| machine.server.as_mut().unwrap().close();
    let is_closed = |machine: &TestBackend| machine.server.as_ref().unwrap().is_closed();
    close(&mut machine);
    assert_eq!(front.backend_state(), "5");
    front.submit(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
    machine.settle();
    // Linux's front end writes this state while it waits for its responses.
    front.write_state(6);
    front.submit(0, &transfer(WRITE, 6, 48, &[(page, 0, 7)]));
    machine.settle();
    assert!(!is_closed(&machine) && front.backend_state() == "5", "{}", machine.log);
    machine.file.hold = false;
    machine.settle();
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4, 5, 6]);
    assert!(is_closed(&machine));
    machine.stop();
    assert_eq!(front.backend_state(), "6");
    assert_eq!(machine.host.counts(), Counts::default());
    assert!(!machine.log.contains("in flight") && !machine.log.contains("still uses the device"), "{}", machine.log);
}

#[test]
fn a_stopping_server_always_answers_its_requests() {
    for closes in [false, true] {
        let (mut machine, mut front, page) = with_held_writes();
        let server = machine.server.as_mut().unwrap();
        server.close();
        server.stop(&mut machine.watch);
        if closes {
            front.write_state(6);
        } else {
            front.submit(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
        }
        machine.file.hold = false;
        machine.settle();
        assert_eq!(answered(&mut front), [0, 1, 2, 3, 4]);
        machine.server = None;
        assert!(machine.log.contains("still uses the device"), "{}", machine.log);
        assert_eq!(front.backend_state(), if closes { "6" } else { "5" });
        assert_eq!(machine.host.counts(), Counts::default());
        if !closes {
            machine.start(config(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(answered(&mut front), [5], "a request not taken is left to the next process");
            assert_eq!(front.backend_state(), "4");
        }
    }
}

#[test]
fn a_closing_device_accepts_no_other_front_end() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    machine.server.as_mut().unwrap().close();
    front.write_state(1);
    machine.settle();
    assert!(machine.server.as_ref().unwrap().is_closed());
    assert_eq!(front.backend_state(), "5");
    machine.stop();
    assert_eq!(front.backend_state(), "6");
}

#[test]
fn a_failed_write_of_the_closing_state_is_not_retried() {
    let (mut machine, mut front, _) = with_held_writes();
    let before = machine.host.calls(Subsystem::Store);
    machine.host.fail(Subsystem::Store, 1);
    let server = machine.server.as_mut().unwrap();
    server.close();
    assert!(server.is_closed(), "a front end without a close request must not be waited for");
    machine.stop();
    assert_eq!(machine.host.calls(Subsystem::Store) - before, 1);
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4]);
    assert!(machine.log.contains("cannot close the device"), "{}", machine.log);
}

/// Requests submitted after the server has noticed the removal are not seen, because it has released the rings. All
/// earlier ones are answered.
#[test]
fn a_front_end_without_a_node_gets_only_responses_to_earlier_requests() {
    let (mut machine, mut front, page) = with_held_writes();
    remove(&machine.host, FRONTEND);
    front.submit(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
    machine.settle();
    front.submit(0, &transfer(WRITE, 6, 48, &[(page, 0, 7)]));
    machine.file.hold = false;
    machine.settle();
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4, 5]);
    assert_eq!((front.backend_state().as_str(), machine.server.as_ref().unwrap().is_connected()), ("6", false));
    front.submit(0, &transfer(WRITE, 7, 56, &[(page, 0, 7)]));
    machine.settle();
    assert_eq!(front.responses(0), []);
    assert_eq!(machine.host.counts().mapped, 0);
}

#[test]
fn a_lost_store_is_logged_once_and_the_rings_are_still_served() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    machine.take_log();
    machine.host.break_store_connections();
    machine.settle();
    let (_, page) = front.page(3);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY);
    let calls = machine.host.calls(Subsystem::Store);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 2, 16, &[(page, 0, 7)])), OKAY);
    machine.server.as_mut().unwrap().close();
    assert!(machine.server.as_ref().unwrap().is_closed(), "no front end can be waited for");
    machine.stop();
    assert_eq!(machine.host.calls(Subsystem::Store), calls, "a lost store must not be queried");
    assert_eq!(machine.log.matches("the store is lost").count(), 1, "{}", machine.log);
    assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0));
}
