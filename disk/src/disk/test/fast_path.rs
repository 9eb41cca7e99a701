//! Requests that are one operation on one file: to everybody else they are requests like any other.

use super::*;

const WRITE: Operation = Operation::Write { durable: false };
const ZEROES: Operation = Operation::WriteZeroes { free: false, durable: false };

fn raw(len: u64) -> Rig {
    Rig::new(vec![Image::Raw(Raw::new(len, 512, false).unwrap())], vec![vec![1; len as usize]], 1)
}

/// A leaf that has a block of its own at the beginning, on a base that can be written to as well.
fn leaf_with_block() -> Rig {
    let files = child(8 * MIB, 8 * MIB, 7).files.bytes;
    let layers = files.iter().map(|bytes| open(bytes, Access::ReadWrite)).collect();
    let mut rig = Rig::new(layers, files, 1);
    assert_eq!((rig.write(0, &vec![8; 2 << 20]), rig.flush()), (Status::Done, Status::Done));
    rig.read(0, 512);
    rig
}

impl Rig {
    /// So many requests are under way, and each of them is one operation.
    fn assert_whole(&self, count: usize) {
        assert_eq!((self.disk.active.len(), self.disk.ops.len(), self.files.queue.len()), (count, 0, count));
    }

    fn submit_write(&mut self, at: u64, byte: u8, token: u64) {
        self.submit(WRITE, at, 4096, Segments::copy_of(&[byte; 4096]), token);
    }

    fn writes(&self) -> usize {
        self.files.queue.iter().filter(|op| matches!(op.action, Action::Write { .. })).count()
    }

    fn status_of(&mut self, token: u64) -> Option<Status> {
        let at = self.answered.iter().position(|answer| answer.0 == Token(token))?;
        self.answered.remove(at).map(|answer| answer.1)
    }
}

fn is_write(action: &Action) -> bool {
    matches!(action, Action::Write { .. })
}

fn is_deallocation(action: &Action) -> bool {
    matches!(action, Action::Deallocate { .. })
}

#[test]
fn a_request_whose_place_is_known_is_one_operation_and_has_its_memory_back_at_its_end() {
    for mut rig in [raw(8 * MIB), leaf_with_block()] {
        let memory = Segments::zeroed(4096);
        rig.submit(Operation::Read, 8192, 4096, memory.clone(), 1);
        rig.submit_write(4096, 5, 2);
        rig.assert_whole(2);
        while !rig.disk.is_idle() {
            let mut done = Vec::new();
            rig.files.reap(Until::Now, &mut done).unwrap();
            done.into_iter().for_each(|done| rig.disk.settle(done, &mut rig.files));
            while let Some((request, status)) = rig.disk.answer() {
                assert_eq!((status, request.memory().len()), (Status::Done, 4096));
                request.retire();
            }
        }
        let found = memory.to_vec();
        assert!(found == rig.read(8192, 4096) && found[0] != 0);
        assert_eq!(rig.read(4096, 4096), [5; 4096]);
    }
}

#[test]
fn what_is_not_known_or_lives_in_two_places_is_taken_apart() {
    let mut rig = leaf_with_block();
    rig.submit(Operation::Read, 2 * MIB - 512, 1024, Segments::zeroed(1024), 1);
    assert_eq!(rig.disk.ops.len(), 2);
    rig.drain();
    assert_eq!(rig.read(4 * MIB, 4096), [7; 4096]);
    rig.submit_write(4 * MIB, 5, 2);
    assert_eq!(rig.disk.ops.len(), 1, "the parent's place is read there and not written to");
    rig.drain();
    assert_eq!(rig.files.bytes[1].windows(8).position(|bytes| bytes == [5; 8]), None);
}

