//! The I/O engine of the simulator: operations stay pending until the run decides that they complete.
//!
//! Knows nothing about disks or formats. The run chooses whether a write becomes visible to reads at its submission or
//! at its completion, because storage may do either. On storage with units larger than sectors, the disk's aligner is
//! above it, as above the real engine; unaligned operations make it panic. For an image with a data file, the layer
//! that combines the two files is above that, and on top transfers may be split and merged.
//!
//! Invariant: every accepted operation is finished exactly once, by [`SimIo::finish`].

mod align;
mod new_file;
mod shape;

use disk::{
    Action, Aligner, Allocation, DataFiles, EngineFailed, FileDone, FileError, FileId, FileOffset, FileOp, Io, Shape,
    ShapePolicy, Source, Until,
};

use crate::fault::{Fault, FaultKind};
use crate::file::{Coverage, SimFile, WriteId};
use crate::media::{DATA_SECTOR, Media, Unwritten};
use crate::planted::Planted;
use crate::random::Random;
use crate::sector::{SECTOR, Sector, sectors_of};
use align::Misaligned;
use shape::{Misshapen, Whole};

/// A queue without limit.
pub const ROOM: usize = usize::MAX;

/// When reads see a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Visible {
    /// From its submission.
    AtPush,
    /// From its completion.
    AtCompletion,
}

#[derive(Clone)]
struct Pending {
    op: FileOp,
    /// Set for a write or deallocation that is already visible.
    write: Option<WriteId>,
    /// The coverage of a sync.
    coverage: Coverage,
    /// The coverage in other files of a sync that a planted bug extends.
    others: Vec<(FileId, Coverage)>,
    error: Option<FileError>,
}

/// Simulated storage under the control of a test.
pub struct SimIo {
    storage: Storage,
    /// Splits and merges transfers, if enabled.
    shape: Option<Shape>,
    /// Bugs planted in `shape`.
    misshapen: Misshapen,
    /// Extends operations to the storage's units.
    aligner: Aligner,
    /// Bugs planted in the aligner.
    misaligned: Misaligned,
    /// Combines images with their data files.
    data_files: DataFiles,
    /// A planted bug: a sync of an image does not include its data file.
    forgets_data: bool,
}

/// Flag in the number of a data file, which is otherwise that of its image.
const DATA: u8 = 0x80;

/// Whether a file is the data file of an image.
fn is_data(id: FileId) -> bool {
    id.0 & DATA != 0
}

/// The sector of a file that contains a byte.
fn sector_of(id: FileId, at: FileOffset) -> u64 {
    at / SECTOR + if is_data(id) { DATA_SECTOR } else { 0 }
}

/// The storage below the aligner.
#[derive(Clone)]
pub(crate) struct Storage {
    files: Vec<SimFile>,
    /// Its unit in bytes: the smallest write, which is atomic.
    unit: u64,
    /// The files that may be written to.
    writable: Vec<FileId>,
    pending: Vec<Pending>,
    visible: Visible,
    /// Maximum number of pending operations.
    room: usize,
    fault: Option<Fault>,
    /// Number of operations so far to which the fault applies.
    candidates: u64,
    random: Random,
    sync_failed: bool,
    /// Whether writes fail for lack of space.
    full: bool,
    /// Whether `full` was ever set.
    was_full: bool,
}

impl Storage {
    fn new(files: Vec<Media>, unit: u64, visible: Visible, room: usize, fault: Option<Fault>) -> Storage {
        Storage {
            files: files.into_iter().map(SimFile::new).collect(),
            unit,
            writable: vec![FileId(0)],
            pending: Vec::new(),
            visible,
            room,
            fault,
            candidates: 0,
            random: Random::new(fault.map_or(0, |fault| fault.nth)),
            sync_failed: false,
            full: false,
            was_full: false,
        }
    }

    fn after_death(&self, chain: &[FileId], reached: bool) -> Storage {
        let mut io = self.clone();
        for Pending { op, write, error, .. } in std::mem::take(&mut io.pending) {
            let write = if write.is_none() && error.is_none() && reached { io.apply(&op, false) } else { write };
            if let Some(write) = write {
                io.file_mut(op.file).complete(write);
            }
        }
        io.files = chain.iter().map(|id| io.file(*id).clone()).collect();
        io.writable = vec![FileId(0)];
        io
    }

