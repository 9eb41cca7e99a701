//! What verbs work on: the disk, its surroundings, and quiescing.
//!
//! It knows nothing about particular verbs. Invariant: a verb that holds requests releases them again, also when it
//! fails; requests held by a client's `pause` stay held.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use ::control::size::readable;
use control::answer::Condition;
use control::{FormatName, ImageName, Kind};
use disk::{Disk, DiskOffset, FileId, Geometry, Image, Operation, Request, Span, Status};
use memory::Segments;
use transport::Server;
use uring::{Engine, EngineKind, ImageFile, OpenOptions};

use super::FLUSH;
use super::blocking_task::BlockingTask;
use super::pause::Pause;
use crate::files::Files;
use crate::image::libvhd::MovedMetadata;
use crate::image::parent_link;
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::serve::admission::Admission;
use crate::serve::changes::Changes;
use crate::serve::engine_watch::EngineWatch;
use crate::serve::own_keys::BLOCKING_TASK;
use crate::serve::page::Kept;
use crate::serve::polling::Polling;
use crate::serve::shaping::Shaping;
use crate::serve::stats::{Counters, Stats};
use crate::serve::threads::Threads;

/// Everything that a verb can use.
pub struct Work<'a> {
    /// The source of new files.
    pub files: &'a Files,
    /// The disk.
    pub disk: &'a mut Disk<Image>,
    /// Its files.
    pub engine: &'a mut Engine,
    /// Its peers.
    pub server: &'a mut dyn Server,
    /// The size and limits of requests.
    pub geometry: &'a mut Geometry,
    /// Measures how long requests are held.
    pub pause: &'a mut Pause,
    /// The flush by this process, if there is one.
    pub flush: &'a mut Flush,
    /// Holds requests back before the disk receives them.
    pub admission: &'a mut Admission,
    /// How its transfers are split and merged.
    pub shaping: &'a mut Shaping,
    /// The map of its changed blocks, if there is one.
    pub changes: &'a mut Changes,
    /// I/O statistics of the disk.
    pub stats: &'a mut Stats,
    /// The file of the statistics page.
    pub page: &'a Kept,
    /// How the thread waits.
    pub polling: &'a mut Polling,
    /// How many threads it uses.
    pub threads: &'a mut Threads,
    /// Whether a client holds requests.
    pub paused: bool,
    /// Whether another process has taken over; this one must exit without touching anything.
    pub replaced: &'a mut bool,
}

/// The state of a flush by this process, among those of the guest.
#[derive(Clone, Copy, Debug, Default)]
pub enum Flush {
    /// There is none.
    #[default]
    None,
    /// It is in flight.
    Asked,
    /// It has completed.
    Answered(Status),
}

/// The extension of a file; the inner result is that of its sync.
pub type Lengthening = BlockingTask<Result<io::Result<()>, Failure>>;

