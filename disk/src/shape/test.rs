//! Rigs and tests of the shape of transfers.

use fastrand::Rng;

use super::*;
use crate::memory_io::{MemoryIo, described};

const A: FileId = FileId(0);
const B: FileId = FileId(1);
const SECTOR: usize = 512;
const LEN: usize = 64 * SECTOR;

/// Two files in memory; transfers that touch this sector of the first one fail.
fn storage(bad: Option<usize>) -> MemoryIo {
    let mut io = MemoryIo { bounded: true, ..MemoryIo::new(vec![vec![0; LEN]; 2]) };
    io.fault = Box::new(move |op| {
        let (file, at, len, _) = in_sectors(op);
        (file == 0 && bad.is_some_and(|bad| (at..at + len).contains(&bad))).then_some(FileError::Failed(5))
    });
    io
}

fn in_sectors(op: &FileOp) -> (u8, usize, usize, bool) {
    let (file, is_write, at, len) = described(op);
    (file, in_memory(at) / SECTOR, in_memory(len) / SECTOR, is_write)
}

/// File, offset and length of what is under way, in sectors; whether it writes.
fn seen(io: &MemoryIo) -> Vec<(u8, usize, usize, bool)> {
    io.queue.iter().map(in_sectors).collect()
}

fn sectors(count: usize) -> u64 {
    on_disk(count * SECTOR)
}

fn policy(split: Option<usize>, merge: Option<usize>) -> ShapePolicy {
    ShapePolicy { split: split.map(sectors), merge: merge.map(sectors) }
}

fn write(id: u64, file: FileId, at: usize, count: usize) -> FileOp {
    let bytes: Vec<u8> = (at..at + count).flat_map(|sector| [pattern(id, sector); SECTOR]).collect();
    let from = Segments::copy_of(&bytes);
    FileOp { id: OpId(id), file, action: Action::Write { at: FileOffset(sectors(at)), from } }
}

fn pattern(id: u64, sector: usize) -> u8 {
    u8::try_from((id * 31 + sector as u64 * 7) % 251 + 1).unwrap()
}

fn read(id: u64, file: FileId, at: usize, count: usize) -> (FileOp, Segments) {
    let into = Segments::zeroed(count * SECTOR);
    (FileOp { id: OpId(id), file, action: Action::Read { at: FileOffset(sectors(at)), into: into.clone() } }, into)
}

fn sync(id: u64, file: FileId) -> FileOp {
    FileOp { id: OpId(id), file, action: Action::SyncData }
}

/// What came back, by name, and whether it went well.
fn names(done: &[FileDone]) -> Vec<(u64, bool)> {
    let mut names: Vec<_> = done.iter().map(|done| (done.op.id.0, done.result.is_ok())).collect();
    names.sort_unstable();
    names
}

#[test]
fn a_large_transfer_goes_on_in_pieces_cut_at_multiples_of_a_piece_and_ends_with_the_last() {
    let (mut shape, mut io) = (Shape::new(policy(Some(4), None)), storage(None));
    shape.push(write(1, A, 2, 10), &mut io).unwrap();
    shape.push(write(2, A, 20, 4), &mut io).unwrap();
    assert_eq!(seen(&io), [(0, 2, 2, true), (0, 4, 4, true), (0, 8, 4, true), (0, 20, 4, true)]);
    let mut done = Vec::new();
    for which in [2, 0] {
        let ended = io.finish(which);
        shape.settle(ended, &mut io, &mut done);
        assert!(done.is_empty() && shape.uses(A) && !shape.uses(B));
    }
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [(1, true), (2, true)]);
    let Action::Write { at, from } = &done[0].op.action else { panic!("it was a write") };
    assert_eq!((at.0, from.len()), (sectors(2), 10 * SECTOR), "it comes back as it was");
    assert!((2..12).all(|sector| io.bytes[0][sector * SECTOR] == pattern(1, sector)));
    assert_eq!((shape.counts().splits, shape.is_idle()), (1, true));
}

#[test]
fn a_transfer_fails_if_any_of_its_pieces_does() {
    let (mut shape, mut io) = (Shape::new(policy(Some(2), None)), storage(Some(3)));
    shape.push(write(1, A, 0, 8), &mut io).unwrap();
    shape.push(write(2, A, 8, 4), &mut io).unwrap();
    let mut done = Vec::new();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [(1, false), (2, true)]);
}

