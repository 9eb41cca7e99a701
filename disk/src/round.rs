//! The order in which a flush makes the layers of a chain durable.
//!
//! A round takes the layers one by one, the deepest first, and of each: sync the data; then each batch of the format's
//! metadata and a sync behind it. All layers are sealed when the round begins, so that what an upper layer says about a
//! lower one is durable only after the lower one is. Flushes that arrive while a round is under way wait for the next,
//! since writes they cover may have completed after this one began. This is only the order; who submits and who answers
//! is the disk.

use std::collections::VecDeque;

use crate::{FileId, MetaWrite};

/// The changes of one layer that a round makes durable.
#[derive(Debug)]
pub struct Part {
    /// Its file.
    pub file: FileId,
    /// The batches that its format has sealed.
    pub batches: Vec<Vec<MetaWrite>>,
}

/// The next step of a round.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// Sync this file.
    Sync(FileId),
    /// Write these, in any order.
    Write(FileId, Vec<MetaWrite>),
    /// The round has ended for this layer; continue with [`Round::next`].
    Settle {
        /// Its file.
        file: FileId,
        /// Whether what it has sealed is durable. If not, a write of it has failed, or something below it has.
        durable: bool,
    },
    /// The round has ended.
    End,
}

/// A round under way, if any.
#[derive(Debug, Default)]
pub struct Round {
    stage: Stage,
    /// The layer whose turn it is, and those above it.
    parts: VecDeque<Part>,
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
    /// Nothing more is written; the layers that are left are settled as failed.
    Failed,
}

impl Round {
    /// Whether no round is under way.
    pub fn is_idle(&self) -> bool {
        self.stage == Stage::Idle
    }

    /// Begins a round of `parts`, the deepest first.
    ///
    /// # Panics
    /// If one is under way.
    pub fn begin(&mut self, parts: Vec<Part>) -> Step {
        assert!(self.is_idle(), "two rounds at once");
        self.parts = parts.into();
        for part in &mut self.parts {
            part.batches.retain(|batch| !batch.is_empty());
        }
        self.next()
    }

    /// The step after a [`Step::Settle`].
    pub fn next(&mut self) -> Step {
        match self.parts.front() {
            Some(_) if self.stage == Stage::Failed => self.settle(false),
            Some(part) => {
                self.stage = Stage::Syncing;
                Step::Sync(part.file)
            }
            None => {
                self.stage = Stage::Idle;
                Step::End
            }
        }
    }

    /// The sync has ended.
    pub fn synced(&mut self, ok: bool) -> Step {
        if !ok {
            return self.fail();
        }
        let Some(part) = self.parts.front_mut() else {
            unreachable!("a sync has ended of a round that has none under way")
        };
        if part.batches.is_empty() {
            return self.settle(true);
        }
        let batch = part.batches.remove(0);
        self.stage = Stage::Writing { left: batch.len(), failed: false };
        Step::Write(part.file, batch)
    }

    /// A write of the batch has ended. `None`: others are still under way.
    pub fn written(&mut self, ok: bool) -> Option<Step> {
        let Stage::Writing { left, failed } = &mut self.stage else {
            unreachable!("a write has ended of a round that writes nothing")
        };
        *left -= 1;
        *failed |= !ok;
        match (*left, *failed) {
            (0, false) => Some(self.next()),
            // What follows in the order must not be written on top of a gap.
            (0, true) => Some(self.fail()),
            _ => None,
        }
    }

    fn fail(&mut self) -> Step {
        self.stage = Stage::Failed;
        self.next()
    }

    fn settle(&mut self, durable: bool) -> Step {
        let Some(part) = self.parts.pop_front() else { unreachable!("no layer is left to be settled") };
        Step::Settle { file: part.file, durable }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::FileOffset;

    const BASE: FileId = FileId(1);
    const LEAF: FileId = FileId(0);

    fn batch(count: u64) -> Vec<MetaWrite> {
        (0..count).map(|at| MetaWrite { at: FileOffset(at * 512), bytes: vec![0; 512] }).collect()
    }

    fn part(file: FileId, batches: Vec<Vec<MetaWrite>>) -> Part {
        Part { file, batches }
    }

    #[test]
    fn every_batch_is_followed_by_a_sync() {
        let mut round = Round::default();
        assert_eq!(round.begin(vec![part(LEAF, vec![batch(2), batch(1)])]), Step::Sync(LEAF));
        assert_eq!(round.synced(true), Step::Write(LEAF, batch(2)));
        assert_eq!(round.written(true), None);
        assert_eq!(round.written(true), Some(Step::Sync(LEAF)));
        assert_eq!(round.synced(true), Step::Write(LEAF, batch(1)));
        assert_eq!(round.written(true), Some(Step::Sync(LEAF)));
        assert_eq!(round.synced(true), Step::Settle { file: LEAF, durable: true });
        assert_eq!(round.next(), Step::End);
        assert!(round.is_idle());
    }

    #[test]
    fn a_failed_write_ends_the_round_when_its_batch_has_ended() {
        let mut round = Round::default();
        round.begin(vec![part(LEAF, vec![batch(2), batch(1)])]);
        round.synced(true);
        assert_eq!(round.written(false), None);
        assert_eq!(round.written(true), Some(Step::Settle { file: LEAF, durable: false }));
        assert_eq!(round.next(), Step::End);
        assert!(round.is_idle());
    }

    #[test]
    fn a_layer_begins_when_the_one_below_is_durable() {
        let mut round = Round::default();
        let parts = vec![part(BASE, vec![batch(1)]), part(LEAF, vec![])];
        assert_eq!(round.begin(parts), Step::Sync(BASE));
        assert_eq!(round.synced(true), Step::Write(BASE, batch(1)));
        assert_eq!(round.written(true), Some(Step::Sync(BASE)));
        assert_eq!(round.synced(true), Step::Settle { file: BASE, durable: true });
        assert_eq!(round.next(), Step::Sync(LEAF));
        assert_eq!(round.synced(true), Step::Settle { file: LEAF, durable: true });
        assert_eq!(round.next(), Step::End);
    }

    #[test]
    fn nothing_above_a_layer_that_failed_becomes_durable() {
        let mut round = Round::default();
        round.begin(vec![part(BASE, vec![batch(1)]), part(LEAF, vec![batch(1)])]);
        round.synced(true);
        assert_eq!(round.written(false), Some(Step::Settle { file: BASE, durable: false }));
        assert_eq!(round.next(), Step::Settle { file: LEAF, durable: false });
        assert_eq!(round.next(), Step::End);
        assert!(round.is_idle());
    }

    #[test]
    fn what_was_durable_before_a_layer_failed_stays_so() {
        let mut round = Round::default();
        round.begin(vec![part(BASE, vec![]), part(LEAF, vec![batch(1)])]);
        assert_eq!(round.synced(true), Step::Settle { file: BASE, durable: true });
        round.next();
        assert_eq!(round.synced(false), Step::Settle { file: LEAF, durable: false });
        assert_eq!(round.next(), Step::End);
    }
}
