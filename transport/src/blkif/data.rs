//! Moves data between a guest's pages and the memory that the disk reads and writes.
//!
//! It knows nothing about rings. Invariants: memory is handed out only after every grant behind it was found to be
//! valid; data read from the disk goes to the guest only if the disk filled all of it; nothing stays mapped for a front
//! end that is gone.
//!
//! There are three modes. *Copy*: by the hypervisor, in one call for all requests of a pass. *Persistent*: by us, from
//! and to pages that stay mapped, mapping new ones in one call per pass; what cannot be mapped, or exceeds the limit,
//! is copied as in the first mode. *Map*: the pages themselves, mapped for each request. In the first two the storage
//! never accesses a guest's page, so hung storage does not pin a dead guest's memory.

use std::sync::Arc;

use disk::size::on_disk;
use memory::{Buffer, Segments};
use xen::{Copied, CopyBatch, Direction, DomId, GrantRef, Grants, PAGE, PageRange};

use super::abi::SEGMENT_LEN;
use super::persistent::PersistentGrants;
use super::pool::{Pool, PoolBuffer};
use super::request::{Descriptors, SEGMENTS_MAX};
use crate::MemoryChange;

/// Length of the descriptors of the largest request.
pub const DESCRIPTORS_MAX: usize = SEGMENTS_MAX as usize * SEGMENT_LEN;

/// Maximum total size of the buffers in use by one disk. Beyond that its requests wait in the ring.
const IN_USE_MAX: usize = 32 << 20;

/// How a guest's pages are accessed.
pub enum DataMode {
    /// Copied by the hypervisor.
    Copy,
    /// Mapped persistently.
    Persistent(Box<PersistentGrants>),
    /// Mapped for each request.
    Map,
}

/// The memory of a request's data while the disk processes it.
pub enum DataBuffer {
    /// Our own buffer, to be returned to the pool.
    PoolBuffer(PoolBuffer),
    /// The guest's own pages, for the disk alone; `None` once the disk has taken them.
    Mapped(Option<Box<Segments>>),
}

impl DataBuffer {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        let len = match self {
            DataBuffer::PoolBuffer(memory) => memory.len(),
            DataBuffer::Mapped(memory) => memory.as_ref().map_or(0, |memory| memory.len()),
        };
        on_disk(len)
    }
}

/// The state of a transfer of data from or to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferState {
    /// There is no data, or it has been transferred.
    Done,
    /// The transfer failed.
    Failed,
    /// The transfer is in the batch of its direction, at this index.
    Queued(u32),
    /// A call is needed first: the pages are not mapped, or not known yet.
    Deferred,
}

/// Transfers data for one front end.
pub struct Data {
    domain: DomId,
    mode: DataMode,
    pool: Pool,
    from_guest: CopyBatch,
    to_guest: CopyBatch,
}

impl Data {
    /// Creates one for a front end of `domain`; copied data goes through `staging`, which must have no other user.
    pub fn new(domain: DomId, mode: DataMode, staging: Arc<Buffer>) -> Data {
        let (from_guest, to_guest) = Default::default();
        Data { domain, mode, pool: Pool::new(staging), from_guest, to_guest }
    }

    /// Whether more requests may be taken.
    pub fn has_room(&self, coming: usize) -> bool {
        self.pool.allocated() + coming < IN_USE_MAX
    }

