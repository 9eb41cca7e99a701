//! All layers of a chain folded into one map, so that a lookup does not walk the chain.
//!
//! The map is learned a grain at a time, when a grain is first asked for, and kept up to date by whoever changes
//! the leaf. It may forget: a grain that is not known is learned again.

use crate::{FileId, Span};

/// Bytes of the disk that are learned at once: the block of most VHDs.
pub const GRAIN: u64 = 2 << 20;
/// Grains in a chunk: what is allocated at once, for 1 GiB of disk.
const CHUNK: u64 = 512;
/// Runs kept for grains of more than one run, 10 bytes each: 32 MiB. That is 7 GiB of disk with a run for every 4 KiB,
/// or 200 GiB with one for every 64 KiB; without a limit, the worst chain would take a fiftieth of the disk.
const RUNS_MAX: usize = 3 << 20;
/// The unit of everything in the map.
const SECTOR: u64 = 512;

/// Where a run of bytes lives, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Nowhere: zero.
    Zero,
    /// In a file.
    Data {
        /// The file.
        file: FileId,
        /// Offset in it.
        at: u64,
    },
    /// In a compressed cluster of a file; its format knows which.
    Packed {
        /// The file.
        file: FileId,
    },
}

impl Where {
    /// Whether the bytes stand in this file as they are.
    pub fn is_in(self, file: FileId) -> bool {
        matches!(self, Where::Data { file: place, .. } if place == file)
    }

    /// The place `by` bytes further on.
    pub fn advanced(self, by: u64) -> Where {
        match self {
            Where::Zero | Where::Packed { .. } => self,
            Where::Data { file, at } => Where::Data { file, at: at.saturating_add(by) },
        }
    }
}

/// Bytes of the disk that live in one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The bytes.
    pub span: Span,
    /// Where the first of them lives.
    pub place: Where,
}

#[derive(Clone, Debug)]
enum Grain {
    Unknown,
    /// All of it in one place.
    Whole(Where),
    /// In runs, ascending and without gaps.
    Mixed(Runs),
}

/// The runs of one grain, in a form that is searched fast: a random read of a fragmented chain looks at a few
/// neighbours among the starts and at one of the places, and little else should have to be in the cache.
#[derive(Clone, Debug)]
struct Runs {
    /// First sector of each run, counted from the start of the grain.
    starts: Box<[u16]>,
    /// Where it lives.
    places: Box<[Packed]>,
    /// The sector behind the last run.
    end: u16,
    /// For grains of many runs: where the pages of the grain live that are not split between runs. A search takes
    /// a dozen unforeseeable steps; this takes one.
    pages: Option<Box<[Packed]>>,
}

/// The page of the table above: what most guests read at once.
const PAGE: u64 = 4096;
/// Runs from which on a grain has that table.
const PAGES_FROM: usize = 64;
/// Runs that take as much memory as the table.
const PAGES_RUNS: usize = 410;

/// A [`Where`] in eight bytes: the file in the highest, the sector in it in the others.
#[derive(Clone, Copy, Debug)]
struct Packed(u64);

impl Packed {
    /// No file has this sector.
    const ZERO: Packed = Packed(u64::MAX);
    /// Nor this one: in more than one place.
    const SPLIT: Packed = Packed(u64::MAX - 1);
    /// Nor can any have this one, as the sector: in a compressed cluster.
    const INSIDE: u64 = (u64::MAX >> 8) - 2;

    fn pack(place: Where) -> Packed {
        match place {
            Where::Zero => Packed::ZERO,
            Where::Packed { file } => Packed((u64::from(file.0) << 56) | Packed::INSIDE),
            Where::Data { file, at } => Packed((u64::from(file.0) << 56) | (at / SECTOR)),
        }
    }

    fn unpack(self) -> Where {
        if self.0 == Packed::ZERO.0 {
            return Where::Zero;
        }
        let [file, ..] = self.0.to_be_bytes();
        if self.0 & (u64::MAX >> 8) == Packed::INSIDE {
            return Where::Packed { file: FileId(file) };
        }
        Where::Data { file: FileId(file), at: (self.0 & (u64::MAX >> 8)).saturating_mul(SECTOR) }
    }
}

