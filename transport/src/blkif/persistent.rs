//! Pages of a guest that stay mapped from one request to the next.
//!
//! Knows nothing of requests. Invariants: the pages that are kept are bounded; none is touched by anyone but us, while
//! we copy, so that giving one up waits for nobody. A front end that sees a grant still in use does not free it
//! (io/blkif.h, `feature-persistent`), so a reference means the same page for as long as we have it mapped.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use memory::Buffer;
use xen::{DomId, GrantRef, Granted, Grants, PAGE, Piece};

/// Pages that are kept: 32 MiB. Linux's front end keeps 1056 for a ring of one page.
const PAGES_MAX: usize = 8192;

/// Mapped pages, by reference.
#[derive(Default)]
pub struct Pages {
    mapped: Places,
    /// Pages that had no place since there is none left.
    crowded: usize,
    /// Of one call, kept for its room.
    new: Vec<GrantRef>,
}

/// Where a page lies.
struct Place {
    page: GrantRef,
    /// Which of those that were mapped together.
    index: u32,
    granted: Arc<Granted>,
}

/// Places by reference: a table at most half full, where each is in the first slot that was free from the one on that
/// its reference names. Each piece of each request is looked up, twice if it is read, and this is half of what a
/// general map costs. None is taken out but with all others.
struct Places {
    /// A power of two, once there are any.
    slots: Vec<Option<Place>>,
    len: usize,
    /// References are multiplied with this. It is odd, and the guest does not know it: it could choose references that
    /// name the same slot.
    factor: u64,
}

impl Default for Places {
    fn default() -> Places {
        Places { slots: Vec::new(), len: 0, factor: RandomState::new().hash_one(0) | 1 }
    }
}

impl Places {
    #[inline]
    fn get(&self, page: GrantRef) -> Option<&Place> {
        let last = self.slots.len().wrapping_sub(1);
        let mut slot = self.slot(page);
        loop {
            let place = self.slots.get(slot & last)?.as_ref()?;
            if place.page == page {
                return Some(place);
            }
            slot = slot.wrapping_add(1);
        }
    }

    /// The slot that a reference names, by its lower bits. They are the upper half of a product, which every bit of the
    /// reference has a part in.
    #[inline]
    fn slot(&self, page: GrantRef) -> usize {
        usize::try_from(u64::from(page.0).wrapping_mul(self.factor) >> 32).unwrap_or(0)
    }

    fn insert(&mut self, place: Place) {
        self.len = self.len.saturating_add(1);
        if self.len.saturating_mul(2) > self.slots.len() {
            let slots = self.len.saturating_mul(2).next_power_of_two().max(64);
            let before = std::mem::replace(&mut self.slots, std::iter::repeat_with(|| None).take(slots).collect());
            before.into_iter().flatten().for_each(|place| self.put(place));
        }
        self.put(place);
    }

    fn put(&mut self, place: Place) {
        let last = self.slots.len().wrapping_sub(1);
        let mut slot = self.slot(place.page);
        while self.slots.get(slot & last).is_some_and(Option::is_some) {
            slot = slot.wrapping_add(1);
        }
        if let Some(free) = self.slots.get_mut(slot & last) {
            *free = Some(place);
        }
    }

    fn clear(&mut self) {
        (self.slots, self.len) = (Vec::new(), 0);
    }
}

impl Pages {
    /// Maps those pages that are not yet mapped, in one call; whether all are mapped now. What cannot be mapped, or has
    /// no place, is left to the copies. A front end that has so long asked for pages without place that all places
    /// could have been filled anew has other pages in use by now: all are given up, and it begins anew.
    pub fn bring(&mut self, grants: &mut dyn Grants, domain: DomId, pages: impl Iterator<Item = GrantRef>) -> bool {
        self.new.clear();
        self.new.extend(pages.filter(|&page| self.mapped.get(page).is_none()));
        if self.new.is_empty() {
            return true;
        }
        self.new.sort_unstable();
        self.new.dedup();
        if self.mapped.len.saturating_add(self.new.len()) > PAGES_MAX {
            self.crowded = self.crowded.saturating_add(self.new.len());
            if self.crowded <= PAGES_MAX {
                return false;
            }
            self.crowded = 0;
            self.mapped.clear();
        }
        let Ok(granted) = grants.map(domain, &self.new, false) else { return false };
        for (index, &page) in (0..).zip(&self.new) {
            self.mapped.insert(Place { page, index, granted: granted.clone() });
        }
        true
    }

    /// Whether every page is mapped.
    #[inline]
    pub fn have(&self, pieces: &[Piece]) -> bool {
        pieces.iter().all(|piece| self.mapped.get(piece.page).is_some())
    }

    /// Maps what is not mapped of these pages, those of one request; whether all are then. A bad grant of another
    /// request may have kept them from being mapped, or they were given up for others.
    pub fn get(&mut self, grants: &mut dyn Grants, domain: DomId, pieces: &[Piece]) -> bool {
        self.bring(grants, domain, pieces.iter().map(|piece| piece.page)) && self.have(pieces)
    }

    /// Copies the pieces to memory of ours. `None` if one of their pages is not mapped.
    #[inline]
    pub fn copy_out(&self, pieces: &[Piece], ours: (&Buffer, usize)) -> Option<()> {
        self.copy(pieces, ours, Granted::copy_out)
    }

