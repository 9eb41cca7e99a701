//! Discards that would change very much metadata at once.

use super::*;

const LEN: u64 = 64 << 30;
const DIRTY_MAX: usize = 16;

/// An empty leaf on a raw image, all of which it would have to hide.
fn clone() -> Rig {
    let (image, leaf) = qcow2_on_raw(LEN);
    let base = Image::Raw(Raw::new(LEN, 512, true).unwrap());
    let mut rig = Rig::new(vec![image, base], vec![leaf, vec![7; 4096]], 1);
    rig.disk.options.dirty_max = DIRTY_MAX;
    rig
}

#[test]
fn a_discard_of_everything_changes_little_metadata_at_once() {
    let mut rig = clone();
    rig.submit(Operation::Discard, 0, LEN, Segments::empty(), 1);
    let mut most = 0;
    while !rig.disk.is_idle() {
        most = most.max(rig.disk.ops.len());
        rig.step();
    }
    assert_eq!(rig.answered.pop_back().unwrap().1, Status::Done);
    assert!(most < 2 * DIRTY_MAX, "{most} writes in a round, of 128 tables in all");
    assert_eq!(rig.read(0, 4096), [0; 4096]);
    assert_eq!(rig.flush(), Status::Done);
    assert!(qcow2::check(&mut rig.files.bytes[0].as_slice()).unwrap().problems.is_empty());
}

#[test]
fn a_discard_ends_when_its_rounds_fail() {
    let mut rig = clone();
    rig.files.full = Some(0);
    assert_eq!(rig.ask(Operation::Discard, 0, LEN, Segments::empty()), Status::NoSpace);
    rig.files.full = None;
    assert_eq!(rig.ask(Operation::Discard, 0, LEN, Segments::empty()), Status::Done);
    rig.files.fail_sync = true;
    assert_eq!(
        rig.ask(Operation::WriteZeroes { free: false, durable: true }, 0, 4096, Segments::empty()),
        Status::Failed
    );
}
