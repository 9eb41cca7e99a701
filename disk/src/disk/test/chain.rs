//! Layers that come and go while the disk lives.

use super::*;
use crate::DiskOffset;

impl Rig {
    /// Holds requests back and makes everything durable.
    pub fn quiesce(&mut self) {
        self.disk.quiesce();
        self.settle();
        self.disk.sync(&mut self.files);
        self.settle();
        assert!(self.disk.is_clean());
    }

    /// Lets what is in flight end, requests that are held back excepted.
    fn settle(&mut self) {
        while !self.disk.is_quiet() {
            self.step();
        }
    }

    pub fn resume(&mut self) {
        self.disk.resume(&mut self.files);
        self.collect();
    }

    /// An empty leaf on top of the chain.
    fn snapshot(&mut self) {
        let id = self.files.bytes.len() as u8;
        let leaf = new_vhd(self.disk.geometry().len, child_of(id - 1), 2 << 20, id);
        self.disk.push_leaf(FileId(id), open(&leaf, Access::ReadWrite)).unwrap();
        self.files.bytes.push(leaf);
    }
}

fn raw(len: u64, read_only: bool) -> Image {
    Image::Raw(Raw::new(len, 512, read_only).unwrap())
}

#[test]
fn requests_that_are_held_back_go_on_after_the_release() {
    let mut rig = dynamic(64 * MIB);
    rig.submit(Operation::Write { durable: false }, 0, 512, Segments::copy_of(&[1; 512]), 1);
    rig.disk.quiesce();
    rig.submit(Operation::Write { durable: false }, 0, 512, Segments::copy_of(&[2; 512]), 2);
    assert!(!rig.disk.is_quiet(), "the first write is in flight");
    rig.settle();
    assert_eq!(rig.answered.drain(..).map(|(token, ..)| token.0).collect::<Vec<_>>(), [1]);
    assert_eq!(rig.disk.in_flight(), 1);
    rig.resume();
    rig.drain();
    assert_eq!(rig.answered.pop_back().unwrap().0, Token(2));
    assert_eq!(rig.read(0, 512), [2; 512]);
}

#[test]
fn a_new_leaf_takes_the_writes_and_the_old_one_keeps_what_it_has() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 8192]);
    rig.quiesce();
    rig.submit(Operation::Write { durable: false }, 0, 4096, Segments::copy_of(&[2; 4096]), 1);
    rig.snapshot();
    rig.resume();
    rig.drain();
    assert_eq!(rig.answered.pop_back().unwrap().1, Status::Done);
    assert_eq!(rig.read(0, 8192), [[2; 4096], [1; 4096]].concat());
    assert_eq!(rig.flush(), Status::Done);
    let mut old = Rig::new(vec![open(&rig.files.bytes[0], Access::ReadOnly)], vec![rig.files.bytes[0].clone()], 1);
    assert_eq!(old.read(0, 8192), [1; 8192]);
}

#[test]
fn a_flush_after_a_switch_makes_the_old_leaf_durable_first_and_closes_it() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 4096]);
    rig.disk.quiesce();
    rig.settle();
    assert!(!rig.disk.is_clean());
    rig.snapshot();
    rig.disk.freeze(1).unwrap();
    rig.resume();
    rig.write(4096, &[2; 4096]);
    assert!(!rig.disk.is_frozen(FileId(0)));
    assert_eq!(rig.flush(), Status::Done);
    assert!(rig.disk.is_frozen(FileId(0)));
    let old = rig.files.bytes[0].clone();
    rig.write(8192, &[3; 4096]);
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(rig.files.bytes[0], old);
    let mut old = Rig::new(vec![open(&old, Access::ReadOnly)], vec![old], 1);
    assert_eq!(old.read(0, 8192), [[1; 4096], [0; 4096]].concat());
}

#[test]
fn a_snapshot_forgets_nothing_of_the_map() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 512]);
    rig.read(0, 512);
    let before = rig.disk.map.lookup(DiskOffset(0));
    rig.quiesce();
    rig.snapshot();
    assert!(before.is_some());
    assert_eq!(rig.disk.map.lookup(DiskOffset(0)), before);
}

