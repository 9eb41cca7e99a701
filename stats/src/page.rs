//! The page, as the disk's thread writes it.
//!
//! It knows nothing about requests but their kind, place and times. Requests that went from stage to
//! stage together are counted together. What has changed is written when the answers are published
//! ([`Page::publish_batch`]), between two changes of a sequence number: a reader that finds the same even number before
//! and after has seen one moment. Slots, errors and the counters of the whole disk are written as they change.
//!
//! The file has no memory for what was never counted. Memory is taken by fallocate before it is touched, so that a full
//! file system costs a histogram and never ends the process (SIGBUS). When the file is cut off, the counters continue
//! in memory of the process's own.

mod histograms;
mod trace;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use memory::{Mapping, Shared};
use rustix::fs::{FallocateFlags, fallocate, ftruncate};

use crate::clock::{Source, monotonic};
use crate::layout::*;
use histograms::Histograms;
use trace::Trace;

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// It cannot be made as long as it must be, or mapped.
    #[error("cannot {what} the statistics page")]
    Failed {
        /// What was tried.
        what: &'static str,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// It is somebody's file.
    #[error("it is not empty, and not a statistics page: nothing is written there")]
    NotAPage,
}

/// The slot of a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u16);

impl Slot {
    /// Of a request for which there was none.
    pub const NONE: Slot = Slot(u16::MAX);
}

/// When a request went from one stage to the next, in nanoseconds of the clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// When it could have been seen first, and when it was taken.
    pub seen: u64,
    /// It was taken.
    pub taken: u64,
    /// Its first operation was begun; zero: there was none.
    pub begun: u64,
    /// Its last operation has ended.
    pub ended: u64,
    /// How long none of its operations was under way, between two of them.
    pub split: u64,
    /// How long one was begun, and none with the kernel.
    pub queue: u64,
}

impl Spent {
    /// The stages of a request that had its answer at one time, which was shown at another.
    pub(crate) fn stages(&self, answered: u64, shown: u64) -> [u64; STAGES] {
        let (begun, ended) = if self.begun == 0 { (answered, answered) } else { (self.begun, self.ended) };
        [
            self.taken.saturating_sub(self.seen),
            begun.saturating_sub(self.taken),
            self.split,
            self.queue,
            ended.saturating_sub(begun).saturating_sub(self.split).saturating_sub(self.queue),
            answered.saturating_sub(ended),
            shown.saturating_sub(answered),
        ]
    }
}

/// The page of one disk, written by its thread.
pub struct Page {
    shared: Shared,
    histograms: Histograms,
    sequence: u64,
    free: Vec<u16>,
    /// One more than the highest slot that was ever used.
    slots_used: u16,
    /// Requests that have their answers, which are not published yet.
    answered: Vec<Group>,
    /// A process before this one has written it.
    continued: bool,
    trace: Option<Trace>,
}

/// Requests of one kind that went from stage to stage together, as those of one batch do.
#[derive(Clone, Copy, Debug)]
struct Group {
    kind: Kind,
    spent: Spent,
    /// When they had their answers.
    answered: u64,
    count: u64,
    bytes: u64,
    /// Of a single request that is traced: where it began, and how it ended.
    traced: Option<(u64, Outcome)>,
}

impl Group {
    /// Whether a request belongs to it. What is not compared follows from the rest: requests that were taken together
    /// could have been seen together, and what is not split or queued is storage.
    #[inline(always)]
    fn is_of(&self, kind: Kind, spent: &Spent, answered: u64) -> bool {
        let Spent { taken, begun, ended, split, queue, .. } = self.spent;
        self.kind == kind
            && (taken ^ spent.taken | begun ^ spent.begun | ended ^ spent.ended) == 0
            && (split ^ spent.split | queue ^ spent.queue | self.answered ^ answered) == 0
    }
}

