//! The state of a process at its death: the number of its requests in flight, and the one on which alone it was
//! working.
//!
//! Knows nothing about what is done with that. It lies in the header of the leaf's redo log ([`super`]), behind what
//! the log itself needs there, since a log outlives its process and belongs to one image. Keeps: a death that is half
//! noted when the next one comes is not counted, rather than counted twice.

use super::RedoLog;
use crate::{Operation, Request};

/// Offset of the least number of requests that the process has in flight.
const IN_FLIGHT_AT: usize = 128;
/// Offset of the state of the request that is processed alone.
const STAGE_AT: usize = 136;
/// Offset of the mark of that request.
const ALONE_AT: usize = 144;
/// Offsets of the mark of the suspect, a request on which processes died in succession, and of the number of deaths.
const SUSPECT_AT: usize = 168;
const DEATHS_AT: usize = 192;
/// Words in all, from [`IN_FLIGHT_AT`] on.
const WORDS: usize = 9;
/// Where all of it stands.
pub const IN_FLIGHT: std::ops::Range<usize> = IN_FLIGHT_AT..IN_FLIGHT_AT + WORDS * 8;

/// Of [`STAGE_AT`]: nothing is done alone; one is, and waits for storage; the process is at work on it.
const NOTHING: u64 = 0;
const WAITS: u64 = 1;
const AT_WORK: u64 = 2;

/// Kind and range of a request, by which the next process recognizes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    kind: u64,
    at: u64,
    len: u64,
}

/// A request at which processes have died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Suspect {
    /// Which it is.
    pub mark: Mark,
    /// The number of processes that died in succession while they worked on this request and on nothing else.
    pub deaths: u64,
}

impl Mark {
    /// That of a request.
    pub fn of(request: &Request) -> Mark {
        let kind = match request.operation() {
            Operation::Read => 1,
            Operation::Write { .. } | Operation::Patch { .. } => 2,
            Operation::Flush => 3,
            Operation::Discard => 4,
            Operation::WriteZeroes { .. } => 5,
            Operation::Extents { .. } => 6,
        };
        Mark { kind, at: request.span().at.0, len: request.span().len }
    }
}

impl RedoLog {
    /// Requests that the process before us had in flight when it died; zero if it ended well.
    pub fn left_in_flight(&self) -> u64 {
        self.word(IN_FLIGHT_AT)
    }

    /// Notes the least number of requests in flight. To be called before they are begun.
    pub fn note_in_flight(&self, count: u64) {
        self.store(IN_FLIGHT_AT, count);
    }

    /// A request is about to be begun while nothing else is being done.
    pub fn note_alone(&self, mark: Mark) {
        self.store_mark(ALONE_AT, mark);
        self.store(STAGE_AT, WAITS);
    }

    /// The process is at work on the request that is done alone, or is not: what ends it then has nothing to do with
    /// it.
    pub fn note_at_work(&self, at_work: bool) {
        if self.word(STAGE_AT) != NOTHING {
            self.store(STAGE_AT, if at_work { AT_WORK } else { WAITS });
        }
    }

    /// The request that was done alone is answered. If it was a suspect, it is cleared.
    pub fn note_answered(&self) {
        if self.word(STAGE_AT) == NOTHING {
            return;
        }
        self.store(STAGE_AT, NOTHING);
        if self.mark(ALONE_AT) == self.mark(SUSPECT_AT) {
            self.acquit();
        }
    }

    /// Nothing is suspected any more.
    pub fn acquit(&self) {
        self.store(DEATHS_AT, 0);
    }