#[test]
fn adjacent_transfers_of_one_batch_kind_and_file_are_merged_in_the_order_of_their_offsets() {
    let (mut shape, mut io) = (Shape::new(policy(None, Some(8))), storage(None));
    for (id, at) in [(1, 4), (2, 6), (3, 2), (4, 20)] {
        shape.push(write(id, A, at, 2), &mut io).unwrap();
    }
    shape.push(write(5, B, 8, 2), &mut io).unwrap();
    let (op, into) = read(6, A, 30, 1);
    shape.push(op, &mut io).unwrap();
    let (op, behind) = read(7, A, 31, 1);
    shape.push(op, &mut io).unwrap();
    io.bytes[0][30 * SECTOR..32 * SECTOR].copy_from_slice(&[vec![8; SECTOR], vec![9; SECTOR]].concat());
    assert!(io.queue.is_empty() && shape.held() == 7, "a batch continues when it ends");
    shape.submit(&mut io);
    assert_eq!(seen(&io), [(0, 2, 6, true), (0, 20, 2, true), (1, 8, 2, true), (0, 30, 2, false)]);
    let mut done = Vec::new();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [1, 2, 3, 4, 5, 6, 7].map(|id| (id, true)));
    for (sector, id) in [(2, 3), (3, 3), (4, 1), (5, 1), (6, 2), (7, 2), (20, 4)] {
        assert_eq!(io.bytes[0][sector * SECTOR], pattern(id, sector), "sector {sector}");
    }
    assert_eq!((into.to_vec(), behind.to_vec()), (vec![8; SECTOR], vec![9; SECTOR]));
    assert_eq!(shape.counts().merges, 5);
}

#[test]
fn a_merged_transfer_is_no_larger_than_the_policy_says_and_never_split_again() {
    for (split, merge, expected) in [(None, 4, vec![4, 4, 2]), (Some(2), 8, vec![2, 2, 2, 2, 2])] {
        let (mut shape, mut io) = (Shape::new(policy(split, Some(merge))), storage(None));
        (0..10).for_each(|n| shape.push(write(n, A, in_memory(n), 1), &mut io).unwrap());
        shape.submit(&mut io);
        assert_eq!(seen(&io).iter().map(|seen| seen.2).collect::<Vec<_>>(), expected);
    }
}

#[test]
fn a_sync_or_a_deallocation_goes_on_behind_its_batch_and_nothing_is_merged_across_it() {
    let barriers: [fn() -> FileOp; 2] =
        [|| sync(9, B), || FileOp { id: OpId(9), file: A, action: Action::Deallocate { at: FileOffset(0), len: 512 } }];
    for barrier in barriers {
        let (mut shape, mut io) = (Shape::new(policy(None, Some(8))), storage(None));
        shape.push(write(1, A, 4, 1), &mut io).unwrap();
        shape.push(write(2, A, 5, 1), &mut io).unwrap();
        shape.push(barrier(), &mut io).unwrap();
        shape.push(write(3, A, 6, 1), &mut io).unwrap();
        shape.submit(&mut io);
        assert_eq!(io.queue[1].id, OpId(9));
        assert_eq!((seen(&io)[0], seen(&io)[2]), ((0, 4, 2, true), (0, 6, 1, true)));
    }
}

#[test]
fn of_a_merged_transfer_that_fails_each_part_is_done_again_and_only_the_bad_one_fails() {
    let (mut shape, mut io) = (Shape::new(policy(None, Some(8))), storage(Some(5)));
    (0..4).for_each(|n| shape.push(write(n, A, 4 + in_memory(n), 1), &mut io).unwrap());
    let mut done = Vec::new();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert!(done.is_empty(), "nothing is known of them yet");
    assert_eq!(seen(&io).len(), 4);
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [(0, true), (1, false), (2, true), (3, true)]);
    assert!([4, 6, 7].iter().all(|&sector| io.bytes[0][sector * SECTOR] != 0));
    assert_eq!(shape.counts().redone, 4);
}

