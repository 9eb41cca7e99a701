//! The map of changed blocks of a served disk: begun or continued, watched, closed.
//!
//! The disk decides what is written to the map and when (`disk/src/disk/tracker.rs`); whether a map is trusted is in
//! [`crate::image::tracking`]. This file knows which file the map is in, and looks at its state after each iteration of
//! the event loop that has completed something. It knows no client. Invariants: an image is marked only when all is
//! durable that its map begins with; and when a map could neither be written nor made invalid, the mark of the image or
//! the file of the map is gone, durably, before requests continue without it.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ::control::{Kind, answer};
use arguments::Serve;
use disk::changes::{ChangeMap, MapId};
use disk::{Disk, FileDone, FileId, Image, Io, MapState, Until};
use uring::{Engine, ImageFile};

use crate::files::Files;
use crate::files::mark::{self, hex};
use crate::image::chain::Layers;
use crate::image::map_of_daemon::{Chosen, Daemon, EmptyMap};
use crate::image::tracking::{self, OpenMap, VOID_LOG};
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::serve::bitmaps::Bitmaps;
use crate::serve::takeover::Takeover;

/// What is to be done after a map was lost.
const ADVICE: &str = "the next backup must be a full one; start a new map then: tapline disk SOCKET track MAP";

/// The map of a disk that is not served yet.
#[derive(Debug)]
pub struct Prepared {
    path: PathBuf,
    map: Start,
    /// The daemon that has chosen the map.
    daemon: Option<Daemon>,
}

/// How the map of a disk starts.
#[derive(Debug)]
enum Start {
    /// It is continued.
    Continued(OpenMap),
    /// It begins now.
    New(OpenMap),
    /// It begins now, in an empty file.
    Empty(EmptyMap),
}

impl Prepared {
    /// Creates the map at `path`, or takes it up if it exists and can be trusted.
    pub fn of(files: &Files, path: &Path, layers: &Layers) -> Result<Prepared, Failure> {
        let (Some(image), Some(geometry)) = (layers.files.first(), layers.geometry()) else {
            return Err(Failure::new(format!("track {}", layers.name), "it has no file"));
        };
        tracking::must_be_possible(&layers.name, image)?;
        let prepared = |map| Prepared { path: path.to_owned(), map, daemon: None };
        // A passed file exists in any case; a map is not empty.
        let exists = files.metadata(path).is_ok_and(|found| !files.are_handed() || found.len() > 0);
        if exists {
            let mut open = tracking::open(files, path)?;
            let is_void = layers.logs.iter().any(|(depth, log)| *depth == 0 && log.was_void());
            if is_void && open.map.closed().is_none() {
                return Err(tracking::refused(path, VOID_LOG));
            }
            tracking::take_up(files, path, &mut open, geometry.len, image)?;
            log_continued(path, &open.map);
            return Ok(prepared(Start::Continued(open)));
        }
        tracking::sync_all(&layers.files)?;
        let open = tracking::create(files, path, None, geometry.len, None)?;
        log_begun(path);
        Ok(prepared(Start::New(open)))
    }

    /// Agrees with the daemon on the map.
    fn by_daemon(layers: &Layers) -> Result<Option<Prepared>, Failure> {
        let daemon = Daemon::of_stdin()?;
        let chosen = daemon.choose(layers)?;
        let Some(path) = chosen.path() else { return Ok(None) };
        let map = match chosen {
            Chosen::Continued(open) => {
                log_continued(&path, &open.map);
                Start::Continued(open)
            }
            Chosen::New(empty) => {
                tracking::sync_all(&layers.files)?;
                log_begun(&path);
                Start::Empty(empty)
            }
            Chosen::Unrecorded => return Ok(None),
        };
        Ok(Some(Prepared { path, map, daemon: Some(daemon) }))
    }

    /// Returns the id of the map.
    pub fn id(&self) -> MapId {
        match &self.map {
            Start::Continued(open) | Start::New(open) => open.map.id(),
            Start::Empty(empty) => empty.id(),
        }
    }

