//! Records of single requests, while they are traced.
//!
//! Keeps: a record has its number only while all of it is of that request.

use std::io;

use memory::size::in_memory;
use rustix::fs::{FallocateFlags, fallocate};

use super::histograms::take_memory;
use super::{Group, Page, Slot, Spent};
use crate::layout::*;

/// Requests are traced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trace {
    until: u64,
    /// How many were ever traced.
    count: u64,
}

impl Page {
    /// The same for a request of which everything is kept.
    #[cold]
    pub(super) fn ended_traced(
        &mut self,
        kind: Kind,
        slot: Slot,
        bytes: u64,
        outcome: Outcome,
        spent: &Spent,
        at: u64,
    ) {
        let place = if slot == Slot::NONE { 0 } else { self.load(slot_at(usize::from(slot.0)) + 8) };
        self.given_back(slot);
        if outcome != Outcome::Done {
            self.failed(kind, outcome);
        }
        let traced = Some((place, outcome));
        self.answered.push(Group { kind, spent: *spent, answered: at, count: 1, bytes, traced });
    }

    /// Keeps everything of each request from now on, until that time; zero ends it. The records take 3 MiB until then.
    /// Returns how many requests were ever traced.
    pub fn trace(&mut self, until: u64) -> io::Result<u64> {
        let count = Some(self.load(TRACED_AT)).filter(|count| *count < TRACED_MAX).unwrap_or(0);
        if until == 0 {
            self.end_trace();
            return Ok(count);
        }
        if let Some(file) = self.histograms.file() {
            take_memory(file, TRACE_AT, TRACE_LEN)?;
        }
        self.trace = Some(Trace { until, count });
        self.store(TRACED_UNTIL_AT, until);
        Ok(count)
    }

    #[cold]
    pub(super) fn end_trace(&mut self) {
        self.trace = None;
        self.store(TRACED_UNTIL_AT, 0);
        if let Some(file) = self.histograms.file() {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // What cannot be given back is kept for the next time.
            fallocate(file, hole, TRACE_AT as u64, TRACE_LEN as u64).ok();
        }
    }

    #[cold]
    pub(super) fn record(&mut self, group: &Group, at: u64) {
        let (Some((place, outcome)), Some(trace)) = (group.traced, &mut self.trace) else { return };
        let (number, until) = (trace.count, trace.until);
        trace.count += 1;
        let slot = in_memory(number) % RECORDS;
        let Spent { seen, taken, begun, ended, split, queue } = group.spent;
        if let Some(record) = self.shared.window::<RECORD_LEN, 8>(TRACE_AT + slot * RECORD_LEN) {
            // Without its number, it is not read.
            record.store_u64_native(0, 0);
            let what = group.bytes << 16 | (outcome as u64) << 8 | group.kind as u64;
            let words = [what, place, seen, taken, begun, ended, split, queue, group.answered, at];
            for (word, value) in words.into_iter().enumerate() {
                record.store_u64_native(8 + word * 8, value);
            }
            record.store_u64_native(0, number + 1);
        }
        self.store(TRACED_AT, number + 1);
        if at >= until {
            self.end_trace();
        }
    }
}
