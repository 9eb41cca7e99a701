//! Writes under way to places that readers do not see yet.
//!
//! Knows nothing of tables or of what is written.

use rustc_hash::FxHashMap;

use super::cluster::{GuestCluster, HostCluster};
use super::entry::Part;
use crate::FileOffset;
use crate::format::Ticket;

/// A write under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// First cluster of the disk.
    pub cluster: GuestCluster,
    /// How many.
    pub count: u64,
    /// The cluster of the file for the first; the others follow it.
    pub place: HostCluster,
    /// Whether the place was handed out for it, and is not that of a cluster that reads as zero nevertheless.
    pub new: bool,
    /// The subclusters that it is about; the others of its one cluster stay what they are. `None`: all.
    pub part: Option<Part>,
    /// The L2 slice that it will change.
    pub table: FileOffset,
    /// The slices of refcounts that it will change.
    pub counts: Vec<FileOffset>,
}

/// The place that a cluster is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Cluster of the file.
    pub place: HostCluster,
    /// Whether other writes may go there at the same time: it reads as zero, and is to.
    pub shared: bool,
    /// A write that is under way there: the only one, where it is not shared.
    pub ticket: Ticket,
    writers: u32,
}

/// Reservations by ticket, and the places of clusters that are not in a table yet.
#[derive(Debug, Default)]
pub struct Pending {
    last: u64,
    writes: FxHashMap<Ticket, Write>,
    slots: FxHashMap<GuestCluster, Slot>,
}

impl Pending {
    /// The place that a cluster is to have.
    pub fn slot(&self, cluster: GuestCluster) -> Option<Slot> {
        self.slots.get(&cluster).copied()
    }

    /// Begins a write, to places which others may share or not.
    pub fn begin(&mut self, write: Write, shared: bool) -> Ticket {
        self.last = self.last.wrapping_add(1);
        let ticket = Ticket(self.last);
        for by in 0..write.count {
            let place = write.place + by;
            let slot = Slot { place, shared, ticket, writers: 0 };
            let slot = self.slots.entry(write.cluster + by).or_insert(slot);
            slot.writers += 1;
        }
        self.writes.insert(ticket, write);
        ticket
    }

    /// Ends a write, well or not.
    pub fn end(&mut self, ticket: Ticket) -> Write {
        let Some(write) = self.writes.remove(&ticket) else { unreachable!("{ticket:?} has ended before") };
        write
    }

    /// Takes the place that `cluster` has at `place`, to be put into its table.
    pub fn claim(&mut self, cluster: GuestCluster, place: HostCluster) -> bool {
        let ours = self.slots.get(&cluster).is_some_and(|slot| slot.place == place);
        ours && self.slots.remove(&cluster).is_some()
    }

    /// A write to `cluster` at `place` has failed. Whether that was the last one, and the place is not to be its.
    pub fn leave(&mut self, cluster: GuestCluster, place: HostCluster) -> bool {
        let Some(slot) = self.slots.get_mut(&cluster).filter(|slot| slot.place == place) else { return false };
        slot.writers -= 1;
        // Who waits for the place waits for a write that is still under way.
        let is_there = |write: &Write| {
            cluster.checked_sub(write.cluster).is_some_and(|by| by < write.count && write.place + by == place)
        };
        let others = self.writes.iter().filter(|(_, write)| is_there(write)).map(|(ticket, _)| *ticket);
        slot.ticket = others.min_by_key(|ticket| ticket.0).unwrap_or(slot.ticket);
        slot.writers == 0 && self.slots.remove(&cluster).is_some()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn write(cluster: u64, count: u64) -> Write {
        Write {
            cluster: GuestCluster(cluster),
            count,
            place: HostCluster(100),
            new: true,
            part: None,
            table: FileOffset(0),
            counts: Vec::new(),
        }
    }

    #[test]
    fn a_shared_place_is_left_by_the_last_writer() {
        let mut pending = Pending::default();
        pending.begin(write(5, 1), true);
        pending.begin(write(5, 1), true);
        assert!(!pending.leave(GuestCluster(5), HostCluster(100)));
        assert!(pending.leave(GuestCluster(5), HostCluster(100)));
        assert_eq!(pending.slot(GuestCluster(5)), None);
    }

    #[test]
    fn a_shared_place_is_waited_for_as_long_as_somebody_writes_there() {
        let mut pending = Pending::default();
        let first = pending.begin(write(5, 1), true);
        let second = pending.begin(write(4, 2), true);
        let third = pending.begin(Write { place: HostCluster(99), ..write(4, 2) }, true);
        pending.end(first);
        pending.leave(GuestCluster(5), HostCluster(100));
        assert_eq!(pending.slot(GuestCluster(5)).map(|slot| slot.ticket), Some(third));
        assert_ne!(pending.slot(GuestCluster(5)).map(|slot| slot.ticket), Some(second));
    }

    #[test]
    fn the_first_to_commit_claims_the_place_once() {
        let mut pending = Pending::default();
        pending.begin(write(5, 2), true);
        assert!(pending.claim(GuestCluster(6), HostCluster(101)));
        assert!(!pending.claim(GuestCluster(6), HostCluster(101)));
        assert!(!pending.leave(GuestCluster(6), HostCluster(101)), "it is in the table by now");
    }
}