#[test]
fn a_chain_changes_only_when_quiet() {
    let mut rig = dynamic(64 * MIB);
    let leaf = || open(&new_vhd(64 * MIB, child_of(1), 2 << 20, 2), Access::ReadWrite);
    let refused = |rig: &mut Rig| rig.disk.push_leaf(FileId(1), leaf()).unwrap_err().what;
    assert_eq!(refused(&mut rig), "a leaf cannot be put on the chain while requests are not held back");
    rig.submit(Operation::Write { durable: false }, 0, 512, Segments::copy_of(&[1; 512]), 1);
    rig.disk.quiesce();
    assert_eq!(refused(&mut rig), "a leaf cannot be put on the chain while operations are in flight");
    rig.settle();
    assert_eq!(rig.disk.push_leaf(FileId(0), leaf()).unwrap_err().what, "file 0 is a layer of the chain already");
    rig.disk.push_leaf(FileId(1), leaf()).unwrap();
    assert_eq!(rig.disk.layers().iter().map(|layer| layer.file).collect::<Vec<_>>(), [FileId(1), FileId(0)]);
}

#[test]
fn a_leaf_of_another_size_is_refused() {
    let mut rig = dynamic(64 * MIB);
    rig.quiesce();
    let leaf = open(&new_vhd(32 * MIB, child_of(1), 2 << 20, 2), Access::ReadWrite);
    assert_eq!(rig.disk.push_leaf(FileId(1), leaf).unwrap_err().kind, ImageErrorKind::Mismatch);
}

#[test]
fn a_parent_that_is_shorter_reads_as_zero_behind_its_end_and_a_longer_one_is_cut() {
    let leaf = new_vhd(8 * MIB, child_of(1), 2 << 20, 2);
    let layers = vec![open(&leaf, Access::ReadWrite), raw(3 * MIB, true)];
    let mut rig = Rig::new(layers, vec![leaf.clone(), vec![7; 4 * MIB as usize]], 1);
    assert_eq!(rig.read(2 * MIB, 4 * MIB), [vec![7; MIB as usize], vec![0; 3 * MIB as usize]].concat());
    let layers = vec![open(&leaf, Access::ReadWrite), raw(16 * MIB, true)];
    let mut rig = Rig::new(layers, vec![leaf, vec![7; 16 * MIB as usize]], 1);
    assert_eq!(rig.disk.geometry().len, 8 * MIB);
    assert_eq!(rig.read(6 * MIB, 2 * MIB), vec![7; 2 * MIB as usize]);
}

#[test]
#[ignore = "slow: run by `make test-all`"]
fn a_grown_disk_is_zero_where_it_is_new() {
    let mut rig = Rig::new(vec![raw(3 * MIB, false)], vec![vec![7; 3 * MIB as usize]], 1);
    assert_eq!(rig.read(0, 512), [7; 512]);
    rig.quiesce();
    assert_eq!(rig.disk.grow(2 * MIB).unwrap_err().kind, ImageErrorKind::OutOfLimits);
    rig.disk.grow(2048 * MIB).unwrap();
    rig.resume();
    assert_eq!(rig.disk.geometry().len, 2048 * MIB);
    assert_eq!(rig.read(2 * MIB, 2 * MIB), [vec![7; MIB as usize], vec![0; MIB as usize]].concat());
    assert_eq!(rig.write(2047 * MIB, &[9; 512]), Status::Done);
    assert_eq!(rig.read(2047 * MIB, 512), [9; 512]);
}

#[test]
fn a_reverted_disk_shows_what_the_layer_held() {
    let mut rig = dynamic(64 * MIB);
    rig.write(0, &[1; 512]);
    rig.quiesce();
    rig.snapshot();
    rig.resume();
    rig.write(0, &[2; 512]);
    rig.disk.quiesce();
    rig.settle();
    let popped = rig.disk.pop_to(1).unwrap();
    assert_eq!(popped.iter().map(|layer| layer.file).collect::<Vec<_>>(), [FileId(1)]);
    rig.resume();
    assert_eq!(rig.read(0, 512), [1; 512]);
    assert_eq!(rig.write(512, &[3; 512]), Status::Done);
    assert_eq!(rig.flush(), Status::Done);
}

