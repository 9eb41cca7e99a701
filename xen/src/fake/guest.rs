//! A guest as a test plays it: its pages, its grants, its ends of event channels.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use memory::{Mapping, Shared};
use rustix::fs::ftruncate;
use rustix::io::{pread, pwrite};

use super::Host;
use crate::{DomId, GrantRef, PAGE, Port};

/// What may be done with a page that is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It may be read.
    ReadOnly,
    /// It may be read and written.
    ReadWrite,
}

/// A page of a guest: where it lies in the memory of all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page(pub(super) u64);

impl Page {
    pub(super) fn at(self, byte: usize) -> u64 {
        self.0.saturating_add(u64::try_from(byte).unwrap_or(u64::MAX))
    }
}

/// A domain that is not ours.
pub struct Guest {
    host: Host,
    domain: DomId,
}

impl Guest {
    pub(super) fn new(host: Host, domain: DomId) -> Guest {
        Guest { host, domain }
    }

    /// Its number.
    pub fn domain(&self) -> DomId {
        self.domain
    }

    /// A new page of zeroes.
    pub fn page(&self) -> io::Result<Page> {
        let mut state = self.host.lock();
        let page = Page(state.memory_len);
        ftruncate(&*self.host.memory, page.at(PAGE))?;
        state.memory_len = page.at(PAGE);
        Ok(page)
    }

    /// So many new pages.
    pub fn pages(&self, count: usize) -> io::Result<Vec<Page>> {
        (0..count).map(|_| self.page()).collect()
    }

    /// Writes into a page, from byte `at` on.
    ///
    /// # Panics
    /// If the bytes reach beyond it.
    pub fn write(&self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
        assert!(at + bytes.len() <= PAGE, "a guest writes beyond its page");
        let written = pwrite(&*self.host.memory, bytes, page.at(at))?;
        if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads from a page, from byte `at` on.
    ///
    /// # Panics
    /// If the bytes reach beyond it.
    pub fn read(&self, page: Page, at: usize, len: usize) -> io::Result<Vec<u8>> {
        assert!(at + len <= PAGE, "a guest reads beyond its page");
        let mut bytes = vec![0; len];
        let read = pread(&*self.host.memory, &mut bytes, page.at(at))?;
        if read == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Pages in one piece, as the guest sees a ring of its own.
    pub fn shared(&self, pages: &[Page]) -> io::Result<Shared> {
        let offsets: Vec<u64> = pages.iter().map(|page| page.at(0)).collect();
        let mapping = Arc::new(Mapping::of_pages(self.host.memory.as_fd(), &offsets, true)?);
        let (base, len) = (mapping.base(), mapping.len());
        // SAFETY: the whole mapping, which the value holds.
        Ok(unsafe { Shared::new(mapping, base, len) })
    }

    /// Grants a page to domain 0.
    pub fn grant(&self, page: Page, access: Access) -> GrantRef {
        self.host.lock().table.grant(self.domain, page, access)
    }

    /// Grants a page under a reference that was taken back, as guests do at once.
    ///
    /// # Panics
    /// If it is in use.
    pub fn grant_as(&self, grant: GrantRef, page: Page, access: Access) {
        self.host.lock().table.grant_as(self.domain, grant, page, access);
    }

    /// Takes a grant back: it cannot be copied from or to, or mapped, any more; where it is mapped it stays so. `true` if
    /// it was mapped nowhere.
    pub fn revoke(&self, grant: GrantRef) -> bool {
        self.host.lock().table.revoke(self.domain, grant)
    }

    /// Offers an event channel to domain 0.
    pub fn offer(&self) -> Port {
        self.host.lock().lines.offer(self.domain)
    }

    /// Signals the other end.
    pub fn signal(&self, port: Port) -> io::Result<()> {
        self.host.lock().lines.signal(self.domain, port)
    }

    /// Whether the other end has signalled since this was last asked.
    pub fn signalled(&self, port: Port) -> bool {
        self.host.lock().lines.signalled(self.domain, port)
    }

    /// Gives its end up.
    pub fn close(&self, port: Port) {
        self.host.lock().lines.close(self.domain, port);
    }

    /// The domain is destroyed: its grants and its ends of event channels are gone. Its nodes in the store stay, they are
    /// the toolstack's.
    pub fn die(self) {
        let mut state = self.host.lock();
        state.domains.remove(&self.domain);
        state.table.domain_died(self.domain);
        state.lines.domain_died(self.domain);
        state.tree.fire("@releaseDomain");
    }
}
