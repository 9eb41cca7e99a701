//! What a killed writer has left at the end of the file.

use super::crash::*;
use super::*;
use crate::DiskOffset;

const BLOCK: u64 = 512 << 10;

/// A file with one durable block, and a guest's writes to three others behind it that no round has made durable.
fn killed() -> Vec<u8> {
    let mut bytes = small(differencing());
    let mut vhd = open(&bytes).unwrap();
    fill(&mut vhd, &mut bytes, Span { at: DiskOffset(0), len: 512 }, 0x11);
    round(&mut vhd, &mut bytes);
    for block in 1..4 {
        fill(&mut vhd, &mut bytes, Span { at: DiskOffset(block * BLOCK), len: 512 }, 0x22);
    }
    bytes
}

/// Does what there is to do, and shows the file after each step.
fn perform(bytes: &mut Vec<u8>, tidy: &Tidy, mut show: impl FnMut(&[u8])) {
    show(bytes);
    for each in &tidy.first {
        write(bytes, each);
        show(bytes);
    }
    bytes.truncate(tidy.len as usize);
    bytes.resize(tidy.len as usize, 0);
    show(bytes);
    for each in &tidy.last {
        write(bytes, each);
        show(bytes);
    }
}

fn tidied(bytes: &[u8]) -> Option<Tidy> {
    tidy(&mut { bytes }).unwrap()
}

#[test]
fn an_image_that_was_closed_has_nothing_to_tidy() {
    let mut bytes = small(differencing());
    assert_eq!(tidied(&bytes), None);
    write_block(&mut bytes, 0);
    assert_eq!(tidied(&bytes), None);
    assert_eq!(tidied(&new_file(1 << 20, Kind::Fixed)), None);
}

#[test]
fn the_file_ends_behind_its_last_block_and_opens_at_every_step() {
    let mut bytes = killed();
    let before = reopened(&bytes);
    let long = bytes.len();
    let tidy = tidied(&bytes).unwrap();
    perform(&mut bytes, &tidy, |state| assert_eq!(reopened(state), before));
    assert!((bytes.len() as u64) < long as u64 - 2 * BLOCK, "{} of {long}", bytes.len());
    assert_eq!(checked(&bytes).problems, []);
    assert_eq!(tidied(&bytes), None);
}

#[test]
fn a_guest_killed_again_and_again_does_not_make_the_file_longer() {
    let mut bytes = killed();
    let mut lengths = Vec::new();
    for _ in 0..5 {
        if let Some(tidy) = tidied(&bytes) {
            perform(&mut bytes, &tidy, |_| ());
        }
        let mut vhd = open(&bytes).unwrap();
        for block in 1..4 {
            fill(&mut vhd, &mut bytes, Span { at: DiskOffset(block * BLOCK), len: 512 }, 0x22);
        }
        lengths.push(bytes.len());
    }
    assert_eq!(lengths, [lengths[0]; 5]);
}

#[test]
fn a_lost_copy_is_restored_before_the_other_footer_goes() {
    let mut bytes = small(differencing());
    write_block(&mut bytes, 0);
    let before = reopened(&bytes);
    bytes[..512].fill(0);
    let tidy = tidied(&bytes).unwrap();
    assert_eq!(tidy.first.len(), 1);
    perform(&mut bytes, &tidy, |state| assert_eq!(reopened(state), before));
    assert_eq!(checked(&bytes).problems, []);
}

#[test]
fn damage_is_left_as_it_is_found() {
    let mut bytes = killed();
    let table = u64::from_be_bytes(bytes[512 + 16..512 + 24].try_into().unwrap()) as usize;
    let first: [u8; 4] = bytes[table..table + 4].try_into().unwrap();
    bytes[table + 4..table + 8].copy_from_slice(&first);
    assert_eq!(tidied(&bytes), None);
}

#[test]
fn a_writer_that_was_killed_has_not_damaged_anything() {
    let bytes = killed();
    let report = checked(&bytes);
    assert_eq!(report.worst(), Some(Severity::Unclosed), "{:?}", report.problems);
}

/// What a device has behind the last block is room for others.
#[test]
fn a_device_that_is_larger_than_its_image_has_no_leak() {
    let mut bytes = killed();
    let footer = bytes[..512].to_vec();
    bytes.resize(16 << 20, 0);
    bytes.extend(footer);
    let leaks = |tail| {
        let report = check(&mut bytes.as_slice(), tail).unwrap();
        report.problems.iter().map(|problem| problem.severity).collect::<Vec<_>>()
    };
    assert_eq!(leaks(Tail::Zeroes), [Severity::Leak]);
    assert_eq!(leaks(Tail::Stale), []);
}
