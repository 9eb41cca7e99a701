//! Guest memory: the regions a peer shares with us, and the ranges of it that a request names.
//!
//! Every address here comes from a hostile peer. A range is looked up once, checked against the regions, and
//! becomes [`Segments`] (for data) or [`Shared`] (for a ring); what does not lie in the regions is `None`.

use std::sync::Arc;

use crate::segments::PartList;
use crate::{Mapping, Segments, Shared};

/// An address in the guest's physical address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestAddr(pub u64);

/// One contiguous range of guest memory.
pub struct Region {
    /// Where the guest sees it.
    pub guest: GuestAddr,
    /// Where the peer that talks to us sees it (vhost-user names rings by these addresses).
    pub peer: u64,
    /// Bytes of guest memory in it.
    pub len: u64,
    /// Offset of the region's first byte in `mapping`.
    pub offset: u64,
    /// Where we see it.
    pub mapping: Arc<Mapping>,
}

impl Region {
    /// Whether the region's bytes lie in its mapping and neither address range wraps around.
    fn is_sound(&self) -> bool {
        let fits = self
            .offset
            .checked_add(self.len)
            .is_some_and(|end| usize::try_from(end).is_ok_and(|end| end <= self.mapping.len()));
        fits && self.len > 0
            && self.guest.0.checked_add(self.len).is_some()
            && self.peer.checked_add(self.len).is_some()
    }

    /// Our address of byte `at` of the region, and how many bytes follow it.
    fn host(&self, at: u64) -> Option<(*mut u8, usize)> {
        if at >= self.len {
            return None;
        }
        let offset = usize::try_from(self.offset.checked_add(at)?).ok()?;
        Some((self.mapping.base().wrapping_add(offset), usize::try_from(self.len - at).ok()?))
    }
}

/// All regions of one guest at one time. Immutable: a changed memory table is a new value, and requests in
/// flight keep the old one mapped.
#[derive(Default)]
pub struct GuestMemory {
    regions: Vec<Region>,
}

impl GuestMemory {
    /// A table of `regions`; `None` if one of them lies outside its mapping or overlaps another in the guest.
    pub fn new(mut regions: Vec<Region>) -> Option<GuestMemory> {
        regions.sort_by_key(|region| region.guest);
        let sound = regions.iter().all(Region::is_sound);
        let apart = regions.windows(2).all(|pair| match pair {
            [low, high] => low.guest.0.checked_add(low.len).is_some_and(|end| end <= high.guest.0),
            _ => true,
        });
        (sound && apart).then_some(GuestMemory { regions })
    }

    /// The regions, by guest address.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The guest address of `peer`, an address of the process that talks to us.
    pub fn guest_addr(&self, peer: u64) -> Option<GuestAddr> {
        self.regions.iter().find_map(|region| {
            let at = peer.checked_sub(region.peer).filter(|&at| at < region.len)?;
            region.guest.0.checked_add(at).map(GuestAddr)
        })
    }

    /// The guest address of an address of this process, which [`GuestMemory::segments`] has given.
    pub(crate) fn addr_of(&self, host: *mut u8) -> Option<GuestAddr> {
        self.regions.iter().find_map(|region| {
            let (base, _) = region.host(0)?;
            let at = host.addr().checked_sub(base.addr()).and_then(|at| u64::try_from(at).ok())?;
            region.guest.0.checked_add(at).filter(|_| at < region.len).map(GuestAddr)
        })
    }

    fn host(&self, addr: GuestAddr) -> Option<(*mut u8, usize)> {
        // Few regions (a dozen at most in practice), most requests in the largest: a scan beats a search.
        self.regions.iter().find_map(|region| region.host(addr.0.checked_sub(region.guest.0)?))
    }

    /// The memory of `ranges`, in order. Ranges may cross from one region into the next. `None` if a byte of
    /// them is not guest memory.
    pub fn segments(self: &Arc<Self>, ranges: impl IntoIterator<Item = (GuestAddr, u32)>) -> Option<Segments> {
        let mut parts = PartList::default();
        for (addr, len) in ranges {
            let mut at = addr;
            let mut left = usize::try_from(len).ok()?;
            while left > 0 {
                let (base, len) = self.host(at)?;
                let take = left.min(len);
                parts.push(base, take)?;
                left = left.checked_sub(take)?;
                at = GuestAddr(at.0.checked_add(u64::try_from(take).ok()?)?);
            }
        }
        // SAFETY: each part was checked by `Region::host` to lie in a mapping that `self` holds.
        Some(unsafe { Segments::of_list(self.clone(), parts) })
    }

