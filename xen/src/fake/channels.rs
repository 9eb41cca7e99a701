//! Event channels without Xen.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::{Host, Part};
use crate::pending::Bell;
use crate::{DomId, EventChannels, Port};

/// Ports taken in one call: few, so that whoever relies on getting all at once is found out.
const TAKEN: usize = 4;

/// All event channels between guests and domain 0.
#[derive(Default)]
pub(super) struct Lines {
    /// By the guest's port. Ports are numbered for all domains together, so that one taken for another's is noticed.
    theirs: BTreeMap<Port, Theirs>,
    /// By our port.
    ours: BTreeMap<Port, Ours>,
    /// What is readable, for each user of our side.
    bells: BTreeMap<u64, Bell>,
    ports: u32,
    users: u64,
}

struct Theirs {
    domain: DomId,
    bound: Option<Port>,
    signalled: bool,
}

struct Ours {
    user: u64,
    remote: Port,
    signalled: bool,
    masked: bool,
}

impl Lines {
    fn new_port(&mut self) -> Port {
        self.ports += 1;
        Port(self.ports)
    }

    pub(super) fn offer(&mut self, domain: DomId) -> Port {
        let port = self.new_port();
        self.theirs.insert(port, Theirs { domain, bound: None, signalled: false });
        port
    }

    pub(super) fn signal(&mut self, domain: DomId, port: Port) -> io::Result<()> {
        let theirs = self.theirs.get(&port).filter(|theirs| theirs.domain == domain);
        let theirs = theirs.ok_or_else(|| refused("the guest has no such", port))?;
        let ours = theirs.bound.and_then(|bound| self.ours.get_mut(&bound));
        if let Some(ours) = ours {
            ours.signalled = true;
            let user = ours.user;
            self.ring(user)?;
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
        theirs.ok_or_else(|| refused("the guest does not offer", remote))?.bound = Some(port);
        self.ours.insert(port, Ours { user, remote, signalled: true, masked: false });
        self.ring(user)?;
        Ok(port)
    }

    fn unbind(&mut self, user: u64, port: Port) -> io::Result<()> {
        self.of(user, port)?;
        self.ours.remove(&port);
        for theirs in self.theirs.values_mut().filter(|theirs| theirs.bound == Some(port)) {
            theirs.bound = None;
        }
        self.ring(user)
    }

    fn notify(&mut self, user: u64, port: Port) -> io::Result<()> {
        let remote = self.of(user, port)?.remote;
        // A signal to an end that is closed is lost, and that is no error.
        if let Some(theirs) = self.theirs.get_mut(&remote) {
            theirs.signalled = true;
        }
        Ok(())
    }

    fn take(&mut self, user: u64, ports: &mut Vec<Port>) -> io::Result<bool> {
        let mut due = self.ours.iter_mut().filter(|(_, ours)| ours.user == user && ours.signalled && !ours.masked);
        for (&port, ours) in due.by_ref().take(TAKEN) {
            (ours.signalled, ours.masked) = (false, true);
            ports.push(port);
        }
        let more = due.next().is_some();
        self.ring(user)?;
        Ok(more)
    }

    fn unmask(&mut self, user: u64, port: Port) -> io::Result<()> {
        self.of(user, port)?.masked = false;
        self.ring(user)
    }

    fn of(&mut self, user: u64, port: Port) -> io::Result<&mut Ours> {
        self.ours.get_mut(&port).filter(|ours| ours.user == user).ok_or_else(|| refused("we have no such", port))
    }

    /// Lets a user's descriptor be readable if there is something to take.
    fn ring(&mut self, user: u64) -> io::Result<()> {
        let due = self.ours.values().any(|ours| ours.user == user && ours.signalled && !ours.masked);
        self.bells.get_mut(&user).map_or(Ok(()), |bell| bell.set(due))
    }
}

/// Event channels of domain 0; given up when dropped.
pub struct Channels {
    host: Host,
    user: u64,
    readable: OwnedFd,
}

impl Channels {
    pub(super) fn new(host: Host) -> io::Result<Channels> {
        let bell = Bell::new()?;
        let readable = bell.as_fd().try_clone_to_owned()?;
        let mut state = host.lock();
        state.lines.users += 1;
        let user = state.lines.users;
        state.lines.bells.insert(user, bell);
        drop(state);
        Ok(Channels { host, user, readable })
    }
}

impl Drop for Channels {
    fn drop(&mut self) {
        let lines = &mut self.host.lock().lines;
        let user = self.user;
        lines.ours.retain(|_, ours| ours.user != user);
        lines.bells.remove(&user);
        let Lines { theirs, ours, .. } = lines;
        for theirs in theirs.values_mut() {
            theirs.bound = theirs.bound.filter(|port| ours.contains_key(port));
        }
    }
}

impl EventChannels for Channels {
    fn bind(&mut self, domain: DomId, remote: Port) -> io::Result<Port> {
        self.host.enter(Part::Channels)?.lines.bind(self.user, domain, remote)
    }

    fn unbind(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Part::Channels)?.lines.unbind(self.user, port)
    }

    fn notify(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Part::Channels)?.lines.notify(self.user, port)
    }

    fn take(&mut self, ports: &mut Vec<Port>) -> io::Result<bool> {
        self.host.enter(Part::Channels)?.lines.take(self.user, ports)
    }

    fn unmask(&mut self, port: Port) -> io::Result<()> {
        self.host.enter(Part::Channels)?.lines.unmask(self.user, port)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}

fn refused(what: &str, port: Port) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{what} port {}", port.0))
}
