//! Images that keep their data in a file of its own ("External data file" of the qcow2 specification): a layer of two
//! files that the disk sees as one.
//!
//! Knows nothing of requests and formats. It stands between the disk and the engine, for files that were named to it;
//! what is for other files passes it by. The format says of data that it is at [`DATA_FILE`] and behind, where no image
//! has anything, and operations there go to the data file instead.
//!
//! A sync is one of both files, under way at once. So the order of [`crate::round`] holds for the two together: what
//! entries refer to is durable before the entries are written. That the image is synced with its data, and the data
//! with metadata, costs a sync of a file in which nothing has changed.
//!
//! Invariants: every operation comes back exactly once, as it was pushed; a sync ends when both have ended, and well
//! only if both have.

use std::collections::BTreeMap;

use crate::FileOffset;
use crate::backlog::Backlog;
use crate::io::{Action, Allocation, EngineFailed, FileDone, FileError, FileId, FileOp, Io, OpId, Until};
use crate::slab::Slab;

/// Where the data file of an image begins, among the offsets that a format names: behind all that an image can have.
pub const DATA_FILE: FileOffset = FileOffset(1 << 60);

/// Marks the names of syncs that were made here; those of the disk and of an [`crate::Aligner`] do not have it.
const OURS: u64 = 1 << 62;

/// Has two files serve what the disk takes for one.
#[derive(Debug, Default)]
pub struct DataFiles {
    /// By the number of the image.
    files: BTreeMap<FileId, FileId>,
    syncs: Slab<Sync>,
    /// Syncs for which the engine had no room.
    refused: Backlog,
    /// Scratch.
    done: Vec<FileDone>,
}

/// A sync of both files.
#[derive(Debug)]
struct Sync {
    op: FileOp,
    left: u8,
    result: Result<(), FileError>,
}

impl DataFiles {
    /// From now on, the data of `image` is in `data`.
    pub fn add(&mut self, image: FileId, data: FileId) {
        self.files.insert(image, data);
    }

    /// The data file of an image, if it has one.
    pub fn of(&self, image: FileId) -> Option<FileId> {
        self.files.get(&image).copied()
    }

    /// Nothing will come for `image`, unless it is added again.
    pub fn remove(&mut self, image: FileId) {
        self.files.remove(&image);
    }

    /// Whether a sync of an image with a data file is under way.
    pub fn uses(&self, image: FileId) -> bool {
        self.syncs.iter().any(|sync| sync.op.file == image)
    }

    /// As [`Io::push`].
    #[allow(clippy::result_large_err, reason = "handing back by value is the point, as in `Io::push`")]
    pub fn push(&mut self, op: FileOp, io: &mut impl Io) -> Result<(), FileOp> {
        let Some(data) = self.of(op.file) else { return io.push(op) };
        self.retry(io);
        if !self.refused.is_empty() {
            return Err(op);
        }
        if !matches!(op.action, Action::SyncData) {
            let image = op.file;
            return io.push(downwards(op, data)).map_err(|back| upwards(back, image));
        }
        let image = op.file;
        let number = self.syncs.insert(Sync { op, left: 2, result: Ok(()) });
        let half = |file| FileOp { id: OpId(OURS | u64::from(number)), file, action: Action::SyncData };
        // Room for the other half comes with the end of the first, if there is none now.
        match io.push(half(data)) {
            Ok(()) => {
                self.refused.add(half(image));
                self.retry(io);
                Ok(())
            }
            Err(back) => Err(self.syncs.remove(number).map_or(back, |sync| sync.op)),
        }
    }

    /// Pushes the syncs for which the engine had no room.
    pub fn retry(&mut self, io: &mut impl Io) {
        self.refused.retry(io);
    }

    /// As [`Io::reap`]: it may return with nothing, when one half of a sync has ended.
    pub fn reap(&mut self, until: Until, io: &mut impl Io, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.retry(io);
        let mut ended = std::mem::take(&mut self.done);
        let reaped = io.reap(until, &mut ended);
        done.extend(ended.drain(..).filter_map(|one| self.settle(one)));
        self.done = ended;
        self.retry(io);
        reaped
    }

    /// Takes what the engine has finished; the operation of the disk that has ended with it.
    pub fn settle(&mut self, FileDone { op, result }: FileDone) -> Option<FileDone> {
        let ours = op.id.0.checked_sub(OURS).and_then(|number| u32::try_from(number).ok());
        let Some((number, sync)) = ours.and_then(|number| Some((number, self.syncs.get_mut(number)?))) else {
            let image = self.files.iter().find(|(_, data)| **data == op.file).map(|(image, _)| *image);
            return Some(FileDone { op: image.into_iter().fold(op, upwards), result });
        };
        sync.left -= 1;
        sync.result = sync.result.and(result);
        if sync.left > 0 {
            return None;
        }
        self.syncs.remove(number).map(|Sync { op, result, .. }| FileDone { op, result })
    }

    /// As [`Io::allocated`].
    pub fn allocated(&mut self, file: FileId, at: FileOffset, len: u64, io: &mut impl Io) -> Allocation {
        match (self.of(file), at.checked_sub(DATA_FILE)) {
            (Some(data), Some(at)) => io.allocated(data, FileOffset(at), len),
            _ => io.allocated(file, at, len),
        }
    }
}

