//! Merges under the requests of a guest.
//!
//! Invariants checked: those of `model`, throughout; a power loss at any moment leaves what was flushed; a merge visits
//! each chunk once however much is written; at its end the sources hold nothing.

use super::clusters::{CLUSTER, Clusters, Entry, content};
use super::model::{LEN, Model};
use super::*;

const CHUNK: u64 = crate::chain_map::CHUNK;

/// Layers of a chain, and which of them are merged.
#[derive(Clone, Copy, Debug)]
struct Shape {
    depth: usize,
    from: usize,
    into: usize,
}

const SHAPES: [Shape; 7] = [
    Shape { depth: 2, from: 0, into: 1 },
    Shape { depth: 3, from: 0, into: 1 },
    Shape { depth: 3, from: 0, into: 2 },
    Shape { depth: 3, from: 1, into: 2 },
    Shape { depth: 4, from: 1, into: 2 },
    Shape { depth: 4, from: 1, into: 3 },
    Shape { depth: 5, from: 0, into: 4 },
];

impl Model {
    fn merging(seed: u64, shape: Shape) -> Model {
        println!("seed {seed}, {shape:?}");
        let mut model = Model::new(seed, shape.depth, shape.into + 1);
        model.rig.disk.begin_merge(shape.from, shape.into).unwrap();
        model
    }

    fn state(&self) -> MergeState {
        self.rig.disk.merge().unwrap().state
    }

    fn step_merge(&mut self) -> bool {
        let begun = self.rig.disk.step_merge(&mut self.rig.files);
        self.take_answers();
        begun
    }

    /// Some requests, steps, and now and then a piece of the merge; how many pieces.
    fn live(&mut self, rounds: usize) -> usize {
        let mut pieces = 0;
        let hot = self.draw(LEN / CLUSTER);
        self.rig.files.room = 1 + self.draw(12) as usize;
        for _ in 0..rounds {
            let near = (hot + self.draw(2)).min(LEN / CLUSTER - 1);
            self.submit(near);
            for _ in 0..self.draw(4) {
                self.step();
            }
            if self.draw(20) == 0 {
                pieces += usize::from(self.step_merge());
            }
        }
        self.check_survivors();
        pieces
    }

    /// Holds requests back and makes everything durable.
    fn quiesce(&mut self) {
        self.rig.disk.quiesce();
        self.quiet();
        self.rig.disk.sync(&mut self.rig.files);
        self.quiet();
    }

    fn quiet(&mut self) {
        while !self.rig.disk.is_quiet() {
            self.step();
        }
    }

    fn resume(&mut self) {
        self.rig.disk.resume(&mut self.rig.files);
        self.rig.collect();
        self.take_answers();
    }

    /// Takes the merged layers off.
    fn end_merge(&mut self) {
        self.quiesce();
        let sources = self.rig.disk.end_merge().unwrap();
        for source in &sources {
            assert!(source.format.table.iter().all(|&entry| entry == Entry::Parent), "a source holds something");
            assert_eq!(source.format.table, source.format.durable);
        }
        self.resume();
    }

    /// The merge up to its end, begun again where it has failed.
    fn finish_merge(&mut self, Shape { from, into, .. }: Shape) {
        while self.state() != MergeState::Copied {
            if self.state() != MergeState::Running {
                self.rig.disk.begin_merge(from, into).unwrap();
            }
            self.step_merge();
            self.step();
        }
    }
}

/// Scope: every shape, 4 seeds each of some thousand requests.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn merges_under_requests_lose_nothing_and_end_in_one_pass() {
    for shape in SHAPES {
        for seed in 0..4 {
            let mut model = Model::merging(seed, shape);
            let mut pieces = 0;
            while model.state() == MergeState::Running {
                pieces += model.live(40);
            }
            assert_eq!(model.state(), MergeState::Copied);
            assert!(pieces <= 3, "{pieces} pieces for three chunks");
            model.live(40);
            model.end_merge();
            assert_eq!(model.rig.disk.layers().len(), shape.depth - (shape.into - shape.from));
            model.live(80);
            model.check_all();
        }
    }
}

/// Scope: every shape, 6 seeds each; one in 10 to one in 58 operations fails, merges are cancelled and begun again.
#[test]
#[ignore = "slow: run by `make test-all`"]
fn faults_and_cancelled_merges_lose_nothing() {
    let (mut failures, mut cancelled) = (0, 0);
    for shape in SHAPES {
        for seed in 100..106 {
            let mut model = Model::merging(seed, shape);
            model.rig.files.fail_one_in = Some(10 + seed % 4 * 16);
            for _ in 0..30 {
                model.live(20);
                if model.draw(4) == 0 {
                    model.rig.disk.cancel_merge();
                    cancelled += 1;
                }
                if model.draw(4) == 0 {
                    model.quiesce();
                    model.resume();
                }
                let begun = model.rig.disk.merge().map(|merge| merge.state);
                failures += usize::from(matches!(begun, Some(MergeState::Failed(_))));
                if begun.is_none_or(|state| matches!(state, MergeState::Failed(_))) {
                    model.rig.disk.begin_merge(shape.from, shape.into).unwrap();
                }
            }
            model.rig.files.fail_one_in = None;
            model.finish_merge(shape);
            model.end_merge();
            model.live(20);
            model.check_all();
        }
    }
    assert!(failures > 20 && cancelled > 100, "{failures} failures, {cancelled} cancelled");
}

