//! Another parent, no parent, and what a power loss leaves of the change.

use super::crash::*;
use super::*;
use crate::{DiskOffset, FileOffset};

const BLOCK: u64 = 512 << 10;

fn link(uuid: u8, relative: &str) -> Link {
    Link {
        format: None,
        uuid: [uuid; 16],
        relative: relative.into(),
        absolute: format!("/srv/{relative}"),
        len: None,
        modified: Some(1_650_000_000),
    }
}

/// A child with a block, opened for writing.
fn child() -> (Vhd, Vec<u8>) {
    let mut bytes = small(differencing());
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK), len: 1024 }, 0x11);
    round(&mut vhd, &mut bytes);
    (open(&bytes).unwrap(), bytes)
}

/// Shows every crash of the next round; in each the image has one of the two links and all of its data.
fn one_or_the_other(vhd: &mut Vhd, bytes: &mut Vec<u8>, before: Option<Link>, after: Option<Link>) {
    let content = reopened(bytes);
    let data = |found: &[Found]| found.iter().filter(|found| matches!(found, Found::Data(_))).count();
    let batches = vhd.seal();
    each_crash(bytes, &batches, |state, durable| {
        let opened = open(state).unwrap();
        assert!(opened.link() == after || !durable && opened.link() == before, "{:?}", opened.link());
        assert_eq!(data(&reopened(state)), data(&content));
        let worst = checked(state).worst();
        assert!(worst.is_none_or(|worst| worst <= Severity::Unclosed), "{worst:?}");
        assert!(!durable || worst.is_none());
    });
    batches.iter().flatten().for_each(|each| write(bytes, each));
    vhd.settled(true);
}

#[test]
fn a_link_says_what_is_recorded() {
    let vhd = open(&new_file(GIB, differencing())).unwrap();
    let expected = Link {
        format: None,
        uuid: [9; 16],
        relative: "../base/gold.vhd".into(),
        absolute: "/srv/base/gold.vhd".into(),
        len: None,
        modified: Some(1_600_000_000),
    };
    assert_eq!(vhd.link(), Some(expected));
    assert_eq!(vhd.identity(), [7; 16]);
    assert!(vhd.info().by_tapline);
    assert_eq!(open(&new_file(GIB, Kind::Dynamic)).unwrap().link(), None);
}

/// Scope: every subset of the sectors of every batch.
#[test]
fn a_power_loss_leaves_the_old_parent_or_the_new_one() {
    let (mut vhd, mut bytes) = child();
    let old = vhd.link();
    let new = link(5, "other/a parent with a much longer name than before, so that its paths need more room.vhd");
    vhd.relink(Some(&new)).unwrap();
    assert_eq!(vhd.link().as_ref(), Some(&new));
    one_or_the_other(&mut vhd, &mut bytes, old, Some(new.clone()));
    assert_eq!(open(&bytes).unwrap().link(), Some(new));
}

/// Scope: every subset of the sectors of every batch. One sector is written.
#[test]
fn another_time_of_the_same_parent_is_one_sector() {
    let (mut vhd, mut bytes) = child();
    let old = vhd.link().unwrap();
    let new = Link { modified: None, ..old.clone() };
    vhd.relink(Some(&new)).unwrap();
    let batches = vhd.seal();
    assert_eq!(batches.iter().flatten().map(|write| write.bytes.len()).collect::<Vec<_>>(), [512]);
    vhd.settled(false);
    one_or_the_other(&mut vhd, &mut bytes, Some(old), Some(new));
}

/// Scope: every subset of the sectors of every batch, with new blocks and bits in the same round.
#[test]
fn without_its_parent_an_image_is_dynamic() {
    let (mut vhd, mut bytes) = child();
    let old = vhd.link();
    vhd.relink(None).unwrap();
    assert_eq!((vhd.link(), vhd.info().disk_type), (None, DiskType::Dynamic));
    let batches = vhd.seal();
    vhd.settled(false);
    assert_eq!(batches.len(), 3);
    one_or_the_other(&mut vhd, &mut bytes, old, None);
    let mut header = bytes.windows(8).enumerate().filter(|(_, cookie)| *cookie == b"cxsparse").map(|(at, _)| at);
    let at = header.find(|&at| open(&bytes).is_ok() && bytes[16..24] == (at as u64).to_be_bytes()).unwrap();
    assert_eq!(&bytes[at + 40..at + 60], &[0; 20], "the Xen tools want identity and time to be zero");
    assert_eq!(&bytes[at + 64..at + 768], &[0; 704], "and the name, and the locators");
}

/// Scope: twenty parents one after another, every subset of the sectors of every batch.
#[test]
fn an_image_can_have_any_number_of_parents_in_its_life_and_takes_no_more_room() {
    let (mut vhd, mut bytes) = child();
    let len = bytes.len();
    for number in 10..30 {
        let old = vhd.link();
        let new = link(number, &format!("parent-{number}.vhd"));
        vhd.relink(Some(&new)).unwrap();
        one_or_the_other(&mut vhd, &mut bytes, old, Some(new));
    }
    assert_eq!(bytes.len(), len);
}

