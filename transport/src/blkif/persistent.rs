//! Persistent grants: pages of a guest that stay mapped from one request to the next.
//!
//! It knows nothing about requests. Invariants: the number of mapped pages is bounded; they are accessed only here,
//! while copying, so that unmapping need not wait. A front end does not free a grant that is in use (io/blkif.h,
//! `feature-persistent`), so a reference refers to the same page as long as we have it mapped.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use disk::size::in_memory;
use memory::Buffer;
use xen::{DomId, GrantRef, Granted, Grants, PAGE, PageRange};

/// The maximum number of mapped pages: 32 MiB. Linux's front end uses 1056 for a ring of one page.
const PAGES_MAX: usize = 8192;

/// Mapped pages, by reference.
#[derive(Default)]
pub struct PersistentGrants {
    mapped: PageTable,
    /// The number of pages rejected since the limit was reached.
    rejected: usize,
    /// Scratch space for one call.
    new: Vec<GrantRef>,
}

/// A mapped page.
struct MappedPage {
    page: GrantRef,
    /// Its index among the pages mapped by the same call.
    index: u32,
    granted: Arc<Granted>,
}

/// A hash table of mapped pages: at most half full, with linear probing. Each range of each request is looked up, twice
/// for a read, and this costs half as much as a general map. Entries are only removed all at once.
struct PageTable {
    /// Empty, or a power of two.
    slots: Vec<Option<MappedPage>>,
    len: usize,
    /// The hash multiplier. It is odd, and unknown to the guest, which could otherwise choose references that share one
    /// slot.
    factor: u64,
}

impl Default for PageTable {
    fn default() -> PageTable {
        PageTable { slots: Vec::new(), len: 0, factor: RandomState::new().hash_one(0) | 1 }
    }
}

impl PageTable {
    #[inline]
    fn get(&self, page: GrantRef) -> Option<&MappedPage> {
        let last = self.slots.len().wrapping_sub(1);
        let mut slot = self.slot(page);
        loop {
            let entry = self.slots.get(slot & last)?.as_ref()?;
            if entry.page == page {
                return Some(entry);
            }
            slot = slot.wrapping_add(1);
        }
    }

    /// The first slot to probe for a reference, from the upper half of the product, which depends on every bit of the
    /// reference.
    #[inline]
    fn slot(&self, page: GrantRef) -> usize {
        in_memory(u64::from(page.0).wrapping_mul(self.factor) >> 32)
    }

    fn insert(&mut self, entry: MappedPage) {
        self.len += 1;
        if self.len * 2 > self.slots.len() {
            let slots = (self.len * 2).next_power_of_two().max(64);
            let before = std::mem::replace(&mut self.slots, std::iter::repeat_with(|| None).take(slots).collect());
            before.into_iter().flatten().for_each(|entry| self.put(entry));
        }
        self.put(entry);
    }

    fn put(&mut self, entry: MappedPage) {
        let last = self.slots.len().wrapping_sub(1);
        let mut slot = self.slot(entry.page);
        while self.slots.get(slot & last).is_some_and(Option::is_some) {
            slot = slot.wrapping_add(1);
        }
        if let Some(free) = self.slots.get_mut(slot & last) {
            *free = Some(entry);
        }
    }

    fn clear(&mut self) {
        (self.slots, self.len) = (Vec::new(), 0);
    }
}

impl PersistentGrants {
    /// Maps those pages that are not mapped yet, in one call; returns true if all are mapped now. Pages that cannot be
    /// mapped, or exceed the limit, are copied instead. When the number of rejected pages reaches the limit, the front
    /// end has changed to other pages: all are unmapped, and the table starts empty.
    pub fn map_pages(&mut self, grants: &mut dyn Grants, domain: DomId, pages: impl Iterator<Item = GrantRef>) -> bool {
        self.new.clear();
        self.new.extend(pages.filter(|&page| self.mapped.get(page).is_none()));
        if self.new.is_empty() {
            return true;
        }
        self.new.sort_unstable();
        self.new.dedup();
        if self.mapped.len + self.new.len() > PAGES_MAX {
            self.rejected += self.new.len();
            if self.rejected <= PAGES_MAX {
                return false;
            }
            self.rejected = 0;
            self.mapped.clear();
        }
        let Ok(granted) = grants.map(domain, &self.new, false) else { return false };
        for (index, &page) in (0..).zip(&self.new) {
            self.mapped.insert(MappedPage { page, index, granted: granted.clone() });
        }
        true
    }

