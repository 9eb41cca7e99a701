//! Takeovers of a front end: by a server with other options, with failing calls, and after a restart of its kernel.
//!
//! The model (src/blkif/model) covers every kill point; these tests cover individual cases.

use disk::{Request, Status, Transport};
use transport::blkif::{Config, GrantsPolicy, OnStop};
use transport::{Detach as _, Server as _, TakeBack as _};
use xen::fake::{Access, Host, Subsystem};

use crate::blkif_mock::{
    BACKEND, DOMAIN, FRONTEND, Front, READ, Rings, TestBackend, WRITE, attach, config, discard, get, indirect, set,
    transfer,
};

const OKAY: i16 = 0;
const UNSUPPORTED: i16 = -2;

const ERROR_NODE: &str = "/local/domain/0/error/backend/tap/7/51712/error";

fn leaving(grants: GrantsPolicy) -> Config {
    Config { on_stop: OnStop::Leave, ..config(grants) }
}

/// A connected front end whose server has ended.
fn abandoned(first: Config, rings: Rings) -> (TestBackend, Front) {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (TestBackend::new(&host, first), Front::new(&host));
    front.connect(&mut machine, rings);
    machine.server = None;
    machine.take_log();
    (machine, front)
}

#[test]
fn failed_calls_of_a_takeover_are_retried_without_a_disconnection() {
    for part in [Subsystem::Grants, Subsystem::Channels] {
        for nth in 1..=2 {
            let rings = Rings { queues: 2, ..Rings::default() };
            let (mut machine, mut front) = abandoned(leaving(GrantsPolicy::Copy), rings);
            machine.host.fail(part, nth);
            machine.start(leaving(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(front.backend_state(), "4", "{part:?} {nth}: {}", machine.log);
            if !machine.server.as_ref().unwrap().is_connected() {
                assert!(get(&machine.host, ERROR_NODE).unwrap().contains("made to fail"));
                assert_eq!(machine.log.matches("retrying").count(), 1, "{}", machine.log);
            }
            machine.settle_when(|machine| machine.server.as_ref().unwrap().is_connected());
            let (_, page) = front.page(3);
            assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY);
            assert_eq!(get(&machine.host, ERROR_NODE), None, "{part:?} {nth}");
        }
    }
}

/// Pops all available requests without starting them.
fn popped(machine: &mut TestBackend) -> Vec<Request> {
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
fn waiting_requests_stay_in_the_ring_and_are_done_by_the_next_process() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
    front.connect(&mut machine, Rings::default());
    let pages = [7, 0].map(|byte| front.page(byte).1);
    front.submit(0, &transfer(WRITE, 1, 8, &[(pages[0], 0, 7)]));
    front.submit(0, &transfer(READ, 2, 64, &[(pages[1], 0, 7)]));
    let mut requests = popped(&mut machine);
    let (read, write) = (requests.pop().unwrap(), requests.pop().unwrap());
    let server = machine.server.as_mut().unwrap();
    assert!(server.takes_back().is_none(), "a closing front end needs its responses");
    server.leave();
    assert!(server.takes_back().is_some_and(|server| !server.recalls(write.token())), "space may become available");
    server.stop(&mut machine.watch);
    assert!(server.recalls(write.token()));
    server.give_back(write);
    server.complete(read, Status::Failed);
    server.publish().unwrap();
    // The response takes the slot of the write, which is moved.
    assert_eq!(front.responses(0).iter().map(|answer| answer.0).collect::<Vec<_>>(), [2]);
    machine.server = None;
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    let answers: Vec<_> = front.responses(0).iter().map(|answer| (answer.0, answer.2)).collect();
    assert_eq!(answers, [(1, OKAY)], "{}", machine.log);
    assert_eq!(machine.file.bytes[0][8 * 512..16 * 512], [7; 4096]);
}

#[test]
fn retries_are_rare_and_a_server_that_never_attached_closes_no_front_end() {
    let (mut machine, front) = abandoned(leaving(GrantsPolicy::Copy), Rings::default());
    // Another process holds its event channel.
    let mut other = machine.host.channels().unwrap();
    let port = front.rings[0].port;
    let held = xen::EventChannels::bind(&mut other, DOMAIN, port).unwrap();
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    for _ in 0..10 {
        // Writes of the guest must not cause a retry.
        front.write_state(4);
        machine.settle();
    }
    assert!(machine.host.calls(Subsystem::Channels) < 20, "{} calls", machine.host.calls(Subsystem::Channels));
    machine.server.as_mut().unwrap().close();
    assert!(machine.server.as_ref().unwrap().is_closed(), "there is no front end that could release the device");
    machine.stop();
    assert_eq!(front.backend_state(), "4", "{}", machine.log);
    xen::EventChannels::unbind(&mut other, held).unwrap();
    machine.start(config(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    assert!(machine.server.as_ref().unwrap().is_connected());
}

#[test]
fn a_front_end_keeps_the_features_it_was_offered() {
    let first = Config { max_ring_pages_order: 2, max_queues: 4, max_segments: 64, ..leaving(GrantsPolicy::Auto) };
    let (mut machine, mut front) = abandoned(first, Rings { order: 2, queues: 4, ..Rings::default() });
    let less = Config { max_ring_pages_order: 0, max_queues: 1, max_segments: 0, ..leaving(GrantsPolicy::Copy) };
    for _ in 0..2 {
        machine.start(less.clone()).unwrap();
        machine.settle();
        let (_, page) = front.page(7);
        let list = front.page(0);
        let descriptors: Vec<u8> = [&page.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat().repeat(64);
        front.guest.write(list.0, 0, &descriptors).unwrap();
        assert_eq!(front.run(&mut machine, &indirect(WRITE, 1, 8, list.1, 64)), OKAY, "{}", machine.log);
        assert_eq!(get(&machine.host, &format!("{BACKEND}/multi-queue-max-queues")).as_deref(), Some("4"));
        machine.server = None;
    }
    // A front end that restarts chooses from the current features.
    machine.start(less).unwrap();
    machine.settle();
    front.close(&mut machine);
    front.write_state(1);
    machine.settle();
    assert_eq!(get(&machine.host, &format!("{BACKEND}/multi-queue-max-queues")).as_deref(), Some("1"));
}

#[test]
fn pages_stay_mapped_only_if_persistent_grants_were_offered() {
    let persistent = Rings { persistent: true, ..Rings::default() };
    for (first, then, mapped) in [
        (GrantsPolicy::Copy, GrantsPolicy::Auto, 1),
        (GrantsPolicy::Auto, GrantsPolicy::Copy, 1),
        (GrantsPolicy::Auto, GrantsPolicy::Auto, 2),
    ] {
        let (mut machine, mut front) = abandoned(leaving(first), persistent);
        // The third process also sees the features that the first one offered.
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
fn a_front_end_may_use_features_it_read_before_a_takeover() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
    machine.settle();
    let less = Config { max_ring_pages_order: 0, max_queues: 1, ..leaving(GrantsPolicy::Auto) };
    machine.server = None;
    machine.start(less.clone()).unwrap();
    machine.settle();
    machine.server = None;
    front.initialise(Rings { order: 1, queues: 2, persistent: true, ..Rings::default() });
    machine.start(less).unwrap();
    machine.settle();
    front.write_state(4);
    machine.settle();
    let (_, page) = front.page(3);
    assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(page, 0, 7)])), OKAY, "{}", machine.log);
    assert_eq!(machine.host.counts().mapped, 4, "only the rings are mapped");
}

/// Firmware, a kernel, and the kernel that boots after a crash: each creates its own rings, and none removes keys.
#[test]
fn choices_of_an_earlier_kernel_are_ignored() {
    let host = Host::new().unwrap();
    attach(&host);
    let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Auto)), Front::new(&host));
    let many = Rings { queues: 4, order: 2, persistent: true, ..Rings::default() };
    for (kernel, rings) in [Rings::default(), many, Rings::default(), many].into_iter().enumerate() {
        front.connect_as_linux(&mut machine, rings);
        let (_, page) = front.page(3);
        for queue in 0..rings.queues as usize {
            front.submit(queue, &transfer(WRITE, 1, 8, &[(page, 0, 7)]));
            machine.settle();
            assert_eq!(front.responses(queue), [(1, WRITE, OKAY)], "kernel {kernel}: {}", machine.log);
        }
        // Linux's front end writes Closing when it finds a device that its predecessor left connected.
        for state in [5, 6, 1] {
            front.write_state(state);
            machine.settle();
        }
        assert_eq!(front.backend_state(), "2");
    }
}

