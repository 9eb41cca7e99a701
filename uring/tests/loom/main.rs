//! The queue and the bell between an engine's thread and its lanes, under every interleaving that the memory model
//! allows (`loom`), with up to two preemptions.
//!
//! Invariants checked: every value arrives once and in order; nothing is read while it is written; no thread sleeps
//! forever while there is work for it (loom reports that as a deadlock). Each of the planted mistakes is detected.
//!
//! The two files of the engine are compiled here again, with `loom`'s atomics in place of the standard library's: as
//! they are, without the fences, and with relaxed stores in place of release stores.

#![allow(clippy::duplicate_mod, reason = "compiled with other primitives each time")]

/// Replaces `uring/src/sync.rs` of the engine, and compiles the files that use it.
macro_rules! on_top_of {
    ($fence:path, $release:ident) => {
        mod sync {
            pub(crate) use loom::sync::Arc;
            pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize};
            pub(crate) use $fence as fence;

            /// The orders that the files use.
            #[allow(non_snake_case, non_upper_case_globals, reason = "it stands for the standard library's enum")]
            pub(crate) mod Ordering {
                use loom::sync::atomic::Ordering as Loom;
                pub(crate) const Acquire: Loom = Loom::Acquire;
                pub(crate) const Relaxed: Loom = Loom::Relaxed;
                pub(crate) const Release: Loom = Loom::$release;
                pub(crate) const SeqCst: Loom = Loom::SeqCst;
            }

            #[derive(Default)]
            pub(crate) struct Place<T>(loom::cell::UnsafeCell<T>);

            impl<T> Place<T> {
                pub(crate) fn with_mut<R>(&self, act: impl FnOnce(*mut T) -> R) -> R {
                    self.0.with_mut(act)
                }
            }

            /// An eventfd: a signal before a sleep ends it at once.
            pub(crate) struct WakeEvent(loom::sync::Notify);

            impl WakeEvent {
                pub(crate) fn new() -> WakeEvent {
                    WakeEvent(loom::sync::Notify::new())
                }

                pub(crate) fn signal(&self) {
                    self.0.notify();
                }

                pub(crate) fn wait(&self) {
                    self.0.wait();
                }
            }
        }

        #[allow(dead_code, reason = "the engine uses more of it")]
        #[path = "../../../src/bell.rs"]
        mod bell;
        #[allow(dead_code, reason = "the engine uses more of it")]
        #[path = "../../../src/spsc.rs"]
        mod spsc;

        use bell::Bell;
        use loom::sync::Arc;
        use spsc::{Consumer, Producer};
        use sync::WakeEvent;

        /// Whether a thread checks for work again after it has set the flag that it sleeps.
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(crate) enum SecondCheck {
            Made,
            Omitted,
        }

        /// Takes `count` values from the queues, and sleeps while they are empty.
        fn take(count: usize, queues: &mut [Consumer<usize>], bell: &Bell, check: SecondCheck) -> Vec<usize> {
            let mut taken = Vec::new();
            while taken.len() < count {
                let before = taken.len();
                queues.iter_mut().for_each(|queue| taken.extend(queue.pop()));
                let has_work = || check == SecondCheck::Made && queues.iter_mut().any(|queue| !queue.is_empty());
                if taken.len() == before && bell.may_sleep(has_work) {
                    bell.event().wait();
                    bell.awake();
                }
            }
            taken
        }

        fn send(values: impl Iterator<Item = usize>, queue: &mut Producer<usize>, bell: &Bell) {
            for value in values {
                assert_eq!(queue.push(value), Ok(()), "there is room for all");
                bell.ring();
            }
        }

        /// The owner sends two operations to a lane, with a wake-up for each.
        pub(crate) fn one_sender_and_one_sleeper(check: SecondCheck) {
            super::explore(move || {
                let bell = Arc::new(Bell::new(WakeEvent::new()));
                let (mut producer, consumer) = spsc::queue(2);
                let lane = {
                    let bell = bell.clone();
                    loom::thread::spawn(move || take(2, &mut [consumer], &bell, check))
                };
                send(1..=2, &mut producer, &bell);
                assert_eq!(lane.join().unwrap(), [1, 2]);
            });
        }

        /// Two lanes send results to the owner, which sleeps until either does.
        pub(crate) fn two_senders_and_one_sleeper() {
            super::explore(|| {
                let bell = Arc::new(Bell::new(WakeEvent::new()));
                let (mut ends, lanes): (Vec<_>, Vec<_>) = (1..=2)
                    .map(|value| {
                        let (mut producer, consumer) = spsc::queue(1);
                        let bell = bell.clone();
                        let lane = loom::thread::spawn(move || send(value..=value, &mut producer, &bell));
                        (consumer, lane)
                    })
                    .unzip();
                let mut taken = take(2, &mut ends, &bell, SecondCheck::Made);
                taken.sort();
                assert_eq!(taken, [1, 2]);
                lanes.into_iter().for_each(|lane| lane.join().unwrap());
            });
        }

        /// An operation is sent and its result returned; both sides sleep in between.
        pub(crate) fn values_are_sent_and_returned() {
            super::explore(|| {
                let (owner, lane) = (Arc::new(Bell::new(WakeEvent::new())), Arc::new(Bell::new(WakeEvent::new())));
                let (mut to, from_owner) = spsc::queue(1);
                let (mut to_owner, from) = spsc::queue(1);
                let working = {
                    let (owner, lane) = (owner.clone(), lane.clone());
                    loom::thread::spawn(move || {
                        let taken = take(1, &mut [from_owner], &lane, SecondCheck::Made);
                        send(taken.into_iter().map(|value| value + 10), &mut to_owner, &owner);
                    })
                };
                send(1..=1, &mut to, &lane);
                assert_eq!(take(1, &mut [from], &owner, SecondCheck::Made), [11]);
                working.join().unwrap();
            });
        }

        /// More values than places, with one thread ahead of the other.
        pub(crate) fn places_are_reused() {
            super::explore(|| {
                let (mut producer, mut consumer) = spsc::queue(1);
                let pushing = loom::thread::spawn(move || {
                    for mut value in 0..3 {
                        while let Err(back) = producer.push(value) {
                            value = back;
                            loom::thread::yield_now();
                        }
                    }
                });
                for expected in 0..3 {
                    let taken = loop {
                        match consumer.pop() {
                            Some(taken) => break taken,
                            None => loom::thread::yield_now(),
                        }
                    };
                    assert_eq!(taken, expected);
                }
                pushing.join().unwrap();
            });
        }

        /// In one thread: a full and an empty queue, and the drop of remaining values.
        pub(crate) fn a_full_and_an_empty_queue() {
            super::explore(|| {
                let value = std::sync::Arc::new(());
                let (mut producer, mut consumer) = spsc::queue(2);
                assert!(consumer.is_empty() && consumer.pop().is_none());
                assert!(producer.push(value.clone()).is_ok() && producer.push(value.clone()).is_ok());
                assert!(producer.push(value.clone()).is_err(), "it is full");
                assert_eq!(producer.backlog(), 2);
                assert!(consumer.pop().is_some() && producer.push(value.clone()).is_ok());
                drop((producer, consumer));
                assert_eq!(std::sync::Arc::strong_count(&value), 1, "what was left has been dropped");
            });
        }
    };
}

