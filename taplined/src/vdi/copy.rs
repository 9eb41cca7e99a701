//! `vdi-copy`, `vdi-import`, `vdi-export`: copy a disk's full contents into an independent image.
//!
//! 1. `copy`: a file is created and filled; nothing refers to it yet. *If killed:* it is removed.
//! 2. `record` (or `name`, for an export): it becomes known by its name. *If killed before:* as above. *After:* done.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use api::{About, AbsolutePath, Code, Download, ImageFormat, LogicalBlockSize, Problem, SourceFormat};
use jiff::Timestamp;
use repo::replace::sync_parent;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::target::Target;
use super::{Chain, about_vdi, file_name};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::download;
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// The intent of `vdi-copy`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Copy {
    /// The VDI to copy.
    pub source: Uuid,
    /// The VDI to create.
    pub target: Target,
}

/// The intent of `vdi-import`: creates a VDI from a file of the host, or from an upload.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Import {
    /// The file; for an upload, its name in messages.
    pub path: AbsolutePath,
    /// The upload, if the source is one.
    pub upload: Option<Uuid>,
    /// Its format.
    pub format: SourceFormat,
    /// The VDI to create.
    pub target: Target,
}

/// The intent of `vdi-export`: writes a VDI into a new file of the host, or into a download.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Export {
    /// The VDI to write.
    pub source: Uuid,
    /// The file; of a download, its name in messages.
    pub path: AbsolutePath,
    /// The download, if it is one.
    #[serde(default)]
    pub download: Option<Uuid>,
    /// Its format.
    pub format: ImageFormat,
    /// Distinguishes the unfinished file from all others.
    pub token: Uuid,
    /// The logical block size of the VDI.
    pub block: LogicalBlockSize,
}

impl Target {
    /// Writes `source`, whose files are in `handing`, into a new file.
    pub async fn fill(
        &self,
        daemon: &Daemon,
        context: &Context,
        source: Vec<OsString>,
        mut handing: Handing,
    ) -> Result<(), Problem> {
        let directory = daemon.srs.directory(self.sr).await?;
        let file = file_name(self.image, self.format);
        let path = directory.path().join(&file);
        let name = names::image_name(self.format, path.clone()).word();
        let made = blocking("create a file", move || {
            handing.file(&path, true, directory.create_image(&file)?);
            Ok(handing)
        });
        convert(daemon, context, source, name, made.await?).await
    }
}

/// Runs `image convert SOURCE… TARGET`.
async fn convert(
    daemon: &Daemon,
    context: &Context,
    source: Vec<OsString>,
    target: OsString,
    handing: Handing,
) -> Result<(), Problem> {
    let mut words: Vec<OsString> = vec!["convert".into()];
    let (first, parents) = source.split_first().map_or((None, &[][..]), |(first, rest)| (Some(first.clone()), rest));
    words.extend(first);
    words.push(target);
    words.extend(parents.iter().cloned());
    Ok(daemon.tool.long_image(words, handing, |part| context.progress(part)).await.map(|IgnoredAny| ())?)
}

/// The arguments and open files of a VDI that is only read.
async fn source_of(daemon: &Daemon, vdi: Uuid) -> Result<(Vec<OsString>, Handing), Problem> {
    let chain = Chain::of_vdi(daemon, vdi).await?;
    let words = chain.words();
    Ok((words, chain.handing(0).await?))
}

declare_steps!(
    /// The steps of `vdi-copy` and `vdi-import`.
    CopyStep { Copy = "copy", Record = "record" }
);

impl Job for Copy {
    type Step = CopyStep;

    const VERB: &'static str = "vdi-copy";
    const NO_RETURN: CopyStep = CopyStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.target.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.source), about_vdi(self.target.vdi)]
    }

    async fn step(&self, step: CopyStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            CopyStep::Copy => {
                let (source, handing) = source_of(daemon, self.source).await?;
                context.unless_cancelled(self.target.fill(daemon, context, source, handing)).await
            }
            CopyStep::Record => self.target.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.target.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.target.vdi })
    }
}

impl Job for Import {
    type Step = CopyStep;

    const VERB: &'static str = "vdi-import";
    const NO_RETURN: CopyStep = CopyStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.target.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.target.vdi)]
    }

    async fn step(&self, step: CopyStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            CopyStep::Copy => {
                let mut handing = Handing::default();
                let file = open(daemon, &self.path, self.upload).await?;
                handing.file(self.path.as_path(), false, file);
                let source = vec![names::image_name(self.format, self.path.as_path().to_owned()).word()];
                context.unless_cancelled(self.target.fill(daemon, context, source, handing)).await
            }
            CopyStep::Record => {
                self.target.record(daemon).await?;
                self.upload.into_iter().for_each(|upload| daemon.uploads.remove(upload));
                Ok(())
            }
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.target.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.target.vdi })
    }
}

/// Opens the source of an import: a file of the host, or a complete upload.
pub async fn open(daemon: &Daemon, path: &AbsolutePath, upload: Option<Uuid>) -> Result<File, Problem> {
    match upload {
        Some(upload) => daemon.uploads.arrived(upload),
        None => {
            let path = path.clone();
            blocking("open a file", move || open_source(&path)).await
        }
    }
}