    /// The segment descriptors in that page, copied once into `into`. `None` unless the page is mapped already, so that
    /// no call is needed.
    #[inline]
    pub fn mapped_descriptors<'a>(&self, wanted: Descriptors, into: &'a mut [u8; DESCRIPTORS_MAX]) -> Option<&'a [u8]> {
        let DataMode::Persistent(pages) = &self.mode else { return None };
        let bytes = into.get_mut(..usize::from(wanted.range().len))?;
        pages.read(wanted.page, bytes)?;
        Some(bytes)
    }

    /// The segment descriptors in those pages, each copied once; `None` for a page that cannot be read. Copies that are
    /// already queued are made in the same call.
    pub fn fetch_descriptors(&mut self, grants: &mut dyn Grants, wanted: &[Descriptors]) -> Vec<Option<Vec<u8>>> {
        let ranges: Vec<PageRange> = wanted.iter().map(Descriptors::range).collect();
        self.map_pages(grants, ranges.iter());
        let mut acquire = |range: &PageRange| {
            let mut buffer = None;
            // As for a write: descriptors come from the guest.
            let ranges = (std::slice::from_ref(range), usize::from(range.len));
            let state = self.acquire_or_fail(grants, ranges, true, &mut buffer);
            (buffer, state)
        };
        let buffer: Vec<_> = ranges.iter().map(&mut acquire).collect();
        self.copy_from_guest(grants);
        let taken = buffer.into_iter().map(|(buffer, state)| {
            let mut buffer = buffer?;
            let bytes = (self.incoming_state(state) == TransferState::Done).then(|| self.memory(&mut buffer).to_vec());
            self.release(buffer);
            bytes
        });
        taken.collect()
    }

    /// Maps, in one call, the pages of these ranges that should stay mapped and are not mapped yet.
    pub fn map_pages<'a>(&mut self, grants: &mut dyn Grants, ranges: impl Iterator<Item = &'a PageRange>) {
        if let DataMode::Persistent(pages) = &mut self.mode {
            pages.map_pages(grants, self.domain, ranges.map(|range| range.page));
        }
    }

    /// Acquires memory for the data in these ranges, `len` bytes. Returns the state of the transfer of data to be
    /// written; `Failed` also for data whose grants are found to be invalid.
    #[inline(always)]
    pub fn acquire(
        &mut self,
        grants: &mut dyn Grants,
        (ranges, len): (&[PageRange], usize),
        write: bool,
        buffer: &mut Option<DataBuffer>,
    ) -> TransferState {
        match &self.mode {
            DataMode::Persistent(pages) => {
                if !write && !pages.contains_all(ranges) {
                    return TransferState::Deferred;
                }
                let memory = self.pool.allocate(len);
                if write && pages.copy_out(ranges, (&**self.pool.buffer(&memory), memory.at())).is_none() {
                    // Data copied before an unmapped page was found is copied again.
                    self.pool.release(memory);
                    return TransferState::Deferred;
                }
                *buffer = Some(DataBuffer::PoolBuffer(memory));
                TransferState::Done
            }
            DataMode::Copy => self.acquire_copy((ranges, len), write, buffer),
            DataMode::Map => {
                *buffer =
                    map(grants, self.domain, ranges, write).map(|memory| DataBuffer::Mapped(Some(Box::new(memory))));
                if buffer.is_some() { TransferState::Done } else { TransferState::Failed }
            }
        }
    }

    #[inline(never)]
    fn acquire_copy(
        &mut self,
        (ranges, len): (&[PageRange], usize),
        write: bool,
        buffer: &mut Option<DataBuffer>,
    ) -> TransferState {
        let memory = self.pool.allocate(len);
        let state = match write {
            true => queued(self.from_guest.push(Direction::FromGuest, self.pool.segments(&memory), ranges)),
            false => TransferState::Done,
        };
        *buffer = Some(DataBuffer::PoolBuffer(memory));
        state
    }

    /// As `acquire`, but never deferred: what could not be mapped together with other pages may be mappable alone, and
    /// otherwise is copied by the hypervisor along with the others of the pass, which shows whether it can be.
    pub fn acquire_or_fail(
        &mut self,
        grants: &mut dyn Grants,
        (ranges, len): (&[PageRange], usize),
        write: bool,
        buffer: &mut Option<DataBuffer>,
    ) -> TransferState {
        for retried in [false, true] {
            let state = self.acquire(grants, (ranges, len), write, buffer);
            let TransferState::Deferred = state else { return state };
            let DataMode::Persistent(pages) = &mut self.mode else { break };
            if retried || !pages.ensure_mapped(grants, self.domain, ranges) {
                break;
            }
        }
        self.acquire_copy((ranges, len), write, buffer)
    }

    /// Makes all queued copies from the guest, in one call.
    pub fn copy_from_guest(&mut self, grants: &mut dyn Grants) {
        if !self.from_guest.is_empty() {
            copy(grants, self.domain, &mut self.from_guest);
        }
    }

    /// Whether copies from the guest are queued, or done but not processed yet.
    pub fn has_copies_from_guest(&self) -> bool {
        !self.from_guest.is_empty()
    }

    /// The state of a transfer after all queued copies from the guest were made.
    pub fn incoming_state(&self, state: TransferState) -> TransferState {
        match state {
            TransferState::Queued(_) if is_copied(&self.from_guest, state) => TransferState::Done,
            TransferState::Queued(_) => TransferState::Failed,
            other => other,
        }
    }

    /// Empties the batch after its results were processed.
    pub fn clear_from_guest(&mut self) {
        self.from_guest.clear();
    }

    /// Memory for the disk.
    #[inline]
    pub fn memory(&self, buffer: &mut DataBuffer) -> Segments {
        match buffer {
            DataBuffer::PoolBuffer(memory) => self.pool.segments(memory),
            DataBuffer::Mapped(memory) => memory.take().map_or_else(Segments::empty, |memory| *memory),
        }
    }

    /// Transfers data read from the disk to the guest, or queues that, unless it is already in the guest's pages.
    #[inline]
    pub fn queue_to_guest(
        &mut self,
        grants: &mut dyn Grants,
        ranges: &[PageRange],
        buffer: &DataBuffer,
    ) -> TransferState {
        let DataBuffer::PoolBuffer(memory) = buffer else { return TransferState::Done };
        match &mut self.mode {
            DataMode::Persistent(pages) => {
                let ours = (&**self.pool.buffer(memory), memory.at());
                let copied = pages.copy_in(ranges, ours).or_else(|| {
                    // The pages were unmapped meanwhile. Data copied before an unmapped page was found is copied again.
                    pages.ensure_mapped(grants, self.domain, ranges).then(|| pages.copy_in(ranges, ours)).flatten()
                });
                match copied {
                    Some(()) => TransferState::Done,
                    None => queued(self.to_guest.push(Direction::ToGuest, self.pool.segments(memory), ranges)),
                }
            }
            DataMode::Copy => queued(self.to_guest.push(Direction::ToGuest, self.pool.segments(memory), ranges)),
            DataMode::Map => TransferState::Done,
        }
    }

    /// Makes all queued copies to the guest, in one call.
    pub fn copy_to_guest(&mut self, grants: &mut dyn Grants) {
        if !self.to_guest.is_empty() {
            copy(grants, self.domain, &mut self.to_guest);
        }
    }

    /// Whether data has reached the guest.
    #[inline]
    pub fn is_transferred(&self, state: TransferState) -> bool {
        is_copied(&self.to_guest, state)
    }

    /// Empties the batch after all its requests were answered.
    pub fn clear_to_guest(&mut self) {
        self.to_guest.clear();
    }

    /// Releases the memory of a request.
    #[inline]
    pub fn release(&mut self, buffer: DataBuffer) {
        if let DataBuffer::PoolBuffer(memory) = buffer {
            self.pool.release(memory);
        }
    }

    /// The next change of the memory that data passes through that the engine has not been told about.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        self.pool.take_change()
    }

    /// Releases all memory except the staging buffer.
    pub fn release_all_memory(&mut self) {
        self.pool.release_all();
    }

    /// Whether more memory is kept for future requests than an idle disk should hold.
    pub fn has_excess_memory(&self) -> bool {
        self.pool.has_excess_memory()
    }

    /// Releases memory kept for future requests.
    pub fn trim(&mut self) {
        self.pool.trim();
    }
}

