//! What becomes of a front end whose back end is followed by another: by one with other options, in bad moments, and
//! after its own kernel has been followed by another one.
//!
//! Every moment is the business of the model (src/blkif/model); here is what a reader wants to see by itself.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]

mod blkif_mock;

use blkif_mock::{BACKEND, FRONTEND, Front, Machine, READ, Rings, WRITE, attach, config, discard, get, set, transfer};
use disk::{Request, Status, Transport};
use transport::Server;
use transport::blkif::{Config, GrantsPolicy, OnStop};
use xen::fake::{Access, Host, Part};

const OKAY: i16 = 0;
const UNSUPPORTED: i16 = -2;

const COMPLAINT: &str = "/local/domain/0/error/backend/tap/7/51712/error";

fn leaving(grants: GrantsPolicy) -> Config {
    Config { on_stop: OnStop::Leave, ..config(grants) }
}

/// A front end that one server has connected, and that server gone.
fn left(first: Config, rings: Rings) -> (Machine, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (Machine::new(&host, first), Front::new(&host));
    front.connect(&mut machine, rings);
    machine.server = None;
    machine.take_log();
    (machine, front)
}

#[test]
fn calls_that_fail_at_a_take_over_are_made_again_and_the_front_end_keeps_its_connection() {
    for part in [Part::Grants, Part::Channels] {
        for nth in 1..=2 {
            let rings = Rings { queues: 2, ..Rings::default() };
            let (mut machine, mut front) = left(leaving(GrantsPolicy::Copy), rings);
            machine.host.fail(part, nth);
            machine.start(leaving(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(front.backend_says(), "4", "{part:?} {nth}: {}", machine.log);
            if !machine.server.as_ref().unwrap().is_connected() {
                assert!(get(&machine.host, COMPLAINT).unwrap().contains("made to fail"));
                assert_eq!(machine.log.matches("trying again").count(), 1, "{}", machine.log);
            }
            machine.settle_when(|machine| machine.server.as_ref().unwrap().is_connected());
            let (_, page) = front.page(3);
            assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY);
            assert_eq!(get(&machine.host, COMPLAINT), None, "{part:?} {nth}");
        }
    }
}

/// Requests that were popped and are not begun.
fn popped(machine: &mut Machine) -> Vec<Request> {
    let (server, mut requests) = (machine.server.as_mut().unwrap(), Vec::new());
    for key in machine.watch.wait(false) {
        server.ready(key, &mut machine.watch);
    }
    while let Some(request) = server.pop(&machine.geometry) {
        requests.push(request);
    }
    requests
}

#[test]
fn what_waits_when_the_process_leaves_stays_in_the_ring_and_is_done_by_the_next() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
    front.connect(&mut machine, Rings::default());
    let pages = [7, 0].map(|byte| front.page(byte).1);
    front.ask(0, &transfer(WRITE, 1, 8, &[(pages[0], 0, 7)]));
    front.ask(0, &transfer(READ, 2, 64, &[(pages[1], 0, 7)]));
    let mut requests = popped(&mut machine);
    let (read, write) = (requests.pop().unwrap(), requests.pop().unwrap());
    let server = machine.server.as_mut().unwrap();
    assert!(!server.takes_back(), "one that closes is owed its answers");
    server.leave();
    assert!(server.takes_back() && !server.recalls(write.token()), "it may find space still");
    server.stop(&mut machine.watch);
    assert!(server.recalls(write.token()));
    server.give_back(write);
    server.complete(read, Status::Failed);
    server.publish().unwrap();
    // The answer takes the slot of the write, which is moved.
    assert_eq!(front.answers(0).iter().map(|answer| answer.0).collect::<Vec<_>>(), [2]);
    machine.server = None;
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    let answers: Vec<_> = front.answers(0).iter().map(|answer| (answer.0, answer.2)).collect();
    assert_eq!(answers, [(1, OKAY)], "{}", machine.log);
    assert_eq!(machine.file.bytes[8 * 512..16 * 512], [7; 4096]);
}

#[test]
fn attempts_are_rare_and_a_server_that_never_got_the_rings_closes_nobody() {
    let (mut machine, front) = left(leaving(GrantsPolicy::Copy), Rings::default());
    // Somebody else holds its event channel.
    let mut other = machine.host.channels().unwrap();
    let port = front.rings[0].port;
    let held = xen::EventChannels::bind(&mut other, blkif_mock::DOMAIN, port).unwrap();
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    for _ in 0..10 {
        // Whatever its guest says meanwhile.
        front.say(4);
        machine.settle();
    }
    assert!(machine.host.calls(Part::Channels) < 20, "{} calls", machine.host.calls(Part::Channels));
    machine.server.as_mut().unwrap().close();
    assert!(machine.server.as_ref().unwrap().is_closed(), "nobody is there who could let go");
    machine.stop();
    assert_eq!(front.backend_says(), "4", "{}", machine.log);
    xen::EventChannels::unbind(&mut other, held).unwrap();
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    assert!(machine.server.as_ref().unwrap().is_connected());
}

