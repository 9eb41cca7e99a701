//! The histograms of the page, which take the memory of the magnitudes that occur in them.

use std::fs::File;
use std::io;

use memory::Shared;
use rustix::fs::{FallocateFlags, fallocate};

use crate::histogram::{LINEAR_BITS, bucket_of};
use crate::layout::*;

/// Durations that a full file system has kept out of a histogram before memory is requested again.
pub(super) const ASK_AGAIN: u64 = 4096;

/// The histograms of a page.
pub(super) struct Histograms {
    /// The file, for more memory; none if the page is this process's own.
    file: Option<File>,
    /// The rows of each histogram that have memory, a bit each.
    rows: [[u64; HISTOGRAMS]; KINDS],
    /// Durations to be lost before memory is requested again.
    patience: u64,
}

impl Histograms {
    pub fn new(file: Option<File>) -> Histograms {
        let rows = if file.is_some() { 0 } else { u64::MAX };
        Histograms { file, rows: [[rows; HISTOGRAMS]; KINDS], patience: 0 }
    }

    /// The file of the page.
    pub fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Adds `count` requests of a kind that spent so long in each stage, and in all of them.
    ///
    /// It is done for each request of a client that has one at a time: everything is at a place that the compiler
    /// knows, but for the bucket.
    #[inline(always)]
    pub fn add(&mut self, shared: &Shared, kind: Kind, stages: &[u64; STAGES], whole: u64, count: u64) {
        let Some(place) = shared.window::<HISTOGRAMS_LEN, 8>(histogram_at(kind as usize, 0)) else { return };
        let Some(rows) = self.rows.get(kind as usize) else { return };
        let [ring, map, split, queue, storage, completion, notify] = *stages;
        let durations = [ring, map, split, queue, storage, completion, notify, whole];
        let mut missing = 0u32;
        // Unrolled by hand, since the compiler does not.
        let mut one = |histogram: usize, ns: u64, rows: u64| {
            // Most requests have nothing to do with two of the stages, and nothing is known from their zeroes.
            if ns != 0 {
                let bucket = bucket_of(ns);
                if rows >> (bucket >> LINEAR_BITS) & 1 != 0 {
                    place.add_u64_native(histogram * HISTOGRAM_LEN + bucket * 8, count);
                } else {
                    missing |= 1 << histogram;
                }
            }
        };
        one(0, ring, rows[0]);
        one(1, map, rows[1]);
        one(2, split, rows[2]);
        one(3, queue, rows[3]);
        one(4, storage, rows[4]);
        one(5, completion, rows[5]);
        one(6, notify, rows[6]);
        one(7, whole, rows[7]);
        if missing != 0 {
            self.add_with_memory(shared, kind, &durations, missing, count);
        }
    }

    /// Adds to the histograms of the bits in `missing`, after memory was taken for their rows.
    #[cold]
    #[inline(never)]
    fn add_with_memory(
        &mut self,
        shared: &Shared,
        kind: Kind,
        durations: &[u64; HISTOGRAMS],
        missing: u32,
        count: u64,
    ) {
        for (histogram, ns) in durations.iter().enumerate().filter(|(histogram, _)| missing >> histogram & 1 != 0) {
            let bucket = bucket_of(*ns);
            let at = histogram_at(kind as usize, histogram);
            let counted = match self.take_row(kind, histogram, bucket >> LINEAR_BITS, count) {
                true => at + bucket * 8,
                false => Count::NotInHistogram.at(),
            };
            shared.add_u64_native(counted, count);
        }
    }

    /// Takes memory for a row of a histogram. Whether there is some.
    fn take_row(&mut self, kind: Kind, histogram: usize, row: usize, count: u64) -> bool {
        let Some(file) = &self.file else { return true };
        if self.patience > 0 {
            self.patience = self.patience.saturating_sub(count);
            return false;
        }
        if take_memory(file, histogram_at(kind as usize, histogram) + row * ROW_LEN, ROW_LEN).is_err() {
            self.patience = ASK_AGAIN;
            return false;
        }
        if let Some(rows) = self.rows.get_mut(kind as usize).and_then(|kind| kind.get_mut(histogram)) {
            *rows |= 1 << row;
        }
        true
    }
}

/// Takes memory for a part of the page's file.
pub(super) fn take_memory(file: &File, at: usize, len: usize) -> io::Result<()> {
    Ok(fallocate(file, FallocateFlags::KEEP_SIZE, at as u64, len as u64)?)
}
