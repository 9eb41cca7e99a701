//! What both ends' nodes say of a device that is left, refused, closed or removed, and of one with large blocks.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]

mod blkif_mock;

use blkif_mock::{
    BACKEND, FRONTEND, Front, LEN, Machine, READ, Rings, WRITE, attach, config, get, remove, set, transfer,
};
use disk::Geometry;
use transport::Server as _;
use transport::blkif::{Config, GrantsPolicy};
use xen::fake::{Counts, Host, Part};
use xen::{DomId, Store as _};

const OKAY: i16 = 0;
const ERROR: i16 = -1;

const COMPLAINT: &str = "/local/domain/0/error/backend/tap/7/51712/error";

fn machine(config: Config) -> (Machine, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    (Machine::new(&host, config), Front::new(&host))
}

#[test]
fn a_server_that_leaves_answers_what_it_has_and_another_goes_on() {
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
    let mut answered: Vec<u64> = front.answers(0).iter().map(|answer| answer.0).collect();
    answered.sort_unstable();
    assert_eq!(answered, [0, 1, 2, 3, 4], "what was taken is answered, and nothing more is taken");
    assert_eq!(machine.host.counts(), Counts::default());
    assert_eq!((front.backend_says().as_str(), machine.log.contains("lets go")), ("4", false));

    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    assert!(machine.log.contains("taken over"), "{}", machine.log);
    assert_eq!(front.answers(0), [(5, WRITE, OKAY)]);
    assert_eq!(machine.file.bytes[..6 * 4096], [3; 6 * 4096]);
}

#[test]
fn why_a_front_end_is_refused_stands_in_the_store_until_one_is_not() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    machine.settle();
    front.initialise(Rings::default());
    set(&machine.host, &format!("{FRONTEND}/protocol"), &"\u{1b}[2Jvax-abi".repeat(300));
    machine.settle();
    assert_eq!(front.backend_says(), "5");
    let complaint = get(&machine.host, COMPLAINT).unwrap();
    assert!(complaint.starts_with("22 ") && complaint.contains("x86_32-abi was offered"), "{complaint}");
    assert!(complaint.len() <= 256 && !complaint.contains('\u{1b}'), "{complaint}");
    assert!(!machine.log.contains('\u{1b}') && machine.log.len() < 1000, "{}", machine.log);

    front.close(&mut machine);
    front.say(1);
    front.connect(&mut machine, Rings::default());
    assert_eq!(get(&machine.host, COMPLAINT), None);
}

#[test]
fn a_closing_that_the_toolstack_has_asked_for_outlives_a_resize() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    set(&machine.host, &format!("{BACKEND}/online"), "0");
    set(&machine.host, &format!("{BACKEND}/state"), "5");
    let grown = Geometry { len: 2 * LEN, ..machine.geometry };
    machine.server.as_mut().unwrap().resized(&grown, &mut machine.watch);
    assert_eq!(front.backend_says(), "5");
    assert_eq!(get(&machine.host, &format!("{BACKEND}/sectors")).as_deref(), Some("16384"));
}

/// The toolstack removes the device, or closes it, at every moment: between any two calls of the server's to the store.
#[test]
fn what_the_toolstack_has_written_meanwhile_is_not_written_over() {
    for closing in [false, true] {
        for nth in 1.. {
            let host = Host::new().unwrap();
            attach(&host);
            let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
            machine.settle();
            front.initialise(Rings::default());
            let before = host.calls(xen::fake::Part::Store);
            host.when(xen::fake::Part::Store, nth, move |store| match closing {
                true => {
                    store.write(None, &format!("{BACKEND}/online"), b"0").unwrap();
                    store.write(None, &format!("{BACKEND}/state"), b"5").unwrap();
                }
                false => store.remove(None, BACKEND).unwrap(),
            });
            machine.settle();
            let calls = host.calls(xen::fake::Part::Store) - before;
            if calls < nth {
                assert!(nth > 20, "only {nth} calls");
                break;
            }
            let ended = machine.server.as_ref().unwrap().has_ended();
            match closing {
                true => assert_eq!(front.backend_says(), "5", "before call {nth}"),
                false => assert_eq!((get(&host, BACKEND), ended), (None, true), "before call {nth}"),
            }
        }
    }
}

/// io/blkif.h since Xen 4.20, and Linux's front end always: sectors are of 512 bytes, blocks only limit what may be asked.
#[test]
fn a_disk_of_large_blocks_is_counted_in_sectors_of_512_bytes() {
    let geometry = Geometry { block: 4096, ..config(GrantsPolicy::Copy).geometry };
    let (mut machine, mut front) = machine(Config { geometry, ..config(GrantsPolicy::Copy) });
    front.connect(&mut machine, Rings::default());
    let said =
        ["sectors", "sector-size", "physical-sector-size"].map(|key| get(&machine.host, &format!("{BACKEND}/{key}")));
    assert_eq!(said.each_ref().map(Option::as_deref), [Some("8192"), Some("4096"), Some("4096")]);
    let (page, grant) = front.page(0);
    assert_eq!(front.run(&mut machine, &transfer(READ, 1, 16, &[(grant, 0, 7)])), OKAY);
    assert_eq!(front.guest.read(page, 0, 1).unwrap(), [16], "the sixteenth sector, of 512 bytes");
    assert_eq!(front.run(&mut machine, &transfer(READ, 2, LEN / 512 - 8, &[(grant, 0, 7)])), OKAY);
    for (sector, first, last) in [(1, 0, 7), (0, 0, 0), (0, 1, 7), (LEN / 512, 0, 7)] {
        let asked = transfer(READ, 3, sector, &[(grant, first, last)]);
        assert_eq!(front.run(&mut machine, &asked), ERROR, "{sector} {first} {last}");
    }
}