    /// Counts the death of the process before us, if it died at work on a single request; which request is suspected
    /// now.
    pub fn suspect(&self) -> Option<Suspect> {
        let stage = self.word(STAGE_AT);
        self.store(STAGE_AT, NOTHING);
        if stage == AT_WORK {
            let mark = self.mark(ALONE_AT);
            let before = if mark == self.mark(SUSPECT_AT) { self.word(DEATHS_AT) } else { 0 };
            // Zero until the mark is written: a death that is half recorded is not counted.
            self.store(DEATHS_AT, 0);
            self.store_mark(SUSPECT_AT, mark);
            self.store(DEATHS_AT, before.saturating_add(1));
        }
        let deaths = self.word(DEATHS_AT);
        (deaths > 0).then(|| Suspect { mark: self.mark(SUSPECT_AT), deaths })
    }

    /// An empty log says nothing of any process.
    pub(super) fn forget_deaths(&self) {
        (0..WORDS).for_each(|word| self.store(IN_FLIGHT_AT + word * 8, 0));
    }

    fn mark(&self, at: usize) -> Mark {
        let word = |index: usize| self.word(at + index * 8);
        Mark { kind: word(0), at: word(1), len: word(2) }
    }

    fn store_mark(&self, at: usize, mark: Mark) {
        for (index, word) in [mark.kind, mark.at, mark.len].into_iter().enumerate() {
            self.store(at + index * 8, word);
        }
    }
}

#[cfg(test)]
mod test {
    use memory::Shared;

    use super::super::{HEADER_LEN, IDENTITY_LEN, Owner};
    use super::*;

    const A: Mark = Mark { kind: 2, at: 4096, len: 512 };
    const B: Mark = Mark { kind: 1, ..A };

    struct Bed(Shared);

    impl Bed {
        fn new() -> Bed {
            Bed(Shared::of_words((HEADER_LEN + 256) / 8))
        }

        /// The next process.
        fn open(&self) -> RedoLog {
            self.open_as([7; IDENTITY_LEN])
        }

        fn open_as(&self, identity: [u8; IDENTITY_LEN]) -> RedoLog {
            let owner = Owner { identity, stamps: Vec::new(), session: [1; 16] };
            RedoLog::open(self.0.clone(), &owner, &mut [0; 512].as_slice()).unwrap()
        }

        /// A process dies at work on this one.
        fn die_at(&self, mark: Mark) -> Option<Suspect> {
            let log = self.open();
            log.note_alone(mark);
            log.note_at_work(true);
            self.open().suspect()
        }
    }

    #[test]
    fn deaths_at_one_request_in_a_row_are_counted() {
        let bed = Bed::new();
        assert_eq!(bed.open().suspect(), None);
        assert_eq!(bed.die_at(A), Some(Suspect { mark: A, deaths: 1 }));
        assert_eq!(bed.open().suspect(), Some(Suspect { mark: A, deaths: 1 }), "a process that did not come to it");
        assert_eq!(bed.die_at(A), Some(Suspect { mark: A, deaths: 2 }));
        assert_eq!(bed.die_at(B), Some(Suspect { mark: B, deaths: 1 }), "another one");
    }

    #[test]
    fn who_dies_while_the_storage_is_at_work_did_not_die_of_the_request() {
        let bed = Bed::new();
        let log = bed.open();
        log.note_alone(A);
        log.note_at_work(true);
        log.note_at_work(false);
        assert_eq!(bed.open().suspect(), None);
    }

    #[test]
    fn an_answer_acquits() {
        let bed = Bed::new();
        bed.die_at(A);
        let log = bed.open();
        // Another one first, which proves nothing.
        log.note_alone(B);
        log.note_answered();
        assert_eq!(bed.open().suspect(), Some(Suspect { mark: A, deaths: 1 }));
        log.note_alone(A);
        log.note_answered();
        log.note_at_work(true);
        assert_eq!(bed.open().suspect(), None);
    }

    #[test]
    fn the_log_of_another_image_says_nothing() {
        let bed = Bed::new();
        bed.die_at(A);
        bed.open().note_in_flight(3);
        assert_eq!(bed.open().left_in_flight(), 3);
        let log = bed.open_as([8; IDENTITY_LEN]);
        assert_eq!((log.suspect(), log.left_in_flight()), (None, 0));
    }
}
