//! What is done without end: signals, writes into the store, changes of what is being read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memory::Shared;
use xen::GrantRef;

use crate::bed::{Bed, Beside, PERSISTENT, one_page};
use crate::data::{describe, fill};
use crate::entry::{READ, Rings, WRITE, indirect, transfer};
use crate::image::SECTORS;
use crate::victim::{PATIENCE, Used};
use crate::{ERROR, OKAY, UNSUPPORTED};

/// How long something is done without end.
const LONG: Duration = Duration::from_secs(2);

/// What one wake-up may cost on the average: a look at the rings, or at the nodes, and not more the more is done.
const WAKE_UP_MAX: Duration = Duration::from_micros(500);

/// How often the disk beside gets through in that time.
fn progress(beside: &mut Beside, long: Duration) -> u32 {
    let began = Instant::now();
    let mut done = 0;
    while began.elapsed() < long {
        beside.work();
        done += 1;
    }
    done
}

/// That each wake-up was cheap and the disk beside has got its share, which of one CPU for all is at least a tenth.
fn assert_bounded(what: &str, used: Used, done: u32, undisturbed: u32) {
    println!("{what}: {used:?}, beside {done} of {undisturbed}");
    assert!(used.wake_ups > 0, "{what}: nothing was done");
    let each = used.cpu / u32::try_from(used.wake_ups).unwrap();
    assert!(each < WAKE_UP_MAX, "{what}: {each:?} a wake-up");
    assert!(done > undisturbed / 10, "{what}: the disk beside did {done}, else {undisturbed}");
}

/// Does `endless` again and again while `body` runs; how often.
fn meanwhile<R>(mut endless: impl FnMut(u64) + Send, body: impl FnOnce() -> R) -> (R, u64) {
    /// Also if the body fails: the thread is waited for.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop_at_last = Stop(&stop);
        let thread = scope.spawn(|| {
            let mut times = 0;
            while !stop.load(Ordering::Relaxed) {
                endless(times);
                times += 1;
            }
            times
        });
        let result = body();
        drop(stop_at_last);
        (result, thread.join().unwrap())
    })
}

#[test]
fn signals_without_end_cost_no_more_than_they_are() {
    let Some(mut bed) = Bed::new(&[]) else { return };
    bed.connect(PERSISTENT);
    let undisturbed = progress(&mut bed.beside, LONG);
    let before = bed.victim.used();
    let Bed { front, beside, .. } = &mut bed;
    let (done, signals) = meanwhile(|_| front.signal(0), || progress(beside, LONG));
    println!("{signals} signals");
    assert_bounded("signals", bed.victim.used().since(before), done, undisturbed);
    // Once it is over there is silence.
    thread::sleep(Duration::from_millis(200));
    let before = bed.victim.used();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(bed.victim.used().since(before).wake_ups, 0, "asleep");
    bed.close();
    bed.end(&[]);
}

#[test]
fn writes_into_the_store_without_end_cost_no_more_than_they_are() {
    let Some(mut bed) = Bed::new(&[]) else { return };
    bed.connect(PERSISTENT);
    let undisturbed = progress(&mut bed.beside, LONG);
    let (before, memory) = (bed.victim.used(), bed.victim.memory());
    let Bed { front, beside, .. } = &mut bed;
    // The state as it is, and what lies below it, which is watched as well.
    let storm = |number: u64| {
        front.say(4);
        front.set(&format!("state/{}", number % 1000), &[b'x'; 1000]);
    };
    let (done, writes) = meanwhile(storm, || progress(beside, LONG));
    println!("{writes} times two writes");
    assert_bounded("writes", bed.victim.used().since(before), done, undisturbed);
    assert!(bed.victim.memory() < memory + 2048, "{} KiB, before {memory}", bed.victim.memory());
    let (page, _data) = one_page(&bed.front);
    assert_eq!(bed.front.run(&transfer(READ, 1, 0, &[(page, 0, 7)])), OKAY, "still served");
    bed.front.unset("state");
    bed.front.await_backend(&["6"]);
    bed.front.forget();
    bed.end(&[]);
}