impl Page {
    /// A page that is private to this process.
    pub fn anonymous() -> Result<Page, PageError> {
        let mapping = Mapping::anonymous(PAGE_LEN).map_err(failed("map"))?;
        Ok(Page::over(Shared::of(mapping), None))
    }

    /// The page in `file`, which is open for reading and writing. A page that a process before this one has written is
    /// continued; any other file is initialized. `identity` says what the disk is, as JSON.
    pub fn begin(file: File, source: Source, identity: &str) -> Result<Page, PageError> {
        let len = file.metadata().map_err(failed("measure"))?.len();
        let is_whole = len == PAGE_LEN as u64;
        if len > 0 && !is_page(&file, is_whole).map_err(failed("read"))? {
            return Err(PageError::NotAPage);
        }
        if !is_whole {
            ftruncate(&file, 0).map_err(|errno| failed("empty")(errno.into()))?;
            ftruncate(&file, PAGE_LEN as u64).map_err(|errno| failed("size")(errno.into()))?;
        }
        // The head and the slots are written at any time.
        histograms::take_memory(&file, 0, HISTOGRAMS_AT).map_err(failed("take memory for"))?;
        let mapping = Mapping::of_shrinking_file(file.as_fd(), PAGE_LEN).map_err(failed("map"))?;
        let mut page = Page::over(Shared::of(mapping), Some(file));
        page.continued = page.continue_counting();
        if !page.continued {
            page.begin_anew()?;
        }
        page.introduce(source, identity);
        Ok(page)
    }

    fn over(shared: Shared, file: Option<File>) -> Page {
        Page {
            shared,
            histograms: Histograms::new(file),
            sequence: 0,
            // The first ones are used first, so that a reader has few to look at.
            free: (0..SLOTS).rev().collect(),
            slots_used: 0,
            answered: Vec::with_capacity(64),
            continued: false,
            trace: None,
        }
    }

    /// Continues the page of an earlier process; returns whether there was one.
    fn continue_counting(&mut self) -> bool {
        if self.load(MAGIC_AT) != MAGIC || self.load(VERSION_AT) != VERSION || self.load(LEN_AT) != PAGE_LEN as u64 {
            return false;
        }
        // Requests in flight are taken again, or abandoned by their peer.
        self.store(Count::NotInSlot.at(), 0);
        // It may have been killed while it wrote: an odd number is rounded down; `introduce` stores the next even one.
        self.sequence = self.load(SEQUENCE_AT) & !1;
        true
    }

    /// Initializes a page that does not exist or has another version, whose bytes mean something else.
    fn begin_anew(&mut self) -> Result<(), PageError> {
        if let Some(file) = self.histograms.file() {
            let whole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let punched = fallocate(file, whole, HISTOGRAMS_AT as u64, (PAGE_LEN - HISTOGRAMS_AT) as u64);
            punched.map_err(|errno| failed("empty")(errno.into()))?;
        }
        for at in (0..HISTOGRAMS_AT).step_by(8) {
            self.store(at, 0);
        }
        self.store(VERSION_AT, VERSION);
        self.store(LEN_AT, PAGE_LEN as u64);
        self.store(CREATED_AT, monotonic());
        Ok(())
    }

    /// Says which disk this is, and who writes.
    fn introduce(&mut self, source: Source, identity: &str) {
        self.store(SEQUENCE_AT, self.sequence | 1);
        for slot in 0..SLOTS.into() {
            self.store(slot_at(slot), 0);
        }
        let bytes = identity.as_bytes();
        // A text that is cut is no JSON: better none.
        let bytes = if bytes.len() <= IDENTITY_MAX { bytes } else { b"{}" };
        self.store(IDENTITY_AT, bytes.len() as u64);
        for (word, chunk) in bytes.chunks(8).enumerate() {
            let mut eight = [0; 8];
            eight.iter_mut().zip(chunk).for_each(|(place, byte)| *place = *byte);
            self.store(IDENTITY_AT + 8 + word * 8, u64::from_ne_bytes(eight));
        }
        let now = monotonic();
        let incarnation = self.load(INCARNATION_AT);
        self.store(INCARNATION_AT, incarnation.saturating_add(1));
        self.store(PID_AT, u64::from(std::process::id()));
        self.store(STARTED_AT, now);
        self.store(SOURCE_AT, u64::from(source == Source::Kernel));
        // One that was killed may have left the memory of its trace.
        self.end_trace();
        self.store(UPDATED_AT, now);
        self.store(SLOTS_USED_AT, 0);
        self.sequence = self.sequence.wrapping_add(2);
        self.publish(SEQUENCE_AT, self.sequence);
        self.publish(MAGIC_AT, MAGIC);
    }

