//! Pages of a map of changed blocks, read and changed as planted bugs do.
//!
//! Knows the layout by itself, from the description at the head of `disk::changes`, and not by its code.

use disk::FileOffset;
use disk::changes::{HEADERS_AT, PAGES_AT, SECTOR, page_at};

use crate::media::Media;

const CHECKSUM: std::ops::Range<usize> = 0..4;
const NUMBER: std::ops::Range<usize> = 4..8;
const ID: std::ops::Range<usize> = 8..24;
const INTENTS: std::ops::Range<usize> = 24..32;
const CHANGED: usize = 32;
/// Offset of the id in a header.
const ID_IN_HEADER: std::ops::Range<usize> = 24..40;
/// Offset of the size of the disk in a header, in sectors of which a page has this many.
const LEN_IN_HEADER: std::ops::Range<usize> = 56..64;
/// Offset of the flags in a header, and the one that says that changes are missing.
const FLAGS_IN_HEADER: usize = 68;
const INVALID: u8 = 2;
const BYTES_OF_PAGE: u64 = 60 * 64 * 512;

/// Removes all intents, as if the map had been closed.
pub fn without_intents(media: &mut Media) {
    change(media, |page| {
        if is_sound(page) {
            page[INTENTS].fill(0);
        }
    });
}

/// Takes pages for whole that are not.
pub fn sound(media: &mut Media) {
    let id = header(media)[ID_IN_HEADER].to_vec();
    let mut number = 0u32;
    change(media, |page| {
        page[ID].copy_from_slice(&id);
        page[NUMBER].copy_from_slice(&number.to_le_bytes());
        number += 1;
    });
}

/// Takes the bits of regions without an intent from what the file says already: those that were set since are lost.
pub fn without_new_bits(at: FileOffset, bytes: &mut [u8], file: &Media) {
    for (number, page) in (0u64..).zip(bytes.chunks_exact_mut(512)) {
        let old = file.read(at.0 / SECTOR + number, 1);
        let intents = u64::from_le_bytes(page[INTENTS].try_into().unwrap_or_default());
        for region in (0..60).filter(|region| intents >> region & 1 == 0) {
            let word = CHANGED + 8 * region..CHANGED + 8 * region + 8;
            page[word.clone()].copy_from_slice(&old[word]);
        }
        seal(page);
    }
}

/// The newer header.
fn header(media: &Media) -> Vec<u8> {
    let [first, second] = HEADERS_AT.map(|at| media.read(at.0 / SECTOR, 1));
    if first[16..24].iter().rev().gt(second[16..24].iter().rev()) { first } else { second }
}

fn change(media: &mut Media, mut what: impl FnMut(&mut [u8])) {
    let len = u64::from_le_bytes(header(media)[LEN_IN_HEADER].try_into().unwrap_or_default());
    for number in 0..len.div_ceil(BYTES_OF_PAGE) {
        let at = page_at(u32::try_from(number).unwrap_or(u32::MAX));
        if at.0 + SECTOR > media.len() {
            return;
        }
        let mut page = media.read(at.0 / SECTOR, 1);
        what(&mut page);
        seal(&mut page);
        let len = media.len();
        media.write(at, &page);
        media.set_len(len);
    }
}

fn is_sound(page: &[u8]) -> bool {
    let mut copy = page.to_vec();
    seal(&mut copy);
    copy == page
}

/// Sets the checksum: CRC-32C, bit by bit.
fn seal(page: &mut [u8]) {
    page[CHECKSUM].fill(0);
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    let crc = !page.iter().fold(u32::MAX, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step));
    page[CHECKSUM].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a write of a map is a header that says how large the disk is, and not that changes are missing.
pub fn is_size(at: FileOffset, bytes: &[u8]) -> bool {
    is_header(at) && bytes.get(FLAGS_IN_HEADER).is_some_and(|flags| *flags & INVALID == 0)
}

/// Whether a write of a map goes to a header.
pub fn is_header(at: FileOffset) -> bool {
    at < PAGES_AT
}