#[test]
fn a_node_that_is_removed_ends_the_server_and_stays_removed() {
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

/// A front end that uses the device, and has asked for five writes which the storage holds back.
fn waiting() -> (Machine, Front, xen::GrantRef) {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    let (_, page) = front.page(3);
    machine.file.hold = true;
    for id in 0..5 {
        front.ask(0, &transfer(WRITE, id, 8 * id, &[(page, 0, 7)]));
    }
    machine.settle();
    (machine, front, page)
}

/// The numbers of the requests that are answered, each well.
fn answered(front: &mut Front) -> Vec<u64> {
    let answers = front.answers(0);
    assert!(answers.iter().all(|&(_, _, status)| status == OKAY), "{answers:?}");
    let mut ids: Vec<u64> = answers.iter().map(|answer| answer.0).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn a_server_that_is_to_stop_answers_until_its_front_end_has_closed() {
    let (mut machine, mut front, page) = waiting();
    let close = |machine: &mut Machine| machine.server.as_mut().unwrap().close();
    let is_closed = |machine: &Machine| machine.server.as_ref().unwrap().is_closed();
    close(&mut machine);
    assert_eq!(front.backend_says(), "5");
    front.ask(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
    machine.settle();
    // Linux's says so while it waits for its answers.
    front.say(6);
    front.ask(0, &transfer(WRITE, 6, 48, &[(page, 0, 7)]));
    machine.settle();
    assert!(!is_closed(&machine) && front.backend_says() == "5", "{}", machine.log);
    machine.file.hold = false;
    machine.settle();
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4, 5, 6]);
    assert!(is_closed(&machine));
    machine.stop();
    assert_eq!(front.backend_says(), "6");
    assert_eq!(machine.host.counts(), Counts::default());
    assert!(!machine.log.contains("under way") && !machine.log.contains("does not let"), "{}", machine.log);
}

#[test]
fn a_server_that_stops_answers_what_it_has_taken_whatever_its_front_end_does() {
    for closes in [false, true] {
        let (mut machine, mut front, page) = waiting();
        let server = machine.server.as_mut().unwrap();
        server.close();
        server.stop(&mut machine.watch);
        if closes {
            front.say(6);
        } else {
            front.ask(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
        }
        machine.file.hold = false;
        machine.settle();
        assert_eq!(answered(&mut front), [0, 1, 2, 3, 4]);
        machine.server = None;
        assert!(machine.log.contains("does not let the device go"), "{}", machine.log);
        assert_eq!(front.backend_says(), if closes { "6" } else { "5" });
        assert_eq!(machine.host.counts(), Counts::default());
        if !closes {
            machine.start(config(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(answered(&mut front), [5], "what was not taken is the next one's");
            assert_eq!(front.backend_says(), "4");
        }
    }
}

#[test]
fn a_device_that_is_closing_is_not_given_to_another_front_end() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    machine.server.as_mut().unwrap().close();
    front.say(1);
    machine.settle();
    assert!(machine.server.as_ref().unwrap().is_closed());
    assert_eq!(front.backend_says(), "5");
    machine.stop();
    assert_eq!(front.backend_says(), "6");
}

#[test]
fn a_store_that_does_not_take_the_wish_to_close_is_asked_once() {
    let (mut machine, mut front, _) = waiting();
    let before = machine.host.calls(Part::Store);
    machine.host.fail(Part::Store, 1);
    let server = machine.server.as_mut().unwrap();
    server.close();
    assert!(server.is_closed(), "nobody is waited for who was not asked");
    machine.stop();
    assert_eq!(machine.host.calls(Part::Store) - before, 1);
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4]);
    assert!(machine.log.contains("cannot close the device"), "{}", machine.log);
}

/// What a driver asks for when its node is gone it asks of nobody: its rings were let go when it was seen. Before that all is answered.
#[test]
fn a_front_end_whose_node_is_gone_has_answers_to_what_it_asked_before_and_to_nothing_after() {
    let (mut machine, mut front, page) = waiting();
    remove(&machine.host, FRONTEND);
    front.ask(0, &transfer(WRITE, 5, 40, &[(page, 0, 7)]));
    machine.settle();
    front.ask(0, &transfer(WRITE, 6, 48, &[(page, 0, 7)]));
    machine.file.hold = false;
    machine.settle();
    assert_eq!(answered(&mut front), [0, 1, 2, 3, 4, 5]);
    assert_eq!((front.backend_says().as_str(), machine.server.as_ref().unwrap().is_connected()), ("6", false));
    front.ask(0, &transfer(WRITE, 7, 56, &[(page, 0, 7)]));
    machine.settle();
    assert_eq!(front.answers(0), []);
    assert_eq!(machine.host.counts().mapped, 0);
}

#[test]
fn a_store_that_is_lost_is_told_of_once_and_the_rings_are_served_on() {
    let (mut machine, mut front) = machine(config(GrantsPolicy::Copy));
    front.connect(&mut machine, Rings::default());
    machine.take_log();
    machine.host.lose_stores();
    machine.settle();
    let (_, page) = front.page(3);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY);
    let calls = machine.host.calls(Part::Store);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 2, 16, &[(page, 0, 7)])), OKAY);
    machine.server.as_mut().unwrap().close();
    assert!(machine.server.as_ref().unwrap().is_closed(), "nobody can be waited for");
    machine.stop();
    assert_eq!(machine.host.calls(Part::Store), calls, "who does not answer is not asked");
    assert_eq!(machine.log.matches("the store is lost").count(), 1, "{}", machine.log);
    assert_eq!((machine.host.counts().mapped, machine.host.counts().bound), (0, 0));
}
