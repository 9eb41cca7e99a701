//! A whole disk as a stream of chunks in order, read ahead by a separate thread.
//!
//! Chunks are aligned to a fixed grid, so that two streams can be compared chunk by chunk. Ranges known to be zero are
//! reported as such, and never read. Dropping the stream stops the thread, and waits for that.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use disk::size::in_memory;
use disk::{DiskOffset, ExtentKind, Operation, Span, Token};
use memory::Segments;
use uring::EngineKind;

use crate::image::chain::Layers;
use crate::jobs::runner::{Answer, Runner};
use crate::process::failure::Failure;

/// The bytes of a chunk, except the last: large enough for any storage's full throughput.
pub const PIECE: u64 = 1 << 20;
/// The number of chunks read ahead: together with those in the channel, 32 MiB of memory.
const AHEAD: usize = 16;
/// The number of delivered chunks whose memory may be used again: those in the channel, and as many with the receiver.
const DELIVERED_MAX: usize = 2 * AHEAD;
/// Zeroes are detected at this granularity: the usual minimum allocation of file systems and guests.
const GRAIN: usize = 64 << 10;
/// The bytes of the disk that are looked up at once.
const WINDOW: u64 = 1 << 30;

/// The size of reads that salvage a chunk which could not be read as a whole: file systems lose data in blocks of this
/// size.
const SALVAGED: u64 = 4096;

/// A piece of a disk.
pub struct Chunk {
    /// The range of the disk.
    pub span: Span,
    /// The bytes of the chunk; `None` if they are zeroes.
    pub bytes: Option<Segments>,
    /// The ranges that could not be read, ascending and merged. They are zero in `bytes`.
    pub lost: Vec<Span>,
}

/// How a stream handles read errors of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// It ends with the failure.
    Fail,
    /// It continues without those bytes.
    Skip,
}

/// The chunks of a disk or a part of it, in order. The stream ends after the last byte or with a failure, never before.
pub struct Stream {
    /// The number of bytes still to be returned.
    left: u64,
    /// `None` only while the stream is dropped.
    pieces: Option<Receiver<Result<Chunk, Failure>>>,
    thread: Option<JoinHandle<()>>,
}

impl Stream {
    /// Starts to read all of a disk.
    pub fn of(layers: Layers, kind: Option<EngineKind>) -> Stream {
        let len = layers.geometry().map_or(0, |geometry| geometry.len);
        Stream::range(layers, kind, Unreadable::Fail, Span { at: DiskOffset(0), len })
    }

    /// Starts to read a part of a disk.
    pub fn range(layers: Layers, kind: Option<EngineKind>, unreadable: Unreadable, range: Span) -> Stream {
        let (sender, pieces) = sync_channel(AHEAD);
        let thread = std::thread::spawn(move || {
            let reader = Reader::new(layers, kind, unreadable, &sender);
            if let Err(failure) = reader.and_then(|reader| reader.run(range)) {
                // If the receiver is gone, the failure does not matter.
                sender.send(Err(failure)).unwrap_or_default();
            }
        });
        Stream { left: range.len, pieces: Some(pieces), thread: Some(thread) }
    }
}

impl Drop for Stream {
    /// Waits for the thread, so that its files are unlocked when this returns.
    fn drop(&mut self) {
        // Dropping the receiver stops the thread at its next chunk.
        drop(self.pieces.take());
        if let Some(thread) = self.thread.take() {
            // A panicked thread has already reported why.
            thread.join().unwrap_or_default();
        }
    }
}

impl Iterator for Stream {
    type Item = Result<Chunk, Failure>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.left == 0 {
            return None;
        }
        let gone = || Failure::new("read on", "the reader thread has exited");
        let piece = self.pieces.as_ref().and_then(|pieces| pieces.recv().ok()).unwrap_or_else(|| Err(gone()));
        match &piece {
            Ok(piece) => self.left -= piece.span.len,
            Err(_) => self.left = 0,
        }
        Some(piece)
    }
}

