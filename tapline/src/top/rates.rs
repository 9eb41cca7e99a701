//! Rates and queue sizes of a disk between two readings of its page.
//!
//! The time that requests spend includes that of requests in flight: up to a time t it is the sum of all durations plus
//! the ages at t of the requests in flight. Its growth between two readings, divided by the time between them, is the
//! average queue size (Little's law), also while a request is stuck; and it does not jump when that ends. Invariant: no
//! rate is negative, whatever the page contains.

use stats::{Count, Kind, STAGES, Snapshot, Stage, float};

/// Number of kinds of requests.
pub const KINDS: usize = Kind::ALL.len();

/// The layers in which a request can be, from the guest down to the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// In the ring or the socket, not yet taken.
    Ring,
    /// With the disk process.
    Tapline,
    /// With the kernel, and everything below.
    Storage,
}

/// Figures of the requests of one kind in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KindRates {
    /// Number of requests that ended.
    pub ended: f64,
    /// Bytes of these requests.
    pub bytes: f64,
    /// Number of these requests that failed.
    pub errors: f64,
    /// Requests that ended per second.
    pub per_second: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Average number of requests in flight.
    pub queue: f64,
    /// Average number of requests in each stage.
    pub stages: [f64; STAGES],
    /// Time that the requests that ended have spent in each stage, in nanoseconds.
    pub sums: [f64; STAGES],
}

/// Figures of one or several disks in an interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// The measured length of the interval.
    pub seconds: f64,
    /// Figures by kind, in the order of `Kind`.
    pub kinds: [KindRates; KINDS],
}

/// Rates between two readings; `None` if the page was restarted between them, so that its counters cannot be compared.
pub fn between(before: &Snapshot, now: &Snapshot) -> Option<Rates> {
    let ns = now.read.checked_sub(before.read).filter(|ns| *ns > 0)?;
    if now.created != before.created
        || now.incarnation < before.incarnation
        || Kind::ALL.iter().any(|kind| {
            let (now, before) = (now.kind(*kind), before.kind(*kind));
            let sums_fell = Stage::ALL.iter().any(|stage| now.sum(*stage) < before.sum(*stage));
            sums_fell || now.count() < before.count() || now.bytes() < before.bytes()
        })
    {
        return None;
    }
    let seconds = float(ns) / 1e9;
    let mut rates = Rates { seconds, ..Rates::default() };
    for (kind, of_kind) in Kind::ALL.into_iter().zip(&mut rates.kinds) {
        *of_kind = of_one_kind(kind, before, now, ns);
    }
    Some(rates)
}

fn of_one_kind(kind: Kind, before: &Snapshot, now: &Snapshot, ns: u64) -> KindRates {
    let counts = now.kind(kind).since(&before.kind(kind));
    let (seconds, interval) = (float(ns) / 1e9, float(ns));
    let ages = ages(now, kind);
    // Requests in flight of an earlier process are never summed: its successor accepts them again.
    let ages_before = if now.incarnation == before.incarnation { self::ages(before, kind) } else { [0.0; STAGES] };
    let mut stages = [0.0; STAGES];
    for (stage, queue) in Stage::ALL.into_iter().zip(&mut stages) {
        let at = stage as usize;
        let age = ages.get(at).copied().unwrap_or(0.0) - ages_before.get(at).copied().unwrap_or(0.0);
        *queue = (float(counts.sum(stage)) + age) / interval;
    }
    // A request that the writer moved between lists during the reading may be missing or counted twice, and so its age.
    // The number of requests at any time is at most that of those that have ended or are left.
    let unseen = now.count(Count::NotInSlot);
    let at_most = float(counts.count().saturating_add(now.in_flight(kind)).saturating_add(unseen));
    let queue = stages.iter().sum::<f64>().clamp(0.0, at_most);
    // While a request takes several operations in turn, its age moves between stages.
    stages.iter_mut().for_each(|stage| *stage = stage.clamp(0.0, queue));
    KindRates {
        ended: float(counts.count()),
        bytes: float(counts.bytes()),
        errors: float(counts.all_errors()),
        per_second: float(counts.count()) / seconds,
        bytes_per_second: float(counts.bytes()) / seconds,
        queue,
        stages,
        sums: Stage::ALL.map(|stage| float(counts.sum(stage))),
    }
}

/// Ages of the requests of a kind in flight, by stage, in nanoseconds.
fn ages(snapshot: &Snapshot, kind: Kind) -> [f64; STAGES] {
    let mut ages = [0.0; STAGES];
    for request in snapshot.in_flight.iter().filter(|request| request.kind == kind) {
        let submitted = request.submitted.unwrap_or(snapshot.read).min(snapshot.read);
        if let Some(map) = ages.get_mut(Stage::Map as usize) {
            *map += float(submitted.saturating_sub(request.taken));
        }
        if let Some(storage) = ages.get_mut(Stage::Storage as usize) {
            *storage += float(snapshot.read.saturating_sub(submitted.max(request.taken)));
        }
    }
    ages
}

impl KindRates {
    /// Average number of requests in a stage.
    pub fn stage(&self, stage: Stage) -> f64 {
        self.stages.get(stage as usize).copied().unwrap_or(0.0)
    }

    /// Time that the requests that ended have spent in a stage, in nanoseconds.
    pub fn sum(&self, stage: Stage) -> f64 {
        self.sums.get(stage as usize).copied().unwrap_or(0.0)
    }

    /// Average number of requests in a layer.
    pub fn layer(&self, layer: Layer) -> f64 {
        match layer {
            Layer::Ring => self.stage(Stage::Ring),
            Layer::Storage => self.stage(Stage::Storage),
            Layer::Tapline => [Stage::Map, Stage::Split, Stage::Queue, Stage::Completion, Stage::Notify]
                .iter()
                .map(|stage| self.stage(*stage))
                .sum(),
        }
    }

    fn add(&mut self, other: &KindRates) {
        self.ended += other.ended;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.per_second += other.per_second;
        self.bytes_per_second += other.bytes_per_second;
        self.queue += other.queue;
        self.stages.iter_mut().zip(other.stages).for_each(|(stage, more)| *stage += more);
        self.sums.iter_mut().zip(other.sums).for_each(|(sum, more)| *sum += more);
    }
}

impl Rates {
    /// The rates of a kind.
    pub fn kind(&self, kind: Kind) -> KindRates {
        self.kinds.get(kind as usize).copied().unwrap_or_default()
    }

    /// The sum of the rates of all kinds.
    pub fn all(&self) -> KindRates {
        self.kinds.iter().fold(KindRates::default(), |mut sum, kind| {
            sum.add(kind);
            sum
        })
    }

    /// The average size of reads and writes, in bytes.
    pub fn average_size(&self) -> Option<f64> {
        let (reads, writes) = (self.kind(Kind::Read), self.kind(Kind::Write));
        let count = reads.per_second + writes.per_second;
        (count > 0.0).then(|| (reads.bytes_per_second + writes.bytes_per_second) / count)
    }

    /// Adds the rates of another disk in the same interval.
    pub fn add(&mut self, other: &Rates) {
        self.seconds = self.seconds.max(other.seconds);
        self.kinds.iter_mut().zip(&other.kinds).for_each(|(kind, more)| kind.add(more));
    }
}

#[cfg(test)]
#[path = "rates/test.rs"]
mod test;