impl Work<'_> {
    /// Starts a task that may wait for storage.
    pub fn send<T: Send + 'static>(
        &mut self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<BlockingTask<T>, Failure> {
        let failed = |error: io::Error| Failure::failed("start background work", &error);
        let blocking_task = BlockingTask::send(work).map_err(failed)?;
        self.engine.watch(blocking_task.as_fd(), false, BLOCKING_TASK.0).map_err(failed)?;
        Ok(blocking_task)
    }

    /// Returns what prevents the disk from writing.
    pub fn condition(&self) -> Condition {
        let away_ms = self.engine.away().map(in_ms);
        Condition { away_ms, ..self.admission.condition(self.disk.is_broken()) }
    }

    /// Returns the statistics of the disk for the successor of this process.
    pub fn counters(&self) -> Counters {
        let mut counters = self.stats.counters(self.page.file().is_some());
        counters.fatal = self.admission.fatal();
        counters.polling = Some(self.polling.settings());
        counters.threads = self.threads.handed();
        counters
    }

    /// Returns the time, by the clock of the statistics.
    pub fn clock(&self) -> Duration {
        Duration::from_nanos(::stats::monotonic())
    }

    /// Returns the result of a blocking task, if it has ended.
    pub fn fetch<T: Send + 'static>(&mut self, blocking_task: BlockingTask<T>) -> Result<T, BlockingTask<T>> {
        if !blocking_task.is_back() {
            return Err(blocking_task);
        }
        self.engine.forget(BLOCKING_TASK.0);
        Ok(blocking_task.fetch())
    }

    /// Starts a flush without holding requests.
    pub fn begin_flush(&mut self) {
        let nothing = Span { at: DiskOffset(0), len: 0 };
        let flush = Request::new(Operation::Flush, nothing, Segments::empty(), FLUSH, self.geometry);
        match flush {
            Ok(flush) => {
                *self.flush = Flush::Asked;
                self.disk.submit(flush, self.engine);
            }
            Err(status) => *self.flush = Flush::Answered(status),
        }
    }

    /// Returns whether that flush has completed; fails if it has failed.
    pub fn is_flushed(&mut self) -> Result<bool, Failure> {
        match *self.flush {
            Flush::None | Flush::Asked => Ok(false),
            Flush::Answered(Status::Done) => {
                *self.flush = Flush::None;
                Ok(true)
            }
            Flush::Answered(status) => {
                *self.flush = Flush::None;
                Err(not_durable(status))
            }
        }
    }

    /// Returns whether everything is durable, after [`Disk::sync`] and with requests held; fails if it cannot be made
    /// durable.
    pub fn is_synced(&self) -> Result<bool, Failure> {
        match (self.disk.is_quiet() && !self.disk.is_syncing(), self.disk.is_clean()) {
            (false, _) => Ok(false),
            (true, true) => Ok(true),
            (true, false) => Err(not_durable(self.disk.last_round())),
        }
    }

    /// Releases requests, unless a client holds them.
    pub fn let_go(&mut self) {
        if self.disk.is_quiesced() && !self.paused {
            self.disk.resume(self.engine);
            self.pause.end(self.clock());
        }
    }

    /// Notifies peers and the checks of requests that the size of the disk has changed.
    pub fn resized(&mut self) {
        *self.geometry = self.disk.geometry();
        self.server.resized(self.geometry, &mut EngineWatch(self.engine));
    }

    /// Returns the file of a layer, and its number.
    pub fn file(&self, depth: usize) -> Result<(FileId, &ImageFile), Failure> {
        let layer = self.disk.layers().get(depth).ok_or_else(|| self.no_layer(depth))?;
        let file = self.engine.file(layer.file).ok_or_else(|| self.no_layer(depth))?;
        Ok((layer.file, file))
    }

    /// Returns the image of a layer.
    pub fn image(&self, depth: usize) -> Result<&Image, Failure> {
        self.disk.layers().get(depth).map(|layer| &layer.format).ok_or_else(|| self.no_layer(depth))
    }

    /// Returns the name of a layer.
    pub fn name(&self, depth: usize) -> Result<ImageName, Failure> {
        let (_, file) = self.file(depth)?;
        if self.stores_nothing() {
            return Ok(ImageName { format: self.format(depth)?, path: file.path().to_owned(), data_file: None });
        }
        if file.remote().is_some() {
            return Ok(ImageName { format: FormatName::Raw, path: file.path().to_owned(), data_file: None });
        }
        let data_file = file.data_file().map(|data| absolute(data.path()));
        Ok(ImageName { format: format_of(self.image(depth)?), path: absolute(file.path()), data_file })
    }

    /// Returns the format of a layer.
    pub fn format(&self, depth: usize) -> Result<FormatName, Failure> {
        match self.engine.kind() {
            EngineKind::Null => Ok(FormatName::Null),
            EngineKind::Model(_) => Ok(FormatName::Model),
            EngineKind::Uring | EngineKind::Aio => self.image(depth).map(format_of),
        }
    }

    /// Returns the names of all layers, leaf first.
    pub fn names(&self) -> Vec<String> {
        (0..self.disk.layers().len()).filter_map(|depth| self.name(depth).ok()).map(|name| name.to_string()).collect()
    }

    /// Returns all layers, leaf first.
    pub fn chain(&self) -> Result<Vec<(ImageName, &Image)>, Failure> {
        (0..self.disk.layers().len()).map(|depth| Ok((self.name(depth)?, self.image(depth)?))).collect()
    }

    /// Returns the layers whose metadata is located behind their blocks.
    pub fn behind(&self) -> MovedMetadata {
        let layers =
            (0..self.disk.layers().len()).filter_map(|depth| Some((self.name(depth).ok()?, self.image(depth).ok()?)));
        MovedMetadata::of(layers)
    }

    /// Makes the file of a raw layer, or a data file, `len` bytes long, durably and in the background, if it is
    /// shorter. Nothing else changes its length. Returns `None` for a block device, which must be large enough.
    pub fn lengthen(&mut self, depth: usize, len: u64) -> Result<Option<Lengthening>, Failure> {
        let (_, file) = self.file(depth)?;
        let file = file.data_file().unwrap_or(file);
        let path = file.path().to_owned();
        match file.device_len() {
            Some(device) if device >= len => return Ok(None),
            Some(device) => {
                let (wanted, device, path) = (readable(len), readable(device), path.display());
                let what = format!("cannot extend {path} to {wanted}: it is a block device of {device}");
                return Err(Failure::of(Kind::NoSpace, what).advise("enlarge the device, then restart the disk"));
            }
            None => {}
        }
        let failed = move |error| Failure::failed(format!("extend {}", path.display()), &error);
        let file = file.as_fd().try_clone_to_owned().map(File::from).map_err(&failed)?;
        let lengthen = move || -> Result<io::Result<()>, Failure> {
            if file.metadata().map_err(&failed)?.len() < len {
                file.set_len(len).map_err(&failed)?;
            }
            // Also data that an earlier process has left.
            Ok(file.sync_all())
        };
        self.send(lengthen).map(Some)
    }

    /// Handles the result of [`Work::lengthen`]. A failed sync counts as one of the disk: it may have lost data of the
    /// guest.
    pub fn lengthened(
        &mut self,
        depth: usize,
        len: u64,
        ended: Result<io::Result<()>, Failure>,
    ) -> Result<(), Failure> {
        let synced = ended?;
        let (id, file) = self.file(depth)?;
        let file = file.data_file().unwrap_or(file);
        file.reaches(len);
        let failed = |error| {
            Failure::failed(format!("sync {}, which was extended", file.path().display()), &error).advise(
                "see the kernel log; the disk accepts no writes until it is restarted, after its storage is repaired",
            )
        };
        let synced = synced.map_err(failed);
        match synced {
            Ok(()) => self.engine.file_grew(id),
            Err(_) => self.disk.sync_failed(id),
        }
        synced
    }

    /// Returns the options with which the leaf was opened.
    pub fn options(&self) -> Result<OpenOptions, Failure> {
        Ok(self.file(0)?.1.options())
    }

    /// Makes the leaf record the final modification time of its parent, which is no longer written, with the next
    /// flush. Without that nothing is lost, except that a modification of the parent would not be detected.
    pub fn record_time_of_parent(&mut self) {
        let (Ok(name), Ok((_, file))) = (self.name(1), self.file(1)) else { return };
        if file.options().write {
            return;
        }
        let modified = match parent_link::modified(self.files, &name, file) {
            Ok(Some(modified)) => modified,
            Ok(None) => return,
            Err(failure) => {
                return say(format_args!(
                    "the leaf does not record when its parent was last changed: {}",
                    failure.what()
                ));
            }
        };
        // If it is not durable yet, the next process replays it from the redo log.
        let Ok(leaf) = self.disk.layer_mut(0) else { return };
        let Some(link) = leaf.link().filter(|link| link.modified.is_none()) else { return };
        if let Err(error) = leaf.relink(Some(&disk::Link { modified: Some(modified), ..link })) {
            say(format_args!("the leaf does not record when its parent was last changed: {error}"));
        }
    }

    /// Returns whether the disk has no file.
    pub fn stores_nothing(&self) -> bool {
        self.engine.kind().stores_nothing()
    }

    /// Fails for a disk without a file: verbs cannot change its chain, or base children on it.
    pub fn must_have_file(&self) -> Result<(), Failure> {
        match self.stores_nothing() {
            true => {
                Err(Failure::of(Kind::Unsupported, "the disk has no file and stores nothing: its layers are fixed")
                    .advise("serve an image file"))
            }
            false => Ok(()),
        }
    }

    /// Fails for a disk with an image at an NBD server, which has no file that a verb could pass on or put a child on.
    pub fn must_be_local(&self) -> Result<(), Failure> {
        let mut files = self.disk.layers().iter().filter_map(|layer| self.engine.file(layer.file));
        let Some(remote) = files.find(|file| file.remote().is_some()) else { return Ok(()) };
        let what =
            format!("{} is at an NBD server: the chain of this disk is fixed while it runs", remote.path().display());
        Err(Failure::of(Kind::Unsupported, what)
            .advise("stop the disk, then copy its parent into it: tapline image flatten"))
    }

    /// Fails if verbs cannot change the chain of the disk.
    pub fn must_be_writable(&self) -> Result<(), Failure> {
        self.must_have_file()?;
        if self.disk.is_broken() {
            return Err(not_durable(Status::Failed));
        }
        match self.geometry.read_only {
            true => Err(Failure::of(Kind::State, "the disk is served read-only").advise("serve it read-write")),
            false => Ok(()),
        }
    }

    /// Fails unless the layers from `depth` down are durable and no longer written to. A new child needs that, because
    /// it records its parent's modification time.
    pub fn must_be_closed(&self, depth: usize) -> Result<(), Failure> {
        for below in depth..self.disk.layers().len() {
            let (id, file) = self.file(below)?;
            if file.options().write && !self.disk.is_frozen(id) {
                let what = format!("layer {below} is not durable yet, and a child needs a parent that does not change");
                return Err(Failure::of(Kind::State, what)
                    .advise("free some space on its storage, if that is full, then retry; else see the kernel log"));
            }
        }
        Ok(())
    }

    fn no_layer(&self, depth: usize) -> Failure {
        let last = self.disk.layers().len() - 1;
        Failure::of(Kind::Invalid, format!("there is no layer {depth}"))
            .advise(format!("layers are numbered from the leaf, 0, down to {last}; the verb layers lists them"))
    }
}