    /// Whether a process before this one has counted in it.
    pub fn is_continued(&self) -> bool {
        self.continued
    }

    /// Records that the process ends on request: the page has no writer any more.
    pub fn leave(&mut self) {
        self.store(PID_AT, 0);
    }

    /// Records a request for `len` bytes that was taken at this time. Its slot is given back with [`Page::ended`] or
    /// [`Page::given_back`].
    #[inline(always)]
    pub fn came(&mut self, kind: Kind, taken: u64, at: u64, len: u64) -> Slot {
        let Some(slot) = self.free.pop() else { return self.no_slot() };
        if slot >= self.slots_used {
            self.one_more_slot(slot);
        }
        if let Some(place) = self.shared.window::<SLOT_LEN, 8>(slot_at(usize::from(slot))) {
            place.store_u64_native(8, at);
            place.store_u64_native(16, len << 8 | kind as u64);
            place.store_u64_native(0, taken);
        }
        Slot(slot)
    }

    #[cold]
    fn no_slot(&mut self) -> Slot {
        self.count(Count::NotInSlot, 1);
        Slot::NONE
    }

    #[cold]
    fn one_more_slot(&mut self, slot: u16) {
        self.slots_used = slot + 1;
        self.store(SLOTS_USED_AT, u64::from(self.slots_used));
    }

    /// An operation of the request in this slot was given to the kernel.
    #[inline(always)]
    pub fn submitted(&self, slot: Slot, at: u64) {
        if slot != Slot::NONE {
            self.store(slot_at(usize::from(slot.0)) + 24, at);
        }
    }

    /// A request was given back to its peer, as if it had not come.
    #[inline(always)]
    pub fn given_back(&mut self, slot: Slot) {
        if slot == Slot::NONE {
            return self.count(Count::NotInSlot, u64::MAX);
        }
        self.store(slot_at(usize::from(slot.0)), 0);
        self.free.push(slot.0);
    }

    /// A request has its answer at that time. Its peer sees it with the next [`Page::publish_batch`].
    #[inline(always)]
    pub fn ended(&mut self, kind: Kind, slot: Slot, bytes: u64, outcome: Outcome, spent: &Spent, at: u64) {
        if self.trace.is_some() {
            return self.ended_traced(kind, slot, bytes, outcome, spent, at);
        }
        self.given_back(slot);
        if outcome != Outcome::Done {
            self.failed(kind, outcome);
        }
        match self.answered.last_mut() {
            Some(last) if last.is_of(kind, spent, at) => {
                last.count += 1;
                last.bytes += bytes;
            }
            _ => self.answered.push(Group { kind, spent: *spent, answered: at, count: 1, bytes, traced: None }),
        }
    }

    #[cold]
    fn failed(&mut self, kind: Kind, outcome: Outcome) {
        if let Some(error) = outcome.error() {
            self.shared.add_u64_native(kind_at(kind as usize) + (ERRORS + error) * 8, 1);
        }
    }

    /// Adds to a counter of the whole disk.
    #[inline(always)]
    pub fn count(&mut self, count: Count, more: u64) {
        let added = self.shared.add_u64_native(count.at(), more);
        debug_assert!(added.is_some());
    }

    /// A counter of the whole disk.
    pub fn counted(&self, count: Count) -> u64 {
        self.load(count.at())
    }

