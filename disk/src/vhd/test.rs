//! VHD files as others make them, as crashes leave them, and as an attacker would.

#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

mod crash;
mod forget;
mod grow;
mod relink;
mod tidy;

use zerocopy::{FromBytes, IntoBytes};

use super::layout::{RawFooter, RawHeader, SECTOR};
use super::*;
use crate::{Creation, DiskOffset, FileOffset, ImageErrorKind, ReadFault, Source};

const GIB: u64 = 1 << 30;

fn spec(len: u64, kind: Kind) -> Spec {
    Spec { len, kind, block_size: 2 << 20, uuid: [7; 16], created: 1_700_000_000 }
}

fn file_of(creation: &Creation) -> Vec<u8> {
    let mut bytes = vec![0; creation.len as usize];
    for write in &creation.writes {
        bytes[write.at.0 as usize..write.at.0 as usize + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    bytes
}

fn new_file(len: u64, kind: Kind) -> Vec<u8> {
    file_of(&create(&spec(len, kind)).unwrap())
}

fn differencing() -> Kind {
    Kind::Differencing(Parent {
        uuid: [9; 16],
        modified: 1_600_000_000,
        relative: "../base/gold.vhd".into(),
        absolute: "/srv/base/gold.vhd".into(),
    })
}

fn open(bytes: &[u8]) -> Result<Vhd, ImageError> {
    Vhd::open(&mut { bytes }, Access::ReadWrite, Tail::Zeroes)
}

fn checked(bytes: &[u8]) -> Report {
    check(&mut { bytes }, Tail::Zeroes).unwrap()
}

/// Runs the whole life of a block through an image and applies what it writes, as a disk would.
fn write_block(bytes: &mut Vec<u8>, at: u64) {
    let mut vhd = open(bytes).unwrap();
    let reserved = vhd.reserve(Span { at: DiskOffset(at), len: 512 }).unwrap();
    bytes.resize(bytes.len().max(reserved.at.0 as usize + 512), 0);
    bytes[reserved.at.0 as usize..reserved.at.0 as usize + 512].fill(0x5a);
    vhd.commit(reserved.ticket.unwrap());
    for write in vhd.seal().into_iter().flatten() {
        let end = write.at.0 as usize + write.bytes.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[write.at.0 as usize..end].copy_from_slice(&write.bytes);
    }
}

#[test]
fn a_new_image_says_what_it_was_made_with() {
    let vhd = open(&new_file(10 * GIB, differencing())).unwrap();
    let info = vhd.info();
    assert_eq!((info.len, info.disk_type, info.block_size), (10 * GIB, DiskType::Differencing, Some(2 << 20)));
    assert_eq!((info.blocks, info.blocks_allocated, info.batmap), (5120, 0, true));
    assert_eq!(info.created, 1_700_000_000);
    let parent = info.parent.as_ref().unwrap();
    assert_eq!((parent.uuid, parent.modified, parent.name.as_str()), ([9; 16], 1_600_000_000, "gold.vhd"));
    let paths: Vec<_> = parent.locators.iter().map(|locator| (locator.code.as_str(), locator.path.as_str())).collect();
    assert_eq!(
        paths,
        [("W2ru", "..\\base\\gold.vhd"), ("MacX", "file://../base/gold.vhd"), ("W2ku", "\\srv\\base\\gold.vhd")]
    );
}

#[test]
fn sizes_a_vhd_cannot_hold_are_refused() {
    for len in [0, 513, (2040 << 30) + 512] {
        assert_eq!(create(&spec(len, Kind::Dynamic)).unwrap_err().kind, ImageErrorKind::OutOfLimits, "{len}");
    }
    for block_size in [256 << 10, 3 << 20, 32 << 20] {
        let spec = Spec { block_size, ..spec(GIB, Kind::Dynamic) };
        assert_eq!(create(&spec).unwrap_err().kind, ImageErrorKind::OutOfLimits, "{block_size}");
    }
    let largest = new_file(2040 << 30, Kind::Dynamic);
    assert_eq!(open(&largest).unwrap().geometry().len, 2040 << 30);
}

#[test]
fn every_block_size_found_in_the_wild_opens() {
    for shift in 19..=24 {
        let creation = create(&Spec { block_size: 1 << shift, ..spec(GIB, Kind::Dynamic) }).unwrap();
        let mut bytes = file_of(&creation);
        write_block(&mut bytes, 0);
        let mut vhd = open(&bytes).unwrap();
        let Err(Wait::Load(block)) = vhd.map(Span { at: DiskOffset(0), len: 4096 }) else {
            panic!("the bitmap is not looked at")
        };
        vhd.load(block, &bytes[block.at.0 as usize..][..block.len as usize]).unwrap();
        let place = vhd.map(Span { at: DiskOffset(0), len: 4096 }).unwrap();
        assert!(matches!(place, Mapping::Data { at, len: 4096 } if at % 4096 == 0), "{place:?}");
    }
}

#[test]
fn a_footer_of_511_bytes_is_accepted() {
    let mut bytes = new_file(1 << 20, Kind::Fixed);
    bytes.pop();
    assert_eq!(open(&bytes).unwrap().geometry().len, 1 << 20);
    let mut bytes = new_file(GIB, Kind::Dynamic);
    bytes.pop();
    assert_eq!(open(&bytes).unwrap().geometry().len, GIB);
}

#[test]
fn a_missing_footer_is_restored_from_its_copy() {
    let mut bytes = new_file(GIB, Kind::Dynamic);
    write_block(&mut bytes, 0);
    bytes.truncate(bytes.len() - 512);
    assert_eq!(checked(&bytes).worst(), Some(Severity::Unclosed));
    let mut repaired = bytes.clone();
    for write in checked(&bytes).repairs.into_iter().flatten() {
        repaired.resize(repaired.len().max(write.at.0 as usize + write.bytes.len()), 0);
        repaired[write.at.0 as usize..write.at.0 as usize + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    assert_eq!(checked(&repaired).problems, []);
    assert_eq!(open(&bytes).unwrap().seal().len(), 1, "a writer restores it with its first round");
}

#[test]
fn a_truncated_image_is_refused() {
    let mut bytes = new_file(GIB, Kind::Dynamic);
    write_block(&mut bytes, 0);
    write_block(&mut bytes, 512 << 20);
    let whole = bytes.len();
    for len in [whole - 600, whole - (1 << 20), 100 << 10, 4096, 1536, 600] {
        bytes.truncate(len);
        let error = open(&bytes).unwrap_err();
        assert_eq!(error.kind, ImageErrorKind::Corrupt, "{len}: {error}");
    }
    bytes.truncate(100);
    assert_eq!(open(&bytes).unwrap_err().kind, ImageErrorKind::WrongFormat);
}

/// A file that is 0xff, the number of a block that is not there, between its first bytes and its footer.
struct Claiming {
    start: Vec<u8>,
    len: u64,
    largest_read: usize,
}

impl Source for Claiming {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        self.largest_read = self.largest_read.max(bytes.len());
        let footer = self.len - SECTOR;
        for (byte, at) in bytes.iter_mut().zip(at.0..) {
            let at = if at < footer { at } else { at - footer };
            *byte = self.start.get(at as usize).copied().unwrap_or(0xff);
        }
        Ok(())
    }
}

#[test]
fn of_a_table_for_more_than_the_largest_disk_the_rest_is_not_read() {
    let mut start = new_file(GIB, Kind::Dynamic);
    let footer = RawFooter::read_from_bytes(&start[..512]).unwrap();
    let at = footer.data_offset.get() as usize;
    let mut header = RawHeader::read_from_bytes(&start[at..at + 1024]).unwrap();
    header.max_table_entries = u32::MAX.into();
    header.checksum = header.sum().into();
    start[at..at + 1024].copy_from_slice(header.as_bytes());
    start.truncate(start.len() - 512);
    let mut file = Claiming { start, len: 20 << 30, largest_read: 0 };
    let vhd = Vhd::open(&mut file, Access::ReadWrite, Tail::Zeroes).unwrap();
    assert_eq!(vhd.geometry().len, GIB);
    assert!(file.largest_read <= 8 << 20, "{} bytes at once", file.largest_read);
}

#[test]
fn what_is_not_a_vhd_is_called_that() {
    let error = open(&[0; 4096]).unwrap_err();
    assert_eq!(error.kind, ImageErrorKind::WrongFormat);
    assert_eq!(error.to_string(), "there is no VHD footer at either end of the file");
}

#[test]
fn a_batmap_with_a_wrong_checksum_is_not_used() {
    let mut bytes = new_file(GIB, Kind::Dynamic);
    write_block(&mut bytes, 0);
    let header_at = 4096 + 2048;
    bytes[header_at + 512] ^= 0x80;
    let report = checked(&bytes);
    assert_eq!(report.worst(), Some(Severity::Repairable));
    let mut vhd = open(&bytes).unwrap();
    assert!(matches!(vhd.map(Span { at: DiskOffset(0), len: 512 }), Err(Wait::Load(_))), "the bitmap is looked at");
}

/// Scope: every byte of all metadata of an image with two blocks, two values each. Nothing panics; what opens
/// maps inside the file.
#[test]
fn no_byte_of_the_metadata_can_do_harm() {
    let mut bytes = new_file(64 << 20, differencing());
    write_block(&mut bytes, 0);
    write_block(&mut bytes, 32 << 20);
    let end = bytes.len();
    let places = (0..12288 + 2048).chain(end - 512..end);
    for at in places {
        for flip in [0x01, 0x80] {
            bytes[at] ^= flip;
            if let Ok(mut vhd) = open(&bytes) {
                assert_eq!(vhd.geometry().len % 512, 0);
                let mut offset = 0;
                while offset < vhd.geometry().len.min(64 << 20) {
                    let span = Span { at: DiskOffset(offset), len: 2 << 20 };
                    let len = match vhd.map(span) {
                        Ok(Mapping::Data { at, len }) => {
                            assert!(at + len <= FileOffset(end as u64), "byte {at}: data behind the end of the file");
                            len
                        }
                        Ok(place) => place.len(),
                        Err(_) => 2 << 20,
                    };
                    offset += len;
                }
            }
            bytes[at] ^= flip;
        }
    }
}

#[test]
fn overlapping_blocks_are_damage() {
    let mut bytes = new_file(64 << 20, Kind::Dynamic);
    write_block(&mut bytes, 0);
    let table = 4096;
    let first: [u8; 4] = bytes[table..table + 4].try_into().unwrap();
    bytes[table + 4..table + 8].copy_from_slice(&first);
    assert_eq!(checked(&bytes).worst(), Some(Severity::Damage));
    assert_eq!(open(&bytes).unwrap_err().kind, ImageErrorKind::Corrupt);
}

#[test]
fn damaged_blocks_are_lost_to_readers_and_no_others() {
    // Blocks 0 and 2 are in one place, block 3 over the table, block 4 behind the end; block 1 is sound.
    const BLOCK: u64 = 2 << 20;
    let mut bytes = new_file(64 << 20, Kind::Dynamic);
    write_block(&mut bytes, 0);
    write_block(&mut bytes, BLOCK);
    let table = 4096;
    let first: [u8; 4] = bytes[table..table + 4].try_into().unwrap();
    let mut put = |number: usize, entry: &[u8]| bytes[table + number * 4..][..4].copy_from_slice(entry);
    put(2, &first);
    put(3, &1u32.to_be_bytes());
    put(4, &0x7fff_ffffu32.to_be_bytes());
    assert_eq!(open(&bytes).unwrap_err().kind, ImageErrorKind::Corrupt);
    let mut vhd = Vhd::open(&mut { &bytes[..] }, Access::ReadOnly, Tail::Zeroes).unwrap();
    let mut map = |block: u64| loop {
        match vhd.map(Span { at: DiskOffset(block * BLOCK), len: 512 }) {
            Err(Wait::Load(wanted)) => {
                vhd.load(wanted, &bytes[wanted.at.0 as usize..][..wanted.len as usize]).unwrap();
            }
            found => break found.unwrap(),
        }
    };
    for (block, entry) in [(0, first), (2, first), (3, 1u32.to_be_bytes()), (4, 0x7fff_ffffu32.to_be_bytes())] {
        let at = table as u64 + block * 4;
        let raw = u32::from_be_bytes(entry).into();
        assert_eq!(map(block), Mapping::Damaged { at: FileOffset(at), raw, len: 512 }, "block {block}");
    }
    assert!(matches!(map(1), Mapping::Data { .. }));
    assert_eq!(map(5), Mapping::Parent { len: 512 });
}

#[test]
fn a_batmap_that_calls_an_absent_block_full_is_not_believed() {
    let mut bytes = new_file(64 << 20, differencing());
    let header_at = bytes.windows(8).position(|cookie| cookie == b"tdbatmap").unwrap();
    let map_at = header_at + 512;
    bytes[map_at] = 0x80;
    let sum = layout::checksum(&bytes[map_at..map_at + 512]);
    bytes[header_at + 24..header_at + 28].copy_from_slice(&sum.to_be_bytes());
    write_block(&mut bytes, 4096);
    let mut vhd = open(&bytes).unwrap();
    let first = Span { at: DiskOffset(0), len: 512 };
    if let Err(Wait::Load(block)) = vhd.map(first) {
        vhd.load(block, &bytes[block.at.0 as usize..][..block.len as usize]).unwrap();
    }
    assert_eq!(vhd.map(first), Ok(Mapping::Parent { len: 512 }), "nobody has written it: it is the parent's");
}

#[test]
fn an_encrypted_image_is_refused_by_name() {
    let mut bytes = new_file(64 << 20, Kind::Dynamic);
    let header_at = 4096 + 512;
    bytes[header_at + 29] = 1;
    let error = open(&bytes).unwrap_err();
    assert_eq!(error.kind, ImageErrorKind::Unsupported);
    assert!(error.what.contains("encrypted"), "{error}");
}

#[test]
fn a_block_is_not_freed_while_its_bitmap_is_read() {
    let mut bytes = new_file(64 << 20, Kind::Dynamic);
    write_block(&mut bytes, 0);
    let mut vhd = open(&bytes).unwrap();
    let Err(Wait::Load(block)) = vhd.map(Span { at: DiskOffset(0), len: 512 }) else {
        panic!("the bitmap is not looked at")
    };
    let whole = Span { at: DiskOffset(0), len: 2 << 20 };
    assert_eq!(vhd.discard(whole), Err(Wait::Load(block)));
    vhd.load(block, &bytes[block.at.0 as usize..][..block.len as usize]).unwrap();
    assert!(matches!(vhd.discard(whole), Ok(Discarded::Freed { .. })));
}

#[test]
fn places_freed_are_a_reason_for_a_round() {
    // Else a guest that writes and discards, and never flushes, has the file grow without end.
    let mut vhd = open(&new_file(64 << 20, Kind::Dynamic)).unwrap();
    for _ in 0..5000 {
        let ticket = vhd.reserve(Span { at: DiskOffset(0), len: 512 }).unwrap().ticket.unwrap();
        vhd.commit(ticket);
        let freed = vhd.discard(Span { at: DiskOffset(0), len: 2 << 20 }).unwrap();
        let Discarded::Freed { at, .. } = freed else { panic!("{freed:?}") };
        vhd.released(at, true);
    }
    assert!(vhd.dirty() >= 5000, "{}", vhd.dirty());
    let batches = vhd.seal();
    assert!(batches.iter().flatten().count() <= 5);
    vhd.settled(true);
    assert_eq!(vhd.dirty(), 0);
}

#[test]
fn the_last_block_is_freed_whole() {
    // Found by the simulator: only the part of the block inside the disk was deallocated, and the slot called clean.
    let mut bytes = new_file((2 << 20) + 4096, Kind::Dynamic);
    write_block(&mut bytes, 2 << 20);
    let mut vhd = open(&bytes).unwrap();
    let freed = vhd.discard(Span { at: DiskOffset(2 << 20), len: 4096 }).unwrap();
    assert!(matches!(freed, Discarded::Freed { len: 4096, size, .. } if size == 2 << 20), "{freed:?}");
}