    /// A range that lies in one region, for a ring. `None` if it does not.
    pub fn shared(self: &Arc<Self>, addr: GuestAddr, len: usize) -> Option<Shared> {
        let (base, left) = self.host(addr)?;
        // SAFETY: the range was checked by `Region::host` to lie in a mapping that `self` holds.
        (len <= left).then(|| unsafe { Shared::new(self.clone(), base, len) })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn two_regions() -> Arc<GuestMemory> {
        let region = |guest, peer| Region {
            guest: GuestAddr(guest),
            peer,
            len: 4096,
            offset: 0,
            mapping: Arc::new(Mapping::anonymous(4096).unwrap()),
        };
        Arc::new(GuestMemory::new(vec![region(8192, 0x20000), region(4096, 0x70000)]).unwrap())
    }

    #[test]
    fn a_range_may_cross_regions_but_not_leave_them() {
        let memory = two_regions();
        assert_eq!(memory.segments([(GuestAddr(8000), 400)]).unwrap().parts().len(), 2);
        assert!(memory.segments([(GuestAddr(8191), 2)]).is_some());
        assert!(memory.segments([(GuestAddr(4095), 2)]).is_none());
        assert!(memory.segments([(GuestAddr(4094), 1)]).is_none());
        assert!(memory.segments([(GuestAddr(12287), 2)]).is_none());
        assert!(memory.segments([(GuestAddr(u64::MAX), 2)]).is_none());
    }

    #[test]
    fn each_part_of_a_range_has_its_guest_address() {
        let memory = two_regions();
        let segments = memory.segments([(GuestAddr(8000), 400), (GuestAddr(4096), 1)]).unwrap();
        let found: Vec<_> = segments.guest_ranges().collect();
        let expected = [(8000, 192), (8192, 208), (4096, 1)];
        assert_eq!(found, expected.map(|(addr, len)| (Some(GuestAddr(addr)), len)));
        let inner: Vec<_> = segments.slice(193, 7).guest_ranges().collect();
        assert_eq!(inner, [(Some(GuestAddr(8193)), 7)]);
        assert_eq!(Segments::zeroed(5).guest_ranges().collect::<Vec<_>>(), [(None, 5)]);
    }

    #[test]
    fn peer_addresses_translate() {
        let memory = two_regions();
        assert_eq!(memory.guest_addr(0x20010), Some(GuestAddr(8208)));
        assert_eq!(memory.guest_addr(0x70fff), Some(GuestAddr(8191)));
        assert_eq!(memory.guest_addr(0x71000), None);
    }

    #[test]
    fn shared_checks_each_access() {
        let memory = two_regions();
        let ring = memory.shared(GuestAddr(4096), 16).unwrap();
        assert_eq!(ring.store_u16(2, 0x1234), Some(()));
        assert_eq!(ring.read::<2>(2), Some([0x34, 0x12]));
        assert_eq!(ring.write(0, *b"sixteen bytes!!!"), Some(()));
        assert_eq!(ring.read::<16>(0), Some(*b"sixteen bytes!!!"));
        assert_eq!(ring.read::<8>(1), Some(*b"ixteen b"));
        assert_eq!(ring.read::<16>(1), None);
        assert_eq!(ring.load_u16(15), None);
        assert_eq!(ring.load_u16(3), None);
        assert!(memory.shared(GuestAddr(8190), 4).is_none());
    }

    #[test]
    fn overlapping_regions_are_refused() {
        let region = |guest| Region {
            guest: GuestAddr(guest),
            peer: 0,
            len: 4096,
            offset: 0,
            mapping: Arc::new(Mapping::anonymous(4096).unwrap()),
        };
        assert!(GuestMemory::new(vec![region(0), region(4095)]).is_none());
        assert!(GuestMemory::new(vec![region(u64::MAX - 4096)]).is_some());
        assert!(GuestMemory::new(vec![region(u64::MAX - 4095)]).is_none());
    }
}
