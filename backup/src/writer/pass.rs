//! One pass over a source: which chunks are holes, unchanged, known or new, in windows of 1 MiB.
//!
//! Knows nothing about the log. Reading the next windows overlaps with digests and compression of the last ones, and
//! with the put of a pack; with one thread all happens in the caller's, in order.

use std::ops::Range;

use super::changed::Changed;
use super::{Control, Finished, Job};
use crate::chunks::{Chunks, Frame, Packer};
use crate::codec::{Compressor, Kind};
use crate::error::Error;
use crate::id::{Digest, Id};
use crate::index::{Index, Statistics, chunk_len, content, encode_page};
use crate::log::Record;
use crate::target::Target;

/// Bytes that are read at once.
const WINDOW: u64 = 1 << 20;
/// Windows of each thread in a batch.
const SHARE: usize = 4;

/// A chunk on its way.
enum Slot {
    /// Zeroes.
    Hole,
    /// As in the base.
    Unchanged(Digest),
    /// Bytes of the window's data.
    Read(Range<usize>),
    /// On the target.
    Known(Digest),
    /// To be sent.
    New(Digest, Vec<u8>),
}

/// Some chunks of one page.
struct Window {
    at: u64,
    slots: Vec<Slot>,
    data: Vec<u8>,
}

pub(super) struct Pass<'a> {
    target: &'a Target,
    job: &'a Job<'a>,
    chunks: &'a Chunks,
    base: Option<(Index, Changed)>,
    /// The page of the base that was read last, with its number.
    base_page: Option<(u64, Vec<Digest>)>,
    pub packer: Packer,
    /// By number of the pack: whether the index refers to it.
    used: Vec<bool>,
    page: Vec<Digest>,
    pages: Vec<Digest>,
    /// Offset of the next window.
    at: u64,
    statistics: Statistics,
}

