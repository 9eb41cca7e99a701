//! A migration of the model's guest: pages marked in the dirty log are copied, and all writes of the back-end must be
//! in the copy or in the log.
//!
//! It knows nothing about requests. Invariant: the guest's own writes are in the copy at once, as the hypervisor logs
//! them itself.

use std::os::fd::{AsFd, OwnedFd};

use memory::{GuestAddr, Mapping, Shared};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::Check;
use super::vhost_mock::{FrontEnd, REGION};

const PAGE: u64 = 4096;
/// The size of a log: a bit for each page of both regions.
const LOG_LEN: u64 = 2 * REGION / PAGE / 8;
/// The offset of a log in its file.
const LOG_AT: u64 = 8;

/// A dirty log sent to the back-end.
struct SentLog {
    file: OwnedFd,
    bytes: Shared,
}

impl SentLog {
    fn new() -> SentLog {
        let file = memfd_create("log", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, LOG_AT + LOG_LEN).unwrap();
        let bytes = Shared::of(Mapping::of_file(file.as_fd(), 0, (LOG_AT + LOG_LEN) as usize).unwrap());
        SentLog { file, bytes }
    }

    fn has(&self, page: u64) -> bool {
        let [byte] = self.bytes.read((LOG_AT + page / 8) as usize).unwrap();
        byte >> (page % 8) & 1 == 1
    }

    fn clear(&self, page: u64) {
        let at = (LOG_AT + page / 8) as usize;
        let [byte] = self.bytes.read(at).unwrap();
        self.bytes.write(at, [byte & !(1 << (page % 8))]).unwrap();
    }
}

/// A migration in progress.
pub struct Migration {
    /// All its logs; the last one is in use.
    logs: Vec<SentLog>,
}

impl Migration {
    /// Begins a migration with a first log.
    pub fn new() -> Migration {
        Migration { logs: vec![SentLog::new()] }
    }

    /// Replaces the log.
    pub fn replace_log(&mut self) {
        self.logs.push(SentLog::new());
    }

    /// Sends the log to the back-end.
    pub fn send_log(&self, front: &FrontEnd) {
        let log = self.logs.last().unwrap();
        front.send(6, 0, &[LOG_LEN, LOG_AT].map(u64::to_ne_bytes).concat(), &[log.file.as_fd()]);
    }

    /// Copies the logged pages, and checks that in `ranges` only bytes for which `may_differ` returns true differ.
    pub fn check(&self, front: &FrontEnd, ranges: &[(u64, u64)], may_differ: impl Fn(u64) -> bool) -> Check {
        let mut copy = front.copy.borrow_mut();
        let Some(copy) = copy.as_mut() else { return Ok(()) };
        for &(at, len) in ranges {
            let first = at / PAGE;
            for page in first..(at + len).div_ceil(PAGE) {
                let from = page * PAGE;
                let there = front.memory.segments([(GuestAddr(from), PAGE as u32)]).unwrap().to_vec();
                let copied = &mut copy[from as usize..(from + PAGE) as usize];
                let mut logs = self.logs.iter().filter(|log| log.has(page)).peekable();
                if logs.peek().is_some() {
                    logs.for_each(|log| log.clear(page));
                    copied.copy_from_slice(&there);
                    continue;
                }
                // The common case. Each step of each run is checked; comparing single bytes would dominate its time.
                if there == *copied {
                    continue;
                }
                let differs =
                    (from..).zip(there.iter().zip(copied.iter())).filter(|(_, (there, copied))| there != copied);
                let inside = |addr: &u64| (at..at + len).contains(addr);
                if let Some(addr) = differs.map(|(addr, _)| addr).filter(inside).find(|&addr| !may_differ(addr)) {
                    return Err(format!("{addr:#x} was written to and is not in the dirty log"));
                }
            }
        }
        Ok(())
    }
}
