//! The way between a guest's pages and memory that the disk reads and writes.
//!
//! Knows nothing of rings. Invariants: data are handed out as memory only after every grant behind them was seen to be good;
//! what was read goes to the guest only if the disk filled all of it; nothing stays mapped for a front end that is gone.
//!
//! Three ways. *Copy*: by the hypervisor, in one call for all requests of a pass. *Persistent*: by us, from and to pages that
//! stay mapped, new ones in one call a pass. *Map*: the pages themselves, mapped for each request. In the first two the
//! storage never sees a guest's page, so one that does not answer keeps no dead guest's memory.

use std::sync::Arc;

use memory::{Buffer, Segments};
use xen::{Copied, CopyBatch, Direction, DomId, GrantRef, Grants, PAGE, Piece};

use super::abi::SEGMENT_LEN;
use super::persistent::Pages;
use super::pool::{Loan, Pool};
use super::request::Pieces;

/// Bytes of buffers that one disk may have under way. Beyond that its requests wait in the ring.
const LENT_MAX: usize = 32 << 20;

/// How a guest's pages are reached.
pub enum Way {
    /// By copies of the hypervisor's.
    Copy,
    /// By mappings that stay.
    Persistent(Pages),
    /// By a mapping for each request.
    Map,
}

/// Data of one request.
pub struct Load<T> {
    /// Which.
    pub what: T,
    /// Where they are in the guest's pages.
    pub pieces: Pieces,
    /// They go to the disk.
    pub write: bool,
    /// The memory for the disk, once it is there.
    pub memory: Option<Segments>,
    /// What is behind it, to be given back; none if it is the guest's own.
    pub loan: Option<Loan>,
}

impl<T> Load<T> {
    /// Data in these pieces, to be written or read.
    pub fn new(what: T, pieces: Pieces, write: bool) -> Load<T> {
        Load { what, pieces, write, memory: None, loan: None }
    }

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

/// Where what was read is on its way to the guest.
#[derive(Clone, Copy)]
pub enum Sent {
    /// There is nothing to bring, or it is there.
    There,
    /// It cannot be brought.
    Lost,
    /// It is in the batch under this number.
    InBatch(usize),
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

    /// The descriptors in those pages, copied once; none of a page that cannot be had.
    pub fn fetch(&mut self, grants: &mut dyn Grants, wanted: &[Descriptors]) -> Vec<Option<Vec<u8>>> {
        if wanted.is_empty() {
            return Vec::new();
        }
        let mut loads: Vec<Load<()>> = wanted.iter().map(descriptor_load).collect();
        self.lend(grants, &mut loads);
        let taken = loads.into_iter().map(|mut load| {
            let bytes = load.memory.take().map(|memory| memory.to_vec());
            if let Some(loan) = load.loan {
                self.pool.give_back(loan);
            }
            bytes
        });
        taken.collect()
    }

    /// Lends memory for each load; what is to be written is in it. None to those whose grants are bad.
    pub fn lend<T>(&mut self, grants: &mut dyn Grants, loads: &mut [Load<T>]) {
        match &mut self.way {
            Way::Copy => self.lend_copies(grants, loads),
            Way::Persistent(pages) => {
                let named = loads.iter().flat_map(|load| load.pieces.iter().map(|piece| piece.page));
                let all = pages.bring(grants, self.domain, named);
                for load in loads {
                    let loan = self.pool.lend(load.len());
                    let good = match load.write {
                        true => pages.copy_out(grants, self.domain, &load.pieces, &loan).is_some(),
                        false => all || pages.has(grants, self.domain, &load.pieces),
                    };
                    match good {
                        true => (load.memory, load.loan) = (Some(loan.segments()), Some(loan)),
                        false => self.pool.give_back(loan),
                    }
                }
            }
            Way::Map => loads.iter_mut().for_each(|load| load.memory = map(grants, self.domain, load)),
        }
    }

    fn lend_copies<T>(&mut self, grants: &mut dyn Grants, loads: &mut [Load<T>]) {
        for load in &mut *loads {
            let loan = self.pool.lend(load.len());
            let memory = loan.segments();
            let pushed = !load.write || self.inward.push(Direction::FromGuest, memory.clone(), &load.pieces).is_some();
            match pushed {
                true => (load.memory, load.loan) = (Some(memory), Some(loan)),
                false => self.pool.give_back(loan),
            }
        }
        if self.inward.is_empty() {
            return;
        }
        // An error is one of all copies, and each says so.
        grants.copy(self.domain, &mut self.inward).ok();
        let written = loads.iter_mut().filter(|load| load.write && load.loan.is_some());
        for (number, load) in written.enumerate() {
            if self.inward.copied(number) != Copied::All {
                load.memory = None;
                if let Some(loan) = load.loan.take() {
                    self.pool.give_back(loan);
                }
            }
        }
        self.inward.clear();
    }

    /// Brings what was read to the guest, or notes that it is to be brought, where it does not lie there already.
    pub fn send(&mut self, grants: &mut dyn Grants, pieces: &[Piece], loan: Option<&Loan>) -> Sent {
        let Some(loan) = loan else { return Sent::There };
        match &mut self.way {
            Way::Copy => match self.outward.push(Direction::ToGuest, loan.segments(), pieces) {
                Some(number) => Sent::InBatch(number),
                None => Sent::Lost,
            },
            Way::Persistent(pages) => match pages.copy_in(grants, self.domain, pieces, loan) {
                Some(()) => Sent::There,
                None => Sent::Lost,
            },
            Way::Map => Sent::There,
        }
    }

    /// Brings everything that was noted to the guest, in one call.
    pub fn deliver(&mut self, grants: &mut dyn Grants) {
        if !self.outward.is_empty() {
            // An error is one of all copies, and each says so.
            grants.copy(self.domain, &mut self.outward).ok();
        }
    }

    /// Whether it is with the guest.
    pub fn delivered(&self, sent: Sent) -> bool {
        match sent {
            Sent::There => true,
            Sent::Lost => false,
            Sent::InBatch(number) => self.outward.copied(number) == Copied::All,
        }
    }

    /// All that was delivered is answered.
    pub fn forget_delivered(&mut self) {
        self.outward.clear();
    }

    /// The memory of a request is free.
    pub fn give_back(&mut self, loan: Loan) {
        self.pool.give_back(loan);
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

fn descriptor_load(wanted: &Descriptors) -> Load<()> {
    let len = wanted.count.saturating_mul(8);
    debug_assert_eq!(SEGMENT_LEN, 8);
    // As if they were to be written: they come from the guest.
    Load::new((), Pieces::from_iter([Piece { page: wanted.page, from: 0, len }]), true)
}

/// Maps the pages of one request, each once for each piece, in order.
fn map<T>(grants: &mut dyn Grants, domain: DomId, load: &Load<T>) -> Option<Segments> {
    let pages: Vec<GrantRef> = load.pieces.iter().map(|piece| piece.page).collect();
    let granted = grants.map(domain, &pages, load.write).ok()?;
    let place = |(index, piece): (usize, &Piece)| {
        (index.saturating_mul(PAGE).saturating_add(usize::from(piece.from)), usize::from(piece.len))
    };
    granted.segments(load.pieces.iter().enumerate().map(place))
}