#[test]
fn a_front_end_is_served_as_it_was_offered_and_not_as_would_be_offered_now() {
    let first = Config { max_ring_pages_order: 2, max_queues: 4, max_segments: 64, ..leaving(GrantsPolicy::Auto) };
    let (mut machine, mut front) = left(first, Rings { order: 2, queues: 4, ..Rings::default() });
    let less = Config { max_ring_pages_order: 0, max_queues: 1, max_segments: 0, ..leaving(GrantsPolicy::Copy) };
    for _ in 0..2 {
        machine.start(less.clone()).unwrap();
        machine.settle();
        let (_, page) = front.page(7);
        let list = front.page(0);
        let descriptors: Vec<u8> = [&page.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat().repeat(64);
        front.guest.write(list.0, 0, &descriptors).unwrap();
        assert_eq!(front.run(&mut machine, &blkif_mock::indirect(WRITE, 1, 8, list.1, 64)), OKAY, "{}", machine.log);
        assert_eq!(get(&machine.host, &format!("{BACKEND}/multi-queue-max-queues")).as_deref(), Some("4"));
        machine.server = None;
    }
    // One that begins anew chooses from what there is now.
    machine.start(less).unwrap();
    machine.settle();
    front.close(&mut machine);
    front.say(1);
    machine.settle();
    assert_eq!(get(&machine.host, &format!("{BACKEND}/multi-queue-max-queues")).as_deref(), Some("1"));
}

#[test]
fn pages_stay_mapped_only_if_the_front_end_was_told_so() {
    let persistent = Rings { persistent: true, ..Rings::default() };
    for (first, then, mapped) in [
        (GrantsPolicy::Copy, GrantsPolicy::Auto, 1),
        (GrantsPolicy::Auto, GrantsPolicy::Copy, 1),
        (GrantsPolicy::Auto, GrantsPolicy::Auto, 2),
    ] {
        let (mut machine, mut front) = left(leaving(first), persistent);
        // The one after the next sees what the first has offered, too.
        for _ in 0..2 {
            machine.start(leaving(then)).unwrap();
            machine.settle();
            let (_, page) = front.page(3);
            assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY);
            assert_eq!(machine.host.counts().mapped, mapped, "{first:?} then {then:?}");
            machine.server = None;
        }
    }
}

#[test]
fn one_that_has_read_an_offer_before_it_is_connected_may_choose_from_it() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
    machine.settle();
    let less = Config { max_ring_pages_order: 0, max_queues: 1, ..leaving(GrantsPolicy::Auto) };
    machine.server = None;
    machine.start(less.clone()).unwrap();
    machine.settle();
    machine.server = None;
    front.initialise(Rings { order: 1, queues: 2, persistent: true, ..Rings::default() });
    machine.start(less).unwrap();
    machine.settle();
    front.say(4);
    machine.settle();
    let (_, page) = front.page(3);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY, "{}", machine.log);
    assert_eq!(machine.host.counts().mapped, 4, "the rings");
}

/// Firmware, a kernel, the kernel that boots when that has crashed: each with rings of its own, and none removes keys.
#[test]
fn what_an_earlier_kernel_has_chosen_is_not_believed() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Auto)), Front::new(&host));
    let many = Rings { queues: 4, order: 2, persistent: true, ..Rings::default() };
    for (kernel, rings) in [Rings::default(), many, Rings::default(), many].into_iter().enumerate() {
        front.connect_as_linux(&mut machine, rings);
        let (_, page) = front.page(3);
        for queue in 0..rings.queues as usize {
            front.ask(queue, &transfer(WRITE, 1, 8, &[(page, 0, 7)]));
            machine.settle();
            assert_eq!(front.answers(queue), [(1, WRITE, OKAY)], "kernel {kernel}: {}", machine.log);
        }
        // Linux's says that it closes when it finds a front end that its predecessor has left connected.
        for state in [5, 6, 1] {
            front.say(state);
            machine.settle();
        }
        assert_eq!(front.backend_says(), "2");
    }
}

