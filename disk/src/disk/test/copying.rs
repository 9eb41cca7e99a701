//! Copy on write and compressed clusters.
//!
//! Invariants checked: a sector reads as the last version that was written to it and answered, or as one that was in
//! flight meanwhile, never as anything else and never torn; a write that failed makes its own sectors uncertain only;
//! every request is answered once.

use super::clusters::{CLUSTER, Clusters, Entry, content};
use super::*;

/// A chain of `leaf` on a base in which every cluster holds data, each sector of it another byte.
fn on_full_base(len: u64) -> Rig<Clusters> {
    let (mut base, mut file) = (Clusters::new(len), Vec::new());
    (0..len.div_ceil(CLUSTER)).for_each(|cluster| base.put(&mut file, cluster, cluster as u8));
    base.read_only = true;
    Rig::new(vec![Clusters::new(len), base], vec![Vec::new(), file], 1)
}

/// An image alone, every cluster of it compressed.
fn packed(len: u64) -> Rig<Clusters> {
    let (mut leaf, mut file) = (Clusters::new(len), Vec::new());
    (0..len.div_ceil(CLUSTER)).for_each(|cluster| leaf.put_packed(&mut file, cluster, cluster as u8));
    Rig::new(vec![leaf], vec![file], 1)
}

fn data_writes(rig: &Rig<Clusters>) -> Vec<u64> {
    rig.files.log.iter().filter(|op| op.1 && op.0 == 0).map(|op| op.3).collect()
}

#[test]
fn a_write_to_a_part_of_a_cluster_is_one_write_of_all_of_it() {
    let mut rig = on_full_base(MIB);
    assert_eq!(rig.write(3 * CLUSTER + 1024, &[0xee; 512]), Status::Done);
    assert_eq!(data_writes(&rig), [CLUSTER]);
    let mut expected = content(3);
    expected[1024..1536].fill(0xee);
    assert_eq!(rig.read(3 * CLUSTER, CLUSTER), expected);
}

#[test]
fn what_lies_behind_the_end_of_the_disk_is_filled_with_zeroes() {
    let mut rig = on_full_base(2 * CLUSTER + 1024);
    assert_eq!(rig.write(2 * CLUSTER, &[0xee; 512]), Status::Done);
    assert_eq!(data_writes(&rig), [CLUSTER]);
    let Entry::Data(at) = rig.disk.layers()[0].format.table[2] else { panic!("no place") };
    let written = &rig.files.bytes[0][at as usize..(at + CLUSTER) as usize];
    assert_eq!(written, [vec![0xee; 512], vec![3; 512], vec![0; 3072]].concat());
}

#[test]
fn a_second_write_to_a_cluster_waits_for_the_first() {
    let mut rig = on_full_base(MIB);
    rig.submit(Operation::Write { durable: false }, 0, 512, Segments::copy_of(&[0xaa; 512]), 1);
    rig.submit(Operation::Write { durable: false }, 1024, 512, Segments::copy_of(&[0xbb; 512]), 2);
    rig.drain();
    let written: Vec<u64> = data_writes(&rig);
    assert_eq!(written, [CLUSTER, 512], "the second finds the place of the first");
    let mut expected = content(0);
    expected[..512].fill(0xaa);
    expected[1024..1536].fill(0xbb);
    assert_eq!(rig.read(0, CLUSTER), expected);
}

#[test]
fn a_failed_fill_fails_the_write_and_those_who_waited_ask_again() {
    let mut rig = on_full_base(MIB);
    rig.read(0, 512);
    rig.submit(Operation::Write { durable: false }, 512, 512, Segments::copy_of(&[0xaa; 512]), 1);
    rig.submit(Operation::Write { durable: false }, 1024, 512, Segments::copy_of(&[0xbb; 512]), 2);
    let op = rig.files.take(|op| op.file == FileId(1));
    rig.disk.settle(FileDone { op, result: Err(FileError::Failed(5)) }, &mut rig.files);
    rig.drain();
    let statuses: Vec<_> = rig.answered.iter().map(|(token, status, _)| (token.0, *status)).collect();
    assert_eq!(statuses, [(1, Status::Failed), (2, Status::Done)]);
    let mut expected = content(0);
    expected[1024..1536].fill(0xbb);
    assert_eq!(rig.read(0, CLUSTER), expected);
}

#[test]
fn no_fill_is_written_after_a_sync_has_failed() {
    let mut rig = on_full_base(MIB);
    rig.write(8 * CLUSTER, &[1; 4096]);
    rig.submit(Operation::Write { durable: false }, 512, 512, Segments::copy_of(&[0xaa; 512]), 1);
    rig.submit(Operation::Flush, 0, 0, Segments::empty(), 2);
    rig.files.fail_sync = true;
    rig.complete(|action| matches!(action, Action::SyncData));
    rig.files.log.clear();
    rig.drain();
    assert_eq!(rig.answered.pop_back().unwrap(), (Token(1), Status::Refused, Vec::new()));
    assert_eq!(data_writes(&rig), []);
    assert_eq!(rig.read(0, CLUSTER), content(0));
}

