//! All layers of a chain folded into one map, so that a lookup does not walk the chain.
//!
//! The map is learned a grain at a time, when a grain is first asked for, and kept up to date by whoever changes
//! a layer. It may forget: a grain that is not known is learned again. Keeps: it never takes more memory than its budget,
//! whatever the disk's size and the chain's shape.
//!
//! **What is forgotten.** When there is too much, grains are drawn at random. One that was used since it was last drawn
//! stays (a second chance), any other goes. So what is used often stays. Of a working set larger than the budget as large
//! a part is found as there is room for, if it is read at random; read round and round, a smaller part, where forgetting
//! the oldest first would find nothing as soon as one grain is too many. Each lesson makes room for itself only, which takes
//! microseconds.
//!
//! **What the default budget holds**: 1,000,000 grains that live in one place each, which is 2 TiB of a disk written in
//! sequence (22 bytes each); or 270 GiB with a run for every 64 KiB; or 10 GiB with one for every 4 KiB, which is the worst
//! of what guests do.

mod grains;
mod runs;
mod units;

use grains::{Grain, Grains};
use runs::{Compact, Runs, overlaid};
pub use runs::{Run, Where, append};

use crate::Span;

/// Bytes of the disk that are learned at once: the block of most VHDs.
pub const GRAIN: u64 = 2 << 20;
/// The unit of everything in the map.
const SECTOR: u64 = 512;
/// Grains that are drawn to find one that was not used. After that the last one goes: one lesson must not take long.
const DRAWN_MAX: u32 = 16;
/// Entries by which the list of what is known grows.
const ROOM: usize = 4096;
/// Of the budget, the part that may go to naming tables: for disks beyond petabytes, whose end is then not kept.
const NAMES_PART: usize = 8;

/// The folded map.
#[derive(Debug)]
pub struct Fold {
    grains: Grains,
    /// The numbers of the known grains, in no order.
    known: Vec<u32>,
    /// Grains behind these are never kept.
    covered: u64,
    /// Length of the disk.
    end: u64,
    /// Bytes of memory.
    budget: usize,
    dice: u64,
}

impl Fold {
    /// A map of a disk of `len` bytes of which nothing is known, that takes no more than `budget` bytes.
    pub fn new(len: u64, budget: usize) -> Fold {
        let most = Grains::within(budget / NAMES_PART).min(u64::from(u32::MAX));
        let covered = len.div_ceil(GRAIN).min(most);
        Fold { grains: Grains::new(covered), known: Vec::new(), covered, end: len, budget, dice: 1 }
    }

    /// The disk has become larger, up to `len` bytes. Its last grain is not known any more: there is more of it.
    pub fn grow(&mut self, len: u64) {
        if let Some(end) = self.end.checked_sub(1) {
            self.forget(end);
        }
        let most = Grains::within(self.budget / NAMES_PART).min(u64::from(u32::MAX));
        self.covered = len.div_ceil(GRAIN).min(most).max(self.covered);
        self.grains.grow(self.covered);
        self.end = self.end.max(len);
        self.make_room();
    }

    /// The grain around a byte is to be learned again.
    pub fn forget(&mut self, at: u64) {
        if self.grains.get(at / GRAIN).is_some() {
            self.put(at, Grain::Mixed(Runs::unknown()));
        }
    }

    /// Forgets all grains, and gives their memory back.
    pub fn clear(&mut self) {
        self.grains = Grains::new(self.covered);
        self.known = Vec::new();
    }

    /// The grain around a byte.
    pub fn grain_of(at: u64) -> Span {
        Span { at: at / GRAIN * GRAIN, len: GRAIN }
    }

    /// Where byte `at` lives, and how many bytes from there on live in the same run. `None`: not known.
    pub fn lookup(&self, at: u64) -> Option<(Where, u64)> {
        let within = at % GRAIN;
        match self.grains.get(at / GRAIN)? {
            Grain::Whole(place) => Some((place.place().advanced(within), GRAIN.saturating_sub(within))),
            Grain::Mixed(runs) => runs.lookup(within),
        }
    }

    /// Takes in what a whole grain looks like: `runs` ascend without gaps and cover it up to its end, or up to
    /// the end of the disk.
    pub fn learn(&mut self, grain: Span, runs: &[Run]) {
        let new = match runs {
            [one] => Grain::Whole(Compact::of(one.place)),
            _ => Grain::Mixed(Runs::pack(grain.at, runs)),
        };
        self.put(grain.at, new);
    }

    /// The bytes of `span` live at `place` now.
    pub fn overlay(&mut self, span: Span, place: Where) {
        let mut at = span.at;
        while at < span.end() {
            let grain = Fold::grain_of(at);
            let Some(part) = grain.intersection(span) else { return };
            let part_place = place.advanced(part.at.saturating_sub(span.at));
            self.overlay_grain(grain, Run { span: part, place: part_place });
            at = grain.end();
        }
    }

    /// Bytes of memory that the map takes.
    pub fn bytes(&self) -> usize {
        self.grains.bytes().saturating_add(self.known.capacity().saturating_mul(size_of::<u32>()))
    }

    fn overlay_grain(&mut self, grain: Span, new: Run) {
        let within = new.span.at.saturating_sub(grain.at);
        let old = match self.grains.get_mut(grain.at / GRAIN) {
            None => return,
            Some(Grain::Mixed(runs)) if runs.is_unknown() => return,
            _ if new.span == grain => Vec::new(),
            Some(Grain::Whole(place)) => vec![Run { span: grain, place: place.place() }],
            Some(Grain::Mixed(runs)) => {
                if runs.overlay(within, new.span.len, new.place) {
                    return;
                }
                runs.unpack(grain.at)
            }
        };
        self.learn(grain, &overlaid(&old, new));
    }

    fn put(&mut self, at: u64, new: Grain) {
        let grain = at / GRAIN;
        if grain >= self.covered {
            return;
        }
        if self.grains.insert(grain, new) {
            if self.known.len() == self.known.capacity() {
                self.known.reserve_exact(ROOM);
            }
            self.known.push(u32::try_from(grain).unwrap_or(u32::MAX));
        }
        self.make_room();
    }

    /// Forgets until the budget is kept.
    fn make_room(&mut self) {
        while self.bytes() > self.budget && !self.known.is_empty() {
            let drawn = self.draw_forgotten();
            if let Some(&grain) = self.known.get(drawn) {
                self.grains.remove(u64::from(grain));
                self.known.swap_remove(drawn);
            }
        }
    }

    /// Which of the known grains is to go.
    fn draw_forgotten(&mut self) -> usize {
        let mut drawn = 0;
        for _ in 0..DRAWN_MAX {
            drawn = self.draw(self.known.len());
            if !self.known.get(drawn).is_some_and(|&grain| self.grains.take_used(u64::from(grain))) {
                break;
            }
        }
        drawn
    }

    /// A number below `below`. Nobody gains anything by foreseeing it.
    fn draw(&mut self, below: usize) -> usize {
        // Knuth's MMIX generator, whose high bits are the good ones.
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.dice >> 33).unwrap_or(0).checked_rem(below).unwrap_or(0)
    }
}

#[cfg(test)]
mod test;
