//! Finds the request that killed the previous process of the disk: requests are started one at a time for a while
//! ([`Quarantine`]; docs/decisions/0018).
//!
//! It knows no server, no clock, and of the disk only its leaf's redo log. Invariants: a request is condemned only when
//! one process has died with it in flight and the next [`DEATHS_ALONE`] have died working on nothing else; before a
//! suspect is retried nothing is accepted for a while, so that it is not in flight when a process is killed for other
//! reasons.

use disk::redo::{Mark, Suspect};
use disk::{RedoLog, Request};

/// The number of deaths with the request alone in flight. In the death before them others were in flight too: three
/// processes die, and the fourth fails the request.
const DEATHS_ALONE: u64 = 2;

/// The pause in nanoseconds before a suspect is retried. Longer than the lifetime of a process that is repeatedly
/// killed at its start; short compared with the second that a guest may have to wait.
const REST: u64 = 250_000_000;

/// Extra requests in quarantine: with several queues or connections, others may come before those that were in flight.
const MARGIN: u64 = 64;

/// The quarantine of requests that may have killed the last process.
#[derive(Debug, Default)]
pub struct Quarantine {
    /// The number of requests that must still be started one at a time.
    left: u64,
    suspect: Option<Suspect>,
    /// When the pause ends.
    rests_until: Option<u64>,
    /// The number of requests completed with an error because they were condemned.
    fatal: u64,
}

impl Quarantine {
    /// Begins a quarantine if the process that has left this log has died. `fatal`: the number of requests condemned
    /// before.
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

    /// Returns whether requests are started one at a time.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.left > 0
    }

    /// Returns how many processes have been killed by one request, as far as is known.
    pub fn deaths(&self) -> Option<u64> {
        self.suspect.map(|suspect| suspect.deaths.saturating_add(1))
    }

    /// Returns when the pause ends, if that is later than now.
    pub fn rests_until(&self, now: u64) -> Option<u64> {
        self.rests_until.filter(|until| self.is_on() && *until > now)
    }

    /// Ends the pause: there is no timer to do it.
    pub fn end_rest(&mut self) {
        self.rests_until = None;
    }

    /// Returns whether this request must never be started again.
    pub fn condemns(&self, request: &Request) -> bool {
        let condemned = |suspect: Suspect| suspect.deaths >= DEATHS_ALONE && suspect.mark == Mark::of(request);
        self.is_on() && self.suspect.is_some_and(condemned)
    }

    /// Called when the error of a condemned request is visible to its peer.
    pub fn failed(&mut self, log: Option<&RedoLog>) {
        self.fatal += 1;
        self.suspect = None;
        if let Some(log) = log {
            log.acquit();
        }
    }

    /// Called for each request whose completion is visible to its peer.
    pub fn answered(&mut self, log: Option<&RedoLog>) {
        self.left = self.left.saturating_sub(1);
        let Some(log) = log else { return };
        log.note_answered();
        if self.left == 0 {
            self.suspect = None;
            log.acquit();
        }
    }

    /// Returns how many requests the next process must start one at a time, if this one dies.
    pub fn left(&self) -> u64 {
        self.left.saturating_sub(MARGIN)
    }

    /// Returns the number of condemned requests.
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

        /// The quarantine of the next process.
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