    fn file(&self, id: FileId) -> &SimFile {
        // A disk that names an unknown file has a bug, which fails the test here.
        &self.files[usize::from(id.0 & !DATA)]
    }

    fn add(&mut self, file: SimFile) -> FileId {
        let id = FileId(u8::try_from(self.files.len()).unwrap_or(u8::MAX));
        self.files.push(file);
        self.writable.push(id);
        id
    }

    fn fault_happened(&self) -> bool {
        self.was_full || self.fault.is_some_and(|fault| self.candidates >= fault.nth)
    }

    /// The error of an unsupported operation; panics if a correct caller would never submit it.
    fn refuses(&self, op: &FileOp) -> Option<FileError> {
        let on_it = |other: &&Pending| other.op.file == op.file;
        let ends = |op: &FileOp| matches!(&op.action, Action::Write { at, from } if !self.is_whole(*at, from.len()));
        assert!(!self.pending.iter().filter(on_it).any(|other| ends(&other.op)), "{op:?} beside a file's end");
        let (at, len) = match &op.action {
            Action::Read { at, into: memory } | Action::Write { at, from: memory } => (*at, memory.len()),
            Action::SyncData => (FileOffset(0), 0),
            Action::Deallocate { at, len } => (*at, usize::try_from(*len).unwrap_or(0)),
        };
        let media = self.file(op.file).visible();
        let (is_device, end) = (media.unwritten() == Unwritten::Stale, at + u64::try_from(len).unwrap_or(u64::MAX));
        let changes = matches!(op.action, Action::Write { .. } | Action::Deallocate { .. });
        let inside = end.0 <= media.len() || is_data(op.file);
        assert!(!(is_device && changes) || inside, "{op:?} behind the end of a device");
        if self.is_whole(at, len) {
            return None;
        }
        let end = at.align_down(self.unit) + self.unit;
        match &op.action {
            Action::Deallocate { .. } => is_device.then_some(FileError::Unsupported),
            // A failed write may have extended the file without the caller's knowledge.
            Action::Write { .. } if !is_device && (media.len() < end.0 || self.fault_happened()) => {
                assert!(at + u64::try_from(len).unwrap_or(u64::MAX) <= end, "more than the last unit: {op:?}");
                assert!(!self.pending.iter().any(|other| on_it(&other)), "a file's end beside others: {op:?}");
                None
            }
            _ => panic!("the storage takes units of {} bytes, and no {op:?}", self.unit),
        }
    }

    fn is_whole(&self, at: FileOffset, len: usize) -> bool {
        at % self.unit == 0 && u64::try_from(len).unwrap_or(u64::MAX) % self.unit == 0
    }

    fn next_fault(&mut self, action: &Action) -> Option<FaultKind> {
        let fault = self.fault.filter(|fault| fault.kind.applies_to(action))?;
        self.candidates += 1;
        (self.candidates == fault.nth).then_some(fault.kind)
    }

    fn finish(&mut self, which: usize) -> FileDone {
        let Pending { op, write, coverage, others, error } = self.pending.remove(which);
        if let Action::Read { at, into } = &op.action {
            if error.is_none() {
                let count = u64::try_from(into.len()).unwrap_or(0) / SECTOR;
                into.copy_from(&self.file(op.file).visible().read(sector_of(op.file, *at), count));
            }
        }
        let reaches = write.is_none() && error != Some(FileError::Unsupported);
        let write = if reaches { self.apply(&op, error.is_some()) } else { write };
        for (other, coverage) in others {
            self.file_mut(other).synced(coverage);
        }
        let file = self.file_mut(op.file);
        match (&op.action, write, error) {
            (Action::SyncData, _, None) => file.synced(coverage),
            (Action::SyncData, _, Some(_)) => {
                file.sync_failed(coverage);
                self.sync_failed = true;
            }
            (_, Some(write), _) => file.complete(write),
            _ => {}
        }
        FileDone { op, result: error.map_or(Ok(()), Err) }
    }

    fn file_mut(&mut self, id: FileId) -> &mut SimFile {
        &mut self.files[usize::from(id.0 & !DATA)]
    }

