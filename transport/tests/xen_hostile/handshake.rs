//! Invalid states and keys, in any order, and nodes that vanish.

use std::time::Instant;

use fastrand::Rng;

use crate::OKAY;
use crate::disk_process::TIMEOUT;
use crate::entry::{READ, Rings, transfer};
use crate::fixture::{Fixture, PERSISTENT, one_page};

#[test]
fn invalid_keys_are_refused_and_the_next_front_end_works() {
    let Some(mut fixture) = Fixture::new(&["--queues", "4"]) else { return };
    let huge = "9".repeat(3000);
    let bad: [(&str, Option<&str>); 29] = [
        ("ring-page-order", Some("5")),
        ("ring-page-order", Some("99")),
        ("ring-page-order", Some("-1")),
        ("ring-page-order", Some("4294967297")),
        ("ring-page-order", Some("")),
        ("ring-page-order", Some(&huge)),
        ("num-ring-pages", Some("0")),
        ("num-ring-pages", Some("3")),
        ("num-ring-pages", Some("32")),
        ("multi-queue-num-queues", Some("0")),
        ("multi-queue-num-queues", Some("2")),
        ("multi-queue-num-queues", Some("5")),
        ("multi-queue-num-queues", Some("65536")),
        ("multi-queue-num-queues", Some("two")),
        ("protocol", Some("vax-abi")),
        ("protocol", Some("x86_64-abi x")),
        ("protocol", Some(&huge)),
        ("protocol", Some("\u{1b}[2J\ntapline-disk: all is well")),
        ("ring-page-order", Some("\u{1b}[2J\ntapline-disk: all is well")),
        ("ring-ref", None),
        ("ring-ref", Some("0")),
        ("ring-ref", Some("99999999")),
        ("ring-ref", Some("-8")),
        ("ring-ref", Some("8; rm -rf /")),
        ("ring-ref", Some("\u{1}\u{2}\u{fffd}")),
        ("event-channel", None),
        ("event-channel", Some("0")),
        ("event-channel", Some("4294967295")),
        ("event-channel", Some("garbage")),
    ];
    for (key, value) in bad {
        let front = &mut fixture.front;
        front.write_toolstack_keys();
        front.await_backend(&["2"]);
        let keys = front.make_rings(Rings::default());
        keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
        match value {
            Some(value) => front.set(key, value.as_bytes()),
            None => front.unset(key),
        }
        front.write_state(3);
        front.await_backend(&["5"]);
        front.write_state(6);
        front.await_backend(&["6"]);
        front.forget();
    }
    // An event channel of another disk.
    let taken = fixture.bystander.front.rings[0].port.0.to_string();
    let front = &mut fixture.front;
    front.write_toolstack_keys();
    front.await_backend(&["2"]);
    let keys = front.make_rings(Rings::default());
    keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
    front.set("event-channel", taken.as_bytes());
    front.write_state(3);
    front.await_backend(&["5"]);
    front.write_state(6);
    front.await_backend(&["6"]);
    front.forget();
    let log = fixture.process.log_text();
    assert!(log.contains("cannot be connected"), "{log}");
    // The log quotes the value, but it can form neither a line of its own nor a long one.
    assert!(!log.contains('\u{1b}') && !log.contains("\ntapline-disk: all is well"), "{log}");
    assert!(log.lines().all(|line| line.len() < 400), "{log}");
    fixture.end(&[]);
}

#[test]
fn rings_that_share_pages_do_not_affect_other_disks() {
    let Some(mut fixture) = Fixture::new(&["--queues", "4"]) else { return };
    for queues in [1, 4] {
        let front = &mut fixture.front;
        front.write_toolstack_keys();
        front.await_backend(&["2"]);
        let keys = front.make_rings(Rings { order: 4, queues, ..PERSISTENT });
        let (page, _data) = one_page(front);
        let ring = front.rings[0].pages[0].0.to_string();
        // The same page sixteen times, in each ring.
        for (key, value) in keys {
            let value = if key.contains("ring-ref") { ring.clone() } else { value };
            front.set(&key, value.as_bytes());
        }
        front.write_state(3);
        front.await_backend(&["4"]);
        front.write_state(4);
        for id in 0..200 {
            front.put(0, &transfer((id % 9) as u8, id, id, &[(page, 0, 7)]));
            front.push(0);
        }
        front.wait_for_notification(200);
        fixture.bystander.work();
        fixture.close();
    }
    fixture.end(&[0..200 + 8]);
}