impl Runs {
    /// The runs of the grain that begins at `base`.
    fn pack(base: u64, runs: &[Run]) -> Runs {
        let sector = |at: u64| u16::try_from(at.saturating_sub(base) / SECTOR).unwrap_or(u16::MAX);
        Runs {
            starts: runs.iter().map(|run| sector(run.span.at)).collect(),
            places: runs.iter().map(|run| Packed::pack(run.place)).collect(),
            end: runs.last().map_or(0, |run| sector(run.span.end())),
            pages: (runs.len() >= PAGES_FROM).then(|| pages(base, runs)),
        }
    }

    fn unpack(&self, base: u64) -> Vec<Run> {
        let at = |sector: u16| base.saturating_add(u64::from(sector).saturating_mul(SECTOR));
        let ends = self.starts.iter().skip(1).chain(std::iter::once(&self.end));
        let spans = self
            .starts
            .iter()
            .zip(ends)
            .map(|(&start, &end)| Span { at: at(start), len: at(end).saturating_sub(at(start)) });
        spans.zip(&self.places).map(|(span, place)| Run { span, place: place.unpack() }).collect()
    }

    /// Where byte `within` of the grain lives, and how many bytes of its run are left.
    fn lookup(&self, within: u64) -> Option<(Where, u64)> {
        let page = self.pages.as_ref().and_then(|pages| pages.get(usize::try_from(within / PAGE).ok()?));
        if let Some(&page) = page.filter(|page| page.0 != Packed::SPLIT.0) {
            let into = within % PAGE;
            return Some((page.unpack().advanced(into), PAGE.saturating_sub(into)));
        }
        let sector = u16::try_from(within / SECTOR).ok()?;
        let which = self.starts.partition_point(|&start| start <= sector).checked_sub(1)?;
        let start = u64::from(*self.starts.get(which)?).saturating_mul(SECTOR);
        let end =
            u64::from(self.starts.get(which.saturating_add(1)).copied().unwrap_or(self.end)).saturating_mul(SECTOR);
        let place = self.places.get(which)?.unpack().advanced(within.saturating_sub(start));
        Some((place, end.checked_sub(within).filter(|&left| left > 0)?))
    }
}

/// Where each page of the grain at `base` lives.
fn pages(base: u64, runs: &[Run]) -> Box<[Packed]> {
    let mut pages = vec![Packed::SPLIT; usize::try_from(GRAIN / PAGE).unwrap_or(0)].into_boxed_slice();
    for run in runs {
        let mut at = run.span.at.next_multiple_of(PAGE);
        while at.saturating_add(PAGE) <= run.span.end() {
            let page = usize::try_from(at.saturating_sub(base) / PAGE).ok().and_then(|page| pages.get_mut(page));
            if let Some(page) = page {
                *page = Packed::pack(run.place.advanced(at.saturating_sub(run.span.at)));
            }
            at = at.saturating_add(PAGE);
        }
    }
    pages
}

/// The folded map.
#[derive(Debug)]
pub struct Fold {
    chunks: Vec<Option<Box<[Grain]>>>,
    /// Length of the disk.
    end: u64,
    /// Runs in all mixed grains.
    runs: usize,
    /// Where to forget next, when there are too many runs.
    hand: usize,
}

impl Fold {
    /// A map of a disk of `len` bytes of which nothing is known.
    pub fn new(len: u64) -> Fold {
        let chunks = len.div_ceil(GRAIN.saturating_mul(CHUNK));
        Fold { chunks: vec![None; usize::try_from(chunks).unwrap_or(0)], end: len, runs: 0, hand: 0 }
    }

    /// The disk has become larger, up to `len` bytes. Its last grain is not known any more: there is more of it.
    pub fn grow(&mut self, len: u64) {
        let chunks = usize::try_from(len.div_ceil(GRAIN.saturating_mul(CHUNK))).unwrap_or(0);
        if let Some(end) = self.end.checked_sub(1) {
            self.forget(end);
        }
        self.chunks.resize_with(chunks.max(self.chunks.len()), || None);
        self.end = self.end.max(len);
    }

