//! Rounds, and who waits for them.
//!
//! Knows when a round begins and which requests it answers; `crate::round` knows the order of its steps, `flush`
//! carries them out. Keeps: a round answers only requests that joined before it began; no failed sync is taken for a
//! success.

use super::queue::Parked;
use crate::Status;
use crate::round::{Part, Round, Step};

/// The round under way, if any, and what waits for it or for the next one.
#[derive(Debug)]
pub(super) struct Rounds {
    round: Round,
    /// Requests that the next round will answer, and those of the one under way.
    flushes: Vec<u32>,
    flushing: Vec<u32>,
    /// Operations that wait for the end of a round, because too much metadata has changed or because they need space.
    parked: Vec<Parked>,
    /// How the round under way has failed, if it has; or how the last one has ended.
    status: Status,
    /// A round is wanted although no request waits for it.
    asked: bool,
    /// Something has changed that may be a reason for a round.
    due: bool,
    /// Syncs under way in front of a first reclaim. No round begins meanwhile.
    reclaim_syncs: usize,
}

impl Rounds {
    pub fn new() -> Rounds {
        Rounds {
            round: Round::default(),
            flushes: Vec::new(),
            flushing: Vec::new(),
            parked: Vec::new(),
            status: Status::Done,
            asked: false,
            due: false,
            reclaim_syncs: 0,
        }
    }

    /// Requests a round, whether or not a flush waits for one.
    pub fn ask(&mut self) {
        self.asked = true;
        self.due = true;
    }

    /// The next round answers this request.
    #[inline(always)]
    pub fn join(&mut self, number: u32) {
        self.flushes.push(number);
        self.due = true;
    }

    /// Parks something until a round has ended.
    pub fn park(&mut self, parked: Parked) {
        self.parked.push(parked);
        self.ask();
    }

    /// Metadata may have changed: there may be a reason for a round.
    pub fn consider(&mut self) {
        self.due = true;
    }

    /// Whether there may be a reason for a round.
    #[inline(always)]
    pub fn is_due(&self) -> bool {
        self.due
    }

    /// The same, once.
    pub fn take_due(&mut self) -> bool {
        std::mem::take(&mut self.due)
    }

    /// Whether no round is under way.
    pub fn is_idle(&self) -> bool {
        self.round.is_idle()
    }

    /// Whether a round is under way, or about to begin.
    pub fn is_syncing(&self) -> bool {
        self.asked || !self.round.is_idle()
    }

    /// How the last round has ended, if none is under way.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Whether a round can begin and is wanted, or there is another reason.
    pub fn may_begin(&self, other_reason: impl FnOnce() -> bool) -> bool {
        self.round.is_idle() && self.reclaim_syncs == 0 && (!self.flushes.is_empty() || self.asked || other_reason())
    }

    /// Begins a round of `parts`, the deepest first; `None`: the disk is broken, and nothing is made durable.
    pub fn begin(&mut self, parts: Option<Vec<Part>>) -> Step {
        self.asked = false;
        self.flushing = std::mem::take(&mut self.flushes);
        self.status = if parts.is_some() { Status::Done } else { Status::Failed };
        self.round.begin(parts.unwrap_or_default())
    }

    /// The next step, after a layer was settled.
    pub fn next(&mut self) -> Step {
        self.round.next()
    }

    /// A write of metadata has ended. The next step, if it was the last of its batch.
    pub fn written(&mut self, status: Status) -> Option<Step> {
        if self.status == Status::Done {
            self.status = status;
        }
        self.round.written(status == Status::Done)
    }

    /// A sync has ended. The next step.
    pub fn synced(&mut self, ok: bool) -> Step {
        if !ok {
            self.status = Status::Failed;
        }
        self.round.synced(ok)
    }

    /// The round has ended: whom it answers, and what has waited for its end.
    pub fn end(&mut self) -> (Vec<u32>, Vec<Parked>) {
        self.due = true;
        (std::mem::take(&mut self.flushing), std::mem::take(&mut self.parked))
    }

    /// A sync in front of a first reclaim begins.
    pub fn reclaim_sync_begun(&mut self) {
        self.reclaim_syncs += 1;
    }

    /// A sync in front of a first reclaim has ended.
    pub fn reclaim_sync_ended(&mut self) {
        self.reclaim_syncs -= 1;
        self.due = true;
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{DiskOffset, FileId};

    const FILE: FileId = FileId(0);

    fn sealed() -> Option<Vec<Part>> {
        Some(vec![Part { file: FILE, batches: Vec::new() }])
    }

    #[test]
    fn a_round_answers_who_asked_before_it_began() {
        let mut rounds = Rounds::new();
        rounds.join(1);
        assert!(rounds.take_due() && rounds.may_begin(|| false));
        assert_eq!(rounds.begin(sealed()), Step::Sync(FILE));
        rounds.join(2);
        assert!(!rounds.may_begin(|| true), "one at a time");
        assert_eq!(rounds.synced(true), Step::Settle { file: FILE, durable: true });
        assert_eq!(rounds.next(), Step::End);
        assert_eq!((rounds.end(), rounds.status()), ((vec![1], Vec::new()), Status::Done));
        assert!(rounds.take_due() && rounds.may_begin(|| false), "for the second");
    }

    #[test]
    fn a_failed_sync_and_a_broken_disk_answer_with_a_failure() {
        let mut rounds = Rounds::new();
        rounds.join(1);
        rounds.begin(sealed());
        assert_eq!(rounds.synced(false), Step::Settle { file: FILE, durable: false });
        assert_eq!((rounds.next(), rounds.status()), (Step::End, Status::Failed));
        rounds.end();
        rounds.join(2);
        assert_eq!((rounds.begin(None), rounds.status()), (Step::End, Status::Failed));
        assert_eq!(rounds.end(), (vec![2], Vec::new()));
    }

    #[test]
    fn what_is_parked_asks_for_a_round_and_goes_on_after_it() {
        let mut rounds = Rounds::new();
        let parked = Parked::Fill { fill: 3, at: DiskOffset(0) };
        rounds.park(parked);
        assert!(rounds.is_syncing() && rounds.may_begin(|| false));
        assert_eq!(rounds.begin(Some(Vec::new())), Step::End);
        assert_eq!(rounds.end(), (Vec::new(), vec![parked]));
        assert!(!rounds.is_syncing());
    }

    #[test]
    fn no_round_begins_beside_the_sync_in_front_of_a_reclaim() {
        let mut rounds = Rounds::new();
        rounds.reclaim_sync_begun();
        rounds.join(1);
        assert!(rounds.take_due() && !rounds.may_begin(|| true));
        rounds.reclaim_sync_ended();
        assert!(rounds.take_due() && rounds.may_begin(|| false));
    }
}
