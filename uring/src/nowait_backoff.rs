//! Backoff for non-blocking transfers on files that keep refusing them.
//!
//! A transfer is first submitted on the condition that it does not block (RWF_NOWAIT). Some storage never supports that
//! (tmpfs), some not at the moment (a write that allocates). After a refusal, non-blocking attempts are skipped for a
//! while, which doubles with each refusal up to 63 transfers; a success ends the backoff.
//!
//! This affects cost only: either choice is always correct.

use disk::FileId;

use crate::file_table::FILES_MAX;

/// A file, and whether the transfer is a write.
pub(crate) type Transfer = (FileId, bool);

/// The maximum number of transfers that skip the attempt.
const SKIP_MAX: u8 = 63;

/// The backoff of one direction on one file.
#[derive(Clone, Copy, Default)]
struct Backoff {
    /// The number of transfers that skip the attempt after a refusal.
    skip: u8,
    /// The number of these that remain.
    left: u8,
}

/// The backoff of reads and writes of a file.
#[derive(Clone, Copy, Default)]
struct FileBackoff {
    reads: Backoff,
    writes: Backoff,
}

/// The backoff of all files of an engine.
pub(crate) struct NowaitBackoff {
    files: Box<[FileBackoff; FILES_MAX]>,
    is_active: bool,
}

impl NowaitBackoff {
    pub(crate) fn new() -> NowaitBackoff {
        NowaitBackoff { files: Box::new([FileBackoff::default(); FILES_MAX]), is_active: false }
    }

    /// Returns true if a transfer was ever refused. Usually none was, and there is nothing to check or record.
    #[inline]
    pub(crate) fn is_active(&self) -> bool {
        self.is_active
    }

    /// Returns true if the transfer should be tried without blocking.
    pub(crate) fn should_try(&mut self, (file, write): Transfer) -> bool {
        let Some(state) = self.state((file, write)) else { return true };
        let should_try = state.left == 0;
        state.left = state.left.saturating_sub(1);
        should_try
    }

    /// Records that the kernel would have had to block. A read that was refused with EAGAIN has started what it would
    /// wait for (the page cache reads ahead), so the attempt was worthwhile: no backoff.
    pub(crate) fn record_refusal(&mut self, (file, write): Transfer, errno: i32) {
        if !write && errno == libc::EAGAIN {
            return;
        }
        self.is_active = true;
        let Some(state) = self.state((file, write)) else { return };
        // Transfers that were submitted together are refused together, which counts as one refusal.
        if state.left == 0 {
            state.skip = (state.skip * 2 + 1).min(SKIP_MAX);
            state.left = state.skip;
        }
    }

    /// Records that the kernel accepted a transfer.
    pub(crate) fn record_success(&mut self, transfer: Transfer) {
        if let Some(state) = self.state(transfer) {
            *state = Backoff::default();
        }
    }

    /// Resets the state of a file id that now refers to another file.
    pub(crate) fn reset(&mut self, file: FileId) {
        if let Some(entry) = self.files.get_mut(usize::from(file.0)) {
            *entry = FileBackoff::default();
        }
    }

    fn state(&mut self, (file, write): Transfer) -> Option<&mut Backoff> {
        let entry = self.files.get_mut(usize::from(file.0))?;
        Some(if write { &mut entry.writes } else { &mut entry.reads })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const FILE: FileId = FileId(3);

    /// The number of transfers that skip the attempt before the next one tries it.
    fn count_skipped(backoff: &mut NowaitBackoff, write: bool) -> usize {
        (0..).find(|_| backoff.should_try((FILE, write))).unwrap()
    }

    #[test]
    fn repeated_refusals_double_the_backoff_up_to_a_limit() {
        let mut backoff = NowaitBackoff::new();
        let seen: Vec<usize> = (0..9)
            .map(|_| {
                backoff.record_refusal((FILE, true), libc::EAGAIN);
                count_skipped(&mut backoff, true)
            })
            .collect();
        assert_eq!(seen, [1, 3, 7, 15, 31, 63, 63, 63, 63]);
        assert_eq!(count_skipped(&mut backoff, false), 0);
        assert!(backoff.should_try((FileId(4), true)));
    }

    #[test]
    fn refusals_of_one_batch_count_once() {
        let mut backoff = NowaitBackoff::new();
        for _ in 0..32 {
            backoff.record_refusal((FILE, true), libc::EAGAIN);
        }
        assert_eq!(count_skipped(&mut backoff, true), 1);
    }

    #[test]
    fn a_success_ends_the_backoff() {
        let mut backoff = NowaitBackoff::new();
        backoff.record_refusal((FILE, true), libc::EOPNOTSUPP);
        backoff.record_success((FILE, true));
        assert_eq!(count_skipped(&mut backoff, true), 0);
    }

    #[test]
    fn a_read_that_waits_for_the_page_cache_is_tried_again() {
        let mut backoff = NowaitBackoff::new();
        backoff.record_refusal((FILE, false), libc::EAGAIN);
        assert_eq!(count_skipped(&mut backoff, false), 0);
        backoff.record_refusal((FILE, false), libc::EOPNOTSUPP);
        assert_eq!(count_skipped(&mut backoff, false), 1);
    }

    #[test]
    fn a_new_file_starts_without_backoff() {
        let mut backoff = NowaitBackoff::new();
        backoff.record_refusal((FILE, true), libc::EAGAIN);
        backoff.reset(FILE);
        assert_eq!(count_skipped(&mut backoff, true), 0);
    }
}
