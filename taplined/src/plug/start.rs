//! Starts a disk process to serve a VBD: opens its files, creates its sockets, starts and records the process, passes
//! everything to it, and waits for its response.

use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use api::{Code, Problem};
use control::handed::Listens;
use uuid::Uuid;

use super::bitmaps;
use super::plug_spec::PlugSpec;
use super::steps::Steps;
use crate::daemon::Daemon;
use crate::disk::control::problem;
use crate::disk::files::Known;
use crate::disk::handing::{Handing, Ready};
use crate::disk::oom;
use crate::disk::paths::DiskPaths;
use crate::disk::process::{DiskProcess, Ended};
use crate::vdi::record_changes;

/// Whether a process is the first one of a plug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incarnation {
    /// It is the first one, and starts a new log.
    First,
    /// It replaces a dead process and continues with its redo log.
    Replacement,
}

/// Starts serving. `process` is set as soon as the process exists: a caller that drops this future at any point must
/// stop it.
pub async fn serve(
    daemon: &Daemon,
    order: &PlugSpec,
    incarnation: Incarnation,
    steps: &mut Steps,
    process: &mut Option<DiskProcess>,
) -> Result<(), Problem> {
    let place = DiskPaths::of(&daemon.config, order.vbd.uuid);
    let vbd = order.vbd.uuid;
    let before = if incarnation == Incarnation::First { Known::new() } else { daemon.disks.open_files.of(vbd) };
    let logs = daemon.tool.redo.clone();
    let (mut handing, known, recording) = steps.step("open", order.open(before, logs)).await?;
    daemon.disks.open_files.set(vbd, known);
    let mut words = order.words(&place);
    let wanted = daemon.readers.bitmaps_of(vbd);
    if !wanted.is_empty() {
        let offered = async { Ok(bitmaps::offer(daemon, order.vbd.vdi, &wanted, &mut handing).await) };
        words.extend(steps.step("bitmaps", offered).await?);
    }
    if incarnation == Incarnation::First {
        // A user who plugs the disk again has seen the problem; a process that merely replaces another has not.
        words.push("--accept-failed-sync".into());
    }
    let ready = steps.step("start", start(daemon, order, &words, incarnation, handing, process)).await?;
    let socket = steps.step("hand", hand(ready)).await?;
    if let (Some(recording), Some(socket)) = (recording, socket) {
        steps.step("map", record_changes::agree(daemon, socket, recording)).await?;
    }
    let limit = steps_limit(steps);
    steps.step("answer", answer(daemon, vbd, process.as_mut(), limit)).await
}

/// Twice the step's limit, so that the step times out first, with its more specific error.
fn steps_limit(steps: &Steps) -> Duration {
    steps.limit().saturating_mul(2)
}

/// Starts a process, which waits for its files, and records it.
async fn start(
    daemon: &Daemon,
    order: &PlugSpec,
    words: &[OsString],
    incarnation: Incarnation,
    mut handing: Handing,
    process: &mut Option<DiskProcess>,
) -> Result<Ready, Problem> {
    let place = DiskPaths::of(&daemon.config, order.vbd.uuid);
    // Only the daemon connects for clients of its NBD address: it checks what they may read.
    let group = daemon.plugs.group.filter(|_| !order.vbd.for_nbd_address);
    let transport = order.vbd.transport;
    // Looked up each time: a disk may be plugged before its VM is started, and restarted after that.
    let guest = order.vbd.vm.and_then(|vm| crate::vm::user(&daemon.config, vm));
    let sockets = place.listen(transport, group, guest)?;
    let listens = if transport == api::Transport::Nbd { Listens::Nbd } else { Listens::VhostUser };
    if let Some(socket) = sockets.transport {
        handing.listener(listens, &place.transport(transport), socket);
    }
    handing.listener(Listens::Control, &place.control(), sockets.control);
    match place.open_page() {
        Ok(page) => handing.plain(&place.page(), true, page),
        // A guest needs its disk more than users need its statistics.
        Err(error) => tracing::warn!(vbd = %order.vbd.uuid, "its disk has no statistics page: {error}"),
    }
    let at = match &order.disk {
        None => place.shown(transport)?,
        Some(disk) => {
            handing.lent(disk.lend().await?);
            disk.node().await?
        }
    };
    let (stdin, mut ready) = handing.prepare(&daemon.tool.redo)?;
    let identity = process.insert(launch(daemon, order, words, stdin, incarnation)?).identity();
    if let Some(disk) = &order.disk {
        disk.make_statistics(identity.pid).await.into_iter().for_each(|files| ready.statistics(files));
    }
    let vbd = order.vbd.uuid;
    daemon.catalogue.write(move |tx| tx.set_vbd_served(vbd, identity, &at)).await?;
    Ok(ready)
}

