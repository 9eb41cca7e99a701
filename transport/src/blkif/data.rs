//! The way between a guest's pages and memory that the disk reads and writes.
//!
//! Knows nothing of rings. Invariants: data are handed out as memory only after every grant behind them was seen to be
//! good; what was read goes to the guest only if the disk filled all of it; nothing stays mapped for a front end that
//! is gone.
//!
//! Three ways. *Copy*: by the hypervisor, in one call for all requests of a pass. *Persistent*: by us, from and to
//! pages that stay mapped, new ones in one call a pass; what cannot be mapped, or is too much to stay so, is copied as
//! in the first. *Map*: the pages themselves, mapped for each request. In the first two the storage never sees a
//! guest's page, so one that does not answer keeps no dead guest's memory.

use std::sync::Arc;

use memory::{Buffer, Segments};
use xen::{Copied, CopyBatch, Direction, DomId, GrantRef, Grants, PAGE, Piece};

use super::abi::SEGMENT_LEN;
use super::persistent::Pages;
use super::pool::{Loan, Pool};
use super::request::Descriptors;
use crate::MemoryChange;

/// Bytes of buffers that one disk may have under way. Beyond that its requests wait in the ring.
const LENT_MAX: usize = 32 << 20;

/// How a guest's pages are reached.
pub enum Way {
    /// By copies of the hypervisor's.
    Copy,
    /// By mappings that stay.
    Persistent(Box<Pages>),
    /// By a mapping for each request.
    Map,
}

/// Memory that the data of a request lie in while the disk has it.
pub enum Lent {
    /// Ours, to be given back.
    Loan(Loan),
    /// The guest's own, for the disk alone; gone when that has it.
    Mapped(Option<Box<Segments>>),
}

impl Lent {
    /// Bytes.
    pub fn len(&self) -> u64 {
        let len = match self {
            Lent::Loan(loan) => loan.len(),
            Lent::Mapped(memory) => memory.as_ref().map_or(0, |memory| memory.len()),
        };
        u64::try_from(len).unwrap_or(u64::MAX)
    }
}

