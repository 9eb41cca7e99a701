//! Compares a chain of images with the simplest model of a disk: an array of bytes.
//!
//! There are no crashes or faults; the sequences are long, the layers many, and several requests are in flight, of
//! which one in four begins and ends at any byte. Snapshots are taken in between: the leaf becomes a parent and gets a
//! new child.
//!
//! Invariants checked:
//! - every read finds the bytes of the model;
//! - what is reported as a hole is zero in the model;
//! - a discarded sector reads as zero or as before, a partly discarded one as before;
//! - the same holds for the whole disk after it was closed and opened again.

use disk::{
    Disk, DiskOffset, Extent, ExtentKind, FileId, Image, ImageError, Operation, Options, Request, Span, Status, Token,
};
use memory::Segments;

use crate::io::{ROOM, SimIo, Visible};
use crate::media::Unwritten;
use crate::random::Random;
use crate::sector::{SECTOR, SECTOR_LEN};
use crate::subject::{Kind, LayerType, Start, Subject};
use crate::theme::{BLOCK, DISK};

/// Maximum number of requests in flight together.
const TOGETHER: u64 = 5;

/// A difference between the disk and the model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Difference {
    /// An image does not open.
    #[error("layer {layer} does not open: {error}")]
    Open {
        /// The layer, counted from the base.
        layer: u8,
        /// The error of the image.
        error: ImageError,
    },
    /// Bytes differ.
    #[error("after {operations} operations and {layers} layers, sector {sector} differs from the model")]
    Bytes {
        /// The first sector that differs.
        sector: u64,
        /// Number of operations done.
        operations: u64,
        /// Number of layers of the chain.
        layers: usize,
    },
    /// A range is reported as a hole, but has data.
    #[error("after {operations} operations, sector {sector} is reported as part of a hole, but is not zero")]
    Hole {
        /// The first sector of the hole.
        sector: u64,
        /// Number of operations done.
        operations: u64,
    },
    /// A request fails.
    #[error("a request of {sectors:?} is answered {status:?}")]
    Status {
        /// The sectors of the request.
        sectors: std::ops::Range<u64>,
        /// The status of the response.
        status: Status,
    },
}

struct Submitted {
    at: u64,
    len: usize,
    operation: Operation,
    memory: Segments,
}

struct Chain {
    disk: Disk<Image>,
    io: SimIo,
    model: Vec<u8>,
    random: Random,
    operations: u64,
    layers: usize,
}

/// Does `operations` random operations in each of `layers` lives, with a new layer on top for each; returns the total.
pub fn compare(seed: u64, made: LayerType, tail: Unwritten, layers: u8, operations: u64) -> Result<u64, Difference> {
    let mut random = Random::new(seed);
    let mut model = vec![0; usize::try_from(DISK * SECTOR).unwrap_or(0)];
    let subject = Subject::new(Kind::Child, tail);
    let mut start = Start::default();
    let mut done = 0;
    for layer in 0..layers {
        let open = |error| Difference::Open { layer, error };
        start.files.insert(0, subject.create_above(made, &start).map_err(open)?);
        start.forms.insert(0, made.form());
        let mut chain = Chain::open(&subject, &start, model, random).map_err(open)?;
        chain.operations = done;
        chain.live(operations)?;
        (done, model, random) = (chain.operations, chain.model, chain.random);
        start.files = chain.io.contents(&(0..=layer).map(FileId).collect::<Vec<_>>());
    }
    Ok(done)
}

impl Chain {
    fn open(subject: &Subject, start: &Start, model: Vec<u8>, random: Random) -> Result<Chain, ImageError> {
        let mut files = start.files.clone();
        let layers = subject.open(&mut files, &start.forms, 1)?;
        let count = layers.len();
        let disk = Disk::new(layers, Options::default())?;
        Ok(Chain {
            disk,
            io: SimIo::new(files, SECTOR, Visible::AtPush, ROOM, None),
            model,
            random,
            operations: 0,
            layers: count,
        })
    }

