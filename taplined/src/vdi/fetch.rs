//! `vdi-fetch`: creates a VDI from an image at an HTTP server.
//!
//! 1. `fetch`: the file is downloaded next to the images of the repository, and verified by its digest if that is
//!    known. *If killed:* the next daemon continues the download, if the file at the server is still the same.
//! 2. `copy`: it is converted into a new image, as an import from a file. *If killed:* that is repeated.
//! 3. `record`: the VDI becomes known by its name, and the downloaded file is removed. *If killed before:* as above.
//!    *After:* done.
//!
//! The process that talks to the server knows nothing of images, and the one that reads the image has no network; only
//! the look at its metadata that precedes the job has both. Neither is this daemon.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use api::{About, Code, FileChecksum, ImageUrl, LogicalBlockSize, Problem, SourceFormat, Transfer};
use control::Progress;
use control::pace::Pace;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::file::remove_file;
use super::target::Target;
use super::{about_vdi, chain};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::task::job::{Job, declare_steps};
use crate::task::{Context, blocking};

/// How long a server may be away, in seconds: what has arrived is not given up for a restart or a failure of the line.
const PATIENCE: &str = "900";
/// The process of a daemon that was killed ends a moment later, and has the file locked until then.
const LOCKED: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(200);

/// The intent of `vdi-fetch`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Fetch {
    /// The image.
    pub url: ImageUrl,
    /// Its format.
    pub format: SourceFormat,
    /// Whether it is raw although it looks like an image of another format.
    pub really_raw: bool,
    /// The digest that it must have.
    pub checksum: Option<FileChecksum>,
    /// Whether it may be read over plain HTTP without a digest.
    pub insecure_http: bool,
    /// The size in bytes for which there is space, and the size of the sectors of the disk, as they were at first.
    pub seen: (u64, Option<LogicalBlockSize>),
    /// The file that is downloaded, in the repository.
    pub file: String,
    /// The VDI to create.
    pub target: Target,
}

/// The name of a new file to download to.
pub fn new_file() -> String {
    format!("{}.download", Uuid::new_v4())
}

declare_steps!(
    /// The steps of `vdi-fetch`.
    FetchStep { Fetch = "fetch", Copy = "copy", Record = "record" }
);

impl Fetch {
    async fn path(&self, daemon: &Daemon) -> Result<PathBuf, Problem> {
        Ok(daemon.srs.directory(self.target.sr).await?.path().join(&self.file))
    }

    /// Downloads the file, or what is missing of it.
    async fn fetch(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let begun = Instant::now();
        loop {
            match self.fetch_once(daemon, context).await {
                Err(problem) if problem.code == Code::InUse && begun.elapsed() < LOCKED => {
                    tokio::time::sleep(LOOK).await;
                }
                fetched => return fetched,
            }
        }
    }

    async fn fetch_once(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        let (directory, path) = (daemon.srs.directory(self.target.sr).await?, self.path(daemon).await?);
        let name = self.file.clone();
        let opened = blocking("open a file", move || match directory.open_marked(&name, true) {
            Err(problem) if problem.code == Code::NotFound => directory.create_image(&name),
            opened => opened,
        });
        let mut handing = Handing::with_network();
        handing.plain(&path, true, opened.await?);
        let mut words: Vec<OsString> = vec!["fetch".into(), self.url.as_str().into(), path.into()];
        words.extend(["--patience", PATIENCE].map(OsString::from));
        words.extend(["--expect-size".into(), OsString::from(self.seen.0.to_string())]);
        if let Some(checksum) = &self.checksum {
            words.extend(["--checksum", checksum.as_str()].map(OsString::from));
        }
        words.extend(self.insecure_http.then(|| "--insecure-http".into()));
        let mut rate = Rate::default();
        let on_progress = |progress: &Progress| context.transferred(rate.transfer(progress));
        Ok(daemon.tool.measured_image(words, handing, on_progress).await.map(|IgnoredAny| ())?)
    }

    /// Converts what was downloaded.
    async fn copy(&self, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        // A daemon that was killed in this step has left an unfinished image.
        self.target.undo(daemon).await?;
        let (directory, path) = (daemon.srs.directory(self.target.sr).await?, self.path(daemon).await?);
        let name = self.file.clone();
        let open = move || directory.open_marked(&name, false);
        let (look_at, convert) = blocking("open a file", move || Ok((open()?, open()?))).await?;
        let found = chain::look_at_file(daemon, &path, self.format, self.really_raw, look_at).await?;
        // What was seen at first was not verified by a digest.
        if (found.size, found.recorded_block_size()) != (self.target.size, self.seen.1) {
            let (was, is) = (self.target.size, found.size);
            let what = format!(
                "the disk in {} had {was} bytes at first and has {is}, or other sectors: it has been replaced",
                self.url
            );
            return Err(Problem::new(Code::Failed, what).advise("try again"));
        }
        let mut handing = Handing::default();
        handing.file(&path, false, convert);
        let source = vec![names::image_name(self.format, path).word()];
        self.target.fill(daemon, context, source, handing).await
    }
}

/// The rate of a download.
#[derive(Default)]
struct Rate {
    pace: Option<(Instant, Pace)>,
}

impl Rate {
    /// What is shown for a report of the process. A resumed download begins with what it had.
    fn transfer(&mut self, progress: &Progress) -> Transfer {
        let (begun, pace) = match &mut self.pace {
            Some((begun, pace)) if pace.total() == progress.len => (*begun, pace),
            other => {
                let (begun, pace) = other.insert((Instant::now(), Pace::new(progress.len)));
                pace.reach(progress.done);
                (*begun, pace)
            }
        };
        pace.reach(progress.done);
        pace.sample(begun.elapsed());
        let (rate, left) = (pace.rate(), pace.left());
        Transfer { done: progress.done, len: progress.len, rate, left, ..Transfer::default() }
    }
}

impl Job for Fetch {
    type Step = FetchStep;

    const VERB: &'static str = "vdi-fetch";
    const NO_RETURN: FetchStep = FetchStep::Record;

    /// What has arrived is worth more than a roll back.
    fn is_continued(&self, _: FetchStep) -> bool {
        true
    }

    fn changes(&self) -> Vec<Uuid> {
        vec![self.target.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.target.vdi)]
    }

    async fn step(&self, step: FetchStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            FetchStep::Fetch => context.unless_cancelled(self.fetch(daemon, context)).await,
            FetchStep::Copy => context.unless_cancelled(self.copy(daemon, context)).await,
            FetchStep::Record => {
                self.target.record(daemon).await?;
                remove_file(daemon, self.target.sr, &self.file).await
            }
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.target.undo(daemon).await?;
        remove_file(daemon, self.target.sr, &self.file).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.target.vdi })
    }
}