/// A chain of three with clusters of its own in each layer, and what it reads as.
fn three() -> (Rig<Clusters>, Vec<u8>) {
    let (mut layers, mut files, mut bytes) = (Vec::new(), Vec::new(), vec![0; 12 * CLUSTER as usize]);
    for depth in (0..3u8).rev() {
        let (mut format, mut file) = (Clusters::new(CHUNK + CLUSTER), Vec::new());
        for cluster in (u64::from(depth)..12).step_by(3 - usize::from(depth)) {
            format.put(&mut file, cluster, 10 * depth + 1);
            bytes[(cluster * CLUSTER) as usize..][..CLUSTER as usize].copy_from_slice(&content(10 * depth + 1));
        }
        format.durable = format.table.clone();
        layers.insert(0, format);
        files.insert(0, file);
    }
    (Rig::new(layers, files, 1), bytes)
}

/// The Nth operation fails in a merge with a write, a discard and a flush; whether there were so many.
fn merge_with_fault(nth: usize) -> bool {
    let (mut rig, mut bytes) = three();
    rig.files.fail_nth = Some(nth);
    rig.disk.begin_merge(0, 2).unwrap();
    rig.step_merge();
    let written = rig.write(2 * CLUSTER, &[99; 512]);
    let cleared =
        rig.ask(Operation::WriteZeroes { free: true, durable: false }, 3 * CLUSTER, CLUSTER, Segments::empty());
    rig.flush();
    rig.merge_all();
    let fault = rig.files.fail_nth.take().is_none();
    let broken = rig.disk.is_broken();
    if progress(&rig).state != MergeState::Copied && !broken {
        rig.disk.begin_merge(0, 2).unwrap();
        rig.merge_all();
    }
    assert!(broken || progress(&rig).state == MergeState::Copied);
    // What failed is as before or as asked for.
    let found = rig.read(0, 12 * CLUSTER);
    for (at, len, byte, status) in [(2 * CLUSTER, 512, 99, written), (3 * CLUSTER, CLUSTER, 0, cleared)] {
        let range = at as usize..(at + len) as usize;
        if status == Status::Done || found[range.clone()] != bytes[range.clone()] {
            bytes[range].fill(byte);
        }
    }
    assert!(found == bytes, "operation {nth}");
    fault
}

/// Scope: the Nth operation fails, reads, writes, deallocations and syncs, for every N.
#[test]
fn a_fault_at_any_operation_leaves_a_chain_that_reads_as_before() {
    let operations = (0..).take_while(|&nth| merge_with_fault(nth)).count();
    assert!(operations > 30, "{operations} operations");
}

#[test]
fn snapshots_under_load_keep_every_write() {
    for seed in 200..208 {
        let mut model = Model::new(seed, 1, 1);
        for id in 1..6 {
            model.live(60);
            model.quiesce();
            let mut leaf = Clusters::new(LEN);
            leaf.known_max = 11;
            model.rig.files.bytes.push(Vec::new());
            model.rig.disk.push_leaf(FileId(id), leaf).unwrap();
            for _ in 0..4 {
                let hot = model.draw(LEN / CLUSTER);
                model.submit(hot);
            }
            model.resume();
        }
        model.live(60);
        model.check_all();
    }
}

/// A leaf over a base, each with one cluster at the beginning of each of two chunks.
fn pair() -> Rig<Clusters> {
    let (mut leaf, mut base) = (Clusters::new(2 * CHUNK), Clusters::new(2 * CHUNK));
    let (mut leaf_file, mut base_file) = (Vec::new(), Vec::new());
    for cluster in [0, CHUNK / CLUSTER] {
        leaf.put(&mut leaf_file, cluster, 10);
        base.put(&mut base_file, cluster + 1, 20);
    }
    Rig::new(vec![leaf, base], vec![leaf_file, base_file], 1)
}

fn progress(rig: &Rig<Clusters>) -> MergeProgress {
    rig.disk.merge().unwrap()
}

impl Rig<Clusters> {
    fn step_merge(&mut self) -> bool {
        self.disk.step_merge(&mut self.files)
    }