    /// Applies a write or deallocation to the file; one that fails reaches an arbitrary part of it.
    fn apply(&mut self, op: &FileOp, fails: bool) -> Option<WriteId> {
        let (sector, contents, grows) = match &op.action {
            Action::Read { .. } | Action::SyncData => return None,
            Action::Write { at, from } => {
                (sector_of(op.file, *at), sectors_of(&from.to_vec()).collect::<Vec<_>>(), true)
            }
            Action::Deallocate { at, len } => {
                (sector_of(op.file, *at), vec![Sector::ZERO; usize::try_from(len / SECTOR).unwrap_or(0)], false)
            }
        };
        let image = FileId(op.file.0 & !DATA);
        assert!(self.writable.contains(&image), "a file is written to that is not open for writing: {op:?}");
        let reached = |random: &mut Random| !fails || random.below(2) == 0;
        let per_unit = usize::try_from(self.unit / SECTOR).unwrap_or(1);
        let mut landed = Vec::new();
        for part in contents.chunks(per_unit) {
            let reached = reached(&mut self.random);
            landed.extend(part.iter().map(|content| reached.then(|| content.clone())));
        }
        let contents = landed;
        Some(self.file_mut(op.file).apply(sector, contents, grows))
    }
}

impl Io for Storage {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        if self.pending.len() >= self.room {
            return Err(op);
        }
        let refused = self.refuses(&op);
        let fault = self.next_fault(&op.action);
        if fault == Some(FaultKind::Full) {
            return Err(op);
        }
        let coverage = self.file(op.file).coverage(is_data(op.file));
        let full = (self.full && matches!(op.action, Action::Write { .. })).then_some(FileError::NoSpace);
        let error = fault.map(FaultKind::error).or(refused).or(full);
        // A failing write reaches the file when it fails.
        let write = match self.visible {
            Visible::AtPush if error.is_none() => self.apply(&op, false),
            _ => None,
        };
        self.pending.push(Pending { op, write, coverage, others: Vec::new(), error });
        Ok(())
    }

    fn reap(&mut self, _: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        while !self.pending.is_empty() {
            done.push(self.finish(0));
        }
        Ok(())
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        let media = self.file(file).visible();
        let sparse = media.unwritten() == Unwritten::Zeroes;
        let is_hole = |at: FileOffset| sparse && media.written(sector_of(file, at)).is_none();
        let hole = is_hole(at);
        let mut run = SECTOR;
        while run < len && is_hole(at + run) == hole {
            run += SECTOR;
        }
        let run = run.min(len);
        if hole { Allocation::Hole(run) } else { Allocation::Data(run) }
    }
}

impl SimIo {
    /// Storage with the files `files`, leaf first, all durable, and with units of `unit` bytes. Only the leaf may be
    /// written to. With more than `room` operations pending it refuses further ones.
    pub fn new(files: Vec<Media>, unit: u64, visible: Visible, room: usize, fault: Option<Fault>) -> SimIo {
        SimIo::on(Storage::new(files, unit, visible, room, fault))
    }

    fn on(storage: Storage) -> SimIo {
        let mut io = SimIo {
            shape: None,
            misshapen: Misshapen::default(),
            aligner: Aligner::default(),
            misaligned: Misaligned::default(),
            data_files: DataFiles::default(),
            forgets_data: false,
            storage,
        };
        (0..io.storage.files.len()).for_each(|file| io.know(FileId(u8::try_from(file).unwrap_or(u8::MAX))));
        io
    }

    /// Registers a file with the layers above the storage.
    fn know(&mut self, id: FileId) {
        self.align(id);
        if self.storage.file(id).visible().has_data_file() {
            let data = FileId(id.0 | DATA);
            self.data_files.add(id, data);
            // The file is as long as its last unit needs.
            if self.storage.unit > SECTOR {
                self.aligner.add(data, self.storage.unit, None);
            }
        }
    }

    fn align(&mut self, id: FileId) {
        let media = self.storage.file(id).visible();
        // A device is longer than the data written to it.
        let end = (media.unwritten() == Unwritten::Zeroes).then(|| media.len());
        if self.storage.unit > SECTOR {
            self.aligner.add(id, self.storage.unit, end);
            self.misaligned.add(id, self.storage.unit, end);
        }
    }

