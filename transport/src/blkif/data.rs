//! Transfers data between a guest's pages and the memory that the disk reads and writes.
//!
//! It knows nothing about rings. Invariants: memory is handed out only after all grants for it were found to be valid;
//! data read from the disk goes to the guest only if the disk has filled all of it; nothing stays mapped for a
//! disconnected front end.
//!
//! There are three modes. *Copy*: the hypervisor copies, in one call for all requests of a pass. *Persistent*: this
//! process copies from and to pages that stay mapped, and maps new ones in one call per pass; pages that cannot be
//! mapped, or exceed the limit, are copied as in the first mode. *Map*: the pages themselves are mapped for each
//! request. In the first two modes the storage never accesses a guest's page, so hung storage does not pin a dead
//! guest's memory.

use std::sync::Arc;

use disk::size::on_disk;
use memory::{Buffer, Segments};
use xen::{Copied, CopyBatch, Direction, DomId, GrantRef, Grants, PAGE, PageRange};

use super::abi::SEGMENT_LEN;
use super::persistent::PersistentGrants;
use super::pool::{Pool, PoolBuffer};
use super::request::{Descriptors, SEGMENTS_MAX};
use crate::MemoryChange;

/// The size of the descriptors of the largest request.
pub const DESCRIPTORS_MAX: usize = SEGMENTS_MAX as usize * SEGMENT_LEN;

/// The maximum total size of one disk's buffers in use. Beyond that its requests wait in the ring.
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
    /// A buffer of the pool.
    PoolBuffer(PoolBuffer),
    /// The guest's own pages, mapped; `None` once they are passed to the disk.
    Mapped(Option<Box<Segments>>),
}

impl DataBuffer {
    /// The length in bytes.
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
    /// A system call is needed first: the pages are not mapped, or not known yet.
    Deferred,
}

/// Transfers the data of one front end.
pub struct DataTransfer {
    domain: DomId,
    mode: DataMode,
    pool: Pool,
    from_guest: CopyBatch,
    to_guest: CopyBatch,
}

impl DataTransfer {
    /// Creates one for a front end of `domain`. Copied data goes through `staging`, which must have no other user.
    pub fn new(domain: DomId, mode: DataMode, staging: Arc<Buffer>) -> DataTransfer {
        let (from_guest, to_guest) = Default::default();
        DataTransfer { domain, mode, pool: Pool::new(staging), from_guest, to_guest }
    }

    /// Returns true if more requests may be taken, when requests of `coming` bytes will need memory as well.
    pub fn has_room(&self, coming: usize) -> bool {
        self.pool.allocated() + coming < IN_USE_MAX
    }

    /// Copies the segment descriptors of an indirect request, once, into `into`. `None` unless their page is mapped
    /// already, so that no system call is needed.
    #[inline]
    pub fn mapped_descriptors<'a>(&self, wanted: Descriptors, into: &'a mut [u8; DESCRIPTORS_MAX]) -> Option<&'a [u8]> {
        let DataMode::Persistent(pages) = &self.mode else { return None };
        let bytes = into.get_mut(..usize::from(wanted.range().len))?;
        pages.read(wanted.page, bytes)?;
        Some(bytes)
    }

    /// Copies the segment descriptors of several requests, once; `None` for a page that cannot be read. Queued copies
    /// are made in the same call.
    pub fn fetch_descriptors(&mut self, grants: &mut dyn Grants, wanted: &[Descriptors]) -> Vec<Option<Vec<u8>>> {
        let ranges: Vec<PageRange> = wanted.iter().map(Descriptors::range).collect();
        self.map_pages(grants, ranges.iter());
        let mut acquire = |range: &PageRange| {
            let mut buffer = None;
            // As for a write: descriptors are read from the guest.
            let ranges = (std::slice::from_ref(range), usize::from(range.len));
            let state = self.acquire_or_fail(grants, ranges, true, &mut buffer);
            (buffer, state)
        };
        let acquired: Vec<_> = ranges.iter().map(&mut acquire).collect();
        self.copy_from_guest(grants);
        let fetched = acquired.into_iter().map(|(buffer, state)| {
            let mut buffer = buffer?;
            let bytes = (self.incoming_state(state) == TransferState::Done).then(|| self.memory(&mut buffer).to_vec());
            self.release(buffer);
            bytes
        });
        fetched.collect()
    }

    /// In persistent mode, maps the pages of these ranges that are not mapped yet, in one call.
    pub fn map_pages<'a>(&mut self, grants: &mut dyn Grants, ranges: impl Iterator<Item = &'a PageRange>) {
        if let DataMode::Persistent(pages) = &mut self.mode {
            pages.map_pages(grants, self.domain, ranges.map(|range| range.page));
        }
    }

    /// Acquires memory for the data in these ranges, `len` bytes in total, and starts its transfer if it is to be
    /// written. Returns the state of that transfer, or `Failed` if a grant is invalid.
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
                    // Ranges before the unmapped page will be copied again.
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

    /// Like [`DataTransfer::acquire`], but never returns `Deferred`: pages that could not be mapped together with
    /// others are mapped alone, or else copied by the hypervisor with the others of the pass, which detects invalid
    /// grants.
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

    /// Returns true if copies from the guest are queued, or done but not processed yet.
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

    /// The buffer as memory for the disk. Mapped pages can be taken once.
    #[inline]
    pub fn memory(&self, buffer: &mut DataBuffer) -> Segments {
        match buffer {
            DataBuffer::PoolBuffer(memory) => self.pool.segments(memory),
            DataBuffer::Mapped(memory) => memory.take().map_or_else(Segments::empty, |memory| *memory),
        }
    }

    /// Transfers data read from the disk to the guest, or queues the copy, unless the guest's pages are mapped.
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
                    // Pages were unmapped meanwhile. Ranges before the first of them are copied again.
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

    /// Returns true if data has reached the guest.
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

    /// The next change of its buffers that was not reported to the engine yet.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        self.pool.take_change()
    }

    /// Releases all memory except the staging buffer.
    pub fn release_all_memory(&mut self) {
        self.pool.release_all();
    }

    /// Returns true if more memory is kept for further requests than an idle disk should keep.
    pub fn has_excess_memory(&self) -> bool {
        self.pool.has_excess_memory()
    }

    /// Releases memory kept for further requests, if none of it was needed since the last call.
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

/// Makes all copies. If the call itself fails, which is not the guest's fault and would fail all its requests, it is
/// retried once: data is then copied again, unnoticed by the guest as its requests are not answered yet.
fn copy(grants: &mut dyn Grants, domain: DomId, batch: &mut CopyBatch) {
    if grants.copy(domain, batch).is_err() {
        // If it fails again, every copy is marked as failed.
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