    /// Requests of a kind that have ended and were shown to their peers, their bytes, and the sum of their durations in
    /// nanoseconds.
    pub fn totals(&self, kind: Kind) -> (u64, u64, u64) {
        let field = |field: usize| self.load(kind_at(kind as usize) + field * 8);
        (field(ENDED), field(BYTES), (0..STAGES).fold(0, |sum, stage| sum.wrapping_add(field(SUMS + stage))))
    }

    /// Requests of a kind in flight that have a slot, and the sum of their ages at `now`, in nanoseconds.
    pub fn in_flight(&self, kind: Kind, now: u64) -> (u64, u64) {
        let of = |slot| {
            let taken = self.load(slot_at(slot));
            let is_one = taken > 0 && self.load(slot_at(slot) + 16) & 0xff == kind as u64;
            is_one.then(|| now.saturating_sub(taken))
        };
        let ages = (0..usize::from(self.slots_used)).filter_map(of);
        ages.fold((0, 0), |(count, sum), age| (count + 1, age.saturating_add(sum)))
    }

    /// Whether answers were given since the last batch was published.
    #[inline(always)]
    pub fn is_due(&self) -> bool {
        !self.answered.is_empty()
    }

    /// The answers given since the last call were shown to their peers, at that time.
    #[inline(always)]
    pub fn publish_batch(&mut self, at: u64) {
        self.store(SEQUENCE_AT, self.sequence | 1);
        std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
        let mut next = 0;
        while let Some(group) = self.answered.get(next).copied() {
            self.add_group(&group, at);
            if group.traced.is_some() {
                self.record(&group, at);
            }
            next += 1;
        }
        self.answered.clear();
        self.store(UPDATED_AT, at);
        self.sequence = self.sequence.wrapping_add(2) & !1;
        self.publish(SEQUENCE_AT, self.sequence);
    }

    #[inline(always)]
    fn add_group(&mut self, group: &Group, at: u64) {
        let Group { kind, spent, answered, count, bytes, .. } = *group;
        let stages = spent.stages(answered, at);
        let whole = at.saturating_sub(spent.seen);
        let Some(fields) = self.shared.window::<KIND_LEN, 8>(kind_at(kind as usize)) else { return };
        fields.add_u64_native(ENDED * 8, count);
        fields.add_u64_native(BYTES * 8, bytes);
        for (stage, ns) in stages.into_iter().enumerate() {
            fields.add_u64_native((SUMS + stage) * 8, ns.wrapping_mul(count));
        }
        if spent.split > 0 {
            fields.add_u64_native(SPLITS * 8, count);
        }
        if fields.load_u64_native(LONGEST * 8).is_some_and(|longest| longest < whole) {
            fields.store_u64_native(LONGEST * 8, whole);
        }
        self.histograms.add(&self.shared, kind, &stages, whole, count);
    }

    #[inline(always)]
    fn store(&self, at: usize, value: u64) {
        // Every place is within the page, whose layout is checked by the compiler.
        let stored = self.shared.store_u64_native(at, value);
        debug_assert!(stored.is_some());
    }

    fn load(&self, at: usize) -> u64 {
        self.shared.load_u64_native(at).unwrap_or(0)
    }

    #[inline(always)]
    fn publish(&self, at: usize, value: u64) {
        let stored = self.shared.publish_u64_native(at, value);
        debug_assert!(stored.is_some());
    }
}

/// Whether a file that is not empty is a page, of any version; or the beginning of one, whose process was killed before
/// it had its first bytes.
fn is_page(file: &File, is_whole: bool) -> io::Result<bool> {
    let mut magic = [0; 8];
    match file.read_exact_at(&mut magic, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
        read => read?,
    }
    let magic = u64::from_ne_bytes(magic);
    Ok(magic == MAGIC || is_whole && magic == 0)
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> PageError {
    move |source| PageError::Failed { what, source }
}

#[cfg(test)]
mod test;
