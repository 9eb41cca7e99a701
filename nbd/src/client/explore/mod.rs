//! The client against a model server over a network that delays, cuts and reconnects: exhaustively for small workloads,
//! at every byte and between every two messages, and by seeds for larger ones. What is checked is in [`world`].
//!
//! Each planted bug must be found.

mod encrypted;
mod server;
mod world;

use server::Restart;
use world::{Work, World};

use super::Broken;
use super::planted::Planted;

const RESTARTS: [Restart; 3] = [Restart::None, Restart::Loses, Restart::LosesSome];

/// Overlapping writes, a read behind them, a flush between them, and a flush at the end.
const SMALL: [Work; 8] = [
    Work::Write(0, 8),
    Work::Write(4, 8),
    Work::Read(0, 12),
    Work::Flush,
    Work::Write(0, 4),
    Work::Zero(8, 4),
    Work::Read(0, 16),
    Work::Flush,
];

/// A random number generator: xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        usize::try_from(number).unwrap() % limit
    }
}

/// A run with cuts at these steps, in a fixed order of events.
#[derive(Clone, Debug)]
struct Script {
    /// After which step, how many received requests are still executed, and how the server restarts.
    cuts: Vec<(usize, usize, Restart)>,
    /// Bytes of each delivery.
    portion: usize,
    /// The server executes the newest request first.
    newest_first: bool,
    structured: bool,
    /// How many operations are submitted before earlier ones are answered.
    window: usize,
}

/// Runs a script to its end; returns the number of steps.
fn run(script: &Script, work: &[Work], planted: Option<Planted>) -> Result<usize, String> {
    let mut world = World::new(work, script.structured, planted);
    let mut cuts = script.cuts.iter();
    let mut cut = cuts.next();
    for step in 0..100_000 {
        if let Some((_, executes, restart)) = cut.filter(|cut| cut.0 == step) {
            world.cut(*executes, *restart)?;
            cut = cuts.next();
        }
        if world.is_done() {
            world.check_end()?;
            return Ok(step);
        }
        advance(&mut world, script, step)?;
        if let Some(broken) = &world.broken {
            return Err(format!("the connection was ended: {broken}"));
        }
    }
    Err("the run does not end".to_owned())
}

fn advance(world: &mut World, script: &Script, step: usize) -> Result<(), String> {
    let may_submit = if world.is_last() { world.only_last_left() } else { world.has_work() };
    if !world.connected {
        world.connect();
    } else if may_submit && world.has_work() && world.client.ops.len() < script.window {
        world.submit()?;
    } else if !world.client.to_send().is_empty() {
        world.send();
    } else if !world.to_server.is_empty() {
        world.deliver_to_server(script.portion);
    } else if !world.server.pending.is_empty() {
        let newest = world.server.pending.len() - 1;
        world.execute(if script.newest_first { newest } else { 0 }, step % 4, false)?;
    } else if !world.to_client.is_empty() || !world.server.out.is_empty() {
        world.to_client.append(&mut world.server.send());
        world.deliver_to_client(script.portion)?;
    } else {
        return Err(format!("stuck at step {step}"));
    }
    Ok(())
}

fn whole(portion: usize, newest_first: bool, structured: bool, window: usize) -> Script {
    Script { cuts: Vec::new(), portion, newest_first, structured, window }
}

/// All scripts with one cut at every byte.
fn cut_at_every_byte(planted: Option<Planted>) -> Result<usize, String> {
    let mut runs = 0;
    for (newest_first, structured, window) in [(false, true, 8), (true, true, 8), (true, false, 8), (false, false, 1)] {
        let plain = whole(1, newest_first, structured, window);
        let steps = run(&plain, &SMALL, planted).map_err(|why| format!("{plain:?}: {why}"))?;
        for step in 0..steps {
            for (executes, restart) in RESTARTS.iter().flat_map(|&restart| [(0, restart), (1, restart), (9, restart)]) {
                let script = Script { cuts: vec![(step, executes, restart)], ..plain.clone() };
                run(&script, &SMALL, planted).map_err(|why| format!("{script:?}: {why}"))?;
                runs += 1;
            }
        }
    }
    Ok(runs)
}

/// All scripts with two cuts, between any two messages.
fn cut_twice_between_messages(planted: Option<Planted>) -> Result<usize, String> {
    let mut runs = 0;
    for (newest_first, window) in [(false, 8), (true, 8), (false, 2), (false, 1)] {
        let plain = whole(usize::MAX, newest_first, true, window);
        let steps = run(&plain, &SMALL, planted).map_err(|why| format!("{plain:?}: {why}"))?;
        for (first, second) in
            (0..steps).flat_map(|first| (first + 1..first + steps).map(move |second| (first, second)))
        {
            for (one, other) in RESTARTS.iter().flat_map(|&one| RESTARTS.map(|other| (one, other))) {
                let executes = first % 3;
                let cuts = vec![(first, executes, one), (second, 9 * (second % 2), other)];
                let script = Script { cuts, ..plain.clone() };
                run(&script, &SMALL, planted).map_err(|why| format!("{script:?}: {why}"))?;
                runs += 1;
            }
        }
    }
    Ok(runs)
}

fn random_work(random: &mut Random) -> Vec<Work> {
    let mut work: Vec<Work> = (0..24)
        .map(|_| {
            let (at, len) = (4 * random.below(8), 4 + 4 * random.below(4));
            match random.below(8) {
                0..=3 => Work::Write(at, len),
                4 => Work::Zero(at, len),
                5 | 6 => Work::Read(at, len),
                _ => Work::Flush,
            }
        })
        .collect();
    work.push(Work::Flush);
    work
}