    /// Opens the map of the process that is taken over, which continues in the same session.
    pub fn taken_over(files: &Files, path: &Path) -> Result<Prepared, Failure> {
        Ok(Prepared { path: path.to_owned(), map: Start::Continued(tracking::open(files, path)?), daemon: None })
    }

    /// Has the disk record its changes, before its first request.
    pub fn begin(self, disk: &mut Disk<Image>, engine: &mut Engine) -> Result<Changes, Failure> {
        let Prepared { path, map, daemon } = self;
        let (OpenMap { file, map }, is_new) = match map {
            Start::Continued(open) => (open, false),
            Start::New(open) => {
                make_clean(disk, engine)?;
                let image = leaf_of(disk, engine).ok_or_else(|| Failure::of(Kind::Failed, "the disk has no file"))?;
                tracking::mark(image, open.map.id(), open.map.session())?;
                (open, true)
            }
            Start::Empty(empty) => {
                make_clean(disk, engine)?;
                (empty.begin(disk.geometry().len)?, true)
            }
        };
        let (id, continues) = (map.id(), map.continues());
        let file = engine.add(tracking::for_engine(file, engine.kind())?)?;
        let begun = if is_new { disk.begin_tracking(file, map) } else { disk.track(file, map) };
        begun.map_err(|error| Failure::new(format!("record changed blocks in {}", path.display()), error))?;
        daemon.map_or(Ok(()), |daemon| daemon.records(id))?;
        let path = std::path::absolute(&path).unwrap_or(path);
        Ok(Changes {
            current: Some(Current { path, file: Some(file), id, continues, said: MapState::Kept }),
            sealing: Vec::new(),
            bitmaps: Bitmaps::default(),
        })
    }
}

/// Has the disk record its changes in the map, if there is one, and show these bitmaps.
pub fn begin(
    map: Option<Prepared>,
    bitmaps: Bitmaps,
    disk: &mut Disk<Image>,
    engine: &mut Engine,
) -> Result<Changes, Failure> {
    let changes = map.map_or_else(|| Ok(Changes::default()), |map| map.begin(disk, engine))?;
    // No map is trusted any more that does not have all changes; without a map, the mark of the image has been removed.
    disk.forget_void_logs();
    Ok(Changes { bitmaps, ..changes })
}

/// Opens the layers, and the map of their changed blocks: that of the command line or of the daemon, or that of the
/// process that is taken over, which may have another one meanwhile, or none.
pub fn open(
    files: &Files,
    serve: &Serve,
    taken: Option<&Takeover>,
    write: bool,
) -> Result<(Layers, Option<Prepared>), Failure> {
    let map = match taken {
        Some(taken) => taken.map.as_ref(),
        None if serve.map_of_daemon => {
            let layers = super::open(files, serve, taken, write)?;
            let map = Prepared::by_daemon(&layers)?;
            return Ok((layers, map));
        }
        None => serve.track.as_ref(),
    };
    let Some(path) = map else { return Ok((super::open(files, serve, taken, write)?, None)) };
    let image = taken.and_then(|taken| taken.layers.first()).unwrap_or(&serve.image);
    if image.uri().is_none() {
        files.record(image.path());
    }
    let layers = super::open(files, serve, taken, write)?;
    let map = match taken {
        Some(_) => Prepared::taken_over(files, path)?,
        None => Prepared::of(files, path, &layers)?,
    };
    Ok((layers, Some(map)))
}

fn log_begun(path: &Path) {
    say(format_args!("changed blocks are recorded from now on in {}, a new map", path.display()));
}

fn log_continued(path: &Path, map: &ChangeMap) {
    let (name, suspects) = (path.display(), map.suspects() + map.damaged());
    match suspects {
        0 => say(format_args!("changed blocks are recorded in {name}, which is continued")),
        _ => say(format_args!(
            "changed blocks are recorded in {name}, which is continued; its last process was killed, so {suspects} \
             regions of 4 MiB count as changed"
        )),
    }
}

