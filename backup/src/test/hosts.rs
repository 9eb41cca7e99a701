//! Two hosts on one target, whose calls are interleaved.
//!
//! One host runs at a time; before each call a script decides whether the other one is next. Exhaustive for up to two
//! switches and all pairs of acts; with a seed for more switches, crashes and late listings. Invariants checked: those
//! of the module above.

use std::sync::Condvar;

use super::*;
use crate::{Fault, Moment};

/// Whose turn it is.
struct Turns {
    state: Mutex<Turn>,
    changed: Condvar,
}

struct Turn {
    host: usize,
    calls: usize,
    /// Numbers of calls before which the other host is next.
    switches: Vec<usize>,
    has_ended: [bool; 2],
}

impl Turns {
    fn new(switches: &[usize]) -> Arc<Turns> {
        let state = Turn { host: 0, calls: 0, switches: switches.to_vec(), has_ended: [false; 2] };
        Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Before a call of a host.
    fn pass(&self, host: usize) {
        let mut turn = self.wait(host);
        let is_switch = turn.switches.contains(&turn.calls);
        turn.calls += 1;
        if is_switch && !turn.has_ended[1 - host] {
            turn.host = 1 - host;
            self.changed.notify_all();
            drop(turn);
            drop(self.wait(host));
        }
    }

    fn wait(&self, host: usize) -> std::sync::MutexGuard<'_, Turn> {
        self.changed.wait_while(self.state.lock().unwrap(), |turn| turn.host != host).unwrap()
    }

    fn end(&self, host: usize) {
        let mut turn = self.wait(host);
        turn.has_ended[host] = true;
        turn.host = 1 - host;
        self.changed.notify_all();
    }
}

/// What one host does, and the fault that it has.
type Act = fn(&World, &Target, &[Record]) -> Result<(), Error>;

fn backup_of_shared(world: &World, target: &Target, _: &[Record]) -> Result<(), Error> {
    world.back_up(target, 60, &image("ABCDEF.xy"), None).map(|_| ())
}

fn same_backup(world: &World, target: &Target, _: &[Record]) -> Result<(), Error> {
    world.back_up(target, 61, &image("ABCDEF.xy"), None).map(|_| ())
}

fn incremental(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    let (old, new) = (image("ABCDEFGH"), image("ABCDEFGz"));
    match world.back_up(target, 62, &new, Some(base_on(&records[0], &old, &new))) {
        // The other host has removed the base.
        Err(Error::WrongBase { .. }) => Ok(()),
        other => other.map(|_| ()),
    }
}

fn prune_first(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    world.prune(target, &[records[0].id], 2000, 0).map(|_| ())
}

fn prune_second(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    world.prune(target, &[records[1].id], 2001, 0).map(|_| ())
}

/// More than one number of the log is used and deleted: a host that sleeps meanwhile must not use one again.
fn busy(world: &World, target: &Target, records: &[Record]) -> Result<(), Error> {
    world.back_up(target, 63, &image("BUSYbusy"), None)?;
    world.prune(target, &[records[0].id], 2002, 0)?;
    world.prune(target, &[], 2003, 0)?;
    world.prune(target, &[], 2004, 0).map(|_| ())
}

/// A prune that finds what another one has doomed, and a backup of the same content.
fn prune_and_backup(world: &World, target: &Target, _: &[Record]) -> Result<(), Error> {
    world.prune(target, &[], 2005, 0)?;
    world.back_up(target, 64, &image("ABCDEF.xy"), None).map(|_| ())
}

const ACTS: [(&str, Act); 7] = [
    ("backup", backup_of_shared),
    ("same backup", same_backup),
    ("incremental", incremental),
    ("prune first", prune_first),
    ("prune second", prune_second),
    ("busy", busy),
    ("prune and backup", prune_and_backup),
];

fn furnished(bug: Option<Bug>) -> (World, Vec<Record>) {
    seed::set(1);
    let world = World::new(bug);
    let target = world.target();
    let first = world.back_up(&target, 1, &image("ABCDEFGH"), None).unwrap();
    let second = world.back_up(&target, 2, &image("GHklmn"), None).unwrap();
    (world, vec![first, second])
}

/// Hosts of one run.
struct Setup<'a> {
    switches: &'a [usize],
    faults: [Option<(u64, Fault)>; 2],
    is_late: bool,
    /// Whether an error of an act is a violation.
    is_strict: bool,
}

