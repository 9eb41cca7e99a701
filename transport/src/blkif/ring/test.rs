//! Rings in the states in which a front end, or a killed process, leaves them.
//!
//! Invariant checked: with any contents of a ring, no request is lost or answered twice.

use super::super::abi::{X86_32, X86_64};
use super::*;

/// Two mappings of one page, for two rings that are attached one after the other.
fn page() -> (Shared, Shared) {
    let host = xen::fake::Host::new().unwrap();
    let guest = host.guest(xen::DomId(1));
    let page = guest.page().unwrap();
    (guest.shared(&[page]).unwrap(), guest.shared(&[page]).unwrap())
}

fn snapshot(shared: &Shared) -> [u8; 4096] {
    shared.read(0).unwrap()
}

/// Submits requests with these ids, starting at index `from`.
fn submit(shared: &Shared, layout: &EntryLayout, from: u32, ids: std::ops::Range<u64>) {
    let mut index = from;
    for id in ids {
        let at = layout.offset_of(slot(index));
        shared.write(at, [0; 32]).unwrap();
        let place = if layout == &X86_32 { 4 } else { 8 };
        shared.write(at + place, id.to_le_bytes()).unwrap();
        index = index.wrapping_add(1);
    }
    shared.store_u32(REQ_PROD, index).unwrap();
}

fn response(id: u64) -> Response {
    Response { id, operation: 1, status: -1 }
}

/// The slot of an index in a ring of one page.
fn slot(index: u32) -> u16 {
    u16::try_from(index & 31).unwrap()
}

/// The ids answered so far.
fn answers(shared: &Shared, layout: &EntryLayout, from: u32) -> Vec<u64> {
    let to = shared.load_u32(RSP_PROD).unwrap();
    let count = to.wrapping_sub(from);
    let at = |step| layout.offset_of(slot(from.wrapping_add(step)));
    (0..count).map(|step| u64::from_le_bytes(shared.read(at(step)).unwrap())).collect()
}

fn take_all(ring: &mut Ring, first: u16) -> Vec<u64> {
    let mut number = first;
    std::iter::from_fn(|| {
        let id = ring.take(number).unwrap()?.id();
        number += 1;
        Some(id)
    })
    .collect()
}

#[test]
fn an_event_is_crossed_exactly_when_it_is_within_the_advance() {
    for old in [0, 5, u32::MAX - 3, u32::MAX] {
        for step in 0..9u32 {
            for ahead in 0..12u32 {
                let (event, new) = (old.wrapping_add(ahead), old.wrapping_add(step));
                assert_eq!(has_crossed(event, old, new), ahead >= 1 && ahead <= step, "{event} from {old} to {new}");
            }
        }
    }
}

#[test]
fn indices_wrap_around_and_responses_leak_no_memory() {
    for layout in [&X86_64, &X86_32] {
        let (ours, theirs) = page();
        let start = u32::MAX - 2;
        theirs.store_u32(RSP_PROD, start).unwrap();
        submit(&theirs, layout, start, 10..16);
        theirs.write(layout.offset_of(slot(start)), [0xff; 2]).unwrap();
        let mut ring = Ring::attach(ours, layout).unwrap();
        assert_eq!(take_all(&mut ring, 0).len(), 6);
        for (number, id) in (10..16u64).enumerate() {
            ring.respond(u16::try_from(number).unwrap(), response(id)).unwrap();
        }
        assert_eq!(answers(&theirs, layout, start), (10..16).collect::<Vec<_>>());
        let raw: [u8; 16] = theirs.read(layout.offset_of(slot(start))).unwrap();
        assert_eq!(raw[8..12], [1, 0, 0xff, 0xff]);
        assert!(layout == &X86_32 || raw[12..] == [0; 4]);
    }
}

