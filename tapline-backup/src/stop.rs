//! SIGINT and SIGTERM: the first one cancels the command, which ends at its next step; a second one ends the process.
//!
//! What was sent to a target until then stays there, and a repeated backup uses it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::{flag, low_level};

use crate::failure::Failure;

static CANCELLED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Handles signals from now on.
pub fn prepare() -> Result<(), Failure> {
    let handled = [SIGINT, SIGTERM].into_iter().try_for_each(|signal| {
        // In this order: the first signal finds the flag unset.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&CANCELLED))?;
        flag::register(signal, Arc::clone(&CANCELLED)).map(drop)
    });
    // Ignored: a write beyond the limit of file sizes then fails with EFBIG.
    let ignored = flag::register(SIGXFSZ, Arc::default()).map(drop);
    handled.and(ignored).map_err(|error| Failure::cannot("handle signals", error))
}

/// True once the command is to end.
pub fn cancelled() -> &'static AtomicBool {
    &CANCELLED
}

/// A socket that becomes readable when the command is to end.
#[derive(Debug)]
pub struct Wake(UnixStream);

impl Wake {
    /// Must be called before anything is waited for.
    pub fn new() -> io::Result<Wake> {
        let (socket, write) = UnixStream::pair()?;
        for signal in [SIGINT, SIGTERM] {
            low_level::pipe::register(signal, write.try_clone()?)?;
        }
        Ok(Wake(socket))
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
