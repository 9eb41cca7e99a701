//! Random requests, many at once in few clusters, over a chain with compressed clusters and a table that is loaded
//! piece by piece; completions in any order, with faults.
//!
//! Invariants checked: every sector that is read is one version as a whole, and one that was there at some moment of the
//! read: the last answered, or one in flight. A failed write leaves its own sectors as before or as written, and no
//! others touched. Every request is answered once. The map agrees with the formats at the end.

use std::collections::{BTreeSet, HashMap};

use super::clusters::{CLUSTER, Clusters, Entry};
use super::*;

/// Three grains, the last of them a part of one, ending in the middle of a cluster.
const LEN: u64 = 4 * MIB + 64 * CLUSTER + 1536;

struct Flight {
    operation: Operation,
    span: Span,
    byte: u8,
    /// For a read: its memory, and what each sector may read as.
    memory: Segments,
    legal: Vec<BTreeSet<u8>>,
}

struct Model {
    rig: Rig<Clusters>,
    /// What each sector may hold.
    sectors: Vec<BTreeSet<u8>>,
    flights: HashMap<u64, Flight>,
    last: u64,
    failed: usize,
}

/// A layer with all kinds of clusters, and what it makes of what is below.
fn layer(files: &mut Files, below: &mut [u8], leaf: bool) -> (Clusters, Vec<u8>) {
    let (mut format, mut file) = (Clusters::new(LEN), Vec::new());
    format.known_max = 11;
    format.read_only = !leaf;
    for cluster in 0..LEN.div_ceil(CLUSTER) {
        let first = files.draw(200) as u8 + 1;
        let from = (cluster * CLUSTER) as usize;
        let to = below.len().min(from + CLUSTER as usize);
        let new = match files.draw(8) {
            0 | 1 => {
                format.put(&mut file, cluster, first);
                super::clusters::content(first)
            }
            2 => {
                format.put_packed(&mut file, cluster, first);
                super::clusters::content(first)
            }
            3 => {
                format.table[cluster as usize] = Entry::Zero;
                vec![0; CLUSTER as usize]
            }
            _ => continue,
        };
        below[from..to].copy_from_slice(&new[..to - from]);
    }
    (format, file)
}

impl Model {
    fn new(seed: u64, depth: usize) -> Model {
        let mut dice = Files::new(Vec::new(), seed);
        let mut bytes = vec![0; LEN as usize];
        let (mut layers, mut files) = (Vec::new(), Vec::new());
        for at in (0..depth).rev() {
            let (format, file) = layer(&mut dice, &mut bytes, at == 0);
            layers.insert(0, format);
            files.insert(0, file);
        }
        let sectors = bytes.chunks(512).map(|sector| BTreeSet::from([sector[0]])).collect();
        Model { rig: Rig::new(layers, files, seed), sectors, flights: HashMap::new(), last: 0, failed: 0 }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.rig.files.draw(below)
    }

    fn range(span: Span) -> std::ops::Range<usize> {
        (span.at / 512) as usize..(span.end() / 512) as usize
    }

    /// Submits a request that overlaps no write in flight, if this is possible at the place that is drawn.
    fn submit(&mut self, hot: u64) {
        let at = (hot * CLUSTER + self.draw(24) * 512).min(LEN - 512);
        let long = if self.draw(4) == 0 { 40 } else { 6 };
        let len = ((1 + self.draw(long)) * 512).min(LEN - at);
        let (span, byte) = (Span { at, len }, 201 + self.draw(55) as u8);
        let operation = match self.draw(12) {
            0..5 => Operation::Write { durable: byte % 16 == 0 },
            5 => Operation::WriteZeroes { free: true, durable: false },
            6 => Operation::WriteZeroes { free: false, durable: false },
            7 => Operation::Discard,
            8 => Operation::Flush,
            _ => Operation::Read,
        };
        let span = if operation == Operation::Flush { Span { at: 0, len: 0 } } else { span };
        let meets = |flight: &Flight| flight.operation.is_write() && flight.span.overlaps(span);
        if operation.is_write() && self.flights.values().any(meets) {
            return;
        }
        self.begin(operation, span, byte);
    }

