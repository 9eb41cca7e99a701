//! The order in which a flush makes metadata durable.
//!
//! A round is: sync the data; then each batch of the format's metadata and a sync behind it. Flushes that
//! arrive while one is under way wait for the next, since writes they cover may have completed after this one's
//! data sync was submitted. This is only the order; who submits and who answers is the disk.

use std::collections::VecDeque;

use crate::MetaWrite;

/// What to do next in a round.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Sync the leaf.
    Sync,
    /// Write these, in any order.
    Write(Vec<MetaWrite>),
    /// The round has ended: all of it is durable, or a write of it failed.
    End {
        /// Whether it is durable.
        durable: bool,
    },
}

/// A round under way, if any.
#[derive(Debug, Default)]
pub struct Round {
    stage: Stage,
    batches: VecDeque<Vec<MetaWrite>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Idle,
    Syncing,
    Writing {
        left: usize,
        failed: bool,
    },
}

impl Round {
    /// Whether no round is under way.
    pub fn is_idle(&self) -> bool {
        self.stage == Stage::Idle
    }

    /// Begins a round of `batches`; its first step is the sync of the data.
    ///
    /// # Panics
    /// If one is under way.
    pub fn begin(&mut self, batches: Vec<Vec<MetaWrite>>) -> Step {
        assert!(self.is_idle(), "two rounds at once");
        self.batches = batches.into();
        self.stage = Stage::Syncing;
        Step::Sync
    }

    /// The sync has succeeded.
    pub fn synced(&mut self) -> Step {
        match self.batches.pop_front() {
            Some(batch) => {
                self.stage = Stage::Writing { left: batch.len(), failed: false };
                Step::Write(batch)
            }
            None => self.end(true),
        }
    }

    /// A write of the batch has ended. `None`: others are still under way.
    pub fn written(&mut self, ok: bool) -> Option<Step> {
        let Stage::Writing { left, failed } = &mut self.stage else { return None };
        *left = left.saturating_sub(1);
        *failed |= !ok;
        match (*left, *failed) {
            (0, false) => {
                self.stage = Stage::Syncing;
                Some(Step::Sync)
            }
            // What follows in the order must not be written on top of a gap.
            (0, true) => Some(self.end(false)),
            _ => None,
        }
    }

    /// The sync has failed: nothing of the round may be relied upon.
    pub fn end(&mut self, durable: bool) -> Step {
        self.batches.clear();
        self.stage = Stage::Idle;
        Step::End { durable }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn batch(count: u64) -> Vec<MetaWrite> {
        (0..count).map(|at| MetaWrite { at: at * 512, bytes: vec![0; 512] }).collect()
    }

    #[test]
    fn every_batch_is_followed_by_a_sync() {
        let mut round = Round::default();
        assert_eq!(round.begin(vec![batch(2), batch(1)]), Step::Sync);
        assert_eq!(round.synced(), Step::Write(batch(2)));
        assert_eq!(round.written(true), None);
        assert_eq!(round.written(true), Some(Step::Sync));
        assert_eq!(round.synced(), Step::Write(batch(1)));
        assert_eq!(round.written(true), Some(Step::Sync));
        assert_eq!(round.synced(), Step::End { durable: true });
        assert!(round.is_idle());
    }

    #[test]
    fn a_failed_write_ends_the_round_when_its_batch_has_ended() {
        let mut round = Round::default();
        round.begin(vec![batch(2), batch(1)]);
        round.synced();
        assert_eq!(round.written(false), None);
        assert_eq!(round.written(true), Some(Step::End { durable: false }));
        assert!(round.is_idle());
    }
}
