//! File operations under way, and what to do when they have ended.
//!
//! Knows nothing of how that is done. Keeps: each is completed once; none overtakes another that a full engine has
//! refused.

use crate::backlog::Backlog;
use crate::format::{MetaBlock, Ticket};
use crate::slab::Slab;
use crate::{Action, FileId, FileOffset, FileOp, FileRange, Io, OpId};

use super::compressed::Begin;

/// Marks the id of an operation that is a whole request. The rest of the id is the request's number.
const WHOLE: u64 = 1 << 32;

/// The purpose of an operation.
#[derive(Debug)]
pub(super) enum Op {
    /// Bytes of a request. A write may have a reservation to commit.
    Transfer { number: u32, ticket: Option<Ticket> },
    /// A write together with the bytes around it, and the memory that those take.
    Filled { number: u32, ticket: Option<Ticket>, bytes: u64 },
    /// Zeroes of a request, by deallocation; in place, or to be committed.
    Zero { number: u32, ticket: Option<Ticket> },
    /// A discard deallocates the content of a cluster that stays allocated.
    Trim { number: u32 },
    /// Deallocation of a freed cluster, for a request or by itself.
    Release { number: Option<u32>, at: FileOffset },
    /// A read of bytes around a write.
    Fill { fill: u32 },
    /// A read of a compressed cluster.
    ReadCompressed { begin: Begin },
    /// A load of metadata.
    Load { block: MetaBlock },
    /// Metadata of a round.
    Meta,
    /// The stamp of a file.
    Stamp,
    /// A sync of a round.
    Sync,
    /// A write of the map of changed blocks.
    MapWrite,
    /// A sync of that map.
    MapSync,
    /// The sync in front of the first reclaim.
    ReclaimSync { range: FileRange },
}

/// The purpose of an operation that has ended.
pub(super) enum Ended {
    /// All of this request.
    Request(u32),
    /// One with something to be done.
    Op(Op),
}

/// The operations under way.
#[derive(Debug)]
pub(super) struct Ops {
    under_way: Slab<Op>,
    backlog: Backlog,
}

impl Ops {
    /// None, with memory for `size` of them.
    pub fn with_capacity(size: usize) -> Ops {
        Ops { under_way: Slab::with_capacity(size), backlog: Backlog::default() }
    }

    /// Number of operations under way that are not whole requests.
    pub fn len(&self) -> usize {
        self.under_way.len()
    }

    /// Begins an operation.
    pub fn push<I: Io>(&mut self, op: Op, file: FileId, action: Action, io: &mut I) {
        let id = OpId(u64::from(self.under_way.insert(op)));
        self.backlog.push(FileOp { id, file, action }, io);
    }

    /// Begins an operation that is all of a request.
    #[inline(always)]
    pub fn push_request<I: Io>(&mut self, number: u32, file: FileId, action: Action, io: &mut I) {
        self.backlog.push(FileOp { id: OpId(WHOLE | u64::from(number)), file, action }, io);
    }

    /// Whether the engine had room for all of them.
    #[inline(always)]
    pub fn are_all_pushed(&self) -> bool {
        self.backlog.is_empty()
    }

    /// Pushes again what a full engine has refused.
    pub fn retry<I: Io>(&mut self, io: &mut I) {
        self.backlog.retry(io);
    }

    /// Takes the purpose of an operation that has ended.
    #[inline(always)]
    pub fn ended(&mut self, id: OpId) -> Ended {
        match id.0.checked_sub(WHOLE).and_then(|number| u32::try_from(number).ok()) {
            Some(number) => Ended::Request(number),
            None => Ended::Op(self.take(id)),
        }
    }

    fn take(&mut self, id: OpId) -> Op {
        let op = u32::try_from(id.0).ok().and_then(|number| self.under_way.remove(number));
        let Some(op) = op else { unreachable!("the engine has completed an operation that was never pushed: {id:?}") };
        op
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::Until;
    use crate::memory_io::MemoryIo;

    /// An engine with room for one operation.
    fn setup() -> (Ops, MemoryIo) {
        (Ops::with_capacity(0), MemoryIo { room: 1, ..MemoryIo::new(vec![Vec::new(); 3]) })
    }

    #[test]
    fn operations_end_as_what_they_were_in_the_order_in_which_they_were_pushed() {
        let (mut ops, mut io) = setup();
        ops.push_request(7, FileId(0), Action::SyncData, &mut io);
        ops.push(Op::Sync, FileId(1), Action::SyncData, &mut io);
        ops.push_request(8, FileId(2), Action::SyncData, &mut io);
        assert_eq!(ops.len(), 1, "requests have their own numbers");
        let mut ended = Vec::new();
        while ended.len() < 3 {
            let mut done = Vec::new();
            io.reap(Until::Any, &mut done).unwrap();
            ended.extend(done.into_iter().map(|done| match ops.ended(done.op.id) {
                Ended::Request(number) => (done.op.file.0, Some(number)),
                Ended::Op(op) => {
                    assert!(matches!(op, Op::Sync));
                    (done.op.file.0, None)
                }
            }));
            ops.retry(&mut io);
        }
        assert_eq!(ended, [(0, Some(7)), (1, None), (2, Some(8))]);
    }

    #[test]
    #[should_panic = "that was never pushed"]
    fn an_operation_ends_once() {
        let (mut ops, mut io) = setup();
        ops.push(Op::Sync, FileId(1), Action::SyncData, &mut io);
        ops.ended(OpId(0));
        ops.ended(OpId(0));
    }
}