#[test]
fn a_layer_that_is_opened_for_writing_takes_part_in_rounds() {
    let mut rig = dynamic(64 * MIB);
    rig.quiesce();
    rig.snapshot();
    let parent = rig.files.bytes[0].clone();
    rig.disk.sync(&mut rig.files);
    rig.settle();
    rig.disk.reopen(1, open(&parent, Access::ReadOnly)).unwrap();
    assert!(rig.disk.chain.writers().map(|layer| layer.file).eq([FileId(1)]));
    rig.disk.reopen(1, open(&parent, Access::ReadWrite)).unwrap();
    assert!(rig.disk.chain.writers().map(|layer| layer.file).eq([FileId(1), FileId(0)]));
    assert!(!rig.disk.is_clean(), "what its metadata says may be in a cache only");
}

#[test]
fn several_layers_are_opened_for_writing_while_requests_are_held_back_once() {
    let mut rig = dynamic(64 * MIB);
    (0..2).for_each(|_| {
        rig.quiesce();
        rig.snapshot();
        rig.resume();
    });
    rig.quiesce();
    for depth in [1, 2] {
        let layer = rig.files.bytes[2 - depth].clone();
        rig.disk.reopen(depth, open(&layer, Access::ReadWrite)).unwrap();
    }
    rig.disk.chain.of(FileId(1)).touched();
    let layer = rig.files.bytes[1].clone();
    assert!(rig.disk.reopen(1, open(&layer, Access::ReadOnly)).is_err(), "something in it is not durable");
}

/// A chain of three, all writable, in the lower two of which something is to be made durable.
fn three_writable() -> Rig {
    let mut rig = dynamic(64 * MIB);
    (0..2).for_each(|_| {
        rig.quiesce();
        rig.snapshot();
        rig.resume();
    });
    rig.flush();
    for file in [0, 1, 2] {
        rig.disk.chain.of(FileId(file)).touched();
    }
    rig.write(0, &[1; 512]);
    rig.files.log.clear();
    rig
}

fn syncs(rig: &Rig) -> Vec<u8> {
    rig.files.log.iter().filter(|op| op.1 && op.3 == 0).map(|op| op.0).collect()
}

#[test]
fn a_round_makes_the_deepest_layer_durable_first_and_skips_what_is() {
    let mut rig = three_writable();
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(syncs(&rig), [0, 1, 2, 2, 2], "data of each, and of the leaf bitmaps and table");
    rig.disk.chain.of(FileId(1)).touched();
    rig.files.log.clear();
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(syncs(&rig), [1]);
}

#[test]
fn nothing_above_a_layer_whose_sync_failed_is_written() {
    let mut rig = three_writable();
    rig.files.fail_sync = true;
    assert_eq!(rig.flush(), Status::Failed);
    assert_eq!(rig.files.log, [(0, true, 0, 0)]);
    assert!(rig.disk.is_broken());
    assert!(rig.disk.layers()[0].format.dirty() > 0, "the leaf was sealed and is dirty again");
}

#[test]
fn one_writable_layer_costs_what_it_always_did() {
    let mut rig = child(64 * MIB, 4 * MIB, 7);
    rig.write(0, &[1; 512]);
    rig.files.log.clear();
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(syncs(&rig), [0, 0, 0]);
}

#[test]
fn leaked_space_is_left_alone_while_requests_are_held_back() {
    let mut rig = with_leaked_space();
    rig.disk.quiesce();
    rig.submit(Operation::Read, 0, 512, Segments::zeroed(512), 1);
    assert!(rig.disk.is_quiet());
    rig.resume();
    assert!(matches!(rig.files.queue.first().map(|op| &op.action), Some(Action::SyncData)));
    rig.drain();
    let freed = rig.files.log.iter().filter(|op| op.3 == 2 * MIB).count();
    assert_eq!(freed, 2, "{:?}", rig.files.log);
}