/// The reader thread.
struct Reader<'a> {
    runner: Runner,
    unreadable: Unreadable,
    out: &'a SyncSender<Result<Chunk, Failure>>,
    /// The requested chunks, in order.
    ahead: VecDeque<(Chunk, ReadState)>,
    /// The memory of delivered chunks, the oldest first: the receiver is done with that first.
    delivered: VecDeque<Segments>,
}

/// The state of a requested chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadState {
    Submitted,
    Done,
    Failed,
}

/// The stream was dropped, so reading stops.
struct StreamDropped;

impl Reader<'_> {
    fn new(
        layers: Layers,
        kind: Option<EngineKind>,
        unreadable: Unreadable,
        out: &SyncSender<Result<Chunk, Failure>>,
    ) -> Result<Reader<'_>, Failure> {
        Ok(Reader {
            runner: Runner::new(layers, kind)?,
            unreadable,
            out,
            ahead: VecDeque::new(),
            delivered: VecDeque::new(),
        })
    }

    fn run(mut self, range: Span) -> Result<(), Failure> {
        let (mut at, end) = (range.at, range.end());
        while at < end {
            let window = Span { at, len: WINDOW.min(end - at) };
            let zeros = zero_runs(&mut self.runner, window)?;
            for span in grid(window) {
                let zero = zeros.iter().any(|run| run.at <= span.at && span.end() <= run.end());
                if self.request(span, zero)?.is_err() {
                    return Ok(());
                }
            }
            // The next lookup needs exclusive use of the disk.
            if self.deliver(0)?.is_err() {
                return Ok(());
            }
            at = window.end();
        }
        Ok(())
    }

    fn request(&mut self, span: Span, zero: bool) -> Result<Result<(), StreamDropped>, Failure> {
        let mut bytes = None;
        if !zero {
            let memory = self.memory(in_memory(span.len));
            self.runner.submit(Operation::Read, span, memory.clone(), Token(span.at.0))?;
            bytes = Some(memory);
        }
        let read = if zero { ReadState::Done } else { ReadState::Submitted };
        self.ahead.push_back((Chunk { span, bytes, lost: Vec::new() }, read));
        self.deliver(AHEAD)
    }

    /// Memory of a delivered chunk that nothing else refers to, or else new memory, which the kernel clears page by
    /// page. A read fills all of it.
    fn memory(&mut self, len: usize) -> Segments {
        if let Some(mut oldest) = self.delivered.pop_front() {
            if oldest.len() == len && oldest.is_own_buffer() {
                return oldest;
            }
            if self.delivered.len() < DELIVERED_MAX {
                self.delivered.push_front(oldest);
            }
        }
        Segments::zeroed(len)
    }

    /// Waits until at most `left` chunks are read ahead, and delivers the others.
    fn deliver(&mut self, left: usize) -> Result<Result<(), StreamDropped>, Failure> {
        loop {
            while self.ahead.front().is_some_and(|&(_, read)| read != ReadState::Submitted) {
                let Some((mut chunk, read)) = self.ahead.pop_front() else { break };
                if read == ReadState::Failed {
                    self.salvage(&mut chunk)?;
                }
                self.delivered.extend(chunk.bytes.clone());
                if self.out.send(Ok(chunk)).is_err() {
                    return Ok(Err(StreamDropped));
                }
            }
            if self.ahead.len() <= left {
                return Ok(Ok(()));
            }
            let (token, answer) = self.runner.wait_for_any()?;
            self.complete(token, answer)?;
        }
    }

    /// Records the result of reading a chunk.
    fn complete(&mut self, token: Token, answer: Result<Answer, Failure>) -> Result<(), Failure> {
        let now = match answer {
            Ok(_) => ReadState::Done,
            Err(_) if self.unreadable == Unreadable::Skip => ReadState::Failed,
            Err(failure) => return Err(failure),
        };
        if let Some((_, read)) = self.ahead.iter_mut().find(|(chunk, _)| Token(chunk.span.at.0) == token) {
            *read = now;
        }
        Ok(())
    }

    /// Reads what can be read of a chunk that cannot be read as a whole.
    fn salvage(&mut self, chunk: &mut Chunk) -> Result<(), Failure> {
        let Some(bytes) = &chunk.bytes else { return Ok(()) };
        let mut at = chunk.span.at;
        while at < chunk.span.end() {
            let span = Span { at, len: SALVAGED.min(chunk.span.end() - at) };
            let part = bytes.slice(in_memory(at - chunk.span.at), in_memory(span.len));
            self.runner.submit(Operation::Read, span, part.clone(), Token(at.0))?;
            let answer = loop {
                let (token, answer) = self.runner.wait_for_any()?;
                if token == Token(at.0) {
                    break answer;
                }
                self.complete(token, answer)?;
            };
            if answer.is_err() {
                part.fill_zero();
                join(&mut chunk.lost, span);
            }
            at = span.end();
        }
        Ok(())
    }
}

