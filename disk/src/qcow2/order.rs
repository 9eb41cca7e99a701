//! Rounds: what is written when. The argument is at the head of `qcow2`.
//!
//! Knows nothing of why something has changed.

use super::Qcow2;
use super::counts::Fate;
use crate::format::MetaWrite;
use crate::size::in_32_bits;

/// Batches of a round that has nothing to spare. Where no order is needed, neighbours become one.
#[derive(Debug, Default)]
struct Batches {
    /// Refcounts that have become higher; what nothing durable refers to.
    counts: Vec<MetaWrite>,
    /// The refcount table, where it stands.
    table: Vec<MetaWrite>,
    /// The header that refers to another refcount table.
    table_header: Vec<MetaWrite>,
    /// L2 tables.
    l2: Vec<MetaWrite>,
    /// The L1 table.
    l1: Vec<MetaWrite>,
    /// The header that refers to another L1 table, size or parent.
    header: Vec<MetaWrite>,
    /// Refcounts that have become lower.
    lowered: Vec<MetaWrite>,
}

impl Qcow2 {
    /// Pieces that a round would write, and places freed that could be used after it.
    pub(super) fn pieces(&self) -> usize {
        let counts = self.clusters.allocator.as_ref().map_or(0, |allocator| allocator.counts.dirty());
        counts + self.clusters.tables.dirty() + self.head.dirty()
    }

    /// Begins a round.
    pub(super) fn begin_round(&mut self) -> Vec<Vec<MetaWrite>> {
        let mut batches = Batches::default();
        let tables = self.clusters.tables.seal();
        if let Some(allocator) = &mut self.clusters.allocator {
            if std::mem::take(&mut allocator.table_moved) {
                let (entries, at) = allocator.counts.table();
                let clusters = (entries * 8) >> allocator.bits;
                self.head.move_refcount_table(at, in_32_bits(clusters, "REFCOUNT_TABLE_BYTES_MAX"));
            }
            let counts = allocator.counts.seal();
            batches.counts = counts.raised;
            batches.table = counts.table;
            batches.lowered = counts.lowered;
        }
        let head = self.head.seal();
        batches.counts.extend(head.name);
        batches.table_header.extend(head.refcount_table);
        batches.header.extend(head.other);
        batches.l2 = tables.l2;
        // Nothing refers to a fresh table, unless a round has failed since it was made.
        if self.retried { &mut batches.l2 } else { &mut batches.counts }.extend(tables.fresh);
        if self.retried { &mut batches.l1 } else { &mut batches.l2 }.extend(tables.l1);
        let Batches { counts, table, table_header, l2, l1, header, lowered } = batches;
        let all = [counts, table, table_header, l2, l1, header, lowered];
        all.into_iter().filter(|batch| !batch.is_empty()).collect()
    }

    /// Ends a round.
    pub(super) fn end_round(&mut self, durable: bool) {
        self.retried = !durable;
        self.clusters.tables.settled(durable);
        self.head.settled(durable);
        let Some(allocator) = &mut self.clusters.allocator else { return };
        for loss in allocator.counts.settled(durable) {
            match loss.fate {
                Fate::Released => allocator.space.forgotten(loss.first),
                Fate::Leaked => allocator.space.leaked(loss.first, loss.count),
                Fate::InUse => {}
            }
        }
    }
}