/// Changes words from one value to another and back.
fn flip(bytes: &Shared, words: &[(usize, u32, u32)]) {
    words.iter().for_each(|&(at, one, _)| bytes.store_u32(at, one).unwrap());
    words.iter().for_each(|&(at, _, other)| bytes.store_u32(at, other).unwrap());
}

/// Words of an entry in 64-bit layout, with what they are changed to: every mixture of both is a request within sectors
/// 8192 to 8207, or none at all.
fn entry_words(at: usize, page: GrantRef) -> Vec<(usize, u32, u32)> {
    vec![
        // Operation and number of segments: a write of one, or an unknown one of 255.
        (at, u32::from_le_bytes([WRITE, 1, 0, 0]), u32::from_le_bytes([0xff, 255, 0, 0])),
        // The sector: the permitted one, or beyond the end by either half.
        (at + 16, 8192, SECTORS as u32),
        (at + 20, 0, u32::MAX),
        // The first segment's page and sectors: all of the page, or none of any.
        (at + 24, page.0, u32::MAX),
        (at + 28, u32::from_le_bytes([0, 7, 0, 0]), u32::from_le_bytes([7, 0xff, 0xff, 0xff])),
    ]
}

#[test]
fn entries_that_change_while_they_are_read_are_one_or_the_other_or_refused() {
    Bed::each_policy(|mut bed, policy| {
        bed.connect(PERSISTENT);
        let front = &mut bed.front;
        let (page, data) = one_page(front);
        fill(&data.bytes, 0x77);
        let mut statuses = [0u32; 3];
        for _ in 0..40 {
            let (abi, slots) = (front.made.abi, front.slots);
            (0..u64::from(slots)).for_each(|id| front.put(0, &transfer(WRITE, id, 8192, &[(page, 0, 7)])));
            let words: Vec<_> = (0..slots).flat_map(|slot| entry_words(abi.place(slots, slot), page)).collect();
            let (ring, asked) = (front.rings[0].shared.clone(), front.rings[0].asked);
            ring.store_u32(12, asked).unwrap();
            meanwhile(
                |_| flip(&ring, &words),
                || {
                    front.push(0);
                    // Answers are changed like all else: only how many there are can be trusted.
                    let began = Instant::now();
                    while front.rings[0].shared.load_u32(8) != Some(asked) {
                        assert!(began.elapsed() < PATIENCE, "{policy}: not all are answered");
                        front.hear(50);
                    }
                },
            );
            front.rings[0].read = asked;
        }
        // The same with the list of an indirect request, whose answers are left alone.
        let list = front.pages(1);
        for _ in 0..20 {
            describe(&list, &[(page, 0, 7), (page, 0, 7)]);
            let segment = u32::from_le_bytes([0, 7, 0, 0]);
            let words = [(0, page.0, u32::MAX), (4, segment, 0xff), (8, page.0, 0), (12, segment, 0x0308)];
            let entries: Vec<_> = (0..32).map(|id| indirect(WRITE, id, 8192, list.pages[0], 2)).collect();
            let (answers, _) = meanwhile(|_| flip(&list.bytes, &words), || front.run_all(0, &entries));
            for answer in answers {
                let known = [OKAY, ERROR, UNSUPPORTED].iter().position(|&status| status == answer.2);
                statuses[known.unwrap_or_else(|| panic!("{policy}: {answer:?}"))] += 1;
            }
        }
        println!("{policy}: of requests with a changing list {} done, {} refused", statuses[0], statuses[1]);
        bed.close();
        bed.end(&[8192..8208]);
    });
}

#[test]
fn nonsense_without_end_is_answered_a_ring_at_a_time() {
    let Some(mut bed) = Bed::new(&[]) else { return };
    bed.connect(Rings { order: 4, ..PERSISTENT });
    let before = bed.victim.memory();
    for round in 0..20u64 {
        let entries: Vec<_> = (0..512u16).map(|id| transfer(id as u8 | 8, round, u64::MAX, &[])).collect();
        let answers = bed.front.run_all(0, &entries);
        assert!(answers.iter().all(|&(id, _, status)| id == round && status < 0));
    }
    bed.beside.work();
    assert!(bed.victim.memory() < before + 2048, "{} KiB, before {before}", bed.victim.memory());
    assert!(bed.victim.said().len() < 16 << 10, "its log grows with what is asked");
    bed.close();
    bed.end(&[]);
}