    fn write_begins(&mut self, at: u64, token: u64) {
        self.submit(Operation::Write { durable: false }, at, 512, Segments::copy_of(&[99; 512]), token);
    }

    fn merge_all(&mut self) {
        while progress(self).state == MergeState::Running {
            self.step_merge();
            self.drain();
        }
    }
}

#[test]
fn a_piece_waits_for_the_write_before_it_and_copies_what_it_wrote() {
    let mut rig = pair();
    rig.write_begins(512, 1);
    rig.disk.begin_merge(0, 1).unwrap();
    assert!(rig.step_merge());
    assert!(progress(&rig).busy);
    rig.write_begins(1024, 2);
    rig.write_begins(CHUNK + 512, 3);
    rig.drain();
    let answered: Vec<u64> = rig.answered.drain(..).map(|(token, ..)| token.0).collect();
    assert_eq!(answered.iter().filter(|&&token| token == 1).count(), 1);
    assert!(answered.iter().position(|&token| token == 3) < answered.iter().position(|&token| token == 2));
    let base = rig.disk.layers()[1].format.table[0];
    let Entry::Data(at) = base else { panic!("{base:?}") };
    let sectors: Vec<u8> = rig.files.bytes[1][at as usize..].chunks(512).take(4).map(|sector| sector[0]).collect();
    assert_eq!(sectors, [10, 99, 99, 13], "the second write came to the target");
    assert_eq!(rig.disk.layers()[0].format.table[0], Entry::Parent);
}

#[test]
fn only_requests_to_its_chunk_wait_for_a_piece() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.step_merge();
    rig.submit(Operation::Read, 0, 512, Segments::zeroed(512), 1);
    rig.submit(Operation::Read, CHUNK, 512, Segments::zeroed(512), 2);
    assert_eq!(rig.disk.overlap.len(), 1);
    rig.drain();
    assert_eq!(rig.answered.len(), 2);
}

#[test]
fn a_write_where_no_source_holds_anything_goes_to_the_target_at_once() {
    let (leaf, base) = (Clusters::new(4 * CHUNK), Clusters::new(4 * CHUNK));
    let mut rig = Rig::new(vec![leaf, base], vec![Vec::new(), Vec::new()], 1);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.write(3 * CHUNK, &[7; 512]);
    assert_eq!(rig.files.bytes[0].len(), 0, "the leaf is not written to");
    rig.merge_all();
    assert_eq!(progress(&rig).copied, 0);
    assert_eq!(rig.read(3 * CHUNK, 512), [7; 512]);
}

#[test]
fn a_write_from_before_the_merge_keeps_its_chunk_with_the_leaf() {
    let mut rig = Rig::new(vec![Clusters::new(CHUNK), Clusters::new(CHUNK)], vec![Vec::new(), Vec::new()], 1);
    rig.read(0, CHUNK);
    rig.write_begins(0, 1);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.write_begins(CLUSTER, 2);
    rig.files.log.clear();
    rig.drain();
    assert!(rig.files.log.iter().all(|op| op.0 == 0), "{:?}", rig.files.log);
    rig.merge_all();
    assert_eq!(rig.disk.layers()[0].format.table, vec![Entry::Parent; 512]);
    assert_eq!(rig.read(0, 512), [99; 512]);
    assert_eq!(rig.read(CLUSTER, 512), [99; 512]);
}

#[test]
fn the_target_is_durable_before_what_was_forgotten_is() {
    let mut rig = pair();
    rig.flush();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge_all();
    rig.files.log.clear();
    assert_eq!(rig.flush(), Status::Done);
    let order: Vec<(u8, u64)> = rig.files.log.iter().filter(|op| op.1 && op.3 <= 512).map(|op| (op.0, op.3)).collect();
    // Data, table and a sync behind it; no data was written to the leaf, but its sync is the round's first step.
    assert_eq!(order, [(1, 0), (1, 512), (1, 0), (0, 0), (0, 512), (0, 0)]);
}

#[test]
fn a_forgotten_place_is_deallocated_only_after_the_round() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge_all();
    let deallocated = |rig: &Rig<Clusters>| rig.files.log.iter().any(|op| op.0 == 0 && op.1 && op.3 == CLUSTER);
    assert!(!deallocated(&rig));
    rig.flush();
    assert!(deallocated(&rig));
}

#[test]
fn no_space_stops_a_merge_and_more_space_lets_it_go_on() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.files.full = Some(1);
    rig.merge_all();
    assert_eq!(progress(&rig).state, MergeState::Failed(Status::NoSpace));
    assert_eq!(rig.read(0, 512), [10; 512]);
    assert_eq!(rig.write(4 * CLUSTER, &[8; 512]), Status::Done, "the leaf has space");
    rig.files.full = None;
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge_all();
    assert_eq!(progress(&rig).state, MergeState::Copied);
    assert_eq!(rig.read(4 * CLUSTER, 512), [8; 512]);
    assert_eq!(rig.read(CHUNK, 512), [10; 512]);
}