#[test]
fn an_out_of_range_index_is_an_error() {
    let (ours, theirs) = page();
    submit(&theirs, &X86_64, 0, 0..3);
    let mut ring = Ring::attach(ours, &X86_64).unwrap();
    assert!(ring.take(0).unwrap().is_some());
    theirs.store_u32(REQ_PROD, 33).unwrap();
    assert!((1..3).all(|number| ring.take(number).unwrap().is_some()), "requests announced earlier");
    assert_eq!(ring.is_empty(), Err(Broken::IndexOutOfRange { from: 0, to: 33, slots: 32 }));
    theirs.store_u32(REQ_PROD, 2).unwrap();
    assert!(matches!(ring.take(3), Err(Broken::IndexOutOfRange { to: 2, .. })), "an index that decreased");
    theirs.store_u32(REQ_PROD, 32).unwrap();
    assert_eq!(ring.is_empty(), Ok(false), "a full ring is valid");
}

#[test]
fn the_front_end_is_notified_at_its_event_index() {
    let (ours, theirs) = page();
    submit(&theirs, &X86_64, 0, 0..8);
    theirs.store_u32(RSP_EVENT, 4).unwrap();
    let mut ring = Ring::attach(ours, &X86_64).unwrap();
    take_all(&mut ring, 0);
    assert_eq!(ring.must_notify(), Ok(true), "always the first time");
    let mut answer = |number| {
        ring.respond(number, response(0)).unwrap();
        ring.must_notify().unwrap()
    };
    assert_eq!([answer(0), answer(1), answer(2), answer(3), answer(4)], [false, false, false, true, false]);
    assert_eq!(theirs.load_u32(REQ_EVENT), Some(0), "no notification requested while busy");
    ring.request_notification().unwrap();
    assert_eq!(theirs.load_u32(REQ_EVENT), Some(9));
}

#[test]
fn unanswered_requests_are_found_after_completions_in_any_order() {
    for layout in [&X86_64, &X86_32] {
        // All orders in which three of five requests can complete.
        for order in (0..60usize).map(|n| [n % 5, n / 5 % 4, n / 20]) {
            let mut left: Vec<u16> = (0..5).collect();
            let (ours, theirs) = page();
            submit(&theirs, layout, 0, 100..105);
            let mut ring = Ring::attach(ours, layout).unwrap();
            take_all(&mut ring, 0);
            let completed: Vec<u16> = order.into_iter().map(|index| left.remove(index)).collect();
            for &number in &completed {
                ring.respond(number, response(100 + u64::from(number))).unwrap();
            }
            drop(ring);
            let answered = answers(&theirs, layout, 0);
            assert_eq!(answered, completed.iter().map(|&n| 100 + u64::from(n)).collect::<Vec<_>>());
            let mut found = take_all(&mut Ring::attach(theirs, layout).unwrap(), 0);
            found.sort_unstable();
            assert_eq!(found, left.iter().map(|&n| 100 + u64::from(n)).collect::<Vec<_>>(), "after {completed:?}");
        }
    }
}

/// The contents of the ring after a kill between any two stores of one response, and after the last. `stores` are their
/// locations, in order.
fn killed_images(before: [u8; 4096], after: [u8; 4096], stores: &[std::ops::Range<usize>]) -> Vec<[u8; 4096]> {
    let mut image = before;
    let mut images = vec![before];
    for store in stores {
        image[store.clone()].copy_from_slice(&after[store.clone()]);
        images.push(image);
    }
    assert_eq!(image, after, "some stores are missing from the list");
    images
}

/// Asserts that a process that takes over finds each of these ids once: unanswered or answered.
fn assert_nothing_is_lost(image: [u8; 4096], layout: &'static EntryLayout, ids: std::ops::Range<u64>, when: &str) {
    let (ours, theirs) = page();
    theirs.write(0, image).unwrap();
    let mut found = take_all(&mut Ring::attach(ours, layout).unwrap(), 0);
    found.extend(answers(&theirs, layout, 0));
    found.sort_unstable();
    assert_eq!(found, ids.collect::<Vec<_>>(), "{when}");
}

const COUNT: std::ops::Range<usize> = RSP_PROD..RSP_PROD + 4;
const PHASE: std::ops::Range<usize> = INTENT_PHASE..INTENT_PHASE + 4;
const TARGET: std::ops::Range<usize> = INTENT_INDEX..INTENT_INDEX + 8;