/// Starts a process that waits for messages on its standard input. The daemon has none of its descriptors open
/// afterwards.
pub fn launch(
    daemon: &Daemon,
    order: &PlugSpec,
    words: &[OsString],
    stdin: Stdio,
    incarnation: Incarnation,
) -> Result<DiskProcess, Problem> {
    let place = DiskPaths::of(&daemon.config, order.vbd.uuid);
    let log = place.open_log(incarnation == Incarnation::First).map_or_else(
        // A guest needs its disk more than users need its log.
        |problem| {
            tracing::warn!(vbd = %order.vbd.uuid, "its disk has no log: {problem}");
            Stdio::null()
        },
        Stdio::from,
    );
    let mut starting = daemon.tool.starting(words)?;
    starting.command.stdin(stdin).stdout(Stdio::piped()).stderr(log);
    let process = DiskProcess::of_child(starting.start_to_stay()?)?;
    oom::protect(process.identity().pid, daemon.config.disk_oom_score_adj);
    Ok(process)
}

/// Sends everything. The daemon has none of it open afterwards, except for the socket, unless the process has exited.
async fn hand(ready: Ready) -> Result<Option<OwnedFd>, Problem> {
    let mut sent = repo::blocking::start(move || ready.send());
    match sent.ended().await.map_err(|died| Problem::failed("pass files to a disk process", died))? {
        // A process that receives nothing has exited, and reports the reason itself.
        Err(problem) => {
            tracing::debug!("{problem}");
            Ok(None)
        }
        Ok(socket) => Ok(Some(socket)),
    }
}

/// Waits until the process responds, and thus serves.
async fn answer(
    daemon: &Daemon,
    vbd: Uuid,
    process: Option<&mut DiskProcess>,
    patience: Duration,
) -> Result<(), Problem> {
    let Some(process) = process else { return Err(Problem::new(Code::Internal, "no process was started")) };
    let log = DiskPaths::of(&daemon.config, vbd).log().to_owned();
    tokio::select! {
        biased;
        ended = process.ended() => Err(ended_at_once(&ended?, process, &log)),
        answer = daemon.disks.version(vbd, patience) => match answer {
            Ok(_) => {
                process.serves();
                Ok(())
            }
            // The connection closes slightly before the process has exited.
            Err(problem) if problem.code == Code::Failed => {
                match tokio::time::timeout(Duration::from_secs(1), process.ended()).await {
                    Ok(ended) => Err(ended_at_once(&ended?, process, &log)),
                    Err(_) => Err(problem),
                }
            }
            Err(problem) => Err(problem),
        },
    }
}

/// Why a process exited before it served: in its own words, if it printed an error.
fn ended_at_once(how: &Ended, process: &mut DiskProcess, log: &Path) -> Problem {
    match process.last_word() {
        Some(error) => problem(error),
        None => {
            let how = match how {
                Ended::Badly(how) => how,
                Ended::Well => "exit status: 0",
                Ended::Unknown => "exit status unknown",
            };
            let why = format!("its process exited before responding ({how})");
            Problem::failed("serve a disk", why).advise(format!("see its log, {}", log.display()))
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[tokio::test]
    async fn a_process_that_exits_at_once_says_why() {
        let ended = async |script: &str| {
            let mut command = std::process::Command::new("sh");
            let child = command.args(["-c", script]).stdout(Stdio::piped()).spawn().unwrap();
            let mut process = DiskProcess::of_child(child).unwrap();
            let how = process.ended().await.unwrap();
            ended_at_once(&how, &mut process, "/var/log/disk.log".as_ref())
        };
        let error = r#"{"id":null,"error":{"kind":"in-use","message":"it is in use","advice":"end whoever uses it"}}"#;
        let said = ended(&format!("echo serving; echo '{error}'; exit 4")).await;
        assert_eq!(said, Problem::new(Code::InUse, "it is in use").advise("end whoever uses it"));
        let killed = ended("echo serving; kill -9 $$").await;
        assert_eq!(killed.detail, "cannot serve a disk: its process exited before responding (signal: 9 (SIGKILL))");
        assert_eq!(killed.advice.as_deref(), Some("see its log, /var/log/disk.log"));
    }
}
