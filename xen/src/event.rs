//! Event channels: how a guest and we notify each other.
//!
//! It knows nothing about what an event means. Invariant: an event that arrives while its port is masked is reported
//! after it is unmasked.

use std::io;
use std::os::fd::BorrowedFd;

use crate::DomId;

/// A port: our end, or the guest's, of an event channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u32);

/// Event channels to guests.
pub trait EventChannels {
    /// Binds to the port that `domain` has offered as `remote`. Our port starts unmasked and is reported once right
    /// away: the guest may have signalled before.
    fn bind(&mut self, domain: DomId, remote: Port) -> io::Result<Port>;

    /// Closes our port. An earlier signal may still be reported once.
    fn unbind(&mut self, port: Port) -> io::Result<()>;

    /// Notifies the guest. If it has closed its port the notification is lost, which is not an error.
    fn notify(&mut self, port: Port) -> io::Result<()>;

    /// Appends signalled ports to `ports`, a bounded number of them; returns `true` if there may be more. Each is then
    /// masked, however often the guest signals.
    fn take(&mut self, ports: &mut Vec<Port>) -> io::Result<bool>;

    /// Unmasks a port: it is reported again at the next signal, or immediately if it was signalled meanwhile.
    fn unmask(&mut self, port: Port) -> io::Result<()>;

    /// Readable when a port is signalled.
    fn fd(&self) -> BorrowedFd<'_>;
}
