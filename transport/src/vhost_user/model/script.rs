//! The short scripts that are lived with a kill before each of their moments.
//!
//! Knows nothing of how they are lived. Invariant: each ends with what is done in it, so that a kill can be anywhere.

use super::guest::Kind;
use super::run::Step;

pub const WRITE: Step = Step::Offer(0, Kind::Write);
pub const READ: Step = Step::Offer(0, Kind::Read);
pub const FLUSH: Step = Step::Offer(0, Kind::Flush);

/// Every order in which three requests can be done, every way in which answers can be put together, and at each place
/// one of the things that may happen to a ring; with new requests in between, which use what was freed.
pub fn with_events(deep: bool) -> Vec<Vec<Step>> {
    let orders: &[[usize; 3]] = if deep {
        &[[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 0], [2, 1, 0]]
    } else {
        &[[0, 0, 0], [2, 1, 0]]
    };
    let events: [&[Step]; 11] = [
        &[],
        &[Step::Replace],
        &[Step::Remove(0), Step::Complete(0), Step::Publish, Step::Add(0)],
        &[Step::Remove(1), Step::Complete(1), Step::Publish, Step::Add(1)],
        &[Step::Restart(0)],
        &[Step::Wait(0), Step::Restart(0)],
        &[Step::Wait(0), Step::Reconnect],
        &[Step::Upgrade(true)],
        &[Step::Upgrade(false)],
        &[Step::Wait(0), Step::Upgrade(true), Step::Space],
        &[Step::Remove(1), Step::Upgrade(true), WRITE, Step::Turn, Step::Add(1)],
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

/// Two queues over storage that fails at each place: reads, writes, flushes, and one part or the other of a chain that
/// is two requests; with space that is missing, for ever or for a while, and one of the rings stopped meanwhile.
pub fn with_failures(deep: bool) -> Vec<Vec<Step>> {
    let events: [&[Step]; 9] = [
        &[Step::Fail(0, false)],
        &[Step::Fail(1, true)],
        &[Step::Fail(2, false), Step::Publish, Step::Restart(0)],
        &[Step::Full(1)],
        &[Step::Wait(0), Step::Restart(1), Step::Publish, Step::Space],
        &[Step::Wait(1), Step::Restart(0), Step::Publish, Step::Space],
        &[Step::Restart(1)],
        &[Step::Fail(0, true), Step::Wait(0), Step::Reconnect],
        &[Step::Remove(0), Step::Fail(0, false), Step::Publish, Step::Add(0)],
    ];
    let offers: [&[Step]; 2] = [
        &[WRITE, Step::Offer(1, Kind::Zeroes), Step::Offer(1, Kind::Flush)],
        &[Step::Offer(1, Kind::Write), READ, Step::Offer(0, Kind::Zeroes)],
    ];
    let mut scripts = Vec::new();
    for offered in offers {
        for event in events {
            for place in 0..if deep { 4 } else { 1 } {
                for &order in if deep { &[[0, 0, 0, 0], [3, 1, 1, 0], [1, 2, 0, 0]][..] } else { &[[1, 2, 0, 0]] } {
                    scripts.push(failing(offered, event, place, &order));
                }
            }
        }
    }
    scripts
}

fn failing(offered: &[Step], event: &[Step], place: usize, order: &[usize; 4]) -> Vec<Step> {
    let mut steps = [offered, &[Step::Turn]].concat();
    for (at, &index) in order.iter().enumerate() {
        if at == place {
            steps.extend(event);
        }
        steps.push(Step::Complete(index));
        if at == 1 {
            steps.extend([Step::Publish, Step::Offer(1, Kind::Read), WRITE, Step::Turn]);
        }
    }
    steps.push(Step::Publish);
    steps
}
