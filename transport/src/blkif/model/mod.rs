//! Takeover of a device, tested at every kill point: the process is killed before each call of Xen and each store to a
//! ring, and each call fails once; another process follows, with the same options or others.
//!
//! Invariants checked: those of [`driver`]; and every run ends: once nothing fails any more the guest is served, and
//! the image holds what it has written. It knows nothing about images and engines: a raw disk in memory stands in for
//! them.

#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]

#[path = "../../../tests/blkif_mock/mod.rs"]
mod blkif_mock;
mod driver;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use disk::Geometry;
use xen::fake::{Counts, Host};

use super::kill_point::{self, InjectedBug, KillPoint};
use super::{Config, GrantsPolicy, OnStop, RETRY};
use crate::Server as _;
use blkif_mock::{Abi, Front, Rings, TestBackend, attach, config};
use driver::Driver;
use fastrand::Rng;

/// The panic payload of a killed process.
struct Killed;

/// What happens to the processes, one after the other.
#[derive(Clone, Debug, Default)]
struct Plan {
    seed: u64,
    /// The kill point of each process; the last one survives.
    kills: Vec<u64>,
    /// The process whose call fails, and which of its calls.
    fault: Option<(usize, u64)>,
}

/// The processes and guest kernels of a run.
#[derive(Clone)]
struct Scenario {
    processes: [Config; 2],
    kernels: Vec<Rings>,
}

/// The statistics of a run.
#[derive(Debug)]
struct RunStatistics {
    /// Kill points and calls of the first process, and of the last.
    kill_points: u64,
    calls: u64,
}

