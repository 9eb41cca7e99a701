//! Requests that do not begin and end with blocks, beside others that are about the same blocks.

use super::*;
use crate::DiskOffset;

const ZEROES: Operation = Operation::WriteZeroes { free: true, durable: false };
const WRITE: Operation = Operation::Write { durable: false };

fn raw(seed: u64) -> Rig<Raw> {
    let bytes = (0..MIB).map(|at| (at % 251) as u8).collect();
    Rig::new(vec![Raw::new(MIB, 512, false).unwrap()], vec![bytes], seed)
}

impl<F: Format> Rig<F> {
    fn submit_bytes(&mut self, operation: Operation, at: u64, len: u64, memory: Segments, token: u64) {
        let request =
            Request::of_bytes(operation, Span { at: DiskOffset(at), len }, memory, Token(token), &self.disk.geometry());
        self.disk.submit(request.unwrap(), &mut self.files);
        self.collect();
    }

    fn took(&mut self, token: u64) -> Status {
        let at = self.answered.iter().position(|(other, ..)| other.0 == token).expect("it has been answered");
        self.answered.remove(at).unwrap().1
    }

    fn ask_bytes(&mut self, operation: Operation, at: u64, len: u64, memory: Segments) -> Status {
        self.submit_bytes(operation, at, len, memory, 77);
        self.drain();
        self.took(77)
    }

    fn write_bytes(&mut self, at: u64, bytes: &[u8]) -> Status {
        self.ask_bytes(WRITE, at, bytes.len() as u64, Segments::copy_of(bytes))
    }
}

/// A new qcow2 on a raw image that holds bytes, and the bytes.
fn copying(seed: u64) -> (Rig<Image>, Vec<u8>) {
    let base: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8).collect();
    let (leaf, bytes) = qcow2_on_raw(MIB);
    let below = Image::Raw(Raw::new(MIB, 512, true).unwrap());
    (Rig::new(vec![leaf, below], vec![bytes, base.clone()], seed), base)
}

/// Where requests begin and end: within a block, at its borders, across some of them and across a cluster.
const SPANS: [(u64, u64); 8] =
    [(0, 1), (511, 1), (100, 300), (511, 2), (512, 513), (1000, 5000), (65_000, 70_000), (MIB - 1, 1)];

#[test]
fn single_bytes_are_read_and_written_and_nothing_else_changes() {
    for seed in 1..5 {
        for (at, len) in SPANS {
            let (mut rig, mut model) = copying(seed);
            let range = at as usize..(at + len) as usize;
            let memory = Segments::copy_of(&vec![0xee; len as usize]);
            rig.submit_bytes(Operation::Read, at, len, memory.clone(), 1);
            rig.drain();
            assert_eq!((rig.took(1), memory.to_vec()), (Status::Done, model[range.clone()].to_vec()), "{at}+{len}");
            assert_eq!(rig.write_bytes(at, &vec![0xaa; len as usize]), Status::Done);
            model[range.clone()].fill(0xaa);
            assert_eq!(rig.read(0, MIB), model, "{at}+{len}");
            assert_eq!(rig.flush(), Status::Done);
            let zeroes = Operation::WriteZeroes { free: seed % 2 == 0, durable: seed > 2 };
            assert_eq!(rig.ask_bytes(zeroes, at, len, Segments::empty()), Status::Done);
            model[range].fill(0);
            assert_eq!(rig.read(0, MIB), model, "{at}+{len}");
        }
    }
}

#[test]
fn a_discard_frees_no_part_of_a_block() {
    let mut rig = raw(1);
    let before = rig.read(0, MIB);
    for (at, len) in [(1, 510), (100, 900), (513, 1)] {
        assert_eq!(rig.ask_bytes(Operation::Discard, at, len, Segments::empty()), Status::Done);
    }
    assert_eq!(rig.read(0, MIB), before);
    assert_eq!(rig.ask_bytes(Operation::Discard, 1, 1535, Segments::empty()), Status::Done);
    let expected = [&before[..512], &[0; 1024], &before[1536..]].concat();
    assert_eq!(rig.read(0, MIB), expected);
}

#[test]
fn what_is_asked_for_is_told_apart_from_what_surrounds_it() {
    let geometry = raw(1).disk.geometry();
    let memory = Segments::copy_of(&[5; 3]);
    let request = Request::of_bytes(WRITE, Span { at: DiskOffset(511), len: 3 }, memory, Token(1), &geometry).unwrap();
    assert_eq!(
        (request.span(), request.asked()),
        (Span { at: DiskOffset(0), len: 1024 }, Span { at: DiskOffset(511), len: 3 })
    );
    assert_eq!(
        (request.operation(), request.asked_memory().to_vec()),
        (Operation::Patch { durable: false }, vec![5; 3])
    );
    request.retire();
    let wrong = |at, len, bytes: usize| {
        Request::of_bytes(WRITE, Span { at, len }, Segments::zeroed(bytes), Token(1), &geometry).map(Request::retire)
    };
    assert_eq!(wrong(DiskOffset(MIB - 1), 2, 2), Err(Status::Unsupported));
    assert_eq!(wrong(DiskOffset(u64::MAX), 2, 2), Err(Status::Unsupported));
    assert_eq!(wrong(DiskOffset(1), 2, 3), Err(Status::Unsupported));
}

