//! What a fuzzer does to a VHD: bytes of its metadata are changed, it is opened, and requests are made of it.
//!
//! Invariants checked:
//! - nothing panics, whatever the metadata says;
//! - opening, checking and serving read only inside of the file (or behind its end, which is zero), and an image whose
//!   metadata was not changed only ever takes the space it needs;
//! - every request is answered exactly once;
//! - an image whose metadata was not changed holds what was written, is clean after a flush, and says the same when it
//!   is opened again.
//!
//! An input is: a byte for the kind of image; a number of changes, each of two bytes for the place and one for the
//! value; then requests of five bytes: operation, first sector (two bytes), number of sectors, fill.

use disk::vhd::{self, Kind, Parent, Severity, Spec, Vhd};
use disk::{Access, Disk, DiskOffset, FileOffset, Image, Operation, Options, Span, Tail};
use memory::Segments;

use super::guest::Guest;
use super::storage::{SECTOR, Sparse};

/// Two blocks of 512 KiB, and a part of a third.
const LEN: u64 = (1 << 20) + 7 * SECTOR;

fn new_file(kind: Kind, id: u8) -> Sparse {
    let spec = Spec { len: LEN, kind, block_size: 512 << 10, uuid: [id; 16], created: 1_700_000_000 };
    let creation = vhd::create(&spec).expect("a valid specification");
    let mut file = Sparse { len: creation.len, ..Sparse::default() };
    creation.writes.iter().for_each(|write| file.write(write.at, &write.bytes));
    file
}

/// The chain that the input's first byte asks for, leaf first.
fn new_files(kind: u8) -> Vec<Sparse> {
    let parent = Parent { uuid: [1; 16], modified: 0, relative: "base.vhd".into(), absolute: "/base.vhd".into() };
    match kind % 3 {
        0 => vec![new_file(Kind::Dynamic, 1)],
        1 => vec![new_file(Kind::Fixed, 1)],
        _ => vec![new_file(Kind::Differencing(parent), 2), new_file(Kind::Dynamic, 1)],
    }
}

fn open(files: &[Sparse]) -> Option<Disk<Image>> {
    let mut images = Vec::new();
    for (depth, mut file) in files.iter().enumerate() {
        let access = if depth == 0 { Access::ReadWrite } else { Access::ReadOnly };
        let image = Vhd::open(&mut file, access, Tail::Zeroes).ok()?;
        images.push(Image::Vhd(Box::new(image)));
    }
    Disk::new(images, Options::default()).ok()
}

/// Takes bytes off the front of `input`.
fn take<const N: usize>(input: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = input.split_first_chunk()?;
    *input = rest;
    Some(*first)
}

/// Changes bytes of the leaf as the input says. How many.
fn change(file: &mut Sparse, input: &mut &[u8]) -> u8 {
    let count = take(input).map_or(0, |[count]| count % 32);
    for _ in 0..count {
        let Some([high, low, value]) = take(input) else { break };
        let place = u64::from(u16::from_be_bytes([high, low]));
        // The upper quarter means the end of the file, the rest its beginning.
        let at = if place >= 0xc000 { file.len.saturating_sub(1 + place % 1024) } else { place % file.len.max(1) };
        let mut sector = [0; 512];
        file.read(FileOffset(at / SECTOR * SECTOR), &mut sector);
        sector[(at % SECTOR) as usize] ^= value;
        file.sectors.insert(at / SECTOR, sector);
    }
    count
}

