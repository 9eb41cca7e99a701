//! Event channels without Xen.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Host, Subsystem};
use crate::pending::Notifier;
use crate::{DomId, EventChannels, Port};

/// Ports returned by one call: few, so that code that relies on getting all of them at once is caught.
const TAKEN_MAX: usize = 4;

/// All event channels between guests and domain 0.
#[derive(Default)]
pub(super) struct ChannelTable {
    /// By the guest's port. Port numbers are unique across domains, so that mixing up two domains' ports is noticed.
    theirs: BTreeMap<Port, GuestPort>,
    /// By our port.
    ours: BTreeMap<Port, HostPort>,
    /// The notifier of each user of our side.
    notifiers: BTreeMap<u64, Notifier>,
    ports: u32,
    users: u64,
}

struct GuestPort {
    domain: DomId,
    bound: Option<Port>,
    signalled: bool,
}

struct HostPort {
    user: u64,
    remote: Port,
    signalled: bool,
    masked: bool,
}

impl ChannelTable {
    fn new_port(&mut self) -> Port {
        self.ports += 1;
        Port(self.ports)
    }

    pub(super) fn offer(&mut self, domain: DomId) -> Port {
        let port = self.new_port();
        self.theirs.insert(port, GuestPort { domain, bound: None, signalled: false });
        port
    }

    pub(super) fn signal(&mut self, domain: DomId, port: Port) -> io::Result<()> {
        let theirs = self.theirs.get(&port).filter(|theirs| theirs.domain == domain);
        let theirs = theirs.ok_or_else(|| refused("the guest does not have", port))?;
        let ours = theirs.bound.and_then(|bound| self.ours.get_mut(&bound));
        if let Some(ours) = ours {
            ours.signalled = true;
            let user = ours.user;
            self.update_notifier(user)?;
        }
        Ok(())
    }

    pub(super) fn signalled(&mut self, domain: DomId, port: Port) -> bool {
        let theirs = self.theirs.get_mut(&port).filter(|theirs| theirs.domain == domain);
        theirs.is_some_and(|theirs| std::mem::take(&mut theirs.signalled))
    }

    pub(super) fn close(&mut self, domain: DomId, port: Port) {
        self.theirs.retain(|&at, theirs| at != port || theirs.domain != domain);
    }

    pub(super) fn domain_died(&mut self, domain: DomId) {
        self.theirs.retain(|_, theirs| theirs.domain != domain);
    }

    pub(super) fn bound(&self) -> usize {
        self.ours.len()
    }

    fn bind(&mut self, user: u64, domain: DomId, remote: Port) -> io::Result<Port> {
        let port = self.new_port();
        let theirs = self.theirs.get_mut(&remote).filter(|theirs| theirs.domain == domain && theirs.bound.is_none());
        theirs.ok_or_else(|| refused("the guest did not offer", remote))?.bound = Some(port);
        self.ours.insert(port, HostPort { user, remote, signalled: true, masked: false });
        self.update_notifier(user)?;
        Ok(port)
    }

    fn unbind(&mut self, user: u64, port: Port) -> io::Result<()> {
        self.of(user, port)?;
        self.ours.remove(&port);
        for theirs in self.theirs.values_mut().filter(|theirs| theirs.bound == Some(port)) {
            theirs.bound = None;
        }
        self.update_notifier(user)
    }

    fn notify(&mut self, user: u64, port: Port) -> io::Result<()> {
        let remote = self.of(user, port)?.remote;
        // A notification of a closed port is lost, which is not an error.
        if let Some(theirs) = self.theirs.get_mut(&remote) {
            theirs.signalled = true;
        }
        Ok(())
    }

    fn take(&mut self, user: u64, ports: &mut Vec<Port>) -> io::Result<bool> {
        let mut due = self.ours.iter_mut().filter(|(_, ours)| ours.user == user && ours.signalled && !ours.masked);
        for (&port, ours) in due.by_ref().take(TAKEN_MAX) {
            (ours.signalled, ours.masked) = (false, true);
            ports.push(port);
        }
        let more = due.next().is_some();
        self.update_notifier(user)?;
        Ok(more)
    }

    fn unmask(&mut self, user: u64, port: Port) -> io::Result<()> {
        self.of(user, port)?.masked = false;
        self.update_notifier(user)
    }

    fn of(&mut self, user: u64, port: Port) -> io::Result<&mut HostPort> {
        self.ours.get_mut(&port).filter(|ours| ours.user == user).ok_or_else(|| refused("we do not have", port))
    }

    /// Makes a user's descriptor readable if it has ports to take.
    fn update_notifier(&mut self, user: u64) -> io::Result<()> {
        let due = self.ours.values().any(|ours| ours.user == user && ours.signalled && !ours.masked);
        self.notifiers.get_mut(&user).map_or(Ok(()), |notifier| notifier.set(due))
    }
}

/// Event channels of domain 0; closed when dropped.
pub struct Channels {
    host: Host,
    user: u64,
    readable: OwnedFd,
}

impl Channels {
    pub(super) fn new(host: Host) -> io::Result<Channels> {
        let notifier = Notifier::new()?;
        let readable = notifier.as_fd().try_clone_to_owned()?;
        let mut state = host.lock();
        state.channels.users += 1;
        let user = state.channels.users;
        state.channels.notifiers.insert(user, notifier);
        drop(state);
        Ok(Channels { host, user, readable })
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        let channels = &mut self.host.lock().channels;
        let user = self.user;
        channels.ours.retain(|_, ours| ours.user != user);
        channels.notifiers.remove(&user);
        let ChannelTable { theirs, ours, .. } = channels;
        for theirs in theirs.values_mut() {
            theirs.bound = theirs.bound.filter(|port| ours.contains_key(port));
        }
    }
}

impl EventChannels for Channels {
    fn bind(&mut self, domain: DomId, remote: Port) -> io::Result<Port> {
        self.host.enter(Subsystem::Channels)?.channels.bind(self.user, domain, remote)
    }

    fn unbind(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Subsystem::Channels)?.channels.unbind(self.user, port)
    }

    fn notify(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Subsystem::Channels)?.channels.notify(self.user, port)
    }

    fn take(&mut self, ports: &mut Vec<Port>) -> io::Result<bool> {
        self.host.enter(Subsystem::Channels)?.channels.take(self.user, ports)
    }

    fn unmask(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Subsystem::Channels)?.channels.unmask(self.user, port)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

fn refused(what: &str, port: Port) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{what} port {}", port.0))
}
