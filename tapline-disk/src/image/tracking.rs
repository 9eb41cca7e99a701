//! The map of changed blocks of an image: its file, and the mark in the image by which a map is trusted.
//!
//! A map is right only if every write to its image was recorded in it. The *mark* ([`crate::files::mark`]), an
//! extended attribute of the image's file, names the map, the file itself, and the session of the map, which is drawn
//! at random whenever a process takes the map up. A process of Tapline that opens a marked image for writing and does
//! not record removes the mark first ([`end`], called by [`Files`]): the mark is found from the image, under whatever
//! name that is opened. The map's header has the session as well, and after a clean end the time of the last change of
//! the image's file.
//!
//! A map is continued only if
//! - the mark names this map, so no process of Tapline has written since without recording;
//! - the mark names this file: it was not copied, restored or replaced together with its attributes;
//! - mark and map have the same session: neither is an older copy;
//! - after a clean end, the file was not changed since, by any program. *After a kill or a power loss this is not
//!   known*:
//!   what wrote last may be the killed process itself.
//!
//! It knows nothing of requests and disks, nor of the contents of maps. Invariant: when a map is trusted, the mark was
//! durable before the first write that the map does not name, and is gone, durably, before a write that is not
//! recorded.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::{ImageName, Kind};
use disk::changes::{self, ChangeMap, FileState, MapId, Spec};
use disk::{ImageErrorKind, MetaWrite};
use rustix::fs::{fsync, ftruncate};
use uring::{Cache, EngineKind, ImageFile, OpenOptions};

use crate::files::mark::{self, Mark, hex};
use crate::files::{Files, next_to};
use crate::image::{redo_log, uuid, write_synced};
use crate::process::failure::Failure;
use crate::process::log::say;

/// Longer than the steps of the clock by which a kernel stamps changes of files.
const CLOCK_STEP: Duration = Duration::from_millis(20);
/// The same for file systems that keep whole seconds only.
const COARSE_STEP: Duration = Duration::from_millis(2100);

const THROUGH_CACHE: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };

/// Why a map is refused whose image does not fit its redo log.
pub const VOID_LOG: &str = "the image is not in the state in which the last process left it: another program has \
                            written to it, or it was restored";

/// A map in its file, which is open for writing and locked.
#[derive(Debug)]
pub struct OpenMap {
    /// The file.
    pub file: ImageFile,
    /// The map.
    pub map: ChangeMap,
}

fn mark_of(file: &ImageFile, map: MapId, sessions: &[MapId]) -> io::Result<Mark> {
    let sessions = sessions.iter().map(|session| hex(session)).collect();
    Ok(Mark { map: hex(&map), file: mark::id_of(file)?, sessions })
}

/// Fails if the changes of an image cannot be recorded, because nothing would show that another program wrote to it.
pub fn must_be_possible(name: &ImageName, file: &ImageFile) -> Result<(), Failure> {
    let why = match () {
        () if file.remote().is_some() => "it is at an NBD server, which others may write to",
        () if file.data_file().is_some() => "it has a data file, for which this is not implemented",
        () if file.device_len().is_some() => "a block device does not show whether another program has written to it",
        () => return Ok(()),
    };
    Err(Failure::new(format!("track the changed blocks of {name}"), why).of_kind(Kind::Unsupported))
}

/// Creates the file of a map of a disk of `len` bytes, under its name, durably. With `mark`, the image is marked before
/// the map has its name; otherwise [`mark`] follows.
pub fn create(
    files: &Files,
    path: &Path,
    continues: Option<MapId>,
    len: u64,
    mark: Option<&ImageFile>,
) -> Result<OpenMap, Failure> {
    let tried = || format!("create the map of changed blocks {}", path.display());
    let failed = |error: io::Error| Failure::new(tried(), error);
    if files.is_taken(path) {
        let what = "the file already exists";
        return Err(Failure::new(tried(), what).of_kind(Kind::Exists).advise("choose another name"));
    }
    let id = uuid::new().map_err(failed)?;
    let creation = changes::create(&Spec { id, continues, len, block: changes::BLOCK })
        .map_err(|error| Failure::new(tried(), error))?;
    let temporary = if files.are_handed() { path.to_owned() } else { next_to(path)? };
    let mut file = files.create_new(&temporary, THROUGH_CACHE)?;
    let made = write_all(&mut file, &creation.writes).and_then(|()| {
        let map = ChangeMap::open(&mut file).map_err(io::Error::other)?;
        mark.map_or(Ok(()), |image| mark::set(&mark_of(image, map.id(), &[map.session()])?, image))?;
        Ok(map)
    });
    let map = made.map_err(|error| {
        files.remove_new(&temporary).unwrap_or_default();
        explain_mark(error.kind(), failed(error))
    })?;
    if !files.are_handed() {
        files.name_new(&temporary, path)?;
        files.sync_directory(path)?;
        // Its lock is that of this description, which must not be closed: the new name is recorded by a duplicate.
        file = ImageFile::from_fd(file.try_clone_fd()?, path, THROUGH_CACHE)?;
    }
    Ok(OpenMap { file, map })
}

