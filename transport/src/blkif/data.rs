//! The way between a guest's pages and memory that the disk reads and writes.
//!
//! Knows nothing of rings. Invariants: data are handed out as memory only after every grant behind them was seen to be good;
//! what was read goes to the guest only if the disk filled all of it; nothing stays mapped for a front end that is gone.
//!
//! Three ways: *copy* through buffers of ours, in one call for all requests of a pass; *persistent*, pages that stay mapped,
//! new ones in one call a pass; *map*, for each request.

use std::sync::Arc;

use memory::{Buffer, Segments};
use xen::{Copied, CopyBatch, Direction, DomId, GrantRef, Grants, PAGE, Piece};

use super::abi::SEGMENT_LEN;
use super::persistent::Pages;
use super::pool::Pool;

/// Bytes of buffers that one disk may have under way. Beyond that its requests wait in the ring.
const LENT_MAX: usize = 32 << 20;

/// How a guest's pages are reached.
pub enum Way {
    /// By copies.
    Copy,
    /// By mappings that stay.
    Persistent(Pages),
    /// By a mapping for each request.
    Map,
}

/// Data of one request.
pub struct Load {
    /// Where they are in the guest's pages.
    pub pieces: Vec<Piece>,
    /// They go to the disk.
    pub write: bool,
    /// The memory for the disk, once it is there.
    pub lent: Option<Lent>,
}

/// Memory for the disk.
pub struct Lent {
    /// As the disk sees it.
    pub memory: Segments,
    /// The buffer behind it, to be given back; none if it is the guest's own.
    pub buffer: Option<Arc<Buffer>>,
}

impl Load {
    fn len(&self) -> usize {
        self.pieces.iter().map(|piece| usize::from(piece.len)).fold(0, usize::saturating_add)
    }
}

/// A page of descriptors, and how many there are.
#[derive(Clone, Copy)]
pub struct Descriptors {
    /// The page.
    pub page: GrantRef,
    /// How many.
    pub count: u16,
}

/// What moves data for one front end.
pub struct Data {
    domain: DomId,
    way: Way,
    pool: Pool,
    inward: CopyBatch,
    outward: CopyBatch,
}

impl Data {
    /// For a front end of `domain`.
    pub fn new(domain: DomId, way: Way) -> Data {
        let (inward, outward) = Default::default();
        Data { domain, way, pool: Pool::default(), inward, outward }
    }

    /// Whether more requests may be taken in.
    pub fn has_room(&self, coming: usize) -> bool {
        self.pool.lent().saturating_add(coming) < LENT_MAX
    }

    /// The descriptors in those pages, copied once; none of a page that cannot be had.
    pub fn fetch(&mut self, grants: &mut dyn Grants, wanted: &[Descriptors]) -> Vec<Option<Vec<u8>>> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let mut loads: Vec<Load> = wanted.iter().map(descriptor_load).collect();
        self.lend(grants, &mut loads);
        let taken = loads.into_iter().map(|load| {
            let lent = load.lent?;
            let bytes = lent.memory.to_vec();
            drop(lent.memory);
            if let Some(buffer) = lent.buffer {
                self.pool.give_back(buffer);
            }
            Some(bytes)
        });
        taken.collect()
    }

    /// Lends memory for each load; what is to be written is in it. None to those whose grants are bad.
    pub fn lend(&mut self, grants: &mut dyn Grants, loads: &mut [Load]) {
        match &mut self.way {
            Way::Copy => self.lend_copies(grants, loads),
            Way::Persistent(pages) => {
                pages.bring(grants, self.domain, loads.iter().flat_map(|load| load.pieces.iter().map(|p| p.page)));
                for load in loads {
                    let memory = pages.segments(grants, self.domain, &load.pieces);
                    load.lent = memory.map(|memory| Lent { memory, buffer: None });
                }
            }
            Way::Map => {
                for load in loads {
                    let memory = map(grants, self.domain, load);
                    load.lent = memory.map(|memory| Lent { memory, buffer: None });
                }
            }
        }
    }

    fn lend_copies(&mut self, grants: &mut dyn Grants, loads: &mut [Load]) {
        let mut entries = Vec::with_capacity(loads.len());
        for load in &mut *loads {
            let len = load.len();
            let buffer = self.pool.lend(len);
            let memory = buffer.segments(len);
            let entry = load.write.then(|| self.inward.push(Direction::FromGuest, memory.clone(), &load.pieces));
            entries.push(entry);
            load.lent = Some(Lent { memory, buffer: Some(buffer) });
        }
        if !self.inward.is_empty() {
            // An error is one of all copies, and each says so.
            grants.copy(self.domain, &mut self.inward).ok();
        }
        let mut unused = Vec::new();
        for (load, entry) in loads.iter_mut().zip(entries) {
            let copied = |entry: Option<usize>| entry.map(|entry| self.inward.copied(entry)) == Some(Copied::All);
            if !entry.is_none_or(copied) {
                unused.extend(load.lent.take().and_then(|lent| lent.buffer));
            }
        }
        self.inward.clear();
        unused.into_iter().for_each(|buffer| self.pool.give_back(buffer));
    }

    /// Notes that what was read is to go to the guest, where it does not lie there already. The answer's number for
    /// [`Data::delivered`].
    pub fn send(&mut self, memory: &Segments, pieces: &[Piece]) -> Option<usize> {
        match self.way {
            Way::Copy => self.outward.push(Direction::ToGuest, memory.clone(), pieces).or(Some(usize::MAX)),
            Way::Persistent(_) | Way::Map => None,
        }
    }

    /// Brings everything that was noted to the guest, in one call.
    pub fn deliver(&mut self, grants: &mut dyn Grants) {
        if !self.outward.is_empty() {
            // An error is one of all copies, and each says so.
            grants.copy(self.domain, &mut self.outward).ok();
        }
    }

    /// Whether what has this number, if it has one, is with the guest.
    pub fn delivered(&self, number: Option<usize>) -> bool {
        number.is_none_or(|number| self.outward.copied(number) == Copied::All)
    }

    /// All that was delivered is answered.
    pub fn forget_delivered(&mut self) {
        self.outward.clear();
    }

    /// The memory of a request is free.
    pub fn give_back(&mut self, buffer: Arc<Buffer>) {
        self.pool.give_back(buffer);
    }

    /// Nothing is under way: what is kept for the next request may be less.
    pub fn rest(&mut self) {
        self.pool.trim();
    }

    /// Pages that stay mapped.
    #[cfg(test)]
    pub fn mapped(&self) -> usize {
        match &self.way {
            Way::Persistent(pages) => pages.len(),
            Way::Copy | Way::Map => 0,
        }
    }
}

fn descriptor_load(wanted: &Descriptors) -> Load {
    let len = wanted.count.saturating_mul(8);
    debug_assert_eq!(SEGMENT_LEN, 8);
    // As if they were to be written: they come from the guest.
    Load { pieces: vec![Piece { page: wanted.page, from: 0, len }], write: true, lent: None }
}

/// Maps the pages of one request, each once for each piece, in order.
fn map(grants: &mut dyn Grants, domain: DomId, load: &Load) -> Option<Segments> {
    let pages: Vec<GrantRef> = load.pieces.iter().map(|piece| piece.page).collect();
    let granted = grants.map(domain, &pages, load.write).ok()?;
    let place = |(index, piece): (usize, &Piece)| {
        (index.saturating_mul(PAGE).saturating_add(usize::from(piece.from)), usize::from(piece.len))
    };
    granted.segments(load.pieces.iter().enumerate().map(place))
}
