//! Makes the engine of a served disk wait for descriptors of its server.

use std::io;
use std::os::fd::BorrowedFd;

use transport::{Interest, Watch, WatchKey};
use uring::Engine;

/// The engine's wait, as the server uses it.
pub struct EngineWatch<'a>(pub &'a mut Engine);

impl Watch for EngineWatch<'_> {
    fn watch(&mut self, fd: BorrowedFd<'_>, interest: Interest, key: WatchKey) -> io::Result<()> {
        self.0.watch(fd, interest == Interest::ReadWrite, key.0)
    }

    fn forget(&mut self, key: WatchKey) {
        self.0.forget(key.0);
    }
}
