//! What lies below an engine's splitting and merging: the way to the kernel, its lanes, and what adapts them to files.
//!
//! It knows no policy. Invariant: a file has one id in the backend and in all lanes.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use disk::{Aligner, Allocation, DataFiles, EngineFailed, FileDone, FileId, FileOffset, FileOp, Io, Until};
use memory::Buffer;

use crate::backend::Backend;
use crate::lanes::{BELL, Lanes, Spread};
use crate::{EngineError, EngineKind, ImageFile};

/// The backend, and what operations pass on their way to it.
pub(crate) struct Below {
    backend: Backend,
    /// Present only if a file's minimum I/O unit is larger than a sector, an image has a data file, or there are lanes.
    adapters: Option<Box<Adapters>>,
}

/// Adapters between the disk and the backend, in the order in which operations pass them.
#[derive(Default)]
struct Adapters {
    data_files: DataFiles,
    aligner: Aligner,
    /// Whether the two above ever had something to do.
    are_used: bool,
    lanes: Option<Lanes>,
}

/// The unit in which formats and guests address files.
const SECTOR: usize = 512;

impl Below {
    /// Opens an engine of this kind, with no fallback, for `depth` concurrent operations on `files` (leaf first).
    pub(crate) fn open(kind: EngineKind, files: Vec<ImageFile>, depth: usize) -> Result<Below, EngineError> {
        let data: Vec<Option<ImageFile>> = files.iter().map(clone_data_file).collect::<Result<_, EngineError>>()?;
        let units: Vec<Option<IoUnit>> = files.iter().map(IoUnit::of).collect();
        let backend = Backend::open(kind, files, depth)?;
        let mut below = Below { backend, adapters: None };
        for (id, unit) in (0..).map(FileId).zip(units) {
            below.align(id, unit);
        }
        for (image, data) in (0..).map(FileId).zip(data) {
            below.add_data_file(image, data)?;
        }
        Ok(below)
    }

    /// The kind of this engine.
    pub(crate) fn kind(&self) -> EngineKind {
        self.backend.kind()
    }

    /// Enables or disables sub-unit I/O for a file whose storage cannot do it natively.
    fn align(&mut self, id: FileId, unit: Option<IoUnit>) {
        match unit {
            Some(IoUnit { len, end }) => self.translating().aligner.add(id, len, end),
            None => self.adapters.iter_mut().for_each(|adapters| adapters.aligner.remove(id)),
        }
    }

    /// The adapters, of which the first two are to be passed by operations from now on.
    fn translating(&mut self) -> &mut Adapters {
        let adapters = self.adapters.get_or_insert_default();
        adapters.are_used = true;
        adapters
    }

    fn lanes(&mut self) -> Option<&mut Lanes> {
        self.adapters.as_mut()?.lanes.as_mut()
    }

    /// Starts one more lane: a thread that does transfers for this one ([`crate::lanes`]). One that turns out not to be
    /// possible here is let go of, and [`Below::take_lane_trouble`] says why.
    pub(crate) fn start_lane(&mut self) -> Result<(), EngineError> {
        if self.kind().stores_nothing() {
            return Err(EngineError::NoLanes);
        }
        let adapters = self.adapters.get_or_insert_default();
        let lanes = match &mut adapters.lanes {
            Some(lanes) => lanes,
            none => none.insert(Lanes::new(&mut self.backend)?),
        };
        lanes.start(&self.backend)
    }

    /// Waits until each lane takes operations, or cannot; from then on they get all that they can do, also what this
    /// thread would do faster itself. For tests, which want to see lanes at work.
    pub(crate) fn prefer_lanes(&mut self) {
        if let Some(lanes) = self.lanes() {
            lanes.wait_until_begun();
            lanes.prefer();
        }
    }

    /// Ends one lane, as soon as it has nothing in flight.
    pub(crate) fn end_lane(&mut self) {
        if let Some(lanes) = self.lanes() {
            lanes.end_one();
        }
    }

    /// The number of lanes, without those that are about to end.
    pub(crate) fn lane_count(&self) -> usize {
        self.adapters.as_ref().and_then(|adapters| adapters.lanes.as_ref()).map_or(0, Lanes::count)
    }

    /// How many operations each lane has got since it was started.
    pub(crate) fn lane_operations(&self) -> Vec<u64> {
        let lanes = self.adapters.as_ref().and_then(|adapters| adapters.lanes.as_ref());
        lanes.map(Lanes::operations).unwrap_or_default()
    }

    /// The processor time that lanes have used, of those that are there.
    pub(crate) fn lane_time(&self) -> Duration {
        let lanes = self.adapters.as_ref().and_then(|adapters| adapters.lanes.as_ref());
        lanes.map(Lanes::time).unwrap_or_default()
    }

    /// Why a lane was let go of, if that was not asked for.
    pub(crate) fn take_lane_trouble(&mut self) -> Option<String> {
        self.lanes()?.take_trouble()
    }

