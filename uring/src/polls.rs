//! The file descriptors watched through io_uring, by multishot POLL_ADD: one completion per wake-up.
//!
//! It does the bookkeeping and submits nothing. Each watch has its own id, so that a late completion of a watch that
//! was removed or replaced is recognised. It holds its own duplicate of each descriptor: a caller may close its
//! descriptor too early.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// The id of one watch, never reused.
pub(crate) type PollId = u64;

struct Poll {
    key: u64,
    fd: OwnedFd,
    events: u32,
}

/// All watches of one ring.
#[derive(Default)]
pub(crate) struct Polls {
    by_id: BTreeMap<PollId, Poll>,
    next: PollId,
}

/// A watch for which a completion was posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fired {
    pub(crate) key: u64,
    /// The multishot has ended and must be armed again.
    pub(crate) ended: bool,
}

impl Polls {
    /// Adds a watch, to be armed under the returned id.
    pub(crate) fn add(&mut self, fd: OwnedFd, write: bool, key: u64) -> PollId {
        let id = self.next;
        self.next = self.next.wrapping_add(1);
        self.by_id.insert(id, Poll { key, fd, events: events(write) });
        id
    }

    /// Removes the watch of `key`; returns the id to disarm.
    pub(crate) fn remove(&mut self, key: u64) -> Option<PollId> {
        let id = self.by_id.iter().find(|(_, poll)| poll.key == key).map(|(&id, _)| id)?;
        self.by_id.remove(&id);
        Some(id)
    }

    /// The descriptor and events to arm for an id, unless the watch was removed meanwhile.
    pub(crate) fn get(&self, id: PollId) -> Option<(RawFd, u32)> {
        self.by_id.get(&id).map(|poll| (poll.fd.as_raw_fd(), poll.events))
    }

    /// Processes a completion; `more` is set if the multishot continues. Returns `None` if the watch was removed
    /// meanwhile.
    pub(crate) fn fired(&mut self, id: PollId, result: i32, more: bool) -> Option<Fired> {
        let key = self.by_id.get(&id)?.key;
        if result < 0 && result != -libc::ECANCELED {
            // Arming it again would fail again. The owner gets one report, and finds the cause when it reads.
            self.by_id.remove(&id);
            return Some(Fired { key, ended: false });
        }
        Some(Fired { key, ended: !more })
    }
}

fn events(write: bool) -> u32 {
    let bits = libc::EPOLLIN | libc::EPOLLRDHUP | if write { libc::EPOLLOUT } else { 0 };
    bits.unsigned_abs()
}
