//! Files in memory behind an [`Io`], for tests: a test chooses the order and the results of operations.
//!
//! It is included by path, below a module that has the names of the crate `disk`: for the unit tests of `disk`, the
//! types of a library would be other types.

#![allow(dead_code, reason = "each test uses only part of it")]
#![allow(clippy::cast_possible_truncation, reason = "sizes of tests fit")]

use fastrand::Rng;

use super::{Action, Allocation, EngineFailed, FileDone, FileError, FileId, FileOffset, FileOp, Io, Until};

/// The operations that complete when the engine is reaped, and their order.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// One operation, chosen at random.
    Random,
    /// All, in the order of their submission.
    Oldest,
    /// All, the newest first.
    Newest,
    /// All, the middle one of those that are left first.
    Middle,
}

type Fault = Box<dyn FnMut(&FileOp) -> Option<FileError>>;

/// The files, and the operations in flight.
pub struct MemoryIo {
    pub bytes: Vec<Vec<u8>>,
    pub queue: Vec<FileOp>,
    /// The maximum number of operations in flight.
    pub room: usize,
    pub order: Order,
    /// No operation completes.
    pub hold: bool,
    pub random: Rng,
    /// (file, whether a write, offset, length) of everything pushed.
    pub log: Vec<(u8, bool, u64, u64)>,
    /// Called with each operation before it is queued.
    pub check: fn(&MemoryIo, &FileOp),
    /// Returns the error of an operation that must fail.
    pub fault: Fault,
    pub fail_sync: bool,
    /// One of this number of reads, writes and deallocations fails, at random.
    pub fail_one_in: Option<u64>,
    /// The number of operations, syncs included, before the one that fails.
    pub fail_nth: Option<usize>,
    /// The file whose storage has no space left.
    pub full: Option<u8>,
    /// Panics at an operation that reaches beyond the end of its file.
    pub bounded: bool,
    pub can_deallocate: bool,
    /// Only whole blocks of 4096 bytes can be deallocated.
    pub coarse: bool,
    /// The durable state of the first file, in tests that lose power.
    pub past: Option<Past>,
}

impl MemoryIo {
    /// Operations complete when the engine is reaped, in the order of their submission.
    pub fn new(bytes: Vec<Vec<u8>>) -> MemoryIo {
        MemoryIo {
            bytes,
            queue: Vec::new(),
            room: usize::MAX,
            order: Order::Oldest,
            hold: false,
            random: Rng::with_seed(0),
            log: Vec::new(),
            check: |_, _| (),
            fault: Box::new(|_| None),
            fail_sync: false,
            fail_one_in: None,
            fail_nth: None,
            full: None,
            bounded: false,
            can_deallocate: true,
            coarse: false,
            past: None,
        }
    }

    /// At most 16 operations in flight, which complete in an order that follows from the seed.
    pub fn random(bytes: Vec<Vec<u8>>, seed: u64) -> MemoryIo {
        MemoryIo { room: 16, order: Order::Random, random: Rng::with_seed(seed), ..MemoryIo::new(bytes) }
    }

    /// The durable state of the first file. Panics in a test that does not lose power.
    pub fn past(&self) -> &Past {
        self.past.as_ref().expect("its past is of no interest")
    }

    pub fn draw(&mut self, below: u64) -> u64 {
        self.random.u64(..below)
    }

    /// Removes the first operation that `which` picks; the test performs it later.
    pub fn take(&mut self, which: impl FnMut(&FileOp) -> bool) -> FileOp {
        let at = self.queue.iter().position(which).expect("no such operation is under way");
        self.queue.remove(at)
    }

    /// Performs an operation in flight.
    pub fn finish(&mut self, which: usize) -> FileDone {
        let op = self.queue.remove(which);
        self.perform(op)
    }

    pub fn perform(&mut self, op: FileOp) -> FileDone {
        let result = self.execute(&op);
        FileDone { op, result }
    }

    fn judge(&mut self, op: &FileOp) -> Result<(), FileError> {
        if let Some(one_in) = self.fail_one_in.filter(|_| !matches!(op.action, Action::SyncData)) {
            if self.draw(one_in) == 0 {
                return Err(FileError::Failed(5));
            }
        }
        if let Some(left) = self.fail_nth {
            self.fail_nth = left.checked_sub(1);
            if left == 0 {
                return Err(FileError::Failed(5));
            }
        }
        if let Some(error) = (self.fault)(op) {
            return Err(error);
        }
        let (len, (.., at, count)) = (self.bytes[usize::from(op.file.0)].len() as u64, described(op));
        assert!(!self.bounded || at + count <= len, "{op:?} in a file of {len} bytes");
        match &op.action {
            Action::Write { .. } if self.full == Some(op.file.0) && at + count > len => Err(FileError::NoSpace),
            Action::SyncData if self.fail_sync => Err(FileError::Failed(5)),
            Action::Deallocate { .. } if !self.can_deallocate => Err(FileError::Unsupported),
            Action::Deallocate { .. } if self.coarse && (at | count) % 4096 != 0 => Err(FileError::Unsupported),
            _ => Ok(()),
        }
    }