/// Makes everything durable that the disk shows: a map begins with that.
fn make_clean(disk: &mut Disk<Image>, engine: &mut Engine) -> Result<(), Failure> {
    let mut done: Vec<FileDone> = Vec::new();
    if !disk.is_clean() {
        disk.sync(engine);
    }
    while !disk.is_idle() || disk.is_syncing() {
        engine.reap(Until::Any, &mut done).map_err(|error| Failure::new("make the disk durable", error))?;
        done.drain(..).for_each(|ended| disk.settle(ended, engine));
        disk.retry(engine);
    }
    if disk.is_clean() {
        return Ok(());
    }
    Err(Failure::new("begin a map of changed blocks", "the disk could not be made durable")
        .advise("see the kernel log; free some space if the storage is full"))
}

/// The maps of a served disk.
#[derive(Debug, Default)]
pub struct Changes {
    current: Option<Current>,
    /// Maps of earlier intervals that are being sealed.
    sealing: Vec<FileId>,
    /// The maps that clients see as dirty bitmaps.
    pub bitmaps: Bitmaps,
}

#[derive(Debug)]
struct Current {
    path: PathBuf,
    /// Its file, while that is open.
    file: Option<FileId>,
    id: MapId,
    continues: Option<MapId>,
    /// The state that was logged.
    said: MapState,
}

impl Changes {
    /// Returns whether there is anything to watch.
    #[inline]
    pub fn is_any(&self) -> bool {
        self.current.is_some()
    }

    /// The disk records its changes in this map from now on; the map before, if there was one, is being sealed.
    pub fn began(&mut self, path: &Path, file: FileId, (id, continues): (MapId, Option<MapId>)) {
        let new = Current { path: path.to_owned(), file: Some(file), id, continues, said: MapState::Kept };
        let old = self.current.replace(new);
        self.sealing.extend(old.and_then(|old| old.file));
    }

    /// Returns the path of the map, if it can be relied on, and its file.
    pub fn kept(&self, disk: &Disk<Image>) -> Option<(&Path, FileId)> {
        let current = self.current.as_ref().filter(|_| disk.map_state() == Some(MapState::Kept))?;
        Some((&current.path, disk.tracked()?))
    }

    /// Logs a map that was lost, and closes the files of maps that are sealed.
    pub fn watch(&mut self, files: &Files, disk: &mut Disk<Image>, engine: &mut Engine) {
        if !self.sealing.is_empty() && disk.is_map_settled() {
            for file in self.sealing.drain(..) {
                close_file(engine, file);
            }
        }
        let Some(current) = &mut self.current else { return };
        let state = disk.map_state().unwrap_or(MapState::Kept);
        // A map that is being ended at a client's request is kept until then.
        if state == current.said || state == MapState::Kept {
            return;
        }
        let name = current.path.display();
        if state != MapState::Kept {
            self.bitmaps.lose();
        }
        match state {
            MapState::Kept => {}
            MapState::Invalid => {
                say(format_args!("changed blocks are no longer recorded: {name} could not be written, and is void"));
                say(ADVICE);
                current.close(engine);
            }
            MapState::Doubtful => {
                say(format_args!("changed blocks cannot be recorded: {name} can be neither written nor made invalid"));
                if !files.are_handed() && leaf_of(disk, engine).is_some_and(end_mark) {
                    say(format_args!("{name} will be refused, and the disk continues; {ADVICE}"));
                    return current.abandon(disk, engine);
                }
                match take_away(files, &current.path) {
                    Ok(()) => {
                        say(format_args!("{name} was removed, and the disk continues; {ADVICE}"));
                        return current.abandon(disk, engine);
                    }
                    Err(_) if files.are_handed() => {
                        say("some writes WAIT until the map is ended: tapline vdi cbt disable VDI");
                    }
                    Err(failure) => say(format_args!(
                        "{}: some writes WAIT until the file is removed: do so, then 'tapline disk SOCKET untrack \
                         --removed'",
                        failure.what()
                    )),
                }
            }
        }
        current.said = state;
    }

