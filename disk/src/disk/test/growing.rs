//! Layers that become larger: what was known of them before is void, and what they hide stays hidden.

use super::*;
use crate::ImageErrorKind;

fn raw(len: u64) -> Image {
    Image::Raw(Raw::new(len, 512, false).unwrap())
}

fn fixed(len: u64) -> (Image, Vec<u8>) {
    let bytes = new_vhd(len, Kind::Fixed, 2 << 20, 1);
    (open(&bytes, Access::ReadWrite), bytes)
}

fn leaf(len: u64) -> (Image, Vec<u8>) {
    let bytes = new_vhd(len, child_of(1), 2 << 20, 2);
    (open(&bytes, Access::ReadWrite), bytes)
}

/// A qcow2 image whose end cuts a cluster off, which has a place.
fn cut_off() -> (Image, Vec<u8>) {
    let spec = qcow2::Spec {
        len: 8 * MIB + 4096,
        cluster_size: 64 << 10,
        uuid: uuid(1),
        parent: None,
        compression: Default::default(),
    };
    let creation = qcow2::create(&spec).unwrap();
    let mut bytes = vec![0; creation.len as usize];
    apply(&mut bytes, &creation.writes);
    let opened = |bytes: &Vec<u8>| {
        Image::Qcow2(Box::new(Qcow2::open(&mut bytes.as_slice(), Access::ReadWrite, Tail::Zeroes).unwrap()))
    };
    let mut rig = Rig::new(vec![opened(&bytes)], vec![bytes], 1);
    assert_eq!((rig.write(8 * MIB, &[5; 4096]), rig.flush()), (Status::Done, Status::Done));
    let bytes = rig.files.bytes.remove(0);
    (opened(&bytes), bytes)
}

impl Rig {
    /// The merge of the leaf into the layer below, to its end.
    fn merge(&mut self) {
        while self.disk.merge().unwrap().state == MergeState::Running {
            self.disk.step_merge(&mut self.files);
            self.step();
        }
        assert_eq!(self.disk.merge().unwrap().state, MergeState::Copied);
        self.drain();
        self.quiesce();
        self.disk.end_merge().unwrap();
        self.resume();
    }
}

#[test]
fn a_write_behind_the_old_end_of_a_merges_target_is_read() {
    let (leaf, bytes) = leaf(16 * MIB);
    let mut rig = Rig::new(vec![leaf, raw(8 * MIB)], vec![bytes, vec![1; 8 << 20]], 1);
    assert_eq!(rig.read(8 * MIB, 8 * MIB), vec![0; 8 << 20]);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.files.bytes[1].resize(16 << 20, 0);
    assert_eq!(rig.write(12 * MIB, &[7; 4096]), Status::Done);
    assert_eq!(rig.read(12 * MIB, 4096), [7; 4096]);
    rig.merge();
    assert_eq!(rig.read(12 * MIB, 4096), [7; 4096]);
}

#[test]
fn a_write_to_a_cluster_that_the_old_end_of_a_target_cut_off_is_read() {
    let ((leaf, bytes), (target, target_bytes)) = (leaf(16 * MIB), cut_off());
    let mut rig = Rig::new(vec![leaf, target], vec![bytes, target_bytes], 1);
    assert_eq!(rig.read(8 * MIB, 16 << 10), [vec![5; 4096], vec![0; 12 << 10]].concat());
    rig.disk.grow_layer(1, 16 * MIB).unwrap();
    assert_eq!(rig.flush(), Status::Done);
    rig.disk.begin_merge(0, 1).unwrap();
    assert_eq!(rig.write(8 * MIB + 8192, &[7; 4096]), Status::Done);
    assert_eq!(rig.read(8 * MIB + 8192, 4096), [7; 4096]);
    rig.merge();
    assert_eq!(rig.read(8 * MIB, 16 << 10), [[5; 4096], [0; 4096], [7; 4096], [0; 4096]].concat());
}

#[test]
fn a_merge_into_a_smaller_fixed_vhd_waits_until_that_has_grown() {
    let ((leaf, bytes), (base, base_bytes)) = (leaf(16 * MIB), fixed(8 * MIB));
    let mut rig = Rig::new(vec![leaf, base], vec![bytes, base_bytes], 1);
    assert_eq!(rig.read(8 * MIB, 8 * MIB), vec![0; 8 << 20]);
    rig.disk.begin_merge(0, 1).unwrap();
    assert_eq!(rig.write(12 * MIB, &[7; 4096]), Status::Done, "the target has no room for it yet");
    rig.merge();
    assert_eq!(rig.write(10 * MIB, &[8; 4096]), Status::Done);
    assert_eq!((rig.read(12 * MIB, 4096), rig.read(10 * MIB, 4096)), (vec![7; 4096], vec![8; 4096]));
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(vhd::check(&mut rig.files.bytes[1].as_slice(), Tail::Zeroes).unwrap().problems, []);
}

