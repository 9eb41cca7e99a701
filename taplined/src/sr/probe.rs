//! `sr probe`: looks for a repository on a storage. Changes nothing there; storage that was mounted for this is
//! unmounted again.

use api::{AbsolutePath, Code, ImageFormat, Problem, SrFound, SrSource};
use repo::driver::{Directory, Label, check_empty};
use uuid::Uuid;

use super::Srs;

/// The expected format of a file, by its name; its contents may differ.
pub fn format_of(name: &str) -> Option<ImageFormat> {
    let (stem, extension) = name.rsplit_once('.')?;
    match (stem, extension) {
        ("", _) => None,
        (_, "vhd") => Some(ImageFormat::Vhd),
        (_, "qcow2") => Some(ImageFormat::Qcow2),
        (_, "raw" | "img" | "iso") => Some(ImageFormat::Raw),
        _ => None,
    }
}

/// Adds advice about a missing directory; for `map_err`.
pub fn no_directory(then: &'static str) -> impl FnOnce(Problem) -> Problem {
    move |problem| match problem.code {
        Code::NotFound | Code::Invalid if problem.advice.is_none() => {
            problem.field("source").advise(format!("give a directory that exists; {then}"))
        }
        _ => problem,
    }
}

impl Srs {
    /// The repositories on a storage.
    pub async fn probe(&self, source: &SrSource) -> Result<Vec<SrFound>, Problem> {
        repo::driver::mount::check(source)?;
        let known = self.catalogue.read(|view| view.srs()).await?;
        if let Some(sr) = known.iter().find(|sr| sr.source == *source && self.open().contains_key(&sr.uuid)) {
            let path = self.place_of(sr).await?;
            return self.look(sr.uuid, path, true).await.map(|found| found.into_iter().collect());
        }
        // A mount point of its own, for this probe.
        let uuid = Uuid::new_v4();
        let path = self.places.find(uuid, source).await?;
        let found = self.look(uuid, path, false).await;
        self.places.leave(uuid, source).await?;
        let found = found.map_err(no_directory("check that its storage is mounted"))?.map(|found| {
            let known = known.iter().any(|sr| sr.uuid == found.uuid);
            SrFound { known, ..found }
        });
        Ok(found.into_iter().collect())
    }

    async fn look(&self, uuid: Uuid, path: AbsolutePath, known: bool) -> Result<Option<SrFound>, Problem> {
        let looked = self.patience.ask(uuid, "examine", move || {
            let directory = Directory::open(&path)?;
            let Some(label) = Label::read(&directory)? else { return Ok(None) };
            let entries = directory.entries()?;
            let images = entries.iter().filter(|entry| entry.file && format_of(&entry.name).is_some()).count();
            Ok(Some(SrFound { uuid: label.uuid, name: label.name, known, images: images as u64 }))
        });
        looked.await
    }

    /// Refuses to introduce an empty directory: it would be taken for a repository whose images are lost.
    pub async fn must_have_images(&self, path: &AbsolutePath) -> Result<(), Problem> {
        let looked_at = path.clone();
        let looked = self
            .patience
            .ask(Uuid::new_v4(), "examine", move || Ok(check_empty(&Directory::open(&looked_at)?).is_ok()));
        if !looked.await? {
            return Ok(());
        }
        let what = format!("there is neither a repository nor an image in {path}: it is empty");
        let advice = "check that its storage is mounted; to make a new repository there, use 'sr create'";
        Err(Problem::new(Code::NotFound, what).field("source").advise(advice))
    }

    /// The repository on a storage, for `sr introduce`.
    pub async fn found_at(&self, source: &SrSource) -> Result<Option<SrFound>, Problem> {
        Ok(self.probe(source).await?.into_iter().next())
    }
}
