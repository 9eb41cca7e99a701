//! Disks without a file, for measurements: `null:SIZE`, over an engine that does nothing, and `model:KIND`, over one
//! that takes its time for that.
//!
//! It knows no requests. Invariant: such a disk is never a layer among others, and what it is, is said wherever it is
//! served or shown.

use control::{ImageName, Kind};
use disk::Image;
use disk::raw::Raw;
use uring::{EngineKind, ImageFile};

use crate::process::failure::{Failure, explain};

/// What people must know of such a disk.
pub const WARNING: &str = "it stores NOTHING: what is written is dropped, and reads leave memory as it is";

/// The disk among these that has no file, what stands for its file, and what is in there; `None` if each has one.
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

/// The engine of that disk, if it has no file; `asked` is what the command line says.
pub fn engine(name: &ImageName, asked: Option<EngineKind>) -> Result<Option<EngineKind>, Failure> {
    match (name.format.stores_nothing(), asked) {
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
