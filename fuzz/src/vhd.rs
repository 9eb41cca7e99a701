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

use std::collections::{HashMap, VecDeque};

use disk::vhd::{self, Kind, Parent, Severity, Spec, Vhd};
use disk::{
    Access, Action, Allocation, Disk, EngineFailed, FileDone, FileError, FileId, FileOp, Image, Io, Operation, Options,
    ReadFault, Request, Source, Span, Tail, Token, Until,
};
use memory::Segments;

const SECTOR: u64 = 512;
/// Two blocks of 512 KiB, and a part of a third.
const LEN: u64 = (1 << 20) + 7 * SECTOR;

/// A file of which only the sectors that were written take memory, so that a hostile table cannot take all of it.
#[derive(Clone, Default)]
struct Sparse {
    len: u64,
    sectors: HashMap<u64, [u8; 512]>,
}

impl Sparse {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        assert_eq!(at % SECTOR, 0, "a write at byte {at}");
        for (number, chunk) in (at / SECTOR..).zip(bytes.chunks(512)) {
            let mut sector = [0; 512];
            sector[..chunk.len()].copy_from_slice(chunk);
            self.sectors.insert(number, sector);
        }
        self.len = self.len.max(at.checked_add(bytes.len() as u64).expect("a write behind the largest file"));
    }

    fn read(&self, at: u64, bytes: &mut [u8]) {
        let mut at = at;
        let mut rest = bytes;
        while !rest.is_empty() {
            let within = (at % SECTOR) as usize;
            let (now, later) = rest.split_at_mut((512 - within).min(rest.len()));
            match self.sectors.get(&(at / SECTOR)) {
                Some(sector) => now.copy_from_slice(&sector[within..within + now.len()]),
                None => now.fill(0),
            }
            at = at.saturating_add(now.len() as u64);
            rest = later;
        }
    }
}

impl Source for &Sparse {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&mut self, at: u64, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(bytes.len() as u64);
        if end > self.len {
            return Err(ReadFault::PastEnd(end));
        }
        self.read(at, bytes);
        Ok(())
    }
}

/// An engine that does each operation when it is reaped, the newest first.
struct Engine {
    files: Vec<Sparse>,
    queue: VecDeque<FileOp>,
}

impl Engine {
    fn execute(&mut self, op: &FileOp) -> Result<(), FileError> {
        let file = self.files.get_mut(usize::from(op.file.0)).expect("a file of the chain");
        match &op.action {
            Action::Read { at, into } => {
                let mut bytes = vec![0; into.len()];
                file.read(*at, &mut bytes);
                into.copy_from(&bytes);
            }
            Action::Write { at, from } => {
                assert_eq!(op.file, FileId(0), "a parent was written");
                if at.saturating_add(from.len() as u64) > 1 << 41 {
                    return Err(FileError::NoSpace);
                }
                file.write(*at, &from.to_vec());
            }
            Action::SyncData => {}
            Action::Deallocate { at, len } => {
                assert_eq!(op.file, FileId(0), "a parent was written");
                file.sectors.retain(|sector, _| !(at / SECTOR..(at + len) / SECTOR).contains(sector));
            }
        }
        Ok(())
    }
}

impl Io for Engine {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.queue.push_back(op);
        Ok(())
    }

    fn reap(&mut self, _until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        if let Some(op) = self.queue.pop_back() {
            let result = self.execute(&op);
            done.push(FileDone { op, result });
        }
        Ok(())
    }

    fn allocated(&mut self, _file: FileId, _at: u64, len: u64) -> Allocation {
        Allocation::Data(len)
    }
}

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
        file.read(at / SECTOR * SECTOR, &mut sector);
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
    drop(vhd::check(&mut &files[0]));
    let Some(disk) = open(&files) else {
        assert!(changed, "a new image does not open");
        return;
    };
    // An image that says it is larger than ours is fine, but not a model of terabytes.
    let trusted = !changed && disk.geometry().len == LEN;
    let mut model = vec![0u8; LEN as usize];
    let mut session = Session { disk, engine: Engine { files, queue: VecDeque::new() } };
    while let Some(request) = take(input) {
        session.ask(request, &mut model, trusted);
    }
    session.one(Operation::Flush, Span { at: 0, len: 0 }, Segments::empty());
    if trusted {
        let files = session.engine.files;
        let report = vhd::check(&mut &files[0]).expect("a readable image");
        // Blocks that were given up may leave unused space; nothing worse.
        assert!(report.worst().is_none_or(|worst| worst == Severity::Leak), "{:?}", report.problems);
        assert!(
            files[0].len <= 2 * LEN + (64 << 10) || files[0].sectors.len() < 16 * 1024,
            "the file grew without need"
        );
        let disk = open(&files).expect("an image that opens again");
        let mut session = Session { disk, engine: Engine { files, queue: VecDeque::new() } };
        session.compare(&model);
    }
}

struct Session {
    disk: Disk<Image>,
    engine: Engine,
}

impl Session {
    fn ask(&mut self, [what, high, low, count, fill]: [u8; 5], model: &mut [u8], trusted: bool) {
        let sectors = self.disk.geometry().len / SECTOR;
        let first = u64::from(u16::from_be_bytes([high, low])) % sectors.max(1);
        // Long ones cross blocks.
        let count = if what & 0x80 == 0 { 1 + u64::from(count) % 16 } else { 1 + u64::from(count) * 8 };
        let span = Span { at: first * SECTOR, len: count.min(sectors.saturating_sub(first)).max(1) * SECTOR };
        let len = span.len as usize;
        let durable = fill & 1 == 1;
        match what % 6 {
            0 | 1 => self.one(Operation::Write { durable }, span, Segments::copy_of(&vec![fill; len])),
            2 => self.one(Operation::WriteZeroes { free: fill & 2 == 0, durable }, span, Segments::empty()),
            3 => self.one(Operation::Discard, span, Segments::empty()),
            4 => self.one(Operation::Flush, Span { at: 0, len: 0 }, Segments::empty()),
            _ => self.one(Operation::Extents, span, Segments::empty()),
        }
        if !trusted {
            return self.one(Operation::Read, span, Segments::zeroed(len));
        }
        let range = span.at as usize..span.end() as usize;
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

    /// One request, from submission to its one answer.
    fn one(&mut self, operation: Operation, span: Span, memory: Segments) {
        let geometry = self.disk.geometry();
        let Ok(request) = Request::new(operation, span, memory, Token(1), &geometry) else { return };
        self.disk.submit(request, &mut self.engine);
        let mut done = Vec::new();
        while !self.engine.queue.is_empty() {
            self.engine.reap(Until::Now, &mut done).expect("an engine of memory");
            done.drain(..).for_each(|done| self.disk.settle(done, &mut self.engine));
        }
        let (answered, _) = self.disk.answer().expect("an answer");
        answered.retire();
        assert!(self.disk.answer().is_none(), "a second answer");
        assert!(self.disk.is_idle());
    }

    fn compare(&mut self, model: &[u8]) {
        for (number, chunk) in (0u64..).zip(model.chunks(64 << 10)) {
            let memory = Segments::copy_of(&vec![0xee; chunk.len()]);
            self.one(Operation::Read, Span { at: number << 16, len: chunk.len() as u64 }, memory.clone());
            assert!(memory.to_vec() == chunk, "after opening again, at {}", number << 16);
        }
    }
}