    /// Copies memory of ours to the pieces. `None` if one of their pages is not mapped.
    #[inline]
    pub fn copy_in(&self, pieces: &[Piece], ours: (&Buffer, usize)) -> Option<()> {
        self.copy(pieces, ours, Granted::copy_in)
    }

    #[inline]
    fn copy(
        &self,
        pieces: &[Piece],
        (buffer, mut at): (&Buffer, usize),
        one: impl Fn(&Granted, usize, usize, &Buffer, usize) -> Option<()>,
    ) -> Option<()> {
        for piece in pieces {
            let (place, len) = (self.mapped.get(piece.page)?, usize::from(piece.len));
            let theirs = usize::try_from(place.index).ok()?.checked_mul(PAGE)?.checked_add(usize::from(piece.from))?;
            one(&place.granted, theirs, len, buffer, at)?;
            at = at.checked_add(len)?;
        }
        Some(())
    }
}

#[cfg(test)]
mod test {
    use xen::fake::{Access, Host};

    use super::*;

    const DOMAIN: DomId = DomId(3);

    #[test]
    fn places_are_found_wherever_their_references_are_put() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let page = guest.grant(guest.page().unwrap(), Access::ReadWrite);
        let granted = host.grants().map(DOMAIN, &[page], false).unwrap();
        // At random, and all in one slot.
        for factor in [Places::default().factor, 0] {
            let mut places = Places { factor, ..Places::default() };
            let refs = || (0..300u32).map(|number| (number, GrantRef(number.wrapping_mul(0x0101_0101))));
            assert!(refs().all(|(_, page)| places.get(page).is_none()));
            for (index, page) in refs() {
                places.insert(Place { page, index, granted: granted.clone() });
            }
            assert!(refs().all(|(index, page)| places.get(page).is_some_and(|place| place.index == index)));
            assert!(places.get(GrantRef(7)).is_none());
            places.clear();
            assert!(refs().all(|(_, page)| places.get(page).is_none()));
        }
    }

    #[test]
    fn pages_are_bounded_and_the_places_are_given_to_others_when_those_have_waited_long_enough() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(PAGES_MAX + 1).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        guest.write(pages[0], 7, b"first").unwrap();
        let mut grants = host.grants();
        let mut kept = Pages::default();
        for part in refs.chunks(512) {
            kept.bring(&mut grants, DOMAIN, part.iter().copied());
            assert!(kept.mapped.len <= PAGES_MAX);
        }
        let buffer = Buffer::zeroed(5);
        let piece = |page: GrantRef| [Piece { page, from: 7, len: 5 }];
        let (first, last) = (piece(refs[0]), piece(refs[PAGES_MAX]));
        assert!(kept.have(&first) && !kept.have(&last), "what is there stays, and the last has no place");
        // One that uses that alone gets it at last, and the first again after it.
        let got = |kept: &mut Pages, grants: &mut xen::fake::GrantTable, pieces: &[Piece]| {
            (0..=PAGES_MAX).any(|_| kept.get(grants, DOMAIN, pieces))
        };
        assert!(!kept.get(&mut grants, DOMAIN, &last) && got(&mut kept, &mut grants, &last));
        assert!(!kept.have(&first) && kept.copy_out(&first, (&buffer, 0)).is_none());
        assert!(kept.get(&mut grants, DOMAIN, &first));
        kept.copy_out(&first, (&buffer, 0)).unwrap();
        assert_eq!(buffer.segments(5).to_vec(), b"first");
        drop(kept);
        assert_eq!(host.counts().mapped, 0);
    }

    #[test]
    fn pages_are_bounded_where_a_bad_grant_keeps_them_from_being_mapped_together() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(PAGES_MAX + 1024).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        let (mut grants, mut kept) = (host.grants(), Pages::default());
        for part in refs.chunks(256) {
            let bad = part.iter().copied().chain([GrantRef(u32::MAX)]);
            assert!(!kept.bring(&mut grants, DOMAIN, bad));
            let pieces: Vec<Piece> = part.iter().map(|&page| Piece { page, from: 0, len: 512 }).collect();
            let got = kept.get(&mut grants, DOMAIN, &pieces);
            assert_eq!(got, kept.have(&pieces));
            assert!(got || kept.mapped.len + part.len() > PAGES_MAX, "there is a place");
            assert!(kept.mapped.len <= PAGES_MAX);
        }
    }

    #[test]
    fn pieces_and_memory_are_one_in_the_order_of_the_request() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(2).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        let pieces = [Piece { page: refs[1], from: 4094, len: 2 }, Piece { page: refs[0], from: 0, len: 3 }];
        let (mut grants, mut kept) = (host.grants(), Pages::default());
        let (buffer, at) = (Buffer::zeroed(4096), 4000);
        buffer.range(at, 5).copy_from(b"hello");
        assert!(kept.get(&mut grants, DOMAIN, &pieces));
        kept.copy_in(&pieces, (&buffer, at)).unwrap();
        buffer.range(at, 5).fill_zero();
        kept.copy_out(&pieces, (&buffer, at)).unwrap();
        assert_eq!(buffer.range(at, 5).to_vec(), b"hello");
        let bad = Piece { page: GrantRef(u32::MAX), from: 0, len: 1 };
        assert!(!kept.get(&mut grants, DOMAIN, &[pieces[0], bad]) && !kept.have(&[pieces[0], bad]));
        assert!(kept.copy_in(&[bad], (&buffer, at)).is_none());
    }
}
