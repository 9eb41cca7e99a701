//! The path of a repository's directory: its own path, or the mount point at which the daemon has mounted it from a
//! server.
//!
//! Invariants: an existing mount is reused and not mounted twice, even by the next daemon; nothing is unmounted lazily,
//! so an unmounted file system is not in use.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use api::{AbsolutePath, Code, Problem, SrSource};
use repo::driver::{filesystem, mount};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child, Command};
use uuid::Uuid;

/// Maximum bytes of a program's output quoted in errors.
const WORDS_MAX: usize = 2048;

/// Number of retries of a busy unmount, and the pause between them.
const UNMOUNT_AGAIN: u32 = 3;
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Mounts repositories of servers.
#[derive(Clone, Debug)]
pub struct MountPoints {
    /// A directory for mount points.
    pub directory: PathBuf,
    /// How long mount(8) and umount(8) may take.
    pub limit: Duration,
}

impl MountPoints {
    /// The directory of the repository `uuid`, mounted if necessary.
    pub async fn find(&self, uuid: Uuid, source: &SrSource) -> Result<AbsolutePath, Problem> {
        let (SrSource::Dir { path } | SrSource::Iso { path }) = source else {
            return self.mounted(uuid, source).await;
        };
        Ok(path.clone())
    }

    /// The mount point of a repository.
    fn point(&self, uuid: Uuid) -> PathBuf {
        self.directory.join(uuid.to_string())
    }

    async fn mounted(&self, uuid: Uuid, source: &SrSource) -> Result<AbsolutePath, Problem> {
        let point = self.point(uuid);
        let shown = point.to_string_lossy().into_owned();
        let path =
            AbsolutePath::try_from(shown).map_err(|why| Problem::failed("create a path for a mount point", why))?;
        if let Some(there) = filesystem::mount_at(&point)? {
            return match mount::device(source) {
                Some(device) if device == there.source => Ok(path),
                _ => {
                    let what = format!("something else is mounted at {path}: {}", there.source);
                    Err(Problem::new(Code::State, what).advise(format!("umount {path}")))
                }
            };
        }
        mount::check(source)?;
        let tried = format!("create the mount point {path}");
        std::fs::create_dir_all(&point).map_err(|error| Problem::failed(tried, error))?;
        let words = mount::words(source, &point).unwrap_or_default();
        let device = mount::device(source).unwrap_or_default();
        let mounted = self.run("mount", words, format!("mount {device} at {path}")).await;
        mounted.map_err(|problem| match missing_helper(source) {
            Some((helper, packages)) => {
                problem.advise(format!("install {helper}, which mount(8) needs for it: {packages}"))
            }
            None => problem,
        })?;
        match filesystem::mount_at(&point)? {
            Some(_) => Ok(path),
            None => {
                Err(Problem::failed(format_args!("mount {path}"), "mount(8) reported success, but nothing is mounted"))
            }
        }
    }

    /// Unmounts what the daemon has mounted for a repository. Not an error if nothing is mounted; foreign mounts are
    /// left alone.
    pub async fn leave(&self, uuid: Uuid, source: &SrSource) -> Result<(), Problem> {
        let point = self.point(uuid);
        let Some(device) = mount::device(source) else { return Ok(()) };
        match filesystem::mount_at(&point)? {
            Some(there) if there.source != device => return Ok(()),
            Some(_) => self.unmount(&point).await?,
            None => {}
        }
        match std::fs::remove_dir(&point) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Problem::failed(format_args!("remove the mount point {}", point.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Unmounts, with retries: a child that was just forked keeps our files open until it executes its program.
    async fn unmount(&self, point: &Path) -> Result<(), Problem> {
        let run = || self.run("umount", vec!["--".into(), point.into()], format!("unmount {}", point.display()));
        for _ in 0..UNMOUNT_AGAIN {
            match run().await {
                Err(problem) if problem.code == Code::Failed => tokio::time::sleep(AGAIN_AFTER).await,
                ran => return ran,
            }
        }
        run().await
    }

    /// Runs a program of the host, which may wait for a server that does not answer: after the time limit it is
    /// killed, and not waited for.
    async fn run(&self, program: &str, words: Vec<OsString>, tried: String) -> Result<(), Problem> {
        let mut command = Command::new(program);
        command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.process_group(0).kill_on_drop(true).spawn();
        let child = child.map_err(|error| Problem::failed(format_args!("run {program}(8)"), error))?;
        let mut group = Group::of(&child);
        let Ok(ran) = tokio::time::timeout(self.limit, child.wait_with_output()).await else {
            let what = format!("cannot {tried}: not done in {} s", self.limit.as_secs());
            return Err(Problem::new(Code::Timeout, what).advise("check that the server is up and responds"));
        };
        group.end();
        let output = ran.map_err(|error| Problem::failed(format_args!("run {program}(8)"), error))?;
        if output.status.success() {
            return Ok(());
        }
        let words = String::from_utf8_lossy(&output.stderr);
        let words: String = words.trim().chars().take(WORDS_MAX).collect();
        let why = if words.is_empty() { output.status.to_string() } else { words };
        Err(Problem::failed(tried, why))
    }
}

/// A program and its child processes, which are killed with it: mount(8) runs a helper for each kind of file system,
/// which would otherwise continue and mount at an unexpected time.
struct Group(Option<Pid>);

impl Group {
    /// The process group of a program that leads one.
    fn of(child: &Child) -> Group {
        Group(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }

    /// It has exited by itself.
    fn end(&mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let Some(leader) = self.0 else { return };
        if let Err(errno) = kill_process_group(leader, Signal::KILL) {
            tracing::warn!(pid = leader.as_raw_nonzero(), "a program and its children could not be killed: {errno}");
        }
    }
}

/// The program that mounts a source, and the packages that contain it, if it is not installed.
fn missing_helper(source: &SrSource) -> Option<(&'static str, &'static str)> {
    let (helper, packages) = match source {
        SrSource::Dir { .. } | SrSource::Iso { .. } => return None,
        SrSource::Nfs { .. } => ("mount.nfs", "nfs-common on Debian and Ubuntu, nfs-utils elsewhere"),
        SrSource::Smb { .. } => ("mount.cifs", "cifs-utils"),
    };
    let is_there = ["/sbin", "/usr/sbin"].iter().any(|directory| Path::new(directory).join(helper).exists());
    (!is_there).then_some((helper, packages))
}
