//! Which policy suits storage: found by measuring, never by belief.
//!
//! It knows no storage: a caller measures each point. Pieces and merged transfers of several sizes are tried on loads
//! that stand for many, and each is held against the same load left alone. One that leaves any of these loads with less
//! than [`WORST`] is out, whatever the others gain; of the rest the one with the highest mean gain is taken, and none
//! if those to which it makes a difference gain too little to be sure of. So noise leaves storage alone. Each ratio is
//! the median of several rounds, in each of which both sides of it are measured next to each other in time: what else
//! the storage does comes and goes.

use crate::load::{Load, Pattern, Policy};

/// Least relative throughput that a load keeps.
const WORST: f64 = 0.97;
/// Relative differences up to this are treated as noise.
const EVEN: f64 = 0.03;
/// Least average gain of the loads that gain.
const GAIN_MIN: f64 = 1.05;
/// Candidates whose gains differ by less are equal: of those the largest pieces cost the least.
const EQUAL: f64 = 1.01;

const KIB: u64 = 1 << 10;

/// Pieces that are tried, the largest first.
const PIECES: [u64; 7] = [512 * KIB, 256 * KIB, 128 * KIB, 64 * KIB, 32 * KIB, 16 * KIB, 8 * KIB];
/// Loads on which they are.
const SPLIT_LOADS: (&[u64], [usize; 3]) = (&[1024 * KIB, 512 * KIB, 256 * KIB, 128 * KIB, 64 * KIB], [1, 4, 32]);

/// Largest merged transfers that are tried, the smallest first: none is merged to more than is needed.
const MERGED: [u64; 5] = [32 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB];
/// Loads on which they are.
const MERGE_LOADS: (&[u64], [usize; 3]) = (&[4 * KIB, 16 * KIB, 64 * KIB], [2, 8, 32]);

/// Bytes in flight of the loads that show what sizes alone do.
const CONSTANT: u64 = 512 * KIB;
/// Their requests.
const SIZES: [u64; 8] = [4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB];

/// The measured throughput of one load under one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The load that was measured.
    pub load: Load,
    /// The policy under which it ran.
    pub policy: Policy,
    /// How fast it was.
    pub bytes_per_second: u64,
}

/// The progress of the measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Points that are measured.
    pub done: usize,
    /// Points in all.
    pub all: usize,
}

/// The result of a calibration, and the measurements behind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// The policy that suits.
    pub policy: Policy,
    /// Its mean gain over the loads that it was tried on: 1.1 is a tenth.
    pub gain: f64,
    /// The gain of the load that gains least; less than 1 is a loss.
    pub worst: f64,
    /// All that was measured.
    pub points: Vec<Point>,
}

/// Measures throughput and chooses a policy. `measure` returns the bytes per second that a load moves under a policy,
/// and is called `rounds` times for each point.
pub fn fit<E>(
    write: bool,
    rounds: usize,
    measure: impl FnMut(Load, Policy, Progress) -> Result<u64, E>,
) -> Result<Fit, E> {
    let depth = |size| usize::try_from(CONSTANT / size).unwrap_or(1);
    let constant = SIZES.map(|size| Load { size, depth: depth(size), pattern: Pattern::Random, write });
    let splitting = loads(SPLIT_LOADS, Pattern::Random, write);
    let merging = loads(MERGE_LOADS, Pattern::Sequential, write);
    let pieces = splitting.iter().map(|load| 1 + PIECES.iter().filter(|piece| **piece < load.size).count());
    let merged = merging.iter().map(|load| 1 + MERGED.iter().filter(|most| **most > load.size).count());
    let all = rounds * (constant.len() + pieces.chain(merged).sum::<usize>());
    let mut sweep = Sweep { measure, points: Vec::new(), rounds, progress: Progress { done: 0, all } };
    for load in constant {
        sweep.compare(load, Policy::default(), &[])?;
    }
    let pieces = PIECES.map(|piece| Policy { split: Some(piece), merge: None });
    let split = sweep.best(&splitting, &pieces, Policy::default(), |load, policy| {
        policy.split.is_some_and(|piece| piece < load.size)
    })?;
    let merged = MERGED.map(|most| Policy { merge: Some(most), ..split.policy });
    let merge = sweep
        .best(&merging, &merged, split.policy, |load, policy| policy.merge.is_some_and(|most| most > load.size))?;
    let (gain, worst) = ((split.gain * merge.gain).sqrt(), split.worst.min(merge.worst));
    Ok(Fit { policy: merge.policy, gain, worst, points: sweep.points })
}

