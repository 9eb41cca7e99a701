//! The files of images in a repository: created, measured, recorded and removed by the steps of jobs.

use api::{ImageFormat, Problem};
use repo::catalogue::{Image, NewVdi};
use serde::de::IgnoredAny;
use uuid::Uuid;

use super::file_name;
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::task::blocking;

/// Creates a file with an empty image, as a child of `parents` if given.
pub async fn make_image(
    daemon: &Daemon,
    sr: Uuid,
    image: Uuid,
    format: ImageFormat,
    words: Vec<std::ffi::OsString>,
    parents: Option<&super::Chain>,
) -> Result<(), Problem> {
    let directory = daemon.srs.directory(sr).await?;
    let file = file_name(image, format);
    let path = directory.path().join(&file);
    let mut handing = Handing::default();
    let parents = parents.cloned();
    let names =
        std::iter::once(names::image_name(format, path.clone())).chain(parents.iter().flat_map(super::Chain::names));
    let mut all = vec!["create".into()];
    all.extend(names::words_of(names));
    all.extend(words);
    let opened = blocking("create a file", move || {
        handing.file(&path, true, directory.create_image(&file)?);
        parents.iter().try_for_each(|parents| parents.hand(&mut handing, 0))?;
        Ok(handing)
    });
    Ok(daemon.tool.image(all, opened.await?).await.map(|IgnoredAny| ())?)
}

/// The catalogue entry of a new image.
pub async fn described(
    daemon: &Daemon,
    sr: Uuid,
    uuid: Uuid,
    format: ImageFormat,
    size: u64,
    parent: Option<Uuid>,
) -> Result<Image, Problem> {
    let image = Image::new(uuid, sr, format, size, parent);
    Ok(Image { physical: physical(daemon, sr, &image.file).await?, ..image })
}

/// The physical size of a file of a repository in bytes.
pub async fn physical(daemon: &Daemon, sr: Uuid, file: &str) -> Result<u64, Problem> {
    let (directory, file) = (daemon.srs.directory(sr).await?, file.to_owned());
    daemon.disks.open_files.release_held(&file);
    blocking("examine a file", move || directory.physical(&file)).await
}

/// Records an image and its VDI, unless a repeated step already has.
pub fn record_once(tx: &mut repo::Tx<'_>, image: &Image, vdi: Option<&NewVdi>) -> Result<(), Problem> {
    if tx.find_image(image.uuid)?.is_some() {
        return Ok(());
    }
    tx.add_image(image)?;
    vdi.map_or(Ok(()), |vdi| tx.add_vdi(vdi))
}

/// Removes an unused file of a repository; not an error if it does not exist.
pub async fn remove_file(daemon: &Daemon, sr: Uuid, file: &str) -> Result<(), Problem> {
    let (directory, file) = (daemon.srs.directory(sr).await?, file.to_owned());
    blocking("remove a file", move || directory.remove_unused(&file)).await
}

/// Removes the file created by a job that is rolled back, unless the catalogue has it as an image: a job of an older
/// catalogue, restored from a backup, must not remove what has become part of a disk since.
pub async fn remove_unrecorded(daemon: &Daemon, sr: Uuid, file: &str) -> Result<(), Problem> {
    let name = file.to_owned();
    match daemon.catalogue.read(move |view| view.image_of_file(sr, &name)).await? {
        Some(_) => Ok(()),
        None => remove_file(daemon, sr, file).await,
    }
}
