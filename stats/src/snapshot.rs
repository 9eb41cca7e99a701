//! A reading of a page at one moment, and the differences between two of them.

use crate::layout::*;

/// A number of a page, for computing: beyond 2^53 it is not exact, which is no matter for a rate or a mean.
#[allow(clippy::cast_precision_loss, reason = "see above")]
pub fn float(number: u64) -> f64 {
    number as f64
}

/// The counters of a page at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The description of the disk, in JSON, from the process that serves it.
    pub identity: String,
    /// The process that writes the page; `None` once it has ended on request.
    pub pid: Option<u32>,
    /// How many processes have written the page.
    pub incarnation: u64,
    /// When the page was begun, in nanoseconds of CLOCK_MONOTONIC, as all times here.
    pub created: u64,
    /// When the present process has begun to write it.
    pub started: u64,
    /// When it was last written.
    pub updated: u64,
    /// When it was read.
    pub read: u64,
    /// Whether the CPU's counter is no clock here, so that each look at the time is a call.
    pub slow_clock: bool,
    /// Each attempt met a batch being written, or the writer was killed in one: the counters may be of two batches.
    pub torn: bool,
    /// The counters of each kind of request.
    pub kinds: [KindCounts; KINDS],
    /// The counters of the whole disk.
    pub(crate) counts: [u64; Count::ALL.len()],
    /// The requests in flight, the oldest first.
    pub in_flight: Vec<InFlight>,
}

/// The counters of a kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KindCounts {
    pub(crate) fields: [u64; KIND_FIELDS],
}

/// A request of which everything was kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number among all that were traced.
    pub number: u64,
    /// Its kind.
    pub kind: Kind,
    /// How it ended.
    pub outcome: Outcome,
    /// Where it begins, in bytes.
    pub at: u64,
    /// How many bytes it was for.
    pub len: u64,
    /// When it could have been seen.
    pub seen: u64,
    /// The time that it spent in each stage, in nanoseconds.
    pub stages: [u64; STAGES],
    /// When its peer had been signalled, which the last stage ends with.
    pub shown: u64,
}

impl Record {
    /// How long it took, in nanoseconds.
    pub fn whole(&self) -> u64 {
        self.stages.iter().fold(0, |sum, ns| sum.saturating_add(*ns))
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlight {
    /// Its kind.
    pub kind: Kind,
    /// Where it begins, in bytes.
    pub at: u64,
    /// How many bytes it is for.
    pub len: u64,
    /// When it was taken.
    pub taken: u64,
    /// When an operation of it was last given to the kernel, if one was.
    pub submitted: Option<u64>,
}

impl InFlight {
    /// The stage in which it seems to be.
    pub fn stage(&self) -> Stage {
        if self.submitted.is_some() { Stage::Storage } else { Stage::Map }
    }
}

impl KindCounts {
    fn field(&self, field: usize) -> u64 {
        self.fields.get(field).copied().unwrap_or(0)
    }

    /// Requests that have ended.
    pub fn count(&self) -> u64 {
        self.field(ENDED)
    }

    /// Bytes of the requests that have ended.
    pub fn bytes(&self) -> u64 {
        self.field(BYTES)
    }

    /// The longest of them, in nanoseconds.
    pub fn longest(&self) -> u64 {
        self.field(LONGEST)
    }

    /// Those that took several operations in turn.
    pub fn splits(&self) -> u64 {
        self.field(SPLITS)
    }

    /// Those that ended so.
    pub fn errors(&self, outcome: Outcome) -> u64 {
        outcome.error().map_or(0, |error| self.field(ERRORS + error))
    }

    /// All that failed.
    pub fn all_errors(&self) -> u64 {
        Outcome::ERRORS.iter().fold(0, |sum, outcome| sum.saturating_add(self.errors(*outcome)))
    }

    /// The sum of what they spent in a stage, in nanoseconds. Its growth in a second, divided by the nanoseconds of a
    /// second, is the average number of requests in that stage (Little's law).
    pub fn sum(&self, stage: Stage) -> u64 {
        self.field(SUMS + stage as usize)
    }

    /// The sum of their durations, in nanoseconds.
    pub fn sum_of_all(&self) -> u64 {
        Stage::ALL.iter().fold(0, |sum, stage| sum.wrapping_add(self.sum(*stage)))
    }

    /// The difference from an earlier reading. The longest duration is that of all time.
    #[must_use]
    pub fn since(&self, before: &KindCounts) -> KindCounts {
        let mut fields = self.fields;
        for (field, (value, was)) in fields.iter_mut().zip(before.fields).enumerate() {
            if field != LONGEST {
                *value = value.saturating_sub(was);
            }
        }
        KindCounts { fields }
    }

    /// Together with those of another kind or disk.
    #[must_use]
    pub fn with(&self, other: &KindCounts) -> KindCounts {
        let mut fields = self.fields;
        for (field, (value, more)) in fields.iter_mut().zip(other.fields).enumerate() {
            *value = if field == LONGEST { more.max(*value) } else { value.saturating_add(more) };
        }
        KindCounts { fields }
    }
}

impl Snapshot {
    /// The counters of a kind of request.
    pub fn kind(&self, kind: Kind) -> KindCounts {
        self.kinds.get(kind as usize).copied().unwrap_or_default()
    }

    /// The counters of all kinds together.
    pub fn all_kinds(&self) -> KindCounts {
        self.kinds.iter().fold(KindCounts::default(), |sum, kind| sum.with(kind))
    }

    /// A counter of the whole disk.
    pub fn count(&self, count: Count) -> u64 {
        self.counts.get(count as usize).copied().unwrap_or(0)
    }

    /// How many requests of a kind are in flight.
    pub fn in_flight(&self, kind: Kind) -> u64 {
        self.in_flight.iter().filter(|request| request.kind == kind).count() as u64
    }

    /// How long the oldest request of a kind has been in flight, in nanoseconds.
    pub fn oldest(&self, kind: Kind) -> Option<u64> {
        let of_kind = self.in_flight.iter().find(|request| request.kind == kind);
        of_kind.map(|request| self.read.saturating_sub(request.taken))
    }

    /// How long the oldest request has been in flight, in nanoseconds.
    pub fn oldest_of_all(&self) -> Option<u64> {
        self.in_flight.first().map(|request| self.read.saturating_sub(request.taken))
    }
}
