//! One operation on its way through the kernel, whichever engine carries it.
//!
//! Here are the rules that both engines share: what to submit next ([`Flight::step`]) and what a result means
//! ([`Flight::settle`]). Short transfers are continued, interrupted ones repeated, unaligned memory is bounced, more
//! parts than the kernel takes are submitted in turns. It knows no system call.
//!
//! Invariant: between a `step` and the `settle` that follows it nothing in the flight changes, and it is not moved
//! (`flights` keeps it in a slot of a fixed table): the parts handed out are in use by the kernel.

use disk::{Action, FileError, FileOp};
use memory::{Part, Segments};

use crate::bounce::{Bounce, BouncePool};
use crate::{Alignment, ImageFile};

/// `UIO_MAXIOV` of linux/uio.h: the most parts that one request may have.
const PARTS_MAX: usize = 1024;

/// What a file demands of I/O on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) alignment: Alignment,
    pub(crate) device_len: Option<u64>,
}

impl Terms {
    pub(crate) fn of(file: &ImageFile) -> Terms {
        Terms { alignment: file.alignment(), device_len: file.device_len() }
    }
}

/// What to ask of the kernel next.
#[derive(Debug)]
pub(crate) enum Step<'a> {
    /// Read from offset `at` into `parts`, at most 1024.
    Read { at: u64, parts: &'a [Part] },
    /// Write `parts`, at most 1024, to offset `at`.
    Write { at: u64, parts: &'a [Part] },
    /// The same through the page cache, though the file is open with O_DIRECT. Nothing else is under way on it.
    WriteCached { at: u64, parts: &'a [Part] },
    /// `fdatasync`.
    SyncData,
    /// Punch a hole, keeping the size.
    Deallocate { at: u64, len: u64 },
}

/// The memory that the kernel is given.
enum Window {
    /// That of the operation.
    Whole,
    /// What is left of it.
    Rest(Box<Segments>),
    /// A stand-in for what is left of it, or the beginning of that.
    Bounced(Bounce),
    /// What is left of it: the end of a file, which direct I/O cannot write without making the file longer.
    End(Box<Segments>),
}

/// A place for an operation in flight. An operation is large: it is moved in once and out once.
pub(crate) struct Flight {
    op: Option<FileOp>,
    terms: Terms,
    /// Bytes of the operation's memory that are done.
    moved: usize,
    /// Holds a bounce only while there is an operation.
    window: Window,
}

impl Flight {
    /// Without an operation.
    pub(crate) fn vacant() -> Flight {
        let terms = Terms { alignment: Alignment::NONE, device_len: None };
        Flight { op: None, terms, moved: 0, window: Window::Whole }
    }

    /// Takes `op` in, and prepares it for its first step.
    #[inline(always)]
    pub(crate) fn begin(&mut self, op: FileOp, terms: Terms, pool: &mut BouncePool) {
        // Said so that nothing is seen to be dropped there, for which the operation would be copied once more.
        if self.op.is_some() {
            unreachable!("something is in flight here");
        }
        let op = self.op.insert(op);
        let admitted = match &op.action {
            Action::Read { into: memory, .. } | Action::Write { from: memory, .. } => terms.alignment.admits(memory),
            Action::SyncData | Action::Deallocate { .. } => true,
        };
        self.terms = terms;
        self.moved = 0;
        if !admitted {
            self.aim(pool);
        }
    }

    /// Gives the operation back, when it has ended.
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

    /// What to submit. The parts stay where they are until the flight is settled.
    #[inline]
    pub(crate) fn step(&self) -> Step<'_> {
        // No file reaches that far, and io_uring takes an offset of -1 for the file's own position.
        let after = |at: u64| at.saturating_add(as_u64(self.moved)).min(i64::MAX.unsigned_abs());
        match self.action() {
            Action::Read { at, into } => Step::Read { at: after(*at), parts: self.parts(into) },
            Action::Write { at, from } => match &self.window {
                Window::End(rest) => Step::WriteCached { at: after(*at), parts: first(rest.parts()) },
                _ => Step::Write { at: after(*at), parts: self.parts(from) },
            },
            Action::SyncData => Step::SyncData,
            Action::Deallocate { at, len } => Step::Deallocate { at: *at, len: *len },
        }
    }

    fn parts<'a>(&'a self, whole: &'a Segments) -> &'a [Part] {
        let parts = match &self.window {
            Window::Whole => whole.parts(),
            Window::Rest(rest) | Window::End(rest) => rest.parts(),
            Window::Bounced(bounce) => bounce.memory().parts(),
        };
        first(parts)
    }

    /// Takes the result of a step: a count, or an errno as a negative number. `None`: not at the end yet, submit
    /// again.
    #[inline]
    pub(crate) fn settle(&mut self, result: i32, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        if self.is_all(result) { Some(Ok(())) } else { self.settle_part(result, pool) }
    }

    /// Whether so many bytes are all of a transfer, in the memory that it came with: as nearly always.
    #[inline]
    fn is_all(&self, result: i32) -> bool {
        let (Action::Read { into: memory, .. } | Action::Write { from: memory, .. }) = self.action() else {
            return false;
        };
        matches!(self.window, Window::Whole) && usize::try_from(result) == Ok(memory.len()) && result > 0
    }

    fn settle_part(&mut self, result: i32, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let ended = match usize::try_from(result) {
            Ok(count) => match self.action() {
                Action::Read { .. } => self.filled(count, pool),
                Action::Write { .. } => self.stored(count, pool),
                Action::SyncData | Action::Deallocate { .. } => Some(Ok(())),
            },
            Err(_) => self.refused(result.saturating_neg()),
        };
        if ended.is_some() {
            self.release(pool);
        }
        ended
    }

    /// `count` bytes were read.
    fn filled(&mut self, count: usize, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let Some(FileOp { action: Action::Read { into, .. }, .. }) = &self.op else { return None };
        if let Window::Bounced(bounce) = &mut self.window {
            bounce.unload(&into.slice(self.moved, count));
        }
        self.moved = self.moved.saturating_add(count);
        let left = into.len().saturating_sub(self.moved);
        if left == 0 {
            return Some(Ok(()));
        }
        // Direct I/O stops between blocks only at the end of the file, and could not be continued from there.
        if count == 0 || self.moved % self.terms.alignment.offset != 0 {
            into.slice(self.moved, left).fill_zero();
            return Some(Ok(()));
        }
        self.aim(pool);
        None
    }

    /// `count` bytes were written.
    fn stored(&mut self, count: usize, pool: &mut BouncePool) -> Option<Result<(), FileError>> {
        let Action::Write { from, .. } = self.action() else { return None };
        let left = from.len().saturating_sub(self.moved).saturating_sub(count);
        if left == 0 {
            return Some(Ok(()));
        }
        // Direct I/O can only be continued from a block's start: a part of a block is written again.
        let whole = match &self.window {
            Window::End(_) => count,
            _ => count.saturating_sub(count % self.terms.alignment.offset),
        };
        if whole == 0 {
            // Neither an error nor progress: the kernel would answer the same for ever.
            return Some(Err(FileError::Failed(libc::EIO)));
        }
        self.moved = self.moved.saturating_add(whole);
        self.aim(pool);
        None
    }

    /// The kernel answered with an errno.
    fn refused(&self, errno: i32) -> Option<Result<(), FileError>> {
        match errno {
            libc::EINTR | libc::EAGAIN => None,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Some(Err(FileError::NoSpace)),
            libc::EOPNOTSUPP | libc::ENOSYS => Some(Err(FileError::Unsupported)),
            libc::EINVAL if self.frees_nothing() => Some(Ok(())),
            // A block device frees whole logical blocks only, also through the page cache (`blkdev_fallocate`): of
            // this range it cannot, of another it may.
            libc::EINVAL if self.deallocates() => Some(Err(FileError::Unsupported)),
            errno => Some(Err(FileError::Failed(errno))),
        }
    }

    /// fallocate(2) refuses an empty range, and one behind the end of a block device (not of a file): there is
    /// nothing to free in either.
    fn frees_nothing(&self) -> bool {
        let Action::Deallocate { at, len } = *self.action() else { return false };
        len == 0 || self.terms.device_len.is_some_and(|end| at >= end)
    }

    fn deallocates(&self) -> bool {
        matches!(self.action(), Action::Deallocate { .. })
    }

    /// Chooses the memory of the next step: all that is left, as it is or through a bounce.
    #[cold]
    fn aim(&mut self, pool: &mut BouncePool) {
        self.release(pool);
        let Some(FileOp { action, .. }) = &self.op else { return };
        let (Action::Read { into: memory, .. } | Action::Write { from: memory, .. }) = action else { return };
        let left = memory.len().saturating_sub(self.moved);
        let admits = |memory: &Segments| self.terms.alignment.admits(memory);
        if matches!(action, Action::Write { .. }) && memory.len() % self.terms.alignment.offset != 0 {
            self.window = Window::End(Box::new(memory.slice(self.moved, left)));
            return;
        }
        self.window = match self.moved {
            0 if admits(memory) => Window::Whole,
            moved => match memory.slice(moved, left) {
                rest if admits(&rest) => Window::Rest(Box::new(rest)),
                rest => {
                    let mut bounce = pool.take(left);
                    if matches!(action, Action::Write { .. }) {
                        bounce.load(&rest.slice(0, bounce.memory().len()));
                    }
                    Window::Bounced(bounce)
                }
            },
        };
    }

    #[inline]
    fn release(&mut self, pool: &mut BouncePool) {
        if matches!(self.window, Window::Whole) {
            return;
        }
        if let Window::Bounced(bounce) = std::mem::replace(&mut self.window, Window::Whole) {
            pool.give(bounce);
        }
    }
}

/// As many as one request may have.
fn first(parts: &[Part]) -> &[Part] {
    parts.get(..PARTS_MAX).unwrap_or(parts)
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod test {
    use disk::{FileId, OpId};

    use super::*;

    const DIRECT: Terms = Terms { alignment: Alignment { memory: 512, offset: 512 }, device_len: None };
    const BUFFERED: Terms = Terms { alignment: Alignment::NONE, device_len: None };

    fn flight(action: Action, terms: Terms) -> (Flight, BouncePool) {
        let mut pool = BouncePool::default();
        let op = FileOp { id: OpId(1), file: FileId(0), action };
        let mut flight = Flight::vacant();
        flight.begin(op, terms, &mut pool);
        (flight, pool)
    }

    fn read_into(memory: &Segments) -> Action {
        Action::Read { at: 4096, into: memory.clone() }
    }

    fn submitted(flight: &Flight) -> (u64, usize) {
        match flight.step() {
            Step::Read { at, parts } | Step::Write { at, parts } | Step::WriteCached { at, parts } => {
                (at, parts.iter().map(Part::len).sum())
            }
            Step::SyncData => (0, 0),
            Step::Deallocate { at, .. } => (at, 0),
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
    fn bytes_behind_the_end_of_the_file_read_as_zero() {
        for (terms, counts) in [(DIRECT, vec![700]), (DIRECT, vec![512, 0]), (BUFFERED, vec![700, 0])] {
            let memory = Segments::copy_of(&[7; 4096]);
            let (mut flight, mut pool) = flight(read_into(&memory), terms);
            let ended: Vec<_> = counts.iter().map(|&count| flight.settle(count, &mut pool)).collect();
            assert_eq!(ended.last(), Some(&Some(Ok(()))));
            let kept = usize::try_from(counts[0]).unwrap();
            assert_eq!(memory.to_vec(), [vec![7; kept], vec![0; 4096 - kept]].concat());
        }
    }

    #[test]
    fn a_short_direct_write_is_continued_from_a_block() {
        let action = Action::Write { at: 0, from: Segments::zeroed(4096) };
        let (mut flight, mut pool) = flight(action, DIRECT);
        assert_eq!(flight.settle(1000, &mut pool), None);
        assert_eq!(submitted(&flight), (512, 3584));
        assert_eq!(flight.settle(3584, &mut pool), Some(Ok(())));
    }

    /// A sector on storage of larger ones: the disk's aligner sends no other.
    #[test]
    fn the_end_of_a_file_is_written_through_the_page_cache_as_it_is() {
        let terms = Terms { alignment: Alignment { memory: 512, offset: 4096 }, device_len: None };
        let (mut flight, mut pool) = flight(Action::Write { at: 4096, from: Segments::zeroed(1024) }, terms);
        assert!(matches!(flight.step(), Step::WriteCached { at: 4096, parts } if parts.len() == 1));
        assert_eq!(flight.settle(700, &mut pool), None);
        assert!(matches!(flight.step(), Step::WriteCached { .. }));
        assert_eq!(submitted(&flight), (4796, 324));
        assert_eq!(flight.settle(324, &mut pool), Some(Ok(())));
    }

    #[test]
    fn a_write_that_never_gets_on_fails() {
        let (mut flight, mut pool) = flight(Action::Write { at: 0, from: Segments::zeroed(4096) }, DIRECT);
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
        assert!(matches!(aligned.window, Window::Whole));
        assert!(matches!(unaligned.window, Window::Bounced(_)));
        assert!(matches!(buffered.window, Window::Whole));
    }

    #[test]
    fn a_large_unaligned_write_passes_through_bounces_in_turns() {
        let memory = Segments::zeroed((3 << 20) + 512);
        let from = memory.slice(1, 3 << 20);
        let (mut flight, mut pool) = flight(Action::Write { at: 0, from }, DIRECT);
        assert_eq!(flight.settle(1 << 20, &mut pool), None);
        assert_eq!(submitted(&flight), (1 << 20, 1 << 20));
        assert_eq!(flight.settle(1 << 20, &mut pool), None);
        assert_eq!(flight.settle(1 << 20, &mut pool), Some(Ok(())));
    }

    #[test]
    fn more_parts_than_the_kernel_takes_go_in_turns() {
        let owner = memory::Buffer::zeroed(1500 * 512);
        let base = owner.base();
        // SAFETY: every part lies in the buffer, which the list owns.
        let memory = unsafe { Segments::new(owner, (0..1500).map(|part| (base.wrapping_add(part * 512), 512))) };
        let (mut flight, mut pool) = flight(read_into(&memory), DIRECT);
        assert_eq!(submitted(&flight), (4096, 1024 * 512));
        assert_eq!(flight.settle(1024 * 512, &mut pool), None);
        assert_eq!(submitted(&flight), (4096 + 1024 * 512, 476 * 512));
    }

    #[test]
    fn an_errno_becomes_the_error_that_the_disk_knows() {
        let outcome = |errno: i32| {
            let (mut flight, mut pool) = flight(Action::Deallocate { at: 0, len: 512 }, DIRECT);
            flight.settle(-errno, &mut pool)
        };
        assert_eq!(outcome(libc::ENOSPC), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EDQUOT), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EFBIG), Some(Err(FileError::NoSpace)));
        assert_eq!(outcome(libc::EOPNOTSUPP), Some(Err(FileError::Unsupported)));
        assert_eq!(outcome(libc::EIO), Some(Err(FileError::Failed(libc::EIO))));
    }

    #[test]
    fn a_range_that_cannot_be_deallocated_is_unsupported_and_one_that_cannot_be_read_has_failed() {
        let refused = |action| {
            let (mut flight, mut pool) = flight(action, BUFFERED);
            flight.settle(-libc::EINVAL, &mut pool)
        };
        let range = Action::Deallocate { at: 512, len: 512 };
        assert_eq!(refused(range), Some(Err(FileError::Unsupported)));
        assert_eq!(refused(read_into(&Segments::zeroed(512))), Some(Err(FileError::Failed(libc::EINVAL))));
    }

    #[test]
    fn deallocating_behind_the_end_of_a_device_succeeds() {
        let device = Terms { device_len: Some(1 << 20), ..DIRECT };
        let (mut flight, mut pool) = flight(Action::Deallocate { at: 1 << 20, len: 512 }, device);
        assert_eq!(flight.settle(-libc::EINVAL, &mut pool), Some(Ok(())));
    }
}