#[test]
fn what_a_process_that_is_gone_owes_to_a_driver_that_closes_is_answered() {
    for state in [5, 6] {
        for ours in ["4", "5"] {
            let (mut machine, mut front) = left(leaving(GrantsPolicy::Copy), Rings::default());
            let (_, page) = front.page(3);
            front.put(0, &transfer(WRITE, 1, 8, &[(page, 0, 7)]));
            front.push(0);
            front.say(state);
            set(&machine.host, &format!("{BACKEND}/state"), ours);
            machine.start(leaving(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(front.answers(0), [(1, WRITE, OKAY)], "{state} {ours}: {}", machine.log);
            front.say(6);
            machine.settle();
            assert_eq!((front.backend_says().as_str(), machine.host.counts().mapped), ("6", 0));
        }
    }
}

#[test]
fn a_driver_that_has_closed_and_given_its_rings_up_is_let_go() {
    let (mut machine, mut front) = left(leaving(GrantsPolicy::Copy), Rings::default());
    front.say(6);
    front.forget();
    machine.start(leaving(GrantsPolicy::Copy)).unwrap();
    machine.settle_when(|machine| get(&machine.host, &format!("{BACKEND}/state")).as_deref() == Some("6"));
    assert_eq!(machine.host.counts().mapped, 0);
}

#[test]
fn a_toolstack_that_forbids_to_give_space_up_is_obeyed() {
    for (value, offered, answer) in [(None, "1", OKAY), (Some("1"), "1", OKAY), (Some("0"), "0", UNSUPPORTED)] {
        let host = Host::new().unwrap();
        attach(&host);
        value.inspect(|value| set(&host, &format!("{BACKEND}/discard-enable"), value));
        let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
        front.connect(&mut machine, Rings::default());
        assert_eq!(get(&host, &format!("{BACKEND}/feature-discard")).as_deref(), Some(offered));
        assert_eq!(get(&host, &format!("{BACKEND}/discard-granularity")).is_some(), offered == "1");
        let before = machine.file.bytes.clone();
        assert_eq!(front.run(&mut machine, &discard(0, 1, 8, 16)), answer);
        assert_eq!(machine.file.bytes == before, answer != OKAY);
        let (_, page) = front.page(0);
        assert_eq!(front.run(&mut machine, &transfer(READ, 2, 8, &[(page, 0, 7)])), OKAY);
        assert_eq!(get(&host, &format!("{FRONTEND}/state")).as_deref(), Some("4"));
    }
}

#[test]
fn a_guest_that_could_not_be_signalled_is_signalled_later() {
    let (mut machine, mut front) = left(leaving(GrantsPolicy::Copy), Rings::default());
    machine.start(leaving(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    let (_, page) = front.page(0);
    let port = front.rings[0].port;
    front.guest.signalled(port);
    front.put(0, &transfer(READ, 2, 8, &[(page, 0, 7)]));
    front.push(0);
    for nth in 1..10 {
        machine.host.fail(Part::Channels, nth);
        machine.settle_when(|_| front.guest.signalled(port));
        assert_eq!(front.answers(0).len(), 1, "{nth}");
        front.ask(0, &transfer(READ, 2, 8, &[(page, 0, 7)]));
    }
}

/// A page that cannot be mapped is copied, for a read as for a write, in a request that tells its pieces itself or
/// elsewhere.
#[test]
fn what_cannot_be_mapped_to_stay_is_copied() {
    for mapped_before in [false, true] {
        let host = Host::new().unwrap();
        attach(&host);
        let (mut machine, mut front) = (Machine::new(&host, config(GrantsPolicy::Persistent)), Front::new(&host));
        front.connect(&mut machine, Rings { persistent: true, ..Rings::default() });
        if mapped_before {
            let (_, page) = front.page(1);
            assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 0, &[(page, 0, 7)])), OKAY);
        }
        let before = machine.host.counts().mapped;
        // Granted to be read only, it can be copied from and not be mapped to be written, which stays so.
        let page = front.guest.page().unwrap();
        front.guest.write(page, 0, &[9; 4096]).unwrap();
        let granted = front.guest.grant(page, Access::ReadOnly);
        assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(granted, 0, 7)])), OKAY);
        let list = front.guest.page().unwrap();
        front.guest.write(list, 0, &[&granted.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat()).unwrap();
        let list = front.guest.grant(list, Access::ReadOnly);
        assert_eq!(front.run(&mut machine, &blkif_mock::indirect(WRITE, 2, 16, list, 1)), OKAY);
        assert_eq!(machine.file.bytes[4096..3 * 4096], [9; 2 * 4096]);
        assert_eq!(machine.host.counts().mapped, before);
        // Calls that fail while a page is read into: those that would map it.
        let (page, granted) = front.page(0);
        machine.host.observe(Some(maps_fail));
        assert_eq!(front.run(&mut machine, &transfer(READ, 3, 8, &[(granted, 0, 7)])), OKAY);
        machine.host.observe(None);
        assert_eq!(front.guest.read(page, 0, 4096).unwrap(), [9; 4096]);
        assert_eq!(front.run(&mut machine, &transfer(READ, 3, 8, &[(xen::GrantRef(77_777), 0, 7)])), -1, "a bad one");
    }
}

/// The first two calls that a read makes: to map with others, and to map alone.
fn maps_fail(part: Part) -> bool {
    thread_local!(static CALLS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    part == Part::Grants && CALLS.replace(CALLS.get() + 1) % 4 < 2
}

#[test]
fn one_that_does_not_wait_for_an_offer_is_refused_after_some_attempts_as_well() {
    let host = Host::new().unwrap();
    attach(&host);
    let mut front = Front::new(&host);
    front.initialise(Rings::default());
    set(&host, &format!("{FRONTEND}/ring-ref"), "99999999");
    let mut machine = Machine::new(&host, config(GrantsPolicy::Copy));
    machine.settle_when(|machine| get(&machine.host, &format!("{BACKEND}/state")).as_deref() != Some("1"));
    assert_eq!(front.backend_says(), "5", "{}", machine.log);
}
