//! Where everything stands in the page. All numbers have 64 bits in the byte order of the machine, which never leaves
//! it.
//!
//! | at | what |
//! |---|---|
//! | 0 | the head: magic, version, length, who writes, counters of the whole disk |
//! | 512 | what the disk is, as JSON |
//! | 2048 | counters of each kind of request |
//! | 4096 | the requests in flight, a slot of 32 bytes each |
//! | 36864 | the histograms: for each kind of request, one of each stage and one of the whole |
//! | 5443584 | the records of traced requests, if any were ever traced |

use crate::histogram::{BUCKETS, ROW, ROWS};

/// The first eight bytes.
pub(crate) const MAGIC: u64 = u64::from_ne_bytes(*b"TAPSTATS");
/// The version of this layout. A page of another version is not read, and initialized by the next process that writes.
pub(crate) const VERSION: u64 = 1;

pub(crate) const MAGIC_AT: usize = 0;
pub(crate) const VERSION_AT: usize = 8;
/// The length of the file.
pub(crate) const LEN_AT: usize = 16;
/// Odd while the counters are being written.
pub(crate) const SEQUENCE_AT: usize = 24;
/// How many processes have written the page.
pub(crate) const INCARNATION_AT: usize = 32;
/// The process that writes it; zero after an end on request, unchanged after a kill.
pub(crate) const PID_AT: usize = 40;
/// When the page was begun, and when the present process has begun to write it.
pub(crate) const CREATED_AT: usize = 48;
pub(crate) const STARTED_AT: usize = 56;
/// When it was last written.
pub(crate) const UPDATED_AT: usize = 64;
/// Where times come from: [`crate::Source`].
pub(crate) const SOURCE_AT: usize = 72;
/// One more than the highest slot that the present process has used.
pub(crate) const SLOTS_USED_AT: usize = 80;
/// Until when requests are traced; zero: they are not.
pub(crate) const TRACED_UNTIL_AT: usize = 88;
/// How many requests were ever traced.
pub(crate) const TRACED_AT: usize = 96;
/// No disk traces this many requests: a larger number is damage.
pub(crate) const TRACED_MAX: u64 = 1 << 63;
/// The counters of the whole disk ([`Count`]).
pub(crate) const COUNTS_AT: usize = 128;

/// The description of the disk, as JSON: the length, then the bytes.
pub(crate) const IDENTITY_AT: usize = 512;
pub(crate) const IDENTITY_MAX: usize = 1528;

pub(crate) const KINDS_AT: usize = 2048;
/// Bytes of the counters of a kind of request.
pub(crate) const KIND_LEN: usize = 160;

pub(crate) const SLOTS_AT: usize = 4096;
/// Requests in flight that can be seen. More are counted, and not seen.
pub const SLOTS: u16 = 1024;
pub(crate) const SLOT_LEN: usize = 32;

pub(crate) const HISTOGRAMS_AT: usize = SLOTS_AT + SLOTS as usize * SLOT_LEN;
pub(crate) const ROW_LEN: usize = ROW * 8;
pub(crate) const HISTOGRAM_LEN: usize = ROWS * ROW_LEN;
/// Histograms of a kind: of each stage, and of the whole.
pub(crate) const HISTOGRAMS: usize = STAGES + 1;
/// Bytes of the histograms of a kind.
pub(crate) const HISTOGRAMS_LEN: usize = HISTOGRAMS * HISTOGRAM_LEN;

/// The records of traced requests, the newest over the oldest.
pub(crate) const TRACE_AT: usize = HISTOGRAMS_AT + KINDS * HISTOGRAMS_LEN;
/// Records that are kept.
pub const RECORDS: usize = 32_768;
pub(crate) const RECORD_LEN: usize = 96;
pub(crate) const TRACE_LEN: usize = RECORDS * RECORD_LEN;

/// Bytes of the whole page.
pub(crate) const PAGE_LEN: usize = TRACE_AT + TRACE_LEN;

const _: () = assert!(KINDS_AT + KINDS * KIND_LEN <= SLOTS_AT && KIND_LEN >= KIND_FIELDS * 8);
const _: () = assert!(COUNTS_AT + Count::ALL.len() * 8 <= IDENTITY_AT && IDENTITY_AT + 8 + IDENTITY_MAX <= KINDS_AT);
const _: () = assert!(HISTOGRAMS_AT % 4096 == 0 && ROW_LEN == 4096 && BUCKETS == ROW * ROWS);

/// Kinds of requests.
pub(crate) const KINDS: usize = 5;

/// A kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// A read.
    Read = 0,
    /// A write.
    Write = 1,
    /// A flush.
    Flush = 2,
    /// A discard.
    Discard = 3,
    /// A write of zeroes.
    WriteZeroes = 4,
}

impl Kind {
    /// All kinds, in the order of their values.
    pub const ALL: [Kind; KINDS] = [Kind::Read, Kind::Write, Kind::Flush, Kind::Discard, Kind::WriteZeroes];

