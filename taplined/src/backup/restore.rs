//! `vdi-restore`: a backup as a new VDI.
//!
//! 1. `copy`: a file is created, with an empty image. A disk process serves it at a socket of the daemon's user to the
//!    backup program, which writes the disk there and makes it durable. Nothing refers to the file yet. *If killed:*
//!    both processes end with the daemon, and the file is removed.
//! 2. `record`: it becomes a VDI. *If killed before:* as above. *After:* done.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use api::{
    About, BackupId, BackupTarget, Code, Description, ImageFormat, Labels, LogicalBlockSize, Name, Problem, Sr, Task,
    VdiRestore,
};
use control::handed::Listens;
use repo::catalogue::{Among, must_divide};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::program::At;
use super::{Machine, Properties};
use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::disk::names;
use crate::disk::oom;
use crate::task::job::{Job, declare_steps};
use crate::task::process::TaskProcess;
use crate::task::{Context, blocking};
use crate::vdi::{Replacement, Target, about_vdi, file_name, format_for, make_image, must_hold};

/// The physical size of a new image before anything is written to it.
const EMPTY: u64 = 1 << 20;

/// The intent of the job.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Restore {
    /// The backup target, as it was when the task began.
    pub from: BackupTarget,
    /// The backup.
    pub backup: BackupId,
    /// The VDI to create.
    pub target: Target,
}

/// What is read of the description of a backup.
#[derive(Debug, Deserialize)]
pub struct Shown {
    /// Its ID, in full.
    pub id: BackupId,
    /// The size of the disk in bytes.
    pub size: u64,
    /// Bytes of it that are not holes, at most.
    data: u64,
    #[serde(default)]
    properties: Value,
}

impl Shown {
    /// Reads the description of a backup.
    pub async fn of(daemon: &Daemon, from: &BackupTarget, backup: &BackupId) -> Result<Shown, Problem> {
        let words = vec![backup.to_string().into()];
        let shown = At::of(from).ask(&["show"], words, daemon.config.storage.patience()).await;
        shown.map_err(|problem| match problem.code {
            Code::NotFound | Code::State => problem.field("backup"),
            _ => problem,
        })
    }

    /// What its maker has kept with it. A backup made by hand has nothing.
    pub fn properties(&self) -> Properties {
        serde_json::from_value(self.properties.clone()).unwrap_or_default()
    }

    /// The machine that it is a part of; refused with this advice if it is of a disk alone.
    pub fn machine(&self, advice: &str) -> Result<Machine, Problem> {
        self.properties().machine.ok_or_else(|| {
            let what = format!("backup {} is of a disk alone, and not of a machine", self.id);
            Problem::new(Code::State, what).field("backup").advise(advice)
        })
    }

    /// Bytes that a restored disk takes.
    pub fn takes(&self) -> u64 {
        self.data.saturating_add(EMPTY)
    }

    /// The disk to restore it to. `block` is the sector size that was requested.
    pub fn target(
        &self,
        sr: &Sr,
        name: Name,
        format: Option<ImageFormat>,
        block: Option<LogicalBlockSize>,
    ) -> Result<Target, Problem> {
        let format = format_for(sr, format)?;
        must_hold(format, self.size)?;
        Ok(Target {
            vdi: Uuid::new_v4(),
            image: Uuid::new_v4(),
            sr: sr.uuid,
            name,
            name_is_default: false,
            description: Description::default(),
            labels: Labels::default(),
            format,
            size: self.size,
            logical_block_size: fitting(self.size, block, self.properties().logical_block_size)?,
        })
    }
}

/// The image that a backup is restored to.
#[derive(Clone, Copy, Debug)]
pub struct NewImage {
    /// The image.
    pub image: Uuid,
    /// Its repository.
    pub sr: Uuid,
    /// Its format.
    pub format: ImageFormat,
    /// The size of the backup in bytes.
    pub size: u64,
}

impl From<&Target> for NewImage {
    fn from(&Target { image, sr, format, size, .. }: &Target) -> NewImage {
        NewImage { image, sr, format, size }
    }
}

impl From<&Replacement> for NewImage {
    fn from(&Replacement { new: image, sr, format, size, .. }: &Replacement) -> NewImage {
        NewImage { image, sr, format, size }
    }
}

/// Starts a `vdi-restore` task.
pub async fn restore(daemon: &Daemon, from: Uuid, asked: VdiRestore) -> Result<Task, Problem> {
    let sr = asked.sr;
    let from = daemon.catalogue.read(move |view| view.backup_target(from)).await?;
    let sr = daemon.catalogue.read(move |view| view.sr(sr)).await.map_err(|problem| problem.field("sr"))?;
    format_for(&sr, asked.format)?;
    let shown = Shown::of(daemon, &from, &asked.backup).await?;
    daemon.srs.room(sr.uuid, shown.takes()).await?;
    let target = shown.target(&sr, asked.name, asked.format, asked.logical_block_size)?;
    let chosen = asked.uuid;
    let target = Target {
        vdi: chosen.unwrap_or(target.vdi),
        description: asked.description,
        labels: Labels { tags: asked.tags, other_config: asked.other_config },
        ..target
    };
    let job = Restore { from, backup: shown.id, target };
    let held = move |job: &Restore, task, tx: &mut repo::Tx<'_>| {
        chosen.map_or(Ok(()), |uuid| tx.take_uuid(uuid, task))?;
        let Target { sr, name, .. } = &job.target;
        tx.take_name(Among::Vdis(*sr), name, task, &format!("restore backup {} as VDI '{name}'", job.backup))
    };
    daemon.tasks.start_job(daemon, job, held).await
}

