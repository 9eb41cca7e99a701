//! The runs of one chunk, in a form that is small and searched fast.
//!
//! Knows nothing of layers, nor of which chunk it is. Keeps: what was packed is found again, byte for byte.

use super::location::{CHUNK, Location, Run, SECTOR, append};
use super::units::{self, CLUSTER, CLUSTER_WORDS, PAGE, PAGE_WORDS};
use crate::size::{in_memory, on_disk};
use crate::{DiskOffset, FileId, FileOffset, Span};

/// A [`Location`] in eight bytes: the file in the highest, the sector in it in the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compact(u64);

impl Compact {
    /// No file has this sector.
    const ZERO: u64 = u64::MAX;
    /// Nor this one: it lives in more than one place.
    const SPLIT: u64 = u64::MAX - 1;
    /// Nor this one: it lives in a compressed cluster.
    const INSIDE: u64 = (u64::MAX >> 8) - 2;
    /// Nor this one: it is lost.
    const DAMAGED: u64 = (u64::MAX >> 8) - 3;
    /// Added to the sector: others may refer to it. No file is so long that it has such sectors.
    const SHARED: u64 = 1 << 54;

    pub fn of(place: Location) -> Compact {
        Compact(match place {
            Location::Zero => Compact::ZERO,
            Location::Compressed { file } => (u64::from(file.0) << 56) | Compact::INSIDE,
            Location::Damaged { file } => (u64::from(file.0) << 56) | Compact::DAMAGED,
            Location::Data { file, at } => (u64::from(file.0) << 56) | (at / SECTOR),
            Location::Shared { file, at } => (u64::from(file.0) << 56) | Compact::SHARED | (at / SECTOR),
        })
    }

    pub fn place(self) -> Location {
        if self.0 == Compact::ZERO {
            return Location::Zero;
        }
        let [file, ..] = self.0.to_be_bytes();
        match self.0 & (u64::MAX >> 8) {
            Compact::INSIDE => Location::Compressed { file: FileId(file) },
            Compact::DAMAGED => Location::Damaged { file: FileId(file) },
            sector if sector & Compact::SHARED != 0 => {
                Location::Shared { file: FileId(file), at: FileOffset((sector & !Compact::SHARED) * SECTOR) }
            }
            sector => Location::Data { file: FileId(file), at: FileOffset(sector * SECTOR) },
        }
    }
}

/// Sectors in a chunk.
const SECTORS: usize = 4096;
/// Pages in a chunk.
const PAGES: usize = 512;
/// Words of the pages, where four bytes say where one lives.
const SHORT_PAGES: usize = PAGE_WORDS;
/// Runs from which on a chunk has a table of its pages, if four bytes say where each lives: fewer take less memory.
const SHORT_PAGES_FROM: usize = 192;
/// Runs from which on a chunk has a table of its pages: a search in many runs takes a dozen steps that the processor
/// cannot predict, this takes one. Where no page is split between runs, the runs themselves are not kept.
const PAGES_FROM: usize = 256;
/// Runs from which on a chunk of 64 KiB units is kept as such: fewer take no more memory as they are.
const UNITS_FROM: usize = 12;

/// The runs of a chunk, in one piece of memory. Either where each page lives, and nothing else, where no page is split
/// between runs and the runs are many, in four bytes for each or, where that is not enough, in eight; or a word that
/// says so, and the units of 64 KiB; or
///
/// - a word that says what follows: the number of runs, the sector behind the last of them, and whether there are
///   pages;
/// - where each page lives that is not split between runs, if there are pages;
/// - where each run lives;
/// - the first sector of each run, four to a word.
///
/// A random read of a fragmented chain looks at a few neighbours among the starts and at one of the places, or at one
/// page, and little else should have to be in the processor's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runs(Box<[u64]>);

/// The first word.
#[derive(Clone, Copy)]
struct Header {
    count: usize,
    end: u16,
    form: Form,
}

/// What follows it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Runs,
    PagesAndRuns,
    Units,
}

impl Header {
    fn word(self) -> u64 {
        let count = on_disk(self.count);
        let form = match self.form {
            Form::Runs => 0,
            Form::PagesAndRuns => 1,
            Form::Units => 2,
        };
        count | (u64::from(self.end) << 16) | (form << 32)
    }

