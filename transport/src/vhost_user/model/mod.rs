//! A model of a guest that survives its disk's process, explored: the process is killed before each thing that it does
//! and others see, in every short script, and at random in long ones.
//!
//! Knows nothing about the disk. It lies inside of the crate, since it stops the process between two stores
//! ([`super::moment`]). Invariant: every planted bug is found, else the exploration is worth nothing.
//!
//! `TAPLINE_MODEL_SEED` repeats one random life; `TAPLINE_MODEL_LIVES` says how many there are.

#![allow(clippy::cast_possible_truncation, reason = "the numbers are the model's own, and small")]

mod guest;
mod run;
mod script;
mod storage;
#[path = "../../../tests/vhost_mock/mod.rs"]
mod vhost_mock;

use super::moment::test::{self as moment, BUGS, Bug};
use guest::Kind;
use run::{Nature, Run, Step};

use storage::Fate;

/// Sectors of the disk, and its queues at most.
const SECTORS: usize = 8;
const QUEUES: usize = 2;

/// What is wrong, if something is.
type Check = Result<(), String>;

/// What was explored.
#[derive(Default, Debug)]
struct Explored {
    lives: u64,
    killed: usize,
    answered: u64,
    errors: u64,
    upgraded: u64,
}

impl Explored {
    fn add(&mut self, run: &Run) {
        self.lives += 1;
        self.killed += run.killed;
        self.answered += run.answered();
        self.errors += run.errors();
        self.upgraded += run.upgraded;
    }
}

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

/// With a record and without, and what becomes of what was begun.
fn natures(deep: bool, queues: usize) -> Vec<Nature> {
    let nature = |recorded, fate| Nature { recorded, event_idx: false, queues, fate };
    let mut natures = vec![nature(true, Fate::Mixed(0b0101)), nature(false, Fate::Done)];
    if deep || queues == 1 {
        natures.push(nature(true, Fate::Lost));
    }
    if deep {
        natures.extend([nature(true, Fate::Done), nature(false, Fate::Lost), nature(false, Fate::Mixed(0b0110))]);
        natures.push(nature(true, Fate::Mixed(0b1010)));
    }
    natures
}

fn explore(deep: bool) -> Result<Explored, String> {
    let mut explored = Explored::default();
    for (queues, scripts) in [(2, script::with_failures(deep)), (1, script::with_events(deep))] {
        for script in scripts {
            for nature in natures(deep, queues) {
                kill_everywhere(nature, &script, &mut explored)?;
            }
        }
    }
    Ok(explored)
}

/// A long life, with several deaths, some of them while it recovers.
fn live_at_random(seed: u64, explored: &mut Explored) -> Result<(), String> {
    let mut dice = Dice(seed);
    let (recorded, event_idx) = (dice.roll(3) > 0, dice.roll(2) == 0);
    let (queues, fate) = (1 + dice.roll(2) as usize, Fate::Mixed(dice.roll(u64::MAX)));
    let nature = Nature { recorded, event_idx, queues, fate };
    let kills: Vec<u64> = (0..dice.roll(6)).map(|_| dice.moment()).collect();
    let script: Vec<Step> = (0..60).map(|_| any_step(&mut dice)).collect();
    let told = |why| format!("TAPLINE_MODEL_SEED={seed}: {nature:?}: {why}");
    explored.add(&Run::new(nature, kills).live(&script).map_err(told)?);
    Ok(())
}

fn any_step(dice: &mut Dice) -> Step {
    let queue = dice.roll(2) as usize;
    match dice.roll(40) {
        0..6 => Step::Offer(queue, Kind::Write),
        6..8 => Step::Offer(queue, Kind::Read),
        8 => Step::Offer(queue, Kind::Flush),
        9..15 => Step::Turn,
        15..21 => Step::Complete(dice.roll(5) as usize),
        21..25 => Step::Publish,
        25 => Step::Wait(dice.roll(3) as usize),
        26 => Step::Remove(dice.roll(2) as usize),
        27..29 => Step::Add(dice.roll(2) as usize),
        29 => Step::Replace,
        30 => Step::Restart(queue),
        31 => Step::Reconnect,
        32..34 => Step::Offer(queue, Kind::Zeroes),
        34..36 => Step::Fail(dice.roll(3) as usize, dice.roll(2) == 0),
        36 => Step::Full(dice.roll(3) as usize),
        37..39 => Step::Upgrade(dice.roll(4) > 0),
        _ => Step::Space,
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
#[ignore = "slow: run by `make test-all`"]
fn a_kill_at_any_moment_of_a_short_script_loses_and_repeats_nothing() {
    let explored = explore(from_environment("TAPLINE_MODEL_DEEP").is_some()).unwrap();
    println!("{explored:?}");
    assert!(explored.lives > 1000 && explored.killed > 1000 && explored.errors > 100, "{explored:?}");
    assert!(explored.upgraded > 500, "{explored:?}");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn long_lives_with_many_deaths_lose_and_repeat_nothing() {
    let lives = from_environment("TAPLINE_MODEL_LIVES").unwrap_or(1500);
    let explored = random_lives(lives).unwrap();
    println!("{explored:?}");
    assert!(explored.answered > 0 && (explored.errors > 0 || explored.lives == 1), "{explored:?}");
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