/// The sector size of a restored disk: the requested one, or that of the disk that was backed up. That may be missing,
/// or not divide the size, of a backup made by hand.
fn fitting(
    size: u64,
    asked: Option<LogicalBlockSize>,
    recorded: Option<LogicalBlockSize>,
) -> Result<LogicalBlockSize, Problem> {
    if let Some(asked) = asked {
        return must_divide(asked, size).map(|()| asked).map_err(|problem| problem.field("logical_block_size"));
    }
    let recorded = recorded.filter(|recorded| must_divide(*recorded, size).is_ok()).unwrap_or_default();
    must_divide(recorded, size).map(|()| recorded)
}

declare_steps!(
    /// The steps of `vdi-restore`.
    RestoreStep { Copy = "copy", Record = "record" }
);

impl Job for Restore {
    type Step = RestoreStep;

    const VERB: &'static str = "vdi-restore";
    const NO_RETURN: RestoreStep = RestoreStep::Record;

    fn changes(&self) -> Vec<Uuid> {
        vec![self.target.sr]
    }

    fn about(&self) -> Vec<About> {
        vec![about_vdi(self.target.vdi)]
    }

    async fn step(&self, step: RestoreStep, daemon: &Daemon, context: &Context) -> Result<(), Problem> {
        match step {
            RestoreStep::Copy => {
                let filled = fill(daemon, context, (&self.from, &self.backup), (&self.target).into());
                context.unless_cancelled(filled).await
            }
            RestoreStep::Record => self.target.record(daemon).await,
        }
    }

    async fn undo(&self, daemon: &Daemon) -> Result<(), Problem> {
        self.target.undo(daemon).await
    }

    fn result(&self) -> Value {
        json!({ "uuid": self.target.vdi, "backup": self.backup })
    }
}

/// Creates an image, and fills it from a backup.
pub async fn fill(
    daemon: &Daemon,
    context: &Context,
    (from, backup): (&BackupTarget, &BackupId),
    NewImage { image, sr, format, size }: NewImage,
) -> Result<(), Problem> {
    make_image(daemon, sr, image, format, vec!["--size".into(), size.to_string().into()], None).await?;
    let directory = daemon.srs.directory(sr).await?;
    let file = file_name(image, format);
    let path = directory.path().join(&file);
    let opened = blocking("open a file", move || directory.open_image(&file, true)).await?;
    let mut handing = Handing::default();
    handing.file(&path, true, opened);
    let socket = Socket::listen(&daemon.config.run_directory, image)?;
    let name = names::image_name(format, path).word();
    let words = vec![backup.to_string().into(), nbd::uri::of_socket(&socket.path).into()];
    let at = At::of(from);
    let writing = at.run::<Value>(&["restore"], words, |transfer| context.transferred(transfer));
    served(daemon, name, &socket, handing, writing).await.map(drop)
}

/// A socket that only this user reaches. Its path is removed when this is dropped.
#[derive(Debug)]
struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    fn listen(run_directory: &Path, image: Uuid) -> Result<Socket, Problem> {
        let directory = directory_of(run_directory);
        let path = directory.join(image.simple().to_string());
        let listen = || {
            match fs::DirBuilder::new().mode(0o700).create(&directory) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => made?,
            }
            UnixListener::bind(&path)
        };
        let listener = listen().map_err(|error| {
            Problem::failed(format_args!("listen at {}", path.display()), error)
                .advise("check that run-directory is writable and short (a socket path has at most 107 bytes)")
        })?;
        Ok(Socket { path, listener })
    }
}

/// The directory of these sockets.
pub fn directory_of(run_directory: &Path) -> PathBuf {
    run_directory.join("restore")
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "a socket cannot be removed");
        }
    }
}

/// Serves an image at a socket while `work` runs, and returns when all of it is flushed.
async fn served<T>(
    daemon: &Daemon,
    name: OsString,
    socket: &Socket,
    mut handing: Handing,
    work: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let listener = socket.listener.try_clone();
    let listener = listener.map_err(|error| Problem::failed("pass a socket to a disk process", error))?;
    handing.listener(Listens::Nbd, &socket.path, listener.into());
    let words = ["serve".into(), name, "--nbd".into(), socket.path.clone().into()];
    let fixed = ["--handed", "--confine", "--end-with-input"].map(OsString::from);
    let words: Vec<OsString> = words.into_iter().chain(fixed).collect();
    let (stdin, ready) = handing.prepare(&daemon.tool.redo)?;
    let mut starting = daemon.tool.starting(&words)?;
    starting.command.stdin(stdin).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    let process = TaskProcess::of(starting.start()?);
    process.id().into_iter().for_each(oom::make_normal);
    // The result holds our end of its standard input: the process ends when that is closed.
    let _input = repo::blocking::start(move || ready.send());
    process.during("serve the new disk", work).await
}