    /// Returns true if every page is mapped.
    #[inline]
    pub fn contains_all(&self, ranges: &[PageRange]) -> bool {
        ranges.iter().all(|range| self.mapped.get(range.page).is_some())
    }

    /// Maps the missing pages of one request; returns true if all are mapped now. Mapping them before may have failed
    /// because of an invalid grant of another request, or they were unmapped for others.
    pub fn ensure_mapped(&mut self, grants: &mut dyn Grants, domain: DomId, ranges: &[PageRange]) -> bool {
        self.map_pages(grants, domain, ranges.iter().map(|range| range.page)) && self.contains_all(ranges)
    }

    /// Reads the beginning of a page into `into`. `None` if it is not mapped, or shorter.
    #[inline]
    pub fn read(&self, page: GrantRef, into: &mut [u8]) -> Option<()> {
        let entry = self.mapped.get(page)?;
        entry.granted.read(usize::try_from(entry.index).ok()?.checked_mul(PAGE)?, into)
    }

    /// Copies the ranges to our memory. `None` if one of their pages is not mapped.
    #[inline]
    pub fn copy_out(&self, ranges: &[PageRange], ours: (&Buffer, usize)) -> Option<()> {
        self.copy(ranges, ours, Granted::copy_out)
    }

    /// Copies our memory to the ranges. `None` if one of their pages is not mapped.
    #[inline]
    pub fn copy_in(&self, ranges: &[PageRange], ours: (&Buffer, usize)) -> Option<()> {
        self.copy(ranges, ours, Granted::copy_in)
    }

    #[inline]
    fn copy(
        &self,
        ranges: &[PageRange],
        (buffer, mut at): (&Buffer, usize),
        one: impl Fn(&Granted, usize, usize, &Buffer, usize) -> Option<()>,
    ) -> Option<()> {
        for range in ranges {
            let (entry, len) = (self.mapped.get(range.page)?, usize::from(range.len));
            let theirs = usize::try_from(entry.index).ok()?.checked_mul(PAGE)?.checked_add(usize::from(range.from))?;
            one(&entry.granted, theirs, len, buffer, at)?;
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
    fn entries_with_the_same_hash_are_found() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let page = guest.grant(guest.page().unwrap(), Access::ReadWrite);
        let granted = host.grants().map(DOMAIN, &[page], false).unwrap();
        // At random, and all in one slot.
        for factor in [PageTable::default().factor, 0] {
            let mut entries = PageTable { factor, ..PageTable::default() };
            let refs = || (0..300u32).map(|number| (number, GrantRef(number.wrapping_mul(0x0101_0101))));
            assert!(refs().all(|(_, page)| entries.get(page).is_none()));
            for (index, page) in refs() {
                entries.insert(MappedPage { page, index, granted: granted.clone() });
            }
            assert!(refs().all(|(index, page)| entries.get(page).is_some_and(|entry| entry.index == index)));
            assert!(entries.get(GrantRef(7)).is_none());
            entries.clear();
            assert!(refs().all(|(_, page)| entries.get(page).is_none()));
        }
    }

    #[test]
    fn mapped_pages_are_bounded_and_replaced_after_enough_rejections() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(PAGES_MAX + 1).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        guest.write(pages[0], 7, b"first").unwrap();
        let mut grants = host.grants();
        let mut kept = PersistentGrants::default();
        for part in refs.chunks(512) {
            kept.map_pages(&mut grants, DOMAIN, part.iter().copied());
            assert!(kept.mapped.len <= PAGES_MAX);
        }
        let buffer = Buffer::zeroed(5);
        let range = |page: GrantRef| [PageRange { page, from: 7, len: 5 }];
        let (first, last) = (range(refs[0]), range(refs[PAGES_MAX]));
        assert!(kept.contains_all(&first) && !kept.contains_all(&last), "mapped pages stay, and the last is rejected");
        // If only the last page is used, it is mapped eventually; then the first one can be mapped again.
        let is_mapped_eventually =
            |kept: &mut PersistentGrants, grants: &mut xen::fake::GrantTable, ranges: &[PageRange]| {
                (0..=PAGES_MAX).any(|_| kept.ensure_mapped(grants, DOMAIN, ranges))
            };
        assert!(!kept.ensure_mapped(&mut grants, DOMAIN, &last) && is_mapped_eventually(&mut kept, &mut grants, &last));
        assert!(!kept.contains_all(&first) && kept.copy_out(&first, (&buffer, 0)).is_none());
        assert!(kept.ensure_mapped(&mut grants, DOMAIN, &first));
        kept.copy_out(&first, (&buffer, 0)).unwrap();
        assert_eq!(buffer.segments(5).to_vec(), b"first");
        drop(kept);
        assert_eq!(host.counts().mapped, 0);
    }