#[test]
fn a_discard_waits_for_a_write_and_a_write_for_a_discard() {
    for clear in [Operation::Discard, ZEROES] {
        let mut rig = raw(MIB);
        rig.submit_write(4096, 5, 1);
        rig.submit(clear, 0, 8192, Segments::empty(), 2);
        rig.submit_write(4096, 6, 3);
        rig.submit_write(65536, 6, 4);
        assert_eq!(rig.files.queue.len(), 2, "the first write, and the one that overlaps nothing");
        rig.complete(|action| matches!(action, Action::Write { at: FileOffset(4096), .. }));
        let cleared = rig
            .files
            .take(|op| matches!(op.action, Action::Write { at: FileOffset(0), .. } | Action::Deallocate { .. }));
        assert_eq!(rig.writes(), 1, "the write behind the discard waits for it");
        rig.end(cleared);
        rig.drain();
        assert_eq!(rig.read(4096, 4096), [6; 4096]);
        assert_eq!(rig.answered.iter().filter(|answer| answer.1 == Status::Done).count(), 4);
    }
}

#[test]
fn a_read_waits_for_a_discard() {
    let mut rig = raw(MIB);
    let memory = Segments::zeroed(4096);
    rig.submit(Operation::Discard, 0, 8192, Segments::empty(), 1);
    rig.submit(Operation::Read, 4096, 4096, memory.clone(), 2);
    assert_eq!(rig.files.queue.len(), 1);
    rig.complete(is_deallocation);
    rig.assert_whole(1);
    rig.drain();
    assert_eq!(memory.to_vec(), [0; 4096]);
}

#[test]
fn a_durable_write_is_answered_after_a_sync() {
    let mut rig = raw(MIB);
    assert_eq!(rig.flush(), Status::Done);
    rig.submit(Operation::Write { durable: true }, 0, 512, Segments::copy_of(&[5; 512]), 1);
    rig.assert_whole(1);
    rig.complete(is_write);
    assert!(rig.answered.is_empty());
    rig.complete(|action| matches!(action, Action::SyncData));
    assert_eq!(rig.status_of(1), Some(Status::Done));
}

#[test]
fn after_a_failed_write_a_flush_has_something_to_sync() {
    let mut rig = raw(MIB);
    assert_eq!(rig.flush(), Status::Done);
    assert!(rig.disk.is_clean());
    rig.files.fail_nth = Some(0);
    rig.submit(Operation::Write { durable: true }, 0, 512, Segments::copy_of(&[5; 512]), 1);
    rig.drain();
    assert_eq!(rig.status_of(1), Some(Status::Failed));
    assert!(!rig.disk.is_clean(), "it may have reached any part of its range");
    rig.files.log.clear();
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(rig.files.log, [(0, true, 0, 0)]);
    assert!(rig.disk.is_clean());
}

#[test]
fn after_a_failed_sync_reads_go_on_and_writes_are_refused() {
    let mut rig = raw(MIB);
    rig.submit(Operation::Discard, 0, 8192, Segments::empty(), 1);
    rig.submit_write(4096, 5, 2);
    rig.submit_write(65536, 5, 3);
    rig.files.fail_sync = true;
    assert_eq!(rig.ask_meanwhile(Operation::Flush, 0, &[]), Status::Failed);
    rig.drain();
    assert_eq!(rig.write(0, &[6; 512]), Status::Refused);
    assert_eq!(rig.read(65536, 512), [5; 512]);
}

#[test]
fn a_write_that_waited_while_a_sync_failed_is_refused() {
    let mut rig = raw(MIB);
    rig.files.fail_sync = true;
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 1);
    rig.submit(Operation::Discard, 0, 8192, Segments::empty(), 2);
    rig.submit_write(4096, 5, 3);
    rig.complete(|action| matches!(action, Action::SyncData));
    rig.files.log.clear();
    rig.drain();
    assert_eq!((rig.status_of(3), rig.files.log.len()), (Some(Status::Refused), 0));
}

#[test]
fn a_write_without_space_says_so() {
    let mut rig = raw(MIB);
    rig.files.bytes[0].truncate(4096);
    rig.files.full = Some(0);
    assert_eq!(rig.write(8192, &[5; 512]), Status::NoSpace);
    assert_eq!(rig.write(0, &[5; 512]), Status::Done);
}