/// The best of some candidates.
struct Best {
    policy: Policy,
    gain: f64,
    worst: f64,
}

/// Measurements as they are made.
struct Sweep<M> {
    measure: M,
    points: Vec<Point>,
    rounds: usize,
    progress: Progress,
}

impl<M> Sweep<M> {
    fn measured<E>(&mut self, load: Load, policy: Policy) -> Result<u64, E>
    where
        M: FnMut(Load, Policy, Progress) -> Result<u64, E>,
    {
        let speed = (self.measure)(load, policy, self.progress)?;
        self.progress.done += 1;
        Ok(speed)
    }

    /// Measures a load under a policy and under others; how fast it is under each of those, under the first being 1.
    fn compare<E>(&mut self, load: Load, before: Policy, others: &[Policy]) -> Result<Vec<f64>, E>
    where
        M: FnMut(Load, Policy, Progress) -> Result<u64, E>,
    {
        let mut speeds = vec![Vec::with_capacity(self.rounds); 1 + others.len()];
        for _ in 0..self.rounds {
            for (policy, speeds) in std::iter::once(&before).chain(others).zip(&mut speeds) {
                speeds.push(self.measured(load, *policy)?.max(1));
            }
        }
        let alone = speeds.first().cloned().unwrap_or_default();
        let ratio = |(speed, alone): (&u64, &u64)| *speed as f64 / *alone as f64;
        let ratios = |speeds: &Vec<u64>| median(speeds.iter().zip(&alone).map(ratio).collect(), f64::total_cmp);
        let found = speeds.iter().skip(1).filter_map(ratios).collect();
        for (policy, speeds) in std::iter::once(&before).chain(others).zip(speeds) {
            let bytes_per_second = median(speeds, u64::cmp).unwrap_or(0);
            self.points.push(Point { load, policy: *policy, bytes_per_second });
        }
        Ok(found)
    }

    /// Tries candidates on loads that they do something to, and takes one of them or stays with `before`. Those that
    /// come first are preferred among equals.
    fn best<E>(
        &mut self,
        loads: &[Load],
        candidates: &[Policy],
        before: Policy,
        does_something: impl Fn(&Load, &Policy) -> bool,
    ) -> Result<Best, E>
    where
        M: FnMut(Load, Policy, Progress) -> Result<u64, E>,
    {
        let mut ratios: Vec<Vec<f64>> = candidates.iter().map(|_| Vec::new()).collect();
        for load in loads {
            let tried: Vec<Policy> = candidates.iter().copied().filter(|one| does_something(load, one)).collect();
            let mut found = self.compare(*load, before, &tried)?.into_iter();
            for (candidate, ratios) in candidates.iter().zip(&mut ratios) {
                let ratio = if does_something(load, candidate) { found.next() } else { None };
                ratios.push(ratio.unwrap_or(1.0));
            }
        }
        let judged: Vec<Best> = candidates
            .iter()
            .zip(&ratios)
            .map(|(policy, ratios)| Best { policy: *policy, gain: mean(ratios), worst: least(ratios) })
            .zip(&ratios)
            .filter(|(best, ratios)| best.worst >= WORST && mean(&differing(ratios)) >= GAIN_MIN)
            .map(|(best, _)| best)
            .collect();
        let most = judged.iter().map(|best| best.gain).fold(0.0, f64::max);
        let taken = judged.into_iter().find(|best| best.gain * EQUAL >= most);
        Ok(taken.unwrap_or(Best { policy: before, gain: 1.0, worst: 1.0 }))
    }
}

fn loads((sizes, depths): (&[u64], [usize; 3]), pattern: Pattern, write: bool) -> Vec<Load> {
    let of = |size: &u64| depths.map(|depth| Load { size: *size, depth, pattern, write });
    sizes.iter().flat_map(of).collect()
}

/// The geometric mean: twice as fast and half as fast are as fast.
pub(crate) fn mean(ratios: &[f64]) -> f64 {
    let sum: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    if ratios.is_empty() { 1.0 } else { (sum / ratios.len() as f64).exp() }
}

fn median<T: Copy>(mut values: Vec<T>, order: impl Fn(&T, &T) -> std::cmp::Ordering) -> Option<T> {
    values.sort_unstable_by(order);
    values.get(values.len() / 2).copied()
}

fn differing(ratios: &[f64]) -> Vec<f64> {
    ratios.iter().copied().filter(|ratio| (ratio - 1.0).abs() > EVEN).collect()
}

fn least(ratios: &[f64]) -> f64 {
    ratios.iter().copied().fold(f64::INFINITY, f64::min)
}

#[cfg(test)]
mod test;