/// One run; the number of calls, or a violation.
fn run(world: &World, records: &[Record], acts: [(&str, Act); 2], setup: &Setup<'_>) -> Result<usize, String> {
    let world = world.copy();
    let turns = Turns::new(setup.switches);
    let outcomes: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let hosts: Vec<_> = (0..2)
            .map(|host| {
                let (turns, world) = (&turns, &world);
                let mut memory = world.memory.host();
                if let Some((call, fault)) = setup.faults[host] {
                    memory = memory.fault_at(call, fault);
                }
                if setup.is_late {
                    memory = memory.late();
                }
                let gate = Arc::clone(turns);
                let memory = memory.gated(Arc::new(move || gate.pass(host)));
                let act = acts[host].1;
                scope.spawn(move || {
                    seed::set(10 + host as u64);
                    let outcome = world.on(memory).and_then(|target| act(world, &target, records));
                    turns.end(host);
                    outcome
                })
            })
            .collect();
        hosts.into_iter().map(|host| host.join().unwrap()).collect()
    });
    let line = || format!("{} and {} with switches at {:?}", acts[0].0, acts[1].0, setup.switches);
    for (outcome, (name, _)) in outcomes.into_iter().zip(acts).filter(|_| setup.is_strict) {
        outcome.map_err(|error| format!("{}: {name}: {error}", line()))?;
    }
    seed::set(20);
    world.check().map_err(|what| format!("{}: {what}", line()))?;
    let calls = turns.state.lock().unwrap().calls;
    Ok(calls)
}

/// All pairs of acts with up to two switches; of the second ones every `stride`-th.
fn exhaust(bug: Option<Bug>, pairs: &[[(&'static str, Act); 2]], stride: usize) -> Result<u32, String> {
    let (world, records) = furnished(bug);
    let mut runs = 0;
    for &acts in pairs {
        let mut go = |switches: &[usize]| {
            runs += 1;
            run(&world, &records, acts, &Setup { switches, faults: [None; 2], is_late: false, is_strict: true })
        };
        let calls = go(&[])?;
        for first in 0..calls {
            // The second switch comes back to the first host; without one it comes back when the second host has ended.
            let calls = go(&[first])?;
            for second in (first + 1 + first % stride..calls).step_by(stride) {
                go(&[first, second])?;
            }
        }
    }
    Ok(runs)
}

fn all_pairs() -> Vec<[(&'static str, Act); 2]> {
    // The switch before the first call makes the second host the first one.
    ACTS.iter().enumerate().flat_map(|(at, first)| ACTS[at..].iter().map(move |second| [*first, *second])).collect()
}

/// Random switches, faults and late listings.
fn random(bug: Option<Bug>, seeds: std::ops::Range<u64>) -> Result<(), String> {
    let (world, records) = furnished(bug);
    for seed in seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let acts = [*random.choice(&ACTS).unwrap(), *random.choice(&ACTS).unwrap()];
        let mut switches: Vec<usize> = (0..random.usize(0..8)).map(|_| random.usize(0..120)).collect();
        switches.sort_unstable();
        let faults = [(); 2].map(|()| {
            let moment = *random.choice(&Moment::ALL).unwrap();
            random.bool().then(|| (random.u64(0..50), Fault::Crash(moment)))
        });
        let setup = Setup { switches: &switches, faults, is_late: random.bool(), is_strict: false };
        run(&world, &records, acts, &setup).map_err(|what| format!("seed {seed}: {what}"))?;
    }
    Ok(())
}

#[test]
fn two_hosts_never_cost_each_other_a_backup() {
    let pairs = [[3, 0], [3, 2], [3, 4], [0, 1], [0, 5], [3, 6]].map(|pair| pair.map(|act: usize| ACTS[act]));
    let runs = exhaust(None, &pairs, 61).unwrap();
    assert!(runs > 100, "{runs} runs");
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn two_hosts_never_cost_each_other_a_backup_at_two_switches() {
    exhaust(None, &all_pairs(), 61).unwrap();
}

#[test]
fn two_hosts_that_crash_and_list_late_never_cost_each_other_a_backup() {
    random(None, 0..200).unwrap();
}

fn must_be_found(bug: Bug, pairs: &[[(&'static str, Act); 2]]) {
    let found = exhaust(Some(bug), pairs, 1);
    println!("{bug:?}: {found:?}");
    assert!(found.is_err(), "the planted bug was not found");
}

#[test]
fn a_writer_that_trusts_what_it_has_listed_is_found() {
    must_be_found(Bug::PacksTrusted, &[[ACTS[0], ACTS[3]]]);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_prune_that_does_not_look_again_is_found() {
    must_be_found(Bug::PruneNotRepeated, &[[ACTS[3], ACTS[0]]]);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_number_that_is_used_twice_is_found() {
    must_be_found(Bug::UnconfirmedAppend, &[[ACTS[0], ACTS[5]]]);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_prune_that_forgets_what_is_doomed_is_found() {
    must_be_found(Bug::DoomForgotten, &[[ACTS[3], ACTS[6]]]);
}