#[test]
fn inherited_requests_of_a_closing_driver_are_answered() {
    for state in [5, 6] {
        for ours in ["4", "5"] {
            let (mut machine, mut front) = abandoned(leaving(GrantsPolicy::Copy), Rings::default());
            let (_, page) = front.page(3);
            front.put(0, &transfer(WRITE, 1, 8, &[(page, 0, 7)]));
            front.push(0);
            front.write_state(state);
            set(&machine.host, &format!("{BACKEND}/state"), ours);
            machine.start(leaving(GrantsPolicy::Copy)).unwrap();
            machine.settle();
            assert_eq!(front.responses(0), [(1, WRITE, OKAY)], "{state} {ours}: {}", machine.log);
            front.write_state(6);
            machine.settle();
            assert_eq!((front.backend_state().as_str(), machine.host.counts().mapped), ("6", 0));
        }
    }
}

#[test]
fn a_driver_that_closed_and_released_its_rings_is_disconnected() {
    let (mut machine, mut front) = abandoned(leaving(GrantsPolicy::Copy), Rings::default());
    front.write_state(6);
    front.forget();
    machine.start(leaving(GrantsPolicy::Copy)).unwrap();
    machine.settle_when(|machine| get(&machine.host, &format!("{BACKEND}/state")).as_deref() == Some("6"));
    assert_eq!(machine.host.counts().mapped, 0);
}