#[test]
fn what_a_full_engine_refuses_goes_on_later_and_nothing_overtakes_it() {
    let (mut shape, mut io) = (Shape::new(policy(Some(2), Some(2))), storage(None));
    io.room = 0;
    let back = shape.push(write(1, A, 0, 8), &mut io).unwrap_err();
    assert_eq!((back.id, shape.is_idle()), (OpId(1), true), "no piece of it stays");
    io.room = 2;
    shape.push(back, &mut io).unwrap();
    assert_eq!((seen(&io).len(), shape.held()), (2, 2));
    let back = shape.push(sync(2, A), &mut io).unwrap_err();
    let mut done = Vec::new();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [(1, true)]);
    shape.push(back, &mut io).unwrap();
}

#[test]
fn another_policy_holds_for_what_comes_and_what_is_under_way_ends_as_it_began() {
    let (mut shape, mut io) = (Shape::new(policy(Some(2), Some(2))), storage(None));
    shape.push(write(1, A, 0, 4), &mut io).unwrap();
    shape.push(write(2, A, 10, 1), &mut io).unwrap();
    shape.set_policy(ShapePolicy::default());
    shape.push(write(3, A, 11, 4), &mut io).unwrap();
    let mut done = Vec::new();
    shape.reap(Until::Any, &mut io, &mut done).unwrap();
    assert_eq!(names(&done), [(1, true), (2, true), (3, true)]);
    assert!(shape.is_idle());
}

/// Scope: 200 runs of 300 operations each, of both kinds to two files, without overlap among those under way; policies,
/// room, faults and the order of completions are random.
#[test]
fn every_operation_comes_back_once_and_leaves_what_it_would_alone() {
    for seed in 1..=200 {
        random_run(seed);
    }
}

fn random_run(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let mut below = |limit| random.usize(..limit);
    let room = [1, 3, usize::MAX][below(3)];
    let bad = [None, Some(below(64))][below(2)];
    let (mut shape, mut io) = (Shape::default(), MemoryIo { room, ..storage(bad) });
    // What each sector holds, where that is certain.
    let mut known: [Vec<Option<u8>>; 2] = [vec![Some(0); 64], vec![Some(0); 64]];
    let mut under_way: Vec<(u64, usize, usize, usize, bool, Option<Segments>)> = Vec::new();
    let (mut id, mut back, mut done) = (0, None, Vec::new());
    while id < 300 || !under_way.is_empty() {
        if below(40) == 0 {
            let split = [None, Some(1), Some(2), Some(4)][below(4)];
            shape.set_policy(policy(split, [None, Some(2), Some(5), Some(16)][below(4)]));
        }
        let (file, count) = (below(2), 1 + below(6));
        let at = below(64 - count);
        let overlaps = |&(_, other, from, len, ..): &(u64, usize, usize, usize, bool, Option<Segments>)| {
            other == file && from < at + count && at < from + len
        };
        if id < 300 && back.is_none() && below(3) > 0 && !under_way.iter().any(overlaps) {
            let number = FileId(u8::try_from(file).unwrap());
            let is_write = below(2) == 0;
            let (op, into) = if is_write {
                (write(id, number, at, count), None)
            } else {
                let (op, into) = read(id, number, at, count);
                (op, Some(into))
            };
            under_way.push((id, file, at, count, is_write, into));
            id += 1;
            back = shape.push(op, &mut io).err();
        } else if let Some(op) = back.take() {
            back = shape.push(op, &mut io).err();
        }
        if below(3) == 0 || !io.queue.is_empty() && below(2) == 0 {
            shape.submit(&mut io);
            if !io.queue.is_empty() {
                let ended = io.finish(below(io.queue.len()));
                shape.settle(ended, &mut io, &mut done);
            }
            shape.retry(&mut io);
        }
        for FileDone { op, result } in done.drain(..) {
            let place = under_way.iter().position(|one| one.0 == op.id.0).expect("it was under way, once");
            let (id, file, at, count, is_write, into) = under_way.swap_remove(place);
            let touches_bad = file == 0 && bad.is_some_and(|bad| (at..at + count).contains(&bad));
            assert_eq!(result.is_err(), touches_bad, "seed {seed}: a failure is of those whose own it is");
            for sector in at..at + count {
                let known = &mut known[file][sector];
                match &into {
                    None => *known = result.is_ok().then(|| pattern(id, sector)),
                    Some(into) => {
                        let found = into.slice((sector - at) * SECTOR, 1).to_vec()[0];
                        assert!(result.is_err() || known.is_none_or(|known| known == found), "seed {seed}");
                    }
                }
            }
            assert!(is_write || into.is_some());
        }
    }
    assert!(shape.is_idle() && back.is_none());
}