fn write_all(file: &mut ImageFile, writes: &[MetaWrite]) -> io::Result<()> {
    writes.iter().try_for_each(|write| file.write_at(write.at, &write.bytes))?;
    file.sync()
}

/// Marks an image as tracked by this map, durably.
pub fn mark(image: &ImageFile, map: MapId, session: MapId) -> Result<(), Failure> {
    let marked = mark_of(image, map, &[session]).and_then(|mark| mark::set(&mark, image));
    marked.map_err(|error| {
        let tried = format!("mark {} as tracked by a map", image.path().display());
        explain_mark(error.kind(), Failure::new(tried, error))
    })
}

fn explain_mark(kind: io::ErrorKind, failure: Failure) -> Failure {
    match kind {
        io::ErrorKind::Unsupported => {
            failure.advise("changed blocks can be tracked on file systems with extended attributes (user.*) only")
        }
        _ => failure,
    }
}

/// Opens a map to record changes in it, locked. Refuses one in which nothing may be recorded.
pub fn open(files: &Files, path: &Path) -> Result<OpenMap, Failure> {
    let mut file = files.open(path, THROUGH_CACHE)?;
    let map = read(path, &mut file)?;
    if map.is_sealed() {
        let why = "its interval has ended with a snapshot, and nothing can be added";
        return Err(Failure::new(format!("continue the map of changed blocks {}", path.display()), why)
            .of_kind(Kind::State)
            .advise("name the map that continues it, or a new file"));
    }
    Ok(OpenMap { file, map })
}

/// Reading without a lock, also while a process writes: each sector of a map names all changes up to when it is read,
/// and one that is read while it is written counts as changed throughout.
pub const LOOK: OpenOptions = OpenOptions { write: false, cache: Cache::Writeback, lock: false };

/// Opens a map to read it, without a lock.
pub fn look(files: &Files, path: &Path) -> Result<ChangeMap, Failure> {
    let mut file = files.open(path, LOOK).map_err(Failure::said)?;
    read(path, &mut file)
}

/// Joins the maps of successive intervals, the oldest first.
pub fn join(maps: Vec<ChangeMap>) -> Result<ChangeMap, Failure> {
    ChangeMap::union(maps).map_err(|error| {
        Failure::new("join the maps of changed blocks", error)
            .of_kind(Kind::Invalid)
            .advise("give the maps of successive snapshots of one disk, the oldest first, without a gap")
    })
}

/// Fails unless all maps but the last, to which nothing is added any more, are known to be complete: they are sealed.
/// One that is not may be a copy that was made while its disk was served, or its process was killed when its interval
/// ended.
pub fn must_be_sealed(paths: &[PathBuf], maps: &[ChangeMap]) -> Result<(), Failure> {
    let mut ended = paths.iter().zip(maps).take(maps.len().saturating_sub(1));
    let Some((path, _)) = ended.find(|(_, map)| !map.is_sealed()) else { return Ok(()) };
    let why = "another map continues it, but it is not complete: it is an older copy, or its process was killed";
    Err(Failure::new(format!("use the map of changed blocks {}", path.display()), why).of_kind(Kind::State).advise(
        "if its process was killed, its own image may prove it: list it alone, with --image and the image that ended \
         with it; otherwise make a full backup",
    ))
}

/// Reads a map, and explains why a file cannot be used as one.
pub fn read(path: &Path, file: &mut ImageFile) -> Result<ChangeMap, Failure> {
    ChangeMap::open(file).map_err(|error| {
        let advice = match error.kind {
            ImageErrorKind::Unsupported => "use the version of tapline-disk that wrote it",
            ImageErrorKind::Corrupt => "make a full backup, and start a new map in another file",
            _ => "give a map that `serve --track` has created, or the name of a new file",
        };
        Failure::new(format!("use the map of changed blocks {}", path.display()), error).advise(advice)
    })
}

