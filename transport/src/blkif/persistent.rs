//! Pages of a guest that stay mapped from one request to the next.
//!
//! Knows nothing of requests. Invariant: the pages that are kept are bounded; one that is given up while a request uses it
//! stays mapped until that request has ended. A front end that sees a grant still in use does not free it (io/blkif.h,
//! `feature-persistent`), so a reference means the same page for as long as we have it mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use memory::Segments;
use xen::{DomId, GrantRef, Granted, Grants, PAGE, Piece};

/// Pages that are kept: 32 MiB. Linux's front end keeps 1056 for a ring of one page.
const PAGES_MAX: usize = 8192;

/// Mapped pages, by reference.
#[derive(Default)]
pub struct Pages {
    mapped: BTreeMap<GrantRef, Place>,
}

/// Where a page lies.
#[derive(Clone)]
struct Place {
    /// Mapped together with others.
    granted: Arc<Granted>,
    /// The first byte.
    at: usize,
}

impl Pages {
    /// Maps those pages that are not yet mapped, in one call. What cannot be mapped with the others is left to
    /// [`Pages::segments`].
    pub fn bring(&mut self, grants: &mut dyn Grants, domain: DomId, pages: impl Iterator<Item = GrantRef>) {
        // In the order in which they are used, so that what is one piece on the disk is one in memory.
        let mut seen = BTreeSet::new();
        let new: Vec<GrantRef> = pages.filter(|page| !self.mapped.contains_key(page) && seen.insert(*page)).collect();
        if new.is_empty() {
            return;
        }
        if self.mapped.len().saturating_add(new.len()) > PAGES_MAX {
            // All at once: rare, and a front end that does this often is better served by copies.
            self.mapped.clear();
        }
        let Ok(granted) = grants.map(domain, &new, false) else { return };
        for (index, page) in new.into_iter().enumerate() {
            let place = Place { granted: granted.clone(), at: index.saturating_mul(PAGE) };
            self.mapped.insert(page, place);
        }
    }

    /// The memory of a request. `None` if one of its grants is bad.
    pub fn segments(&mut self, grants: &mut dyn Grants, domain: DomId, pieces: &[Piece]) -> Option<Segments> {
        let missing = |pages: &Pages| pieces.iter().any(|piece| !pages.mapped.contains_key(&piece.page));
        if missing(self) {
            // A bad grant of another request kept these from being mapped, or they were given up for others.
            self.bring(grants, domain, pieces.iter().map(|piece| piece.page));
            if missing(self) {
                return None;
            }
        }
        let mut parts: Vec<Segments> = Vec::new();
        let mut rest = pieces;
        while let Some((first, _)) = rest.split_first() {
            let granted = self.mapped.get(&first.page)?.granted.clone();
            let together = |piece: &Piece| {
                let place = self.mapped.get(&piece.page).filter(|place| Arc::ptr_eq(&place.granted, &granted))?;
                Some((place.at.saturating_add(usize::from(piece.from)), usize::from(piece.len)))
            };
            let ranges: Vec<_> = rest.iter().map_while(together).collect();
            rest = rest.get(ranges.len()..)?;
            parts.push(granted.segments(joined(ranges))?);
        }
        match parts.len() {
            1 => parts.pop(),
            _ => Some(Segments::joined(parts)),
        }
    }

    /// Pages kept.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.mapped.len()
    }
}

/// Ranges with those made one that follow each other.
fn joined(ranges: Vec<(usize, usize)>) -> Vec<(usize, usize)> {
    let mut joined: Vec<(usize, usize)> = Vec::with_capacity(ranges.len());
    for (at, len) in ranges {
        match joined.last_mut() {
            Some(last) if last.0.saturating_add(last.1) == at => last.1 = last.1.saturating_add(len),
            _ => joined.push((at, len)),
        }
    }
    joined
}
