//! The files of a VDI, from its own image down, as named and passed to a disk process.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use api::{ImageUrl, LogicalBlockSize, Problem, SourceFormat};
use control::ImageName;
use repo::catalogue::Image;
use repo::driver::Directory;
use serde::Deserialize;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::control::{PassedFile, Refused};
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::task::blocking;

/// A chain of images in a directory.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The directory of the images.
    pub directory: Arc<Directory>,
    /// The images, from the top down.
    pub images: Vec<Image>,
}

impl Chain {
    /// The chain of a VDI.
    pub async fn of_vdi(daemon: &Daemon, vdi: Uuid) -> Result<Chain, Problem> {
        let images = daemon.catalogue.read(move |view| view.chain(vdi)).await?;
        Chain::of(daemon, images).await
    }

    /// The chain of an image.
    pub async fn of_image(daemon: &Daemon, image: Uuid) -> Result<Chain, Problem> {
        let images = daemon.catalogue.read(move |view| view.chain_of_image(image)).await?;
        Chain::of(daemon, images).await
    }

    async fn of(daemon: &Daemon, images: Vec<Image>) -> Result<Chain, Problem> {
        let sr = images.first().map_or(Uuid::nil(), |image| image.sr);
        Ok(Chain { directory: daemon.srs.directory(sr).await?, images })
    }

    /// The name of an image for a disk process: `FORMAT:PATH`.
    pub fn name(&self, image: &Image) -> ImageName {
        names::image_name(image.format, image.path(self.directory.path()))
    }

    /// The names of all images, from the top down.
    pub fn names(&self) -> Vec<ImageName> {
        self.images.iter().map(|image| self.name(image)).collect()
    }

    /// The arguments of a disk process: the first image, and `--parent` for each one below it.
    pub fn words(&self) -> Vec<OsString> {
        names::words_of(self.names())
    }

    /// Opens all files to be passed on: the first `writable` of them for writing too.
    pub async fn handing(&self, writable: usize) -> Result<Handing, Problem> {
        let chain = self.clone();
        blocking("open files", move || {
            let mut handing = Handing::default();
            chain.hand(&mut handing, writable).map(|()| handing)
        })
        .await
    }

    /// Opens the files below the first one, down to layer `into`, for writing: a disk process that merges them has
    /// them open read-only, and each of them gets a new parent recorded or receives data.
    pub async fn files_below(&self, into: usize) -> Result<Vec<PassedFile>, Problem> {
        let chain = self.clone();
        let opened = blocking("open files", move || {
            let below = chain.images.iter().take(into.saturating_add(1)).skip(1);
            let open = |image: &Image| {
                let file = chain.directory.open_image(&image.file, true)?;
                Ok(PassedFile { path: image.path(chain.directory.path()), write: true, file })
            };
            below.map(open).collect()
        });
        opened.await
    }

    /// Makes `to` share all blocks of the first image.
    pub async fn share(self, to: String) -> Result<(), Problem> {
        blocking("share blocks", move || match self.images.first() {
            Some(image) => self.directory.share_image(&image.file, &to),
            None => Ok(()),
        })
        .await
    }

    /// Opens all files and adds them to `handing`: the first `writable` of them for writing too.
    pub fn hand(&self, handing: &mut Handing, writable: usize) -> Result<(), Problem> {
        for (depth, image) in self.images.iter().enumerate() {
            let write = depth < writable;
            let file = self.directory.open_image(&image.file, write)?;
            handing.file(&image.path(self.directory.path()), write, file);
        }
        Ok(())
    }
}

/// The size of a chain's first image, in bytes, from its own metadata.
pub async fn size(daemon: &Daemon, chain: &Chain) -> Result<u64, Problem> {
    info(daemon, chain).await.map(|info| info.size)
}

/// The used fields of a layer in the output of `image info`.
#[derive(Debug, Deserialize)]
pub struct Info {
    /// Virtual size in bytes.
    pub size: u64,
    /// Physical size of the file in bytes.
    pub file_allocated: u64,
    /// Only for the lowest image: the logical block size unless another one is recorded.
    logical_block_size: Option<LogicalBlockSize>,
    /// Only for a VHDX.
    vhdx: Option<Vhdx>,
}

/// The fields of a VHDX.
#[derive(Debug, Deserialize)]
struct Vhdx {
    logical_sector_size: LogicalBlockSize,
}

