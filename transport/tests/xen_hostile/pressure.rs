//! Continuous load: notifications, writes into the store, and concurrent changes of entries and descriptors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use memory::Shared;
use xen::GrantRef;

use crate::data::{describe, fill};
use crate::disk_process::{ProcessUsage, TIMEOUT};
use crate::entry::{READ, Rings, WRITE, indirect, transfer};
use crate::fixture::{Bystander, Fixture, PERSISTENT, one_page};
use crate::image::SECTORS;
use crate::{ERROR, OKAY, UNSUPPORTED};

/// Duration of each load.
const LOAD_TIME: Duration = Duration::from_secs(2);

/// The maximum average CPU time of a wake-up, which checks the rings or the nodes, independent of the load.
const WAKE_UP_MAX: Duration = Duration::from_micros(500);

/// Number of rounds that the other disk completes in that time.
fn progress(bystander: &mut Bystander, long: Duration) -> u32 {
    let began = Instant::now();
    let mut done = 0;
    while began.elapsed() < long {
        bystander.work();
        done += 1;
    }
    done
}

/// Asserts that wake-ups were cheap, and that the other disk got its share: on a single CPU at least a tenth.
fn assert_bounded(what: &str, used: ProcessUsage, done: u32, undisturbed: u32) {
    println!("{what}: {used:?}, other disk {done} of {undisturbed}");
    assert!(used.wake_ups > 0, "{what}: no work was done");
    let each = used.cpu / u32::try_from(used.wake_ups).unwrap();
    assert!(each < WAKE_UP_MAX, "{what}: {each:?} a wake-up");
    assert!(done > undisturbed / 10, "{what}: the other disk completed {done} rounds; {undisturbed} without load");
}

/// Repeats `endless` in a thread while `body` runs; returns the number of repetitions as well.
fn meanwhile<R>(mut endless: impl FnMut(u64) + Send, body: impl FnOnce() -> R) -> (R, u64) {
    /// Stops the thread also if the body fails, because the scope waits for it.
    struct StopOnDrop<'a>(&'a AtomicBool);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let stop_at_last = StopOnDrop(&stop);
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
fn continuous_notifications_have_a_bounded_cost() {
    let Some(mut fixture) = Fixture::new(&[]) else { return };
    fixture.connect(PERSISTENT);
    let undisturbed = progress(&mut fixture.bystander, LOAD_TIME);
    let before = fixture.process.usage();
    let Fixture { front, bystander, .. } = &mut fixture;
    let (done, signals) = meanwhile(|_| front.signal(0), || progress(bystander, LOAD_TIME));
    println!("{signals} notifications");
    assert_bounded("signals", fixture.process.usage().since(before), done, undisturbed);
    // Afterwards the process must sleep.
    thread::sleep(Duration::from_millis(200));
    let before = fixture.process.usage();
    thread::sleep(Duration::from_millis(500));
    assert_eq!(fixture.process.usage().since(before).wake_ups, 0, "asleep");
    fixture.close();
    fixture.end(&[]);
}

#[test]
fn continuous_store_writes_have_a_bounded_cost() {
    let Some(mut fixture) = Fixture::new(&[]) else { return };
    fixture.connect(PERSISTENT);
    let undisturbed = progress(&mut fixture.bystander, LOAD_TIME);
    let (before, memory) = (fixture.process.usage(), fixture.process.memory());
    let Fixture { front, bystander, .. } = &mut fixture;
    // Rewrites the unchanged state, and a node below it, which is watched as well.
    let storm = |number: u64| {
        front.write_state(4);
        front.set(&format!("state/{}", number % 1000), &[b'x'; 1000]);
    };
    let (done, writes) = meanwhile(storm, || progress(bystander, LOAD_TIME));
    println!("{writes} times two writes");
    assert_bounded("writes", fixture.process.usage().since(before), done, undisturbed);
    assert!(fixture.process.memory() < memory + 2048, "{} KiB, before {memory}", fixture.process.memory());
    let (page, _data) = one_page(&fixture.front);
    assert_eq!(fixture.front.run(&transfer(READ, 1, 0, &[(page, 0, 7)])), OKAY, "the front end is still served");
    fixture.front.unset("state");
    fixture.front.await_backend(&["6"]);
    fixture.front.forget();
    fixture.end(&[]);
}

