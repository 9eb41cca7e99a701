//! A disk over files in memory whose operations complete in an order drawn from a seed.

use disk::{
    Access, Action, Allocation, Creation, Disk, DiskOffset, EngineFailed, FileDone, FileError, FileId, FileOffset,
    FileOp, Format, Image, Io, Operation, Options, Request, Span, Status, Tail, Token, Until, qcow2,
};
use memory::Segments;

#[path = "../memory_io/mod.rs"]
mod memory_io;

use memory_io::{MemoryIo, Past};

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

/// A disk and what it holds.
pub struct Rig {
    pub disk: Disk<Image>,
    pub files: MemoryIo,
    /// What a reader must find.
    pub model: Vec<u8>,
    last: u64,
    answers: Vec<(u64, Status)>,
}

/// The file of a new image.
pub fn file_of(creation: &Creation) -> Vec<u8> {
    let mut bytes = vec![0; index(creation.len)];
    for write in &creation.writes {
        let end = index(write.at.0) + write.bytes.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[index(write.at.0)..end].copy_from_slice(&write.bytes);
    }
    bytes
}

/// Opens a qcow2 file for writing, and does what is to be done first.
pub fn open(bytes: &mut Vec<u8>, tail: Tail) -> Image {
    let image = qcow2::Qcow2::open(&mut bytes.as_slice(), Access::ReadWrite, tail).unwrap();
    for write in image.first_writes() {
        // The last page of a file need not be there in full.
        bytes.resize(bytes.len().max(index(write.at.0) + write.bytes.len()), 0);
        bytes[index(write.at.0)..index(write.at.0) + write.bytes.len()].copy_from_slice(&write.bytes);
    }
    Image::Qcow2(Box::new(image))
}

impl Rig {
    /// A disk of `layers`, leaf first, that holds `model`.
    pub fn new(layers: Vec<Image>, bytes: Vec<Vec<u8>>, model: Vec<u8>, seed: u64) -> Rig {
        let past = Some(Past::new(bytes[0].clone()));
        let files = MemoryIo { past, ..MemoryIo::random(bytes, seed) };
        let disk = Disk::new(layers, Options::default()).unwrap();
        Rig { disk, files, model, last: 0, answers: Vec::new() }
    }

    fn begin(&mut self, operation: Operation, at: u64, len: u64, memory: Segments) -> u64 {
        self.last += 1;
        let request =
            Request::new(operation, Span { at: DiskOffset(at), len }, memory, Token(self.last), &self.disk.geometry())
                .unwrap();
        self.disk.submit(request, &mut self.files);
        self.last
    }

    /// Begins a write of one byte, which the model has at once.
    pub fn write(&mut self, at: u64, len: u64, byte: u8) {
        self.model[index(at)..index(at + len)].fill(byte);
        self.begin(Operation::Write { durable: false }, at, len, Segments::copy_of(&vec![byte; index(len)]));
    }

    /// Begins a write of zeroes.
    pub fn zero(&mut self, at: u64, len: u64) {
        self.model[index(at)..index(at + len)].fill(0);
        self.begin(Operation::WriteZeroes { free: true, durable: false }, at, len, Segments::empty());
    }

    /// Makes the disk larger.
    #[allow(dead_code, reason = "not every test has a disk that grows")]
    pub fn grow(&mut self, len: u64) -> Result<(), disk::ImageError> {
        self.disk.quiesce();
        let grown = self.disk.grow(len);
        self.disk.resume(&mut self.files);
        self.model.resize(if grown.is_ok() { index(len) } else { self.model.len() }, 0);
        grown
    }

    pub fn flush(&mut self) {
        self.begin(Operation::Flush, 0, 0, Segments::empty());
    }

    /// One operation of a file.
    pub fn step(&mut self) {
        let mut done = Vec::new();
        self.files.reap(Until::Now, &mut done).unwrap();
        done.into_iter().for_each(|done| self.disk.settle(done, &mut self.files));
        self.disk.retry(&mut self.files);
        while let Some((request, status)) = self.disk.answer() {
            self.answers.push((request.retire().0, status));
        }
    }

    /// Whether something is under way.
    pub fn is_busy(&self) -> bool {
        !self.disk.is_idle()
    }

    /// Until nothing is under way. Whether all has gone well.
    pub fn finish(&mut self) -> bool {
        let mut done = Vec::new();
        for _ in 0..1_000_000 {
            self.files.reap(Until::Now, &mut done).unwrap();
            for done in done.drain(..) {
                self.disk.settle(done, &mut self.files);
            }
            self.disk.retry(&mut self.files);
            while let Some((request, status)) = self.disk.answer() {
                self.answers.push((request.retire().0, status));
            }
            if self.disk.is_idle() {
                return self.answers.drain(..).all(|(_, status)| status == Status::Done);
            }
        }
        panic!("the disk does not come to rest");
    }

    /// A read of all, compared with the model.
    pub fn verify(&mut self) {
        let step = 1 << 20;
        let len = self.disk.geometry().len;
        for at in (0..len).step_by(step) {
            let size = len.min(at + step as u64) - at;
            let memory = Segments::zeroed(index(size));
            self.begin(Operation::Read, at, size, memory.clone());
            assert!(self.finish(), "the read at {at} failed");
            let found = memory.to_vec();
            let expected = &self.model[index(at)..index(at + size)];
            if let Some(wrong) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
                let (found, expected) = (found[wrong], expected[wrong]);
                panic!("byte {} is {found} and should be {expected}", index(at) + wrong);
            }
        }
    }

    /// All that a reader finds.
    pub fn read_all(&mut self) -> Vec<u8> {
        let len = self.disk.geometry().len;
        let memory = Segments::zeroed(index(len));
        self.begin(Operation::Read, 0, len, memory.clone());
        assert!(self.finish(), "the read failed");
        memory.to_vec()
    }

    /// The leaf.
    pub fn leaf(&self) -> &Image {
        &self.disk.layers()[0].format
    }

    /// What the leaf has written down.
    pub fn dirty(&self) -> usize {
        self.leaf().dirty()
    }
}