impl<'a> Pass<'a> {
    pub fn new(target: &'a Target, job: &'a Job<'a>, chunks: &'a Chunks, base: Option<(Index, Changed)>) -> Pass<'a> {
        Pass {
            target,
            job,
            chunks,
            base,
            base_page: None,
            packer: Packer::new(job.threads > 1),
            used: vec![false; chunks.packs.len()],
            page: Vec::new(),
            pages: Vec::new(),
            at: 0,
            statistics: Statistics::default(),
        }
    }

    /// Goes through the whole disk.
    pub fn run(&mut self, control: &mut Control<'_>) -> Result<(), Error> {
        let mut batch = self.read_batch(control)?;
        while !batch.is_empty() {
            let next;
            if self.job.threads > 1 {
                (batch, next) = self.encode_while_reading(batch, control)?;
            } else {
                let mut encoder = Encoder::new(self.target, self.chunks);
                batch.iter_mut().try_for_each(|window| encoder.encode(window))?;
                next = None;
            }
            for window in batch {
                self.take(window)?;
            }
            self.statistics.sent = self.packer.bytes_sent;
            (control.progress)(&self.statistics);
            batch = match next {
                Some(next) => next,
                None => self.read_batch(control)?,
            };
        }
        Ok(())
    }

    fn encode_while_reading(
        &mut self,
        mut batch: Vec<Window>,
        control: &Control<'_>,
    ) -> Result<(Vec<Window>, Option<Vec<Window>>), Error> {
        let (target, chunks) = (self.target, self.chunks);
        let next = std::thread::scope(|scope| {
            let encoders: Vec<_> = batch
                .chunks_mut(SHARE)
                .map(|share| {
                    scope.spawn(|| {
                        let mut encoder = Encoder::new(target, chunks);
                        share.iter_mut().try_for_each(|window| encoder.encode(window))
                    })
                })
                .collect();
            let next = self.read_batch(control);
            for encoder in encoders {
                encoder.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            }
            next
        })?;
        Ok((batch, Some(next)))
    }

    /// Reads the next windows; none at the end of the disk.
    fn read_batch(&mut self, control: &Control<'_>) -> Result<Vec<Window>, Error> {
        let mut batch = Vec::new();
        while self.at < self.job.source.len() && batch.len() < self.job.threads.max(1) * SHARE {
            control.check()?;
            batch.push(self.read_window()?);
        }
        Ok(batch)
    }

    fn read_window(&mut self) -> Result<Window, Error> {
        let (begin, chunk, span) = (self.at, self.target.chunk(), self.target.page_span());
        let page_end = (begin / span + 1).saturating_mul(span);
        let end = (begin + WINDOW.max(chunk)).min(page_end).min(self.job.source.len());
        let mut window = Window { at: begin, slots: Vec::new(), data: Vec::new() };
        let zeroes = Zeroes::of(self.job, begin..end)?;
        let mut at = begin;
        while at < end {
            let range = at..(at + chunk).min(end);
            let slot = match self.unchanged(&range)? {
                Some(digest) => Slot::Unchanged(digest),
                None if zeroes.cover(&range) => Slot::Hole,
                None => {
                    let from = window.data.len();
                    let len = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                    window.data.resize(from + len, 0);
                    Slot::Read(from..from + len)
                }
            };
            window.slots.push(slot);
            at = range.end;
        }
        self.fill(&mut window)?;
        self.at = end;
        Ok(window)
    }

    /// Reads the data of a window, in runs.
    fn fill(&mut self, window: &mut Window) -> Result<(), Error> {
        let chunk = self.target.chunk();
        let mut runs: Vec<(u64, Range<usize>)> = Vec::new();
        for (at, slot) in (window.at..).step_by(usize::try_from(chunk).unwrap_or(usize::MAX)).zip(&window.slots) {
            let Slot::Read(range) = slot else { continue };
            match runs.last_mut() {
                Some((begin, run)) if *begin + u64::try_from(run.len()).unwrap_or(0) == at => run.end = range.end,
                _ => runs.push((at, range.clone())),
            }
        }
        for (at, run) in runs {
            let len = u64::try_from(run.len()).unwrap_or(0);
            let buffer = window.data.get_mut(run).unwrap_or_default();
            let read = self.job.source.read_at(at, buffer);
            read.map_err(|source| Error::Source { at, len, source })?;
            self.statistics.read += len;
        }
        Ok(())
    }

    /// The digest in the base of a chunk that has not changed and is still on the target; a hole has one, too.
    fn unchanged(&mut self, range: &Range<u64>) -> Result<Option<Digest>, Error> {
        let Some((index, changed)) = &self.base else { return Ok(None) };
        if changed.touches(range) {
            return Ok(None);
        }
        let number = range.start / self.target.page_span();
        if self.base_page.as_ref().is_none_or(|(page, _)| *page != number) {
            // Where the base is damaged, the source has it all.
            let page = index.page(self.target, self.chunks, number)?.unwrap_or_default();
            self.base_page = Some((number, page));
        }
        let within = (range.start % self.target.page_span()) / self.target.chunk();
        let page = self.base_page.as_ref().map(|(_, page)| page.as_slice()).unwrap_or_default();
        let digest = usize::try_from(within).ok().and_then(|within| page.get(within)).copied();
        Ok(digest.filter(|digest| *digest == Digest::HOLE || self.chunks.contains(digest)))
    }

    /// Takes the chunks of a window, which follows the last one.
    fn take(&mut self, window: Window) -> Result<(), Error> {
        let mut at = window.at;
        for slot in window.slots {
            let len = chunk_len(self.target, self.job.source.len(), at);
            let digest = match slot {
                Slot::Hole => {
                    self.statistics.holes += len;
                    Digest::HOLE
                }
                Slot::Read(_) => unreachable!("a window is encoded before it is taken"),
                Slot::Unchanged(digest) => {
                    self.statistics.unchanged += len;
                    self.refer(digest)
                }
                Slot::Known(digest) => {
                    self.statistics.deduplicated += len;
                    self.refer(digest)
                }
                Slot::New(digest, bytes) => {
                    let content = u32::try_from(len).unwrap_or(u32::MAX);
                    let frame = Frame { kind: Kind::Chunk, digest: &digest, bytes: &bytes, content };
                    if !self.packer.push(self.target, &frame)? {
                        self.statistics.deduplicated += len;
                    }
                    digest
                }
            };
            self.page.push(digest);
            self.statistics.done += len;
            at += len;
            let is_last = at == self.job.source.len();
            if is_last || self.page.len() == usize::try_from(self.target.layout().page).unwrap_or(usize::MAX) {
                self.end_page()?;
            }
        }
        Ok(())
    }

    /// Notes that the index refers to a digest of the target.
    fn refer(&mut self, digest: Digest) -> Digest {
        let place = self.chunks.places.get(&digest).and_then(|place| usize::try_from(place.pack).ok());
        if let Some(used) = place.and_then(|pack| self.used.get_mut(pack)) {
            *used = true;
        }
        digest
    }

    fn end_page(&mut self) -> Result<(), Error> {
        let (page, is_hole) = encode_page(&std::mem::take(&mut self.page));
        if is_hole {
            self.pages.push(Digest::HOLE);
            return Ok(());
        }
        let digest = self.target.codec.digest(Kind::Page, &page);
        if self.chunks.contains(&digest) {
            self.refer(digest);
        } else {
            self.packer.push_page(self.target, &digest, &page)?;
        }
        self.pages.push(digest);
        Ok(())
    }

    /// The index of what was read, under a new id.
    pub fn index(&mut self) -> Finished {
        let (target, job) = (self.target, self.job);
        self.statistics.sent = self.packer.bytes_sent;
        let record = Record {
            id: Id::random(),
            disk: job.disk,
            label: job.label.to_owned(),
            time: job.time,
            len: job.source.len(),
            content: content(&target.codec, target, job.source.len(), &self.pages),
            base: job.base.as_ref().map(|base| base.backup),
            moment: job.moment,
        };
        let read = self.chunks.packs.iter().zip(&self.used).filter(|(_, used)| **used).map(|(name, _)| name);
        let used = read.chain(&self.packer.written).cloned().collect();
        let pages = std::mem::take(&mut self.pages);
        let properties = job.properties.map(str::to_owned);
        Finished { index: Index { record, pages, statistics: self.statistics, properties }, used }
    }
}