    fn begin(&mut self, operation: Operation, span: Span, byte: u8) {
        let byte = if matches!(operation, Operation::Write { .. }) { byte } else { 0 };
        let memory = match operation {
            Operation::Read | Operation::Write { .. } => Segments::copy_of(&vec![byte; span.len as usize]),
            _ => Segments::empty(),
        };
        self.last += 1;
        if operation.is_write() {
            for sector in Model::range(span) {
                self.sectors[sector].insert(byte);
                let reads = self.flights.values_mut().filter(|flight| flight.operation == Operation::Read);
                for read in reads.filter(|read| Model::range(read.span).contains(&sector)) {
                    read.legal[sector - Model::range(read.span).start].insert(byte);
                }
            }
        }
        let legal = self.sectors[Model::range(span)].to_vec();
        self.flights.insert(self.last, Flight { operation, span, byte, memory: memory.clone(), legal });
        self.rig.submit(operation, span.at, span.len, memory, self.last);
        self.take_answers();
    }

    fn take_answers(&mut self) {
        while let Some((token, status, _)) = self.rig.answered.pop_front() {
            let flight = self.flights.remove(&token.0).expect("answered once");
            self.failed += usize::from(status == Status::Failed);
            assert!(matches!(status, Status::Done | Status::Failed), "{status:?}");
            match flight.operation {
                // A discard leaves what was there, or zeroes.
                Operation::Write { .. } | Operation::WriteZeroes { .. } if status == Status::Done => {
                    let written = BTreeSet::from([flight.byte]);
                    self.sectors[Model::range(flight.span)].fill(written);
                }
                Operation::Read if status == Status::Done => flight.check(),
                _ => {}
            }
        }
    }

    fn step(&mut self) {
        self.rig.step();
        self.take_answers();
    }

    /// Everything agrees with the model, now that nothing is in flight.
    fn check_all(&mut self) {
        self.rig.files.fail_one_in = None;
        while !self.rig.disk.is_idle() {
            self.step();
        }
        assert!(self.flights.is_empty(), "requests without an answer");
        self.begin(Operation::Read, Span { at: 0, len: LEN }, 0);
        while !self.flights.is_empty() {
            self.step();
        }
        assert!(self.rig.disk.fills.len() == 0 && self.rig.disk.busy.is_empty() && self.rig.disk.learning.is_empty());
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

fn run(seed: u64, depth: usize, fail_one_in: Option<u64>) -> usize {
    println!("seed {seed}, depth {depth}, faults {fail_one_in:?}");
    let mut model = Model::new(seed, depth);
    model.rig.files.fail_one_in = fail_one_in;
    for _ in 0..60 {
        // A few clusters at a time, so that requests meet.
        let hot = model.draw(LEN / CLUSTER);
        model.rig.files.room = 1 + model.draw(12) as usize;
        for _ in 0..40 {
            let near = (hot + model.draw(2)).min(LEN / CLUSTER - 1);
            model.submit(near);
            for _ in 0..model.draw(4) {
                model.step();
            }
        }
    }
    model.check_all();
    model.failed
}

/// Scope: 24 seeds of 2400 requests for chains of one, two and three layers.
#[test]
fn requests_that_meet_in_a_cluster_lose_nothing() {
    let failed: usize = (0..24).map(|seed| run(seed, 1 + seed as usize % 3, None)).sum();
    assert_eq!(failed, 0);
}

/// Scope: 24 seeds of 2400 requests, one in 6 to one in 40 operations failing.
#[test]
fn faults_make_only_their_own_request_uncertain() {
    let failed: usize = (100..124).map(|seed| run(seed, 1 + seed as usize % 3, Some(6 + seed % 5 * 8))).sum();
    assert!(failed > 100, "{failed} requests have failed");
}
