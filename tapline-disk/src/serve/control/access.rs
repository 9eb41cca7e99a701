//! Layers below the leaf, opened for writing while a merge needs that, and read-only otherwise.
//!
//! Runs on a separate thread. Invariant: a layer's file always has a lock that excludes other writers; if one layer
//! cannot be opened for writing, because another disk is based on it, all of them stay as they were. Nothing is written
//! to a layer until the layers above it have durably dropped its modification time.

use std::path::Path;

use control::{ImageName, Kind};
use disk::changes::MapId;
use disk::{FileId, Image, RedoLog};
use uring::{FileOpenError, ImageFile};

use super::work::Work;
use crate::files::Files;
use crate::files::mark::{self, hex};
use crate::image::chain::open_image;
use crate::image::redo_log;
use crate::image::write_synced;
use crate::process::failure::Failure;
use crate::process::log::say;

/// A layer that is open for writing and ready to be written to.
#[derive(Debug)]
pub struct Raised {
    from: Files,
    /// Its depth in the chain.
    pub depth: usize,
    /// Its file's number.
    pub id: FileId,
    /// The file.
    pub file: ImageFile,
    /// The image in it.
    pub image: Image,
    /// Its redo log.
    pub log: Option<RedoLog>,
}

/// A layer to be reopened, or one that was reopened and not written to yet.
#[derive(Debug)]
pub struct ReopenedLayer {
    from: Files,
    depth: usize,
    id: FileId,
    name: ImageName,
    file: ImageFile,
}

/// Files that have been reopened read-only.
pub type Lowered = Vec<LoweredOne>;

/// One of [`Lowered`]: a file's number, and the file or why it could not be reopened.
pub type LoweredOne = (FileId, Result<ImageFile, FileOpenError>);

/// Returns the layers down to `last` that are open read-only.
pub fn closed(work: &Work<'_>, last: usize) -> Result<Vec<ReopenedLayer>, Failure> {
    pick(work, last, false)
}

/// Returns the layers below the leaf that are open for writing.
pub fn open(work: &Work<'_>) -> Result<Vec<ReopenedLayer>, Failure> {
    let last = work.disk.layers().len() - 1;
    Ok(pick(work, last, true)?.into_iter().filter(|layer| layer.depth > 0).collect())
}

fn pick(work: &Work<'_>, last: usize, writable: bool) -> Result<Vec<ReopenedLayer>, Failure> {
    let mut layers = Vec::new();
    for depth in 0..=last {
        let (id, file) = work.file(depth)?;
        if file.options().write == writable {
            let from = work.files.clone();
            layers.push(ReopenedLayer { from, depth, id, name: work.name(depth)?, file: file.try_clone()? });
        }
    }
    Ok(layers)
}

/// Reopens the files of all layers for writing, or of none: then the error has the files to put back. Writes nothing.
pub fn raise(layers: Vec<ReopenedLayer>) -> Result<Vec<ReopenedLayer>, (Failure, Lowered)> {
    let mut raised: Vec<ReopenedLayer> = Vec::new();
    for layer in layers {
        match raise_one(&layer) {
            Ok(file) => raised.push(ReopenedLayer { file, ..layer }),
            Err(refusal) => return Err((refusal, lower(raised))),
        }
    }
    Ok(raised)
}

fn raise_one(layer: &ReopenedLayer) -> Result<ImageFile, Failure> {
    let ReopenedLayer { from, depth, name, file, .. } = layer;
    from.reopen_writable(file).map_err(|error| {
        if !matches!(error, FileOpenError::InUse { .. }) {
            return error.into();
        }
        let what = format!("layer {depth}, {name}, is shared: another disk is based on it and would change too");
        let advice = "merge into a layer above the shared one, or stop the other disk first";
        Failure::from(error).about(&what).of_kind(Kind::InUse).advise(advice)
    })
}

/// Makes the layers, in the order of the chain, drop the size and the modification time of their parents, each durably
/// before anything is written to the next. The leaf has done so already. *If killed meanwhile:* the layers above some
/// layer have dropped them, those below are unchanged.
pub fn forget_parents(layers: Vec<ReopenedLayer>) -> Result<Vec<Raised>, (Failure, Lowered)> {
    let mut ready: Vec<Raised> = Vec::new();
    let mut rest = layers.into_iter();
    while let Some(mut layer) = rest.next() {
        match forget_parent(&mut layer) {
            Ok((image, log)) => {
                let ReopenedLayer { from, depth, id, file, .. } = layer;
                ready.push(Raised { from, depth, id, file, image, log });
            }
            Err(refusal) => {
                let mut lowered = reopen_read_only(ready);
                lowered.extend(lower(std::iter::once(layer).chain(rest).collect()));
                return Err((refusal, lowered));
            }
        }
    }
    Ok(ready)
}

fn forget_parent(layer: &mut ReopenedLayer) -> Result<(Image, Option<RedoLog>), Failure> {
    let mut image = open_image(&layer.from, &layer.name, &mut layer.file, true)?;
    if forget(&mut image)? {
        write_synced::flush(&mut layer.file, &mut image)
            .map_err(|error| Failure::failed(format!("change the parent recorded in {}", layer.name), &error))?;
    }
    let log = redo_log::open(&layer.from, &layer.name, &mut layer.file)?;
    // Changes of a layer that is not the leaf are in no map.
    log.iter().for_each(RedoLog::forget_void);
    Ok((image, log))
}