    fn of(word: u64) -> Header {
        let [count_low, count_high, end_low, end_high, form, ..] = word.to_le_bytes();
        Header {
            count: usize::from(u16::from_le_bytes([count_low, count_high])),
            end: u16::from_le_bytes([end_low, end_high]),
            form: match form {
                0 => Form::Runs,
                1 => Form::PagesAndRuns,
                _ => Form::Units,
            },
        }
    }

    /// Words in front of the places of the runs.
    fn places_at(self) -> usize {
        if self.form == Form::PagesAndRuns { PAGES + 1 } else { 1 }
    }
}

impl Runs {
    /// No runs at all: nothing is known of the chunk.
    pub fn unknown() -> Runs {
        Runs(Box::default())
    }

    /// Whether that is what this is.
    pub fn is_unknown(&self) -> bool {
        self.0.is_empty()
    }

    /// The runs of the chunk that begins at `base`.
    pub fn pack(base: DiskOffset, runs: &[Run]) -> Runs {
        let within = |at: DiskOffset| (at - base) / SECTOR;
        let end = runs.last().map_or(0, |run| within(run.span.end()));
        let short = if runs.len() >= SHORT_PAGES_FROM { units::pack::<PAGE, PAGE_WORDS>(base, runs) } else { None };
        if let Some(short) = short {
            return Runs(short.into());
        }
        let pages = (runs.len() >= PAGES_FROM).then(|| pages(base, runs));
        if let Some(pages) = pages.as_ref().filter(|pages| !pages.contains(&Compact::SPLIT)) {
            return Runs(pages.as_slice().into());
        }
        let units = if runs.len() >= UNITS_FROM { units::pack::<CLUSTER, CLUSTER_WORDS>(base, runs) } else { None };
        if let Some(units) = units {
            let header = Header { count: 0, end: 0, form: Form::Units };
            return Runs(std::iter::once(header.word()).chain(units).collect());
        }
        let form = if pages.is_some() { Form::PagesAndRuns } else { Form::Runs };
        let Ok(end) = u16::try_from(end) else { unreachable!("the runs of a chunk end in it") };
        let header = Header { count: runs.len(), end, form };
        let mut words = Vec::with_capacity(header.places_at() + runs.len() + runs.len().div_ceil(4));
        words.push(header.word());
        words.extend(pages.iter().flatten());
        words.extend(runs.iter().map(|run| Compact::of(run.place).0));
        words.extend(runs.chunks(4).map(|four| {
            let starts = four.iter().map(|run| within(run.span.at)).zip((0..).step_by(16));
            starts.fold(0, |word, (start, shift)| word | (start << shift))
        }));
        if words.len() == SHORT_PAGES {
            // Not to be taken for pages: one word more, which is never read.
            words.push(0);
        }
        Runs(words.into_boxed_slice())
    }

    /// The runs again, of the chunk that begins at `base`.
    pub fn unpack(&self, base: DiskOffset) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut within = 0;
        while let Some((place, len)) = self.lookup(within) {
            append(&mut runs, Run { span: Span { at: base + within, len }, place });
            within += len;
        }
        runs
    }

    /// Where byte `within` of the chunk lives, and how many bytes from there on are known to live in the same run.
    pub fn lookup(&self, within: u64) -> Option<(Location, u64)> {
        if self.is_short_pages() {
            return units::lookup::<PAGE>(&self.0, within);
        }
        if self.is_pages() {
            return Some(in_page(*self.0.get(usize::try_from(within / PAGE).ok()?)?, within));
        }
        let (&first, rest) = self.0.split_first()?;
        let header = Header::of(first);
        if header.form == Form::Units {
            return units::lookup::<CLUSTER>(rest, within);
        }
        if header.form == Form::PagesAndRuns {
            let page = *self.0.get(usize::try_from(within / PAGE).ok()?.checked_add(1)?)?;
            if within < CHUNK && page != Compact::SPLIT {
                return Some(in_page(page, within));
            }
        }
        let sector = within / SECTOR;
        let starts = self.0.get(header.places_at().checked_add(header.count)?..)?;
        let which = last_start_up_to(starts, header.count, sector);
        let start = start(starts, which).filter(|_| header.count > 0)?;
        let end = if which + 1 < header.count { self::start(starts, which + 1)? } else { u64::from(header.end) };
        let left = (end * SECTOR).checked_sub(within).filter(|&left| left > 0)?;
        let place = Compact(*self.0.get(header.places_at().checked_add(which)?)?).place();
        Some((place.advanced(within - start * SECTOR), left))
    }

    /// Overlays a run in place, where only pages or units are kept and it is made of whole ones. Returns whether it
    /// could.
    pub fn overlay(&mut self, within: u64, len: u64, place: Location) -> bool {
        if self.is_short_pages() {
            return units::lay::<PAGE>(&mut self.0, within, len, place);
        }
        if self.is_pages() {
            return overlay_pages(&mut self.0, within, len, place);
        }
        match self.0.split_first_mut() {
            Some((&mut first, units)) if Header::of(first).form == Form::Units => {
                units::lay::<CLUSTER>(units, within, len, place)
            }
            _ => false,
        }
    }

    /// Whether this is a list of pages in four bytes each and nothing else. Nothing else has as many words: runs get
    /// one more.
    #[inline(always)]
    fn is_short_pages(&self) -> bool {
        self.0.len() == SHORT_PAGES
    }

    /// Whether this is a list of pages and nothing else. Runs never take as many words: 408 of them take 511, and one
    /// more takes two.
    fn is_pages(&self) -> bool {
        self.0.len() == PAGES
    }

    /// Bytes of memory behind this.
    pub fn bytes(&self) -> usize {
        std::mem::size_of_val(&*self.0)
    }
}

