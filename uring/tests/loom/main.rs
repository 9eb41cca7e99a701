//! The queue and the bell between an engine's thread and its lanes, in every order of steps that the memory model
//! allows (`loom`), with up to two preemptions.
//!
//! Invariants checked: every value arrives once and in order; nothing is read while it is written; no thread sleeps for
//! good while there is work for it (loom calls that a deadlock). Each of the planted mistakes is found.
//!
//! The two files of the engine are compiled here again, on top of `loom`'s atomics in place of the standard library's:
//! as they are, with a fence that does nothing, and with a release that is none.

#![allow(clippy::duplicate_mod, reason = "each time on top of something else")]

/// What is `uring/src/sync.rs` in the engine, and the files on top of it.
macro_rules! on_top_of {
    ($fence:path, $release:ident) => {
        mod sync {
            pub(crate) use loom::sync::Arc;
            pub(crate) use loom::sync::atomic::{AtomicBool, AtomicUsize};
            pub(crate) use $fence as fence;

            /// The orders that the files ask for.
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

            /// An eventfd: what was signalled before a sleep ends it at once.
            pub(crate) struct Event(loom::sync::Notify);

            impl Event {
                pub(crate) fn new() -> Event {
                    Event(loom::sync::Notify::new())
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
        use sync::Event;

        /// Whether the sleeper looks once more after it has said that it sleeps.
        #[derive(Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Look {
            Again,
            Never,
        }

        /// Takes `count` values from the queues, asleep while there are none.
        fn take(count: usize, queues: &mut [Consumer<usize>], bell: &Bell, look: Look) -> Vec<usize> {
            let mut taken = Vec::new();
            while taken.len() < count {
                let before = taken.len();
                queues.iter_mut().for_each(|queue| taken.extend(queue.pop()));
                let has_work = || look == Look::Again && queues.iter_mut().any(|queue| !queue.is_empty());
                if taken.len() == before && bell.may_sleep(has_work) {
                    bell.event().wait();
                    bell.awake();
                }
            }
            taken
        }

        fn give(values: impl Iterator<Item = usize>, queue: &mut Producer<usize>, bell: &Bell) {
            for value in values {
                assert_eq!(queue.push(value), Ok(()), "there is room for all");
                bell.ring();
            }
        }

        /// The owner gives a lane two operations, with a wake-up for each.
        pub(crate) fn one_gives_and_one_sleeps(look: Look) {
            super::explore(move || {
                let bell = Arc::new(Bell::new(Event::new()));
                let (mut producer, consumer) = spsc::queue(2);
                let lane = {
                    let bell = bell.clone();
                    loom::thread::spawn(move || take(2, &mut [consumer], &bell, look))
                };
                give(1..=2, &mut producer, &bell);
                assert_eq!(lane.join().unwrap(), [1, 2]);
            });
        }

        /// Two lanes give results to the owner, who sleeps for both at once.
        pub(crate) fn two_give_and_one_sleeps() {
            super::explore(|| {
                let bell = Arc::new(Bell::new(Event::new()));
                let (mut ends, lanes): (Vec<_>, Vec<_>) = (1..=2)
                    .map(|value| {
                        let (mut producer, consumer) = spsc::queue(1);
                        let bell = bell.clone();
                        let lane = loom::thread::spawn(move || give(value..=value, &mut producer, &bell));
                        (consumer, lane)
                    })
                    .unzip();
                let mut taken = take(2, &mut ends, &bell, Look::Again);
                taken.sort();
                assert_eq!(taken, [1, 2]);
                lanes.into_iter().for_each(|lane| lane.join().unwrap());
            });
        }

        /// Operations go out and results come back, with both sides asleep between them.
        pub(crate) fn values_go_and_come_back() {
            super::explore(|| {
                let (owner, lane) = (Arc::new(Bell::new(Event::new())), Arc::new(Bell::new(Event::new())));
                let (mut to, from_owner) = spsc::queue(1);
                let (mut to_owner, from) = spsc::queue(1);
                let working = {
                    let (owner, lane) = (owner.clone(), lane.clone());
                    loom::thread::spawn(move || {
                        let taken = take(1, &mut [from_owner], &lane, Look::Again);
                        give(taken.into_iter().map(|value| value + 10), &mut to_owner, &owner);
                    })
                };
                give(1..=1, &mut to, &lane);
                assert_eq!(take(1, &mut [from], &owner, Look::Again), [11]);
                working.join().unwrap();
            });
        }

        /// More values than places, one thread ahead of the other.
        pub(crate) fn places_are_used_again() {
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

        /// Of one thread: what a full and an empty queue answer, and that the rest is dropped.
        pub(crate) fn the_ends_of_a_queue() {
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

/// Set in the process in which a planted mistake is to be found.
const PLANTED: &str = "TAPLINE_TEST_PLANTED";

/// A fence that does nothing.
fn no_fence(_: loom::sync::atomic::Ordering) {}

fn explore(scenario: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // Three find no more, and take 15 seconds.
    builder.preemption_bound = Some(2);
    builder.check(scenario);
}

/// Loom finds an order in which the scenario goes wrong, and says so in these words. A deadlock leaves threads that
/// cannot be unwound, so it is found in a process of its own: this test's, started again.
fn is_found(test: &str, scenario: impl FnOnce(), words: &str) {
    if std::env::var_os(PLANTED).is_some() {
        return scenario();
    }
    let mut again = Command::new(std::env::current_exe().unwrap());
    let output = again.args(["--exact", test, "--nocapture"]).env(PLANTED, "1").env("RUST_BACKTRACE", "0").output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(words), "loom has not found the mistake: {said}");
}

#[test]
fn a_full_queue_hands_values_back_and_drops_what_is_left() {
    as_it_is::the_ends_of_a_queue();
}

#[test]
fn values_arrive_once_and_in_order_though_places_are_used_again() {
    as_it_is::places_are_used_again();
}

#[test]
fn a_lane_that_sleeps_is_woken_for_each_operation() {
    as_it_is::one_gives_and_one_sleeps(as_it_is::Look::Again);
}

#[test]
fn an_owner_that_sleeps_is_woken_by_any_of_its_lanes() {
    as_it_is::two_give_and_one_sleeps();
}

#[test]
fn owner_and_lane_wake_each_other() {
    as_it_is::values_go_and_come_back();
}

#[test]
fn a_sleeper_that_does_not_look_again_is_found() {
    let scenario = || as_it_is::one_gives_and_one_sleeps(as_it_is::Look::Never);
    is_found("a_sleeper_that_does_not_look_again_is_found", scenario, "deadlock");
}

#[test]
fn a_missing_fence_is_found() {
    let scenario = || without_fence::one_gives_and_one_sleeps(without_fence::Look::Again);
    is_found("a_missing_fence_is_found", scenario, "deadlock");
}

#[test]
fn a_missing_release_is_found() {
    is_found("a_missing_release_is_found", without_release::places_are_used_again, "Causality violation");
}
