//! Grants without Xen.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use memory::{Mapping, Segments};
use rustix::io::{pread, pwrite};

use super::guest::{Access, Page};
use super::{Host, State, Subsystem};
use crate::grant::Entry;
use crate::{Copied, CopyBatch, Direction, DomId, GrantRef, Granted, Grants, PageRange};

/// Xen's status codes for a refusal (xen.h, `GNTST_*`).
const BAD_DOMAIN: i16 = -2;
const BAD_REF: i16 = -3;
const PERMISSION_DENIED: i16 = -8;
const BAD_COPY: i16 = -10;

/// References below this are never used: the first eight are reserved in Xen as well.
const FIRST_REF: u32 = 8;

/// All grants of all domains to domain 0.
#[derive(Default)]
pub(super) struct Table {
    grants: BTreeMap<(DomId, GrantRef), Grant>,
    grant_count: u32,
    mapped: usize,
}

struct Grant {
    page: Page,
    access: Access,
    /// How many times it is mapped.
    mapped: usize,
    revoked: bool,
}

impl Table {
    pub(super) fn grant(&mut self, domain: DomId, page: Page, access: Access) -> GrantRef {
        let grant = GrantRef(FIRST_REF + self.grant_count);
        self.grant_count += 1;
        self.grants.insert((domain, grant), Grant { page, access, mapped: 0, revoked: false });
        grant
    }

    pub(super) fn grant_as(&mut self, domain: DomId, grant: GrantRef, page: Page, access: Access) {
        let before = self.grants.insert((domain, grant), Grant { page, access, mapped: 0, revoked: false });
        assert!(before.is_none(), "grant {} of domain {domain} is in use", grant.0);
    }

    pub(super) fn revoke(&mut self, domain: DomId, grant: GrantRef) -> bool {
        let Some(found) = self.grants.get_mut(&(domain, grant)) else { return true };
        found.revoked = true;
        let unused = found.mapped == 0;
        self.drop_unused();
        unused
    }

    pub(super) fn domain_died(&mut self, domain: DomId) {
        for (_, grant) in self.grants.iter_mut().filter(|(key, _)| key.0 == domain) {
            grant.revoked = true;
        }
        self.drop_unused();
    }

    pub(super) fn mapped(&self) -> usize {
        self.mapped
    }

    fn drop_unused(&mut self) {
        self.grants.retain(|_, grant| !grant.revoked || grant.mapped > 0);
    }

    /// The page behind a reference, if it is granted with that access.
    fn page(&self, domain: DomId, grant: GrantRef, access: Access) -> Result<Page, i16> {
        match self.grants.get(&(domain, grant)) {
            Some(found) if found.revoked => Err(BAD_REF),
            Some(found) if access == Access::ReadWrite && found.access == Access::ReadOnly => Err(PERMISSION_DENIED),
            Some(found) => Ok(found.page),
            None => Err(BAD_REF),
        }
    }

    fn count_mapped(&mut self, domain: DomId, grants: &[GrantRef]) {
        for &grant in grants {
            if let Some(grant) = self.grants.get_mut(&(domain, grant)) {
                grant.mapped += 1;
                self.mapped += 1;
            }
        }
    }

    fn count_unmapped(&mut self, domain: DomId, grants: &[GrantRef]) {
        for &grant in grants {
            if let Some(grant) = self.grants.get_mut(&(domain, grant)) {
                grant.mapped -= 1;
                self.mapped -= 1;
            }
        }
        self.drop_unused();
    }
}

/// The pages that guests have granted to domain 0.
pub struct GrantTable {
    host: Host,
}

impl GrantTable {
    pub(super) fn new(host: Host) -> GrantTable {
        GrantTable { host }
    }

    /// Copies all pieces of an entry that can be copied; returns the first failure status, if any.
    fn copy_entry(&self, state: &State, domain: DomId, entry: &Entry, ranges: &[PageRange]) -> io::Result<Copied> {
        let mut copied = Copied::All;
        let mut at = 0;
        for range in ranges {
            let len = usize::from(range.len);
            let status = self.copy_range(state, domain, entry.direction, range, &entry.memory.slice(at, len))?;
            at += len;
            if let (Err(status), Copied::All) = (status, copied) {
                copied = Copied::Refused(status);
            }
        }
        Ok(copied)
    }

    fn copy_range(
        &self,
        state: &State,
        domain: DomId,
        direction: Direction,
        range: &PageRange,
        memory: &Segments,
    ) -> io::Result<Result<(), i16>> {
        if !state.domains.contains(&domain) {
            return Ok(Err(BAD_DOMAIN));
        }
        let access = if direction == Direction::ToGuest { Access::ReadWrite } else { Access::ReadOnly };
        let page = match state.table.page(domain, range.page, access) {
            Ok(page) => page,
            Err(status) => return Ok(Err(status)),
        };
        let at = page.at(usize::from(range.from));
        let mut bytes = vec![0; memory.len()];
        let done = match direction {
            Direction::FromGuest => {
                let read = pread(&*self.host.memory, &mut bytes, at)?;
                memory.copy_from(&bytes);
                read
            }
            Direction::ToGuest => {
                memory.copy_to(&mut bytes);
                pwrite(&*self.host.memory, &bytes, at)?
            }
        };
        Ok(if done == bytes.len() { Ok(()) } else { Err(BAD_COPY) })
    }
}

impl Grants for GrantTable {
    fn copy(&mut self, domain: DomId, batch: &mut CopyBatch) -> io::Result<()> {
        batch.reset_results();
        let state = self.host.enter(Subsystem::Grants)?;
        let mut ranges = batch.ranges.as_slice();
        for entry in &mut batch.entries {
            let (now, later) = ranges.split_at_checked(entry.ranges).unwrap_or((ranges, &[]));
            ranges = later;
            entry.copied = self.copy_entry(&state, domain, entry, now)?;
        }
        Ok(())
    }

    fn map(&mut self, domain: DomId, pages: &[GrantRef], read_only: bool) -> io::Result<Arc<Granted>> {
        let mut state = self.host.enter(Subsystem::Grants)?;
        if !state.domains.contains(&domain) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("there is no domain {domain}")));
        }
        let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
        let mut offsets = Vec::with_capacity(pages.len());
        for &grant in pages {
            let refused = |status| {
                io::Error::new(
                    io::ErrorKind::InvalidInput,
                    format!("cannot map grant {} of domain {domain}: status {status}", grant.0),
                )
            };
            offsets.push(state.table.page(domain, grant, access).map_err(refused)?.at(0));
        }
        let mapping = Mapping::of_pages(self.host.memory.as_fd(), &offsets, !read_only)?;
        state.table.count_mapped(domain, pages);
        let mapped_grants = MappedGrants { host: self.host.clone(), domain, grants: pages.to_vec() };
        Ok(Arc::new(Granted::new(mapping, read_only, Box::new(mapped_grants))))
    }
}

/// Grants that are counted as mapped.
struct MappedGrants {
    host: Host,
    domain: DomId,
    grants: Vec<GrantRef>,
}

impl Drop for MappedGrants {
    fn drop(&mut self) {
        self.host.lock().table.count_unmapped(self.domain, &self.grants);
    }
}
