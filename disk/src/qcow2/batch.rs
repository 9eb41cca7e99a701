//! The numbers under which the redo log has the batches of a round, in their order ([`super::order`]).

/// The batch of refcounts that have become higher, and of new refcount blocks.
pub const COUNTS: u8 = 0;
/// The batch of the refcount table.
pub const COUNTS_TABLE: u8 = 1;
/// The batch of L2 tables. After a process's death as after a failed round it is not known what the file refers to: new
/// L2 tables come here.
pub const L2: u8 = 2;
/// The batch of the L1 table.
pub const L1: u8 = 3;
/// The batch of refcounts that have become lower.
pub const LOWERED: u8 = 4;
