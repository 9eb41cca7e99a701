//! Dirty bitmaps: maps of changed blocks, joined, as clients of the disk see them.
//!
//! A bitmap names what differs between the beginning of its first map and the present. The maps of intervals that are
//! over are read once, at the start. If the last interval is not over, the bitmap is *live*: the map in which the disk
//! records its changes is a part of it, as it is in memory when a request of a client is answered. A change is in that
//! map before it starts, so each change that was answered before the request is named. When a snapshot ends the
//! interval, what its map names stays, and the next map is a part of the bitmap.
//!
//! A bitmap whose map was lost or ended shows everything as dirty: clients have negotiated it, and too much is right.
//!
//! It knows no client and no request. Invariant: a bitmap never names less than has changed.

use std::fmt::Display;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use arguments::{DirtyBitmap, Serve};
use control::Kind;
use control::tracking::{ExpectedMaps, Proof};
use disk::changes::{ChangeMap, MapId};
use disk::{Disk, Image, MapState, Span};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::{Deserialize, Serialize};
use transport::nbd;
use uring::ImageFile;

use crate::files::{Files, mark};
use crate::image::chain::Layers;
use crate::image::{expected_maps, tracking};
use crate::process::failure::Failure;
use crate::process::log::say;

/// The bitmaps of a served disk, in the order in which clients know them.
#[derive(Debug, Default)]
pub struct Bitmaps(Vec<Bitmap>);

/// A dirty bitmap.
#[derive(Debug)]
pub struct Bitmap {
    /// Its name.
    pub name: String,
    /// What the maps of intervals that are over name; `None` if there are none.
    pub over: Option<ChangeMap>,
    /// How it continues.
    pub rest: Rest,
}

/// The interval of a bitmap that is not over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rest {
    /// There is none: the disk is not written to.
    None,
    /// The disk records its changes in the map with this id.
    Map(MapId),
    /// The map was lost or ended.
    Lost,
}

/// The bitmaps to be served, before the image is opened.
#[derive(Debug)]
pub enum Wanted {
    /// Those of the process that is taken over.
    Taken(Bitmaps),
    /// Those of the command line, of a disk that records its changes: with what the maps before that of `--track` name.
    Live(Vec<(DirtyBitmap, Option<ChangeMap>)>),
    /// Those of the command line, of a disk that is not written to, and what a daemon has recorded of the maps of the
    /// longest.
    Constant(Vec<DirtyBitmap>, Option<ExpectedMaps>),
}

impl Wanted {
    /// Rejects bitmaps that cannot be served, while the image is not open: a refused start must neither end the
    /// tracking of the image nor take its map up. The process that is taken over has verified those that are `taken`;
    /// a daemon does not name them again.
    pub fn check(files: &Files, serve: &Serve, read_only: bool, taken: Option<Vec<Bitmap>>) -> Result<Wanted, Failure> {
        let wanted = &serve.dirty_bitmap;
        if let Some(taken) = taken {
            let are_same = || taken.iter().map(|bitmap| &bitmap.name).eq(wanted.iter().map(|bitmap| &bitmap.name));
            if (serve.managed && wanted.is_empty()) || are_same() {
                return Ok(Wanted::Taken(Bitmaps(taken)));
            }
            let why = "the process that is taken over has others than the command line names";
            return Err(Failure::new("take over the dirty bitmaps of a disk", why));
        }
        check(wanted, serve, read_only)?;
        let Some(track) = &serve.track else { return Ok(Wanted::Constant(wanted.clone(), serve.expect.clone())) };
        let with_over = |bitmap: &DirtyBitmap| Ok((bitmap.clone(), before_track(files, bitmap, track)?));
        wanted.iter().map(with_over).collect::<Result<_, _>>().map(Wanted::Live)
    }

    /// Opens them for an image that is open. `map` is the id of the map in which the disk will record its changes;
    /// without it, the last map of each must be that of the image.
    pub fn open(self, files: &Files, layers: &Layers, map: Option<MapId>) -> Result<Bitmaps, Failure> {
        match self {
            Wanted::Taken(bitmaps) => Ok(bitmaps),
            Wanted::Live(bitmaps) => {
                let rest = map.map_or(Rest::Lost, Rest::Map);
                let live = bitmaps.into_iter().map(|(wanted, over)| Bitmap { name: wanted.name, over, rest });
                Ok(Bitmaps(live.collect()))
            }
            Wanted::Constant(bitmaps, expected) => {
                let constant = bitmaps.into_iter().map(|wanted| {
                    let over = Some(constant_map(files, &wanted, expected.as_ref(), layers)?);
                    Ok(Bitmap { name: wanted.name, over, rest: Rest::None })
                });
                constant.collect::<Result<_, _>>().map(Bitmaps)
            }
        }
    }
}