#[test]
fn a_merge_whose_target_cannot_grow_fails_and_may_be_tried_again() {
    let ((leaf, bytes), (base, base_bytes)) = (leaf(16 * MIB), fixed(8 * MIB));
    let mut rig = Rig::new(vec![leaf, base], vec![bytes, base_bytes], 1);
    rig.disk.begin_merge(0, 1).unwrap();
    rig.files.full = Some(1);
    for _ in 0..50 {
        rig.disk.step_merge(&mut rig.files);
        rig.drain();
    }
    assert!(matches!(rig.disk.merge().unwrap().state, MergeState::Failed(_)));
    rig.files.full = None;
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge();
}

#[test]
fn a_fixed_disk_is_larger_when_the_round_has_ended() {
    let (image, bytes) = fixed(8 * MIB);
    let mut rig = Rig::new(vec![image], vec![bytes], 1);
    assert_eq!(rig.write(7 * MIB, &[3; 4096]), Status::Done);
    rig.quiesce();
    rig.disk.grow(16 * MIB).unwrap();
    rig.resume();
    assert_eq!(rig.disk.geometry().len, 8 * MIB);
    assert_eq!(rig.flush(), Status::Done);
    assert_eq!(rig.disk.geometry().len, 16 * MIB);
    assert_eq!(rig.read(8 * MIB, 8 * MIB), vec![0; 8 << 20]);
    assert_eq!(rig.write(8 * MIB, &[4; 4096]), Status::Done);
    assert_eq!((rig.read(7 * MIB, 4096), rig.read(8 * MIB, 4096)), (vec![3; 4096], vec![4; 4096]));
}

#[test]
fn a_disk_does_not_grow_over_what_a_longer_parent_has() {
    let (leaf, bytes) = leaf(8 * MIB);
    let mut rig = Rig::new(vec![leaf, raw(16 * MIB)], vec![bytes, vec![9; 16 << 20]], 1);
    rig.quiesce();
    assert_eq!(rig.disk.grow(12 * MIB).unwrap_err().kind, ImageErrorKind::Mismatch);
    rig.disk.grow(8 * MIB).unwrap();
}

#[test]
fn a_target_does_not_grow_over_what_its_longer_parent_has() {
    let (image, middle) = qcow2_on_raw(8 * MIB);
    let (leaf, bytes) = leaf(16 * MIB);
    let layers = vec![leaf, image, raw(16 * MIB)];
    let mut rig = Rig::new(layers, vec![bytes, middle, vec![9; 16 << 20]], 1);
    assert_eq!(rig.read(8 * MIB, 8 * MIB), vec![0; 8 << 20]);
    assert_eq!(rig.disk.begin_merge(0, 1).unwrap_err().kind, ImageErrorKind::Mismatch);
    assert_eq!(rig.read(8 * MIB, 8 * MIB), vec![0; 8 << 20]);
}

#[test]
fn a_write_for_which_a_merges_target_has_no_space_goes_to_the_leaf() {
    let (leaf, bytes) = leaf(16 * MIB);
    let base = new_vhd(16 * MIB, Kind::Dynamic, 2 << 20, 1);
    let mut rig = Rig::new(vec![leaf, open(&base, Access::ReadWrite)], vec![bytes, base], 1);
    rig.write(14 * MIB, &[1; 4096]);
    rig.disk.begin_merge(0, 1).unwrap();
    assert_eq!(rig.write(0, &[2; 4096]), Status::Done);
    assert_eq!(rig.flush(), Status::Done);
    rig.files.full = Some(1);
    for which in 0..6u8 {
        let bytes = Segments::copy_of(&[which + 3; 4096]);
        rig.submit(Operation::Write { durable: false }, u64::from(which) * 2 * MIB, 4096, bytes, which.into());
    }
    rig.drain();
    assert_eq!(rig.answered.len(), 6);
    assert!(rig.answered.drain(..).all(|(_, status, _)| status == Status::Done));
    assert_eq!(rig.disk.merge().unwrap().state, MergeState::Failed(Status::NoSpace));
    (0..6u8).for_each(|which| assert_eq!(rig.read(u64::from(which) * 2 * MIB, 4096), [which + 3; 4096]));
    rig.files.full = None;
    rig.disk.begin_merge(0, 1).unwrap();
    rig.merge();
    (0..6u8).for_each(|which| assert_eq!(rig.read(u64::from(which) * 2 * MIB, 4096), [which + 3; 4096]));
    assert_eq!(rig.read(14 * MIB, 4096), [1; 4096]);
}