mod as_it_is;
mod without_fence;
mod without_release;

use std::process::Command;

/// Set in the process that runs a planted mistake.
const PLANTED: &str = "TAPLINE_TEST_PLANTED";

/// A fence that does nothing.
fn no_fence(_: loom::sync::atomic::Ordering) {}

fn explore(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Three find no more, and take 15 seconds.
    builder.preemption_bound = Some(2);
    builder.check(scenario);
}

/// Asserts that loom finds an interleaving in which the scenario fails, with this message. A deadlock leaves threads
/// that cannot be unwound, so the scenario runs in a process of its own: this test program, started again.
fn assert_detected(test: &str, scenario: impl FnOnce(), message: &str) {
    if std::env::var_os(PLANTED).is_some() {
        return scenario();
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let output = again.args(["--exact", test, "--nocapture"]).env(PLANTED, "1").env("RUST_BACKTRACE", "0").output();
    let output = output.unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && printed.contains(message), "loom has not detected the mistake: {printed}");
}

#[test]
fn a_full_queue_hands_values_back_and_drops_remaining_ones() {
    as_it_is::a_full_and_an_empty_queue();
}

#[test]
fn values_arrive_once_and_in_order_when_places_are_reused() {
    as_it_is::places_are_reused();
}

#[test]
fn a_sleeping_lane_is_woken_for_each_operation() {
    as_it_is::one_sender_and_one_sleeper(as_it_is::SecondCheck::Made);
}

#[test]
fn a_sleeping_owner_is_woken_by_any_of_its_lanes() {
    as_it_is::two_senders_and_one_sleeper();
}

#[test]
fn owner_and_lane_wake_each_other() {
    as_it_is::values_are_sent_and_returned();
}

#[test]
fn an_omitted_second_check_is_detected() {
    let scenario = || as_it_is::one_sender_and_one_sleeper(as_it_is::SecondCheck::Omitted);
    assert_detected("an_omitted_second_check_is_detected", scenario, "deadlock");
}

#[test]
fn a_missing_fence_is_detected() {
    let scenario = || without_fence::one_sender_and_one_sleeper(without_fence::SecondCheck::Made);
    assert_detected("a_missing_fence_is_detected", scenario, "deadlock");
}

#[test]
fn a_missing_release_is_detected() {
    assert_detected("a_missing_release_is_detected", without_release::places_are_reused, "Causality violation");
}
