//! Statistics of a Xen guest's disk where tools of old look for them: `/dev/shm/vbd3-<domid>-<devid>/statistics`.
//!
//! The file holds what tapdisk3 has in `struct blkback_stats` (blktap, include/blktap3.h): fourteen numbers of eight bytes. Tools
//! of today read another file (docs/xen.md).
//! It is written through memory that readers share, once for a batch of requests; a disk that is idle writes nothing. Knows
//! nothing of rings. Keeps: a reader never sees half of a number, and what it sees of one request is at most one batch old.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use disk::{Operation, Request};
use memory::{Mapping, Shared};
use rustix::fs::{FlockOperation, flock};

/// Numbers in the structure.
const FIELDS: usize = 14;
const DISCARDS: usize = 0;
const FLUSHES: usize = 1;
// The third counts requests for which there was no memory. Here room is there before one is taken in: it stays zero.
const READS: usize = 3;
const WRITES: usize = 8;
/// From the first number of reads, or of writes, on.
const ASKED: usize = 0;
const ANSWERED: usize = 1;
const SECTORS: usize = 2;
const SUM_MICROSECONDS: usize = 3;
const MAX_MICROSECONDS: usize = 4;
/// Bits of the numbers that an answer changes, from the first one on.
const BY_ANSWER: u32 = (1 << ANSWERED) | (1 << SECTORS) | (1 << SUM_MICROSECONDS) | (1 << MAX_MICROSECONDS);

/// Bytes of the file.
const LEN: usize = FIELDS * 8;

/// The statistics of one disk. The file goes with it.
pub struct BlkbackStats {
    directory: PathBuf,
    #[allow(dead_code, reason = "held for its lock, by which others see that it is somebody's")]
    file: File,
    page: Shared,
    fields: [u64; FIELDS],
    /// Which of them have changed since readers were told: a bit each.
    changed: u32,
}

impl BlkbackStats {
    /// Begins to count in a file below `place`. One that a killed process has left is replaced.
    pub fn open(place: &Path, domain: u16, device: u32) -> io::Result<BlkbackStats> {
        let directory = directory(place, domain, device);
        fs::create_dir_all(&directory)?;
        let path = directory.join("statistics");
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.set_len(u64::try_from(LEN).map_err(io::Error::other)?)?;
        let page = Shared::of(Mapping::of_file(file.as_fd(), 0, LEN)?);
        Ok(BlkbackStats { directory, file, page, fields: [0; FIELDS], changed: 0 })
    }

    /// A request was taken from its ring.
    pub fn came(&mut self, request: &Request) {
        let field = match request.operation() {
            Operation::Read => READS + ASKED,
            Operation::Write { .. } => WRITES + ASKED,
            Operation::Flush => FLUSHES,
            Operation::Discard | Operation::WriteZeroes { .. } | Operation::Extents => DISCARDS,
        };
        self.fields[field] += 1;
        self.changed |= 1 << field;
    }

    /// A request is answered, at this moment of the clock by which it was taken in.
    pub fn answered(&mut self, request: &Request, at: u64) {
        let first = match request.operation() {
            Operation::Read => READS,
            Operation::Write { .. } => WRITES,
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } | Operation::Extents => return,
        };
        let took = at.saturating_sub(request.taken) / 1000;
        let fields = &mut self.fields;
        fields[first + ANSWERED] += 1;
        fields[first + SECTORS] = fields[first + SECTORS].wrapping_add(request.span().len / 512);
        fields[first + SUM_MICROSECONDS] = fields[first + SUM_MICROSECONDS].wrapping_add(took);
        fields[first + MAX_MICROSECONDS] = fields[first + MAX_MICROSECONDS].max(took);
        self.changed |= BY_ANSWER << first;
    }

    /// Lets readers see what has changed.
    pub fn publish(&mut self) {
        while self.changed != 0 {
            let field = usize::try_from(self.changed.trailing_zeros()).unwrap_or(0);
            self.changed &= self.changed - 1;
            let stored = self.page.store_u64_native(field * 8, self.fields[field]);
            debug_assert!(stored.is_some(), "the file is as long as the structure");
        }
    }
}