/// Makes the failure of a map that is not trusted.
pub fn refused(path: &Path, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
    Failure::new(format!("continue the map of changed blocks {}", path.display()), why).of_kind(Kind::State).advise(
        "not all changes are known: make a full backup, and start a new map: --track with the name of a new file",
    )
}

/// Returns why a map cannot be that of a disk of `len` bytes. It may be longer: a power loss may have kept a disk from
/// growing whose map was extended before.
pub fn too_short(map: &ChangeMap, len: u64) -> Option<String> {
    (map.len() < len).then(|| format!("it is of a disk of {} bytes, and this one has {len}", map.len()))
}

/// Returns why a map is not trusted; `opened` is the state of the image's file when it was opened.
pub fn distrust(map: &ChangeMap, len: u64, image: &ImageFile, opened: Option<FileState>) -> io::Result<Option<String>> {
    let Some(found) = mark::read(image)? else {
        return Ok(Some(too_short(map, len).unwrap_or_else(|| {
            "the image is not marked as tracked: it is another image, was restored or replaced, or was opened for \
             writing without --track"
                .into()
        })));
    };
    let is_it = found.file == mark::id_of(image)?;
    Ok(mismatch(map, len, (&found, is_it), opened))
}

/// Returns why a map is not trusted for a disk of `len` bytes whose image has this mark, and is or is not the file that
/// was marked; `opened` is the state of the file when it was opened.
pub fn mismatch(map: &ChangeMap, len: u64, (found, is_it): (&Mark, bool), opened: Option<FileState>) -> Option<String> {
    if let Some(why) = too_short(map, len) {
        return Some(why);
    }
    let why = match () {
        () if found.map != hex(&map.id()) => format!("the image is tracked by another map, {}", found.map),
        () if !is_it => "the image is a copy of the one that was tracked".into(),
        () if !found.sessions.contains(&hex(&map.session())) => {
            "the map or the image is an older copy: they were last used at different times".into()
        }
        () if map.closed().is_some_and(|closed| opened != Some(closed)) => {
            "the image's file was changed after the map was closed, by another program or by a change of its attributes"
                .into()
        }
        () => return None,
    };
    Some(why)
}

/// Fails unless all writes to an image of `len` bytes since the map at `path` was begun are known to be recorded in it.
pub fn must_be_of(
    files: &Files,
    name: &ImageName,
    image: &ImageFile,
    len: u64,
    (path, map): (&Path, &ChangeMap),
) -> Result<(), Failure> {
    let tried = || format!("use the map of changed blocks {} for {name}", path.display());
    let failed = |error: io::Error| Failure::new(tried(), error);
    let state = mark::state(image).map_err(failed)?;
    let mut why = distrust(map, len, image, Some(state)).map_err(failed)?;
    if why.is_none() && map.closed().is_none() && redo_log::is_void(files, &mut image.clone()).map_err(failed)? {
        why = Some(VOID_LOG.into());
    }
    match why {
        None => Ok(()),
        Some(why) => Err(Failure::new(tried(), why)
            .of_kind(Kind::State)
            .advise("make a full backup, and start a new map: serve --track with the name of a new file")),
    }
}

/// Takes a map up in a new session, if it is trusted; durable before this returns.
pub fn take_up(files: &Files, path: &Path, open: &mut OpenMap, len: u64, image: &ImageFile) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::new(format!("continue the map of changed blocks {}", path.display()), error);
    if let Some(why) = distrust(&open.map, len, image, files.state_when_opened()).map_err(failed)? {
        return Err(refused(path, why));
    }
    let (old, new) = (open.map.session(), uuid::new().map_err(failed)?);
    // Whenever this is interrupted, the mark has the session of the map.
    mark_of(image, open.map.id(), &[old, new]).and_then(|mark| mark::set(&mark, image)).map_err(failed)?;
    // A resize may have failed, or a power loss has undone it, after the map was extended.
    open.map.shorten(len);
    let header = open.map.opened(new);
    write_synced::write(&mut open.file, &[vec![header]]).map_err(failed)?;
    mark_of(image, open.map.id(), &[new]).and_then(|mark| mark::set(&mark, image)).map_err(failed)
}

