//! A model of a guest that survives its disk's process, explored: the process is killed before each thing that it does and
//! others see, in every short script, and at random in long ones.
//!
//! Knows nothing about the disk. It lies inside of the crate, since it stops the process between two stores
//! ([`super::moment`]). Invariant: every planted bug is found, else the exploration is worth nothing.
//!
//! `TAPLINE_MODEL_SEED` repeats one random life; `TAPLINE_MODEL_LIVES` says how many there are.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the model's own, and small")]

mod guest;
mod run;
#[path = "../../../tests/vhost_mock/mod.rs"]
mod vhost_mock;

use super::moment::test::{self as moment, BUGS, Bug};
use guest::Kind;
use run::{Nature, Run, Step};

/// Sectors of the disk.
const SECTORS: usize = 6;

/// What is wrong, if something is.
type Check = Result<(), String>;

/// What was explored.
#[derive(Default, Debug)]
struct Explored {
    lives: u64,
    killed: usize,
    answered: u64,
}

impl Explored {
    fn add(&mut self, run: &Run) {
        self.lives += 1;
        self.killed += run.killed;
        self.answered += run.answered();
    }
}

const WRITE: Step = Step::Offer(Kind::Write);
const READ: Step = Step::Offer(Kind::Read);
const FLUSH: Step = Step::Offer(Kind::Flush);

/// Lives the script without a kill, and then with one before each moment of it.
fn kill_everywhere(nature: Nature, script: &[Step], explored: &mut Explored) -> Result<(), String> {
    for last in 0.. {
        let told = |why| format!("{nature:?}, killed after {last} moments of {script:?}: {why}");
        let run = Run::new(nature, vec![last]).live(script).map_err(told)?;
        explored.add(&run);
        if run.killed == 0 {
            break;
        }
    }
    Ok(())
}

/// Every order in which three requests can be done, every way in which answers can be put together, and at each place one
/// of the things that may happen to a ring; with new requests in between, which use what was freed.
fn scripts(deep: bool) -> Vec<Vec<Step>> {
    let orders: &[[usize; 3]] = if deep {
        &[[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 0], [2, 1, 0]]
    } else {
        &[[0, 0, 0], [2, 1, 0]]
    };
    let events: [&[Step]; 7] = [
        &[],
        &[Step::Replace],
        &[Step::Remove(0), Step::Complete(0), Step::Publish, Step::Add(0)],
        &[Step::Remove(1), Step::Complete(1), Step::Publish, Step::Add(1)],
        &[Step::Restart],
        &[Step::Wait(0), Step::Restart],
        &[Step::Wait(0), Step::Reconnect],
    ];
    let mut scripts = Vec::new();
    for order in orders {
        for batches in if deep { 0..4 } else { 1..3 } {
            for event in events {
                for place in 0..if event.is_empty() { 1 } else { 3 } {
                    scripts.push(script(order, batches, event, place));
                }
            }
        }
    }
    scripts
}

fn script(order: &[usize; 3], batches: u32, event: &[Step], place: usize) -> Vec<Step> {
    let mut steps = vec![WRITE, WRITE, FLUSH, Step::Turn];
    for (at, &index) in order.iter().enumerate() {
        if at == place {
            steps.extend(event);
        }
        steps.push(Step::Complete(index));
        if batches >> at & 1 == 1 {
            steps.extend([Step::Publish, if at == 0 { WRITE } else { READ }]);
        }
        if at == 1 {
            steps.push(Step::Turn);
        }
    }
    steps.push(Step::Publish);
    steps
}

fn natures() -> [Nature; 4] {
    let nature = |recorded, outlives| Nature { recorded, event_idx: false, outlives };
    [nature(true, false), nature(true, true), nature(false, false), nature(false, true)]
}

fn explore(deep: bool) -> Result<Explored, String> {
    let mut explored = Explored::default();
    for script in scripts(deep) {
        for nature in natures() {
            kill_everywhere(nature, &script, &mut explored)?;
        }
    }
    Ok(explored)
}

/// A long life, with several deaths, some of them while it recovers.
fn live_at_random(seed: u64, explored: &mut Explored) -> Result<(), String> {
    let mut dice = Dice(seed);
    let nature = Nature { recorded: dice.roll(3) > 0, event_idx: dice.roll(2) == 0, outlives: dice.roll(2) == 0 };
    let kills: Vec<u64> = (0..dice.roll(6)).map(|_| dice.moment()).collect();
    let script: Vec<Step> = (0..60).map(|_| any_step(&mut dice)).collect();
    let told = |why| format!("TAPLINE_MODEL_SEED={seed}: {nature:?}: {why}");
    explored.add(&Run::new(nature, kills).live(&script).map_err(told)?);
    Ok(())
}

fn any_step(dice: &mut Dice) -> Step {
    match dice.roll(32) {
        0..6 => WRITE,
        6..8 => READ,
        8 => FLUSH,
        9..15 => Step::Turn,
        15..21 => Step::Complete(dice.roll(5) as usize),
        21..25 => Step::Publish,
        25 => Step::Wait(dice.roll(3) as usize),
        26 => Step::Remove(dice.roll(2) as usize),
        27..29 => Step::Add(dice.roll(2) as usize),
        29 => Step::Replace,
        30 => Step::Restart,
        _ => Step::Reconnect,
    }
}

struct Dice(u64);

impl Dice {
    /// When to die: early, while it recovers, or later.
    fn moment(&mut self) -> u64 {
        let most = [12, 90][self.roll(2) as usize];
        self.roll(most)
    }

    fn roll(&mut self, sides: u64) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (bits ^ bits >> 31) % sides
    }
}

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn random_lives(lives: u64) -> Result<Explored, String> {
    let mut explored = Explored::default();
    let first = from_environment("TAPLINE_MODEL_SEED");
    let seeds = first.map_or(0..lives, |seed| seed..seed + 1);
    println!("seeds {seeds:?}");
    for seed in seeds {
        live_at_random(seed, &mut explored)?;
    }
    Ok(explored)
}

#[test]
fn a_kill_at_any_moment_of_a_short_script_loses_and_repeats_nothing() {
    let explored = explore(from_environment("TAPLINE_MODEL_DEEP").is_some()).unwrap();
    println!("{explored:?}");
    assert!(explored.lives > 1000 && explored.killed > 1000, "{explored:?}");
}

#[test]
fn long_lives_with_many_deaths_lose_and_repeat_nothing() {
    let lives = from_environment("TAPLINE_MODEL_LIVES").unwrap_or(1500);
    let explored = random_lives(lives).unwrap();
    println!("{explored:?}");
    assert!(explored.answered > 0);
}

#[test]
fn each_planted_bug_is_found() {
    for bug in BUGS {
        moment::plant(Some(bug));
        let found = explore(false).and_then(|_| random_lives(1500));
        moment::plant(None::<Bug>);
        match found {
            Ok(explored) => panic!("{bug:?} was not found in {explored:?}"),
            Err(why) => println!("{bug:?}: {why}"),
        }
    }
}
