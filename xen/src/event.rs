//! Event channels: how a guest wakes us, and we a guest.
//!
//! Knows nothing of what an event means. Keeps: an event that arrives while its port is masked is reported once it is not.

use std::io;
use std::os::fd::BorrowedFd;

use crate::DomId;

/// Our end, or the guest's, of an event channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Port(pub u32);

/// Event channels to guests.
pub trait EventChannels {
    /// Connects to the end that `domain` has offered as `remote`. Our end is unmasked, and reported once at the
    /// beginning: the guest may have signalled before.
    fn bind(&mut self, domain: DomId, remote: Port) -> io::Result<Port>;

    /// Gives our end up. If it was signalled before, that may still be reported once.
    fn unbind(&mut self, port: Port) -> io::Result<()>;

    /// Signals the guest. If it has given its end up the signal is lost, and that is no error.
    fn notify(&mut self, port: Port) -> io::Result<()>;

    /// Ports that were signalled, appended to `ports`: a bounded number of them; `true` if there may be more. Each is
    /// masked from now on, however often the guest signals.
    fn take(&mut self, ports: &mut Vec<Port>) -> io::Result<bool>;

    /// Reports a port again when it is signalled, at once if it was in the meantime.
    fn unmask(&mut self, port: Port) -> io::Result<()>;

    /// Readable when a port is signalled.
    fn fd(&self) -> BorrowedFd<'_>;
}
