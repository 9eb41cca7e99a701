//! VDIs that an operation is about to use.
//!
//! Between the stop of a merge for an operation and the commit that reserves the VDI for the operation, another merge
//! could begin, and the operation would be refused because of mere cleanup. So no merge begins on a VDI that is
//! wanted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use uuid::Uuid;

/// The requested VDIs, and the number of requests for each.
#[derive(Clone, Debug, Default)]
pub struct Wanted(Arc<Mutex<HashMap<Uuid, usize>>>);

/// Marks a VDI as requested for as long as this exists.
#[derive(Debug)]
#[must_use = "a merge can begin once no operation has reserved the VDI"]
pub struct Want {
    wanted: Wanted,
    vdi: Uuid,
}

impl Wanted {
    fn counts(&self) -> MutexGuard<'_, HashMap<Uuid, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks a VDI as wanted.
    pub fn want(&self, vdi: Uuid) -> Want {
        let mut counts = self.counts();
        let count = counts.entry(vdi).or_default();
        *count = count.saturating_add(1);
        Want { wanted: self.clone(), vdi }
    }

    /// Whether an operation wants a VDI.
    pub fn is(&self, vdi: Uuid) -> bool {
        self.counts().contains_key(&vdi)
    }
}

impl Drop for Want {
    fn drop(&mut self) {
        let mut counts = self.wanted.counts();
        let left = counts.get(&self.vdi).map_or(0, |count| count.saturating_sub(1));
        match left {
            0 => drop(counts.remove(&self.vdi)),
            _ => drop(counts.insert(self.vdi, left)),
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_vdi_is_wanted_until_the_last_user_is_done() {
        let (wanted, vdi) = (Wanted::default(), Uuid::from_u128(1));
        let first = wanted.want(vdi);
        let second = wanted.want(vdi);
        drop(first);
        assert!(wanted.is(vdi) && !wanted.is(Uuid::from_u128(2)));
        drop(second);
        assert!(!wanted.is(vdi));
    }
}
