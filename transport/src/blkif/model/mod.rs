//! Takeover of a device, tested at every kill point: the process is killed before each call of Xen and each store to a
//! ring, and each call fails once; another process takes over, with the same options or others.
//!
//! Invariants checked: those of [`driver`]; and every run ends: after the last failure the guest is served, and the
//! image has the data that it has written. It knows nothing about images and engines: a raw disk in memory is used
//! instead.

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

/// The faults of a run.
#[derive(Clone, Debug, Default)]
struct Faults {
    seed: u64,
    /// The kill point of each process except the last.
    kills: Vec<u64>,
    /// The index of a process, and the number of its call that fails.
    failed_call: Option<(usize, u64)>,
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
    /// The number of kill points of the first process.
    kill_points: u64,
    /// The number of calls of the process with the failed call, or of the last one.
    calls: u64,
}

/// The counters and faults of the running process.
#[derive(Default)]
struct ProcessState {
    kill_points: Cell<u64>,
    calls: Cell<u64>,
    kill: Cell<Option<u64>>,
    fail: Cell<Option<u64>>,
    /// Set while the guest or the test runs: its calls are not counted.
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

/// Runs a scenario with these faults. Returns an error if an invariant was violated.
fn run(scenario: &Scenario, faults: &Faults) -> Result<RunStatistics, String> {
    let host = Host::new().unwrap();
    attach(&host);
    let driver = Rc::new(RefCell::new(Driver::new(Front::new(&host), &scenario.kernels, faults.seed)));
    let count = Rc::new(ProcessState::default());
    set_hook(&host, &driver, &count);
    let mut bytes = vec![vec![0; driver::DISK_LEN as usize]];
    let mut ran = RunStatistics { kill_points: 0, calls: 0 };
    // One more process than are killed, and another one in case a process could not start.
    for life in 0..faults.kills.len() + 2 {
        count.kill_points.set(0);
        count.calls.set(0);
        count.kill.set(faults.kills.get(life).copied());
        count.fail.set(faults.failed_call.filter(|&(which, _)| which == life).map(|(_, nth)| nth));
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
        if faults.failed_call.is_none_or(|(which, _)| which == life) {
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
            // The process could not start.
            Ok(Err(_)) => {}
            Ok(Ok(())) if driver.has_ended() => {
                driver.check_image(&bytes[0]);
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

/// Sets a hook that lets the guest act at each kill point, and kills the process or fails its call.
fn set_hook(host: &Host, driver: &Rc<RefCell<Driver>>, count: &Rc<ProcessState>) {
    host.observe(Some(kill_point::xen_called));
    let (driver, count) = (driver.clone(), count.clone());
    let hook = move |point: KillPoint| {
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
        if !matches!(point, KillPoint::Called(_)) {
            return false;
        }
        count.calls.set(count.calls.get() + 1);
        count.fail.get() == Some(count.calls.get())
    };
    kill_point::on_each(Some(Rc::new(hook)));
}

/// Runs a process until its guest has ended or there is no more progress.
fn live(
    machine: &mut TestBackend,
    options: Config,
    driver: &RefCell<Driver>,
    count: &ProcessState,
) -> Result<(), String> {
    machine.start(options)?;
    let (mut idle, mut waits) = (0, 0);
    // Enough turns to make progress with any random choices, if progress is possible.
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
        idle = if own(&mut Driver::follow_backend) || busy { 0 } else { idle + 1 };
        let Some(server) = &mut machine.server else { return Ok(()) };
        if idle > 0 && server.xen.retry.is_armed() {
            // Simulates the expiry of the timer.
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

/// Runs all scenarios. Returns the first violation, or the number of runs.
fn explore(runs: impl Fn(&Scenario, u64) -> Result<u64, String>) -> Result<u64, String> {
    let mut count = 0;
    for (number, scenario) in scenarios().iter().enumerate() {
        count += runs(scenario, number as u64).map_err(|wrong| format!("scenario {number}, {wrong}"))?;
    }
    Ok(count)
}

/// Like [`run`], with the faults in the error.
fn checked_run(scenario: &Scenario, faults: &Faults) -> Result<RunStatistics, String> {
    run(scenario, faults).map_err(|wrong| format!("{faults:?}: {wrong}"))
}

/// Kills the process at every `step`th kill point, with and without another kill soon after.
fn run_with_kills(scenario: &Scenario, seed: u64, step: usize) -> Result<u64, String> {
    let kill_points = checked_run(scenario, &Faults { seed, ..Faults::default() })?.kill_points;
    let mut random = Rng::with_seed(seed + 77);
    for kill in (1..=kill_points).step_by(step) {
        checked_run(scenario, &Faults { seed, kills: vec![kill], failed_call: None })?;
        let next = random.u64(1..=150);
        checked_run(scenario, &Faults { seed, kills: vec![kill, next], failed_call: None })?;
    }
    Ok(kill_points.div_ceil(step as u64) * 2)
}

/// Kills the process at every `step`th kill point, and fails each call of its successor.
fn run_with_failures(scenario: &Scenario, seed: u64, step: usize) -> Result<u64, String> {
    let kill_points = checked_run(scenario, &Faults { seed, ..Faults::default() })?.kill_points;
    let mut count = 0;
    for kill in (1..=kill_points).step_by(step) {
        for nth in 1.. {
            let ran = checked_run(scenario, &Faults { seed, kills: vec![kill], failed_call: Some((1, nth)) })?;
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
fn a_process_killed_at_any_point_loses_and_repeats_no_request() {
    let runs =
        explore(|scenario, seed| run_with_kills(scenario, seed + 1, 1)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 2000, "only {runs} runs");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_failed_call_during_takeover_closes_no_front_end_and_loses_nothing() {
    let runs =
        explore(|scenario, seed| run_with_failures(scenario, seed + 1, 97)).unwrap_or_else(|wrong| panic!("{wrong}"));
    println!("{runs} runs");
    assert!(runs > 1000, "only {runs} runs");
}

/// Shows that the tests above can detect violations.
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
        let plain = |scenario: &Scenario, seed| {
            checked_run(scenario, &Faults { seed: seed + 1, ..Faults::default() }).map(|_| 1)
        };
        let every = |scenario: &Scenario, seed| {
            Ok(run_with_kills(scenario, seed + 1, 1)? + run_with_failures(scenario, seed + 1, 97)?)
        };
        let found = explore(plain).and_then(|_| explore(every));
        kill_point::inject(None);
        let wrong = found.expect_err(&format!("{bug:?} was not detected"));
        println!("{bug:?}: {}", wrong.lines().next().unwrap_or_default());
    }
}
