//! Detects that a disk has been idle for a while.
//!
//! It knows no disk. Two checks are enough, however many requests come in between: the timer fires once, and is set
//! again only if there was a request since it was set. Invariant: soon after the last request, it no longer fires.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use transport::{Interest, Timer, Watch, WatchKey};

/// Longer than the pauses of a guest that writes its journal now and then, which should find things as it has left
/// them.
const WHILE: Duration = Duration::from_secs(10);

/// The wait for that.
#[derive(Debug, Default)]
pub struct Quiet {
    timer: Option<Timer>,
    /// Requests that had come when the timer was set, if it runs.
    came: Option<u64>,
}

impl Quiet {
    /// Whether the timer runs.
    pub fn is_waiting(&self) -> bool {
        self.came.is_some()
    }

    /// Has the timer run; so many requests have come by now.
    pub fn begin(&mut self, came: u64, watch: &mut dyn Watch, key: WatchKey) -> io::Result<()> {
        if self.timer.is_none() {
            let timer = Timer::new()?;
            watch.watch(timer.as_fd(), Interest::Read, key)?;
            self.timer = Some(timer);
        }
        self.set(came)
    }

    /// The timer has run out, perhaps. Whether the disk, `idle` now, was not used meanwhile; if it was, the timer runs
    /// again.
    pub fn is_over(&mut self, came: u64, idle: bool) -> io::Result<bool> {
        match self.came.take() {
            None => Ok(false),
            Some(before) if before == came && idle => Ok(true),
            Some(_) => self.set(came).map(|()| false),
        }
    }

    fn set(&mut self, came: u64) -> io::Result<()> {
        let Some(timer) = &self.timer else { return Ok(()) };
        timer.set(WHILE)?;
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
        assert!(!quiet.is_over(6, false).unwrap(), "something is under way");
        assert!(quiet.is_waiting() && quiet.is_over(6, true).unwrap());
    }

    #[test]
    fn an_idle_disk_has_no_timer_until_the_next_request() {
        let (mut quiet, mut watched) = (Quiet::default(), Watched::default());
        quiet.begin(5, &mut watched, KEY).unwrap();
        assert!(quiet.is_over(5, true).unwrap());
        assert!(!quiet.is_waiting() && !quiet.is_over(5, true).unwrap(), "a report may come once too often");
        quiet.begin(5, &mut watched, KEY).unwrap();
        assert!(quiet.is_waiting());
        assert_eq!(watched.0, 1, "it is watched once");
    }
}
