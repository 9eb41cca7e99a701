//! Statistics of a Xen guest's disk where tools expect those of tapdisk3: `/dev/shm/vbd3-<domid>-<devid>/statistics`,
//! and `/dev/shm/td3-<pid>/vbd-<domid>-<devid>` for tools that look up the serving process in xenstore.
//!
//! The first file contains `struct blkback_stats` (blktap, include/blktap3.h), fourteen numbers of eight bytes; the
//! second `struct stats` (drivers/tapdisk-metrics-stats.h), a version and eleven numbers, most of them the same. Both
//! are written through memory shared with readers, once per batch of requests; an idle disk writes nothing. It knows
//! nothing about rings. Invariant: a reader never sees a torn number, and its view of a request is at most one batch
//! old.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;

use disk::size::in_memory;
use disk::{Operation, Request, Status};
use memory::{Mapping, Shared};
use vm::xen::statistics::{Files, Statistics, TD3_LEN, VBD3_LEN};

/// The numbers in `struct blkback_stats`.
const FIELDS: usize = 14;
const DISCARDS: usize = 0;
const FLUSHES: usize = 1;
// The third counts requests for which there was no memory. Here a request is only accepted with memory, so it stays
// zero.
const READS: usize = 3;
const WRITES: usize = 8;
/// Offsets from the first number of reads, or of writes.
const ASKED: usize = 0;
const ANSWERED: usize = 1;
const SECTORS: usize = 2;
const SUM_MICROSECONDS: usize = 3;
const MAX_MICROSECONDS: usize = 4;
/// Bits of the numbers that a completion changes, relative to the first one.
const BY_ANSWER: u32 = (1 << ANSWERED) | (1 << SECTORS) | (1 << SUM_MICROSECONDS) | (1 << MAX_MICROSECONDS);

// The second file: a version of four bytes, padding of four, eleven numbers.
const _: () = assert!(VBD3_LEN == FIELDS * 8 && TD3_LEN == 8 + 11 * 8);

/// The offset of the number of failed requests.
const TD3_ERRORS_AT: usize = 80;
/// The offset of each number in `struct stats`, if it is there. Its other numbers, of requests without memory and the
/// flags, stay zero.
const TD3_AT: [Option<usize>; FIELDS] = {
    let mut at = [None; FIELDS];
    let mut field = 0;
    while field <= SUM_MICROSECONDS {
        at[READS + field] = Some(16 + field * 8);
        at[WRITES + field] = Some(48 + field * 8);
        field += 1;
    }
    at
};

/// The statistics of one disk. Their files are removed with it, unless they were passed to it.
pub struct BlkbackStats {
    // Dropped first, so that no file is removed while it is written.
    vbd3: Published,
    td3: Published,
    #[allow(dead_code, reason = "dropped at the end")]
    own: Option<Own>,
    fields: [u64; FIELDS],
    /// Requests that failed.
    errors: u64,
    /// The numbers that have changed since they were last published, one bit each, and another bit for the errors.
    changed: u32,
}

impl BlkbackStats {
    /// Creates files and starts counting in them.
    pub fn open(statistics: &Statistics) -> io::Result<BlkbackStats> {
        let files = statistics.make(std::process::id())?;
        let own = Own(statistics.clone());
        Ok(BlkbackStats { own: Some(own), ..BlkbackStats::over(files)? })
    }

    /// Starts counting in files that another process has created and removes.
    pub fn over(Files { vbd3, td3 }: Files) -> io::Result<BlkbackStats> {
        let (vbd3, td3) = (Published::of(vbd3, VBD3_LEN)?, Published::of(td3, TD3_LEN)?);
        Ok(BlkbackStats { vbd3, td3, own: None, fields: [0; FIELDS], errors: 0, changed: 0 })
    }

    /// Counts a request that was taken from its ring.
    pub fn came(&mut self, request: &Request) {
        let field = match request.operation() {
            Operation::Read => READS + ASKED,
            Operation::Write { .. } | Operation::Patch { .. } => WRITES + ASKED,
            Operation::Flush => FLUSHES,
            Operation::Discard | Operation::WriteZeroes { .. } | Operation::Extents { .. } => DISCARDS,
        };
        self.fields[field] += 1;
        self.changed |= 1 << field;
    }