/// The zero extents of a window.
struct Zeroes(Vec<Range<u64>>);

impl Zeroes {
    fn of(job: &Job<'_>, range: Range<u64>) -> Result<Zeroes, Error> {
        let failed = |source| Error::Source { at: range.start, len: range.end - range.start, source };
        let mut zeroes: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        for extent in job.source.extents(range.clone()).map_err(failed)? {
            let end = at.saturating_add(extent.len).min(range.end);
            match zeroes.last_mut() {
                Some(last) if extent.is_zero && last.end == at => last.end = end,
                _ if extent.is_zero => zeroes.push(at..end),
                _ => {}
            }
            at = end;
        }
        if at != range.end {
            return Err(Error::Invalid(format!("the extents of the source end at {at} of {}", range.end)));
        }
        Ok(Zeroes(zeroes))
    }

    fn cover(&self, range: &Range<u64>) -> bool {
        self.0.iter().any(|zero| zero.start <= range.start && range.end <= zero.end)
    }
}

/// Digests and compresses windows, in any thread.
struct Encoder<'a> {
    target: &'a Target,
    chunks: &'a Chunks,
    compressor: Compressor,
}

impl<'a> Encoder<'a> {
    fn new(target: &'a Target, chunks: &'a Chunks) -> Encoder<'a> {
        Encoder { target, chunks, compressor: Compressor::new() }
    }

    fn encode(&mut self, window: &mut Window) -> Result<(), Error> {
        for slot in &mut window.slots {
            let Slot::Read(range) = slot else { continue };
            let plain = window.data.get(range.clone()).unwrap_or_default();
            *slot = if is_zero(plain) {
                Slot::Hole
            } else {
                let digest = self.target.codec.digest(Kind::Chunk, plain);
                if self.chunks.contains(&digest) {
                    Slot::Known(digest)
                } else {
                    let frame = self.target.codec.frame(&mut self.compressor, Kind::Chunk, &digest, plain);
                    Slot::New(digest, frame.map_err(|damage| Error::Invalid(format!("a chunk: {}", damage.0)))?)
                }
            };
        }
        window.data = Vec::new();
        Ok(())
    }
}

/// Compares with a block of zeroes: as fast as memory, and over at the first other byte of most data.
fn is_zero(bytes: &[u8]) -> bool {
    const ZEROES: [u8; 4096] = [0; 4096];
    bytes.chunks(ZEROES.len()).all(|part| ZEROES.starts_with(part))
}
