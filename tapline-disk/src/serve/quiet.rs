//! Detects that a disk has been idle for a while.
//!
//! It knows no disk. Two checks are enough for any number of requests: the timer fires once, and is set again only if
//! there was a request since it was set. Invariant: soon after the last request, it no longer fires.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use transport::{Interest, Timer, Watch, WatchKey};

/// Longer than the pauses of a guest that writes its journal at times, which should find its memory as it has left it.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// The idle timer of a disk.
#[derive(Debug, Default)]
pub struct Quiet {
    timer: Option<Timer>,
    /// The number of requests when the timer was set, if it runs.
    came: Option<u64>,
}

impl Quiet {
    /// Returns whether the timer runs.
    pub fn is_waiting(&self) -> bool {
        self.came.is_some()
    }

    /// Starts the timer; `came` is the number of requests so far.
    pub fn begin(&mut self, came: u64, watch: &mut dyn Watch, key: WatchKey) -> io::Result<()> {
        if self.timer.is_none() {
            let timer = Timer::new()?;
            watch.watch(timer.as_fd(), Interest::Read, key)?;
            self.timer = Some(timer);
        }
        self.set(came)
    }

    /// Called when the timer may have expired. Returns whether the disk, which is `idle` now, was not used meanwhile;
    /// if it was, the timer is started again.
    pub fn is_over(&mut self, came: u64, idle: bool) -> io::Result<bool> {
        match self.came.take() {
            None => Ok(false),
            Some(before) if before == came && idle => Ok(true),
            Some(_) => self.set(came).map(|()| false),
        }
    }

    fn set(&mut self, came: u64) -> io::Result<()> {
        let Some(timer) = &self.timer else { return Ok(()) };
        timer.set(IDLE_TIME)?;
        self.came = Some(came);
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use std::os::fd::BorrowedFd;

    use super::*;

    const KEY: WatchKey = WatchKey(1);

    #[derive(Default)]
    struct Watched(u32);

    impl Watch for Watched {
        fn watch(&mut self, _: BorrowedFd<'_>, _: Interest, _: WatchKey) -> io::Result<()> {
            self.0 += 1;
            Ok(())
        }

        fn forget(&mut self, _: WatchKey) {}
    }

    #[test]
    fn a_disk_is_idle_if_no_request_came_while_the_timer_ran() {
        let (mut quiet, mut watched) = (Quiet::default(), Watched::default());
        quiet.begin(5, &mut watched, KEY).unwrap();
        assert!(quiet.is_waiting());
        assert!(!quiet.is_over(6, true).unwrap(), "something came");
        assert!(!quiet.is_over(6, false).unwrap(), "something is in flight");
        assert!(quiet.is_waiting() && quiet.is_over(6, true).unwrap());
    }

    #[test]
    fn an_idle_disk_has_no_timer_until_the_next_request() {
        let (mut quiet, mut watched) = (Quiet::default(), Watched::default());
        quiet.begin(5, &mut watched, KEY).unwrap();
        assert!(quiet.is_over(5, true).unwrap());
        assert!(!quiet.is_waiting() && !quiet.is_over(5, true).unwrap(), "a spurious event is ignored");
        quiet.begin(5, &mut watched, KEY).unwrap();
        assert!(quiet.is_waiting());
        assert_eq!(watched.0, 1, "it is watched once");
    }
}