/// How it stands with data that are to go from or to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// There is nothing to move, or it is there.
    There,
    /// They cannot be moved.
    Lost,
    /// They are in the batch of their direction under this number.
    InBatch(u32),
    /// A call is needed before: their pages are not mapped, or it is not known where they are.
    Later,
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
    /// For a front end of `domain`, through `staging` where data are copied. Nobody else uses that.
    pub fn new(domain: DomId, way: Way, staging: Arc<Buffer>) -> Data {
        let (inward, outward) = Default::default();
        Data { domain, way, pool: Pool::new(staging), inward, outward }
    }

    /// Whether more requests may be taken in.
    pub fn has_room(&self, coming: usize) -> bool {
        self.pool.lent().saturating_add(coming) < LENT_MAX
    }

    /// The descriptors in those pages, copied once; none of a page that cannot be had. What else was noted is gathered
    /// in the same call.
    pub fn fetch(&mut self, grants: &mut dyn Grants, wanted: &[Descriptors]) -> Vec<Option<Vec<u8>>> {
        let pieces: Vec<Piece> = wanted.iter().map(Descriptors::piece).collect();
        self.bring(grants, pieces.iter());
        let mut lend = |piece: &Piece| {
            let mut lent = None;
            // As if they were to be written: they come from the guest.
            let pieces = (std::slice::from_ref(piece), usize::from(piece.len));
            let moved = self.lend_at_last(grants, pieces, true, &mut lent);
            (lent, moved)
        };
        let lent: Vec<_> = pieces.iter().map(&mut lend).collect();
        self.gather(grants);
        let taken = lent.into_iter().map(|(lent, moved)| {
            let mut lent = lent?;
            let bytes = (self.gathered(moved) == Moved::There).then(|| self.memory(&mut lent).to_vec());
            self.give_back(lent);
            bytes
        });
        taken.collect()
    }

    /// Maps, in one call, the pages of these pieces that are to stay mapped and are not.
    pub fn bring<'a>(&mut self, grants: &mut dyn Grants, pieces: impl Iterator<Item = &'a Piece>) {
        if let Way::Persistent(pages) = &mut self.way {
            pages.bring(grants, self.domain, pieces.map(|piece| piece.page));
        }
    }

    /// Lends memory for the data in these pieces, so many bytes. How it stands with what is to be written; lost are
    /// also data whose grants are seen to be bad.
    #[inline(always)]
    pub fn lend(
        &mut self,
        grants: &mut dyn Grants,
        (pieces, len): (&[Piece], usize),
        write: bool,
        lent: &mut Option<Lent>,
    ) -> Moved {
        match &self.way {
            Way::Persistent(pages) => {
                if !write && !pages.have(pieces) {
                    return Moved::Later;
                }
                let loan = self.pool.lend(len);
                if write && pages.copy_out(pieces, (&**self.pool.buffer(&loan), loan.at())).is_none() {
                    // What was copied before one was missed is copied again.
                    self.pool.give_back(loan);
                    return Moved::Later;
                }
                *lent = Some(Lent::Loan(loan));
                Moved::There
            }
            Way::Copy => self.lend_copy((pieces, len), write, lent),
            Way::Map => {
                *lent = map(grants, self.domain, pieces, write).map(|memory| Lent::Mapped(Some(Box::new(memory))));
                if lent.is_some() { Moved::There } else { Moved::Lost }
            }
        }
    }

    #[inline(never)]
    fn lend_copy(&mut self, (pieces, len): (&[Piece], usize), write: bool, lent: &mut Option<Lent>) -> Moved {
        let loan = self.pool.lend(len);
        let moved = match write {
            true => in_batch(self.inward.push(Direction::FromGuest, self.pool.segments(&loan), pieces)),
            false => Moved::There,
        };
        *lent = Some(Lent::Loan(loan));
        moved
    }

    /// The same for those for which there is no later: what could not be mapped with others may be alone, or is copied
    /// by the hypervisor, with the others of the pass. Whether it can be, that tells.
    pub fn lend_at_last(
        &mut self,
        grants: &mut dyn Grants,
        (pieces, len): (&[Piece], usize),
        write: bool,
        lent: &mut Option<Lent>,
    ) -> Moved {
        for last in [false, true] {
            let moved = self.lend(grants, (pieces, len), write, lent);
            let Moved::Later = moved else { return moved };
            let Way::Persistent(pages) = &mut self.way else { break };
            if last || !pages.get(grants, self.domain, pieces) {
                break;
            }
        }
        self.lend_copy((pieces, len), write, lent)
    }

    /// Copies everything that is to be written and was noted, in one call.
    pub fn gather(&mut self, grants: &mut dyn Grants) {
        if !self.inward.is_empty() {
            copy(grants, self.domain, &mut self.inward);
        }
    }

    /// Whether what was noted is not yet handed on.
    pub fn has_noted(&self) -> bool {
        !self.inward.is_empty()
    }

    /// How it stands with data once all that were noted are gathered.
    pub fn gathered(&self, moved: Moved) -> Moved {
        match moved {
            Moved::InBatch(_) if is_moved(&self.inward, moved) => Moved::There,
            Moved::InBatch(_) => Moved::Lost,
            other => other,
        }
    }

    /// All that was gathered is handed on.
    pub fn forget_gathered(&mut self) {
        self.inward.clear();
    }

    /// Memory for the disk.
    #[inline]
    pub fn memory(&self, lent: &mut Lent) -> Segments {
        match lent {
            Lent::Loan(loan) => self.pool.segments(loan),
            Lent::Mapped(memory) => memory.take().map_or_else(Segments::empty, |memory| *memory),
        }
    }

    /// Brings what was read to the guest, or notes that it is to be brought, where it does not lie there already.
    #[inline]
    pub fn send(&mut self, grants: &mut dyn Grants, pieces: &[Piece], lent: &Lent) -> Moved {
        let Lent::Loan(loan) = lent else { return Moved::There };
        match &mut self.way {
            Way::Persistent(pages) => {
                let ours = (&**self.pool.buffer(loan), loan.at());
                let copied = pages.copy_in(pieces, ours).or_else(|| {
                    // They were given up meanwhile. What was copied before one is missed is copied again.
                    pages.get(grants, self.domain, pieces).then(|| pages.copy_in(pieces, ours)).flatten()
                });
                match copied {
                    Some(()) => Moved::There,
                    None => in_batch(self.outward.push(Direction::ToGuest, self.pool.segments(loan), pieces)),
                }
            }
            Way::Copy => in_batch(self.outward.push(Direction::ToGuest, self.pool.segments(loan), pieces)),
            Way::Map => Moved::There,
        }
    }

    /// Brings everything that was noted to the guest, in one call.
    pub fn deliver(&mut self, grants: &mut dyn Grants) {
        if !self.outward.is_empty() {
            copy(grants, self.domain, &mut self.outward);
        }
    }

    /// Whether it is with the guest.
    #[inline]
    pub fn is_delivered(&self, moved: Moved) -> bool {
        is_moved(&self.outward, moved)
    }

    /// All that was delivered is answered.
    pub fn forget_delivered(&mut self) {
        self.outward.clear();
    }

    /// The memory of a request is free.
    #[inline]
    pub fn give_back(&mut self, lent: Lent) {
        if let Lent::Loan(loan) = lent {
            self.pool.give_back(loan);
        }
    }

    /// What the engine should know of the memory that data pass through, and was not yet told.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        self.pool.take_change()
    }

    /// Gives up memory, but for the staging.
    pub fn let_memory_go(&mut self) {
        self.pool.let_go();
    }

    /// Whether more is kept for the next requests than an idle disk should.
    pub fn keeps_much(&self) -> bool {
        self.pool.keeps_much()
    }

    /// What is kept for the next requests may be less.
    pub fn rest(&mut self) {
        self.pool.trim();
    }
}