    fn live(&mut self, operations: u64) -> Result<(), Difference> {
        let until = self.operations + operations;
        while self.operations < until {
            let batch = self.batch();
            self.submit_all(batch)?;
        }
        let everything = 0..DISK * SECTOR;
        let reads = everything.step_by(64 << 10).map(|at| (at, (DISK * SECTOR - at).min(64 << 10), Operation::Read));
        self.submit_all(reads.chain([(0, 0, Operation::Flush)]).collect())
    }

    /// Generates operations that do not overlap, so that the model knows their results.
    fn batch(&mut self) -> Vec<(u64, u64, Operation)> {
        let mut batch: Vec<(u64, u64, Operation)> = Vec::new();
        for _ in 0..=self.random.below(TOGETHER) {
            let (at, count) = match self.random.below(8) {
                0 => (self.random.below(DISK / BLOCK) * BLOCK, BLOCK),
                1 => (DISK - BLOCK / 2, BLOCK / 2),
                _ => (self.random.below(DISK), 1 + self.random.below(40)),
            };
            let count = count.min(DISK - at);
            let durable = self.random.below(10) == 0;
            let free = self.random.below(3) > 0;
            let operation = match self.random.below(10) {
                0..=3 => Operation::Write { durable },
                4 => Operation::Discard,
                5 => Operation::WriteZeroes { free, durable },
                6 => Operation::Extents { depths: self.random.below(2) == 0 },
                _ => Operation::Read,
            };
            let span = Span { at: DiskOffset(at * SECTOR), len: count * SECTOR };
            let span = match operation {
                Operation::Extents { .. } => span,
                _ => self.ragged(span),
            };
            if batch.iter().all(|(at, len, _)| !span.overlaps(Span { at: DiskOffset(*at), len: *len })) {
                batch.push((span.at.0, span.len, operation));
            }
        }
        batch
    }

    /// In one of four cases shortens the span within its first and last sectors.
    fn ragged(&mut self, span: Span) -> Span {
        if self.random.below(4) > 0 {
            return span;
        }
        let before = self.random.below(SECTOR);
        let after = self.random.below(SECTOR);
        Span { at: span.at + before, len: (span.len - before).saturating_sub(after).max(1) }
    }

    /// Submits all requests at once and processes the responses in order of arrival.
    fn submit_all(&mut self, batch: Vec<(u64, u64, Operation)>) -> Result<(), Difference> {
        let mut submitted = Vec::new();
        for (at, len, operation) in batch {
            let bytes = usize::try_from(len).unwrap_or(0);
            let memory = match operation {
                Operation::Write { .. } => Segments::copy_of(&self.noise(bytes)),
                Operation::Read => Segments::copy_of(&vec![0xee; bytes]),
                _ => Segments::empty(),
            };
            let token = Token(u64::try_from(submitted.len()).unwrap_or(0));
            let span = Span { at: DiskOffset(at), len };
            let request = Request::of_bytes(operation, span, memory.clone(), token, &self.disk.geometry());
            let wrong = |status| Difference::Status { sectors: at / SECTOR..(at + len).div_ceil(SECTOR), status };
            self.disk.submit(request.map_err(wrong)?, &mut self.io);
            submitted.push(Submitted { at, len: bytes, operation, memory });
        }
        let mut answers = Vec::new();
        while self.io.pending() > 0 {
            let which = self.random.index(self.io.pending());
            let ended = self.io.finish(which);
            ended.into_iter().for_each(|done| self.disk.settle(done, &mut self.io));
        }
        while let Some((request, status)) = self.disk.answer() {
            let extents = request.extents().to_vec();
            answers.push((request.retire(), status, extents));
        }
        assert_eq!(answers.len(), submitted.len(), "every request is answered once");
        answers.into_iter().try_for_each(|(Token(token), status, extents)| {
            self.operations += 1;
            let submitted = &submitted[usize::try_from(token).unwrap_or(usize::MAX)];
            self.compare_holes(submitted, &extents)?;
            self.take(submitted, status)
        })
    }

