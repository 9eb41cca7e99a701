//! Nodes that say what they should not, in any order, or go.

use std::time::Instant;

use crate::OKAY;
use crate::bed::{Bed, PERSISTENT, one_page};
use crate::entry::{READ, Rings, transfer};
use crate::victim::PATIENCE;

/// Numbers that nobody chooses, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

#[test]
fn keys_that_make_no_sense_are_refused_and_the_next_front_end_is_not() {
    let Some(mut bed) = Bed::new(&["--queues", "4"]) else { return };
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
        let front = &mut bed.front;
        front.appear();
        front.await_backend(&["2"]);
        let keys = front.make_rings(Rings::default());
        keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
        match value {
            Some(value) => front.set(key, value.as_bytes()),
            None => front.unset(key),
        }
        front.say(3);
        front.await_backend(&["5"]);
        front.say(6);
        front.await_backend(&["6"]);
        front.forget();
    }
    // An event channel that is another's: one end of the disk beside.
    let taken = bed.beside.front.rings[0].port.0.to_string();
    let front = &mut bed.front;
    front.appear();
    front.await_backend(&["2"]);
    let keys = front.make_rings(Rings::default());
    keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
    front.set("event-channel", taken.as_bytes());
    front.say(3);
    front.await_backend(&["5"]);
    front.say(6);
    front.await_backend(&["6"]);
    front.forget();
    let said = bed.victim.said();
    assert!(said.contains("cannot be connected"), "{said}");
    // What it wrote is named, and is no line of its own, nor a long one.
    assert!(!said.contains('\u{1b}') && !said.contains("\ntapline-disk: all is well"), "{said}");
    assert!(said.lines().all(|line| line.len() < 400), "{said}");
    bed.end(&[]);
}

#[test]
fn rings_that_share_their_pages_harm_nobody_else() {
    let Some(mut bed) = Bed::new(&["--queues", "4"]) else { return };
    for queues in [1, 4] {
        let front = &mut bed.front;
        front.appear();
        front.await_backend(&["2"]);
        let keys = front.make_rings(Rings { order: 4, queues, ..PERSISTENT });
        let (page, _data) = one_page(front);
        let ring = front.rings[0].pages[0].0.to_string();
        // Sixteen times the same page, in each ring.
        for (key, value) in keys {
            let value = if key.contains("ring-ref") { ring.clone() } else { value };
            front.set(&key, value.as_bytes());
        }
        front.say(3);
        front.await_backend(&["4"]);
        front.say(4);
        for id in 0..200 {
            front.put(0, &transfer((id % 9) as u8, id, id, &[(page, 0, 7)]));
            front.push(0);
        }
        front.hear(200);
        bed.beside.work();
        bed.close();
    }
    bed.end(&[0..200 + 8]);
}

#[test]
fn states_and_keys_in_any_order_leave_nothing_and_end_in_a_connection() {
    Bed::each_policy(|mut bed, policy| {
        let mut random = Random(7 + policy.len() as u64);
        let front = &mut bed.front;
        front.appear();
        let keys = front.make_rings(Rings { queues: 2, ..PERSISTENT });
        keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes()));
        let (page, _data) = one_page(front);
        let mut answered = 0;
        for step in 0..1000 {
            match random.below(20) {
                state @ 0..=9 => front.say(state as u32),
                10 => front.unset("state"),
                11 => front.set("state", &[b'4'; 3900]),
                12 => front.set("state", b"\0\xff4"),
                13 => front.unset(&keys[random.below(keys.len() as u64) as usize].0),
                14 => front.set(&keys[random.below(keys.len() as u64) as usize].0, b"4294967295"),
                15 => front.set(&format!("unheard-of-{}", random.below(50)), &[b'x'; 2000]),
                16 => {
                    let queue = random.below(2) as usize;
                    if front.rings[queue].asked.wrapping_sub(front.rings[queue].read) < front.slots {
                        front.put(queue, &transfer(READ, step, 0, &[(page, 0, 7)]));
                        front.push(queue);
                    }
                    answered += front.answers(queue).len();
                }
                // Most of the time all is there.
                _ => keys.iter().for_each(|(key, value)| front.set(key, value.as_bytes())),
            }
        }
        bed.beside.work();
        let front = &mut bed.front;
        front.say(6);
        front.await_backend(&["6"]);
        front.forget();
        bed.assert_idle();
        assert!(answered > 20, "{policy}: only {answered} requests were answered: it was hardly ever connected");
        bed.end(&[]);
    });
}

#[test]
fn a_front_end_that_is_gone_without_a_word_is_let_go() {
    Bed::each_policy(|mut bed, policy| {
        for way in 0..6 {
            bed.connect(PERSISTENT);
            let front = &mut bed.front;
            let (page, _data) = one_page(front);
            (0..32).for_each(|id| front.put(0, &transfer(READ, id, id * 8, &[(page, 0, 7)])));
            front.push(0);
            match way {
                // Its node goes, with all keys.
                0 => {
                    let node = front.node.clone();
                    xen::Store::remove(&mut front.store, None, &node).unwrap();
                    front.await_backend(&["6"]);
                }
                // Only its state goes.
                1 => {
                    front.unset("state");
                    front.await_backend(&["6"]);
                }
                // It closes without having said that it would.
                2 => {
                    front.say(6);
                    front.await_backend(&["6"]);
                }
                // It begins anew, its rings as they were.
                3 => {
                    front.say(1);
                    front.await_backend(&["2"]);
                }
                // Its rings and channels go, and then it begins anew.
                4 => {
                    front.forget();
                    front.say(1);
                    front.await_backend(&["2"]);
                }
                // It begins anew so fast that only its new rings are seen.
                _ => {
                    front.say(1);
                    front.forget();
                    front.initialise(PERSISTENT);
                    front.say(4);
                    let began = Instant::now();
                    // The same state may be the old one's: what counts is that somebody serves the new ring.
                    while front.backend_says() != "4" || !serves(front, page) {
                        assert!(began.elapsed() < PATIENCE, "{policy}: the new rings are not served");
                        front.say(3);
                        front.hear(100);
                    }
                    front.close();
                }
            }
            bed.front.forget();
            bed.assert_idle();
            bed.beside.work();
        }
        bed.end(&[]);
    });
}

/// Whether a request is answered soon.
fn serves(front: &mut crate::front::Front, page: xen::GrantRef) -> bool {
    if front.rings[0].asked.wrapping_sub(front.rings[0].read) < front.slots {
        front.put(0, &transfer(READ, 5, 0, &[(page, 0, 7)]));
        front.push(0);
    }
    front.hear(100);
    front.answers(0).iter().any(|answer| answer.2 == OKAY)
}
