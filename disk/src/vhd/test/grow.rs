//! Larger disks, and what a power loss leaves of them.

use super::crash::*;
use super::*;
use crate::DiskOffset;

const BLOCK: u64 = 512 << 10;
const MIB: u64 = 1 << 20;

fn start(kind: Kind) -> (Vhd, Vec<u8>) {
    let mut bytes = small(kind);
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: 1024 }, 0x11);
    round(&mut vhd, &mut bytes);
    (open(&bytes).unwrap(), bytes)
}

/// Shows every crash of the next round: each is the disk before or the disk after, the part that both have included.
fn before_or_after(vhd: &mut Vhd, bytes: &mut Vec<u8>) {
    let (before, after) = (reopened(bytes), content(vhd, bytes));
    each_crash(bytes, &vhd.seal(), |state, durable| {
        let found = reopened(state);
        assert!(found == after || !durable && found.len() == before.len() || !durable && found.len() == after.len());
        for (sector, found) in found.iter().enumerate() {
            let old = before.get(sector).copied().unwrap_or(after[sector]);
            let unwritten = if sector < before.len() { old } else { nothing(&before) };
            assert!([old, unwritten, after[sector]].contains(found), "sector {sector}: {found:?}");
        }
        let worst = checked(state).worst();
        assert!(worst.is_none_or(|worst| worst <= Severity::Unclosed), "{worst:?}");
        assert!(!durable || worst.is_none());
    });
    vhd.settled(false);
    round(vhd, bytes);
    assert_eq!(reopened(bytes), after);
    assert_eq!(checked(bytes).problems, []);
}

/// What is found where nobody has written.
fn nothing(content: &[Found]) -> Found {
    content.iter().copied().find(|found| !matches!(found, Found::Data(_))).unwrap_or(Found::Zero)
}

/// Scope: every subset of the sectors of every batch, within the room of the table and beyond it.
#[test]
fn a_power_loss_leaves_the_old_size_or_the_new_one() {
    for kind in [Kind::Dynamic, differencing()] {
        // The sector that the table has anyway has room for 128 blocks; the header grants those of the first size.
        for (len, moved) in [(2 * MIB - 512, false), (64 * MIB, true)] {
            let spec = Spec { block_size: 512 << 10, ..spec(2 * MIB - 4096, kind.clone()) };
            let mut bytes = file_of(&create(&spec).unwrap());
            let mut vhd = open(&bytes).unwrap();
            fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: 1024 }, 0x11);
            round(&mut vhd, &mut bytes);
            let mut vhd = open(&bytes).unwrap();
            vhd.grow(len).unwrap();
            assert_eq!((vhd.geometry().len, vhd.geometry().chs), (len, Some(layout::chs(len))));
            assert_eq!(vhd.info().blocks, len.div_ceil(BLOCK));
            let batches = vhd.seal();
            vhd.settled(false);
            assert_eq!(batches.len(), if moved { 3 } else { 1 });
            fill(&mut vhd, &mut bytes, Span { at: DiskOffset(len - 512), len: 512 }, 0x22);
            fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK + 1024), len: 512 }, 0x33);
            before_or_after(&mut vhd, &mut bytes);
            assert_eq!(open(&bytes).unwrap().geometry().len, len);
        }
    }
}

#[test]
fn what_is_new_is_the_parents_or_zero_without_one() {
    for kind in [Kind::Dynamic, differencing()] {
        let (mut vhd, bytes) = start(kind);
        vhd.grow(3 * MIB).unwrap();
        assert!(content(&mut vhd, &bytes)[4096..].iter().all(|found| *found == Found::Parent));
    }
}

#[test]
fn a_disk_grows_many_times_and_keeps_all_that_was_written() {
    let (mut vhd, mut bytes) = start(Kind::Dynamic);
    for step in 1..=8u64 {
        let len = step * 40 * MIB;
        vhd.grow(len).unwrap();
        fill(&mut vhd, &mut bytes, Span { at: DiskOffset(len - 1024), len: 512 }, step as u8);
        round(&mut vhd, &mut bytes);
        if step % 2 == 0 {
            vhd = open(&bytes).unwrap();
        }
        assert_eq!(checked(&bytes).problems, []);
    }
    let found = reopened(&bytes);
    for step in 1..=8u64 {
        assert_eq!(found[(step * 40 * MIB / 512 - 2) as usize], Found::Data(step as u8));
    }
    assert_eq!(found[1024], Found::Data(0x11));
    assert_eq!(found.iter().filter(|found| matches!(found, Found::Data(0x11))).count(), 2);
}

#[test]
fn entries_of_blocks_that_the_disk_did_not_have_are_not_believed() {
    let mut bytes = small(Kind::Dynamic);
    // A table of 100 entries, of which the disk uses four; the tenth is rubbish.
    let header_at = 512;
    bytes[header_at + 28..header_at + 32].copy_from_slice(&100u32.to_be_bytes());
    bytes[header_at + 36..header_at + 40].fill(0);
    let sum = layout::checksum(&bytes[header_at..header_at + 1024]);
    bytes[header_at + 36..header_at + 40].copy_from_slice(&sum.to_be_bytes());
    let mut clean = bytes.clone();
    bytes[4096 + 36..4096 + 40].copy_from_slice(&77u32.to_be_bytes());
    let mut vhd = open(&bytes).unwrap();
    vhd.grow(8 * MIB).unwrap();
    before_or_after(&mut vhd, &mut bytes);
    assert!(reopened(&bytes).iter().all(|found| *found == Found::Parent));
    let mut vhd = open(&clean).unwrap();
    vhd.grow(8 * MIB).unwrap();
    let batches = vhd.seal();
    assert_eq!(batches.concat().len(), 2, "with room in a sound table, two footers are all");
    batches.iter().flatten().for_each(|each| write(&mut clean, each));
    assert_eq!(open(&clean).unwrap().geometry().len, 8 * MIB);
}