/// Appends a run; adjacent runs are merged.
pub fn join(runs: &mut Vec<Span>, next: Span) {
    match runs.last_mut() {
        Some(last) if last.end() == next.at => last.len += next.len,
        _ => runs.push(next),
    }
}

/// Returns the runs of `window` that read as zeroes without being stored, merged. Nothing may be in flight.
pub fn zero_runs(runner: &mut Runner, window: Span) -> Result<Vec<Span>, Failure> {
    let mut runs: Vec<Span> = Vec::new();
    for (span, kind) in extents(runner, window)? {
        if kind != ExtentKind::Data {
            join(&mut runs, span);
        }
    }
    Ok(runs)
}

/// Returns all extents of `window`. Nothing may be in flight.
pub fn extents(runner: &mut Runner, window: Span) -> Result<Vec<(Span, ExtentKind)>, Failure> {
    let mut found = Vec::new();
    let mut at = window.at;
    while at < window.end() {
        let before = at;
        let answer = runner.execute(Operation::Extents { depths: false }, Span { at, len: window.end() - at })?;
        for extent in answer.extents {
            let len = extent.len.min(window.end() - at);
            found.push((Span { at, len }, extent.kind));
            at += len;
        }
        if at == before {
            // The disk reported nothing: unknown ranges count as data.
            found.push((Span { at, len: window.end() - at }, ExtentKind::Data));
            break;
        }
    }
    Ok(found)
}

/// Cuts `window` into chunks, from its beginning.
pub fn grid(window: Span) -> impl Iterator<Item = Span> {
    let pieces = window.len.div_ceil(PIECE);
    (0..pieces).map(move |n| {
        let at = window.at + n * PIECE;
        Span { at, len: PIECE.min(window.end() - at) }
    })
}

/// Returns the runs of `bytes` that are not zero, merged, each with its offset.
pub fn stored_runs(bytes: &Segments) -> Vec<(usize, Segments)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    let mut from = 0;
    while from < bytes.len() {
        let len = GRAIN.min(bytes.len() - from);
        if !bytes.slice(from, len).is_zero() {
            match runs.last_mut() {
                Some((start, run)) if *start + *run == from => *run += len,
                _ => runs.push((from, len)),
            }
        }
        from += len;
    }
    runs.into_iter().map(|(from, len)| (from, bytes.slice(from, len))).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_grid_covers_a_window_to_its_last_byte() {
        let pieces: Vec<Span> = grid(Span { at: DiskOffset(WINDOW), len: 2 * PIECE + 512 }).collect();
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces.last().copied(), Some(Span { at: DiskOffset(WINDOW + 2 * PIECE), len: 512 }));
        assert_eq!(grid(Span { at: DiskOffset(0), len: 0 }).count(), 0);
    }

    #[test]
    fn only_nonzero_ranges_are_written() {
        let mut bytes = vec![0; 4 * GRAIN + 512];
        bytes[GRAIN] = 1;
        bytes[3 * GRAIN - 1] = 2;
        bytes[4 * GRAIN + 511] = 3;
        let runs = stored_runs(&Segments::copy_of(&bytes));
        let shape: Vec<(usize, usize)> = runs.iter().map(|(from, run)| (*from, run.len())).collect();
        assert_eq!(shape, [(GRAIN, 2 * GRAIN), (4 * GRAIN, 512)]);
        assert!(stored_runs(&Segments::zeroed(GRAIN)).is_empty());
    }
}
