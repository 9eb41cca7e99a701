//! The take-over of a device, at every moment: the process is killed before each call of Xen's and each store to a
//! ring, and each call fails once; another process follows, of the same options or of others.
//!
//! Invariants checked: those of [`driver`]; and that what was begun ends: when nothing fails any more the guest is
//! served, and the image holds what it has written. Knows nothing of images and engines: a raw disk in memory stands
//! for them.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the test's own, and small")]

#[path = "../../../tests/blkif_mock/mod.rs"]
mod blkif_mock;
mod driver;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use disk::Geometry;
use xen::fake::{Counts, Host};

use super::moment::{self, Mistake, Moment};
use super::{Config, GrantsPolicy, OnStop, RETRY};
use crate::Server as _;
use blkif_mock::{Abi, Front, Machine, Rings, attach, config};
use driver::{Dice, Driver};

/// How the process ends that is killed.
struct Killed;

/// What happens to the processes, one after the other.
#[derive(Clone, Debug, Default)]
struct Plan {
    seed: u64,
    /// The moment at which each is killed; the last one lives.
    kills: Vec<u64>,
    /// The process whose call fails, and which of its calls.
    fault: Option<(usize, u64)>,
}

/// Who meets whom.
#[derive(Clone)]
struct Scene {
    processes: [Config; 2],
    kernels: Vec<Rings>,
}

/// What a run came to.
#[derive(Debug)]
struct Ran {
    /// Moments and calls of the first process, and of the last.
    moments: u64,
    calls: u64,
}

/// What is counted while a process runs.
#[derive(Default)]
struct Count {
    moments: Cell<u64>,
    calls: Cell<u64>,
    kill: Cell<Option<u64>>,
    fail: Cell<Option<u64>>,
    /// The guest itself calls, or is called.
    inside: Cell<bool>,
}

fn options(grants: GrantsPolicy, max_queues: u16, max_ring_pages_order: u32, max_segments: u16) -> Config {
    let of_all = config(grants);
    let geometry = Geometry { len: driver::DISK_LEN, ..of_all.geometry };
    Config { geometry, max_queues, max_ring_pages_order, max_segments, on_stop: OnStop::Leave, ..of_all }
}

fn scenes() -> Vec<Scene> {
    let rings = |abi, queues, order, persistent| Rings { abi, queues, order, persistent };
    let (wide, narrow) = (Abi::X86_64, Abi::X86_32);
    let much = |grants| options(grants, 2, 1, 32);
    let little = |grants| options(grants, 1, 0, 0);
    let (copy, auto, map) = (GrantsPolicy::Copy, GrantsPolicy::Auto, GrantsPolicy::Map);
    let one = rings(wide, 1, 0, true);
    vec![
        Scene { processes: [much(copy), little(auto)], kernels: vec![rings(wide, 2, 1, true)] },
        Scene { processes: [much(auto), little(copy)], kernels: vec![rings(narrow, 2, 0, true)] },
        Scene { processes: [little(auto), much(auto)], kernels: vec![one, rings(wide, 2, 1, false)] },
        Scene { processes: [much(copy), much(auto)], kernels: vec![rings(wide, 2, 1, true), rings(wide, 1, 0, false)] },
        Scene { processes: [little(map), little(copy)], kernels: vec![one] },
    ]
}

/// One run. What was wrong, if something was.
fn run(scene: &Scene, plan: &Plan) -> Result<Ran, String> {
    let host = Host::new().unwrap();
    attach(&host);
    let driver = Rc::new(RefCell::new(Driver::new(Front::new(&host), &scene.kernels, plan.seed)));
    let count = Rc::new(Count::default());
    observe(&host, &driver, &count);
    let mut bytes = vec![0; driver::DISK_LEN as usize];
    let mut ran = Ran { moments: 0, calls: 0 };
    // One more than are killed; and one that follows who could not begin.
    for life in 0..plan.kills.len() + 2 {
        count.moments.set(0);
        count.calls.set(0);
        count.kill.set(plan.kills.get(life).copied());
        count.fail.set(plan.fault.filter(|&(which, _)| which == life).map(|(_, nth)| nth));
        count.inside.set(true);
        let options = scene.processes[life % 2].clone();
        let mut machine = Machine::idle(&host, options.geometry);
        machine.file.bytes.clone_from(&bytes);
        count.inside.set(false);
        let lived = catch_unwind(AssertUnwindSafe(|| live(&mut machine, options, &driver, &count)));
        count.inside.set(true);
        if life == 0 {
            ran.moments = count.moments.get();
        }
        if plan.fault.is_none_or(|(which, _)| which == life) {
            ran.calls = count.calls.get();
        }
        let mut driver = driver.borrow_mut();
        let kept = &mut driver.dice;
        machine.file.die(|| kept.below(2) == 0);
        machine.server = None;
        bytes.clone_from(&machine.file.bytes);
        if let Some(wrong) = driver.wrong.take() {
            return Err(format!("{wrong}\n{}", machine.log));
        }
        match lived {
            // It could not begin, and says so by ending.
            Ok(Err(_)) => {}
            Ok(Ok(())) if driver.has_ended() => {
                driver.assert_on_disk(&bytes);
                let left = Counts { watched: 0, ..host.counts() };
                let wrong = driver.wrong.take().or((left != Counts::default()).then(|| format!("{left:?} is left")));
                return wrong.map_or(Ok(ran), Err);
            }
            Ok(Ok(())) => return Err(format!("the guest waits for ever\n{}", machine.log)),
            Err(payload) if payload.is::<Killed>() => {}
            Err(payload) => resume_unwind(payload),
        }
    }
    Err("nobody can begin".into())
}

