//! A model of a guest whose back-end process is killed: before each externally visible effect in every short script,
//! and at random in long ones.
//!
//! It knows nothing about the disk. It is part of the crate because it stops the process between two stores
//! ([`super::kill_point`]). Invariant: every planted bug is detected, otherwise the exploration is worthless.
//!
//! `TAPLINE_MODEL_SEED` repeats one random run; `TAPLINE_MODEL_LIVES` sets the number of random runs.

#![allow(clippy::cast_possible_truncation, reason = "the model's own numbers are small")]

mod guest;
mod migration;
mod run;
mod script;
mod storage;
#[path = "../../../tests/vhost_mock/mod.rs"]
mod vhost_mock;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use fastrand::Rng;

use super::kill_point::test::{self as kill_point, BUGS, Bug};
use guest::RequestKind;
use run::{Run, Scenario};
use script::ModelStep;

use storage::CrashOutcome;

/// The size of the disk.
const SECTORS: usize = 8;
/// The maximum number of its queues.
const QUEUES: usize = 2;

/// The error describes a violation.
type Check = Result<(), String>;

/// Statistics of an exploration.
#[derive(Default, Debug)]
struct ExplorationStats {
    lives: u64,
    killed: usize,
    answered: u64,
    errors: u64,
    upgraded: u64,
}

impl ExplorationStats {
    fn add(&mut self, run: &Run) {
        self.lives += 1;
        self.killed += run.killed;
        self.answered += run.answered();
        self.errors += run.errors();
        self.upgraded += run.upgraded;
    }
}

/// Runs the script with a kill at each of its kill points in this range, until a run ends without a kill.
fn kill_everywhere(
    scenario: Scenario,
    script: &[ModelStep],
    points: Range<u64>,
    explored: &mut ExplorationStats,
) -> Result<(), String> {
    for last in points {
        let with_context = |why| format!("{scenario:?}, killed after {last} kill points of {script:?}: {why}");
        let run = Run::new(scenario, vec![last]).live(script).map_err(with_context)?;
        explored.add(&run);
        if run.killed == 0 {
            break;
        }
    }
    Ok(())
}

/// Scenarios with and without a record, and with different outcomes of operations in flight.
fn scenarios(deep: bool, queues: usize) -> Vec<Scenario> {
    let scenario = |recorded, crash_outcome| Scenario { recorded, event_idx: false, queues, crash_outcome };
    let mut scenarios = vec![scenario(true, CrashOutcome::Mixed(0b0101)), scenario(false, CrashOutcome::Done)];
    if deep || queues == 1 {
        scenarios.push(scenario(true, CrashOutcome::Lost));
    }
    if deep {
        scenarios.extend([
            scenario(true, CrashOutcome::Done),
            scenario(false, CrashOutcome::Lost),
            scenario(false, CrashOutcome::Mixed(0b0110)),
        ]);
        scenarios.push(scenario(true, CrashOutcome::Mixed(0b1010)));
    }
    scenarios
}

/// Runs all short scripts with a kill at each of these points.
fn explore_points(deep: bool, points: Range<u64>, explored: &mut ExplorationStats) -> Result<(), String> {
    for (queues, scripts) in [(2, script::with_failures(deep)), (1, script::with_events(deep))] {
        for script in scripts {
            for scenario in scenarios(deep, queues) {
                kill_everywhere(scenario, &script, points.clone(), explored)?;
            }
        }
    }
    Ok(())
}

fn explore(deep: bool) -> Result<ExplorationStats, String> {
    let mut explored = ExplorationStats::default();
    explore_points(deep, 0..u64::MAX, &mut explored).map(|()| explored)
}

/// Explores until a violation is found: first all scripts with an early kill, which detects most bugs.
fn find_violation() -> Result<ExplorationStats, String> {
    explore_points(false, 0..1, &mut ExplorationStats::default())?;
    explore(false)
}