#[test]
fn what_is_held_back_starts_when_it_is_released_and_a_hold_waits_for_what_is_under_way() {
    let mut rig = raw(MIB);
    rig.submit_write(0, 5, 1);
    rig.disk.quiesce();
    rig.submit_write(4096, 6, 2);
    rig.assert_whole(1);
    assert!(!rig.disk.is_quiet() && rig.disk.grow(2 * MIB).is_err());
    rig.complete(is_write);
    assert!(rig.disk.is_quiet() && !rig.disk.is_idle());
    rig.disk.grow(2 * MIB).unwrap();
    rig.disk.resume(&mut rig.files);
    rig.submit_write(2 * MIB - 4096, 7, 3);
    rig.assert_whole(2);
    rig.drain();
    assert_eq!((rig.read(4096, 4096), rig.read(2 * MIB - 4096, 4096)), (vec![6; 4096], vec![7; 4096]));
}

#[test]
fn a_leaf_on_top_of_a_raw_image_is_what_is_read_and_written() {
    let mut rig = raw(8 * MIB);
    let (leaf, bytes) = qcow2_on_raw(8 * MIB);
    rig.files.bytes.push(bytes);
    assert_eq!(rig.write(0, &[5; 4096]), Status::Done);
    rig.disk.quiesce();
    rig.disk.push_leaf(FileId(1), leaf).unwrap();
    rig.disk.resume(&mut rig.files);
    rig.files.log.clear();
    assert_eq!(rig.write(0, &[6; 4096]), Status::Done);
    assert!(rig.files.log.iter().all(|&(file, write, ..)| file == 1 || !write), "{:?}", rig.files.log);
    assert_eq!(rig.read(0, 4096), [6; 4096]);
    rig.disk.quiesce();
    while !rig.disk.is_quiet() {
        rig.step();
    }
    drop(rig.disk.pop_to(1).unwrap());
    rig.disk.resume(&mut rig.files);
    let memory = Segments::zeroed(4096);
    rig.submit(Operation::Read, 0, 4096, memory.clone(), 1);
    rig.assert_whole(1);
    rig.drain();
    assert_eq!(memory.to_vec(), [5; 4096]);
}

#[test]
fn a_merges_piece_waits_for_a_write_from_before_it_and_copies_what_it_wrote() {
    let mut rig = leaf_with_block();
    rig.submit_write(4096, 5, 1);
    rig.assert_whole(1);
    rig.disk.begin_merge(0, 1).unwrap();
    assert!(rig.disk.step_merge(&mut rig.files));
    rig.assert_whole(1);
    // Decided now: it is the leaf's, for the write is under way there.
    rig.submit_write(65536, 6, 2);
    let write = rig.files.take(|op| matches!(op.action, Action::Write { .. }));
    assert_eq!(
        (write.file, rig.files.queue.len()),
        (FileId(0), 0),
        "the piece waits, and what comes waits for the piece"
    );
    rig.end(write);
    while rig.disk.merge().unwrap().state == MergeState::Running {
        rig.disk.step_merge(&mut rig.files);
        rig.step();
    }
    rig.drain();
    assert_eq!(rig.disk.merge().unwrap().state, MergeState::Copied);
    assert_eq!((rig.read(4096, 4096), rig.read(65536, 4096)), (vec![5; 4096], vec![6; 4096]));
    rig.quiesce();
    rig.disk.end_merge().unwrap();
    rig.resume();
    assert_eq!((rig.read(4096, 4096), rig.read(65536, 4096)), (vec![5; 4096], vec![6; 4096]));
}

#[test]
fn writes_are_no_single_operation_as_long_as_a_merge_decides_where_they_go() {
    let mut rig = leaf_with_block();
    rig.disk.begin_merge(0, 1).unwrap();
    rig.submit_write(4096, 5, 1);
    assert_eq!(rig.disk.ops.len(), 1);
    rig.submit(Operation::Read, 8192, 4096, Segments::zeroed(4096), 2);
    assert_eq!((rig.disk.ops.len(), rig.files.queue.len()), (1, 2));
    rig.drain();
}

/// Scope: 16 seeds of 100 batches.
#[test]
fn random_requests_to_a_raw_image_agree_with_a_flat_model() {
    for seed in 0..16 {
        const LEN: u64 = MIB + 512 * 7;
        let mut rig = Rig::new(vec![Image::Raw(Raw::new(LEN, 512, false).unwrap())], vec![vec![0; LEN as usize]], seed);
        let mut model = vec![0; LEN as usize];
        (0..100).for_each(|_| random::random_batch(&mut rig, &mut model));
        assert!(rig.read(0, LEN) == model, "seed {seed}");
    }
}
