//! Signals as file descriptors that the disk's single wait can watch.
//!
//! A signal handler only writes one byte into a socket, and sets a flag if the process is to end.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::low_level::pipe;

/// Set when a request to end the process has arrived.
static STOPPING: OnceLock<Arc<AtomicBool>> = OnceLock::new();

/// Returns whether a request to end the process has arrived that [`Signal::to_stop`] receives.
pub fn is_stopping() -> bool {
    STOPPING.get().is_some_and(|stopping| stopping.load(Ordering::Relaxed))
}

/// A socket that becomes readable when one of its signals arrives.
#[derive(Debug)]
pub struct Signal {
    socket: UnixStream,
}

impl Signal {
    /// Receives requests to end the process: SIGTERM, SIGINT.
    pub fn to_stop() -> io::Result<Signal> {
        let stopping = STOPPING.get_or_init(Arc::default);
        for signal in [SIGTERM, SIGINT] {
            signal_hook::flag::register(signal, Arc::clone(stopping))?;
        }
        Signal::of(&[SIGTERM, SIGINT])
    }

    /// Receives requests for statistics: SIGUSR1.
    pub fn to_report() -> io::Result<Signal> {
        Signal::of(&[SIGUSR1])
    }

    /// Receives requests to exit and leave the guest's disk to another process: SIGUSR2.
    pub fn to_leave() -> io::Result<Signal> {
        Signal::of(&[SIGUSR2])
    }

    /// Makes one that arrives when the test writes to the socket, independent of other tests.
    #[cfg(test)]
    pub fn in_test() -> (Signal, UnixStream) {
        let (socket, write) = UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        (Signal { socket }, write)
    }

    fn of(signals: &[i32]) -> io::Result<Signal> {
        let (socket, write) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        for &signal in signals {
            pipe::register(signal, write.try_clone()?)?;
        }
        Ok(Signal { socket })
    }

    /// Returns whether one has arrived since the last call.
    pub fn take(&mut self) -> bool {
        let mut bytes = [0; 64];
        let mut arrived = false;
        while matches!(self.socket.read(&mut bytes), Ok(count) if count > 0) {
            arrived = true;
        }
        arrived
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Ignores SIGXFSZ. A write beyond the file size limit then fails with EFBIG, which can be reported to the request.
pub fn ignore_sigxfsz() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

/// Ignores SIGHUP. When the daemon dies, the kernel sends it to the group of a process that is stopped just then
/// (setpgid(2)), as by a debugger; the disk must not end with the daemon.
pub fn ignore_sighup() -> io::Result<()> {
    signal_hook::flag::register(SIGHUP, Arc::new(AtomicBool::new(false))).map(drop)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_signal_is_seen_once() {
        let mut signal = Signal::to_report().unwrap();
        assert!(!signal.take());
        signal_hook::low_level::raise(SIGUSR1).unwrap();
        assert!(signal.take());
        assert!(!signal.take());
    }
}