    #[test]
    fn mapped_pages_are_bounded_if_a_bad_grant_prevents_batch_mapping() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(PAGES_MAX + 1024).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        let (mut grants, mut kept) = (host.grants(), PersistentGrants::default());
        for part in refs.chunks(256) {
            let bad = part.iter().copied().chain([GrantRef(u32::MAX)]);
            assert!(!kept.map_pages(&mut grants, DOMAIN, bad));
            let ranges: Vec<PageRange> = part.iter().map(|&page| PageRange { page, from: 0, len: 512 }).collect();
            let mapped = kept.ensure_mapped(&mut grants, DOMAIN, &ranges);
            assert_eq!(mapped, kept.contains_all(&ranges));
            assert!(mapped || kept.mapped.len + part.len() > PAGES_MAX, "mapping failed below the limit");
            assert!(kept.mapped.len <= PAGES_MAX);
        }
    }

    #[test]
    fn ranges_are_copied_in_the_order_of_the_request() {
        let host = Host::new().unwrap();
        let guest = host.guest(DOMAIN);
        let pages = guest.pages(2).unwrap();
        let refs: Vec<GrantRef> = pages.iter().map(|&page| guest.grant(page, Access::ReadWrite)).collect();
        let ranges = [PageRange { page: refs[1], from: 4094, len: 2 }, PageRange { page: refs[0], from: 0, len: 3 }];
        let (mut grants, mut kept) = (host.grants(), PersistentGrants::default());
        let (buffer, at) = (Buffer::zeroed(4096), 4000);
        buffer.range(at, 5).copy_from(b"hello");
        assert!(kept.ensure_mapped(&mut grants, DOMAIN, &ranges));
        kept.copy_in(&ranges, (&buffer, at)).unwrap();
        buffer.range(at, 5).fill_zero();
        kept.copy_out(&ranges, (&buffer, at)).unwrap();
        assert_eq!(buffer.range(at, 5).to_vec(), b"hello");
        let mut bytes = [0; 3];
        assert_eq!((kept.read(refs[0], &mut bytes), &bytes), (Some(()), b"llo"), "the page begins with this");
        assert_eq!(kept.read(refs[0], &mut [0; PAGE * 3]), None, "longer than the mapping");
        assert_eq!(kept.read(GrantRef(u32::MAX), &mut bytes), None);
        let bad = PageRange { page: GrantRef(u32::MAX), from: 0, len: 1 };
        assert!(!kept.ensure_mapped(&mut grants, DOMAIN, &[ranges[0], bad]) && !kept.contains_all(&[ranges[0], bad]));
        assert!(kept.copy_in(&[bad], (&buffer, at)).is_none());
    }
}
