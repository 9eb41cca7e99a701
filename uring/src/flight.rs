//! One operation in flight, independent of the engine.
//!
//! The rules that both engines share: what to submit next ([`Flight::step`]) and what a result means
//! ([`Flight::settle`]). Short transfers are continued, interrupted ones repeated, unaligned memory is bounced, and
//! more parts than the kernel accepts are submitted in batches. It makes no system calls.
//!
//! Invariant: between a `step` and the `settle` that follows, nothing in the flight changes, and it does not move
//! (`flight_slab` keeps it in a slot of a fixed table): the kernel is using the parts handed out.

use disk::{Action, FileError, FileOffset, FileOp};
use memory::{Part, Segments};

use crate::bounce::{Bounce, BouncePool};
use crate::{Alignment, ImageFile};

/// `UIO_MAXIOV` of linux/uio.h: the maximum number of parts in one request.
const PARTS_MAX: usize = 1024;

/// The requirements of a file on its I/O.
#[derive(Clone, Copy, Debug)]
pub(crate) struct IoConstraints {
    pub(crate) alignment: Alignment,
    pub(crate) device_len: Option<u64>,
    pub(crate) least_len: u64,
    pub(crate) waits_for_pages: bool,
}

impl IoConstraints {
    pub(crate) fn of(file: &ImageFile) -> IoConstraints {
        IoConstraints {
            alignment: file.alignment(),
            device_len: file.device_len(),
            least_len: file.known_len().get(),
            waits_for_pages: file.waits_for_pages(),
        }
    }
}

