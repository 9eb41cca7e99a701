//! Which files can be worked on without blocking: learned from what the kernel refuses.
//!
//! A transfer is first offered to the kernel on the condition that it does not block (RWF_NOWAIT). Some storage never
//! can (tmpfs), some not now (a write that allocates). After refusals the offer is left out for a while, which
//! doubles from one refusal to the next up to 63 transfers; one that was accepted ends it.
//!
//! It is a matter of cost only: whether to offer is never wrong.

use disk::FileId;

use crate::file_table::FILES_MAX;

/// A file, and whether it is written.
pub(crate) type Transfer = (FileId, bool);

/// The most transfers that go by without an offer.
const SKIP_MAX: u8 = 63;

/// What was learned of transfers of one direction on one file.
#[derive(Clone, Copy, Default)]
struct Learned {
    /// How many go by after a refusal.
    skip: u8,
    /// How many of these are left.
    left: u8,
}

/// Reads and writes of a file.
#[derive(Clone, Copy, Default)]
struct Place {
    reads: Learned,
    writes: Learned,
}

/// What was learned of all files of an engine.
pub(crate) struct Nowait {
    places: Box<[Place; FILES_MAX]>,
    has_learned: bool,
}

impl Nowait {
    pub(crate) fn new() -> Nowait {
        Nowait { places: Box::new([Place::default(); FILES_MAX]), has_learned: false }
    }

    /// Whether anything was ever refused. Most often not, and then there is nothing to ask or to tell.
    #[inline]
    pub(crate) fn has_learned(&self) -> bool {
        self.has_learned
    }

    /// Whether to offer a transfer to the kernel.
    pub(crate) fn offers(&mut self, (file, write): Transfer) -> bool {
        let Some(learned) = self.learned((file, write)) else { return true };
        let offers = learned.left == 0;
        learned.left = learned.left.saturating_sub(1);
        offers
    }

    /// The kernel would have had to block. A read that was refused for now has begun what it would wait for (the page
    /// cache reads ahead), so that the offer was worth it: nothing is learned.
    pub(crate) fn refused(&mut self, (file, write): Transfer, errno: i32) {
        if !write && errno == libc::EAGAIN {
            return;
        }
        self.has_learned = true;
        let Some(learned) = self.learned((file, write)) else { return };
        // Those that were offered together are refused together, which says no more than one of them.
        if learned.left == 0 {
            learned.skip = learned.skip.saturating_mul(2).saturating_add(1).min(SKIP_MAX);
            learned.left = learned.skip;
        }
    }

    /// The kernel has taken a transfer.
    pub(crate) fn accepted(&mut self, transfer: Transfer) {
        if let Some(learned) = self.learned(transfer) {
            *learned = Learned::default();
        }
    }

    /// Another file has this number.
    pub(crate) fn forget(&mut self, file: FileId) {
        if let Some(place) = self.places.get_mut(usize::from(file.0)) {
            *place = Place::default();
        }
    }

    fn learned(&mut self, (file, write): Transfer) -> Option<&mut Learned> {
        let place = self.places.get_mut(usize::from(file.0))?;
        Some(if write { &mut place.writes } else { &mut place.reads })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const FILE: FileId = FileId(3);

    /// How many transfers go by until the next is offered.
    fn skipped(nowait: &mut Nowait, write: bool) -> usize {
        (0..).find(|_| nowait.offers((FILE, write))).unwrap()
    }

    #[test]
    fn what_is_always_refused_is_offered_ever_less_but_never_not_at_all() {
        let mut nowait = Nowait::new();
        let seen: Vec<usize> = (0..9)
            .map(|_| {
                nowait.refused((FILE, true), libc::EAGAIN);
                skipped(&mut nowait, true)
            })
            .collect();
        assert_eq!(seen, [1, 3, 7, 15, 31, 63, 63, 63, 63]);
        assert_eq!(skipped(&mut nowait, false), 0);
        assert!(nowait.offers((FileId(4), true)));
    }

    #[test]
    fn refusals_of_what_was_offered_together_count_once() {
        let mut nowait = Nowait::new();
        for _ in 0..32 {
            nowait.refused((FILE, true), libc::EAGAIN);
        }
        assert_eq!(skipped(&mut nowait, true), 1);
    }

    #[test]
    fn one_that_is_accepted_ends_the_pause() {
        let mut nowait = Nowait::new();
        nowait.refused((FILE, true), libc::EOPNOTSUPP);
        nowait.accepted((FILE, true));
        assert_eq!(skipped(&mut nowait, true), 0);
    }

    #[test]
    fn a_read_that_waits_for_the_page_cache_is_offered_again() {
        let mut nowait = Nowait::new();
        nowait.refused((FILE, false), libc::EAGAIN);
        assert_eq!(skipped(&mut nowait, false), 0);
        nowait.refused((FILE, false), libc::EOPNOTSUPP);
        assert_eq!(skipped(&mut nowait, false), 1);
    }

    #[test]
    fn a_new_file_begins_anew() {
        let mut nowait = Nowait::new();
        nowait.refused((FILE, true), libc::EAGAIN);
        nowait.forget(FILE);
        assert_eq!(skipped(&mut nowait, true), 0);
    }
}