    /// The grain around a byte is to be learned again.
    pub fn forget(&mut self, at: u64) {
        if self.grain(at).is_some() {
            self.replace(at, Grain::Unknown);
        }
    }

    /// The grain around a byte.
    pub fn grain_of(at: u64) -> Span {
        Span { at: at / GRAIN * GRAIN, len: GRAIN }
    }

    /// Where byte `at` lives, and how many bytes from there on live in the same run. `None`: not known.
    pub fn lookup(&self, at: u64) -> Option<(Where, u64)> {
        let within = at % GRAIN;
        match self.grain(at)? {
            Grain::Unknown => None,
            Grain::Whole(place) => Some((place.advanced(within), GRAIN.saturating_sub(within))),
            Grain::Mixed(runs) => runs.lookup(within),
        }
    }

    /// Takes in what a whole grain looks like: `runs` ascend without gaps and cover it up to its end, or up to
    /// the end of the disk.
    pub fn learn(&mut self, grain: Span, runs: Vec<Run>) {
        if self.runs > RUNS_MAX {
            self.forget_some();
        }
        let new = match runs.as_slice() {
            [one] => Grain::Whole(one.place),
            _ => Grain::Mixed(Runs::pack(grain.at, &runs)),
        };
        self.replace(grain.at, new);
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

    fn overlay_grain(&mut self, grain: Span, new: Run) {
        let old = match self.grain(grain.at) {
            None | Some(Grain::Unknown) => return,
            _ if new.span == grain => Vec::new(),
            Some(Grain::Whole(place)) => vec![Run { span: grain, place: *place }],
            Some(Grain::Mixed(runs)) => runs.unpack(grain.at),
        };
        self.learn(grain, overlaid(&old, new));
    }

    fn grain(&self, at: u64) -> Option<&Grain> {
        let (chunk, grain) = index(at);
        self.chunks.get(chunk)?.as_ref()?.get(grain)
    }

    fn replace(&mut self, at: u64, new: Grain) {
        let (chunk, grain) = index(at);
        let Some(chunk) = self.chunks.get_mut(chunk) else { return };
        let size = usize::try_from(CHUNK).unwrap_or(0);
        let chunk = chunk.get_or_insert_with(|| vec![Grain::Unknown; size].into_boxed_slice());
        if let Some(place) = chunk.get_mut(grain) {
            self.runs = self.runs.saturating_add(new.runs()).saturating_sub(place.runs());
            *place = new;
        }
    }

    /// Forgets mixed grains, chunk by chunk, until half of the room is free again.
    fn forget_some(&mut self) {
        for _ in 0..self.chunks.len() {
            if self.runs <= RUNS_MAX / 2 {
                return;
            }
            self.hand = self.hand.saturating_add(1) % self.chunks.len();
            if let Some(chunk) = self.chunks.get_mut(self.hand).and_then(Option::as_mut) {
                for grain in chunk.iter_mut().filter(|grain| matches!(grain, Grain::Mixed(_))) {
                    self.runs = self.runs.saturating_sub(grain.runs());
                    *grain = Grain::Unknown;
                }
            }
        }
    }
}

impl Grain {
    fn runs(&self) -> usize {
        match self {
            Grain::Mixed(runs) => runs.starts.len().saturating_add(if runs.pages.is_some() { PAGES_RUNS } else { 0 }),
            _ => 0,
        }
    }
}

/// The chunk of a byte, and its grain there.
fn index(at: u64) -> (usize, usize) {
    let grain = at / GRAIN;
    (usize::try_from(grain / CHUNK).unwrap_or(usize::MAX), usize::try_from(grain % CHUNK).unwrap_or(usize::MAX))
}

/// `runs` with `new` laid over them; neighbours that continue each other become one.
fn overlaid(runs: &[Run], new: Run) -> Vec<Run> {
    let mut result = Vec::with_capacity(runs.len().saturating_add(2));
    for run in runs.iter().filter(|run| run.span.at < new.span.at) {
        let len = run.span.len.min(new.span.at.saturating_sub(run.span.at));
        append(&mut result, Run { span: Span { at: run.span.at, len }, place: run.place });
    }
    append(&mut result, new);
    for run in runs.iter().filter(|run| run.span.end() > new.span.end()) {
        let skip = new.span.end().saturating_sub(run.span.at);
        let span = Span { at: run.span.at.saturating_add(skip), len: run.span.len.saturating_sub(skip) };
        append(&mut result, Run { span, place: run.place.advanced(skip) });
    }
    result
}

/// Appends a run, or lengthens the last one if the new run continues it.
pub fn append(runs: &mut Vec<Run>, new: Run) {
    match runs.last_mut() {
        Some(last) if last.place.advanced(last.span.len) == new.place => {
            last.span.len = last.span.len.saturating_add(new.span.len);
        }
        _ => runs.push(new),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn data(file: u8, at: u64) -> Where {
        Where::Data { file: FileId(file), at }
    }

    fn run(at: u64, len: u64, place: Where) -> Run {
        Run { span: Span { at, len }, place }
    }

    #[test]
    fn an_overlay_splits_and_joins_runs() {
        let mut fold = Fold::new(4 * GRAIN);
        fold.learn(Fold::grain_of(0), vec![run(0, GRAIN, data(3, 1 << 30))]);
        fold.overlay(Span { at: 4096, len: 4096 }, data(0, 8192));
        assert_eq!(fold.lookup(0), Some((data(3, 1 << 30), 4096)));
        assert_eq!(fold.lookup(5120), Some((data(0, 9216), 3072)));
        assert_eq!(fold.lookup(8192), Some((data(3, (1 << 30) + 8192), GRAIN - 8192)));
        fold.overlay(Span { at: 0, len: 4096 }, data(0, 4096));
        assert_eq!(fold.lookup(0), Some((data(0, 4096), 8192)));
        fold.overlay(Span { at: 0, len: GRAIN }, Where::Zero);
        assert_eq!(fold.lookup(77), Some((Where::Zero, GRAIN - 77)));
        assert_eq!(fold.runs, 0);
    }

    #[test]
    fn an_overlay_on_the_unknown_stays_unknown() {
        let mut fold = Fold::new(4 * GRAIN);
        fold.learn(Fold::grain_of(GRAIN), vec![run(GRAIN, GRAIN, Where::Zero)]);
        fold.overlay(Span { at: GRAIN - 512, len: 1024 }, data(0, 0));
        assert_eq!(fold.lookup(GRAIN - 512), None);
        assert_eq!(fold.lookup(GRAIN), Some((data(0, 512), 512)));
        assert_eq!(fold.lookup(GRAIN + 512), Some((Where::Zero, GRAIN - 512)));
    }

    #[test]
    fn a_grain_of_many_runs_is_looked_up_by_page_and_by_sector() {
        let mut fold = Fold::new(GRAIN);
        // Runs of 3 KiB: every page but each third is split.
        let len = 3072;
        let runs: Vec<Run> = (0..GRAIN / len).map(|i| run(i * len, len, data(u8::from(i % 2 == 1), i << 20))).collect();
        let rest = run(GRAIN / len * len, GRAIN % len, Where::Zero);
        fold.learn(Fold::grain_of(0), runs.iter().copied().chain([rest]).collect());
        for at in (0..GRAIN).step_by(512) {
            let (place, left) = fold.lookup(at).unwrap();
            let inside = runs.iter().find(|run| run.span.at <= at && at < run.span.end()).unwrap_or(&rest);
            assert_eq!(place, inside.place.advanced(at - inside.span.at), "{at}");
            assert!(left > 0 && at + left <= inside.span.end(), "{at}");
        }
    }

    #[test]
    fn too_many_runs_are_forgotten() {
        let len = 8192 * GRAIN;
        let mut fold = Fold::new(len);
        for grain in 0..8192 {
            let begin = grain * GRAIN;
            let runs =
                (0..128).map(|i| run(begin + i * (GRAIN / 128), GRAIN / 128, data(u8::from(i % 2 == 1), 0))).collect();
            fold.learn(Fold::grain_of(begin), runs);
        }
        assert!(fold.runs <= RUNS_MAX + 128 + PAGES_RUNS);
        assert!(fold.lookup(8191 * GRAIN).is_some());
    }
}