/// The next request to the kernel.
#[derive(Debug)]
pub(crate) enum IoStep<'a> {
    /// Read from offset `at` into `parts`, at most 1024. `waits`: io_uring waits for the page cache without a worker
    /// thread.
    Read { at: u64, parts: &'a [Part], waits: bool },
    /// Write `parts`, at most 1024, to offset `at`.
    Write { at: u64, parts: &'a [Part] },
    /// Write through the page cache although the file is open with O_DIRECT. Nothing else is in flight on it.
    WriteCached { at: u64, parts: &'a [Part] },
    /// `fdatasync`.
    SyncData,
    /// Punch a hole, keeping the size.
    Deallocate { at: u64, len: u64 },
}

/// The memory of the current step.
enum StepBuffer {
    /// The operation's own memory.
    Whole,
    /// The remainder of it.
    Remainder(Box<Segments>),
    /// A bounce buffer for the remainder, or for the first part of it.
    Bounced(Bounce),
    /// The remainder of a write at the end of a file, which direct I/O could not do without extending the file.
    FileEnd(Box<Segments>),
}

/// A slot for an operation in flight. An operation is large: it is moved in once and out once.
pub(crate) struct Flight {
    op: Option<FileOp>,
    constraints: IoConstraints,
    /// Bytes transferred so far.
    moved: usize,
    /// Holds a bounce buffer only while there is an operation.
    buffer: StepBuffer,
}

impl Flight {
    /// An empty slot.
    pub(crate) fn empty() -> Flight {
        let constraints =
            IoConstraints { alignment: Alignment::NONE, device_len: None, least_len: 0, waits_for_pages: false };
        Flight { op: None, constraints, moved: 0, buffer: StepBuffer::Whole }
    }

    /// Takes in `op` and prepares its first step.
    #[inline(always)]
    pub(crate) fn begin(&mut self, op: FileOp, constraints: IoConstraints, pool: &mut BouncePool) {
        // Stated explicitly so that the compiler sees no drop here, for which it would copy the operation again.
        if self.op.is_some() {
            unreachable!("an operation is already in flight here");
        }
        let op = self.op.insert(op);
        let admitted = match &op.action {
            Action::Read { into: memory, .. } | Action::Write { from: memory, .. } => {
                constraints.alignment.admits(memory)
            }
            Action::SyncData | Action::Deallocate { .. } => true,
        };
        self.constraints = constraints;
        self.moved = 0;
        if !admitted {
            self.select_buffer(pool);
        }
    }

    /// Returns the operation when it has ended.
    #[inline(always)]
    pub(crate) fn end(&mut self) -> FileOp {
        match self.op.take() {
            Some(op) => op,
            None => unreachable!("nothing is in flight here"),
        }
    }

    /// The operation, if there is one.
    #[inline]
    pub(crate) fn op(&self) -> Option<&FileOp> {
        self.op.as_ref()
    }

    #[inline]
    fn action(&self) -> &Action {
        match &self.op {
            Some(op) => &op.action,
            None => unreachable!("nothing is in flight here"),
        }
    }

    /// The next request to submit. Its parts stay in place until the flight is settled.
    #[inline]
    pub(crate) fn step(&self) -> IoStep<'_> {
        // No file is that long, and io_uring takes an offset of -1 as the file's own position.
        let after = |at: FileOffset| at.0.saturating_add(as_u64(self.moved)).min(i64::MAX.unsigned_abs());
        match self.action() {
            Action::Read { at, into } => {
                IoStep::Read { at: after(*at), parts: self.parts(into), waits: self.constraints.waits_for_pages }
            }
            Action::Write { at, from } => match &self.buffer {
                StepBuffer::FileEnd(rest) => IoStep::WriteCached { at: after(*at), parts: capped(rest.parts()) },
                _ => IoStep::Write { at: after(*at), parts: self.parts(from) },
            },
            Action::SyncData => IoStep::SyncData,
            Action::Deallocate { at, len } => IoStep::Deallocate { at: at.0, len: *len },
        }
    }

    fn parts<'a>(&'a self, whole: &'a Segments) -> &'a [Part] {
        let parts = match &self.buffer {
            StepBuffer::Whole => whole.parts(),
            StepBuffer::Remainder(rest) | StepBuffer::FileEnd(rest) => rest.parts(),
            StepBuffer::Bounced(bounce) => bounce.memory().parts(),
        };
        capped(parts)
    }

    /// Processes the result of a step: a byte count, or a negative errno. Returns `None` if another step must be
    /// submitted.
    #[inline]
    pub(crate) fn settle(&mut self, result: i32, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        if self.is_all(result) { Some(Ok(())) } else { self.settle_part(result, pool) }
    }

    /// The common case: this many bytes complete a transfer that uses the operation's own memory.
    #[inline]
    fn is_all(&self, result: i32) -> bool {
        let (Action::Read { into: memory, .. } | Action::Write { from: memory, .. }) = self.action() else {
            return false;
        };
        matches!(self.buffer, StepBuffer::Whole) && usize::try_from(result) == Ok(memory.len()) && result > 0
    }

    fn settle_part(&mut self, result: i32, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let ended = match usize::try_from(result) {
            Ok(count) => match self.action() {
                Action::Read { .. } => self.read_completed(count, pool),
                Action::Write { .. } => self.write_completed(count, pool),
                Action::SyncData | Action::Deallocate { .. } => Some(Ok(())),
            },
            Err(_) => self.errno_result(-result),
        };
        if ended.is_some() {
            self.release(pool);
        }
        ended
    }

    /// `count` bytes were read.
    fn read_completed(&mut self, count: usize, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let Some(FileOp { action: Action::Read { at, into }, .. }) = &self.op else { return None };
        if let StepBuffer::Bounced(bounce) = &mut self.buffer {
            bounce.unload(&into.slice(self.moved, count));
        }
        self.moved += count;
        let left = into.len() - self.moved;
        if left == 0 {
            return Some(Ok(()));
        }
        // Direct I/O stops between blocks only at the end of the file, and cannot be continued from there.
        if count == 0 || self.moved % self.constraints.alignment.offset != 0 {
            if at.0.saturating_add(as_u64(self.moved)) < self.constraints.least_len {
                return Some(Err(FileError::Failed(libc::EIO)));
            }
            into.slice(self.moved, left).fill_zero();
            return Some(Ok(()));
        }
        self.select_buffer(pool);
        None
    }

    /// `count` bytes were written.
    fn write_completed(&mut self, count: usize, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let Action::Write { from, .. } = self.action() else { return None };
        let left = from.len() - self.moved - count;
        if left == 0 {
            return Some(Ok(()));
        }
        // Direct I/O can only be continued at a block boundary: a partial block is written again.
        let whole = match &self.buffer {
            StepBuffer::FileEnd(_) => count,
            _ => count - count % self.constraints.alignment.offset,
        };
        if whole == 0 {
            // Neither an error nor progress: the kernel would return the same result every time.
            return Some(Err(FileError::Failed(libc::EIO)));
        }
        self.moved += whole;
        self.select_buffer(pool);
        None
    }

    /// The kernel returned an errno.
    fn errno_result(&self, errno: i32) -> Option<Result<(), FileError>> {
        match errno {
            libc::EINTR | libc::EAGAIN => None,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Some(Err(FileError::NoSpace)),
            libc::EOPNOTSUPP | libc::ENOSYS => Some(Err(FileError::Unsupported)),
            libc::EINVAL if self.is_empty_deallocation() => Some(Ok(())),
            // A block device deallocates whole logical blocks only, also through the page cache (`blkdev_fallocate`):
            // it cannot deallocate this range, but may deallocate another.
            libc::EINVAL if self.is_deallocation() => Some(Err(FileError::Unsupported)),
            errno => Some(Err(FileError::Failed(errno))),
        }
    }

    /// fallocate(2) refuses an empty range, and one past the end of a block device (not of a file): neither has
    /// anything to deallocate.
    fn is_empty_deallocation(&self) -> bool {
        let Action::Deallocate { at, len } = *self.action() else { return false };
        len == 0 || self.constraints.device_len.is_some_and(|end| at.0 >= end)
    }

    fn is_deallocation(&self) -> bool {
        matches!(self.action(), Action::Deallocate { .. })
    }

    /// Selects the memory of the next step: all of the remainder, directly or through a bounce buffer.
    #[cold]
    fn select_buffer(&mut self, pool: &mut BouncePool) {
        self.release(pool);
        let Some(FileOp { action, .. }) = &self.op else { return };
        let (Action::Read { into: memory, .. } | Action::Write { from: memory, .. }) = action else { return };
        let left = memory.len() - self.moved;
        let admits = |memory: &Segments| self.constraints.alignment.admits(memory);
        if matches!(action, Action::Write { .. }) && memory.len() % self.constraints.alignment.offset != 0 {
            self.buffer = StepBuffer::FileEnd(Box::new(memory.slice(self.moved, left)));
            return;
        }
        self.buffer = match self.moved {
            0 if admits(memory) => StepBuffer::Whole,
            moved => match memory.slice(moved, left) {
                rest if admits(&rest) => StepBuffer::Remainder(Box::new(rest)),
                rest => {
                    let mut bounce = pool.take(left);
                    if matches!(action, Action::Write { .. }) {
                        bounce.load(&rest.slice(0, bounce.memory().len()));
                    }
                    StepBuffer::Bounced(bounce)
                }
            },
        };
    }

    #[inline]
    fn release(&mut self, pool: &mut BouncePool) {
        if matches!(self.buffer, StepBuffer::Whole) {
            return;
        }
        if let StepBuffer::Bounced(bounce) = std::mem::replace(&mut self.buffer, StepBuffer::Whole) {
            pool.give(bounce);
        }
    }
}

/// The first parts, as many as one request may have.
fn capped(parts: &[Part]) -> &[Part] {
    parts.get(..PARTS_MAX).unwrap_or(parts)
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use disk::{FileId, OpId};

    use super::*;

    const DIRECT: IoConstraints = IoConstraints {
        alignment: Alignment { memory: 512, offset: 512 },
        device_len: None,
        least_len: 0,
        waits_for_pages: false,
    };
    const BUFFERED: IoConstraints =
        IoConstraints { alignment: Alignment::NONE, device_len: None, least_len: 0, waits_for_pages: false };

    fn flight(action: Action, constraints: IoConstraints) -> (Flight, BouncePool) {
        let mut pool = BouncePool::default();
        let op = FileOp { id: OpId(1), file: FileId(0), action };
        let mut flight = Flight::empty();
        flight.begin(op, constraints, &mut pool);
        (flight, pool)
    }

    fn read_into(memory: &Segments) -> Action {
        Action::Read { at: FileOffset(4096), into: memory.clone() }
    }

    fn submitted(flight: &Flight) -> (u64, usize) {
        match flight.step() {
            IoStep::Read { at, parts, .. } | IoStep::Write { at, parts } | IoStep::WriteCached { at, parts } => {
                (at, parts.iter().map(Part::len).sum())
            }
            IoStep::SyncData => (0, 0),
            IoStep::Deallocate { at, .. } => (at, 0),
        }
    }

    #[test]
    fn a_short_read_is_continued_where_it_stopped() {
        let (mut flight, mut pool) = flight(read_into(&Segments::zeroed(4096)), DIRECT);
        assert_eq!(flight.settle(1024, &mut pool), None);
        assert_eq!(submitted(&flight), (5120, 3072));
        assert_eq!(flight.settle(3072, &mut pool), Some(Ok(())));
    }

    #[test]
    fn bytes_past_the_end_of_the_file_read_as_zero() {
        for (constraints, counts) in [(DIRECT, vec![700]), (DIRECT, vec![512, 0]), (BUFFERED, vec![700, 0])] {
            let memory = Segments::copy_of(&[7; 4096]);
            let (mut flight, mut pool) = flight(read_into(&memory), constraints);
            let ended: Vec<_> = counts.iter().map(|&count| flight.settle(count, &mut pool)).collect();
            assert_eq!(ended.last(), Some(&Some(Ok(()))));
            let kept = usize::try_from(counts[0]).unwrap();
            assert_eq!(memory.to_vec(), [vec![7; kept], vec![0; 4096 - kept]].concat());
        }
    }

    #[test]
    fn a_read_at_the_end_of_a_truncated_file_fails() {
        for (least_len, expected) in [(4608, Some(Ok(()))), (4609, Some(Err(FileError::Failed(libc::EIO))))] {
            let (mut flight, mut pool) =
                flight(read_into(&Segments::zeroed(4096)), IoConstraints { least_len, ..DIRECT });
            assert_eq!(flight.settle(512, &mut pool), None);
            assert_eq!(flight.settle(0, &mut pool), expected);
        }
    }

    #[test]
    fn a_short_direct_write_is_continued_at_a_block_boundary() {
        let action = Action::Write { at: FileOffset(0), from: Segments::zeroed(4096) };
        let (mut flight, mut pool) = flight(action, DIRECT);
        assert_eq!(flight.settle(1000, &mut pool), None);
        assert_eq!(submitted(&flight), (512, 3584));
        assert_eq!(flight.settle(3584, &mut pool), Some(Ok(())));
    }

    /// A sector on storage with larger sectors: the disk's aligner sends no other unaligned length.
    #[test]
    fn an_unaligned_end_of_a_file_is_written_through_the_page_cache() {
        let constraints = IoConstraints {
            alignment: Alignment { memory: 512, offset: 4096 },
            device_len: None,
            least_len: 0,
            waits_for_pages: false,
        };
        let (mut flight, mut pool) =
            flight(Action::Write { at: FileOffset(4096), from: Segments::zeroed(1024) }, constraints);
        assert!(matches!(flight.step(), IoStep::WriteCached { at: 4096, parts } if parts.len() == 1));
        assert_eq!(flight.settle(700, &mut pool), None);
        assert!(matches!(flight.step(), IoStep::WriteCached { .. }));
        assert_eq!(submitted(&flight), (4796, 324));
        assert_eq!(flight.settle(324, &mut pool), Some(Ok(())));
    }

    #[test]
    fn a_write_without_progress_fails() {
        let (mut flight, mut pool) = flight(Action::Write { at: FileOffset(0), from: Segments::zeroed(4096) }, DIRECT);
        assert_eq!(flight.settle(0, &mut pool), Some(Err(FileError::Failed(libc::EIO))));
    }

    #[test]
    fn an_interrupted_step_is_repeated() {
        let (mut flight, mut pool) = flight(read_into(&Segments::zeroed(512)), DIRECT);
        assert_eq!(flight.settle(-libc::EINTR, &mut pool), None);
        assert_eq!(flight.settle(-libc::EAGAIN, &mut pool), None);
        assert_eq!(submitted(&flight), (4096, 512));
    }

    #[test]
    fn unaligned_memory_is_bounced_and_aligned_memory_is_not() {
        let memory = Segments::zeroed(8192);
        let (aligned, _) = flight(read_into(&memory.slice(512, 4096)), DIRECT);
        let (unaligned, _) = flight(read_into(&memory.slice(100, 4096)), DIRECT);
        let (buffered, _) = flight(read_into(&memory.slice(100, 4096)), BUFFERED);
        assert!(matches!(aligned.buffer, StepBuffer::Whole));
        assert!(matches!(unaligned.buffer, StepBuffer::Bounced(_)));
        assert!(matches!(buffered.buffer, StepBuffer::Whole));
    }

    #[test]
    fn a_large_unaligned_write_uses_several_bounce_buffers_in_turn() {
        let memory = Segments::zeroed((3 << 20) + 512);
        let from = memory.slice(1, 3 << 20);
        let (mut flight, mut pool) = flight(Action::Write { at: FileOffset(0), from }, DIRECT);
        assert_eq!(flight.settle(1 << 20, &mut pool), None);
        assert_eq!(submitted(&flight), (1 << 20, 1 << 20));
        assert_eq!(flight.settle(1 << 20, &mut pool), None);
        assert_eq!(flight.settle(1 << 20, &mut pool), Some(Ok(())));
    }

    #[test]
    fn more_parts_than_the_kernel_accepts_are_submitted_in_batches() {
        let owner = memory::Buffer::zeroed(1500 * 512);
        let base = owner.base();
        // SAFETY: every part is within the buffer, which the list owns.
        let memory = unsafe { Segments::new(owner, (0..1500).map(|part| (base.wrapping_add(part * 512), 512))) };
        let (mut flight, mut pool) = flight(read_into(&memory), DIRECT);
        assert_eq!(submitted(&flight), (4096, 1024 * 512));
        assert_eq!(flight.settle(1024 * 512, &mut pool), None);
        assert_eq!(submitted(&flight), (4096 + 1024 * 512, 476 * 512));
    }

    #[test]
    fn an_errno_is_mapped_to_a_file_error() {
        let outcome = |errno: i32| {
            let (mut flight, mut pool) = flight(Action::Deallocate { at: FileOffset(0), len: 512 }, DIRECT);
            flight.settle(-errno, &mut pool)
        };
        assert_eq!(outcome(libc::ENOSPC), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EDQUOT), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EFBIG), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EOPNOTSUPP), Some(Err(FileError::Unsupported)));
        assert_eq!(outcome(libc::EIO), Some(Err(FileError::Failed(libc::EIO))));
    }

    #[test]
    fn a_refused_deallocation_is_unsupported_and_a_refused_read_fails() {
        let errno_result = |action| {
            let (mut flight, mut pool) = flight(action, BUFFERED);
            flight.settle(-libc::EINVAL, &mut pool)
        };
        let range = Action::Deallocate { at: FileOffset(512), len: 512 };
        assert_eq!(errno_result(range), Some(Err(FileError::Unsupported)));
        assert_eq!(errno_result(read_into(&Segments::zeroed(512))), Some(Err(FileError::Failed(libc::EINVAL))));
    }

    #[test]
    fn deallocating_past_the_end_of_a_device_succeeds() {
        let device = IoConstraints { device_len: Some(1 << 20), ..DIRECT };
        let (mut flight, mut pool) = flight(Action::Deallocate { at: FileOffset(1 << 20), len: 512 }, device);
        assert_eq!(flight.settle(-libc::EINVAL, &mut pool), Some(Ok(())));
    }
}