/// Makes an image drop what will change in its parent, with its next flush; returns whether it has a parent. A link
/// without these fields is rewritten too: a sync of it may have failed, which the page cache does not show.
pub fn forget(image: &mut Image) -> Result<bool, Failure> {
    let Some(mut link) = image.link() else { return Ok(false) };
    (link.modified, link.len) = (None, None);
    image.relink(Some(&link))?;
    Ok(true)
}

/// Reopens the files of layers read-only that are not written to after all.
pub fn reopen_read_only(raised: Vec<Raised>) -> Lowered {
    raised.into_iter().map(|one| (one.id, one.from.reopen_read_only(&one.file))).collect()
}

/// Removes the marks of former leaves, whose map was ended or continues on the new leaf; if that fails, it is removed
/// when the file is next opened for writing. The mark of the map `over` stays: its interval has ended with the leaf, so
/// it proves which map is that of this image until somebody writes to that. That of a passed file is the sender's.
pub fn end_marks(layers: &[ReopenedLayer], over: Option<MapId>) {
    let over = over.map(|id| hex(&id));
    let stays =
        |layer: &ReopenedLayer| over.is_some() && mark::read(&layer.file).ok().flatten().map(|mark| mark.map) == over;
    let ends = |layer: &&ReopenedLayer| !layer.from.are_handed() && !stays(layer);
    layers.iter().filter(ends).for_each(|layer| drop(mark::end(&layer.file)));
}

/// Reopens the files of all layers read-only.
pub fn lower(layers: Vec<ReopenedLayer>) -> Lowered {
    layers.into_iter().map(|layer| (layer.id, layer.from.reopen_read_only(&layer.file))).collect()
}

/// Makes the disk use files that were reopened read-only. If that fails, a layer stays as it was, and no other disk can
/// be based on it.
pub fn put_back(lowered: Lowered, work: &mut Work<'_>) {
    for (id, file) in lowered {
        let replaced = file.map_err(Failure::from).and_then(|file| Ok(work.engine.replace(id, file)?));
        if let Err(refusal) = replaced {
            say(format_args!("a parent could not be reopened read-only: {}", refusal.what()));
        }
    }
}

impl ReopenedLayer {
    /// Returns the number of its file.
    pub fn id(&self) -> FileId {
        self.id
    }

    /// Returns the path of its file.
    pub fn path(&self) -> &Path {
        self.file.path()
    }
}

#[cfg(test)]
mod test {
    use std::path::Path;
    use std::time::{Duration, SystemTime};

    use uring::{Cache, OpenOptions};

    use super::*;
    use crate::image::chain::Layers;
    use crate::image::create::{Allocation, Plan, Target};
    use crate::image::parent_link;
    use arguments::Parents;
    use control::FormatName;

    const WRITABLE: OpenOptions = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    const READABLE: OpenOptions = OpenOptions { write: false, ..WRITABLE };

    /// Creates a chain, leaf first. The files were last changed long ago, as their children have recorded.
    fn chain(directory: &Path, formats: &[FormatName]) -> Vec<ImageName> {
        let (files, mut names) = (&Files::of_system(), Vec::<ImageName>::new());
        for (n, &format) in formats.iter().enumerate().rev() {
            let name = ImageName { format, path: directory.join(format!("{n}.img")), data_file: None };
            let allocation = names.first().map_or(Allocation::Thin, |parent| {
                let mut file = ImageFile::open(parent.path(), READABLE).unwrap();
                let image = open_image(files, parent, &mut file, false).unwrap();
                Allocation::Child(parent_link::record(files, name.path(), parent, &image, &file).unwrap())
            });
            let plan = Plan {
                len: 4 << 20,
                allocation,
                unit: None,
                compression: disk::qcow2::Compression::default(),
                identity: None,
            };
            Target::create(files, &name, &plan, false).unwrap().keep().unwrap();
            let then = SystemTime::now() - Duration::from_secs(86400);
            std::fs::File::open(name.path()).unwrap().set_modified(then).unwrap();
            names.insert(0, name);
        }
        names
    }

    fn layer(depth: usize, name: &ImageName, options: OpenOptions) -> ReopenedLayer {
        let file = ImageFile::open(name.path(), options).unwrap();
        ReopenedLayer {
            from: Files::of_system(),
            depth,
            id: FileId(u8::try_from(depth).unwrap()),
            name: name.clone(),
            file,
        }
    }

    fn opens(names: &[ImageName]) {
        let (leaf, parents) = names.split_first().unwrap();
        let parents = Parents { names: parents.to_vec(), accept_changed_parent: false };
        Layers::open(&Files::of_system(), leaf, &parents, READABLE).unwrap();
    }

    /// Exhaustive over the depth in a chain of four at which a file cannot be written.
    #[test]
    fn parent_times_are_forgotten_top_down_and_the_chain_always_opens() {
        use FormatName::{Qcow2, Raw, Vhd};
        for formats in [[Vhd; 4], [Qcow2; 4], [Vhd, Qcow2, Vhd, Qcow2], [Qcow2, Vhd, Qcow2, Raw]] {
            for end in 0..formats.len() {
                let room = tempfile::tempdir().unwrap();
                let names = chain(room.path(), &formats);
                opens(&names);
                let options = |depth| if depth == end { READABLE } else { WRITABLE };
                let layers = names.iter().enumerate().map(|(depth, name)| layer(depth, name, options(depth)));
                let forgotten = forget_parents(layers.collect());
                // The last one has no parent to drop.
                assert_eq!(forgotten.is_ok(), end == 3, "{forgotten:?}");
                drop(forgotten);
                opens(&names);
            }
        }
    }
}
