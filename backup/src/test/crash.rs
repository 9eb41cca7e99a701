//! A host crashes, or a call fails, at every call of a backup, of a prune and of a creation.
//!
//! Exhaustive: each call, each moment within it. Invariants checked: those of the module above.

use super::*;
use crate::log::{Appended, Change, View};
use crate::store::StoreErrorKind;
use crate::{Fault, Moment};

/// Does one thing on a world; failures are what is tested.
type Act = fn(&World, &Target, &[Record]) -> Result<(), Error>;

fn full(world: &World, target: &Target, _: &[Record]) -> Result<(), Error> {
    world.back_up(target, 50, &image("ABCxyz.uvwQ"), None).map(|_| ())
}

fn incremental(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    let (old, new) = (image("ABCDEF..IJ"), image("ABxDEFy.I."));
    world.back_up(target, 51, &new, Some(base_on(&records[0], &old, &new))).map(|_| ())
}

fn prune_first(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    world.prune(target, &[records[0].id], 500, 0).map(|_| ())
}

fn prune_all(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    let all: Vec<Id> = records.iter().map(|record| record.id).collect();
    world.prune(target, &all, 500, 0).map(|_| ())
}

const ACTS: [(&str, Act); 4] =
    [("full", full), ("incremental", incremental), ("prune one", prune_first), ("prune all", prune_all)];

/// A target with backups that share chunks, and with orphans.
fn furnished(bug: Option<Bug>) -> (World, Vec<Record>) {
    seed::set(1);
    let world = World::new(bug);
    let target = world.target();
    let first = world.back_up(&target, 1, &image("ABCDEF..IJ"), None).unwrap();
    let second = world.back_up(&target, 2, &image("ABCDkl..mJno"), None).unwrap();
    // A backup that dies leaves a pack.
    let dying = world.on(world.memory.host().fault_at(12, Fault::Crash(Moment::Before)));
    assert!(world.back_up(&dying.unwrap(), 3, &image("pqrstuABC"), None).is_err());
    world.prune(&target, &[], 100, 1000).unwrap();
    (world, vec![first, second])
}

/// Runs each act with each fault; returns the number of runs, or the first violation.
fn explore(bug: Option<Bug>, faults: &[Fault]) -> Result<u32, String> {
    let (world, records) = furnished(bug);
    let mut runs = 0;
    for (name, act) in ACTS {
        for &fault in faults {
            for call in 0.. {
                seed::set(2);
                let world = world.copy();
                let memory = Arc::new(world.memory.host().fault_at(call, fault));
                let outcome = Target::open(Arc::clone(&memory) as Arc<_>, None).and_then(|mut target| {
                    target.bug = bug;
                    act(&world, &target, &records)
                });
                runs += 1;
                if matches!(fault, Fault::Crash(Moment::Unsynced)) {
                    // Another host takes what this one has left for good, and then the storage loses its power.
                    let other = world.back_up(&world.target(), 52, &image("ABCxyz.uvwQ"), None);
                    other.map_err(|error| format!("{name}, {fault:?} at call {call}: the next host: {error}"))?;
                    world.memory.lose_power();
                }
                world.check().map_err(|what| format!("{name}, {fault:?} at call {call}: {what}"))?;
                if memory.calls() <= call {
                    outcome.map_err(|error| format!("{name} without a fault: {error}"))?;
                    break;
                }
            }
        }
    }
    Ok(runs)
}

#[test]
fn a_crash_at_any_step_costs_nothing_that_counted() {
    let runs = explore(None, &Moment::ALL.map(Fault::Crash)).unwrap();
    assert!(runs > 200, "{runs} runs");
}

#[test]
fn a_failed_call_at_any_step_costs_nothing_that_counted() {
    use StoreErrorKind::{Io, NoSpace, Vanished};
    let faults = [
        Fault::Fail(NoSpace, Moment::Writing),
        Fault::Fail(Io, Moment::Before),
        Fault::Fail(Io, Moment::After),
        Fault::Fail(Vanished, Moment::Unnamed),
    ];
    explore(None, &faults).unwrap();
}

#[test]
fn a_backup_that_is_published_before_its_chunks_is_found() {
    let found = explore(Some(Bug::PublishedBeforeChunks), &[Fault::Crash(Moment::Before)]);
    assert!(found.is_err(), "the planted bug was not found");
}