#[test]
fn zeroes_over_a_part_of_a_cluster_keep_the_rest() {
    for free in [true, false] {
        let mut rig = on_full_base(MIB);
        let zeroes = Operation::WriteZeroes { free, durable: false };
        assert_eq!(rig.ask(zeroes, 1024, 2 * CLUSTER, Segments::empty()), Status::Done);
        let mut expected = [content(0), content(1), content(2)].concat();
        expected[1024..1024 + 2 * CLUSTER as usize].fill(0);
        assert_eq!(rig.read(0, 3 * CLUSTER), expected, "free: {free}");
    }
}

#[test]
fn a_compressed_cluster_is_read_and_unpacked_once_for_reads_in_sequence() {
    let mut rig = packed(MIB);
    rig.read(0, 512);
    rig.files.log.clear();
    let unpacked = rig.disk.layers()[0].format.unpacked.get();
    for sector in 8..32 {
        assert_eq!(rig.read(sector * 512, 512), [(sector / 8 + sector % 8) as u8; 512]);
    }
    assert_eq!(rig.disk.layers()[0].format.unpacked.get() - unpacked, 3);
    assert_eq!(rig.files.log.len(), 3);
}

#[test]
fn reads_of_one_compressed_cluster_at_once_share_the_reading() {
    let mut rig = packed(MIB);
    rig.read(8 * CLUSTER, 512);
    rig.files.log.clear();
    let memory: Vec<Segments> = (0..8).map(|_| Segments::zeroed(512)).collect();
    for (sector, memory) in memory.iter().enumerate() {
        rig.submit(Operation::Read, sector as u64 * 512, 512, memory.clone(), sector as u64);
    }
    rig.drain();
    assert_eq!(rig.files.log.len(), 1);
    assert!(memory.iter().enumerate().all(|(sector, memory)| memory.to_vec() == [sector as u8; 512]));
}

#[test]
fn a_cluster_that_cannot_be_unpacked_fails_its_own_request_only() {
    let mut rig = packed(MIB);
    let Entry::Compressed(begin) = rig.disk.layers()[0].format.table[1] else { panic!("not compressed") };
    rig.files.bytes[0][begin as usize] = 0;
    assert_eq!(rig.ask(Operation::Read, CLUSTER, 512, Segments::zeroed(512)), Status::Failed);
    assert_eq!(rig.ask(Operation::Write { durable: false }, CLUSTER, 512, Segments::zeroed(512)), Status::Failed);
    assert_eq!(rig.read(0, CLUSTER), content(0));
    assert_eq!(rig.read(2 * CLUSTER, CLUSTER), content(2));
    assert_eq!(rig.write(CLUSTER, &content(9)), Status::Done, "all of it can be written anew");
    assert_eq!(rig.read(CLUSTER, CLUSTER), content(9));
}

#[test]
fn a_write_to_a_part_of_a_compressed_cluster_is_filled_from_it() {
    let mut rig = packed(MIB);
    assert_eq!(rig.write(CLUSTER + 512, &[0xee; 1024]), Status::Done);
    let mut expected = content(1);
    expected[512..1536].fill(0xee);
    assert_eq!(rig.read(CLUSTER, CLUSTER), expected);
}

#[test]
fn a_read_of_a_compressed_cluster_whose_place_is_used_again_looks_again() {
    let mut rig = packed(16 * CLUSTER);
    rig.read(8 * CLUSTER, 512);
    let memory = Segments::zeroed(512);
    rig.submit(Operation::Read, CLUSTER + 512, 512, memory.clone(), 1);
    let op = rig.files.take(|op| op.file == FileId(0));
    // Meanwhile the cluster gets a new place, a round frees the old one, and others take it.
    let old = rig.disk.layers()[0].format.table[1];
    assert_eq!(rig.ask_meanwhile(Operation::Write { durable: false }, CLUSTER, &content(0x40)), Status::Done);
    assert_eq!(rig.ask_meanwhile(Operation::Flush, 0, &[]), Status::Done);
    assert_eq!(rig.ask_meanwhile(Operation::Write { durable: false }, 5 * CLUSTER, &content(0x50)), Status::Done);
    let new = rig.disk.layers()[0].format.table[5];
    assert!(matches!((old, new), (Entry::Compressed(old), Entry::Data(new)) if old / CLUSTER == new / CLUSTER));
    rig.end(op);
    rig.drain();
    assert_eq!(memory.to_vec(), [0x41; 512]);
}

#[test]
fn a_discard_hides_only_what_is_there() {
    let len = 64 * CLUSTER + 512;
    let (mut base, mut file) = (Clusters::new(len), Vec::new());
    base.put(&mut file, 3, 7);
    base.read_only = true;
    for operation in [Operation::Discard, Operation::WriteZeroes { free: true, durable: false }] {
        let mut rig = Rig::new(vec![Clusters::new(len), Clusters::new(len)], vec![Vec::new(), file.clone()], 1);
        rig.disk.chain.at_mut(1).format.table = base.table.clone();
        assert_eq!(rig.ask(operation, 0, len, Segments::empty()), Status::Done);
        assert_eq!(rig.disk.layers()[0].format.hidden, 1);
        assert_eq!(rig.read(3 * CLUSTER, CLUSTER), [0; CLUSTER as usize]);
    }
}