/// A long run with several kills, some of them during recovery.
fn live_at_random(seed: u64, explored: &mut ExplorationStats) -> Result<(), String> {
    let mut random = Rng::with_seed(seed);
    let (recorded, event_idx) = (random.u8(..3) > 0, random.bool());
    let (queues, crash_outcome) = (1 + random.usize(..2), CrashOutcome::Mixed(random.u64(..)));
    let scenario = Scenario { recorded, event_idx, queues, crash_outcome };
    let kills: Vec<u64> = (0..random.u8(..6)).map(|_| any_kill(&mut random)).collect();
    let script: Vec<ModelStep> = (0..60).map(|_| any_step(&mut random)).collect();
    let with_context = |why| format!("TAPLINE_MODEL_SEED={seed}: {scenario:?}: {why}");
    explored.add(&Run::new(scenario, kills).live(&script).map_err(with_context)?);
    Ok(())
}

fn any_step(random: &mut Rng) -> ModelStep {
    let queue = random.usize(..2);
    match random.u8(..43) {
        0..6 => ModelStep::Offer(queue, RequestKind::Write),
        6..8 => ModelStep::Offer(queue, RequestKind::Read),
        8 => ModelStep::Offer(queue, RequestKind::Flush),
        9..15 => ModelStep::Turn,
        15..21 => ModelStep::Complete(random.usize(..5)),
        21..25 => ModelStep::Publish,
        25 => ModelStep::Wait(random.usize(..3)),
        26 => ModelStep::Remove(random.usize(..2)),
        27..29 => ModelStep::Add(random.usize(..2)),
        29 => ModelStep::Replace,
        30 => ModelStep::Restart(queue),
        31 => ModelStep::Reconnect,
        32..34 => ModelStep::Offer(queue, RequestKind::Zeroes),
        34..36 => ModelStep::Fail(random.usize(..3), random.bool()),
        36 => ModelStep::Full(random.usize(..3)),
        37..39 => ModelStep::Upgrade(random.u8(..4) > 0),
        39..41 => ModelStep::Log,
        41 => ModelStep::LogOff,
        _ => ModelStep::Space,
    }
}

/// The number of kill points until the next kill: early, during recovery, or later.
fn any_kill(random: &mut Rng) -> u64 {
    let most = [12, 90][random.usize(..2)];
    random.u64(..most)
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is not a number")))
}

fn random_lives(lives: u64) -> Result<ExplorationStats, String> {
    let mut explored = ExplorationStats::default();
    let first = from_environment("TAPLINE_MODEL_SEED");
    let seeds = first.map_or(0..lives, |seed| seed..seed + 1);
    println!("seeds {seeds:?}");
    for seed in seeds {
        live_at_random(seed, &mut explored)?;
    }
    Ok(explored)
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_kill_at_any_point_loses_and_repeats_no_request() {
    let explored = explore(from_environment("TAPLINE_MODEL_DEEP").is_some()).unwrap();
    println!("{explored:?}");
    assert!(explored.lives > 1000 && explored.killed > 1000 && explored.errors > 100, "{explored:?}");
    assert!(explored.upgraded > 500, "{explored:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn long_runs_with_several_kills_lose_and_repeat_no_request() {
    let lives = from_environment("TAPLINE_MODEL_LIVES").unwrap_or(1500);
    let explored = random_lives(lives).unwrap();
    println!("{explored:?}");
    assert!(explored.answered > 0 && (explored.errors > 0 || explored.lives == 1), "{explored:?}");
}

#[test]
fn every_planted_bug_is_detected() {
    // Bugs are planted per thread. Two threads, as detecting all bugs takes a minute.
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(bug) = BUGS.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
            kill_point::plant(Some(bug));
            let found = find_violation().and_then(|_| random_lives(1500));
            kill_point::plant(None::<Bug>);
            match found {
                Ok(explored) => panic!("{bug:?} was not detected in {explored:?}"),
                Err(why) => println!("{bug:?}: {why}"),
            }
        }
    };
    std::thread::scope(|scope| [scope.spawn(work), scope.spawn(work)].map(|thread| thread.join().unwrap()));
}