/// Opens a file of the host for reading, without blocking on anything that is not a regular file, such as a FIFO.
fn open_source(path: &AbsolutePath) -> Result<File, Problem> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let failed = |error: std::io::Error| {
        let code = match Errno::from_io_error(&error) {
            Some(Errno::NOENT) => Code::NotFound,
            Some(Errno::NAMETOOLONG | Errno::NOTDIR | Errno::LOOP) => Code::Invalid,
            _ => Code::Failed,
        };
        let problem = Problem::new(code, format!("cannot open {path}: {error}")).field("path");
        match code {
            Code::NotFound => problem.advise("give the path of a file on the daemon's host"),
            _ => problem,
        }
    };
    let opened = rustix::fs::open(path.as_path(), flags, rustix::fs::Mode::empty());
    let file = File::from(opened.map_err(|errno| failed(errno.into()))?);
    match file.metadata().map_err(failed)?.is_file() {
        true => Ok(file),
        false => Err(Problem::new(Code::Invalid, format!("{path} is not a regular file")).field("path")),
    }
}

impl Export {
    fn unfinished(&self) -> PathBuf {
        let mut name = self.path.as_path().as_os_str().to_owned();
        name.push(format!(".{}.unfinished", self.token));
        name.into()
    }

    /// Writes the disk into a download, which is complete then.
    async fn fill(&self, daemon: &Daemon, context: &Context, download: Uuid) -> Result<(), Problem> {
        let vdi = self.source;
        let sr = daemon.catalogue.read(move |view| view.vdi(vdi)).await?.sr;
        let directory = daemon.srs.directory(sr).await?;
        let file = daemon.srs.patience.ask(sr, "create a file for a download", move || directory.scratch()).await?;
        let failed = |error| Problem::failed("examine a download", error);
        let (source, mut handing) = source_of(daemon, vdi).await?;
        handing.file(self.path.as_path(), true, file.try_clone().map_err(failed)?);
        let name = names::image_name(self.format, self.path.as_path().to_owned()).word();
        convert(daemon, context, source, name, handing).await?;
        // The process reads and writes around the page cache, and both would share that. The file has no other name.
        let file = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let made = Download { uuid: download, vdi, sr, format: self.format, size, created: Timestamp::now() };
        download::offer(daemon, made, file)
    }

    async fn copy(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        if let Some(download) = self.download {
            return self.fill(daemon, context, download).await;
        }
        let (source, mut handing) = source_of(daemon, self.source).await?;
        let path = self.unfinished();
        let name = names::image_name(self.format, path.clone()).word();
        let made = blocking("create a file", move || {
            let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path);
            let file = file.map_err(|error| Problem::failed(format_args!("create {}", path.display()), error))?;
            handing.file(&path, true, file);
            Ok(handing)
        });
        convert(daemon, context, source, name, made.await?).await
    }

    /// A property of the disk that the file cannot record: no supported format has a field for it.
    fn warning(&self) -> Option<String> {
        let Export { block, format, path, .. } = self;
        (*block != LogicalBlockSize::default()).then(|| {
            format!(
                "the disk has sectors of {block} bytes, which a {format} image cannot record: set them where {path} is \
                 served, as with vdi import --logical-block-size {block}, or its guest does not find the partitions",
            )
        })
    }

    /// Durably gives the file its final name, without replacing another file.
    fn name(&self) -> Result<(), Problem> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let (from, to) = (self.unfinished(), self.path.as_path());
        if !from.exists() && to.exists() {
            // This step was done before, but perhaps not in full.
            return self.sync_name();
        }
        renameat_with(CWD, &from, CWD, to, RenameFlags::NOREPLACE).map_err(|errno| {
            let code = if errno == rustix::io::Errno::EXIST { Code::Exists } else { Code::Failed };
            Problem::new(code, format!("cannot rename the exported file {}: {errno}", self.path))
        })?;
        self.sync_name()
    }

    fn sync_name(&self) -> Result<(), Problem> {
        let failed = |error| Problem::failed(format_args!("make the name of {} durable", self.path), error);
        sync_parent(self.path.as_path()).map_err(failed)
    }
}

declare_steps!(
    /// The steps of `vdi-export`.
    ExportStep { Copy = "copy", Name = "name" }
);

impl Job for Export {
    type Step = ExportStep;

    const VERB: &'static str = "vdi-export";
    const NO_RETURN: ExportStep = ExportStep::Name;

    /// The name is taken, or the download went with the daemon that had it.
    fn is_hopeless(&self, problem: &Problem) -> bool {
        matches!(problem.code, Code::Exists | Code::NotFound)
    }

    fn changes(&self) -> Vec<Uuid> {
        Vec::new()
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.source)]
    }

    async fn step(&self, step: ExportStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            ExportStep::Copy => context.unless_cancelled(self.copy(daemon, context)).await,
            ExportStep::Name => {
                if let Some(download) = self.download {
                    return daemon.downloads.show(download).map(drop);
                }
                let job = self.clone();
                blocking("rename a file", move || job.name()).await
            }
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        if let Some(download) = self.download {
            daemon.downloads.remove(download);
            return Ok(());
        }
        let path = self.unfinished();
        blocking("remove a file", move || match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Problem::failed(format_args!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        })
        .await
    }

    fn result(&self) -> Value {
        let mut result = match self.download {
            Some(download) => json!({ "uuid": self.source, "download": download }),
            None => json!({ "uuid": self.source, "path": self.path }),
        };
        if let Some(warning) = self.warning() {
            result["warning"] = warning.into();
        }
        result
    }
}
