//! Against storage that refuses what is not whole units, and a plain array of bytes that takes everything.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of the test are small")]

use fastrand::Rng;

use super::*;
use crate::FileOffset;
use crate::memory_io::{MemoryIo, described};

const UNIT: u64 = 4096;
const SECTOR: u64 = 512;
const FILE: FileId = FileId(3);

/// A transfer that is not of whole units comes only at the end of the file, and alone.
fn check(io: &MemoryIo, op: &FileOp) {
    let (_, is_write, at, len) = described(op);
    let is_transfer = !matches!(op.action, Action::Deallocate { .. });
    if op.file == FILE && is_transfer && (at % UNIT != 0 || len % UNIT != 0) {
        assert!(is_write && at / UNIT == (at + len - 1) / UNIT, "no piece of one unit: {op:?}");
        assert!((at / UNIT + 1) * UNIT > io.bytes[3].len() as u64, "{op:?} does not lie at the end");
        assert!(io.queue.is_empty(), "{op:?} is not alone");
    }
    let alone = |other: &FileOp| matches!(&other.action, Action::Write { from, .. } if from.len() as u64 % UNIT != 0);
    assert!(!io.queue.iter().any(alone), "{op:?} is begun beside the end's");
}

fn put(bytes: &mut Vec<u8>, at: u64, with: &[u8]) {
    let (at, end) = (at as usize, at as usize + with.len());
    bytes.resize(bytes.len().max(end), 0);
    bytes[at..end].copy_from_slice(with);
}

struct Rig {
    aligner: Aligner,
    storage: MemoryIo,
    done: Vec<FileDone>,
}

impl Rig {
    fn with(len: u64) -> Rig {
        let bytes: Vec<u8> = (0..len).map(|at| (at / SECTOR) as u8).collect();
        let mut aligner = Aligner::default();
        aligner.add(FILE, UNIT, Some(len));
        let bytes = vec![Vec::new(), Vec::new(), Vec::new(), bytes];
        Rig { aligner, storage: MemoryIo { check, ..MemoryIo::new(bytes) }, done: Vec::new() }
    }

    fn push(&mut self, id: u64, action: Action) {
        self.aligner.push(FileOp { id: OpId(id), file: FILE, action }, &mut self.storage).unwrap();
    }

    fn write(&mut self, id: u64, at: u64, bytes: &[u8]) {
        self.push(id, Action::Write { at: FileOffset(at), from: Segments::copy_of(bytes) });
    }

    fn finish(&mut self, which: usize) {
        let done = self.storage.finish(which);
        self.aligner.settle(done, &mut self.storage, &mut self.done);
    }

    fn finish_all(&mut self) -> Vec<u64> {
        while !self.storage.queue.is_empty() {
            self.finish(0);
        }
        self.done.drain(..).map(|done| done.op.id.0).collect()
    }
}

#[test]
fn a_sector_is_read_and_written_by_its_unit() {
    let mut rig = Rig::with(4 * UNIT);
    let before = rig.storage.bytes[3].clone();
    rig.write(7, UNIT + SECTOR, &[0xaa; 512]);
    assert!(rig.done.is_empty());
    rig.finish(0);
    assert_eq!((rig.storage.queue.len(), rig.done.len()), (1, 0), "it is answered before it is written");
    rig.finish(0);
    assert_eq!(rig.done.pop().unwrap().op.id, OpId(7));
    let mut expected = before;
    put(&mut expected, UNIT + SECTOR, &[0xaa; 512]);
    assert!(rig.storage.bytes[3] == expected);
    let into = Segments::zeroed(1024);
    rig.push(8, Action::Read { at: FileOffset(UNIT + SECTOR), into: into.clone() });
    assert_eq!(rig.finish_all(), [8]);
    assert_eq!(into.to_vec(), [[0xaa; 512], [10; 512]].concat());
}

#[test]
fn two_sectors_of_a_unit_are_written_one_after_the_other() {
    let mut rig = Rig::with(4 * UNIT);
    rig.write(1, 0, &[1; 512]);
    rig.write(2, SECTOR, &[2; 512]);
    // All of the unit, and what has nothing to do with it.
    rig.write(3, 0, &[3; 4096]);
    rig.write(4, UNIT, &[4; 4096]);
    assert_eq!(rig.storage.queue.len(), 2, "only the first and the last are under way");
    assert_eq!(rig.finish_all(), [4, 1, 2, 3]);
    assert!(rig.storage.bytes[3][..4096] == [3; 4096]);
}

#[test]
fn a_unit_under_change_is_not_deallocated_and_the_reverse() {
    let mut rig = Rig::with(4 * UNIT);
    rig.write(1, 0, &[1; 512]);
    rig.push(2, Action::Deallocate { at: FileOffset(SECTOR), len: UNIT });
    rig.write(3, SECTOR, &[3; 512]);
    assert_eq!(rig.finish_all(), [1, 2, 3]);
    assert_eq!(rig.storage.bytes[3][..1536], [[1; 512], [3; 512], [0; 512]].concat());
}

#[test]
fn a_file_ends_where_what_is_written_to_it_ends() {
    let mut rig = Rig::with(2 * UNIT + SECTOR);
    let into = Segments::zeroed(8192);
    rig.push(1, Action::Read { at: FileOffset(0), into: into.clone() });
    rig.write(2, 2 * UNIT, &[2; 512]);
    rig.write(3, 3 * UNIT, &[3; 4096]);
    assert_eq!(rig.storage.queue.len(), 1, "the end's waits for the read, and is waited for");
    assert_eq!(rig.finish_all(), [1, 2, 3]);
    assert_eq!(rig.storage.bytes[3].len() as u64, 4 * UNIT);
    // That unit is a whole one now.
    rig.write(4, 2 * UNIT + SECTOR, &[4; 512]);
    rig.write(5, 4 * UNIT, &[5; 512]);
    assert_eq!(rig.finish_all(), [4, 5]);
    assert_eq!(rig.storage.bytes[3].len() as u64, 4 * UNIT + SECTOR);
    assert_eq!(rig.storage.bytes[3][2 * 4096..2 * 4096 + 1536], [[2; 512], [4; 512], [0; 512]].concat());
}