    /// The name of the kind, as printed.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Write => "write",
            Kind::Flush => "flush",
            Kind::Discard => "discard",
            Kind::WriteZeroes => "write-zeroes",
        }
    }
}

/// Stages of a request.
pub const STAGES: usize = 7;

/// A stage of a request. Each begins where the one before it ends, and the durations of all of them add up to that of
/// the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Stage {
    /// In the ring or the socket, after the disk's thread could have seen it, until it is taken.
    Ring = 0,
    /// Taken, until its first operation is begun: checked, waiting for what it must not overtake, mapped.
    Map = 1,
    /// Between its operations, where it takes several in turn: none of them is under way.
    Split = 2,
    /// An operation is begun, and not yet given to the kernel.
    Queue = 3,
    /// An operation is with the kernel: the storage, and everything below.
    Storage = 4,
    /// Its last operation has ended, until it has its answer.
    Completion = 5,
    /// It has its answer, until its peer is signalled.
    Notify = 6,
}

impl Stage {
    /// All of them, in their order.
    pub const ALL: [Stage; STAGES] =
        [Stage::Ring, Stage::Map, Stage::Split, Stage::Queue, Stage::Storage, Stage::Completion, Stage::Notify];

    /// The name of the stage, as printed.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Ring => "ring",
            Stage::Map => "map",
            Stage::Split => "split",
            Stage::Queue => "queue",
            Stage::Storage => "storage",
            Stage::Completion => "completion",
            Stage::Notify => "notify",
        }
    }
}

/// How a request has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Done,
    /// The storage failed.
    Failed,
    /// There is no space.
    NoSpace,
    /// The disk does not write.
    Refused,
    /// It cannot be done.
    Unsupported,
}

impl Outcome {
    /// Those that are errors.
    pub const ERRORS: [Outcome; 4] = [Outcome::Failed, Outcome::NoSpace, Outcome::Refused, Outcome::Unsupported];

    /// The name of the outcome, as printed.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Done => "done",
            Outcome::Failed => "failed",
            Outcome::NoSpace => "no-space",
            Outcome::Refused => "refused",
            Outcome::Unsupported => "unsupported",
        }
    }

    /// Its counter among those of errors.
    pub(crate) fn error(self) -> Option<usize> {
        Outcome::ERRORS.iter().position(|error| *error == self)
    }
}

/// Counters of a kind of request: how many have ended, bytes, the longest, those that took several
/// operations in turn, errors, and the sum of each stage.
pub(crate) const KIND_FIELDS: usize = 4 + 4 + STAGES;
pub(crate) const ENDED: usize = 0;
pub(crate) const BYTES: usize = 1;
pub(crate) const LONGEST: usize = 2;
pub(crate) const SPLITS: usize = 3;
pub(crate) const ERRORS: usize = 4;
pub(crate) const SUMS: usize = 8;

/// A counter of the whole disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Rounds of the disk's thread.
    Rounds = 0,
    /// How often it slept.
    Sleeps = 1,
    /// Looks for more before sleeping that have found some.
    PollsHit = 2,
    /// Those that have not.
    PollsMissed = 3,
    /// How often memory was given back, since the disk was not used.
    Rests = 4,
    /// Durations that are in no histogram, since there was no memory for it.
    NotInHistogram = 5,
    /// Requests in flight that have no slot.
    NotInSlot = 6,
    /// For how long it has polled, in nanoseconds.
    PolledTime = 7,
    /// Requests that a limit of the disk has held back.
    Throttled = 8,
    /// For how many nanoseconds it has, in all.
    ThrottledNs = 9,
    /// Transfers that were split on their way to the storage.
    Splits = 10,
    /// Transfers that were merged into another one.
    Merges = 11,
    /// Those that were done again by themselves, since that one failed.
    Redone = 12,
    /// Requests that have waited for the disk's share of its storage.
    Shared = 13,
    /// For how many nanoseconds they have, in all.
    SharedNs = 14,
}

impl Count {
    /// All counters, in the order of their values.
    pub const ALL: [Count; 15] = [
        Count::Rounds,
        Count::Sleeps,
        Count::PollsHit,
        Count::PollsMissed,
        Count::Rests,
        Count::NotInHistogram,
        Count::NotInSlot,
        Count::PolledTime,
        Count::Throttled,
        Count::ThrottledNs,
        Count::Splits,
        Count::Merges,
        Count::Redone,
        Count::Shared,
        Count::SharedNs,
    ];

    pub(crate) fn at(self) -> usize {
        COUNTS_AT + self as usize * 8
    }
}

/// Where the counters of a kind stand.
pub(crate) fn kind_at(kind: usize) -> usize {
    KINDS_AT + kind * KIND_LEN
}

/// Where a slot stands.
pub(crate) fn slot_at(slot: usize) -> usize {
    SLOTS_AT + slot * SLOT_LEN
}

/// Where a histogram stands.
pub(crate) fn histogram_at(kind: usize, histogram: usize) -> usize {
    HISTOGRAMS_AT + (kind * HISTOGRAMS + histogram) * HISTOGRAM_LEN
}
