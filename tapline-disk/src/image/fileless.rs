//! Disks without a file, for measurements: `null:SIZE`, on an engine that does nothing, and `model:KIND`, on one that
//! simulates the latency of a drive.
//!
//! It knows nothing about requests. Invariant: such a disk is never one of several layers, and is marked as such
//! wherever it is served or shown.

use control::{ImageName, Kind};
use disk::Image;
use disk::raw::Raw;
use uring::{EngineKind, ImageFile};

use crate::process::failure::{Failure, explain};

/// The warning about such a disk, for people.
pub const WARNING: &str = "it stores NOTHING: what is written is dropped, and reads leave memory as it is";

/// Opens the one disk without a file: returns its name, a stand-in for its file, and its image; `None` if all have
/// files.
pub fn open(names: &[&ImageName], write: bool) -> Result<Option<(ImageName, ImageFile, Image)>, Failure> {
    let Some(name) = names.iter().find(|name| name.format.stores_nothing()) else { return Ok(None) };
    let failed = |why: &str| Failure::new(format!("open {name}"), why).of_kind(Kind::Invalid);
    if names.len() > 1 {
        return Err(failed("null: and model: disks cannot have or be parents").advise("remove the --parent options"));
    }
    let len = name.len_without_file().ok_or_else(|| failed("it has no size"))?;
    let file = ImageFile::of_nothing(name.path(), len, write).map_err(Failure::said)?;
    let image = Raw::of_file(len, !write).map_err(|error| explain(name, error))?;
    Ok(Some(((*name).clone(), file, Image::Raw(image))))
}

/// Returns the engine of a disk without a file, else `None`. `requested` is from the command line.
pub fn engine(name: &ImageName, requested: Option<EngineKind>) -> Result<Option<EngineKind>, Failure> {
    match (name.format.stores_nothing(), requested) {
        (false, _) => Ok(None),
        (true, None) => match name.model() {
            None => Ok(Some(EngineKind::Null)),
            Some(kind) => kind
                .parse()
                .map(|preset| Some(EngineKind::Model(preset)))
                .map_err(|why: String| Failure::new(format!("open {name}"), why).of_kind(Kind::Invalid)),
        },
        (true, Some(_)) => {
            let why = "a disk without a file does no I/O, so that no engine can be chosen";
            Err(Failure::new(format!("open {name}"), why).of_kind(Kind::Invalid).advise("leave --io-engine out"))
        }
    }
}
