//! Copies into an image the data that its parents have and another chain would not have.
//!
//! The chain is processed once, in order. Where the image has no data of its own, its contents are compared with what
//! they would be on the new parents (zeroes, if none), and written into it where they differ. The image's contents are
//! the same at every moment, so a killed job can be restarted: what has been copied is then the image's own data and
//! skipped.

use disk::{DiskOffset, Operation, Span, Token};
use memory::Segments;

use crate::image::presence::{Holds, Presence};
use crate::image::progress::Progress;
use crate::jobs::runner::Runner;
use crate::jobs::stream::{PIECE, grid, join, zero_runs};
use crate::process::failure::Failure;
use crate::process::signals::Signal;

/// How much of the disk is looked up at once.
const WINDOW: u64 = 1 << 30;
/// Pieces read, and then written, at once.
const AHEAD: usize = 16;
/// Differences are found at this granularity: the smallest qcow2 cluster that we create.
const UNIT: u64 = 64 << 10;

/// The work and what it is done with.
pub struct CopyUp<'a> {
    /// The image on its present parents.
    pub image: &'a mut Runner,
    /// The image's own data.
    pub presence: Presence,
    /// The new parents.
    pub onto: Option<&'a mut Runner>,
    /// The signal that interrupts the job.
    pub stop: &'a mut Signal,
    /// The title of the progress display.
    pub title: &'static str,
}

/// One piece of the disk, from both sides; `None` is zero.
struct Both {
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
        let missing: Vec<Span> = self.presence.runs(window)?.into_iter().filter_map(parents).collect();
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

    fn read(&mut self, batch: &[(Span, bool, bool)]) -> Result<Vec<Both>, Failure> {
        let mut pieces = Vec::new();
        for &(span, shown, onto) in batch {
            let shown = if shown { None } else { Some(ask(self.image, span)?) };
            let onto = match &mut self.onto {
                Some(runner) if !onto => Some(ask_within(runner, span)?),
                _ => None,
            };
            pieces.push(Both { span, shown, onto });
        }
        self.image.wait_for_all()?;
        if let Some(onto) = &mut self.onto {
            onto.wait_for_all()?;
        }
        Ok(pieces)
    }

    /// Writes what differs; how many bytes. Never waits for the last of them.
    fn write(&mut self, both: &Both) -> Result<u64, Failure> {
        let mut written = 0u64;
        for (span, shown) in both.differences() {
            match shown {
                Some(bytes) => {
                    self.image.submit(Operation::Write { durable: false }, span, bytes, Token(span.at.0))?;
                }
                None => {
                    // Written: a disk that reads as zero already would take a wish to free for granted.
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

impl Both {
    /// The units that differ, neighbours of one kind joined, each with what the image shows there.
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
    // Both are within a chunk, whose bytes are in memory.
    bytes.slice(usize::try_from(from).unwrap_or(usize::MAX), usize::try_from(len).unwrap_or(0))
}

fn parents((span, holds): (Span, Holds)) -> Option<Span> {
    (holds == Holds::Parent).then_some(span)
}

/// Asks for the bytes of `span`, which are there when all is waited for.
fn ask(runner: &mut Runner, span: Span) -> Result<Segments, Failure> {
    let memory = Segments::zeroed(usize::try_from(span.len).unwrap_or(usize::MAX));
    runner.submit(Operation::Read, span, memory.clone(), Token(span.at.0))?;
    Ok(memory)
}

/// Like [`ask`], for a disk that may be shorter than the span. Beyond its end it reads as zeroes.
fn ask_within(runner: &mut Runner, span: Span) -> Result<Segments, Failure> {
    let memory = Segments::zeroed(usize::try_from(span.len).unwrap_or(usize::MAX));
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

/// A piece of the disk is never longer than this.
const _: () = assert!(PIECE % UNIT == 0);

#[cfg(test)]
mod test {
    use super::*;

    fn piece(shown: Option<Vec<u8>>, onto: Option<Vec<u8>>) -> Both {
        let len = 4 * UNIT;
        let segments = |bytes: Option<Vec<u8>>| bytes.map(|bytes| Segments::copy_of(&bytes));
        Both { span: Span { at: DiskOffset(PIECE), len }, shown: segments(shown), onto: segments(onto) }
    }

    fn units(values: [u8; 4]) -> Vec<u8> {
        values.iter().flat_map(|&value| vec![value; usize::try_from(UNIT).unwrap()]).collect()
    }

    fn shape(both: &Both) -> Vec<(u64, u64, bool)> {
        let differences = both.differences();
        differences.iter().map(|(span, bytes)| (span.at - both.span.at, span.len, bytes.is_some())).collect()
    }

    #[test]
    fn data_that_is_equal_in_both_chains_is_not_copied() {
        assert!(shape(&piece(Some(units([1, 2, 3, 4])), Some(units([1, 2, 3, 4])))).is_empty());
        assert!(shape(&piece(Some(units([0; 4])), None)).is_empty());
    }

    #[test]
    fn differing_data_is_copied_in_runs() {
        let both = piece(Some(units([1, 2, 3, 4])), Some(units([1, 0, 0, 4])));
        assert_eq!(shape(&both), [(UNIT, 2 * UNIT, true)]);
    }

    #[test]
    fn zeroes_that_would_not_stay_zero_are_written() {
        let both = piece(Some(units([0, 5, 0, 0])), Some(units([7, 7, 7, 0])));
        assert_eq!(shape(&both), [(0, UNIT, false), (UNIT, UNIT, true), (2 * UNIT, UNIT, false)]);
        assert_eq!(shape(&piece(None, Some(units([0, 0, 1, 1])))), [(2 * UNIT, 2 * UNIT, false)]);
    }
}