impl Drop for BlkbackStats {
    fn drop(&mut self) {
        // What stays is replaced by the next disk of this name, and tells readers of a disk that does nothing.
        remove_file_and_directory(&self.directory).unwrap_or_default();
    }
}

/// Removes the statistics of a disk that a killed process has left. Those that a process writes stay.
pub fn remove(place: &Path, domain: u16, device: u32) -> io::Result<()> {
    let directory = directory(place, domain, device);
    let opened = File::open(directory.join("statistics"));
    match opened.and_then(|file| Ok(flock(file, FlockOperation::NonBlockingLockShared)?)) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => remove_file_and_directory(&directory),
    }
}

fn directory(place: &Path, domain: u16, device: u32) -> PathBuf {
    place.join(format!("vbd3-{domain}-{device}"))
}

fn remove_file_and_directory(directory: &Path) -> io::Result<()> {
    for removed in [fs::remove_file(directory.join("statistics")), fs::remove_dir(directory)] {
        match removed {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use disk::{Geometry, Span, Token};
    use memory::Segments;

    use super::*;

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

    fn request(operation: Operation, len: u64, token: u64) -> Request {
        let memory = match operation {
            Operation::Read | Operation::Write { .. } => Segments::zeroed(usize::try_from(len).unwrap()),
            _ => Segments::empty(),
        };
        Request::new(operation, Span { at: 0, len }, memory, Token(token), &GEOMETRY).unwrap()
    }

    /// As the first xsiostat and rrdp-iostat read it: the file from its beginning, numbers as this machine has them.
    fn read(place: &Path) -> Vec<u64> {
        let bytes = fs::read(place.join("vbd3-7-51728/statistics")).unwrap();
        bytes.chunks_exact(8).map(|number| u64::from_ne_bytes(number.try_into().unwrap())).collect()
    }

    const WRITE: Operation = Operation::Write { durable: false };

    #[test]
    fn readers_find_every_number_in_its_place() {
        let place = tempfile::tempdir().unwrap();
        let mut stats = BlkbackStats::open(place.path(), 7, 51728).unwrap();
        assert_eq!(read(place.path()), [0; 14]);
        let at = |micros: u64| micros * 1000;
        let mut requests =
            [request(Operation::Read, 4096, 1), request(Operation::Read, 8192, 2), request(WRITE, 512, 3)];
        for request in &mut requests {
            request.taken = at(100);
            stats.came(request);
        }
        for (request, answered) in requests.iter().zip([130, 120, 105]) {
            stats.answered(request, at(answered));
        }
        for other in [request(Operation::Flush, 0, 4), request(Operation::Discard, 4096, 5)] {
            stats.came(&other);
            stats.answered(&other, at(200));
            other.retire();
        }
        stats.came(&request_kept(WRITE, 6));
        stats.publish();
        assert_eq!(read(place.path()), [1, 1, 0, 2, 2, 24, 50, 30, 2, 1, 1, 5, 5, 0]);
        for request in requests {
            request.retire();
        }
    }

    /// One that is still under way at the end of its test.
    fn request_kept(operation: Operation, token: u64) -> std::mem::ManuallyDrop<Request> {
        std::mem::ManuallyDrop::new(request(operation, 512, token))
    }

    #[test]
    fn a_batch_is_seen_when_it_is_published_and_the_file_goes_with_the_disk() {
        let place = tempfile::tempdir().unwrap();
        let mut stats = BlkbackStats::open(place.path(), 7, 51728).unwrap();
        stats.came(&request_kept(WRITE, 1));
        assert_eq!(read(place.path())[8], 0);
        stats.publish();
        assert_eq!(read(place.path())[8], 1);
        stats.answered(&request_kept(WRITE, 2), 7000);
        stats.publish();
        assert_eq!(read(place.path())[8..], [1, 1, 1, 7, 7, 0]);
        drop(stats);
        assert!(!place.path().join("vbd3-7-51728").exists());
    }

    #[test]
    fn what_a_killed_process_has_left_is_replaced() {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("vbd3-7-51728")).unwrap();
        fs::write(place.path().join("vbd3-7-51728/statistics"), [0xff; 200]).unwrap();
        let _stats = BlkbackStats::open(place.path(), 7, 51728).unwrap();
        assert_eq!(read(place.path()), [0; 14]);
    }
}
