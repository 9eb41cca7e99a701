//! Copies data of an image's parents into the image, where another chain would not show the same.
//!
//! The chain is processed once, in order. Where the image has no data of its own, its contents are compared with what
//! they would be on the new parents (zeroes, if none), and written into it where they differ. The image's contents are
//! the same at every moment, so a killed job can be restarted: what has been copied is then the image's own data and is
//! skipped.

use disk::size::in_memory;
use disk::{DiskOffset, Operation, Span, Token};
use memory::Segments;

use crate::image::presence::{ExtentSource, Presence};
use crate::image::progress::Progress;
use crate::jobs::runner::Runner;
use crate::jobs::stream::{PIECE, grid, join, zero_runs};
use crate::process::failure::Failure;
use crate::process::signals::Signal;

/// The bytes of the disk whose allocation is looked up at once.
const WINDOW: u64 = 1 << 30;
/// The number of pieces read, and then written, at once.
const AHEAD: usize = 16;
/// The granularity of the comparison: the smallest qcow2 cluster that we create.
const UNIT: u64 = 64 << 10;

/// A job that copies data up into an image.
pub struct CopyUp<'a> {
    /// The image on its current parents.
    pub image: &'a mut Runner,
    /// The allocation of the image itself.
    pub presence: Presence,
    /// The new parents.
    pub onto: Option<&'a mut Runner>,
    /// The signal that interrupts the job.
    pub stop: &'a mut Signal,
    /// The title of the progress display.
    pub title: &'static str,
}

/// One piece of the disk on the current and on the new parents; `None` means zeroes.
struct PiecePair {
    span: Span,
    shown: Option<Segments>,
    onto: Option<Segments>,
}

impl CopyUp<'_> {
    /// Copies everything necessary; returns the number of bytes copied, which are not durable yet.
    pub fn run(&mut self) -> Result<u64, Failure> {
        let len = self.image.geometry().len;
        let mut progress = Progress::new(self.image.from(), self.title, len);
        let mut copied = 0u64;
        let (mut at, end) = (DiskOffset(0), DiskOffset(len));
        while at < end {
            let window = Span { at, len: WINDOW.min(end - at) };
            copied += self.window(window, &mut progress)?;
            at = window.end();
        }
        progress.finish();
        Ok(copied)
    }

    fn window(&mut self, window: Span, progress: &mut Progress) -> Result<u64, Failure> {
        let missing: Vec<Span> = self.presence.runs(window)?.into_iter().filter_map(from_parents).collect();
        let shown = zero_runs(self.image, window)?;
        let onto = match &mut self.onto {
            Some(onto) => zero_runs_within(onto, window)?,
            None => vec![window],
        };
        let is_zero = |runs: &[Span], span: Span| runs.iter().any(|run| run.at <= span.at && span.end() <= run.end());
        let pieces = missing.into_iter().flat_map(grid).map(|span| (span, is_zero(&shown, span), is_zero(&onto, span)));
        let pieces: Vec<(Span, bool, bool)> = pieces.filter(|&(_, shown, onto)| !(shown && onto)).collect();
        let mut copied = 0u64;
        for batch in pieces.chunks(AHEAD) {
            if self.stop.take() {
                return Err(Failure::new(format!("continue {}", self.title), "interrupted by a signal")
                    .advise("the image's contents are unchanged; repeat the command to continue where it stopped"));
            }
            for both in self.read(batch)? {
                copied += self.write(&both)?;
            }
            self.image.wait_for_all()?;
            if let Some(&(last, _, _)) = batch.last() {
                progress.reach(last.end().0);
            }
        }
        progress.reach(window.end().0);
        Ok(copied)
    }

    fn read(&mut self, batch: &[(Span, bool, bool)]) -> Result<Vec<PiecePair>, Failure> {
        let mut pieces = Vec::new();
        for &(span, shown, onto) in batch {
            let shown = if shown { None } else { Some(submit_read(self.image, span)?) };
            let onto = match &mut self.onto {
                Some(runner) if !onto => Some(submit_read_within(runner, span)?),
                _ => None,
            };
            pieces.push(PiecePair { span, shown, onto });
        }
        self.image.wait_for_all()?;
        if let Some(onto) = &mut self.onto {
            onto.wait_for_all()?;
        }
        Ok(pieces)
    }

    /// Writes what differs; returns the number of bytes. The last writes may still be in flight.
    fn write(&mut self, both: &PiecePair) -> Result<u64, Failure> {
        let mut written = 0u64;
        for (span, shown) in both.differences() {
            match shown {
                Some(bytes) => {
                    self.image.submit(Operation::Write { durable: false }, span, bytes, Token(span.at.0))?;
                }
                None => {
                    // A write: a disk that already reads as zeroes would ignore a request to deallocate.
                    let zero = Operation::WriteZeroes { free: false, durable: false };
                    self.image.submit(zero, span, Segments::empty(), Token(span.at.0))?;
                }
            }
            written += span.len;
            while self.image.in_flight() > AHEAD {
                self.image.wait()?;
            }
        }
        Ok(written)
    }
}

