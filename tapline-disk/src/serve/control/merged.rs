//! The end of a merge: the merged layers are removed from the chain of a quiesced disk, and then their files.

use std::path::{Path, PathBuf};

use control::ImageName;

use super::copying;
use super::work::Work;
use crate::files::Files;
use crate::files::identity::FileIdentity;
use crate::image::parent_link;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The merged layers, which no longer contain data.
#[derive(Debug, Default)]
pub struct Sources {
    /// Their names.
    pub unused: Vec<String>,
    /// Their files.
    files: Vec<(PathBuf, Option<FileIdentity>)>,
}

/// Removes the merged layers from the chain of a quiesced disk.
pub fn end(work: &mut Work<'_>) -> Result<Sources, Failure> {
    let Some(merge) = work.disk.merge() else { unreachable!("no merge has begun") };
    // A write that was in flight at the end of the copying may have found no space in the target since.
    if let disk::MergeState::Failed(status) = merge.state {
        return Err(copying::failed(status));
    }
    let names: Vec<_> = (merge.from..merge.into).map(|depth| work.name(depth)).collect::<Result<_, _>>()?;
    let mut files = Vec::new();
    for depth in merge.from..merge.into {
        files.extend(work.file(depth)?.1.all_files().map(FileIdentity::of_open));
    }
    for layer in work.disk.end_merge()? {
        if let Err(error) = work.engine.remove(layer.file) {
            say(format_args!("a merged file could not be closed: {error}"));
        }
    }
    *work.geometry = work.disk.geometry();
    let paths = names.iter().flat_map(ImageName::paths).map(Path::to_owned);
    Ok(Sources { unused: names.iter().map(ToString::to_string).collect(), files: paths.zip(files).collect() })
}

/// Records the target as the parent of the layer above it.
pub fn link(child: usize, work: &mut Work<'_>) -> Result<(), Failure> {
    let (name, target) = (work.name(child)?, work.name(child + 1)?);
    let mut link =
        parent_link::record(work.files, name.path(), &target, work.image(child + 1)?, work.file(child + 1)?.1)?;
    link.modified = None;
    Ok(work.disk.layer_mut(child)?.relink(Some(&link))?)
}

impl Sources {
    /// Takes the files, to be removed elsewhere; the names stay.
    pub fn take(&mut self) -> Sources {
        Sources { unused: Vec::new(), files: std::mem::take(&mut self.files) }
    }

    /// Removes the files, and logs those that cannot be removed. Returns whether all are gone.
    pub fn remove(&mut self, files: &Files) -> bool {
        let problems: Vec<String> =
            std::mem::take(&mut self.files).iter().filter_map(|file| remove(files, file)).collect();
        problems.iter().for_each(say);
        problems.is_empty()
    }
}

/// Removes a file, unless another file now has its name; returns why it could not be removed.
fn remove(files: &Files, (path, file): &(PathBuf, Option<FileIdentity>)) -> Option<String> {
    let why = match FileIdentity::of_path(files, path) {
        found if found.is_some() && found != *file => "another file now has its name".to_owned(),
        _ => std::fs::remove_file(path).err()?.to_string(),
    };
    Some(format!("the merged file {} cannot be removed: {why}", path.display()))
}