    fn execute(&mut self, op: &FileOp) -> Result<(), FileError> {
        self.judge(op)?;
        if let Some(past) = self.past.as_mut().filter(|_| op.file.0 == 0) {
            past.end(op);
        }
        let file = &mut self.bytes[usize::from(op.file.0)];
        match &op.action {
            Action::Read { at, into } => {
                let mut bytes = vec![0; into.len()];
                let at = (at.0 as usize).min(file.len());
                let len = bytes.len().min(file.len() - at);
                bytes[..len].copy_from_slice(&file[at..at + len]);
                into.copy_from(&bytes);
            }
            Action::Write { at, from } => apply(file, at.0, from.len() as u64, Some(&from.to_vec())),
            Action::SyncData => {}
            Action::Deallocate { at, len } => apply(file, at.0, *len, None),
        }
        Ok(())
    }
}

impl Io for MemoryIo {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.queue.len() >= self.room {
            return Err(op);
        }
        (self.check)(self, &op);
        self.log.push(described(&op));
        if let (Some(past), 0, Action::SyncData) = (&mut self.past, op.file.0, &op.action) {
            past.syncs.push((op.id.0, past.ended));
        }
        self.queue.push(op);
        Ok(())
    }

    fn reap(&mut self, _until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        while !self.hold && !self.queue.is_empty() {
            let count = self.queue.len();
            match self.order {
                Order::Random => {
                    let which = self.draw(count as u64) as usize;
                    let op = self.queue.swap_remove(which);
                    done.push(self.perform(op));
                    break;
                }
                Order::Oldest => done.push(self.finish(0)),
                Order::Newest => done.push(self.finish(count - 1)),
                Order::Middle => done.push(self.finish(count / 2)),
            }
        }
        Ok(())
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        let end = self.bytes[usize::from(file.0)].len() as u64;
        if at.0 < end { Allocation::Data(len) } else { Allocation::Hole(len) }
    }
}

/// The file of an operation, whether it writes, its offset and length.
pub fn described(op: &FileOp) -> (u8, bool, u64, u64) {
    let (write, at, len) = match &op.action {
        Action::Read { at, into } => (false, at.0, into.len() as u64),
        Action::Write { at, from } => (true, at.0, from.len() as u64),
        Action::SyncData => (true, 0, 0),
        Action::Deallocate { at, len } => (true, at.0, *len),
    };
    (op.file.0, write, at, len)
}

/// Writes to a file, which grows as needed, or clears the part of a range that is inside the file.
fn apply(file: &mut Vec<u8>, at: u64, len: u64, bytes: Option<&[u8]>) {
    let (at, end) = (at as usize, (at + len) as usize);
    match bytes {
        Some(bytes) => {
            file.resize(file.len().max(end), 0);
            file[at..end].copy_from_slice(bytes);
        }
        None => {
            let end = end.min(file.len());
            file[at.min(end)..end].fill(0);
        }
    }
}

/// The durable content of a file, and later operations of which power loss keeps any sectors.
#[derive(Default)]
pub struct Past {
    pub durable: Vec<u8>,
    /// Offset, length, bytes and number of each operation that has ended since; without bytes: a deallocation.
    since: Vec<(u64, u64, Option<Vec<u8>>, u64)>,
    ended: u64,
    /// The id of each sync in flight, and the number of operations that had ended at its submission.
    syncs: Vec<(u64, u64)>,
}

impl Past {
    /// A file whose content is durable.
    pub fn new(durable: Vec<u8>) -> Past {
        Past { durable, ..Past::default() }
    }

    fn end(&mut self, op: &FileOp) {
        self.ended += 1;
        match &op.action {
            Action::Write { at, from } => {
                self.since.push((at.0, from.len() as u64, Some(from.to_vec()), self.ended));
            }
            Action::Deallocate { at, len } => self.since.push((at.0, *len, None, self.ended)),
            Action::SyncData => self.synced(op.id.0),
            Action::Read { .. } => {}
        }
    }

    fn synced(&mut self, id: u64) {
        let Some(place) = self.syncs.iter().position(|&(other, _)| other == id) else { return };
        let (_, covered) = self.syncs.swap_remove(place);
        let (done, left): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.since).into_iter().partition(|&(_, _, _, number)| number <= covered);
        self.since = left;
        for (at, len, bytes, _) in done {
            apply(&mut self.durable, at, len, bytes.as_deref());
        }
    }

    /// Returns the file after a power loss: all, some or none of the sectors of each operation that is not durable.
    pub fn after_power_loss(&self, random: &mut Rng) -> Vec<u8> {
        let mut file = self.durable.clone();
        for (at, len, bytes, _) in &self.since {
            let mode = random.u8(..3);
            for sector in 0..len / 512 {
                if mode == 0 || (mode == 1 && random.bool()) {
                    continue;
                }
                let from = sector as usize * 512;
                apply(&mut file, at + sector * 512, 512, bytes.as_ref().map(|bytes| &bytes[from..from + 512]));
            }
        }
        file
    }
}