#[test]
fn a_full_engine_has_what_comes_handed_back_and_loses_nothing() {
    let mut rig = Rig::with(16 * UNIT);
    rig.storage.room = 1;
    rig.write(1, SECTOR, &[1; 4096]);
    let op = FileOp { id: OpId(2), file: FILE, action: Action::SyncData };
    let back = rig.aligner.push(op, &mut rig.storage).unwrap_err();
    assert_eq!(back.id, OpId(2));
    assert_eq!(rig.finish_all(), [1]);
    rig.push(3, Action::SyncData);
    let op =
        FileOp { id: OpId(4), file: FILE, action: Action::Write { at: FileOffset(0), from: Segments::zeroed(4096) } };
    assert_eq!(rig.aligner.push(op, &mut rig.storage).unwrap_err().id, OpId(4));
    assert_eq!(rig.finish_all(), [3]);
    assert!(!rig.aligner.uses(FILE));
}

#[test]
fn what_fails_fails_as_a_whole_and_its_unit_is_free_again() {
    let mut rig = Rig::with(16 * UNIT);
    rig.write(1, SECTOR, &[1; 8192]);
    rig.write(2, 0, &[2; 512]);
    let FileDone { op, .. } = rig.storage.finish(0);
    let failed = FileDone { op, result: Err(FileError::Failed(5)) };
    rig.aligner.settle(failed, &mut rig.storage, &mut rig.done);
    while !rig.storage.queue.is_empty() {
        rig.finish(0);
    }
    let results: Vec<_> = rig.done.iter().map(|done| (done.op.id.0, done.result)).collect();
    assert_eq!(results.len(), 2);
    assert!(results.contains(&(1, Err(FileError::Failed(5)))) && results.contains(&(2, Ok(()))));
    assert_eq!(rig.storage.bytes[3][..1024], [[2; 512], [1; 512]].concat());
}

#[test]
fn other_files_are_passed_by() {
    let mut rig = Rig::with(UNIT);
    let op = FileOp {
        id: OpId(9),
        file: FileId(0),
        action: Action::Write { at: FileOffset(512), from: Segments::zeroed(512) },
    };
    rig.aligner.push(op, &mut rig.storage).unwrap();
    assert_eq!(rig.storage.queue[0].id, OpId(9));
    assert_eq!(rig.finish_all(), [9]);
}

/// Scope: 300 runs of 200 operations of up to 20 sectors, up to 16 at once, none that changes a sector beside another
/// on it, ended in random order, on a file that ends anywhere and grows.
#[test]
fn whatever_the_order_the_file_holds_what_an_array_does() {
    for seed in 0..300u64 {
        random_run(seed);
    }
}

fn random_run(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let mut below = |limit| random.u64(..limit);
    let mut rig = Rig::with(below(64) * SECTOR);
    rig.storage.room = if below(3) == 0 { 1 + below(4) as usize } else { usize::MAX };
    let mut model = rig.storage.bytes[3].clone();
    let mut busy: Vec<(u64, u64, u64)> = Vec::new();
    let mut reads: BTreeMap<u64, (u64, Segments)> = BTreeMap::new();
    for id in 0..200 {
        let (at, len) = (below(64) * SECTOR, (1 + below(20)) * SECTOR);
        let free = !busy.iter().any(|&(_, from, to)| from < at + len && at < to);
        if free && busy.len() < 16 {
            let bytes = vec![id as u8 + 1; len as usize];
            let reading = Segments::zeroed(len as usize);
            let action = match below(8) {
                0 if at + len <= model.len() as u64 => Action::Deallocate { at: FileOffset(at), len },
                0..3 => Action::Read { at: FileOffset(at), into: reading.clone() },
                _ => Action::Write { at: FileOffset(at), from: Segments::copy_of(&bytes) },
            };
            let op = FileOp { id: OpId(id), file: FILE, action: action.clone() };
            if rig.aligner.push(op, &mut rig.storage).is_ok() {
                busy.push((id, at, at + len));
                match action {
                    Action::Write { .. } => put(&mut model, at, &bytes),
                    Action::Deallocate { .. } => put(&mut model, at, &vec![0; len as usize]),
                    _ => drop(reads.insert(id, (at, reading))),
                }
            }
        }
        if below(3) > 0 && !rig.storage.queue.is_empty() {
            rig.finish(below(rig.storage.queue.len() as u64) as usize);
        }
        for done in rig.done.drain(..) {
            let id = done.op.id.0;
            busy.retain(|&(other, ..)| other != id);
            check_read(&model, reads.remove(&id), seed);
        }
    }
    rig.finish_all();
    assert!(!rig.aligner.uses(FILE), "seed {seed}: something never ends");
    assert!(rig.storage.bytes[3] == model, "seed {seed}: the file holds something else");
}

/// Nothing has changed what a read was for since it was begun.
fn check_read(model: &[u8], read: Option<(u64, Segments)>, seed: u64) {
    let Some((at, memory)) = read else { return };
    let expected = |at: usize| model.get(at).copied().unwrap_or(0);
    let found = memory.to_vec();
    assert!((0..found.len()).all(|n| found[n] == expected(at as usize + n)), "seed {seed}: a read at {at}");
}