    fn noise(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.random.number().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Compares a response with the model, or updates the model.
    fn take(&mut self, submitted: &Submitted, status: Status) -> Result<(), Difference> {
        if status != Status::Done {
            let end = submitted.at + u64::try_from(submitted.len).unwrap_or(0);
            let sectors = submitted.at / SECTOR..end.div_ceil(SECTOR);
            return Err(Difference::Status { sectors, status });
        }
        let from = usize::try_from(submitted.at).unwrap_or(usize::MAX);
        let range = from..from + submitted.len;
        match submitted.operation {
            Operation::Write { .. } | Operation::Patch { .. } => submitted.memory.copy_to(&mut self.model[range]),
            Operation::WriteZeroes { .. } => self.model[range].fill(0),
            Operation::Read => self.compare(submitted)?,
            Operation::Discard => self.discarded(submitted)?,
            Operation::Flush | Operation::Extents { .. } => {}
        }
        Ok(())
    }

    fn compare(&self, submitted: &Submitted) -> Result<(), Difference> {
        let found = submitted.memory.to_vec();
        let from = usize::try_from(submitted.at).unwrap_or(usize::MAX);
        let mut pairs = found.iter().zip(&self.model[from..]).zip(submitted.at..);
        match pairs.find(|((found, expected), _)| found != expected) {
            Some((_, at)) => {
                let (sector, operations, layers) = (at / SECTOR, self.operations, self.layers);
                Err(Difference::Bytes { sector, operations, layers })
            }
            None => Ok(()),
        }
    }

    fn compare_holes(&self, submitted: &Submitted, extents: &[Extent]) -> Result<(), Difference> {
        let mut at = submitted.at;
        for extent in extents {
            let range =
                usize::try_from(at).unwrap_or(usize::MAX)..usize::try_from(at + extent.len).unwrap_or(usize::MAX);
            if extent.kind == ExtentKind::Hole && self.model[range].iter().any(|byte| *byte != 0) {
                return Err(Difference::Hole { sector: at / SECTOR, operations: self.operations });
            }
            at += extent.len;
        }
        Ok(())
    }

    /// Takes the discarded sectors from the disk, which may be zero or unchanged; partly discarded ones are unchanged.
    fn discarded(&mut self, submitted: &Submitted) -> Result<(), Difference> {
        let memory = Segments::zeroed(submitted.len);
        let span = Span { at: DiskOffset(submitted.at), len: u64::try_from(submitted.len).unwrap_or(0) };
        let request = Request::of_bytes(Operation::Read, span, memory.clone(), Token(0), &self.disk.geometry());
        let wrong =
            |status| Difference::Status { sectors: submitted.at / SECTOR..span.end().0.div_ceil(SECTOR), status };
        self.disk.submit(request.map_err(wrong)?, &mut self.io);
        while self.io.pending() > 0 {
            let ended = self.io.finish(0);
            ended.into_iter().for_each(|done| self.disk.settle(done, &mut self.io));
        }
        if let Some((request, status)) = self.disk.answer() {
            request.retire();
            if status != Status::Done {
                return Err(wrong(status));
            }
        }
        let from = usize::try_from(submitted.at).unwrap_or(usize::MAX);
        let whole = from.next_multiple_of(SECTOR_LEN)..(from + submitted.len) / SECTOR_LEN * SECTOR_LEN;
        let found = memory.to_vec();
        for sector in whole.step_by(SECTOR_LEN) {
            if found[sector - from..sector - from + SECTOR_LEN].iter().all(|byte| *byte == 0) {
                self.model[sector..sector + SECTOR_LEN].fill(0);
            }
        }
        self.compare(&Submitted { at: submitted.at, len: submitted.len, operation: Operation::Read, memory })
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_chain_is_an_array_of_bytes() {
        for tail in [Unwritten::Zeroes, Unwritten::Stale] {
            let done = compare(1, LayerType::Vhd, tail, 4, 300);
            assert!(matches!(done, Ok(done) if done >= 1200), "{done:?}");
        }
    }
}
