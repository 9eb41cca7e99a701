//! All layers of a chain folded into one map, so that a lookup does not walk the chain.
//!
//! The map is learned a grain at a time, when a grain is first asked for, and kept up to date by whoever changes
//! the leaf. It may forget: a grain that is not known is learned again.

use crate::Span;

/// Bytes of the disk that are learned at once: the block of most VHDs.
pub const GRAIN: u64 = 2 << 20;
/// Grains in a chunk: what is allocated at once, for 1 GiB of disk.
const CHUNK: u64 = 512;
/// Runs kept for grains of more than one run, 24 bytes each: 6 MiB. A chain in which every sector lies elsewhere
/// than its neighbour would otherwise take as much memory as a hundredth of the disk.
const RUNS_MAX: usize = 1 << 18;

/// Where a run of bytes lives, over all layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// Nowhere: zero.
    Zero,
    /// In the file of a layer (0 is the leaf).
    Data {
        /// The layer.
        layer: u8,
        /// Offset in its file.
        at: u64,
    },
}

impl Where {
    /// The place `by` bytes further on.
    pub fn advanced(self, by: u64) -> Where {
        match self {
            Where::Zero => Where::Zero,
            Where::Data { layer, at } => Where::Data { layer, at: at.saturating_add(by) },
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
    Mixed(Box<[Run]>),
}

/// The folded map.
#[derive(Debug)]
pub struct Fold {
    chunks: Vec<Option<Box<[Grain]>>>,
    /// Runs in all mixed grains.
    runs: usize,
    /// Where to forget next, when there are too many runs.
    hand: usize,
}

impl Fold {
    /// A map of a disk of `len` bytes of which nothing is known.
    pub fn new(len: u64) -> Fold {
        let chunks = len.div_ceil(GRAIN.saturating_mul(CHUNK));
        Fold { chunks: vec![None; usize::try_from(chunks).unwrap_or(0)], runs: 0, hand: 0 }
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
            Grain::Mixed(runs) => {
                let run = runs.get(runs.partition_point(|run| run.span.end() <= at))?;
                let skip = at.saturating_sub(run.span.at);
                Some((run.place.advanced(skip), run.span.len.saturating_sub(skip)))
            }
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
            _ => Grain::Mixed(runs.into_boxed_slice()),
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
            Some(Grain::Mixed(runs)) => runs.to_vec(),
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
        if let Grain::Mixed(runs) = self { runs.len() } else { 0 }
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

    fn data(layer: u8, at: u64) -> Where {
        Where::Data { layer, at }
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
    fn too_many_runs_are_forgotten() {
        let len = 4096 * GRAIN;
        let mut fold = Fold::new(len);
        for grain in 0..4096 {
            let begin = grain * GRAIN;
            let runs =
                (0..128).map(|i| run(begin + i * (GRAIN / 128), GRAIN / 128, data(u8::from(i % 2 == 1), 0))).collect();
            fold.learn(Fold::grain_of(begin), runs);
        }
        assert!(fold.runs <= RUNS_MAX + 128);
        assert!(fold.lookup(4095 * GRAIN).is_some());
    }
}
