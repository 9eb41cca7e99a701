//! The short scripts that are run with a kill at each of their kill points.
//!
//! It knows nothing about how they are run. Invariant: each completes the requests that it starts, wherever the kill
//! is.

use super::guest::RequestKind;

/// One step of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelStep {
    /// The driver submits a request in one of its queues.
    Offer(usize, RequestKind),
    /// The back-end processes its socket, takes requests and publishes.
    Turn,
    /// The storage completes one of the requests, counted from the oldest.
    Complete(usize),
    /// The storage fails one of the requests; the flag is set if a write has happened nevertheless.
    Fail(usize, bool),
    /// The storage has no space for a request, which is reported to its guest.
    Full(usize),
    /// The storage has no space for a request, which waits for space from now on.
    Wait(usize),
    /// There is space: waiting requests are restarted.
    Space,
    /// Answers are published.
    Publish,
    /// The memory of the rings, or that of the data, is removed.
    Remove(usize),
    /// Removed memory is added again.
    Add(usize),
    /// The memory table is replaced.
    Replace,
    /// One of the rings is stopped, and started again.
    Restart(usize),
    /// The connection is lost and reestablished.
    Reconnect,
    /// A migration begins; or its log is replaced.
    Log,
    /// The migration ends.
    LogOff,
    /// Another process takes over; or fails to, after receiving the state.
    Upgrade(bool),
}

pub const WRITE: ModelStep = ModelStep::Offer(0, RequestKind::Write);
pub const READ: ModelStep = ModelStep::Offer(0, RequestKind::Read);
pub const FLUSH: ModelStep = ModelStep::Offer(0, RequestKind::Flush);

/// Scripts with every order in which three requests can complete, every way of batching answers, and one of the events
/// of a ring at each position; with new requests in between, which reuse freed memory.
pub fn with_events(deep: bool) -> Vec<Vec<ModelStep>> {
    let orders: &[[usize; 3]] = if deep {
        &[[0, 0, 0], [0, 1, 0], [1, 0, 0], [1, 1, 0], [2, 0, 0], [2, 1, 0]]
    } else {
        &[[0, 0, 0], [2, 1, 0]]
    };
    let events: [&[ModelStep]; 14] = [
        &[],
        &[ModelStep::Replace],
        &[ModelStep::Remove(0), ModelStep::Complete(0), ModelStep::Publish, ModelStep::Add(0)],
        &[ModelStep::Remove(1), ModelStep::Complete(1), ModelStep::Publish, ModelStep::Add(1)],
        &[ModelStep::Restart(0)],
        &[ModelStep::Wait(0), ModelStep::Restart(0)],
        &[ModelStep::Wait(0), ModelStep::Reconnect],
        &[ModelStep::Upgrade(true)],
        &[ModelStep::Log],
        &[ModelStep::Log, ModelStep::Upgrade(true)],
        &[
            ModelStep::Log,
            READ,
            ModelStep::Turn,
            ModelStep::Log,
            ModelStep::Wait(0),
            ModelStep::Reconnect,
            ModelStep::LogOff,
        ],
        &[ModelStep::Upgrade(false)],
        &[ModelStep::Wait(0), ModelStep::Upgrade(true), ModelStep::Space],
        &[ModelStep::Remove(1), ModelStep::Upgrade(true), WRITE, ModelStep::Turn, ModelStep::Add(1)],
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

fn script(order: &[usize; 3], batches: u32, event: &[ModelStep], place: usize) -> Vec<ModelStep> {
    let mut steps = vec![WRITE, WRITE, FLUSH, ModelStep::Turn];
    for (at, &index) in order.iter().enumerate() {
        if at == place {
            steps.extend(event);
        }
        steps.push(ModelStep::Complete(index));
        if batches >> at & 1 == 1 {
            steps.extend([ModelStep::Publish, if at == 0 { WRITE } else { READ }]);
        }
        if at == 1 {
            steps.push(ModelStep::Turn);
        }
    }
    steps.push(ModelStep::Publish);
    steps
}

/// Scripts for two queues over storage that fails at each position: reads, writes, flushes, and either part of a chain
/// of two requests; also with missing space, permanently or temporarily, and with one of the rings stopped meanwhile.
pub fn with_failures(deep: bool) -> Vec<Vec<ModelStep>> {
    let events: [&[ModelStep]; 9] = [
        &[ModelStep::Fail(0, false)],
        &[ModelStep::Fail(1, true)],
        &[ModelStep::Fail(2, false), ModelStep::Publish, ModelStep::Restart(0)],
        &[ModelStep::Full(1)],
        &[ModelStep::Wait(0), ModelStep::Restart(1), ModelStep::Publish, ModelStep::Space],
        &[ModelStep::Wait(1), ModelStep::Restart(0), ModelStep::Publish, ModelStep::Space],
        &[ModelStep::Restart(1)],
        &[ModelStep::Fail(0, true), ModelStep::Wait(0), ModelStep::Reconnect],
        &[ModelStep::Remove(0), ModelStep::Fail(0, false), ModelStep::Publish, ModelStep::Add(0)],
    ];
    let offers: [&[ModelStep]; 2] = [
        &[WRITE, ModelStep::Offer(1, RequestKind::Zeroes), ModelStep::Offer(1, RequestKind::Flush)],
        &[ModelStep::Offer(1, RequestKind::Write), READ, ModelStep::Offer(0, RequestKind::Zeroes)],
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

fn failing(offered: &[ModelStep], event: &[ModelStep], place: usize, order: &[usize; 4]) -> Vec<ModelStep> {
    let mut steps = [offered, &[ModelStep::Turn]].concat();
    for (at, &index) in order.iter().enumerate() {
        if at == place {
            steps.extend(event);
        }
        steps.push(ModelStep::Complete(index));
        if at == 1 {
            steps.extend([ModelStep::Publish, ModelStep::Offer(1, RequestKind::Read), WRITE, ModelStep::Turn]);
        }
    }
    steps.push(ModelStep::Publish);
    steps
}
