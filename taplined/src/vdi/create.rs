//! `vdi-create`: an empty VDI.
//!
//! 1. `file`: the image's file is created and written. *If killed:* it is removed; nothing refers to it.
//! 2. `record`: the image and the VDI are in the catalogue. *If killed before:* as above. *After:* done.

use api::{About, ImageFormat, Problem};
use repo::catalogue::{Image, NewVdi};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::target::Target;
use super::{about_vdi, file_name};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// The job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Create(pub Target);

declare_steps!(
    /// The steps of `vdi-create`.
    CreateStep { File = "file", Record = "record" }
);

impl Job for Create {
    type Step = CreateStep;

    const VERB: &'static str = "vdi-create";
    const NO_RETURN: CreateStep = CreateStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.0.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.0.vdi)]
    }

    async fn step(&self, step: CreateStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let Target { sr, image, format, size, .. } = self.0;
        let words = vec!["--size".into(), size.to_string().into()];
        match step {
            CreateStep::File => context.unless_cancelled(make_image(daemon, sr, image, format, words, None)).await,
            CreateStep::Record => self.0.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.0.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.0.vdi })
    }
}

/// Creates a file and an empty image in it; a child of `parents` if there are any.
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
    daemon.disks.open_files.let_go_of(&file);
    blocking("examine a file", move || directory.physical(&file)).await
}

/// Records an image and its VDI, unless a step that was done before has.
pub fn record_once(tx: &mut repo::Tx<'_>, image: &Image, vdi: Option<&NewVdi>) -> Result<(), Problem> {
    if tx.find_image(image.uuid)?.is_some() {
        return Ok(());
    }
    tx.add_image(image)?;
    vdi.map_or(Ok(()), |vdi| tx.add_vdi(vdi))
}

/// Removes an unused file of a repository; it is fine if it does not exist.
pub async fn remove_file(daemon: &Daemon, sr: Uuid, file: &str) -> Result<(), Problem> {
    let (directory, file) = (daemon.srs.directory(sr).await?, file.to_owned());
    blocking("remove a file", move || directory.remove_unused(&file)).await
}

/// Removes the file created by a job that is rolled back, unless the catalogue has it as an image: a job from an older
/// catalogue, restored from a backup, must not remove what has become part of a disk since.
pub async fn remove_unrecorded(daemon: &Daemon, sr: Uuid, file: &str) -> Result<(), Problem> {
    let name = file.to_owned();
    match daemon.catalogue.read(move |view| view.image_of_file(sr, &name)).await? {
        Some(_) => Ok(()),
        None => remove_file(daemon, sr, file).await,
    }
}