/// A run in which each event is random. Kept writes have little room. In some, a flush fails.
fn run_seed(seed: u64, planted: Option<Planted>) -> Result<(), String> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut world = World::new(&random_work(&mut random), random.below(4) > 0, planted);
    world.client.kept_max = 32 << random.below(4);
    let mut cuts = random.below(6);
    let mut fails = random.below(4) == 0;
    for _ in 0..100_000 {
        if world.is_done() {
            return world.check_end();
        }
        let may_submit = if world.is_last() { world.only_last_left() } else { world.has_work() };
        match random.below(13) {
            0 if cuts > 0 && world.connected && random.below(4) == 0 => {
                cuts -= 1;
                world.cut(random.below(5), RESTARTS[random.below(3)])?;
            }
            1 if !world.connected => world.connect(),
            2 | 3 if may_submit => world.submit()?,
            4 if world.connected => world.send(),
            5 | 6 => world.deliver_to_server(1 + random.below(80)),
            7 if !world.server.pending.is_empty() => {
                if fails && random.below(8) == 0 {
                    (fails, world.server.fails_flush) = (false, true);
                }
                let index = random.below(world.server.pending.len());
                world.execute(index, random.below(4), random.below(2) == 0)?;
            }
            8 if !world.held.is_empty() => {
                world.server.out = world.held.remove(random.below(world.held.len()));
                world.to_client.append(&mut world.server.send());
            }
            9..=12 if world.connected => world.deliver_to_client(1 + random.below(80))?,
            _ => {}
        }
        if let Some(broken) = &world.broken {
            return Err(format!("the connection was ended: {broken}"));
        }
    }
    Err("the run does not end".to_owned())
}

fn seeds(count: u64, planted: Option<Planted>) -> Result<(), String> {
    (0..count).try_for_each(|seed| run_seed(seed, planted).map_err(|why| format!("seed {seed}: {why}")))
}

#[test]
fn a_cut_at_any_byte_loses_nothing() {
    let runs = cut_at_every_byte(None).unwrap();
    assert!(runs > 10_000, "only {runs} runs");
}

#[test]
fn two_cuts_between_any_messages_lose_nothing() {
    let runs = cut_twice_between_messages(None).unwrap();
    assert!(runs > 10_000, "only {runs} runs");
}

#[test]
fn random_runs_lose_nothing() {
    seeds(3000, None).unwrap();
}

#[test]
fn each_planted_bug_is_found() {
    for planted in [
        Planted::FlushAcrossReconnect,
        Planted::ResentBehindNewer,
        Planted::OverlapsInFlight,
        Planted::MatchedByOrder,
        Planted::FlushCoversLater,
        Planted::FlushesTogether,
        Planted::SampleNotFlushed,
    ] {
        let found = seeds(3000, Some(planted)).expect_err(&format!("{planted:?} is not found"));
        println!("{planted:?}: {found}");
        assert!(!found.contains("does not end"), "{planted:?} is found as: {found}");
    }
}

#[test]
fn an_export_of_another_size_is_not_used() {
    let change = |planted| {
        let mut world = World::new(&SMALL, true, planted);
        let script = whole(usize::MAX, false, true, 8);
        for step in 0..200 {
            if step == 20 {
                world.cut(0, Restart::None)?;
                world.server.size = 1024;
            }
            if world.is_done() {
                return world.check_end();
            }
            if world.broken.is_some() {
                return Ok(());
            }
            advance(&mut world, &script, step)?;
        }
        Err("the run does not end".to_owned())
    };
    change(None).unwrap();
    assert!(change(Some(Planted::SizeChange)).is_err(), "the planted bug is not found");
}

/// What becomes of a run in which another disk of the same size is served after a cut at this step.
fn other_disk_after(cut: usize, planted: Option<Planted>) -> Result<Option<Broken>, String> {
    let mut world = World::new(&SMALL, true, planted);
    let script = whole(usize::MAX, false, true, 1);
    for step in 0..200 {
        if step == cut {
            world.cut(9, Restart::None)?;
            world.serve_another();
        }
        if world.is_done() {
            return world.check_end().map(|()| None);
        }
        advance(&mut world, &script, step)?;
        if let Some(broken) = &world.broken {
            return Ok(Some(broken.clone()));
        }
    }
    Err("the run does not end".to_owned())
}

#[test]
fn another_disk_is_recognized_once_a_flush_has_covered_something() {
    let plain = whole(usize::MAX, false, true, 1);
    let steps = run(&plain, &SMALL, None).unwrap();
    let found = (0..steps).filter(|&cut| matches!(other_disk_after(cut, None), Ok(Some(Broken::Changed(_)))));
    let found: Vec<usize> = found.collect();
    // Before the first flush was answered there is nothing to recognize it by.
    assert!(found.len() > steps / 3 && found.windows(2).all(|pair| pair[1] == pair[0] + 1), "{found:?} of {steps}");
    assert!(found.last().is_some_and(|&last| last + 1 == steps), "{found:?} of {steps}");
    for cut in found {
        let used = other_disk_after(cut, Some(Planted::NotCompared));
        assert!(!matches!(used, Ok(Some(_))), "the planted bug has no effect at {cut}");
    }
}

#[test]
fn a_short_read_is_never_completed() {
    let short = |planted| {
        let mut world = World::new(&SMALL, true, planted);
        world.server.ends_reads_early = true;
        let script = whole(usize::MAX, false, true, 8);
        for _ in 0..200 {
            if let Some(broken) = &world.broken {
                return Ok(matches!(broken, Broken::Short { .. }));
            }
            advance(&mut world, &script, 1)?;
        }
        Err("the run does not end".to_owned())
    };
    assert_eq!(short(None), Ok(true));
    assert!(short(Some(Planted::ShortRead)).is_err(), "the planted bug is not found");
}
