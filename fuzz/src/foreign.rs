//! What a fuzzer does to an image of another hypervisor: bytes of its metadata are changed, it is opened, and requests
//! are made of it.
//!
//! Invariants checked:
//! - nothing panics, whatever the metadata says;
//! - every request is answered exactly once, and a write is refused;
//! - an image whose metadata was not changed holds its disk.
//!
//! An input is: a byte for the kind of image; a number of changes, each of two bytes for the place and one for the
//! value; then requests of four bytes: operation, first sector (two bytes), number of sectors.

#[path = "../../disk/tests/foreign/sample.rs"]
mod sample;

use disk::foreign::Foreign;
use disk::{Disk, DiskOffset, FileOffset, Image, Operation, Options, Span, Status};
use memory::Segments;

use super::guest::Guest;
use super::storage::{SECTOR, Sparse};
use sample::{VHDX_BAT, VHDX_HEADERS, VHDX_METADATA, VHDX_REGIONS};

/// Three MiB and seven sectors, most of it zero.
const LEN: usize = (3 << 20) + 7 * 512;

fn disk() -> Vec<u8> {
    let mut disk = vec![0; LEN];
    for (from, len) in [(0, 70_000), (1 << 20, 4096), (LEN - 512, 512)] {
        (from..from + len).for_each(|at| disk[at] = (at / 300 % 250) as u8 + 1);
    }
    disk
}

/// Whether it is a VHDX, and its file.
fn new_file(kind: u8) -> (bool, Vec<u8>) {
    match kind % 5 {
        0 => (false, sample::vmdk(&disk(), 64 << 10, false)),
        1 => (false, sample::vmdk(&disk(), 4096, false)),
        2 => (false, sample::vmdk(&disk(), 64 << 10, true)),
        3 => (true, sample::vhdx(&disk(), false)),
        _ => (true, sample::vhdx(&disk(), true)),
    }
}

/// Takes bytes off the front of `input`.
fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = input.split_first_chunk()?;
    *input = rest;
    Some(*first)
}

/// Changes bytes of the metadata as the input says. How many.
fn change(file: &mut [u8], is_vhdx: bool, input: &mut &[u8]) -> u8 {
    let count = take(input).map_or(0, |[count]| count % 32);
    for _ in 0..count {
        let Some([high, low, value]) = take(input) else { break };
        let place = usize::from(u16::from_be_bytes([high, low]));
        let at = if is_vhdx {
            let [one, other] = VHDX_HEADERS;
            let [table, copy] = VHDX_REGIONS;
            let bases = [0, one, other, table, copy, VHDX_METADATA, VHDX_METADATA + (64 << 10), VHDX_BAT];
            bases[place >> 13] + (place & 0x1fff) % 512
        } else if place >= 0xc000 {
            file.len() - 1 - place % 2048
        } else {
            place % file.len()
        };
        file[at] ^= value;
    }
    if is_vhdx {
        sample::seal(file);
    }
    count
}

/// Opens a changed image and makes requests of it.
pub fn image(mut input: &[u8]) {
    let input = &mut input;
    let (is_vhdx, mut file) = new_file(take(input).map_or(0, |[kind]| kind));
    let changed = change(&mut file, is_vhdx, input) > 0;
    let mut source = file.as_slice();
    let opened = if is_vhdx { Foreign::open_vhdx(&mut source) } else { Foreign::open_vmdk(&mut source) };
    let Ok(image) = opened else {
        assert!(changed, "a new image does not open");
        return;
    };
    let mut stored = Sparse { len: file.len() as u64, ..Sparse::default() };
    for (at, sector) in (0..).step_by(512).zip(file.chunks(512)).filter(|(_, sector)| sector.iter().any(|&b| b != 0)) {
        stored.write(FileOffset(at), sector);
    }
    stored.len = file.len() as u64;
    let disk = Disk::new(vec![Image::Foreign(Box::new(image))], Options::default()).expect("one layer");
    let mut guest = Guest::new(disk, vec![stored]);
    while let Some(request) = take(input) {
        ask(&mut guest, request, changed);
    }
}

fn ask(guest: &mut Guest, [what, high, low, count]: [u8; 4], changed: bool) {
    let sectors = guest.disk.geometry().len / SECTOR;
    let first = u64::from(u16::from_be_bytes([high, low])) % sectors.max(1);
    let count = 1 + u64::from(count) * if what & 0x80 == 0 { 1 } else { 16 };
    let span = Span { at: DiskOffset(first * SECTOR), len: count.min(sectors - first) * SECTOR };
    let memory = Segments::copy_of(&vec![0xee; span.len as usize]);
    match what % 4 {
        0 => {
            let status = guest.ask(Operation::Write { durable: false }, span, memory);
            assert!(status.is_none_or(|status| status != Status::Done), "a write to {span:?} was taken");
        }
        1 => drop(guest.ask(Operation::Extents { depths: false }, span, Segments::empty())),
        _ => {
            let status = guest.ask(Operation::Read, span, memory.clone());
            if !changed {
                assert_eq!(status, Some(Status::Done), "a read of {span:?}");
                assert!(memory.to_vec() == disk()[span.at.0 as usize..span.end().0 as usize], "a read of {span:?}");
            }
        }
    }
}