impl Descriptors {
    fn range(&self) -> PageRange {
        const _: () = assert!(SEGMENT_LEN == 8);
        PageRange { page: self.page, from: 0, len: self.count * 8 }
    }
}

/// Makes all copies, and retries once if the call itself fails: that is not the guest's fault, and would fail all its
/// requests. Data is then copied again, which is not visible to the guest before it is answered.
fn copy(grants: &mut dyn Grants, domain: DomId, batch: &mut CopyBatch) {
    if grants.copy(domain, batch).is_err() {
        // A failed call marks every copy as failed.
        grants.copy(domain, batch).ok();
    }
}

fn queued(number: Option<usize>) -> TransferState {
    number.and_then(|number| u32::try_from(number).ok()).map_or(TransferState::Failed, TransferState::Queued)
}

fn is_copied(batch: &CopyBatch, state: TransferState) -> bool {
    match state {
        TransferState::Done => true,
        TransferState::Failed | TransferState::Deferred => false,
        TransferState::Queued(number) => {
            usize::try_from(number).is_ok_and(|number| batch.copied(number) == Copied::All)
        }
    }
}

/// Maps the pages of one request, in order, one page for each range.
fn map(grants: &mut dyn Grants, domain: DomId, ranges: &[PageRange], write: bool) -> Option<Segments> {
    let pages: Vec<GrantRef> = ranges.iter().map(|range| range.page).collect();
    let granted = grants.map(domain, &pages, write).ok()?;
    let place = |(index, range): (usize, &PageRange)| (index * PAGE + usize::from(range.from), usize::from(range.len));
    granted.segments(ranges.iter().enumerate().map(place))
}