    /// Has lanes that are started from now on fail at some step.
    #[cfg(test)]
    pub(crate) fn set_lane_faults(&mut self, faults: crate::lanes::Faults) {
        let adapters = self.adapters.get_or_insert_default();
        let lanes = adapters.lanes.get_or_insert_with(|| Lanes::new(&mut self.backend).expect("it can be watched"));
        lanes.set_faults(faults);
    }

    /// Waits until each lane takes operations, or cannot.
    #[cfg(test)]
    pub(crate) fn wait_for_lanes(&mut self) {
        self.lanes().into_iter().for_each(Lanes::wait_until_begun);
    }

    /// Whether operations take the long way.
    #[cfg(test)]
    pub(crate) fn has_adapters(&self) -> bool {
        self.adapters.is_some()
    }

    /// Without lanes, operations take the short way again.
    #[cold]
    fn forget_lanes(&mut self) {
        let Some(adapters) = &mut self.adapters else { return };
        adapters.lanes = None;
        self.backend.forget(BELL);
        if !adapters.are_used {
            self.adapters = None;
        }
    }

    /// Reports `key` when `fd` is ready (readable or hung up; with `write` also writable): immediately if it is ready
    /// now, then at each new event (edge triggered: an eventfd need not be read at all). There may be spurious reports,
    /// but none is missed. Watching a key again replaces the old watch. One key is the engine's own, and refused.
    pub(crate) fn watch(&mut self, fd: BorrowedFd<'_>, write: bool, key: u64) -> io::Result<()> {
        assert_ne!(key, BELL, "this key is the engine's own");
        self.backend.watch(fd, write, key)
    }

    /// Stops reporting `key`.
    pub(crate) fn forget(&mut self, key: u64) {
        self.backend.forget(key)
    }

    /// Moves the keys reported since the last call into `into`, without duplicates.
    pub(crate) fn take_ready(&mut self, into: &mut Vec<u64>) {
        self.backend.take_ready(into)
    }

    /// The open file with this id.
    pub(crate) fn file(&self, id: FileId) -> Option<&ImageFile> {
        self.backend.file(id)
    }

    /// Registers a buffer that much I/O will go through, if the engine supports that. I/O through unregistered buffers
    /// also works, but is slower.
    pub(crate) fn register_memory(&mut self, buffer: Arc<Buffer>) -> Result<(), EngineError> {
        self.backend.register_memory(buffer.clone())?;
        self.lanes().into_iter().for_each(|lanes| lanes.register_memory(&buffer));
        Ok(())
    }

    /// Unregisters a buffer.
    pub(crate) fn forget_memory(&mut self, buffer: &Arc<Buffer>) -> Result<(), EngineError> {
        self.lanes().into_iter().for_each(|lanes| lanes.forget_memory(buffer));
        self.backend.forget_memory(buffer)
    }

    /// Registers a file, and its data file if it has one; returns its id.
    pub(crate) fn add(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let data = clone_data_file(&file)?;
        let id = self.add_one(file)?;
        match self.add_data_file(id, data) {
            Ok(()) => Ok(id),
            Err(error) => {
                self.remove(id)?;
                Err(error)
            }
        }
    }

    fn add_data_file(&mut self, image: FileId, data: Option<ImageFile>) -> Result<(), EngineError> {
        if let Some(data) = data {
            let data = self.add_one(data)?;
            self.translating().data_files.add(image, data);
        }
        Ok(())
    }

    fn add_one(&mut self, file: ImageFile) -> Result<FileId, EngineError> {
        let unit = IoUnit::of(&file);
        let id = self.backend.add(file)?;
        self.tell_lanes(id);
        self.align(id, unit);
        Ok(id)
    }

    fn data_file_of(&self, id: FileId) -> Option<FileId> {
        self.adapters.as_ref()?.data_files.of(id)
    }

    /// Replaces the handle of a file, and of its data file: read-only becomes writable, or the reverse. Operations in
    /// flight finish on the old handle, which is returned; later ones use the new one. The caller must drop write
    /// access only when no write is in flight.
    pub(crate) fn replace(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        let data = clone_data_file(&file)?;
        let old = self.replace_one(id, file)?;
        let (Some(number), Some(data)) = (self.data_file_of(id), data) else { return Ok(old) };
        match self.replace_one(number, data) {
            Ok(_) => Ok(old),
            Err(error) => {
                self.replace_one(id, old)?;
                Err(error)
            }
        }
    }

    fn replace_one(&mut self, id: FileId, file: ImageFile) -> Result<ImageFile, EngineError> {
        let old = self.backend.replace(id, file)?;
        self.tell_lanes(id);
        Ok(old)
    }

    /// Has lanes use the file that the backend has under this id.
    fn tell_lanes(&mut self, id: FileId) {
        let Some(lanes) = self.adapters.as_mut().and_then(|adapters| adapters.lanes.as_mut()) else { return };
        if let Some(file) = self.backend.file(id) {
            lanes.put(id, file);
        }
    }