/// The stores that fill a range: of eight bytes, or of four if that is its alignment.
fn words(range: std::ops::Range<usize>) -> Vec<std::ops::Range<usize>> {
    let step = if range.start % 8 == 0 { 8 } else { 4 };
    range.step_by(step).map(|at| at..at + step).collect()
}

/// Kills between any two stores.
#[test]
fn a_process_killed_while_responding_in_order_loses_nothing() {
    for layout in [&X86_64, &X86_32] {
        let (ours, theirs) = page();
        submit(&theirs, layout, 0, 100..103);
        let mut ring = Ring::attach(ours, layout).unwrap();
        take_all(&mut ring, 0);
        for number in 0..3u16 {
            let before = snapshot(&theirs);
            ring.respond(number, response(100 + u64::from(number))).unwrap();
            let answer = layout.offset_of(number)..layout.offset_of(number) + 16;
            // Only the first one stores the phase.
            let stores =
                [vec![PHASE], words(INTENT_ID..INTENT_ID + 16), vec![TARGET], words(answer), vec![COUNT]].concat();
            for (store, image) in killed_images(before, snapshot(&theirs), &stores).into_iter().enumerate() {
                assert_nothing_is_lost(image, layout, 100..103, &format!("{number}, killed after store {store}"));
            }
        }
    }
}

/// Kills between any two stores, with and without an earlier response.
#[test]
fn a_process_killed_while_moving_a_request_loses_nothing() {
    for layout in [&X86_64, &X86_32] {
        for first in [2, 0] {
            let (ours, theirs) = page();
            submit(&theirs, layout, 0, 100..104);
            let mut ring = Ring::attach(ours, layout).unwrap();
            take_all(&mut ring, 0);
            if first == 0 {
                // Leaves the intent record of another response.
                ring.respond(0, response(100)).unwrap();
            }
            let before = snapshot(&theirs);
            ring.respond(3, response(103)).unwrap();
            let after = snapshot(&theirs);
            let slot = |slot: u16, len: usize| layout.offset_of(slot)..layout.offset_of(slot) + len;
            let ours = if first == 0 { 1 } else { 0 };
            // The phase is first that of moving a request, then that of responding.
            let mut moving = after;
            moving[PHASE].copy_from_slice(&PHASE_MOVING.to_le_bytes());
            moving[slot(ours, 16)].copy_from_slice(&before[slot(ours, 16)]);
            moving[COUNT].copy_from_slice(&before[COUNT]);
            let head = vec![slot(3, 4)];
            let intent = [vec![PHASE], words(INTENT_ID..INTENT_ID + 16), vec![TARGET], head].concat();
            let moved = slot(3, layout.entry_len());
            let moving_stores = [intent, words(moved.start + 4..moved.end)].concat();
            let responding_stores = [vec![PHASE], words(slot(ours, 16)), vec![COUNT]].concat();
            let mut images = killed_images(before, moving, &moving_stores);
            images.extend(killed_images(moving, after, &responding_stores));
            for (store, image) in images.into_iter().enumerate() {
                assert_nothing_is_lost(image, layout, 100..104, &format!("{first}, killed after store {store}"));
            }
        }
    }
}

/// The initial contents of the header are not a valid intent record even if the phase is set.
#[test]
fn a_zeroed_header_is_not_an_intent_record() {
    let (ours, theirs) = page();
    submit(&theirs, &X86_64, 0, 100..102);
    drop(Ring::attach(ours, &X86_64).unwrap());
    for phase in [PHASE_MOVING, PHASE_RESPONDING] {
        theirs.store_u32(INTENT_PHASE, phase).unwrap();
        assert_nothing_is_lost(snapshot(&theirs), &X86_64, 100..102, "with only a phase");
    }
}

#[test]
fn a_ring_of_garbage_is_refused_or_empty() {
    let (ours, theirs) = page();
    theirs.write(0, [0xa5; 4096]).unwrap();
    assert_eq!(Ring::attach(ours, &X86_64).map(|ring| ring.next == ring.seen), Ok(true));
    // A ring too small for an entry is empty.
    assert_eq!(X86_64.slots(100), 0);
}
