//! Signals as file descriptors that the disk's single wait can watch.
//!
//! A handler does nothing but write one byte into a socket.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXFSZ};
use signal_hook::low_level::pipe;

/// A socket that becomes readable when one of its signals has come.
#[derive(Debug)]
pub struct Signal {
    socket: UnixStream,
}

impl Signal {
    /// The wish that this process ends: SIGTERM, SIGINT.
    pub fn to_stop() -> io::Result<Signal> {
        Signal::of(&[SIGTERM, SIGINT])
    }

    /// The wish for statistics: SIGUSR1.
    pub fn to_report() -> io::Result<Signal> {
        Signal::of(&[SIGUSR1])
    }

    /// The request to exit and leave the guest's disk to another process: SIGUSR2.
    pub fn to_leave() -> io::Result<Signal> {
        Signal::of(&[SIGUSR2])
    }

    /// One that comes when something is written, as no other test's does.
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

    /// Whether it has arrived since the last call.
    pub fn take(&mut self) -> bool {
        let mut bytes = [0; 64];
        let mut come = false;
        while matches!(self.socket.read(&mut bytes), Ok(count) if count > 0) {
            come = true;
        }
        come
    }
}

impl AsFd for Signal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A write beyond the file size limit fails with EFBIG, which a request can be answered with; the signal that
/// comes with it must not end the process.
pub fn survive_file_size_limit() -> io::Result<()> {
    signal_hook::flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false))).map(drop)
}

/// When the daemon dies, the kernel sends SIGHUP to the group of a process that is stopped just then (setpgid(2)): a
/// disk that a debugger holds, for example. It must not end with the daemon.
pub fn survive_the_daemon() -> io::Result<()> {
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