/// Closes a map whose pages are durable, in a file of an engine, when nothing will be written to the image any more and
/// it is still locked: from now on every change of the image's file will show.
pub fn close(file: &ImageFile, image: &ImageFile) -> io::Result<()> {
    fsync(image)?;
    // An engine may have needed O_DIRECT.
    let fd = file.try_clone_fd().map_err(io::Error::other)?;
    let file = &mut ImageFile::from_fd(fd, file.path(), THROUGH_CACHE).map_err(io::Error::other)?;
    let mut map = ChangeMap::open(file).map_err(io::Error::other)?;
    let before = mark::state(image)?;
    // A later change has another time only when the clock of the file system has advanced.
    std::thread::sleep(if before.changed.1 == 0 { COARSE_STEP } else { CLOCK_STEP });
    if mark::state(image)? != before {
        return Err(io::Error::other("the image was changed by another program meanwhile"));
    }
    let header = map.close(before);
    write_synced::write(file, &[vec![header]])
}

/// Creates a map with these ids in an empty file, durably. It is not trusted before [`begin_session`].
pub fn create_in(mut file: ImageFile, (id, continues): (MapId, Option<MapId>), len: u64) -> Result<OpenMap, Failure> {
    let tried = format!("create the map of changed blocks {}", file.path().display());
    let failed = |error: io::Error| Failure::new(&tried, error);
    if file.metadata().map_err(failed)?.len() != 0 {
        return Err(Failure::new(&tried, "the file is not empty").of_kind(Kind::Exists));
    }
    let creation = changes::create(&Spec { id, continues, len, block: changes::BLOCK })
        .map_err(|error| Failure::new(&tried, error))?;
    write_all(&mut file, &creation.writes).map_err(failed)?;
    let map = ChangeMap::open(&mut file).map_err(|error| Failure::new(&tried, error))?;
    Ok(OpenMap { file, map })
}

/// Gives a new map the session in which it is trusted, durably.
pub fn begin_session(open: &mut OpenMap, session: MapId) -> Result<(), Failure> {
    let headers = open.map.begin_session(session);
    let path = open.file.path().to_owned();
    write_all(&mut open.file, &headers)
        .map_err(|error| Failure::new(format!("begin the map of changed blocks {}", path.display()), error))
}

/// Continues a map in this session, durably.
pub fn continue_in(open: &mut OpenMap, session: MapId) -> Result<(), Failure> {
    let header = open.map.opened(session);
    let path = open.file.path().to_owned();
    write_synced::write(&mut open.file, &[vec![header]])
        .map_err(|error| Failure::new(format!("continue the map of changed blocks {}", path.display()), error))
}

/// Empties the file of a new map that is not used, durably: no process trusts it. This blocks.
pub fn void(file: &ImageFile) {
    let emptied = ftruncate(file, 0).and_then(|()| fsync(file));
    if let Err(errno) = emptied {
        say(format_args!("the unused map {} could not be emptied: {errno}", file.path().display()));
    }
}

/// Opens the file of a new map that was passed with a verb.
pub fn passed(files: &Files, path: &Path) -> Result<ImageFile, Failure> {
    Ok(files.open(path, THROUGH_CACHE)?)
}

/// Opens a passed file of a map for writing, and locks it.
pub fn open_passed(file: OwnedFd, path: &Path) -> Result<ImageFile, Failure> {
    Ok(ImageFile::from_fd(file, path, THROUGH_CACHE)?)
}

/// Makes the data durable that earlier processes have left in the page cache: a map begins with what is durable.
pub fn sync_all(layers: &[ImageFile]) -> Result<(), Failure> {
    for file in layers.iter().flat_map(ImageFile::all_files).filter(|file| file.remote().is_none()) {
        fsync(file).map_err(|errno| Failure::new(format!("sync {}", file.path().display()), errno))?;
    }
    Ok(())
}

/// Prepares the file of a map for an engine, which may need O_DIRECT.
pub fn for_engine(file: ImageFile, kind: EngineKind) -> Result<ImageFile, Failure> {
    if kind != EngineKind::Aio {
        return Ok(file);
    }
    let direct = OpenOptions { cache: Cache::None, ..THROUGH_CACHE };
    Ok(ImageFile::from_fd(file.try_clone_fd()?, file.path(), direct)?)
}