#[test]
fn a_larger_table_has_its_batmap_behind_it() {
    let (mut vhd, mut bytes) = start(differencing());
    vhd.grow(4000 * MIB).unwrap();
    round(&mut vhd, &mut bytes);
    let vhd = open(&bytes).unwrap();
    assert!(vhd.info().batmap);
    assert_eq!((vhd.info().blocks, vhd.info().blocks_allocated), (8000, 1));
    assert_eq!(checked(&bytes).problems, []);
}

/// Scope: every subset of the sectors of every batch, for another parent and another size at once.
#[test]
fn another_parent_and_another_size_come_together() {
    let (mut vhd, mut bytes) = start(differencing());
    let old = vhd.link();
    let new = Link { uuid: [5; 16], relative: "five.vhd".into(), ..old.clone().unwrap() };
    vhd.grow(64 * MIB).unwrap();
    vhd.relink(Some(&new)).unwrap();
    let batches = vhd.seal();
    each_crash(&bytes, &batches, |state, durable| {
        let opened = open(state).unwrap();
        let found = (opened.link(), opened.geometry().len);
        assert!(found == (Some(new.clone()), 64 * MIB) || !durable && found == (old.clone(), 2 * MIB), "{found:?}");
    });
    vhd.settled(false);
    round(&mut vhd, &mut bytes);
    assert_eq!(open(&bytes).unwrap().link(), Some(new));
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let (mut vhd, _) = start(Kind::Dynamic);
    for len in [MIB, 2 * MIB + 1, (2040 << 30) + 512] {
        assert_eq!(vhd.grow(len).unwrap_err().kind, ImageErrorKind::OutOfLimits, "{len}");
    }
    vhd.grow(2 * MIB).unwrap();
    assert_eq!(vhd.dirty(), 0, "it is as large already");
    vhd.grow(2040 << 30).unwrap();
    let bytes = small(Kind::Dynamic);
    let mut reader = Vhd::open(&mut bytes.as_slice(), Access::ReadOnly, Tail::Zeroes).unwrap();
    assert_eq!(reader.grow(4 * MIB).unwrap_err().kind, ImageErrorKind::Unsupported);
    let fixed = new_file(MIB, Kind::Fixed);
    let mut device = Vhd::open(&mut fixed.as_slice(), Access::ReadWrite, Tail::Stale).unwrap();
    assert_eq!(device.grow(4 * MIB).unwrap_err().kind, ImageErrorKind::Unsupported);
}

#[test]
fn a_fixed_disk_is_larger_when_the_footer_is_out_of_its_way() {
    let mut bytes = new_file(MIB, Kind::Fixed);
    bytes[..512].fill(0x11);
    let mut vhd = open(&bytes).unwrap();
    vhd.grow(3 * MIB).unwrap();
    assert_eq!(vhd.geometry().len, MIB, "the place of the footer is not the guest's yet");
    let behind = Span { at: DiskOffset(MIB), len: 512 };
    assert_eq!((vhd.map(behind), vhd.reserve(behind)), (Ok(Mapping::Zero { len: 512 }), Err(Wait::NoSpace)));
    let across = Span { at: DiskOffset(MIB - 512), len: 1024 };
    assert_eq!(vhd.reserve(across).map(|reserved| reserved.len), Ok(512), "a write stops in front of it");
    for batch in vhd.seal() {
        assert_eq!(batch.len(), 1);
        write(&mut bytes, &batch[0]);
        assert_eq!(reopened(&bytes)[0], Found::Data(0x11));
    }
    vhd.settled(true);
    assert_eq!((vhd.geometry().len, vhd.info().len), (3 * MIB, 3 * MIB));
    assert_eq!((vhd.dirty(), bytes.len() as u64), (0, 3 * MIB + 512));
    assert_eq!(vhd.reserve(behind).map(|reserved| reserved.at), Ok(FileOffset(MIB)));
    vhd.grow(3 * MIB).unwrap();
    assert_eq!(vhd.dirty(), 0, "asked again, there is nothing more to do");
    assert!(bytes[512..3 * MIB as usize].iter().all(|&byte| byte == 0));
    assert_eq!(open(&bytes).unwrap().geometry().chs, Some(layout::chs(3 * MIB)));
}

#[test]
fn a_fixed_disk_takes_the_slack_in_front_of_its_footer() {
    let mut bytes = new_file(MIB, Kind::Fixed);
    let footer = bytes.split_off(MIB as usize);
    bytes.extend([0xee; 4096]);
    bytes.extend(footer);
    let mut vhd = open(&bytes).unwrap();
    vhd.grow(MIB + 2048).unwrap();
    round(&mut vhd, &mut bytes);
    assert_eq!(bytes.len() as u64, MIB + 4096 + 512);
    let found = reopened(&bytes);
    assert_eq!(found.len(), 2048 + 4);
    assert!(found[2048..].iter().all(|found| *found == Found::Data(0)), "{:?}", &found[2048..]);
}

#[test]
fn a_fixed_disk_whose_round_failed_grows_with_the_next() {
    let mut bytes = new_file(MIB, Kind::Fixed);
    let mut vhd = open(&bytes).unwrap();
    vhd.grow(3 * MIB).unwrap();
    drop(vhd.seal());
    vhd.settled(false);
    assert_eq!((vhd.geometry().len, vhd.dirty()), (MIB, 1));
    round(&mut vhd, &mut bytes);
    assert_eq!(open(&bytes).unwrap().geometry().len, 3 * MIB);
}
