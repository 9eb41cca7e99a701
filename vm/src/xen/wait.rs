//! Waits for changes in xenstore, with a time limit.
//!
//! It knows nothing about devices. Invariant: it sleeps until something has changed, and never polls.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use control::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use xen::Store;

use super::device::store_failed;

/// The token of our watches, of which one set is active at a time.
const TOKEN: &str = "tapline-wait";

/// The conditions that end a wait.
pub struct Wait<'a> {
    /// Nodes whose changes end the wait.
    pub paths: &'a [String],
    /// For how long.
    pub patience: Duration,
    /// A descriptor that also ends the wait when it is readable: a process that exits.
    pub also: Option<BorrowedFd<'a>>,
}

impl Wait<'_> {
    /// Checks at first and after every change, until there is a result or the time is up (`None`).
    pub fn until<T>(
        &self,
        store: &mut dyn Store,
        mut look: impl FnMut(&mut dyn Store) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        for path in self.paths {
            store.watch(path, TOKEN).map_err(store_failed)?;
        }
        let seen = self.looking(store, &mut look);
        for path in self.paths {
            store.unwatch(path, TOKEN).map_err(store_failed)?;
        }
        seen
    }

    fn looking<T>(
        &self,
        store: &mut dyn Store,
        look: &mut impl FnMut(&mut dyn Store) -> Result<Option<T>, Error>,
    ) -> Result<Option<T>, Error> {
        let until = Instant::now() + self.patience;
        loop {
            // Events are consumed before the check: a later change causes another one.
            while store.take_event().map_err(store_failed)?.is_some() {}
            if let Some(seen) = look(store)? {
                return Ok(Some(seen));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !self.sleep(store, left)? {
                return look(store);
            }
        }
    }

    /// Returns whether something happened before the time was up.
    fn sleep(&self, store: &dyn Store, at_most: Duration) -> Result<bool, Error> {
        let failed = |error: std::io::Error| Error::cannot("wait for xenstore", error);
        let mut fds = vec![PollFd::from_borrowed_fd(store.fd(), PollFlags::IN)];
        fds.extend(self.also.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = Timespec::try_from(at_most).map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
        match poll(&mut fds, Some(&timeout)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(failed(errno.into())),
        }
    }
}

/// Waits until a descriptor is readable; whether it was in time.
pub fn readable(fd: &impl AsFd, at_most: Duration) -> Result<bool, Error> {
    let failed = |error: std::io::Error| Error::cannot("wait for a process", error);
    let timeout = Timespec::try_from(at_most).map_err(|_| failed(std::io::ErrorKind::InvalidInput.into()))?;
    match poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)) {
        Ok(ready) => Ok(ready > 0),
        Err(errno) => Err(failed(errno.into())),
    }
}

#[cfg(test)]
mod test {
    use xen::DomId;
    use xen::fake::Host;

    use super::super::device::text;
    use super::*;

    #[test]
    fn a_write_by_another_client_ends_the_wait() {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        let paths = ["/a".to_owned()];
        let wait = Wait { paths: &paths, patience: Duration::from_secs(60), also: None };
        let mut other = Some(host.store(DomId(0)).unwrap());
        let seen = wait.until(&mut store, |store| {
            if let Some(mut other) = other.take() {
                // Written after the check, so that only the watch can report it.
                std::thread::spawn(move || other.write(None, "/a/b", b"1").unwrap());
                return Ok(None);
            }
            text(store, None, "/a/b")
        });
        assert_eq!(seen.unwrap().as_deref(), Some("1"));
        assert_eq!(host.counts().watched, 0);
    }

    #[test]
    fn a_timed_out_wait_removes_its_watch() {
        let host = Host::new().unwrap();
        let mut store = host.store(DomId(0)).unwrap();
        let paths = ["/a".to_owned()];
        let wait = Wait { paths: &paths, patience: Duration::ZERO, also: None };
        assert_eq!(wait.until(&mut store, |store| text(store, None, "/a")).unwrap(), None);
        assert_eq!(host.counts().watched, 0);
    }
}
