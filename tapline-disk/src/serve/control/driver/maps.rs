//! The steps of a plan that concern the map of changed blocks.
//!
//! It knows nothing about what a map holds. Invariant: an image is marked, durably, before it is the leaf of a disk
//! whose changes are recorded, and a new map is used only by the disk for which it was created.

use std::path::{Path, PathBuf};

use control::Kind;
use disk::changes::MapId;
use disk::{Format, MapState};
use uring::ImageFile;

use super::{Done, Driver, Phase, StepResults};
use crate::files::Files;
use crate::image::map_of_daemon;
use crate::image::tracking::{self, OpenMap};
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::serve::changes::end_mark;
use crate::serve::control::work::Work;

/// The id of a map, and its session.
type Ids = (MapId, MapId);

/// The map that a verb creates.
#[derive(Debug, Default)]
pub struct NewMap {
    /// Its path; `None` if the verb creates none.
    path: Option<PathBuf>,
    /// Its ids, if the client has marked the image.
    ids: Option<Ids>,
    /// The map, until the disk uses it.
    open: Option<Box<OpenMap>>,
}

impl NewMap {
    /// Keeps the map, if one was created.
    pub fn made(&mut self, map: Option<Box<OpenMap>>) {
        self.open = map.or(self.open.take());
    }
}

/// What is done about maps for a new leaf, in the background, before that has its name: if a crash leaves the leaf, it
/// leaves its map.
#[derive(Default)]
pub struct ForChild {
    /// A new map: where, its path and ids, the id of the one that it continues, and the bytes of the disk.
    new: Option<(Files, PathBuf, Option<Ids>, MapId, u64)>,
    /// The id and the session of the map that continues on the new leaf.
    old: Option<(MapId, MapId)>,
}

impl ForChild {
    /// Prepares a new map if the verb creates one, or the new leaf for the present map.
    pub fn of(results: &StepResults, work: &Work<'_>) -> Result<ForChild, Failure> {
        let (Some(_), Some(map)) = (work.changes.kept(work.disk), work.disk.map()) else {
            return match &results.map.path {
                None => Ok(ForChild::default()),
                Some(_) => Err(not_tracked()),
            };
        };
        work.files.record(results.to().path());
        if let Some(new) = &results.map.path {
            let len = work.image(0)?.geometry().len;
            let new = (work.files.clone(), new.clone(), results.map.ids, map.id(), len);
            return Ok(ForChild { new: Some(new), old: None });
        }
        Ok(ForChild { new: None, old: Some((map.id(), map.session())) })
    }

    /// Creates the new map, and marks the new leaf.
    pub fn make(self, leaf: &ImageFile) -> Result<Option<OpenMap>, Failure> {
        if let Some((files, path, Some((id, session)), continues, len)) = self.new {
            let mut open = tracking::create_in(tracking::passed(&files, &path)?, (id, Some(continues)), len)?;
            tracking::begin_session(&mut open, session)?;
            return Ok(Some(open));
        }
        if let Some((files, path, None, continues, len)) = self.new {
            return tracking::create(&files, &path, Some(continues), len, Some(leaf)).map(Some);
        }
        if let Some((map, session)) = self.old {
            tracking::mark(leaf, map, session)?;
        }
        Ok(None)
    }
}

impl Driver {
    /// Makes the verb create a map at this path; with these ids if the client has marked the image.
    pub fn with_map(
        mut self,
        path: Option<PathBuf>,
        new: Option<control::tracking::NewMap>,
    ) -> Result<Driver, Failure> {
        self.results.map.path = path;
        self.results.map.ids = new.as_ref().map(map_of_daemon::ids).transpose()?;
        Ok(self)
    }

    pub(super) fn extend_map(&mut self, len: u64, work: &mut Work<'_>) -> Result<bool, Failure> {
        if !matches!(self.phase, Phase::Mapping) {
            work.disk.extend_map(len, work.engine)?;
            self.phase = Phase::Mapping;
        }
        Ok(work.disk.is_map_settled())
    }

    pub(super) fn end_map(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        if !matches!(self.phase, Phase::Mapping) {
            if work.disk.tracked().is_none() {
                return Ok(true);
            }
            work.changes.ending();
            work.disk.invalidate_map(work.engine)?;
            self.phase = Phase::Mapping;
        }
        if !work.disk.is_map_settled() {
            return Ok(false);
        }
        match work.disk.map_state() {
            Some(MapState::Doubtful) => {
                Err(Failure::of(Kind::Failed, "the map of changed blocks cannot be made invalid")
                    .advise("see the kernel log; remove the file of the map, then use untrack --removed"))
            }
            _ => {
                work.changes.ended(work.engine);
                Ok(true)
            }
        }
    }

