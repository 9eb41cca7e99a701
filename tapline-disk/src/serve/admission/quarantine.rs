//! How a disk's process finds the request that killed the one before it: it handles requests one at a time for a while
//! ([`Quarantine`]; docs/decisions/0018).
//!
//! It knows no server, no clock, and of the disk only its leaf's redo log. Invariants: a request is condemned only when
//! one process died with it in flight and the next [`DEATHS_ALONE`] died working on it and nothing else; before a
//! suspect is retried nothing is accepted for a while, so that it is not in flight when a process is killed for other
//! reasons.

use disk::redo::{Mark, Suspect};
use disk::{RedoLog, Request};

/// Deaths that a request must be alone with. The one before them had others in flight too.
const DEATHS_ALONE: u64 = 2;

/// How long nothing is accepted before a suspect is retried, in nanoseconds. Longer than the lifetime of a process that
/// is repeatedly killed at its start; short compared with the second that a guest may have to wait.
const REST: u64 = 250_000_000;

/// Requests beyond those that were in flight: others may come in between where there are several queues or connections.
const MARGIN: u64 = 64;

/// Requests that the last process may have died of, which are handled one at a time.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// Requests that are still to be handled one at a time.
    left: u64,
    suspect: Option<Suspect>,
    /// Until when nothing is accepted.
    rests_until: Option<u64>,
    /// Requests that were answered with an error.
    fatal: u64,
}

impl Quarantine {
    /// The one after the death of the process that has left this log, if it has died. `fatal` requests were answered
    /// with an error before.
    pub fn after(log: Option<&RedoLog>, fatal: u64, now: u64) -> Quarantine {
        let none = Quarantine { fatal, ..Quarantine::default() };
        let Some(log) = log else { return none };
        let suspect = log.suspect();
        match log.left_in_flight() {
            0 => none,
            left => {
                let is_to_be_retried = suspect.is_some_and(|suspect| suspect.deaths < DEATHS_ALONE);
                let rests_until = is_to_be_retried.then_some(now.saturating_add(REST));
                Quarantine { left: left.saturating_add(MARGIN), suspect, rests_until, ..none }
            }
        }
    }

    /// Whether requests are to be handled one at a time.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.left > 0
    }

    /// How many processes have died of one request, as far as that is known.
    pub fn deaths(&self) -> Option<u64> {
        self.suspect.map(|suspect| suspect.deaths.saturating_add(1))
    }

    /// Until when nothing is accepted, if that is later than now.
    pub fn rests_until(&self, now: u64) -> Option<u64> {
        self.rests_until.filter(|until| self.is_on() && *until > now)
    }

    /// Accepts requests at once: there is no timer that would end the rest.
    pub fn end_rest(&mut self) {
        self.rests_until = None;
    }

    /// Whether this request is never to be begun again.
    pub fn condemns(&self, request: &Request) -> bool {
        let condemned = |suspect: Suspect| suspect.deaths >= DEATHS_ALONE && suspect.mark == Mark::of(request);
        self.is_on() && self.suspect.is_some_and(condemned)
    }

    /// A condemned request was answered with an error, and its answer can be seen: it is done with.
    pub fn failed(&mut self, log: Option<&RedoLog>) {
        self.fatal += 1;
        self.suspect = None;
        if let Some(log) = log {
            log.acquit();
        }
    }

    /// One more request is answered, in whatever way, and its answer can be seen.
    pub fn answered(&mut self, log: Option<&RedoLog>) {
        self.left = self.left.saturating_sub(1);
        let Some(log) = log else { return };
        log.note_answered();
        if self.left == 0 {
            self.suspect = None;
            log.acquit();
        }
    }

    /// Requests that the next process is to do one at a time, if this one dies.
    pub fn left(&self) -> u64 {
        self.left.saturating_sub(MARGIN)
    }

    /// Requests that were answered with an error since the disk would have died of them.
    pub fn fatal(&self) -> u64 {
        self.fatal
    }
}

#[cfg(test)]
mod test {
    use disk::redo::{HEADER_LEN, IDENTITY_LEN, Owner};
    use disk::{DiskOffset, Geometry, Operation, Span, Token};
    use memory::{Segments, Shared};

    use super::*;

    struct Bed(Shared);

    impl Bed {
        fn new() -> Bed {
            Bed(Shared::of_words((HEADER_LEN + 256) / 8))
        }

        fn log(&self) -> RedoLog {
            let owner = Owner { identity: [7; IDENTITY_LEN], stamps: Vec::new(), session: [1; 16] };
            RedoLog::open(self.0.clone(), &owner, &mut [0; 512].as_slice()).unwrap()
        }

        /// The next process.
        fn quarantine(&self) -> Quarantine {
            Quarantine::after(Some(&self.log()), 0, 0)
        }
    }

    fn mark(at: u64) -> Mark {
        with(at, Mark::of)
    }

    fn with<T>(at: u64, look: impl FnOnce(&Request) -> T) -> T {
        let geometry =
            Geometry { len: 1 << 20, block: 512, physical_block: 512, discard: 512, chs: None, read_only: false };
        let span = Span { at: DiskOffset(at), len: 512 };
        let request = Request::new(Operation::Read, span, Segments::zeroed(512), Token(1), &geometry).unwrap();
        let found = look(&request);
        request.retire();
        found
    }

    fn condemned(quarantine: &Quarantine, at: u64) -> bool {
        with(at, |request| quarantine.condemns(request))
    }

    #[test]
    fn the_third_death_in_a_row_condemns_the_request() {
        let bed = Bed::new();
        bed.log().note_in_flight(32);
        for deaths in 0..2 {
            let quarantine = bed.quarantine();
            assert_eq!(quarantine.deaths(), (deaths > 0).then_some(deaths + 1));
            assert!(quarantine.is_on() && !condemned(&quarantine, 512));
            bed.log().note_alone(mark(512));
            bed.log().note_at_work(true);
        }
        let mut quarantine = bed.quarantine();
        assert_eq!(quarantine.deaths(), Some(3));
        assert!(condemned(&quarantine, 512) && !condemned(&quarantine, 1024));
        quarantine.failed(Some(&bed.log()));
        assert_eq!((quarantine.fatal(), condemned(&quarantine, 512), bed.log().suspect()), (1, false, None));
    }

    #[test]
    fn a_process_that_ended_with_nothing_in_flight_left_no_suspects() {
        let bed = Bed::new();
        bed.log().note_alone(mark(512));
        bed.log().note_at_work(true);
        let quarantine = bed.quarantine();
        assert!(!quarantine.is_on() && !condemned(&quarantine, 512));
    }

    #[test]
    fn nothing_is_suspected_once_all_are_answered() {
        let bed = Bed::new();
        bed.log().note_in_flight(2);
        bed.log().note_alone(mark(512));
        bed.log().note_at_work(true);
        let mut quarantine = bed.quarantine();
        for left in (0..2 + MARGIN).rev() {
            assert!(quarantine.is_on());
            quarantine.answered(Some(&bed.log()));
            assert_eq!(quarantine.left(), left.saturating_sub(MARGIN));
        }
        assert!(!quarantine.is_on() && bed.log().suspect().is_none());
    }
}