    /// Tells the engine that a file has grown by other means than this engine.
    pub(crate) fn file_grew(&mut self, id: FileId) {
        for id in [Some(id), self.data_file_of(id)].into_iter().flatten() {
            let unit = self.file(id).and_then(IoUnit::of);
            self.align(id, unit);
        }
    }

    /// The next sleep takes no longer than this; it may end with nothing.
    pub(crate) fn limit_sleep(&mut self, most: Duration) {
        self.backend.limit_sleep(most)
    }

    /// Removes a file that has nothing in flight, and its data file. Its id may be reused.
    pub(crate) fn remove(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let data = self.data_file_of(id);
        let is_busy = |adapters: &Adapters| {
            let in_lane = |id| adapters.lanes.as_ref().is_some_and(|lanes| lanes.uses(id));
            let mut both = [Some(id), data].into_iter().flatten();
            adapters.data_files.uses(id) || both.any(|id| adapters.aligner.uses(id) || in_lane(id))
        };
        if self.adapters.as_deref().is_some_and(is_busy) {
            return Err(EngineError::FileBusy(id));
        }
        if let Some(data) = data {
            self.remove_one(data)?;
            if let Some(adapters) = &mut self.adapters {
                adapters.data_files.remove(id);
            }
        }
        self.remove_one(id)
    }

    fn remove_one(&mut self, id: FileId) -> Result<ImageFile, EngineError> {
        let removed = self.backend.remove(id)?;
        self.lanes().into_iter().for_each(|lanes| lanes.remove(id));
        self.align(id, None);
        Ok(removed)
    }
}

impl Io for Below {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        match &mut self.adapters {
            None => self.backend.push(op),
            Some(adapters) => adapters.with(&mut self.backend).push(op),
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let Some(adapters) = &mut self.adapters else { return self.backend.reap(until, done) };
        adapters.with(&mut self.backend).reap(until, done)?;
        if adapters.lanes.as_mut().is_some_and(Lanes::are_over) {
            self.forget_lanes();
        }
        Ok(())
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        match &mut self.adapters {
            None => self.backend.allocated(file, at, len),
            Some(adapters) => adapters.data_files.allocated(file, at, len, &mut self.backend),
        }
    }
}

/// The adapters in front of the backend.
struct Adapted<'a> {
    /// If they have something to do.
    translating: Option<(&'a mut DataFiles, &'a mut Aligner)>,
    spread: Spread<'a>,
}

impl Adapters {
    #[inline]
    fn with<'a>(&'a mut self, backend: &'a mut Backend) -> Adapted<'a> {
        let Adapters { data_files, aligner, are_used, lanes } = self;
        Adapted {
            translating: are_used.then_some((data_files, aligner)),
            spread: Spread { lanes: lanes.as_mut(), backend },
        }
    }
}

impl Io for Adapted<'_> {
    #[inline]
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        let Adapted { translating, spread } = self;
        match translating {
            None => spread.push(op),
            Some((data_files, aligner)) => data_files.push(op, &mut Aligned { aligner, spread }),
        }
    }

    #[inline]
    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        let Adapted { translating, spread } = self;
        match translating {
            None => spread.reap(until, done),
            Some((data_files, aligner)) => data_files.reap(until, &mut Aligned { aligner, spread }, done),
        }
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.spread.allocated(file, at, len)
    }
}

/// The backend, and its lanes, with the aligner in front of them.
struct Aligned<'a, 'b> {
    aligner: &'a mut Aligner,
    spread: &'a mut Spread<'b>,
}

impl Io for Aligned<'_, '_> {
    fn push(&mut self, op: FileOp) -> Result<(), FileOp> {
        self.aligner.push(op, self.spread)
    }

    fn reap(&mut self, until: Until, done: &mut Vec<FileDone>) -> Result<(), EngineFailed> {
        self.aligner.reap(until, self.spread, done)
    }

    fn allocated(&mut self, file: FileId, at: FileOffset, len: u64) -> Allocation {
        self.spread.allocated(file, at, len)
    }
}

/// The engine's own handle of an image's data file, if it has one.
fn clone_data_file(image: &ImageFile) -> Result<Option<ImageFile>, EngineError> {
    image.data_file().map(ImageFile::try_clone).transpose().map_err(EngineError::File)
}

/// The minimum I/O unit of a file.
#[derive(Clone, Copy)]
struct IoUnit {
    len: u64,
    /// The length of a file that may end inside a unit.
    end: Option<u64>,
}

impl IoUnit {
    /// `None` if the file accepts single sectors.
    fn of(file: &ImageFile) -> Option<IoUnit> {
        let len = file.alignment().offset;
        let end = match file.device_len() {
            Some(_) => None,
            None => Some(disk::Source::len(file)),
        };
        (len > SECTOR).then(|| IoUnit { len: u64::try_from(len).unwrap_or(u64::MAX), end })
    }
}