/// An operation on an image, as one on its data file if it is about that.
fn downwards(mut op: FileOp, data: FileId) -> FileOp {
    if let Some(there) = place(&mut op.action).filter(|at| **at >= DATA_FILE) {
        *there = FileOffset(*there - DATA_FILE);
        op.file = data;
    }
    op
}

/// An operation on a data file, as the one on its image that it was.
fn upwards(mut op: FileOp, image: FileId) -> FileOp {
    if op.file != image {
        place(&mut op.action).into_iter().for_each(|at| *at = DATA_FILE + at.0);
        op.file = image;
    }
    op
}

fn place(action: &mut Action) -> Option<&mut FileOffset> {
    match action {
        Action::Read { at, .. } | Action::Write { at, .. } | Action::Deallocate { at, .. } => Some(at),
        Action::SyncData => None,
    }
}

#[cfg(test)]
mod test {
    use memory::Segments;

    use super::*;
    use crate::memory_io::MemoryIo;

    const IMAGE: FileId = FileId(1);
    const DATA: FileId = FileId(2);

    /// The image is empty, its data file is not.
    fn setup(room: usize) -> (DataFiles, MemoryIo) {
        let mut files = DataFiles::default();
        files.add(IMAGE, DATA);
        (files, MemoryIo { room, ..MemoryIo::new(vec![Vec::new(), Vec::new(), vec![0; 8]]) })
    }

    fn op(id: u64, file: FileId, action: Action) -> FileOp {
        FileOp { id: OpId(id), file, action }
    }

    fn read(id: u64, file: FileId, at: FileOffset) -> FileOp {
        op(id, file, Action::Read { at, into: Segments::zeroed(512) })
    }

    fn seen(op: &mut FileOp) -> (u64, FileId, Option<FileOffset>) {
        (op.id.0, op.file, place(&mut op.action).copied())
    }

    #[test]
    fn data_goes_to_the_data_file_and_comes_back_as_it_was() {
        let (mut files, mut io) = setup(8);
        let pushed = [(1, IMAGE, FileOffset(512)), (2, IMAGE, DATA_FILE + 512), (3, FileId(0), FileOffset(512))];
        for (id, file, at) in pushed {
            files.push(read(id, file, at), &mut io).unwrap();
        }
        let below: Vec<_> = io.queue.iter_mut().map(seen).collect();
        assert_eq!(below, [(1, IMAGE), (2, DATA), (3, FileId(0))].map(|(id, file)| (id, file, Some(FileOffset(512)))));
        let mut done = Vec::new();
        files.reap(Until::Any, &mut io, &mut done).unwrap();
        let above: Vec<_> = done.iter_mut().map(|done| seen(&mut done.op)).collect();
        assert_eq!(above, pushed.map(|(id, file, at)| (id, file, Some(at))));
        let mut allocated = |at| files.allocated(IMAGE, at, 1, &mut io);
        assert_eq!([7, 8].map(|at| allocated(DATA_FILE + at)), [Allocation::Data(1), Allocation::Hole(1)]);
        assert_eq!(allocated(FileOffset(7)), Allocation::Hole(1));
    }

    #[test]
    fn a_sync_ends_with_both_and_well_only_if_both_do() {
        for failing in [None, Some(IMAGE), Some(DATA)] {
            let (mut files, mut io) = setup(8);
            files.push(op(5, IMAGE, Action::SyncData), &mut io).unwrap();
            assert_eq!(io.queue.iter().map(|op| op.file).collect::<Vec<_>>(), [DATA, IMAGE]);
            assert!(files.uses(IMAGE));
            let fate = |file| if failing == Some(file) { Err(FileError::Failed(5)) } else { Ok(()) };
            let mut ended = io.queue.drain(..).map(|op| FileDone { result: fate(op.file), op });
            assert!(files.settle(ended.next().unwrap()).is_none(), "half of it");
            let whole = files.settle(ended.next().unwrap()).unwrap();
            assert_eq!((whole.op.id, whole.op.file, whole.result.is_ok()), (OpId(5), IMAGE, failing.is_none()));
            assert!(!files.uses(IMAGE));
        }
    }

    #[test]
    fn half_a_sync_that_finds_no_room_is_pushed_later_and_nothing_overtakes_it() {
        let (mut files, mut io) = setup(0);
        let back = files.push(op(5, IMAGE, Action::SyncData), &mut io).unwrap_err();
        assert_eq!((back.id, back.file, files.uses(IMAGE)), (OpId(5), IMAGE, false), "nor does half of one stay");
        io.room = 1;
        files.push(op(5, IMAGE, Action::SyncData), &mut io).unwrap();
        let back = files.push(read(6, IMAGE, DATA_FILE), &mut io).unwrap_err();
        assert_eq!(place(&mut back.action.clone()), Some(&mut DATA_FILE.clone()), "it comes back as it was");
        let mut done = Vec::new();
        for _ in 0..2 {
            assert!(done.is_empty());
            files.reap(Until::Any, &mut io, &mut done).unwrap();
        }
        assert_eq!(done.len(), 1);
        files.push(back, &mut io).unwrap();
    }
}