fn not_durable(status: Status) -> Failure {
    if status == Status::NoSpace {
        return Failure::of(Kind::NoSpace, "cannot make the disk durable: no space is left for its files")
            .advise("free some space and retry; the disk continues as it is");
    }
    Failure::of(Kind::Failed, "cannot make the disk durable: its storage failed, or had failed before")
        .advise("see the kernel log; nothing was changed, and the disk accepts writes again after it is restarted")
}

/// A time in whole milliseconds.
pub fn in_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the absolute path, for clients with another working directory.
pub fn absolute(path: &Path) -> std::path::PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns the format of an image.
pub fn format_of(image: &Image) -> FormatName {
    match image {
        Image::Raw(_) => FormatName::Raw,
        Image::Vhd(_) => FormatName::Vhd,
        Image::Qcow2(_) => FormatName::Qcow2,
        Image::Foreign(_) => unreachable!("such images are not served"),
    }
}

/// The steps until nothing is in flight and everything is durable.
#[derive(Clone, Copy, Debug, Default)]
pub enum Quiesce {
    /// Not begun.
    #[default]
    Begin,
    /// A flush makes most data durable while the guest continues.
    Flushing,
    /// A second flush covers later data: it is short, and leaves less.
    FlushingAgain,
    /// Requests are held; those in flight complete.
    Draining,
    /// The disk is synced once more.
    Syncing,
}

