//! Layers below the leaf, opened for writing while a merge needs that, and for reading only otherwise.
//!
//! Runs on a thread of its own. Invariant: a layer's file is never without a lock that keeps other writers out; where one
//! layer cannot be opened for writing, because another disk stands on it, all of them stay as they were.

use disk::{FileId, Image};
use uring::{FileOpenError, ImageFile};

use super::refusal::{Kind, Refusal};
use super::work::Work;
use crate::image_name::ImageName;
use crate::layers::open_image;

/// A layer that is open for writing now.
#[derive(Debug)]
pub struct Raised {
    /// Its place in the chain.
    pub depth: usize,
    /// Its file's number.
    pub id: FileId,
    /// The file.
    pub file: ImageFile,
    /// What is in it.
    pub image: Image,
}

/// A layer that is to be opened otherwise.
#[derive(Debug)]
pub struct Layer {
    depth: usize,
    id: FileId,
    name: ImageName,
    file: ImageFile,
}

/// Files that are open for reading only (again).
pub type Lowered = Vec<LoweredOne>;

/// One of them.
pub type LoweredOne = (FileId, Result<ImageFile, FileOpenError>);

/// The layers down to `last` that are open for reading only.
pub fn closed(work: &Work<'_>, last: usize) -> Result<Vec<Layer>, Refusal> {
    pick(work, last, false)
}

/// The layers below the leaf that are open for writing.
pub fn open(work: &Work<'_>) -> Result<Vec<Layer>, Refusal> {
    let last = work.disk.layers().len().saturating_sub(1);
    Ok(pick(work, last, true)?.into_iter().filter(|layer| layer.depth > 0).collect())
}

fn pick(work: &Work<'_>, last: usize, writable: bool) -> Result<Vec<Layer>, Refusal> {
    let mut layers = Vec::new();
    for depth in 0..=last {
        let (id, file) = work.file(depth)?;
        if file.options().write == writable {
            layers.push(Layer { depth, id, name: work.name(depth)?, file: file.try_clone()? });
        }
    }
    Ok(layers)
}

/// Opens all of them for writing, or none: then what is to be put in their place again.
pub fn raise(layers: Vec<Layer>) -> Result<Vec<Raised>, (Refusal, Lowered)> {
    let mut raised: Vec<Raised> = Vec::new();
    for layer in layers {
        match raise_one(layer) {
            Ok(one) => raised.push(one),
            Err((refusal, own)) => {
                let others = take_back(raised);
                return Err((refusal, others.into_iter().chain(own).collect()));
            }
        }
    }
    Ok(raised)
}

/// Opens for reading only what was opened for writing in vain.
pub fn take_back(raised: Vec<Raised>) -> Lowered {
    raised.into_iter().map(|one| (one.id, one.file.reopen_read_only())).collect()
}

fn raise_one(layer: Layer) -> Result<Raised, (Refusal, Option<LoweredOne>)> {
    let Layer { depth, id, name, file } = layer;
    let mut writable = match file.reopen_writable() {
        Ok(writable) => writable,
        Err(error @ FileOpenError::InUse { .. }) => {
            let what = format!("layer {depth}, {name}, is shared: another disk stands on it, and would change with it");
            let advice = "merge into a layer above the shared one, or end the other disk first";
            return Err((Refusal::from(error).with_reason(&what).of_kind(Kind::InUse).advise(advice), None));
        }
        Err(error) => return Err((error.into(), None)),
    };
    match open_image(&name, &mut writable, true) {
        Ok(image) => Ok(Raised { depth, id, file: writable, image }),
        Err(failure) => Err((failure.into(), Some((id, writable.reopen_read_only())))),
    }
}

/// Opens all of them for reading only.
pub fn lower(layers: Vec<Layer>) -> Lowered {
    layers.into_iter().map(|layer| (layer.id, layer.file.reopen_read_only())).collect()
}