    /// Counts the completion of a request; `at` is in the clock of its `taken` time.
    pub fn answered(&mut self, request: &Request, status: Status, at: u64) {
        // Unsupported requests are the guest's fault, not the disk's.
        if matches!(status, Status::Failed | Status::NoSpace) {
            self.errors += 1;
            self.changed |= 1 << FIELDS;
        }
        let first = match request.operation() {
            Operation::Read => READS,
            Operation::Write { .. } | Operation::Patch { .. } => WRITES,
            Operation::Flush | Operation::Discard | Operation::WriteZeroes { .. } | Operation::Extents { .. } => return,
        };
        let took = at.saturating_sub(request.taken) / 1000;
        let fields = &mut self.fields;
        fields[first + ANSWERED] += 1;
        fields[first + SECTORS] = fields[first + SECTORS].wrapping_add(request.span().len / 512);
        fields[first + SUM_MICROSECONDS] = fields[first + SUM_MICROSECONDS].wrapping_add(took);
        fields[first + MAX_MICROSECONDS] = fields[first + MAX_MICROSECONDS].max(took);
        self.changed |= BY_ANSWER << first;
    }

    /// Publishes the changed numbers to readers.
    pub fn publish(&mut self) {
        while self.changed != 0 {
            let field = in_memory(self.changed.trailing_zeros().into());
            self.changed &= self.changed - 1;
            if field == FIELDS {
                self.td3.store(TD3_ERRORS_AT, self.errors);
                continue;
            }
            let value = self.fields[field];
            self.vbd3.store(field * 8, value);
            if let Some(at) = TD3_AT[field] {
                self.td3.store(at, value);
            }
        }
    }
}

/// A file of numbers that is shared with readers.
struct Published {
    #[allow(dead_code, reason = "held for its lock, which shows others that it is in use")]
    file: File,
    page: Shared,
}

impl Published {
    /// Maps a file. One that is too short is rejected: storing to it would kill the process.
    fn of(file: File, len: usize) -> io::Result<Published> {
        if usize::try_from(file.metadata()?.len()).is_ok_and(|found| found < len) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a file has less than {len} bytes")));
        }
        let page = Shared::of(Mapping::of_shrinking_file(file.as_fd(), len)?);
        Ok(Published { file, page })
    }

    fn store(&self, at: usize, value: u64) {
        let stored = self.page.store_u64_native(at, value);
        debug_assert!(stored.is_some(), "the file is as long as the structure");
    }
}

/// The files of this process, removed when this is dropped.
struct Own(Statistics);

impl Drop for Own {
    fn drop(&mut self) {
        self.0.remove_made(std::process::id());
    }
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::path::{Path, PathBuf};

    use disk::{DiskOffset, Geometry, Span, Token};
    use memory::Segments;
    use xen::DomId;

    use super::*;

    fn of(place: &tempfile::TempDir) -> Statistics {
        Statistics::of(place.path(), DomId(7), "xvdb".parse().unwrap())
    }

    const GEOMETRY: Geometry =
        Geometry { len: 1 << 20, block: 512, physical_block: 4096, discard: 4096, chs: None, read_only: false };

    fn request(operation: Operation, len: u64, token: u64) -> Request {
        let memory = match operation {
            Operation::Read | Operation::Write { .. } => Segments::zeroed(usize::try_from(len).unwrap()),
            _ => Segments::empty(),
        };
        Request::new(operation, Span { at: DiskOffset(0), len }, memory, Token(token), &GEOMETRY).unwrap()
    }

    /// Reads the file like the first xsiostat and rrdp-iostat: from its beginning, numbers in native byte order.
    fn read(place: &Path) -> Vec<u64> {
        let bytes = fs::read(place.join("vbd3-7-51728/statistics")).unwrap();
        bytes.chunks_exact(8).map(|number| u64::from_ne_bytes(number.try_into().unwrap())).collect()
    }

    fn td3(place: &Path) -> PathBuf {
        place.join(format!("td3-{}", std::process::id()))
    }

    /// Reads the whole file, like today's libxenstat, rrdp-iostat and xsiostat.
    fn read_td3(place: &Path) -> Vec<u8> {
        fs::read(td3(place).join("vbd-7-51728")).unwrap()
    }

    /// The expected contents: the version, padding and the numbers, in native byte order.
    fn td3_bytes(numbers: [u64; 11]) -> Vec<u8> {
        let mut bytes = [1u32.to_ne_bytes(), [0; 4]].concat();
        numbers.iter().for_each(|number| bytes.extend(number.to_ne_bytes()));
        bytes
    }