impl Info {
    /// The logical block size that the image itself records, which only a VHDX does: that of its storage is no
    /// property of the disk.
    pub fn recorded_block_size(&self) -> Option<LogicalBlockSize> {
        self.vhdx.as_ref().map(|vhdx| vhdx.logical_sector_size)
    }
}

/// The metadata of a chain's first image.
pub async fn info(daemon: &Daemon, chain: &Chain) -> Result<Info, Problem> {
    layers(daemon, chain)
        .await?
        .into_iter()
        .next()
        .ok_or_else(|| Problem::failed("examine an image", "nothing was said about it"))
}

async fn layers(daemon: &Daemon, chain: &Chain) -> Result<Vec<Info>, Problem> {
    let mut words = vec!["info".into()];
    words.extend(chain.words());
    Ok(daemon.tool.image(words, chain.handing(0).await?).await?)
}

/// The logical block size of a chain whose VDI has none recorded.
pub async fn block_size(daemon: &Daemon, chain: &Chain) -> Result<LogicalBlockSize, Problem> {
    Ok(layers(daemon, chain).await?.pop().and_then(|lowest| lowest.logical_block_size).unwrap_or_default())
}

/// The metadata of an image file of the host that has no parent.
pub async fn look_at(
    daemon: &Daemon,
    path: &api::AbsolutePath,
    format: SourceFormat,
    really_raw: bool,
    file: std::fs::File,
) -> Result<Info, Problem> {
    let looked = look_at_file(daemon, path.as_path(), format, really_raw, file).await;
    looked.map_err(|problem| if problem.code == api::Code::Invalid { problem.field("path") } else { problem })
}

/// The same, of a file that no client has named.
pub async fn look_at_file(
    daemon: &Daemon,
    path: &Path,
    format: SourceFormat,
    really_raw: bool,
    file: std::fs::File,
) -> Result<Info, Problem> {
    let mut handing = Handing::default();
    handing.file(path, false, file);
    let words = vec!["info".into(), names::image_name(format, path.to_owned()).word()];
    first_layer(daemon, words, really_raw, handing).await
}

/// How long the metadata of an image at an HTTP server may take, for which a client waits.
const LOOK_AT_URL: Duration = Duration::from_secs(60);

/// The metadata of an image at an HTTP server that is new to the catalogue.
pub async fn look_at_url(
    daemon: &Daemon,
    url: &ImageUrl,
    format: SourceFormat,
    really_raw: bool,
    insecure_http: bool,
) -> Result<Info, Problem> {
    let mut words = vec!["info".into(), names::image_name(format, url.as_str().into()).word()];
    // A client is waiting for the answer.
    words.extend(["--patience", "10"].map(OsString::from));
    words.extend(insecure_http.then(|| "--insecure-http".into()));
    let looking = first_layer(daemon, words, really_raw, Handing::with_network());
    // The process ends with the future.
    let looked = tokio::time::timeout(LOOK_AT_URL, looking).await.unwrap_or_else(|_| {
        let what = format!("{url} was not read in {} s", LOOK_AT_URL.as_secs());
        Err(Problem::new(api::Code::Timeout, what).advise("its server is too slow: download it first: curl -fLO URL"))
    });
    looked.map_err(|problem| if problem.code == api::Code::Invalid { problem.field("url") } else { problem })
}

async fn first_layer(
    daemon: &Daemon,
    mut words: Vec<OsString>,
    really_raw: bool,
    handing: Handing,
) -> Result<Info, Problem> {
    if !really_raw {
        words.push("--unknown".into());
    }
    let layers: Vec<Info> = daemon.tool.image(words, handing).await.map_err(|refused| {
        use control::Kind::{Invalid, NotAnImage, Unsupported};
        // A file of another format, or with a parent, is an error in the request.
        let wrong =
            matches!(&refused, Refused::Disk(error) if matches!(error.kind, Invalid | NotAnImage | Unsupported));
        let problem = Problem::from(refused);
        if wrong { Problem { code: api::Code::Invalid, ..problem } } else { problem }
    })?;
    match layers.into_iter().next() {
        Some(info) if info.size > 0 => Ok(info),
        _ => Err(Problem::new(api::Code::Invalid, "the file contains no disk image")),
    }
}