    pub(super) fn create_map(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        let made = self.background(work, |results, work| {
            let Some(path) = results.map.path.clone() else { return Err(not_tracked()) };
            let (files, len, ids) = (work.files.clone(), work.image(0)?.geometry().len, results.map.ids);
            let layers: Result<Vec<ImageFile>, Failure> =
                (0..work.disk.layers().len()).map(|depth| Ok(work.file(depth)?.1.clone())).collect();
            let layers = layers?;
            Ok(move || {
                tracking::sync_all(&layers)?;
                let open = match ids {
                    Some((id, _)) => tracking::create_in(tracking::passed(&files, &path)?, (id, None), len)?,
                    None => tracking::create(&files, &path, None, len, None)?,
                };
                Ok(Done::Map(Box::new(open)))
            })
        });
        let Some(Done::Map(open)) = made? else { return Ok(false) };
        self.results.map.open = Some(open);
        Ok(true)
    }

    pub(super) fn mark_image(&mut self, work: &mut Work<'_>) -> Result<bool, Failure> {
        if let Some((_, session)) = self.results.map.ids {
            return self.begin_session(session, work);
        }
        let marked = self.background(work, |results, work| {
            let image = work.file(0)?.1.clone();
            let Some(open) = &results.map.open else { unreachable!("the map was created") };
            let (map, session) = (open.map.id(), open.map.session());
            Ok(move || tracking::mark(&image, map, session).map(|()| Done::Marked))
        });
        Ok(marked?.is_some())
    }

    /// The client has marked the image with a session that the map gets now.
    fn begin_session(&mut self, session: MapId, work: &mut Work<'_>) -> Result<bool, Failure> {
        let begun = self.background(work, |results, _| {
            let Some(mut open) = results.map.open.take() else { unreachable!("the map was created") };
            Ok(move || match tracking::begin_session(&mut open, session) {
                Ok(()) => Ok(Done::Map(open)),
                Err(failure) => {
                    tracking::void(&open.file);
                    Err(failure)
                }
            })
        });
        let Some(Done::Map(open)) = begun? else { return Ok(false) };
        self.results.map.open = Some(open);
        Ok(true)
    }

    /// Removes a new map that is not used, and the mark by which it would be trusted if its file came back.
    pub(super) fn remove_map(&mut self, work: &Work<'_>) {
        let (Some(open), Some(path)) = (self.results.map.open.take(), &self.results.map.path) else { return };
        match work.disk.tracked() {
            None if work.files.are_handed() => tracking::void(&open.file),
            None => disown(path, work),
            Some(_) => remove_file(path, work),
        }
    }

    /// Has the disk record its changes in the new map. Requests are held; if it fails, the map is not trusted any more
    /// when they are released.
    pub(super) fn switch_map(&mut self, work: &mut Work<'_>) -> Result<(), Failure> {
        let (Some(open), Some(path)) = (self.results.map.open.take(), self.results.map.path.clone()) else {
            return Ok(());
        };
        let file = open.file.clone();
        Driver::use_map(*open, &path, work).inspect_err(|_| match work.files.are_handed() {
            true => tracking::void(&file),
            false => disown(&path, work),
        })
    }

    fn use_map(open: OpenMap, path: &Path, work: &mut Work<'_>) -> Result<(), Failure> {
        let OpenMap { file, map } = open;
        let ids = (map.id(), map.continues());
        let new = work.engine.add(tracking::for_engine(file, work.engine.kind())?)?;
        let interval = work.changes.bitmaps.interval(work.disk);
        let used = match ids.1 {
            Some(_) => work.disk.switch_map(new, map),
            None => work.disk.begin_tracking(new, map),
        };
        if let Err(error) = used {
            work.engine.remove(new)?;
            return Err(error.into());
        }
        if let Some(ended) = interval {
            work.changes.bitmaps.continue_in(&ended, ids.0);
        }
        work.changes.began(path, new, ids);
        Ok(())
    }
}

/// Ends the mark of the leaf, by which a new map would be trusted that is not used, and removes that.
fn disown(path: &Path, work: &Work<'_>) {
    if let Ok((_, image)) = work.file(0) {
        end_mark(image);
    }
    remove_file(path, work);
}

fn remove_file(path: &Path, work: &Work<'_>) {
    if let Err(error) = work.files.remove_new(path) {
        say(format_args!("the unused map {} could not be removed: {error}", path.display()));
    }
}

/// Makes the failure of a verb that continues a map that there is not.
pub fn not_tracked() -> Failure {
    Failure::of(Kind::State, "the changed blocks of the disk are not recorded, so no map can be continued")
        .advise("begin a map with: tapline disk SOCKET track MAP")
}