    /// Plants a bug if it belongs here.
    pub fn plant(&mut self, bug: Option<Planted>) {
        self.misaligned.plant(bug);
        self.misshapen.plant(bug);
        self.forgets_data = bug == Some(Planted::DataFileNotSynced);
    }

    /// Splits and merges transfers from now on.
    pub fn shape(&mut self, policy: ShapePolicy) {
        self.shape = (!policy.is_none()).then(|| Shape::new(policy));
    }

    /// The storage after the death of the process; the files of `chain` are numbered from 0. With `reached`, all
    /// pending writes have reached it, otherwise only those that were visible.
    pub fn after_death(&self, chain: &[FileId], reached: bool) -> SimIo {
        let mut io = SimIo::on(self.storage.after_death(chain, reached));
        io.shape(self.shape.as_ref().map_or_else(ShapePolicy::default, Shape::policy));
        io
    }

    /// The unit of the storage in bytes: the smallest write.
    pub fn unit(&self) -> u64 {
        self.storage.unit
    }

    /// The state of a file.
    pub fn file(&self, id: FileId) -> &SimFile {
        self.storage.file(id)
    }

    /// Allows or forbids writes to a file.
    pub fn set_writable(&mut self, file: FileId, writable: bool) {
        self.storage.writable.retain(|other| *other != file);
        self.storage.writable.extend(writable.then_some(file));
    }

    /// Lets writes fail for lack of space, or succeed again.
    pub fn set_full(&mut self, full: bool) {
        self.storage.full = full;
        self.storage.was_full |= full;
    }

    /// Whether a file is open for writing.
    pub fn is_writable(&self, file: FileId) -> bool {
        self.storage.writable.contains(&file)
    }

    /// The time of the last change of a file, for a caller that records it.
    pub fn modified(&mut self, file: FileId) -> u64 {
        self.storage.file_mut(file).read_time()
    }

    /// Extends a file durably; the new part reads as zero.
    pub fn extend(&mut self, file: FileId, len: u64) {
        self.storage.file_mut(file).extend(len);
        self.align(file);
    }

    /// The visible contents of files.
    pub fn contents(&self, files: &[FileId]) -> Vec<Media> {
        files.iter().map(|id| self.file(*id).visible().clone()).collect()
    }

    /// Number of operations that wait for [`finish`](SimIo::finish). Operations held back for merging count as one
    /// each, because their final number is unknown.
    pub fn pending(&self) -> usize {
        self.storage.pending.len() + self.shape.as_ref().map_or(0, Shape::held)
    }

    /// Number of operations until the one with the fault; `None` if that has occurred or never does.
    pub fn fault_ahead(&self) -> Option<u64> {
        let Storage { fault, candidates, .. } = self.storage;
        fault.and_then(|fault| fault.nth.checked_sub(candidates)).filter(|ahead| *ahead > 0)
    }

    /// Whether the fault has occurred.
    pub fn fault_happened(&self) -> bool {
        self.storage.fault_happened()
    }

    /// Whether a sync has failed.
    pub fn sync_failed(&self) -> bool {
        self.storage.sync_failed
    }

    /// Records that the failed sync was not the disk's own.
    pub fn excuse_failed_sync(&mut self) {
        self.storage.sync_failed = false;
    }

    /// Queues a sync that will report success without effect.
    pub fn push_hollow_sync(&mut self, op: FileOp) {
        let others = Vec::new();
        self.storage.pending.push(Pending { op, write: None, coverage: Coverage::NOTHING, others, error: None });
    }

    /// Queues a sync that will cover all files.
    pub fn push_sync_for_all(&mut self, op: FileOp) {
        let coverage = self.file(op.file).coverage(false);
        let files = (0..).map(FileId).zip(&self.storage.files);
        let others = files.map(|(id, file)| (id, file.coverage(false))).collect();
        self.storage.pending.push(Pending { op, write: None, coverage, others, error: None });
    }