fn check(wanted: &[DirtyBitmap], serve: &Serve, read_only: bool) -> Result<(), Failure> {
    let refused = |why: String, advice: &str| {
        Err(Failure::of(Kind::Invalid, format!("cannot serve dirty bitmaps: {why}")).advise(advice))
    };
    if wanted.len() > nbd::BITMAPS_MAX {
        let why = format!("there are {}, and at most {} are possible", wanted.len(), nbd::BITMAPS_MAX);
        return refused(why, "omit some");
    }
    let is_second = |(nth, name): &(usize, &String)| wanted.iter().take(*nth).any(|other| other.name == **name);
    if let Some((_, name)) = wanted.iter().map(|bitmap| &bitmap.name).enumerate().find(is_second) {
        return refused(format!("two have the name {name}"), "choose another name");
    }
    match &serve.track {
        None if !read_only && !wanted.is_empty() => {
            let why = "the disk is writable, and its changes are not recorded";
            refused(why.into(), "serve it with --read-only, or with --track and the last map")
        }
        Some(track) if wanted.iter().any(|bitmap| bitmap.maps.last() != Some(track)) => {
            let why = format!("the last map of one is not {}, the one of --track", track.display());
            refused(why, "name all maps, up to that of --track")
        }
        _ => Ok(()),
    }
}

/// Returns what the maps of a bitmap name, without the last, which is that of `--track`. Fails unless each continues
/// the one before it, up to the last.
fn before_track(files: &Files, wanted: &DirtyBitmap, track: &Path) -> Result<Option<ChangeMap>, Failure> {
    let exists = files.metadata(track).is_ok_and(|found| !files.are_handed() || found.len() > 0);
    let mut maps: Vec<ChangeMap> = Vec::new();
    for path in wanted.maps.iter().take(wanted.maps.len() - usize::from(!exists)) {
        maps.push(tracking::look(files, path)?);
    }
    if !exists && !maps.is_empty() {
        let what = format!("the dirty bitmap {} ends with a new map, which continues no other", wanted.name);
        return Err(Failure::of(Kind::Invalid, what).advise("name that map alone, or make a snapshot with --map"));
    }
    if maps.len() > 1 {
        tracking::join(maps.clone())?;
    }
    must_be_sealed(files, wanted, &maps)?;
    maps.pop();
    if maps.is_empty() { Ok(None) } else { tracking::join(maps).map(Some) }
}

/// Returns what the maps of a bitmap name, to which nothing is added.
fn constant_map(
    files: &Files,
    wanted: &DirtyBitmap,
    expected: Option<&ExpectedMaps>,
    layers: &Layers,
) -> Result<ChangeMap, Failure> {
    let mut maps: Vec<ChangeMap> = Vec::new();
    for path in &wanted.maps {
        maps.push(tracking::look(files, path)?);
    }
    if let (Some(path), Some(last)) = (wanted.maps.last(), maps.last()) {
        must_be_of_image(layers, path, last)?;
    }
    match expected {
        Some(expected) => must_be_expected(&maps, expected, layers)?,
        None => must_be_sealed(files, wanted, &maps)?,
    }
    tracking::join(maps)
}

/// Fails unless a daemon has recorded the maps, and they name all changes of their intervals, up to the image, which is
/// locked and not written to.
fn must_be_expected(maps: &[ChangeMap], expected: &ExpectedMaps, layers: &Layers) -> Result<(), Failure> {
    let ExpectedMaps(all) = expected;
    let expected = all.len().checked_sub(maps.len()).and_then(|first| all.get(first..)).unwrap_or_default();
    if expected.iter().any(|expected| matches!(expected.proof, Proof::Served(_))) {
        let what = "cannot serve a dirty bitmap that ends with the map of a running disk, which another process serves";
        return Err(Failure::of(Kind::Invalid, what).advise("serve a snapshot of the disk"));
    }
    let failed = |error| Failure::new(format!("examine {}", layers.name), error);
    let image = layers.files.first().map(mark::state).transpose().map_err(failed)?;
    expected_maps::check(maps, expected, image)
}

/// Fails unless the maps before the last one are complete.
fn must_be_sealed(files: &Files, wanted: &DirtyBitmap, maps: &[ChangeMap]) -> Result<(), Failure> {
    // The sender of passed files must know.
    if files.are_handed() { Ok(()) } else { tracking::must_be_sealed(&wanted.maps, maps) }
}