impl Descriptors {
    fn piece(&self) -> Piece {
        const _: () = assert!(SEGMENT_LEN == 8);
        Piece { page: self.page, from: 0, len: self.count.saturating_mul(8) }
    }
}

/// Makes all copies, once more if the call itself has failed: that is no fault of the guest's, whose requests would all
/// be errors. What was copied already is copied again, which nobody sees before it is answered.
fn copy(grants: &mut dyn Grants, domain: DomId, batch: &mut CopyBatch) {
    if grants.copy(domain, batch).is_err() {
        // An error is one of all copies, and each says so.
        grants.copy(domain, batch).ok();
    }
}

fn in_batch(number: Option<usize>) -> Moved {
    number.and_then(|number| u32::try_from(number).ok()).map_or(Moved::Lost, Moved::InBatch)
}

fn is_moved(batch: &CopyBatch, moved: Moved) -> bool {
    match moved {
        Moved::There => true,
        Moved::Lost | Moved::Later => false,
        Moved::InBatch(number) => usize::try_from(number).is_ok_and(|number| batch.copied(number) == Copied::All),
    }
}

/// Maps the pages of one request, each once for each piece, in order.
fn map(grants: &mut dyn Grants, domain: DomId, pieces: &[Piece], write: bool) -> Option<Segments> {
    let pages: Vec<GrantRef> = pieces.iter().map(|piece| piece.page).collect();
    let granted = grants.map(domain, &pages, write).ok()?;
    let place = |(index, piece): (usize, &Piece)| {
        (index.saturating_mul(PAGE).saturating_add(usize::from(piece.from)), usize::from(piece.len))
    };
    granted.segments(pieces.iter().enumerate().map(place))
}