    /// Finishes the `which`th pending operation, counted from the oldest; returns the operations that end with it.
    /// Operations held back are submitted first, and the batch ends: a batch is the operations that a run begins
    /// between two calls.
    pub fn finish(&mut self, which: usize) -> Vec<FileDone> {
        if !self.submit() {
            return Vec::new();
        }
        let ended = self.storage.finish(which % self.storage.pending.len());
        let Some(ended) = self.misshapen.settle(ended, &mut self.storage) else { return Vec::new() };
        let mut done = Vec::new();
        for ended in ended {
            done.extend(self.misaligned.settle(ended, &mut self.aligner, &mut self.storage));
        }
        let done: Vec<_> = done.into_iter().filter_map(|done| self.data_files.settle(done)).collect();
        self.retry();
        self.settle_shaped(done)
    }

    /// Resubmits operations that a full queue has refused, also if nothing is pending whose end could trigger that.
    pub fn retry(&mut self) {
        self.aligner.retry(&mut self.storage);
        let (data_files, mut below) = self.parts();
        data_files.retry(&mut below);
    }
}

impl Io for SimIo {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match self.shape.take() {
            None => self.push_whole(op),
            Some(mut shape) => {
                let pushed = shape.push(op, &mut Whole(self));
                self.shape = Some(shape);
                pushed
            }
        }
    }

    fn reap(&mut self, _: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        while self.pending() > 0 {
            done.extend(self.finish(0));
        }
        Ok(())
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        let (data_files, mut below) = self.parts();
        data_files.allocated(file, at, len, &mut below)
    }
}

/// The storage with its aligner.
struct Below<'a> {
    aligner: &'a mut Aligner,
    misaligned: &'a mut Misaligned,
    storage: &'a mut Storage,
}

impl SimIo {
    /// The data-file layer and the layers below it.
    fn parts(&mut self) -> (&mut DataFiles, Below<'_>) {
        let SimIo { aligner, misaligned, storage, data_files, .. } = self;
        (data_files, Below { aligner, misaligned, storage })
    }
}

impl Io for Below<'_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let pushed = self.misaligned.push(op, self.aligner, self.storage);
        self.aligner.retry(self.storage);
        pushed
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.storage.reap(until, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.storage.allocated(file, at, len)
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use disk::OpId;
    use memory::Segments;

    fn op(id: u64, action: Action) -> FileOp {
        FileOp { id: OpId(id), file: FileId(0), action }
    }

    fn write(id: u64, byte: u8) -> FileOp {
        op(id, Action::Write { at: FileOffset(0), from: Segments::copy_of(&[byte; 512]) })
    }

    fn storage(visible: Visible, fault: Option<Fault>) -> SimIo {
        SimIo::new(vec![Media::empty(Unwritten::Zeroes)], SECTOR, visible, ROOM, fault)
    }

    #[test]
    fn a_write_is_seen_when_the_run_says_so() {
        for (visible, seen) in [(Visible::AtPush, 7), (Visible::AtCompletion, 0)] {
            let mut io = storage(visible, None);
            let into = Segments::zeroed(512);
            io.push(write(1, 7)).unwrap();
            io.push(op(2, Action::Read { at: FileOffset(0), into: into.clone() })).unwrap();
            assert_eq!(io.finish(1)[0].op.id, OpId(2));
            assert_eq!(into.to_vec(), [seen; 512]);
            io.finish(0);
            assert_eq!(io.file(FileId(0)).visible().get(0), Sector::of(&[7; 512]));
        }
    }

    #[test]
    fn the_nth_operation_fails_and_no_other() {
        let mut io = storage(Visible::AtPush, Some(Fault { kind: FaultKind::NoSpace, nth: 2 }));
        for id in 1..=3 {
            io.push(write(id, 1)).unwrap();
        }
        let mut done = Vec::new();
        io.reap(Until::Any, &mut done).unwrap();
        let results: Vec<_> = done.iter().map(|done| done.result).collect();
        assert_eq!(results, [Ok(()), Err(FileError::NoSpace), Ok(())]);
        assert!(io.fault_happened());
    }

    #[test]
    fn a_full_queue_hands_the_operation_back() {
        let mut io = storage(Visible::AtPush, Some(Fault { kind: FaultKind::Full, nth: 1 }));
        let back = io.push(write(9, 1)).unwrap_err();
        assert_eq!(back.id, OpId(9));
        assert_eq!(io.push(back).map_err(|op| op.id), Ok(()));
    }
}