/// Fails unless a map, which nothing is added to, is known to name all that has changed in an image.
fn must_be_of_image(layers: &Layers, path: &Path, map: &ChangeMap) -> Result<(), Failure> {
    let refused = |why: String| {
        let tried = format!("serve the map of changed blocks {} of {} as a dirty bitmap", path.display(), layers.name);
        Failure::new(tried, why).of_kind(Kind::State)
    };
    let (Some(image), Some(geometry)) = (layers.files.first(), layers.geometry()) else {
        return Err(refused("the disk has no file".into()));
    };
    if layers.from.are_handed() {
        // Only the owner of an image can read its mark, so the sender must know (docs/control.md).
        return tracking::too_short(map, geometry.len).map_or(Ok(()), |why| Err(refused(why)));
    }
    tracking::must_be_possible(&layers.name, image)?;
    tracking::must_be_of(&layers.from, &layers.name, image, geometry.len, (path, map))
}

impl Bitmaps {
    /// Returns whether there are any.
    #[inline]
    pub fn is_any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Returns their names, in order.
    pub fn names(&self) -> Vec<String> {
        self.0.iter().map(|bitmap| bitmap.name.clone()).collect()
    }

    /// Returns the bitmaps, in order.
    pub fn all(&self) -> &[Bitmap] {
        &self.0
    }

    /// Returns them as they are at this moment.
    pub fn shown<'a>(&'a self, disk: &'a Disk<Image>) -> Shown<'a> {
        Shown { bitmaps: self, live: disk.map().filter(|_| disk.map_state() == Some(MapState::Kept)) }
    }

    /// Returns a copy of the map in which the disk records its changes, if it is a part of any bitmap and must stay one
    /// when its interval is over.
    pub fn interval(&self, disk: &Disk<Image>) -> Option<ChangeMap> {
        let map = self.shown(disk).live?;
        self.0.iter().any(|bitmap| bitmap.rest == Rest::Map(map.id())).then(|| map.clone())
    }

    /// The interval of `map` is over, and the disk records its changes in the map with the id `next`.
    pub fn continue_in(&mut self, map: &ChangeMap, next: MapId) {
        for bitmap in self.0.iter_mut().filter(|bitmap| bitmap.rest == Rest::Map(map.id())) {
            let maps = bitmap.over.take().into_iter().chain([map.clone()]);
            match ChangeMap::union(maps) {
                Ok(over) => (bitmap.over, bitmap.rest) = (Some(over), Rest::Map(next)),
                Err(error) => {
                    bitmap.rest = Rest::Lost;
                    say(format_args!(
                        "the dirty bitmap {} shows everything as dirty from now on: {error}",
                        bitmap.name
                    ));
                }
            }
        }
    }

    /// The map in which the disk records its changes was lost or ended.
    pub fn lose(&mut self) {
        for bitmap in self.0.iter_mut().filter(|bitmap| matches!(bitmap.rest, Rest::Map(_))) {
            bitmap.rest = Rest::Lost;
            say(format_args!("the dirty bitmap {} shows everything as dirty from now on", bitmap.name));
        }
    }
}

impl Bitmap {
    /// Returns a file in memory with what maps of intervals that are over name, for a successor process ([`received`]).
    pub fn to_pass(&self) -> io::Result<Option<File>> {
        let Some(over) = &self.over else { return Ok(None) };
        let file = File::from(memfd_create("bitmap", MemfdFlags::CLOEXEC)?);
        over.contents().iter().try_for_each(|write| file.write_all_at(&write.bytes, write.at.0))?;
        Ok(Some(file))
    }
}

/// Reads the file of a bitmap from the process that is taken over.
pub fn received(name: &str, file: OwnedFd) -> Result<ChangeMap, String> {
    let failed = |why: &dyn Display| format!("the dirty bitmap {name}: {why}");
    let mut file = ImageFile::from_fd(file, Path::new(name), tracking::LOOK).map_err(|error| failed(&error))?;
    ChangeMap::open(&mut file).map_err(|error| failed(&error))
}

/// The bitmaps at one moment.
#[derive(Debug)]
pub struct Shown<'a> {
    bitmaps: &'a Bitmaps,
    live: Option<&'a ChangeMap>,
}

impl nbd::Bitmaps for Shown<'_> {
    fn runs(&self, index: usize, span: Span, most: usize) -> Vec<(u64, bool)> {
        let Some(bitmap) = self.bitmaps.0.get(index) else { return ChangeMap::runs(&[], span, most) };
        let live = match bitmap.rest {
            Rest::None => None,
            Rest::Map(id) => match self.live.filter(|map| map.id() == id) {
                None => return ChangeMap::runs(&[], span, most),
                live => live,
            },
            Rest::Lost => return ChangeMap::runs(&[], span, most),
        };
        let maps: Vec<&ChangeMap> = bitmap.over.iter().chain(live).collect();
        ChangeMap::runs(&maps, span, most)
    }
}
