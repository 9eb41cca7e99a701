//! Whether a disk's requests take long, from its page alone.
//!
//! Invariants: a disk on which nothing is in flight is not stuck; one whose requests end is not stuck either, unless
//! one of them is left behind for [`LEFT_BEHIND`].

use crate::layout::{Kind, Stage};
use crate::snapshot::{KindCounts, Snapshot, float};

/// Nothing has ended for this long, in nanoseconds, and the oldest request is as old.
const STUCK: u64 = 1_500_000_000;
/// The same for requests on which storage may work for seconds: flushes, discards and zeroes.
const STUCK_LONG: u64 = 10_000_000_000;
/// A request of this age is stuck although others end: guests give up about then.
const LEFT_BEHIND: u64 = 30_000_000_000;
/// Storage is slow if a request is as old as this, in nanoseconds.
const SLOW: u64 = 1_000_000_000;
/// And if requests spend as long there on average.
const SLOW_MEAN: f64 = 100_000_000.0;
/// A disk that was slow stays so for this long, in nanoseconds: otherwise it would change all the time.
const HELD: u64 = 5_000_000_000;

/// How long requests take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Delay {
    /// Not long.
    #[default]
    None,
    /// Long at the storage, but they end.
    Slow,
    /// The oldest has been with the storage for seconds, and nothing ends.
    AtStorage,
    /// The oldest was not given to the storage for seconds, and nothing ends.
    BeforeStorage,
}

/// The observed progress of a disk's requests.
#[derive(Clone, Debug, Default)]
pub struct Delays {
    before: Option<(u64, KindCounts)>,
    /// When requests were last seen to end.
    ended: Option<u64>,
    /// When the disk was last slow.
    slow: Option<u64>,
}

impl Delays {
    /// Judges a reading of the page of a disk; they should be taken every half second or so. At the first one it is not
    /// known whether requests end: they do not if the page was not written for a second.
    pub fn judge(&mut self, now: &Snapshot) -> Delay {
        let all = now.all_kinds();
        let before = self.before.replace((now.read, all));
        let since = before.map(|(_, counts)| all.since(&counts)).filter(|since| since.count() > 0);
        if since.is_some() {
            self.ended = Some(now.read);
        }
        let ago = |at: u64| now.read.saturating_sub(at);
        let quiet = match (self.ended, before) {
            (Some(ended), _) => ago(ended),
            // None has ended since the first reading, or perhaps ever.
            (None, Some(_)) => u64::MAX,
            (None, None) if ago(now.updated) > SLOW => u64::MAX,
            (None, None) => 0,
        };
        if let Some(oldest) = now.in_flight.first() {
            let age = ago(oldest.taken);
            let patience = match oldest.kind {
                Kind::Read | Kind::Write => STUCK,
                Kind::Flush | Kind::Discard | Kind::WriteZeroes => STUCK_LONG,
            };
            let at_storage = oldest.stage() == Stage::Storage;
            if age > SLOW && at_storage {
                self.slow = Some(now.read);
            }
            if age > LEFT_BEHIND || age.min(quiet) > patience {
                return if at_storage { Delay::AtStorage } else { Delay::BeforeStorage };
            }
        }
        let mean = since.map(|since| float(since.sum(Stage::Storage)) / float(since.count()));
        if mean.is_some_and(|mean| mean > SLOW_MEAN) {
            self.slow = Some(now.read);
        }
        let is_slow = self.slow.is_some_and(|slow| ago(slow) < HELD);
        if is_slow { Delay::Slow } else { Delay::None }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A reading at a second, with a request in flight and some that have ended after spending so long at the storage.
    fn reading(second: u64, in_flight: Option<(Kind, u64, bool)>, ended: u64, storage_ns: u64) -> Snapshot {
        let file = tempfile::tempfile().unwrap();
        let mut page = crate::Page::begin(file.try_clone().unwrap(), crate::Source::Counter, "{}").unwrap();
        for _ in 0..ended {
            let slot = page.came(Kind::Read, 10, 0, 512);
            let spent = crate::Spent { seen: 10, taken: 10, begun: 10, ended: 10 + storage_ns, split: 0, queue: 0 };
            page.ended(Kind::Read, slot, 512, crate::Outcome::Done, &spent, 10 + storage_ns);
        }
        if let Some((kind, taken, at_storage)) = in_flight {
            let slot = page.came(kind, taken * SECOND + 1, 0, 512);
            if at_storage {
                page.submitted(slot, taken * SECOND + 1);
            }
        }
        page.publish_batch(10);
        let read = crate::Reader::of(file).unwrap().snapshot().unwrap();
        Snapshot { read: second * SECOND, updated: 0, ..read }
    }

    #[test]
    fn a_request_that_nothing_answers_is_stuck_where_it_is() {
        let mut delays = Delays::default();
        assert_eq!(delays.judge(&reading(10, Some((Kind::Read, 10, true)), 5, 1)), Delay::None);
        assert_eq!(delays.judge(&reading(12, Some((Kind::Read, 10, true)), 5, 1)), Delay::AtStorage);
        assert_eq!(delays.judge(&reading(13, Some((Kind::Read, 10, false)), 5, 1)), Delay::BeforeStorage);
        let mut first = Delays::default();
        assert_eq!(first.judge(&reading(12, Some((Kind::Write, 10, true)), 0, 1)), Delay::AtStorage);
    }

    #[test]
    fn an_old_request_is_slow_while_others_end_and_stuck_when_left_behind() {
        let mut delays = Delays::default();
        for second in 10..40 {
            let now = delays.judge(&reading(second, Some((Kind::Read, 10, true)), second, 1));
            let expected = if second < 12 { Delay::None } else { Delay::Slow };
            assert_eq!(now, expected, "{second}");
        }
        assert_eq!(delays.judge(&reading(41, Some((Kind::Read, 10, true)), 41, 1)), Delay::AtStorage);
    }

    #[test]
    fn a_flush_may_take_seconds() {
        let mut delays = Delays::default();
        delays.judge(&reading(10, None, 5, 1));
        assert_eq!(delays.judge(&reading(19, Some((Kind::Flush, 10, true)), 5, 1)), Delay::Slow);
        assert_eq!(delays.judge(&reading(22, Some((Kind::Flush, 10, true)), 5, 1)), Delay::AtStorage);
    }

    #[test]
    fn a_disk_stays_slow_for_five_seconds() {
        let mut delays = Delays::default();
        assert_eq!(delays.judge(&reading(10, None, 5, SECOND)), Delay::None);
        assert_eq!(delays.judge(&reading(11, None, 6, SECOND)), Delay::Slow);
        assert_eq!(delays.judge(&reading(15, None, 6, SECOND)), Delay::Slow);
        assert_eq!(delays.judge(&reading(16, None, 6, SECOND)), Delay::None);
    }
}