#[test]
fn random_states_and_keys_leak_nothing_and_end_in_a_connection() {
    Fixture::each_policy(|mut fixture, policy| {
        let mut random = Rng::with_seed(7 + policy.len() as u64);
        let front = &mut fixture.front;
        front.write_toolstack_keys();
        let keys = front.make_rings(Rings { queues: 2, ..PERSISTENT });
        keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
        let (page, _data) = one_page(front);
        let mut answered = 0;
        for step in 0..1000 {
            match random.u32(..20) {
                state @ 0..=9 => front.write_state(state),
                10 => front.unset("state"),
                11 => front.set("state", &[b'4'; 3900]),
                12 => front.set("state", b"\0\xff4"),
                13 => front.unset(&keys[random.usize(..keys.len())].0),
                14 => front.set(&keys[random.usize(..keys.len())].0, b"4294967295"),
                15 => front.set(&format!("unknown-{}", random.u8(..50)), &[b'x'; 2000]),
                16 => {
                    let queue = random.usize(..2);
                    if front.rings[queue].submitted.wrapping_sub(front.rings[queue].read) < front.slots {
                        front.put(queue, &transfer(READ, step, 0, &[(page, 0, 7)]));
                        front.push(queue);
                    }
                    answered += front.responses(queue).len();
                }
                // Most of the time all keys are valid.
                _ => keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes())),
            }
        }
        fixture.bystander.work();
        let front = &mut fixture.front;
        front.write_state(6);
        front.await_backend(&["6"]);
        front.forget();
        fixture.assert_idle();
        assert!(answered > 20, "{policy}: only {answered} requests were answered: it was rarely connected");
        fixture.end(&[]);
    });
}

#[test]
fn a_front_end_that_vanishes_is_disconnected() {
    Fixture::each_policy(|mut fixture, policy| {
        for way in 0..6 {
            fixture.connect(PERSISTENT);
            let front = &mut fixture.front;
            let (page, _data) = one_page(front);
            (0..32).for_each(|id| front.put(0, &transfer(READ, id, id * 8, &[(page, 0, 7)])));
            front.push(0);
            match way {
                // Its node is removed, with all keys.
                0 => {
                    let node = front.node.clone();
                    xen::Store::remove(&mut front.store, None, &node).unwrap();
                    front.await_backend(&["6"]);
                }
                // Only its state is removed.
                1 => {
                    front.unset("state");
                    front.await_backend(&["6"]);
                }
                // It is closed without having been in Closing.
                2 => {
                    front.write_state(6);
                    front.await_backend(&["6"]);
                }
                // It restarts, with its rings unchanged.
                3 => {
                    front.write_state(1);
                    front.await_backend(&["2"]);
                }
                // Its rings and channels are dropped, and then it restarts.
                4 => {
                    front.forget();
                    front.write_state(1);
                    front.await_backend(&["2"]);
                }
                // It restarts so fast that only its new rings are noticed.
                _ => {
                    front.write_state(1);
                    front.forget();
                    front.initialise(PERSISTENT);
                    front.write_state(4);
                    let began = Instant::now();
                    // The state may be that of the old connection: the new ring must be served.
                    while front.backend_state() != "4" || !serves(front, page) {
                        assert!(began.elapsed() < TIMEOUT, "{policy}: the new rings are not served");
                        front.write_state(3);
                        front.wait_for_notification(100);
                    }
                    front.close();
                }
            }
            fixture.front.forget();
            fixture.assert_idle();
            fixture.bystander.work();
        }
        fixture.end(&[]);
    });
}

/// Whether a request is answered soon.
fn serves(front: &mut crate::front::Front, page: xen::GrantRef) -> bool {
    if front.rings[0].submitted.wrapping_sub(front.rings[0].read) < front.slots {
        front.put(0, &transfer(READ, 5, 0, &[(page, 0, 7)]));
        front.push(0);
    }
    front.wait_for_notification(100);
    front.responses(0).iter().any(|answer| answer.2 == OKAY)
}