#[test]
fn a_pack_that_is_deleted_before_it_is_doomed_is_found() {
    let found = explore(Some(Bug::DeletedBeforeDoomed), &[Fault::Crash(Moment::Before)]);
    assert!(found.is_err(), "the planted bug was not found");
}

#[test]
fn a_found_pack_that_is_taken_for_durable_is_found() {
    let found = explore(Some(Bug::FoundTakenForDurable), &[Fault::Crash(Moment::Unsynced)]);
    assert!(found.is_err(), "the planted bug was not found");
}

/// A host that sleeps between its look at the log and its append, while two others prune and are killed at any call.
#[test]
fn what_a_host_appends_after_two_killed_prunes_counts_or_is_refused() {
    let (world, records) = furnished(None);
    let mut counted = 0;
    for first in 0..30 {
        for second in 0..30 {
            seed::set(6);
            let world = world.copy();
            let target = world.target();
            let view = View::load(&target).unwrap();
            for (call, now) in [(first, 200), (second, 201)] {
                let memory = world.memory.host().fault_at(call, Fault::Crash(Moment::Before));
                drop(world.on(memory).and_then(|target| prune(&target, &[], now, 0)));
            }
            let record = Record { id: Id::random(), ..records[0].clone() };
            if let Appended::Done(_) = view.append(&target, Change::Publish(record.clone())).unwrap() {
                counted += 1;
                let now = View::load(&target).unwrap().state.backups;
                assert!(now.contains_key(&record.id), "killed at {first} and {second}");
            }
        }
    }
    assert!(counted > 0);
}

#[test]
fn a_killed_backup_is_resumed_without_sending_again() {
    seed::set(3);
    let world = World::new(None);
    let disk = image("ABCDEFGHIJKLMNOPQRSTUVWXYZ");
    let sent = |record: Record| world.target().statistics(record.id).unwrap();
    let alone = World::new(None);
    let whole = alone.back_up(&alone.target(), 1, &disk, None).unwrap();
    let whole = alone.target().statistics(whole.id).unwrap();
    let killed = world.on(world.memory.host().fault_at(11, Fault::Crash(Moment::Before))).unwrap();
    assert!(world.back_up(&killed, 1, &disk, None).is_err());
    let there = world.memory.names().iter().filter(|name| name.as_str().starts_with("packs/")).count();
    assert!(there > 2, "{there} packs");
    let resumed = sent(world.back_up(&world.target(), 1, &disk, None).unwrap());
    assert!(resumed.sent < whole.sent * 2 / 3, "{resumed:?} after {whole:?}");
    assert!(resumed.deduplicated > whole.deduplicated);
    world.check().unwrap();
}

#[test]
fn a_creation_that_is_interrupted_can_be_repeated_with_another_key() {
    for moment in Moment::ALL {
        for call in 0..8 {
            seed::set(4);
            let memory = Memory::new();
            let key = Key::random();
            let dying = memory.host().fault_at(call, Fault::Crash(moment));
            let died = Target::create(Arc::new(dying), LAYOUT, Some(&key)).is_err();
            match Target::create(Arc::new(memory.host()), LAYOUT, None) {
                Ok(target) => assert!(target.backups().unwrap().is_empty()),
                Err(Error::TargetExists) => {
                    let target = Target::open(Arc::new(memory.host()), Some(&key)).unwrap();
                    let is_there = matches!(moment, Moment::Unsynced | Moment::After);
                    assert!(!died || is_there, "{moment:?} at {call}");
                    assert!(target.backups().unwrap().is_empty());
                }
                Err(error) => panic!("{moment:?} at {call}: {error}"),
            }
        }
    }
}

#[test]
fn a_cancelled_backup_does_not_count_and_sends_no_more() {
    seed::set(5);
    let world = World::new(None);
    let target = world.target();
    let disk = image(&"ABCDEFGHIJKLMNOPQRSTUVWXYZ".repeat(100));
    let cancel = AtomicBool::new(false);
    let mut progress = |_: &crate::Statistics| cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    let job = Job { threads: 2, ..job(DISK, 1, &disk) };
    let outcome = target.back_up(&job, &mut Control { cancel: &cancel, progress: &mut progress });
    assert!(matches!(outcome, Err(Error::Cancelled)), "{outcome:?}");
    assert!(target.backups().unwrap().is_empty());
    world.check().unwrap();
}
