//! A guest of a chain of clusters, and what it may find: for tests of random requests.

use std::collections::{BTreeSet, HashMap};

use super::clusters::{CLUSTER, Clusters, Entry, content};
use super::*;
use crate::DiskOffset;

/// Three chunks, the last of them a part of one, ending in the middle of a cluster.
pub const LEN: u64 = 4 * MIB + 64 * CLUSTER + 1536;

struct Flight {
    operation: Operation,
    span: Span,
    byte: u8,
    /// For a read: its memory, and what each sector may read as.
    memory: Segments,
    legal: Vec<BTreeSet<u8>>,
    /// For a flush: the sectors that no write was under way to.
    still: Vec<bool>,
}

/// What the guest did to the disk, and what it may find.
pub struct Model {
    pub rig: Rig<Clusters>,
    /// What each sector may hold.
    sectors: Vec<BTreeSet<u8>>,
    /// What each sector may hold after a power loss.
    survivors: Vec<BTreeSet<u8>>,
    /// The request that last began to change each sector.
    changed: Vec<u64>,
    flights: HashMap<u64, Flight>,
    last: u64,
    pub failed: usize,
}

/// A layer with all kinds of clusters, and what it makes of what is below.
fn layer(files: &mut MemoryIo, below: &mut [u8], writable: bool) -> (Clusters, Vec<u8>) {
    let (mut format, mut file) = (Clusters::new(LEN), Vec::new());
    format.known_max = 11;
    format.read_only = !writable;
    for cluster in 0..LEN.div_ceil(CLUSTER) {
        let first = files.draw(200) as u8 + 1;
        let from = (cluster * CLUSTER) as usize;
        let to = below.len().min(from + CLUSTER as usize);
        let new = match files.draw(8) {
            0 | 1 => {
                format.put(&mut file, cluster, first);
                content(first)
            }
            2 => {
                format.put_packed(&mut file, cluster, first);
                content(first)
            }
            3 => {
                format.table[cluster as usize] = Entry::Zero;
                vec![0; CLUSTER as usize]
            }
            _ => continue,
        };
        below[from..to].copy_from_slice(&new[..to - from]);
    }
    format.durable = format.table.clone();
    (format, file)
}

impl Model {
    /// A chain of `depth` layers, the first `writable` of which can be written to.
    pub fn new(seed: u64, depth: usize, writable: usize) -> Model {
        let mut dice = MemoryIo::random(Vec::new(), seed);
        let mut bytes = vec![0; LEN as usize];
        let (mut layers, mut files) = (Vec::new(), Vec::new());
        for at in (0..depth).rev() {
            let (format, file) = layer(&mut dice, &mut bytes, at < writable);
            layers.insert(0, format);
            files.insert(0, file);
        }
        let sectors: Vec<_> = bytes.chunks(512).map(|sector| BTreeSet::from([sector[0]])).collect();
        let (survivors, changed) = (sectors.clone(), vec![0; sectors.len()]);
        let mut rig = Rig::new(layers, files, seed);
        // Every other time little, so that much has to wait; sometimes less than one operation takes.
        if seed % 2 == 1 {
            rig.limit(dice.draw(4) * CLUSTER / 2);
        }
        Model { rig, sectors, survivors, changed, flights: HashMap::new(), last: 0, failed: 0 }
    }

    pub fn draw(&mut self, below: u64) -> u64 {
        self.rig.files.draw(below)
    }

    fn range(span: Span) -> std::ops::Range<usize> {
        (span.at / 512) as usize..(span.end() / 512) as usize
    }

    /// Submits a request that overlaps no write in flight, if this is possible at the place that is drawn.
    pub fn submit(&mut self, hot: u64) {
        let at = (hot * CLUSTER + self.draw(24) * 512).min(LEN - 512);
        let long = if self.draw(4) == 0 { 40 } else { 6 };
        let len = ((1 + self.draw(long)) * 512).min(LEN - at);
        let (span, byte) = (Span { at: DiskOffset(at), len }, 201 + self.draw(55) as u8);
        let operation = match self.draw(12) {
            0..5 => Operation::Write { durable: byte % 16 == 0 },
            5 => Operation::WriteZeroes { free: true, durable: false },
            6 => Operation::WriteZeroes { free: false, durable: false },
            7 => Operation::Discard,
            8 => Operation::Flush,
            _ => Operation::Read,
        };
        let span = if operation == Operation::Flush { Span { at: DiskOffset(0), len: 0 } } else { span };
        let meets = |flight: &Flight| flight.operation.is_write() && flight.span.overlaps(span);
        if operation.is_write() && self.flights.values().any(meets) {
            return;
        }
        self.begin(operation, span, byte);
    }

