//! Files and an I/O engine in memory, for the fuzz targets of image formats.
//!
//! Knows nothing of images. What is read behind the end of a file is zero; what is written far beyond all of them meets
//! the end of the storage.

use std::collections::{HashMap, VecDeque};

use disk::{
    Action, Allocation, EngineFailed, FileDone, FileError, FileId, FileOffset, FileOp, Io, ReadFault, Source, Until,
};

/// Bytes of a sector.
pub const SECTOR: u64 = 512;

/// A file of which only the sectors that were written take memory, so that a hostile table cannot take all of it.
#[derive(Clone, Default)]
pub struct Sparse {
    /// Its length in bytes.
    pub len: u64,
    /// What was written, by the number of the sector.
    pub sectors: HashMap<u64, [u8; 512]>,
}

impl Sparse {
    /// Writes whole sectors; the last one is filled up with zeros.
    pub fn write(&mut self, at: FileOffset, bytes: &[u8]) {
        assert_eq!(at % SECTOR, 0, "a write at byte {at}");
        for (number, chunk) in (at / SECTOR..).zip(bytes.chunks(512)) {
            let mut sector = [0; 512];
            sector[..chunk.len()].copy_from_slice(chunk);
            self.sectors.insert(number, sector);
        }
        let end = at.checked_add(bytes.len() as u64).expect("a write behind the largest file");
        self.len = self.len.max(end.0);
    }

    /// Reads; what was never written is zero.
    pub fn read(&self, at: FileOffset, bytes: &mut [u8]) {
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

    fn read_at(&mut self, at: FileOffset, bytes: &mut [u8]) -> Result<(), ReadFault> {
        let end = at.saturating_add(bytes.len() as u64);
        if end.0 > self.len {
            return Err(ReadFault::PastEnd(end));
        }
        self.read(at, bytes);
        Ok(())
    }
}

/// An engine that does each operation when it is reaped, the newest first.
pub struct Engine {
    /// The files of the chain, leaf first: only that is written.
    pub files: Vec<Sparse>,
    queue: VecDeque<FileOp>,
}

impl Engine {
    /// An engine for these files.
    pub fn new(files: Vec<Sparse>) -> Engine {
        Engine { files, queue: VecDeque::new() }
    }

    /// Whether nothing is left to do.
    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

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
                if at.saturating_add(from.len() as u64) > FileOffset(1 << 41) {
                    return Err(FileError::NoSpace);
                }
                file.write(*at, &from.to_vec());
            }
            Action::SyncData => {}
            Action::Deallocate { at, len } => {
                assert_eq!(op.file, FileId(0), "a parent was written");
                file.sectors.retain(|sector, _| !(*at / SECTOR..(*at + *len) / SECTOR).contains(sector));
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

    fn allocated(&mut self, _file: FileId, _at: FileOffset, len: u64) -> Allocation {
        Allocation::Data(len)
    }
}