    /// The client says that it has removed the file of a doubtful map.
    pub fn was_removed(&mut self, files: &Files, disk: &mut Disk<Image>, engine: &mut Engine) {
        if let Some(current) = self.current.as_mut().filter(|_| disk.map_state() == Some(MapState::Doubtful)) {
            // The file may have another name.
            if files.are_handed() || !leaf_of(disk, engine).is_some_and(end_mark) {
                say(format_args!("{} is taken for removed as the client says", current.path.display()));
            }
            current.abandon(disk, engine);
        }
    }

    /// The map is being made invalid at the request of a client.
    pub fn ending(&mut self) {
        let Some(current) = &mut self.current else { return };
        say(format_args!("changed blocks are no longer recorded at a client's request: {}", current.path.display()));
        self.bitmaps.lose();
        current.said = MapState::Invalid;
    }

    /// The map was made invalid.
    pub fn ended(&mut self, engine: &mut Engine) {
        self.current.iter_mut().for_each(|current| current.close(engine));
    }

    /// Returns the state for a client.
    pub fn report(&self, disk: &Disk<Image>, engine: &Engine) -> Option<answer::Changes> {
        let current = self.current.as_ref()?;
        let state = match disk.map_state() {
            Some(MapState::Kept) => answer::MapState::Kept,
            Some(MapState::Doubtful) => answer::MapState::Doubtful,
            Some(MapState::Invalid) | None => answer::MapState::Invalid,
        };
        let is_kept = state == answer::MapState::Kept;
        Some(answer::Changes {
            map: current.path.display().to_string(),
            id: hex(&current.id),
            continues: current.continues.map(|id| hex(&id)),
            state,
            at_rest: is_kept && disk.is_map_at_rest(),
            changed: disk.map().filter(|_| is_kept).map(ChangeMap::changed_bytes),
            session: disk.map().filter(|_| is_kept).map(|map| hex(&map.session())),
            inode: current.file.and_then(|file| engine.file(file)?.metadata().ok()).map(|found| found.ino()),
        })
    }

    /// Returns the file of the map to be closed, which [`Disk::stop_tracking`] ends.
    pub fn file_to_close(&self, disk: &Disk<Image>, engine: &Engine) -> Option<(PathBuf, ImageFile)> {
        let (path, file) = self.kept(disk)?;
        Some((path.to_owned(), engine.file(file)?.clone()))
    }
}

impl Current {
    /// Continues without the map, which no process will find later.
    fn abandon(&mut self, disk: &mut Disk<Image>, engine: &mut Engine) {
        match disk.abandon_map(engine) {
            Ok(()) => self.close(engine),
            Err(error) => say(format_args!("the map of changed blocks is not given up: {error}")),
        }
        self.said = MapState::Invalid;
    }

    fn close(&mut self, engine: &mut Engine) {
        self.file.take().into_iter().for_each(|file| close_file(engine, file));
    }
}

/// Returns the file of the disk's leaf.
pub fn leaf_of<'a>(disk: &Disk<Image>, engine: &'a Engine) -> Option<&'a ImageFile> {
    disk.layers().first().and_then(|leaf| engine.file(leaf.file))
}

/// Removes the mark of an image, durably: no map is trusted then, whatever its name. Returns false if that fails, and
/// logs the reason. This blocks.
pub fn end_mark(image: &ImageFile) -> bool {
    match mark::end(image) {
        Ok(_) => true,
        Err(error) => {
            say(format_args!("{} stays marked as tracked: {error}", image.path().display()));
            false
        }
    }
}

/// Removes the file of a map, durably. This blocks: only writes of the guest that wait for it, and a broken storage,
/// lead here.
fn take_away(files: &Files, path: &Path) -> Result<(), Failure> {
    let failed = |error| Failure::new(format!("remove {}", path.display()), error);
    if files.are_handed() {
        return Err(Failure::new(format!("remove {}", path.display()), "this disk was started with --handed"));
    }
    std::fs::remove_file(path).map_err(failed)?;
    Ok(files.sync_directory(path)?)
}

fn close_file(engine: &mut Engine, file: FileId) {
    if let Err(error) = engine.remove(file) {
        say(format_args!("the file of a map of changed blocks could not be closed: {error}"));
    }
}