/// Overlays pages with a run of whole pages.
fn overlay_pages(pages: &mut [u64], within: u64, len: u64, place: Location) -> bool {
    let (Ok(first), Ok(count)) = (usize::try_from(within / PAGE), usize::try_from(len / PAGE)) else { return false };
    if within % PAGE != 0 || len % PAGE != 0 {
        return false;
    }
    let Some(pages) = pages.get_mut(first..first + count) else { return false };
    for (page, into) in pages.iter_mut().zip((0..).step_by(4096)) {
        *page = Compact::of(place.advanced(into)).0;
    }
    true
}

/// Where byte `within` of a chunk lives whose page lives there, and how many bytes of the page are left.
fn in_page(page: u64, within: u64) -> (Location, u64) {
    let into = within % PAGE;
    (Compact(page).place().advanced(into), PAGE - into)
}

/// The last of `count` runs that begins at `sector` or before; the first one begins at the start of the chunk.
fn last_start_up_to(starts: &[u64], count: usize, sector: u64) -> usize {
    // Runs are mostly of one length, that of a cluster.
    let guess = in_memory(sector) * count / SECTORS;
    let is_up_to = |which: usize| start(starts, which).is_some_and(|start| start <= sector);
    if is_up_to(guess) && (guess + 1 >= count || !is_up_to(guess + 1)) {
        return guess;
    }
    let (mut first, mut size) = (0usize, count);
    while size > 1 {
        let half = size / 2;
        let middle = first + half;
        first = if is_up_to(middle) { middle } else { first };
        size -= half;
    }
    first
}

/// First sector of a run.
fn start(starts: &[u64], which: usize) -> Option<u64> {
    let shift = which % 4 * 16;
    Some((starts.get(which / 4)? >> shift) & u64::from(u16::MAX))
}

/// Where each page of the chunk at `base` lives.
fn pages(base: DiskOffset, runs: &[Run]) -> Vec<u64> {
    let mut pages = vec![Compact::SPLIT; PAGES];
    for run in runs {
        let mut at = run.span.at.align_up(PAGE);
        while at + PAGE <= run.span.end() {
            let page = pages.get_mut(in_memory((at - base) / PAGE));
            if let Some(page) = page {
                *page = Compact::of(run.place.advanced(at - run.span.at)).0;
            }
            at += PAGE;
        }
    }
    pages
}

/// `runs` overlaid with `new`. Neighbours that continue each other become one.
pub fn overlaid(runs: &[Run], new: Run) -> Vec<Run> {
    let mut result = Vec::with_capacity(runs.len() + 2);
    for run in runs.iter().filter(|run| run.span.at < new.span.at) {
        let len = run.span.len.min(new.span.at - run.span.at);
        append(&mut result, Run { span: Span { at: run.span.at, len }, place: run.place });
    }
    append(&mut result, new);
    for run in runs.iter().filter(|run| run.span.end() > new.span.end()) {
        // It may begin behind the new run.
        let skip = new.span.end().saturating_sub(run.span.at);
        let span = Span { at: run.span.at + skip, len: run.span.len - skip };
        append(&mut result, Run { span, place: run.place.advanced(skip) });
    }
    result
}