#[test]
fn a_merge_that_has_copied_everything_stops_when_a_write_finds_no_space_in_its_target() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge_all();
    assert_eq!(progress(&rig).state, MergeState::Copied);
    rig.files.full = Some(1);
    assert_eq!(rig.write(4 * CLUSTER, &[8; 512]), Status::Done, "the leaf has space");
    assert_eq!(progress(&rig).state, MergeState::Failed(Status::NoSpace));
    assert!(rig.disk.end_merge().is_err());
    assert_eq!(rig.read(4 * CLUSTER, 512), [8; 512]);
}

#[test]
fn after_a_cancelled_merge_the_target_is_left_alone() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.step_merge();
    rig.drain();
    rig.disk.cancel_merge();
    assert_eq!(rig.disk.merge(), None);
    rig.flush();
    rig.files.log.clear();
    rig.write(0, &[5; 512]);
    assert!(rig.files.log.iter().all(|op| op.0 == 0 || !op.1), "{:?}", rig.files.log);
    assert_eq!(rig.read(0, 1024), [[5; 512], [11; 512]].concat());
}

#[test]
fn a_merge_makes_a_smaller_target_as_large_as_the_leaf() {
    let (leaf, base) = (Clusters::new(2 * CHUNK), Clusters::new(CHUNK));
    let mut rig = Rig::new(vec![leaf, base], vec![Vec::new(), Vec::new()], 1);
    rig.write(CHUNK + CLUSTER, &[7; 512]);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge_all();
    rig.disk.quiesce();
    rig.disk.sync(&mut rig.files);
    while !rig.disk.is_quiet() {
        rig.step();
    }
    assert_eq!(rig.disk.end_merge().unwrap().len(), 1);
    rig.disk.resume(&mut rig.files);
    assert_eq!(rig.disk.layers()[0].file, FileId(1));
    assert_eq!(rig.read(CHUNK + CLUSTER, 512), [7; 512]);
    assert_eq!(rig.write(0, &[8; 512]), Status::Done);
    assert_eq!(rig.read(0, 512), [8; 512]);
}

fn refusal(lens: &[u64], writable: usize, from: usize, into: usize) -> ImageError {
    let layer = |(at, &len): (usize, &u64)| {
        let mut format = Clusters::new(len);
        format.read_only = at >= writable;
        format
    };
    let mut disk = Disk::new(lens.iter().enumerate().map(layer).collect(), Options::default()).unwrap();
    disk.begin_merge(from, into).unwrap_err()
}

#[test]
fn a_merge_that_cannot_be_is_refused() {
    assert_eq!(refusal(&[CHUNK; 3], 3, 1, 1).kind, ImageErrorKind::OutOfLimits);
    assert_eq!(refusal(&[CHUNK; 3], 3, 2, 1).kind, ImageErrorKind::OutOfLimits);
    assert_eq!(refusal(&[CHUNK; 3], 3, 0, 3).kind, ImageErrorKind::OutOfLimits);
    assert_eq!(refusal(&[CHUNK; 3], 2, 1, 2).what, "layer 2 takes part in the merge and is not open for writing");
    assert_eq!(refusal(&[CHUNK, CHUNK, 2 * CHUNK], 3, 0, 2).kind, ImageErrorKind::Mismatch);
}

#[test]
fn the_chain_does_not_change_under_a_merge() {
    let mut rig = pair();
    rig.disk.begin_merge(0, 1).unwrap();
    assert_eq!(rig.disk.begin_merge(0, 1).unwrap_err().what, "a merge is under way already");
    assert!(rig.disk.end_merge().is_err());
    rig.disk.quiesce();
    assert!(!rig.step_merge(), "requests are held back");
    rig.disk.sync(&mut rig.files);
    while !rig.disk.is_quiet() {
        rig.step();
    }
    let refused = rig.disk.push_leaf(FileId(2), Clusters::new(2 * CHUNK)).unwrap_err();
    assert_eq!(refused.what, "a leaf cannot be put on the chain while layers are being merged");
    assert!(rig.disk.pop_to(1).is_err() && rig.disk.grow(4 * CHUNK).is_err());
}

#[test]
fn a_source_that_cannot_forget_stops_the_merge() {
    let raw = |len| Image::Raw(Raw::new(len, 512, false).unwrap());
    let mut rig = Rig::new(vec![raw(MIB), raw(MIB)], vec![vec![3; MIB as usize], Vec::new()], 1);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.disk.step_merge(&mut rig.files);
    rig.drain();
    assert_eq!(rig.disk.merge().unwrap().state, MergeState::Failed(Status::Unsupported));
    assert_eq!(rig.read(0, 512), [3; 512]);
}