/// Flips words between two values.
fn flip(bytes: &Shared, words: &[(usize, u32, u32)]) {
    words.iter().for_each(|&(at, one, _)| bytes.store_u32(at, one).unwrap());
    words.iter().for_each(|&(at, _, other)| bytes.store_u32(at, other).unwrap());
}

/// Words of an entry in 64-bit layout, with their alternative values: every mixture of both is a request within sectors
/// 8192 to 8207, or invalid.
fn entry_words(at: usize, page: GrantRef) -> Vec<(usize, u32, u32)> {
    vec![
        // Operation and number of segments: a write of one, or an unknown operation with 255.
        (at, u32::from_le_bytes([WRITE, 1, 0, 0]), u32::from_le_bytes([0xff, 255, 0, 0])),
        // The sector: the permitted one, or one beyond the end through either half.
        (at + 16, 8192, SECTORS as u32),
        (at + 20, 0, u32::MAX),
        // The first segment's page and sectors: the whole page, or an invalid one.
        (at + 24, page.0, u32::MAX),
        (at + 28, u32::from_le_bytes([0, 7, 0, 0]), u32::from_le_bytes([7, 0xff, 0xff, 0xff])),
    ]
}

#[test]
fn concurrently_changed_entries_are_processed_in_either_state_or_refused() {
    Fixture::each_policy(|mut fixture, policy| {
        fixture.connect(PERSISTENT);
        let front = &mut fixture.front;
        let (page, data) = one_page(front);
        fill(&data.bytes, 0x77);
        let mut statuses = [0u32; 3];
        for _ in 0..40 {
            let (abi, slots) = (front.made.abi, front.slots);
            (0..u64::from(slots)).for_each(|id| front.put(0, &transfer(WRITE, id, 8192, &[(page, 0, 7)])));
            let words: Vec<_> = (0..slots).flat_map(|slot| entry_words(abi.offset(slots, slot), page)).collect();
            let (ring, submitted) = (front.rings[0].shared.clone(), front.rings[0].submitted);
            ring.store_u32(12, submitted).unwrap();
            meanwhile(
                |_| flip(&ring, &words),
                || {
                    front.push(0);
                    // The thread also changes the responses: only their number can be checked.
                    let began = Instant::now();
                    while front.rings[0].shared.load_u32(8) != Some(submitted) {
                        assert!(began.elapsed() < TIMEOUT, "{policy}: not all requests are answered");
                        front.wait_for_notification(50);
                    }
                },
            );
            front.rings[0].read = submitted;
        }
        // The same with the list of an indirect request, whose responses are not changed.
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
        fixture.close();
        fixture.end(&[8192..8208]);
    });
}

#[test]
fn continuous_invalid_requests_are_answered_one_ring_at_a_time() {
    let Some(mut fixture) = Fixture::new(&[]) else { return };
    fixture.connect(Rings { order: 4, ..PERSISTENT });
    let before = fixture.process.memory();
    for round in 0..20u64 {
        let entries: Vec<_> = (0..512u16).map(|id| transfer(id as u8 | 8, round, u64::MAX, &[])).collect();
        let answers = fixture.front.run_all(0, &entries);
        assert!(answers.iter().all(|&(id, _, status)| id == round && status < 0));
    }
    fixture.bystander.work();
    assert!(fixture.process.memory() < before + 2048, "{} KiB, before {before}", fixture.process.memory());
    assert!(fixture.process.log_text().len() < 16 << 10, "its log grows with the number of requests");
    fixture.close();
    fixture.end(&[]);
}