    pub fn begin(&mut self, operation: Operation, span: Span, byte: u8) {
        let byte = if matches!(operation, Operation::Write { .. }) { byte } else { 0 };
        let memory = match operation {
            Operation::Read | Operation::Write { .. } => Segments::copy_of(&vec![byte; span.len as usize]),
            _ => Segments::empty(),
        };
        self.last += 1;
        if operation.is_write() {
            for sector in Model::range(span) {
                self.sectors[sector].insert(byte);
                self.survivors[sector].insert(byte);
                self.changed[sector] = self.last;
                let reads = self.flights.values_mut().filter(|flight| flight.operation == Operation::Read);
                for read in reads.filter(|read| Model::range(read.span).contains(&sector)) {
                    read.legal[sector - Model::range(read.span).start].insert(byte);
                }
            }
        }
        let legal = self.sectors[Model::range(span)].to_vec();
        let still = if operation == Operation::Flush { self.still() } else { Vec::new() };
        self.flights.insert(self.last, Flight { operation, span, byte, memory: memory.clone(), legal, still });
        self.rig.submit(operation, span.at.0, span.len, memory, self.last);
        self.take_answers();
    }

    pub fn take_answers(&mut self) {
        while let Some((token, status, _)) = self.rig.answered.pop_front() {
            let flight = self.flights.remove(&token.0).expect("answered once");
            self.failed += usize::from(status == Status::Failed);
            let refused = status == Status::Refused && self.rig.disk.is_broken();
            assert!(refused || matches!(status, Status::Done | Status::Failed), "{status:?}");
            match flight.operation {
                // A discard leaves what was there, or zeroes.
                Operation::Write { .. } | Operation::WriteZeroes { .. } if status == Status::Done => {
                    let written = BTreeSet::from([flight.byte]);
                    self.sectors[Model::range(flight.span)].fill(written);
                }
                Operation::Read if status == Status::Done => flight.check(),
                Operation::Flush if status == Status::Done => self.survive(token.0, &flight.still),
                _ => {}
            }
        }
    }

    /// The sectors that no write is under way to.
    fn still(&self) -> Vec<bool> {
        let mut still = vec![true; self.sectors.len()];
        for flight in self.flights.values().filter(|flight| flight.operation.is_write()) {
            still[Model::range(flight.span)].fill(false);
        }
        still
    }

    /// A flush has succeeded: what was answered before it is there to stay.
    fn survive(&mut self, flush: u64, still: &[bool]) {
        for (sector, _) in still.iter().enumerate().filter(|&(_, &still)| still) {
            if self.changed[sector] < flush {
                self.survivors[sector] = self.sectors[sector].clone();
            }
        }
    }

    /// Everything that would be there after a power loss at this moment is what the guest may find.
    pub fn check_survivors(&self) {
        let layers: Vec<_> = self.rig.disk.layers().iter().collect();
        for (sector, legal) in self.survivors.iter().enumerate() {
            let at = sector as u64 * 512;
            let found = layers
                .iter()
                .find_map(|layer| layer.format.survivor(&self.rig.files.bytes[usize::from(layer.file.0)], at));
            let found = found.unwrap_or(0);
            assert!(legal.contains(&found), "{found} at {at} after a power loss, legal are {legal:?}");
        }
    }

    pub fn step(&mut self) {
        self.rig.step();
        self.take_answers();
    }

    /// Everything agrees with the model, now that nothing is in flight.
    pub fn check_all(&mut self) {
        self.rig.files.fail_one_in = None;
        while !self.rig.disk.is_idle() {
            self.step();
        }
        assert!(self.flights.is_empty(), "requests without an answer");
        self.begin(Operation::Read, Span { at: DiskOffset(0), len: LEN }, 0);
        while !self.flights.is_empty() {
            self.step();
        }
        assert!(
            self.rig.disk.fills.is_empty()
                && self.rig.disk.compressed.is_idle()
                && self.rig.disk.busy.is_empty()
                && self.rig.disk.map_loader.is_over()
        );
    }
}

impl Flight {
    fn check(&self) {
        let bytes = self.memory.to_vec();
        for (at, (sector, legal)) in bytes.chunks(512).zip(&self.legal).enumerate() {
            let at = self.span.at + at as u64 * 512;
            assert!(sector.iter().all(|&byte| byte == sector[0]), "torn sector at {at}");
            assert!(legal.contains(&sector[0]), "{} at {at}, legal are {legal:?}", sector[0]);
        }
    }
}