impl PiecePair {
    /// Returns the units that differ, adjacent ones of one kind merged, each with the image's current contents.
    fn differences(&self) -> Vec<(Span, Option<Segments>)> {
        let mut runs: Vec<(Span, bool)> = Vec::new();
        let mut from = 0;
        while from < self.span.len {
            let len = UNIT.min(self.span.len - from);
            let cut = |bytes: &Option<Segments>| bytes.as_ref().map(|bytes| cut(bytes, from, len)).filter(is_stored);
            let (shown, onto) = (cut(&self.shown), cut(&self.onto));
            let same = match (&shown, &onto) {
                (None, None) => true,
                (Some(one), Some(other)) => one.to_vec() == other.to_vec(),
                _ => false,
            };
            let unit = Span { at: self.span.at + from, len };
            match runs.last_mut() {
                _ if same => {}
                Some((last, stored)) if last.end() == unit.at && *stored == shown.is_some() => last.len += len,
                _ => runs.push((unit, shown.is_some())),
            }
            from += len;
        }
        let bytes = |run: Span| self.shown.as_ref().map(|bytes| cut(bytes, run.at - self.span.at, run.len));
        runs.into_iter().map(|(run, stored)| (run, if stored { bytes(run) } else { None })).collect()
    }
}

fn is_stored(bytes: &Segments) -> bool {
    !bytes.is_zero()
}

fn cut(bytes: &Segments, from: u64, len: u64) -> Segments {
    // The range is within a chunk, whose bytes are in memory.
    bytes.slice(in_memory(from), in_memory(len))
}

fn from_parents((span, kind): (Span, ExtentSource)) -> Option<Span> {
    (kind == ExtentSource::Parent).then_some(span)
}

/// Submits a read of `span`. The memory contains the bytes after [`Runner::wait_for_all`].
fn submit_read(runner: &mut Runner, span: Span) -> Result<Segments, Failure> {
    let memory = Segments::zeroed(in_memory(span.len));
    runner.submit(Operation::Read, span, memory.clone(), Token(span.at.0))?;
    Ok(memory)
}

/// Like [`submit_read`], for a disk that may be shorter than the span. Beyond its end it reads as zeroes.
fn submit_read_within(runner: &mut Runner, span: Span) -> Result<Segments, Failure> {
    let memory = Segments::zeroed(in_memory(span.len));
    let here = runner.geometry().len.saturating_sub(span.at.0).min(span.len);
    if here > 0 {
        runner.submit(Operation::Read, Span { len: here, ..span }, cut(&memory, 0, here), Token(span.at.0))?;
    }
    Ok(memory)
}

/// Like [`zero_runs`], for a disk that may be shorter than the window.
fn zero_runs_within(runner: &mut Runner, window: Span) -> Result<Vec<Span>, Failure> {
    let here = runner.geometry().len.saturating_sub(window.at.0).min(window.len);
    let mut runs = if here > 0 { zero_runs(runner, Span { len: here, ..window })? } else { Vec::new() };
    let end = window.at + here;
    let behind = Span { at: end, len: window.end().saturating_sub(end) };
    join(&mut runs, behind);
    Ok(runs)
}

/// So that pieces consist of whole units.
const _: () = assert!(PIECE % UNIT == 0);

#[cfg(test)]
mod test {
    use super::*;

    fn piece(shown: Option<Vec<u8>>, onto: Option<Vec<u8>>) -> PiecePair {
        let len = 4 * UNIT;
        let segments = |bytes: Option<Vec<u8>>| bytes.map(|bytes| Segments::copy_of(&bytes));
        PiecePair { span: Span { at: DiskOffset(PIECE), len }, shown: segments(shown), onto: segments(onto) }
    }

    fn units(values: [u8; 4]) -> Vec<u8> {
        values.iter().flat_map(|&value| vec![value; usize::try_from(UNIT).unwrap()]).collect()
    }

    fn layout(both: &PiecePair) -> Vec<(u64, u64, bool)> {
        let differences = both.differences();
        differences.iter().map(|(span, bytes)| (span.at - both.span.at, span.len, bytes.is_some())).collect()
    }

    #[test]
    fn data_that_is_equal_in_both_chains_is_not_copied() {
        assert!(layout(&piece(Some(units([1, 2, 3, 4])), Some(units([1, 2, 3, 4])))).is_empty());
        assert!(layout(&piece(Some(units([0; 4])), None)).is_empty());
    }

    #[test]
    fn differing_data_is_copied_in_runs() {
        let both = piece(Some(units([1, 2, 3, 4])), Some(units([1, 0, 0, 4])));
        assert_eq!(layout(&both), [(UNIT, 2 * UNIT, true)]);
    }

    #[test]
    fn zeroes_that_would_not_stay_zero_are_written() {
        let both = piece(Some(units([0, 5, 0, 0])), Some(units([7, 7, 7, 0])));
        assert_eq!(layout(&both), [(0, UNIT, false), (UNIT, UNIT, true), (2 * UNIT, UNIT, false)]);
        assert_eq!(layout(&piece(None, Some(units([0, 0, 1, 1])))), [(2 * UNIT, 2 * UNIT, false)]);
    }
}
