//! Reads the metadata of files with disk processes, a few at a time. The format is given by the file name; the disk
//! process rejects a file of another format.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use api::{Code, ImageFormat, Problem, Sr, Unplaced};
use futures_util::{StreamExt, stream};
use repo::driver::Directory;
use serde::Deserialize;
use uuid::Uuid;

use super::listing::{Candidate, unplaced};
use super::placement::{Found, Recorded};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names::image_name;
use crate::task::Context;

/// Maximum number of concurrent disk processes.
const AT_ONE_TIME: usize = 4;

/// The used fields of a layer in the output of `image info`.
#[derive(Debug, Deserialize)]
struct ImageInfo {
    size: u64,
    uuid: Option<Uuid>,
    hidden: bool,
    parent: Option<Parent>,
}

#[derive(Debug, Deserialize)]
struct Parent {
    format: Option<ImageFormat>,
    uuid: Option<Uuid>,
    relative: Option<PathBuf>,
    absolute: Option<PathBuf>,
}

/// Reads all files. Files that do not have the format of their name are reported; files that have disappeared in the
/// meantime are not.
pub async fn of_all(
    daemon: &Daemon,
    sr: &Sr,
    directory: &Arc<Directory>,
    files: Vec<Candidate>,
    context: Option<&Context>,
) -> Result<(Vec<Found>, Vec<Unplaced>), Problem> {
    let count = files.len();
    let (mut found, mut odd) = (Vec::new(), Vec::new());
    let mut reading = stream::iter(files)
        .map(|file| async move { (file.clone(), of(daemon, sr, directory, file).await) })
        .buffer_unordered(AT_ONE_TIME);
    for done in 1..=count {
        context.map_or(Ok(()), Context::check)?;
        match reading.next().await {
            Some((_, Ok(one))) => found.push(one),
            Some((file, Err(problem))) if file.known.is_some() => {
                tracing::warn!(sr = %sr.uuid, file = file.file, "a known image cannot be examined: {problem}");
                found.push(Found::of_known(file));
            }
            Some((_, Err(problem))) if problem.code == Code::NotFound => {}
            Some((file, Err(problem))) => odd.push(unplaced(file.file, problem)),
            None => break,
        }
        if let Some(context) = context {
            context.progress(part(done, count));
        }
    }
    // Sorted, so that the order does not depend on timing.
    found.sort_by(|one: &Found, other| one.file.file.cmp(&other.file.file));
    Ok((found, odd))
}

/// The completed fraction, 0 to 1.
fn part(done: usize, of: usize) -> f64 {
    let number = |count: usize| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
    number(done) / number(of).max(1.0)
}

async fn of(daemon: &Daemon, sr: &Sr, directory: &Arc<Directory>, file: Candidate) -> Result<Found, Problem> {
    // The contents of a raw disk created here are the guest's and say nothing about it; its file is named by a UUID.
    let is_ours = || file.known.is_some() || Path::new(&file.file).file_stem().is_some_and(is_uuid);
    if file.format == ImageFormat::Raw && is_ours() {
        return Ok(Found { size: file.len, file, identity: None, hidden: false, parent: None });
    }
    let (opened, name) = (directory.clone(), file.file.clone());
    let open = daemon.srs.patience.ask(sr.uuid, "open a file of", move || opened.open_image(&name, false)).await?;
    let path = directory.path().join(&file.file);
    let name = image_name(file.format, path.clone()).word();
    let mut handing = Handing::default();
    handing.file(&path, false, open);
    let layers: Vec<ImageInfo> = daemon.tool.image(vec!["info".into(), name, "--unknown".into()], handing).await?;
    let layer = layers.into_iter().next().ok_or_else(|| {
        Problem::new(Code::Internal, format!("cannot parse the output of 'image info' for {}", path.display()))
    })?;
    let parent = layer.parent.map(|parent| recorded(parent, directory.path()));
    Ok(Found { size: layer.size, file, identity: layer.uuid, hidden: layer.hidden, parent })
}

fn is_uuid(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.parse::<Uuid>().is_ok())
}

fn recorded(parent: Parent, directory: &Path) -> Recorded {
    let shown = match (&parent.relative, &parent.absolute, parent.uuid) {
        (Some(path), ..) | (None, Some(path), _) => format!("'{}'", path.display().to_string().escape_debug()),
        (None, None, Some(uuid)) => format!("an image {uuid}"),
        (None, None, None) => "an unrecorded image".into(),
    };
    let file = name_here(parent.relative.as_deref(), parent.absolute.as_deref(), directory);
    Recorded { identity: parent.uuid, file, format: parent.format, shown }
}

/// The local file name that a parent's recorded paths refer to: a relative path as seen from the repository, an
/// absolute one only if it is in the repository.
fn name_here(relative: Option<&Path>, absolute: Option<&Path>, directory: &Path) -> Option<String> {
    let near = relative.map(|path| path.strip_prefix(".").unwrap_or(path));
    let name = near.or_else(|| absolute.and_then(|path| path.strip_prefix(directory).ok()))?;
    let mut parts = name.components();
    let first = parts.next()?;
    let plain = matches!(first, std::path::Component::Normal(_)) && parts.next().is_none();
    plain.then(|| name.to_str().map(String::from)).flatten()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_recorded_path_is_local_or_in_another_directory() {
        let here = |relative: &str| name_here(Some(Path::new(relative)), None, Path::new("/srv"));
        assert_eq!(here("./base.vhd").as_deref(), Some("base.vhd"));
        assert_eq!(here("base.vhd").as_deref(), Some("base.vhd"));
        for elsewhere in ["../base.vhd", "a/base.vhd", "./a/../base.vhd", "/etc/passwd", "..", ".", ""] {
            assert_eq!(here(elsewhere), None, "{elsewhere:?}");
        }
        let absolute = |path: &str| name_here(None, Some(Path::new(path)), Path::new("/srv"));
        assert_eq!(absolute("/srv/base.qcow2").as_deref(), Some("base.qcow2"));
        assert_eq!(absolute("/srv2/base.qcow2"), None);
        assert_eq!(absolute("/srv/a/base.qcow2"), None);
    }
}