#[test]
fn an_image_without_room_in_front_has_its_header_behind() {
    // Others leave no room between header, locators, table and the first block.
    let (mut vhd, mut bytes) = child();
    let long = "x/".repeat(900) + "parent.vhd";
    let new = link(5, &long);
    let old = vhd.link();
    vhd.relink(Some(&new)).unwrap();
    let batches = vhd.seal();
    let first_block = bytes.windows(512).position(|sector| sector == [0x11; 512]).unwrap() as u64;
    assert!(batches[0].iter().any(|write| write.at > FileOffset(first_block)));
    vhd.settled(false);
    // Too many sectors for every subset: every prefix.
    for (number, batch) in vhd.seal().iter().enumerate() {
        for each in batch {
            write(&mut bytes, each);
            let link = open(&bytes).unwrap().link();
            assert!(link.as_ref() == Some(&new) || number < 2 && link == old);
            assert_eq!(reopened(&bytes)[1024], Found::Data(0x11));
        }
    }
    vhd.settled(true);
    assert_eq!(checked(&bytes).problems, []);
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(0), len: 512 }, 0x22);
    round(&mut vhd, &mut bytes);
    assert_eq!(open(&bytes).unwrap().link(), Some(new), "blocks do not lie over it");
    assert_eq!(checked(&bytes).problems, []);
}

#[test]
fn a_round_that_failed_is_followed_by_one_that_spares_what_it_may_have_written() {
    let (mut vhd, mut bytes) = child();
    let old = vhd.link();
    vhd.relink(Some(&link(5, "five.vhd"))).unwrap();
    let failed = vhd.seal();
    vhd.settled(false);
    // All of it has reached the file, and that was not known.
    failed.iter().flatten().for_each(|each| write(&mut bytes, each));
    assert_eq!(open(&bytes).unwrap().link(), Some(link(5, "five.vhd")));
    vhd.relink(Some(&link(6, "six.vhd"))).unwrap();
    for batch in vhd.seal() {
        for each in batch {
            write(&mut bytes, &each);
            let found = open(&bytes).unwrap().link();
            assert!(found == old || found == Some(link(5, "five.vhd")) || found == Some(link(6, "six.vhd")));
        }
    }
    vhd.settled(true);
    assert_eq!(open(&bytes).unwrap().link(), Some(link(6, "six.vhd")));
}

#[test]
fn what_the_copy_says_counts_also_when_the_file_has_grown_over_the_other_footer() {
    let (mut vhd, mut bytes) = child();
    let old = vhd.link();
    vhd.relink(Some(&link(5, "five.vhd"))).unwrap();
    let batches = vhd.seal();
    // A crash: the footer at the end is the new one, the copy the old one.
    batches[0].iter().chain(&batches[1]).for_each(|each| write(&mut bytes, each));
    assert_eq!(open(&bytes).unwrap().link(), old);
    let mut grown = bytes.clone();
    grown.resize(bytes.len() + 4096, 0);
    assert_eq!(open(&grown).unwrap().link(), old);
    assert_eq!(checked(&bytes).worst(), Some(Severity::Unclosed));
    let mut vhd = open(&bytes).unwrap();
    round(&mut vhd, &mut bytes);
    assert_eq!(checked(&bytes).problems, []);
}

#[test]
fn what_cannot_have_a_parent_says_so() {
    let mut fixed = open(&new_file(1 << 20, Kind::Fixed)).unwrap();
    assert_eq!(fixed.relink(Some(&link(5, "five.vhd"))).unwrap_err().kind, ImageErrorKind::Unsupported);
    let bytes = new_file(GIB, differencing());
    let mut reader = Vhd::open(&mut bytes.as_slice(), Access::ReadOnly, Tail::Zeroes).unwrap();
    assert_eq!(reader.relink(None).unwrap_err().kind, ImageErrorKind::Unsupported);
    assert_eq!(reader.seal(), Vec::<Vec<MetaWrite>>::new());
    let mut writer = open(&bytes).unwrap();
    let long = link(5, &"x".repeat(5000));
    assert_eq!(writer.relink(Some(&long)).unwrap_err().kind, ImageErrorKind::OutOfLimits);
    assert_eq!(writer.link().unwrap().uuid, [9; 16], "nothing has changed");
    assert_eq!(writer.dirty(), 0);
}

#[test]
fn a_block_that_came_with_the_change_is_there_with_it() {
    let (mut vhd, mut bytes) = child();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(0), len: 512 }, 0x22);
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(BLOCK + 1024), len: 512 }, 0x33);
    vhd.relink(Some(&link(5, "five.vhd"))).unwrap();
    each_crash(&bytes, &vhd.seal(), |state, durable| {
        let found = reopened(state);
        assert!(matches!(found[0], Found::Data(0x22)) || !durable && found[0] == Found::Parent);
        assert_eq!(found[1024], Found::Data(0x11));
    });
}
