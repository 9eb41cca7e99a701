//! A guest driven by a test: its pages, grants and event channels.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use memory::{Mapping, Shared};
use rustix::fs::ftruncate;
use rustix::io::{pread, pwrite};

use super::Host;
use crate::{DomId, GrantRef, PAGE, Port};

/// Access to a granted page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read-only.
    ReadOnly,
    /// Read and write.
    ReadWrite,
}

/// A page of a guest, as its offset in the memory file of all guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page(pub(super) u64);

impl Page {
    pub(super) fn at(self, byte: usize) -> u64 {
        self.0.saturating_add(u64::try_from(byte).unwrap_or(u64::MAX))
    }
}

/// A domain other than ours.
pub struct Guest {
    host: Host,
    domain: DomId,
}

impl Guest {
    pub(super) fn new(host: Host, domain: DomId) -> Guest {
        Guest { host, domain }
    }

    /// The domain's id.
    pub fn domain(&self) -> DomId {
        self.domain
    }

    /// A new zeroed page.
    pub fn page(&self) -> io::Result<Page> {
        let mut state = self.host.lock();
        let page = Page(state.memory_len);
        ftruncate(&*self.host.memory, page.at(PAGE))?;
        state.memory_len = page.at(PAGE);
        Ok(page)
    }

    /// `count` new pages.
    pub fn pages(&self, count: usize) -> io::Result<Vec<Page>> {
        (0..count).map(|_| self.page()).collect()
    }

    /// Writes into a page, starting at byte `at`.
    ///
    /// # Panics
    /// If the bytes extend past the page.
    pub fn write(&self, page: Page, at: usize, bytes: &[u8]) -> io::Result<()> {
        assert!(at + bytes.len() <= PAGE, "a guest writes past the end of its page");
        let written = pwrite(&*self.host.memory, bytes, page.at(at))?;
        if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Reads from a page, starting at byte `at`.
    ///
    /// # Panics
    /// If the bytes extend past the page.
    pub fn read(&self, page: Page, at: usize, len: usize) -> io::Result<Vec<u8>> {
        assert!(at + len <= PAGE, "a guest reads past the end of its page");
        let mut bytes = vec![0; len];
        let read = pread(&*self.host.memory, &mut bytes, page.at(at))?;
        if read == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Maps pages contiguously, as the guest sees a ring of its own.
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

    /// Grants a page under a revoked reference, which guests reuse at once.
    ///
    /// # Panics
    /// If the reference is in use.
    pub fn grant_as(&self, grant: GrantRef, page: Page, access: Access) {
        self.host.lock().table.grant_as(self.domain, grant, page, access);
    }

    /// Revokes a grant: it can no longer be copied from or to, or mapped; existing mappings stay. Returns `true` if it
    /// was not mapped.
    pub fn revoke(&self, grant: GrantRef) -> bool {
        self.host.lock().table.revoke(self.domain, grant)
    }

    /// Offers an event channel to domain 0.
    pub fn offer(&self) -> Port {
        self.host.lock().channels.offer(self.domain)
    }

    /// Notifies the other end.
    pub fn signal(&self, port: Port) -> io::Result<()> {
        self.host.lock().channels.signal(self.domain, port)
    }

    /// Whether the other end has notified since the last call.
    pub fn signalled(&self, port: Port) -> bool {
        self.host.lock().channels.signalled(self.domain, port)
    }

    /// Closes its port.
    pub fn close(&self, port: Port) {
        self.host.lock().channels.close(self.domain, port);
    }

    /// Destroys the domain: its grants and its event channels are gone. Its nodes in the store stay, since they belong
    /// to the toolstack.
    pub fn die(self) {
        let mut state = self.host.lock();
        state.domains.remove(&self.domain);
        state.table.domain_died(self.domain);
        state.channels.domain_died(self.domain);
        state.store.fire("@releaseDomain");
    }
}