/// Has the guest act at each moment, and the process die, or its call fail, when it is to.
fn observe(host: &Host, driver: &Rc<RefCell<Driver>>, count: &Rc<Count>) {
    host.observe(Some(moment::called));
    let (driver, count) = (driver.clone(), count.clone());
    let hook = move |moment: Moment| {
        if count.inside.get() {
            return false;
        }
        count.moments.set(count.moments.get() + 1);
        if let Ok(mut driver) = driver.try_borrow_mut() {
            if driver.dice.below(2) == 0 {
                driver.act();
            }
        }
        if count.kill.get() == Some(count.moments.get()) {
            count.inside.set(true);
            resume_unwind(Box::new(Killed));
        }
        if !matches!(moment, Moment::Called(_)) {
            return false;
        }
        count.calls.set(count.calls.get() + 1);
        count.fail.get() == Some(count.calls.get())
    };
    moment::at_each(Some(Rc::new(hook)));
}

/// A process, until its guest has ended or nothing moves any more.
fn live(machine: &mut Machine, options: Config, driver: &RefCell<Driver>, count: &Count) -> Result<(), String> {
    machine.start(options)?;
    let (mut idle, mut waits) = (0, 0);
    // However the dice fall, something is done in so many turns if anything can be.
    while idle < 80 {
        machine.file.hold = driver.borrow_mut().dice.below(3) > 0;
        let busy = machine.turn();
        let own = |act: &mut dyn FnMut(&mut Driver) -> bool| {
            count.inside.set(true);
            let done = act(&mut driver.borrow_mut());
            count.inside.set(false);
            done
        };
        let over = own(&mut |driver| {
            driver.act();
            driver.wrong.is_some() || driver.has_ended()
        });
        if over {
            return Ok(());
        }
        idle = if own(&mut Driver::look) || busy { 0 } else { idle + 1 };
        let Some(server) = &mut machine.server else { return Ok(()) };
        if idle > 0 && server.machine.retry.runs() {
            // Time passes.
            server.ready(RETRY, &mut machine.watch);
            waits += 1;
            if waits > 200 {
                return Ok(());
            }
            idle = 0;
        }
    }
    Ok(())
}

/// All runs of a kind over all scenes. What was wrong first, or how many there were.
fn explore(runs: impl Fn(&Scene, u64) -> Result<u64, String>) -> Result<u64, String> {
    let mut count = 0;
    for (number, scene) in scenes().iter().enumerate() {
        count += runs(scene, number as u64).map_err(|wrong| format!("scene {number}, {wrong}"))?;
    }
    Ok(count)
}

fn planned(scene: &Scene, plan: &Plan) -> Result<Ran, String> {
    run(scene, plan).map_err(|wrong| format!("{plan:?}: {wrong}"))
}

/// Killed at every moment, with one more death soon after.
fn killed(scene: &Scene, seed: u64, step: usize) -> Result<u64, String> {
    let moments = planned(scene, &Plan { seed, ..Plan::default() })?.moments;
    let mut dice = Dice(seed + 77);
    for kill in (1..=moments).step_by(step) {
        planned(scene, &Plan { seed, kills: vec![kill], fault: None })?;
        let next = 1 + dice.below(150) as u64;
        planned(scene, &Plan { seed, kills: vec![kill, next], fault: None })?;
    }
    Ok(moments.div_ceil(step as u64) * 2)
}

/// Killed at some moments, and each call of the one that follows fails.
fn failed(scene: &Scene, seed: u64, step: usize) -> Result<u64, String> {
    let moments = planned(scene, &Plan { seed, ..Plan::default() })?.moments;
    let mut count = 0;
    for kill in (1..=moments).step_by(step) {
        for nth in 1.. {
            let ran = planned(scene, &Plan { seed, kills: vec![kill], fault: Some((1, nth)) })?;
            count += 1;
            if ran.calls < nth {
                break;
            }
        }
    }
    Ok(count)
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_process_killed_at_any_moment_loses_nothing_and_does_nothing_twice() {
    let runs = explore(|scene, seed| killed(scene, seed + 1, 1)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 2000, "only {runs} runs");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn any_call_that_fails_at_a_take_over_closes_nobody_and_loses_nothing() {
    let runs = explore(|scene, seed| failed(scene, seed + 1, 97)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 1000, "only {runs} runs");
}

/// What finds nothing would find no mistake.
#[test]
fn every_mistake_that_is_made_on_purpose_is_found() {
    for mistake in [
        Mistake::SlotBeforeMove,
        Mistake::NoteClearedEarly,
        Mistake::NoteNotRead,
        Mistake::OwnOffer,
        Mistake::OwnPersistence,
        Mistake::FailureIsFinal,
        Mistake::StaleQueues,
        Mistake::NotToldAfterwards,
        Mistake::ClosedUnanswered,
        Mistake::SignalLost,
    ] {
        moment::make(Some(mistake));
        let plain = |scene: &Scene, seed| planned(scene, &Plan { seed: seed + 1, ..Plan::default() }).map(|_| 1);
        let every = |scene: &Scene, seed| Ok(killed(scene, seed + 1, 1)? + failed(scene, seed + 1, 97)?);
        let found = explore(plain).and_then(|_| explore(every));
        moment::make(None);
        let wrong = found.expect_err(&format!("{mistake:?} is not found"));
        println!("{mistake:?}: {}", wrong.lines().next().unwrap_or_default());
    }
}