/// Opens a changed image and makes requests of it.
pub fn image(mut input: &[u8]) {
    let input = &mut input;
    let mut files = new_files(take(input).map_or(0, |[kind]| kind));
    let changed = change(&mut files[0], input) > 0;
    // Neither may panic; what they find is for others to judge.
    drop(vhd::check(&mut &files[0], Tail::Zeroes));
    let Some(disk) = open(&files) else {
        assert!(changed, "a new image does not open");
        return;
    };
    // An image that says it is larger than ours is fine, but not a model of terabytes.
    let trusted = !changed && disk.geometry().len == LEN;
    let mut model = vec![0u8; LEN as usize];
    let mut session = Session { guest: Guest::new(disk, files) };
    while let Some(request) = take(input) {
        session.ask(request, &mut model, trusted);
    }
    session.one(Operation::Flush, Span { at: DiskOffset(0), len: 0 }, Segments::empty());
    if trusted {
        let files = session.guest.engine.files;
        let report = vhd::check(&mut &files[0], Tail::Zeroes).expect("a readable image");
        // Blocks that were given up may leave unused space; nothing worse.
        assert!(report.worst().is_none_or(|worst| worst == Severity::Leak), "{:?}", report.problems);
        assert!(
            files[0].len <= 2 * LEN + (64 << 10) || files[0].sectors.len() < 16 * 1024,
            "the file grew without need"
        );
        let disk = open(&files).expect("an image that opens again");
        let mut session = Session { guest: Guest::new(disk, files) };
        session.compare(&model);
    }
}

struct Session {
    guest: Guest,
}

impl Session {
    fn ask(&mut self, [what, high, low, count, fill]: [u8; 5], model: &mut [u8], trusted: bool) {
        let sectors = self.guest.disk.geometry().len / SECTOR;
        let first = u64::from(u16::from_be_bytes([high, low])) % sectors.max(1);
        // Long ones cross blocks.
        let count = if what & 0x80 == 0 { 1 + u64::from(count) % 16 } else { 1 + u64::from(count) * 8 };
        let span =
            Span { at: DiskOffset(first * SECTOR), len: count.min(sectors.saturating_sub(first)).max(1) * SECTOR };
        let len = span.len as usize;
        let durable = fill & 1 == 1;
        match what % 6 {
            0 | 1 => self.one(Operation::Write { durable }, span, Segments::copy_of(&vec![fill; len])),
            2 => self.one(Operation::WriteZeroes { free: fill & 2 == 0, durable }, span, Segments::empty()),
            3 => self.one(Operation::Discard, span, Segments::empty()),
            4 => self.one(Operation::Flush, Span { at: DiskOffset(0), len: 0 }, Segments::empty()),
            _ => self.one(Operation::Extents { depths: false }, span, Segments::empty()),
        }
        if !trusted {
            return self.one(Operation::Read, span, Segments::zeroed(len));
        }
        let range = span.at.0 as usize..span.end().0 as usize;
        match what % 6 {
            0 | 1 => model[range.clone()].fill(fill),
            2 => model[range.clone()].fill(0),
            3 => {
                // A discard reads as zero or as before: the model takes what it finds, if it is one of the two.
                let memory = Segments::copy_of(&vec![0xee; len]);
                self.one(Operation::Read, span, memory.clone());
                for (found, old) in memory.to_vec().chunks(512).zip(model[range.clone()].chunks_mut(512)) {
                    assert!(found == old || found.iter().all(|&byte| byte == 0), "a discarded sector became another");
                    old.copy_from_slice(found);
                }
            }
            _ => {}
        }
        let memory = Segments::copy_of(&vec![0xee; len]);
        self.one(Operation::Read, span, memory.clone());
        assert!(memory.to_vec() == model[range], "a read of {span:?}");
    }

    fn one(&mut self, operation: Operation, span: Span, memory: Segments) {
        self.guest.ask(operation, span, memory);
    }

    fn compare(&mut self, model: &[u8]) {
        for (number, chunk) in (0u64..).zip(model.chunks(64 << 10)) {
            let memory = Segments::copy_of(&vec![0xee; chunk.len()]);
            self.one(Operation::Read, Span { at: DiskOffset(number << 16), len: chunk.len() as u64 }, memory.clone());
            assert!(memory.to_vec() == chunk, "after opening again, at {}", number << 16);
        }
    }
}