/// Counters while a process runs.
#[derive(Default)]
struct Count {
    kill_points: Cell<u64>,
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

fn scenarios() -> Vec<Scenario> {
    let rings = |abi, queues, order, persistent| Rings { abi, queues, order, persistent };
    let (wide, narrow) = (Abi::X86_64, Abi::X86_32);
    let much = |grants| options(grants, 2, 1, 32);
    let little = |grants| options(grants, 1, 0, 0);
    let (copy, auto, map) = (GrantsPolicy::Copy, GrantsPolicy::Auto, GrantsPolicy::Map);
    let one = rings(wide, 1, 0, true);
    vec![
        Scenario { processes: [much(copy), little(auto)], kernels: vec![rings(wide, 2, 1, true)] },
        Scenario { processes: [much(auto), little(copy)], kernels: vec![rings(narrow, 2, 0, true)] },
        Scenario { processes: [little(auto), much(auto)], kernels: vec![one, rings(wide, 2, 1, false)] },
        Scenario {
            processes: [much(copy), much(auto)],
            kernels: vec![rings(wide, 2, 1, true), rings(wide, 1, 0, false)],
        },
        Scenario { processes: [little(map), little(copy)], kernels: vec![one] },
    ]
}

/// One run. Returns an error if an invariant was violated.
fn run(scenario: &Scenario, plan: &Plan) -> Result<RunStatistics, String> {
    let host = Host::new().unwrap();
    attach(&host);
    let driver = Rc::new(RefCell::new(Driver::new(Front::new(&host), &scenario.kernels, plan.seed)));
    let count = Rc::new(Count::default());
    observe(&host, &driver, &count);
    let mut bytes = vec![vec![0; driver::DISK_LEN as usize]];
    let mut ran = RunStatistics { kill_points: 0, calls: 0 };
    // One more process than are killed; and one to follow a process that could not start.
    for life in 0..plan.kills.len() + 2 {
        count.kill_points.set(0);
        count.calls.set(0);
        count.kill.set(plan.kills.get(life).copied());
        count.fail.set(plan.fault.filter(|&(which, _)| which == life).map(|(_, nth)| nth));
        count.inside.set(true);
        let options = scenario.processes[life % 2].clone();
        let mut machine = TestBackend::idle(&host, options.geometry);
        machine.file.bytes.clone_from(&bytes);
        count.inside.set(false);
        let lived = catch_unwind(AssertUnwindSafe(|| live(&mut machine, options, &driver, &count)));
        count.inside.set(true);
        if life == 0 {
            ran.kill_points = count.kill_points.get();
        }
        if plan.fault.is_none_or(|(which, _)| which == life) {
            ran.calls = count.calls.get();
        }
        let mut driver = driver.borrow_mut();
        machine.die(|| driver.random.bool());
        machine.server = None;
        bytes.clone_from(&machine.file.bytes);
        if let Some(wrong) = driver.wrong.take() {
            return Err(format!("{wrong}\n{}", machine.log));
        }
        match lived {
            // It could not start, and exits.
            Ok(Err(_)) => {}
            Ok(Ok(())) if driver.has_ended() => {
                driver.assert_on_disk(&bytes[0]);
                let left = Counts { watched: 0, ..host.counts() };
                let wrong = driver.wrong.take().or((left != Counts::default()).then(|| format!("{left:?} is left")));
                return wrong.map_or(Ok(ran), Err);
            }
            Ok(Ok(())) => return Err(format!("the guest waits forever\n{}", machine.log)),
            Err(payload) if payload.is::<Killed>() => {}
            Err(payload) => resume_unwind(payload),
        }
    }
    Err("no process can start".into())
}

/// Lets the guest act at each kill point, and kills the process, or fails its call, as planned.
fn observe(host: &Host, driver: &Rc<RefCell<Driver>>, count: &Rc<Count>) {
    host.observe(Some(kill_point::xen_called));
    let (driver, count) = (driver.clone(), count.clone());
    let hook = move |moment: KillPoint| {
        if count.inside.get() {
            return false;
        }
        count.kill_points.set(count.kill_points.get() + 1);
        if let Ok(mut driver) = driver.try_borrow_mut() {
            if driver.random.bool() {
                driver.act();
            }
        }
        if count.kill.get() == Some(count.kill_points.get()) {
            count.inside.set(true);
            resume_unwind(Box::new(Killed));
        }
        if !matches!(moment, KillPoint::Called(_)) {
            return false;
        }
        count.calls.set(count.calls.get() + 1);
        count.fail.get() == Some(count.calls.get())
    };
    kill_point::on_each(Some(Rc::new(hook)));
}

/// Runs a process until its guest has ended or there is no more progress.
fn live(machine: &mut TestBackend, options: Config, driver: &RefCell<Driver>, count: &Count) -> Result<(), String> {
    machine.start(options)?;
    let (mut idle, mut waits) = (0, 0);
    // Whatever the random choices, this many turns make progress if any is possible.
    while idle < 80 {
        machine.file.hold = driver.borrow_mut().random.usize(..3) > 0;
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
        if idle > 0 && server.xen.retry.is_armed() {
            // Let time pass.
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

/// All runs of a kind over all scenes. Returns the first violation, or the number of runs.
fn explore(runs: impl Fn(&Scenario, u64) -> Result<u64, String>) -> Result<u64, String> {
    let mut count = 0;
    for (number, scenario) in scenarios().iter().enumerate() {
        count += runs(scenario, number as u64).map_err(|wrong| format!("scene {number}, {wrong}"))?;
    }
    Ok(count)
}

fn planned(scenario: &Scenario, plan: &Plan) -> Result<RunStatistics, String> {
    run(scenario, plan).map_err(|wrong| format!("{plan:?}: {wrong}"))
}

/// Kills the process at every kill point, with one more kill soon after.
fn killed(scenario: &Scenario, seed: u64, step: usize) -> Result<u64, String> {
    let kill_points = planned(scenario, &Plan { seed, ..Plan::default() })?.kill_points;
    let mut random = Rng::with_seed(seed + 77);
    for kill in (1..=kill_points).step_by(step) {
        planned(scenario, &Plan { seed, kills: vec![kill], fault: None })?;
        let next = random.u64(1..=150);
        planned(scenario, &Plan { seed, kills: vec![kill, next], fault: None })?;
    }
    Ok(kill_points.div_ceil(step as u64) * 2)
}

/// Kills the process at some kill points, and fails each call of its successor.
fn failed(scenario: &Scenario, seed: u64, step: usize) -> Result<u64, String> {
    let kill_points = planned(scenario, &Plan { seed, ..Plan::default() })?.kill_points;
    let mut count = 0;
    for kill in (1..=kill_points).step_by(step) {
        for nth in 1.. {
            let ran = planned(scenario, &Plan { seed, kills: vec![kill], fault: Some((1, nth)) })?;
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
fn a_process_killed_at_any_point_loses_no_request_and_repeats_none() {
    let runs = explore(|scenario, seed| killed(scenario, seed + 1, 1)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 2000, "only {runs} runs");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_failed_call_during_takeover_closes_no_front_end_and_loses_nothing() {
    let runs = explore(|scenario, seed| failed(scenario, seed + 1, 97)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 1000, "only {runs} runs");
}

/// A test that detects nothing would not detect the injected bugs.
#[test]
fn every_injected_bug_is_detected() {
    for bug in [
        InjectedBug::ResponseBeforeMove,
        InjectedBug::IntentClearedEarly,
        InjectedBug::IntentNotCompleted,
        InjectedBug::OwnFeatures,
        InjectedBug::OwnPersistence,
        InjectedBug::FailureIsFinal,
        InjectedBug::StaleQueueCount,
        InjectedBug::NoInitialNotification,
        InjectedBug::ClosedUnanswered,
        InjectedBug::NotificationLost,
    ] {
        kill_point::inject(Some(bug));
        let plain =
            |scenario: &Scenario, seed| planned(scenario, &Plan { seed: seed + 1, ..Plan::default() }).map(|_| 1);
        let every = |scenario: &Scenario, seed| Ok(killed(scenario, seed + 1, 1)? + failed(scenario, seed + 1, 97)?);
        let found = explore(plain).and_then(|_| explore(every));
        kill_point::inject(None);
        let wrong = found.expect_err(&format!("{bug:?} was not detected"));
        println!("{bug:?}: {}", wrong.lines().next().unwrap_or_default());
    }
}
