//! A load in a closed loop, and how fast a device serves it: on virtual time.
//!
//! Requests that are issued at one moment are one batch, as those are that a disk process pushes between two looks at
//! its engine: adjacent ones among them may be merged, and large ones are split.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fastrand::Rng;

use crate::model::{Device, Spec};

/// Where requests go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Anywhere.
    Random,
    /// Each behind the one before.
    Sequential,
}

/// A number of requests of one size that are always in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Bytes of a request.
    pub size: u64,
    /// Requests in flight.
    pub depth: usize,
    /// Where they go.
    pub pattern: Pattern,
    /// Whether they write.
    pub write: bool,
}

/// How the sizes of transfers are changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Size in bytes of the pieces that larger requests are split into.
    pub split: Option<u64>,
    /// Maximum size in bytes of merged adjacent requests.
    pub merge: Option<u64>,
}

/// Bytes of the device that requests go to.
const SPAN: u64 = 64 << 30;

/// How many bytes a second a device moves for a load.
pub fn throughput(spec: Spec, load: Load, policy: Policy) -> u64 {
    let mut device = Device::new(spec);
    let mut places = Places::new(load);
    // Ends of transfers, and how many requests each is.
    let mut under_way: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let (mut now, mut free, mut served, wanted) = (0, load.depth, 0, 48 + 6 * load.depth);
    while served < wanted {
        for (at, len, requests) in batch(&mut places, free, policy) {
            let end = pieces(at, len, policy.split).map(|(at, len)| device.transfer(now, at, len)).max();
            under_way.push(Reverse((end.unwrap_or(now), requests)));
        }
        free = 0;
        while let Some(&Reverse((end, requests))) = under_way.peek() {
            if free > 0 && end > now {
                break;
            }
            under_way.pop();
            (now, free) = (end, free + requests);
        }
        served += free;
    }
    let bytes = u128::from(load.size) * served as u128;
    u64::try_from(bytes * 1_000_000_000 / u128::from(now.max(1))).unwrap_or(u64::MAX)
}

/// Requests as transfers: offset, length, and the number of requests in each.
fn batch(places: &mut Places, count: usize, policy: Policy) -> Vec<(u64, u64, usize)> {
    let most = policy.merge.map_or(0, |merge| merge.min(policy.split.unwrap_or(u64::MAX)));
    let mut transfers: Vec<(u64, u64, usize)> = Vec::new();
    for _ in 0..count {
        let (at, size) = (places.next(), places.load.size);
        match transfers.last_mut() {
            Some((from, len, requests)) if *from + *len == at && *len + size <= most => {
                *len += size;
                *requests += 1;
            }
            _ => transfers.push((at, size, 1)),
        }
    }
    transfers
}

/// A transfer in pieces, cut where offsets are multiples of one.
fn pieces(at: u64, len: u64, split: Option<u64>) -> impl Iterator<Item = (u64, u64)> {
    let end = at + len;
    let mut from = at;
    std::iter::from_fn(move || {
        let here = from;
        let next = split.filter(|piece| len > *piece).map_or(end, |piece| (here / piece + 1) * piece).min(end);
        from = next;
        (here < end).then_some((here, next - here))
    })
}

struct Places {
    load: Load,
    last: u64,
    random: Rng,
}

impl Places {
    fn new(load: Load) -> Places {
        Places { load, last: 0, random: Rng::with_seed(1) }
    }

    fn next(&mut self) -> u64 {
        let count = SPAN / self.load.size;
        self.last = match self.load.pattern {
            Pattern::Sequential => (self.last + 1) % count,
            Pattern::Random => self.random.u64(..count),
        };
        self.last * self.load.size
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pieces_are_cut_at_multiples_and_cover_the_transfer() {
        let cut = |at, len, split| pieces(at, len, split).collect::<Vec<_>>();
        assert_eq!(cut(3, 10, Some(4)), [(3, 1), (4, 4), (8, 4), (12, 1)]);
        assert_eq!(cut(3, 4, Some(4)), [(3, 4)], "it is no larger than a piece");
        assert_eq!(cut(3, 10, None), [(3, 10)]);
    }

    #[test]
    fn only_adjacent_requests_of_a_batch_are_merged_and_no_more_than_fit() {
        let load = |pattern| Load { size: 4096, depth: 8, pattern, write: false };
        let merged = |pattern, policy| {
            let mut places = Places::new(load(pattern));
            batch(&mut places, 5, policy).iter().map(|transfer| transfer.2).collect::<Vec<_>>()
        };
        let policy = Policy { split: None, merge: Some(8192) };
        assert_eq!(merged(Pattern::Sequential, policy), [2, 2, 1]);
        assert_eq!(merged(Pattern::Sequential, Policy { split: Some(4096), ..policy }), [1; 5]);
        assert_eq!(merged(Pattern::Random, policy), [1; 5]);
        assert_eq!(merged(Pattern::Sequential, Policy::default()), [1; 5]);
    }
}