#[test]
fn the_toolstack_can_disable_discard() {
    for (value, offered, answer) in [(None, "1", OKAY), (Some("1"), "1", OKAY), (Some("0"), "0", UNSUPPORTED)] {
        let host = Host::new().unwrap();
        attach(&host);
        value.inspect(|value| set(&host, &format!("{BACKEND}/discard-enable"), value));
        let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Copy)), Front::new(&host));
        front.connect(&mut machine, Rings::default());
        assert_eq!(get(&host, &format!("{BACKEND}/feature-discard")).as_deref(), Some(offered));
        assert_eq!(get(&host, &format!("{BACKEND}/discard-granularity")).is_some(), offered == "1");
        let before = machine.file.bytes[0].clone();
        assert_eq!(front.run(&mut machine, &discard(0, 1, 8, 16)), answer);
        assert_eq!(machine.file.bytes[0] == before, answer != OKAY);
        let (_, page) = front.page(0);
        assert_eq!(front.run(&mut machine, &transfer(READ, 2, 8, &[(page, 0, 7)])), OKAY);
        assert_eq!(get(&host, &format!("{FRONTEND}/state")).as_deref(), Some("4"));
    }
}

#[test]
fn a_failed_notification_is_retried_later() {
    let (mut machine, mut front) = abandoned(leaving(GrantsPolicy::Copy), Rings::default());
    machine.start(leaving(GrantsPolicy::Copy)).unwrap();
    machine.settle();
    let (_, page) = front.page(0);
    let port = front.rings[0].port;
    front.guest.signalled(port);
    front.put(0, &transfer(READ, 2, 8, &[(page, 0, 7)]));
    front.push(0);
    for nth in 1..10 {
        machine.host.fail(Subsystem::Channels, nth);
        machine.settle_when(|_| front.guest.signalled(port));
        assert_eq!(front.responses(0).len(), 1, "{nth}");
        front.submit(0, &transfer(READ, 2, 8, &[(page, 0, 7)]));
    }
}

/// A page that cannot be mapped is copied, for reads as well as writes, in direct and indirect requests.
#[test]
fn pages_that_cannot_be_mapped_persistently_are_copied() {
    for mapped_before in [false, true] {
        let host = Host::new().unwrap();
        attach(&host);
        let (mut machine, mut front) = (TestBackend::new(&host, config(GrantsPolicy::Persistent)), Front::new(&host));
        front.connect(&mut machine, Rings { persistent: true, ..Rings::default() });
        if mapped_before {
            let (_, page) = front.page(1);
            assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 0, &[(page, 0, 7)])), OKAY);
        }
        let before = machine.host.counts().mapped;
        // Granted read-only, it can be copied from but not mapped writable, and that remains so.
        let page = front.guest.page().unwrap();
        front.guest.write(page, 0, &[9; 4096]).unwrap();
        let granted = front.guest.grant(page, Access::ReadOnly);
        assert_eq!(front.run(&mut machine, &transfer(WRITE, 1, 8, &[(granted, 0, 7)])), OKAY);
        let list = front.guest.page().unwrap();
        front.guest.write(list, 0, &[&granted.0.to_le_bytes()[..], &[0, 7, 0, 0]].concat()).unwrap();
        let list = front.guest.grant(list, Access::ReadOnly);
        assert_eq!(front.run(&mut machine, &indirect(WRITE, 2, 16, list, 1)), OKAY);
        assert_eq!(machine.file.bytes[0][4096..3 * 4096], [9; 2 * 4096]);
        assert_eq!(machine.host.counts().mapped, before);
        // The calls fail that would map the page of a read.
        let (page, granted) = front.page(0);
        machine.host.observe(Some(maps_fail));
        assert_eq!(front.run(&mut machine, &transfer(READ, 3, 8, &[(granted, 0, 7)])), OKAY);
        machine.host.observe(None);
        assert_eq!(front.guest.read(page, 0, 4096).unwrap(), [9; 4096]);
        assert_eq!(front.run(&mut machine, &transfer(READ, 3, 8, &[(xen::GrantRef(77_777), 0, 7)])), -1, "a bad grant");
    }
}

/// Fails the first two calls of a read: mapping together with others, and mapping alone.
fn maps_fail(part: Subsystem) -> bool {
    thread_local!(static CALLS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) });
    part == Subsystem::Grants && CALLS.replace(CALLS.get() + 1) % 4 < 2
}

#[test]
fn a_front_end_that_initialises_early_is_also_refused() {
    let host = Host::new().unwrap();
    attach(&host);
    let mut front = Front::new(&host);
    front.initialise(Rings::default());
    set(&host, &format!("{FRONTEND}/ring-ref"), "99999999");
    let mut machine = TestBackend::new(&host, config(GrantsPolicy::Copy));
    machine.settle_when(|machine| get(&machine.host, &format!("{BACKEND}/state")).as_deref() != Some("1"));
    assert_eq!(front.backend_state(), "5", "{}", machine.log);
}