#[test]
fn neighbours_in_one_block_do_not_undo_each_other() {
    for seed in 1..200 {
        let (mut rig, mut model) = copying(seed);
        // Bytes of two blocks, a few for each of twelve requests of all kinds, and one of whole blocks.
        for part in 0..12u64 {
            let (at, len) = (part * 80 + 3, 77);
            let range = at as usize..(at + len) as usize;
            if part % 4 == 3 {
                rig.submit_bytes(ZEROES, at, len, Segments::empty(), part);
                model[range].fill(0);
            } else {
                let bytes = vec![part as u8 + 1; len as usize];
                model[range].copy_from_slice(&bytes);
                rig.submit_bytes(Operation::Write { durable: part % 3 == 0 }, at, len, Segments::copy_of(&bytes), part);
            }
        }
        rig.submit(WRITE, 1024, 512, Segments::copy_of(&[0xcc; 512]), 20);
        model[1024..1536].fill(0xcc);
        rig.submit_bytes(WRITE, 1023, 1, Segments::copy_of(&[0xdd]), 21);
        model[1023] = 0xdd;
        rig.drain();
        assert!(rig.answered.iter().all(|(_, status, _)| *status == Status::Done), "{seed}");
        rig.answered.clear();
        assert_eq!(rig.read(0, MIB), model, "{seed}");
    }
}

#[test]
fn nothing_is_written_where_what_surrounds_it_cannot_be_read() {
    for operation in [WRITE, ZEROES] {
        let mut rig = raw(1);
        let before = rig.files.bytes[0].clone();
        rig.files.fail_nth = Some(1);
        let memory = if operation == WRITE { Segments::copy_of(&[9; 1000]) } else { Segments::empty() };
        assert_eq!(rig.ask_bytes(operation, 100, 1000, memory), Status::Failed);
        assert_eq!(rig.files.bytes[0], before);
        assert!(rig.files.log.iter().all(|&(_, write, ..)| !write));
        assert_eq!(rig.write_bytes(100, &[9; 1000]), Status::Done);
        assert_eq!(rig.read(0, 512)[100..], [9; 412]);
    }
}

#[test]
fn a_write_of_whole_blocks_waits_for_one_of_parts_and_is_not_undone() {
    let mut rig = raw(1);
    rig.submit_bytes(WRITE, 1, 2, Segments::copy_of(&[9; 2]), 1);
    rig.submit(WRITE, 0, 512, Segments::copy_of(&[7; 512]), 2);
    assert_eq!(rig.files.queue.len(), 1, "the read of what surrounds the first, and nothing of the second");
    rig.drain();
    assert_eq!((rig.took(1), rig.took(2)), (Status::Done, Status::Done));
    assert_eq!(rig.read(0, 512), [7; 512]);
}

#[test]
fn a_durable_one_is_answered_behind_a_sync() {
    let mut rig = raw(1);
    rig.submit_bytes(Operation::Write { durable: true }, 1, 2, Segments::copy_of(&[9; 2]), 1);
    rig.complete(|action| matches!(action, Action::Read { .. }));
    rig.complete(|action| matches!(action, Action::Write { .. }));
    assert!(rig.answered.is_empty());
    rig.complete(|action| matches!(action, Action::SyncData));
    assert_eq!(rig.took(1), Status::Done);
}

#[test]
fn zeroes_that_are_to_be_fast_are_not_written() {
    // Storage that deallocates, that does not, and that does not deallocate parts of its larger blocks.
    for (can_deallocate, coarse) in [(true, false), (false, false), (true, true)] {
        let mut rig = raw(1);
        (rig.files.can_deallocate, rig.files.coarse) = (can_deallocate, coarse);
        let before = rig.files.bytes[0].clone();
        let mut request = rig.request(ZEROES, 512, 65_536, Segments::empty(), 1);
        request.fast = true;
        rig.disk.submit(request, &mut rig.files);
        rig.drain();
        let done = can_deallocate && !coarse;
        assert_eq!(rig.took(1), if done { Status::Done } else { Status::Unsupported });
        assert_eq!(rig.files.bytes[0] == before, !done, "what is refused changes nothing");
        assert_eq!(rig.files.log.len(), 1, "nothing is written instead");
    }
}
