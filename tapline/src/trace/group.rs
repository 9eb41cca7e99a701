//! Groups requests by kind and size, and computes typical durations.
//!
//! It knows nothing about how that is shown.

use std::collections::BTreeMap;

use stats::{Kind, Outcome, Record, STAGES, float};

/// Percentage of requests that are left out of the typical means at each end: the fastest and the slowest.
const DROPPED: usize = 20;

/// Requests of one kind and size.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    pub kind: Kind,
    pub len: u64,
    pub count: usize,
    pub failed: usize,
    /// Mean time in each stage in nanoseconds, without the fastest and slowest requests.
    pub stages: [f64; STAGES],
    /// Mean duration of all requests in nanoseconds.
    pub mean: f64,
    pub p50: u64,
    pub p99: u64,
    pub longest: u64,
}

impl Group {
    /// Groups requests by kind and size.
    pub fn of<'a>(records: impl Iterator<Item = &'a Record>) -> Vec<Group> {
        let mut groups: BTreeMap<(Kind, u64), Vec<&Record>> = BTreeMap::new();
        records.for_each(|record| groups.entry((record.kind, record.len)).or_default().push(record));
        groups.into_iter().map(|((kind, len), records)| Group::one(kind, len, records)).collect()
    }

    fn one(kind: Kind, len: u64, mut records: Vec<&Record>) -> Group {
        records.sort_by_key(|record| record.whole());
        let count = records.len();
        let dropped = count * DROPPED / 100;
        let typical = records.get(dropped..count - dropped).unwrap_or_default();
        let mut stages = [0.0; STAGES];
        for record in typical {
            for (sum, ns) in stages.iter_mut().zip(record.stages) {
                *sum += float(ns);
            }
        }
        stages.iter_mut().for_each(|sum| *sum /= float(typical.len() as u64).max(1.0));
        let rank = |percent: usize| {
            let rank = (count * percent).div_ceil(100).clamp(1, count);
            records.get(rank - 1).map_or(0, |record| record.whole())
        };
        let sum: f64 = records.iter().map(|record| float(record.whole())).sum();
        Group {
            kind,
            len,
            count,
            failed: records.iter().filter(|record| record.outcome != Outcome::Done).count(),
            stages,
            mean: sum / float(count as u64).max(1.0),
            p50: rank(50),
            p99: rank(99),
            longest: records.last().map_or(0, |record| record.whole()),
        }
    }

    /// The typical duration: the sum of the stages.
    pub fn typical(&self) -> f64 {
        self.stages.iter().sum()
    }
}

#[cfg(test)]
pub mod test {
    use super::*;

    pub fn record(number: u64, kind: Kind, len: u64, storage: u64) -> Record {
        let stages = [100, 200, 0, 0, storage, 300, 400];
        let seen = number * 1_000_000;
        let shown = seen + stages.iter().sum::<u64>();
        Record { number, kind, outcome: Outcome::Done, at: number * len, len, seen, stages, shown }
    }

    #[test]
    fn the_fastest_and_slowest_fifth_are_left_out_of_the_typical_means_only() {
        // One in ten takes a hundred times as long.
        let records: Vec<Record> = (0..100)
            .map(|number| record(number, Kind::Read, 4096, if number % 10 == 0 { 1_000_000 } else { 10_000 }))
            .collect();
        let groups = Group::of(records.iter());
        assert_eq!(groups.len(), 1);
        let group = &groups[0];
        assert_eq!((group.count, group.p50, group.p99, group.longest), (100, 11_000, 1_001_000, 1_001_000));
        assert_eq!(group.stages, [100.0, 200.0, 0.0, 0.0, 10_000.0, 300.0, 400.0]);
        assert_eq!(group.typical(), 11_000.0);
        assert_eq!(group.mean, 1000.0 + 109_000.0);
    }

    #[test]
    fn requests_of_different_kinds_and_sizes_are_apart() {
        let records = [
            record(0, Kind::Write, 512, 1),
            record(1, Kind::Read, 4096, 1),
            record(2, Kind::Read, 512, 1),
            record(3, Kind::Read, 512, 3),
        ];
        let seen: Vec<_> = Group::of(records.iter()).iter().map(|one| (one.kind, one.len, one.count)).collect();
        assert_eq!(seen, [(Kind::Read, 512, 2), (Kind::Read, 4096, 1), (Kind::Write, 512, 1)]);
    }
}