    const WRITE: Operation = Operation::Write { durable: false };

    #[test]
    fn every_counter_is_at_its_offset() {
        let place = tempfile::tempdir().unwrap();
        let mut stats = BlkbackStats::open(&of(&place)).unwrap();
        assert_eq!(read(place.path()), [0; 14]);
        assert_eq!(read_td3(place.path()), td3_bytes([0; 11]));
        let at = |micros: u64| micros * 1000;
        let mut requests =
            [request(Operation::Read, 4096, 1), request(Operation::Read, 8192, 2), request(WRITE, 512, 3)];
        for request in &mut requests {
            request.taken = at(100);
            stats.came(request);
        }
        for (request, answered) in requests.iter().zip([130, 120, 105]) {
            stats.answered(request, Status::Done, at(answered));
        }
        for other in [request(Operation::Flush, 0, 4), request(Operation::Discard, 4096, 5)] {
            stats.came(&other);
            stats.answered(&other, Status::Refused, at(200));
            other.retire();
        }
        stats.came(&request_kept(WRITE, 6));
        stats.publish();
        assert_eq!(read(place.path()), [1, 1, 0, 2, 2, 24, 50, 30, 2, 1, 1, 5, 5, 0]);
        let numbers = read_td3(place.path());
        assert_eq!(numbers.len(), 96);
        assert_eq!(numbers, td3_bytes([0, 2, 2, 24, 50, 2, 1, 1, 5, 0, 0]));
        for request in requests {
            request.retire();
        }
    }

    /// A request that is still in flight at the end of its test.
    fn request_kept(operation: Operation, token: u64) -> std::mem::ManuallyDrop<Request> {
        std::mem::ManuallyDrop::new(request(operation, 512, token))
    }

    #[test]
    fn a_batch_is_visible_once_published_and_files_are_removed_at_the_end() {
        let place = tempfile::tempdir().unwrap();
        let mut stats = BlkbackStats::open(&of(&place)).unwrap();
        stats.came(&request_kept(WRITE, 1));
        assert_eq!(read(place.path())[8], 0);
        assert_eq!(read_td3(place.path()), td3_bytes([0; 11]));
        stats.publish();
        assert_eq!(read(place.path())[8], 1);
        assert_eq!(read_td3(place.path()), td3_bytes([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]));
        stats.answered(&request_kept(WRITE, 2), Status::Failed, 7000);
        stats.publish();
        assert_eq!(read(place.path())[8..], [1, 1, 1, 7, 7, 0]);
        assert_eq!(read_td3(place.path()), td3_bytes([0, 0, 0, 0, 0, 1, 1, 1, 7, 1, 0]), "it has failed");
        drop(stats);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_changed_counters_are_stored() {
        let place = tempfile::tempdir().unwrap();
        let mut stats = BlkbackStats::open(&of(&place)).unwrap();
        // Bytes written by the test remain unless something else writes them.
        fs::write(place.path().join("vbd3-7-51728/statistics"), [0xff; VBD3_LEN]).unwrap();
        fs::write(td3(place.path()).join("vbd-7-51728"), [0xff; TD3_LEN]).unwrap();
        stats.publish();
        assert_eq!(read_td3(place.path()), [0xff; TD3_LEN]);
        stats.came(&request_kept(WRITE, 1));
        stats.publish();
        let mut numbers = [u64::MAX; FIELDS];
        numbers[8] = 1;
        assert_eq!(read(place.path()), numbers);
        let mut bytes = [0xff; TD3_LEN];
        bytes[48..56].copy_from_slice(&1u64.to_ne_bytes());
        assert_eq!(read_td3(place.path()), bytes);
    }

    #[test]
    fn passed_files_are_written_and_stay() {
        let place = tempfile::tempdir().unwrap();
        let files = of(&place).make(std::process::id()).unwrap();
        let mut stats = BlkbackStats::over(files).unwrap();
        stats.came(&request_kept(WRITE, 1));
        stats.publish();
        drop(stats);
        assert_eq!(read(place.path())[8], 1);
        assert_eq!(read_td3(place.path()), td3_bytes([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]));
        let short = || tempfile::tempfile().unwrap();
        assert!(BlkbackStats::over(Files { vbd3: short(), td3: short() }).is_err());
    }
}