impl Quiesce {
    /// Returns whether nothing is in flight, durable or not. This lasts until [`Work::let_go`].
    pub fn is_quiet(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        loop {
            match self {
                Quiesce::Begin if work.disk.is_quiesced() => *self = Quiesce::Draining,
                Quiesce::Begin => {
                    work.begin_flush();
                    *self = Quiesce::Flushing;
                }
                Quiesce::Flushing if work.is_flushed()? => {
                    work.begin_flush();
                    *self = Quiesce::FlushingAgain;
                }
                Quiesce::FlushingAgain if work.is_flushed()? => {
                    work.disk.quiesce();
                    let now = work.clock();
                    work.pause.begin(now);
                    *self = Quiesce::Draining;
                }
                Quiesce::Flushing | Quiesce::FlushingAgain => return Ok(false),
                Quiesce::Draining | Quiesce::Syncing => return Ok(work.disk.is_quiet()),
            }
        }
    }

    /// Returns whether nothing is in flight and everything is durable. This lasts until [`Work::let_go`].
    pub fn advance(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        if !self.is_quiet(work)? {
            return Ok(false);
        }
        if matches!(self, Quiesce::Draining) && !work.disk.is_clean() {
            work.disk.sync(work.engine);
            *self = Quiesce::Syncing;
        }
        work.is_synced()
    }
}
