//! Supervises disk processes: one that dies is replaced by a new one.
//!
//! It waits for the exit of the process by its pidfd and does nothing until then: an idle disk causes no wake-ups.

use std::time::{Duration, Instant};

use api::{Code, Problem, VbdState, VdiState};
use jiff::{Timestamp, TimestampRound, Unit};
use repo::catalogue::Process;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::cleanup::{self, clear, forget_statistics};
use super::deaths::Deaths;
use super::lost;
use super::plug_spec::PlugSpec;
use super::settle;
use super::shape;
use super::share;
use super::space;
use super::start::{Incarnation, serve};
use super::steps::Steps;
use super::xen_disk::XenDisk;
use crate::background;
use crate::daemon::Daemon;
use crate::disk::files;
use crate::disk::paths::DiskPaths;
use crate::disk::process::{DiskProcess, Ended};
use crate::reconcile;
use crate::vdi;

/// The supervision of a VBD's process.
#[derive(Debug)]
pub struct Served {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Option<DiskProcess>>,
}

impl Served {
    /// Ends the supervision; returns the process, if there is one.
    pub async fn release(self) -> Option<DiskProcess> {
        // A supervisor that has already ended, because the process has exited properly, receives nothing.
        self.stop.send(()).ok();
        self.task.await.ok().flatten()
    }
}

/// Supervises the process from now on. `None`: the process has died and must be restarted.
pub fn begin(daemon: &Daemon, vbd: Uuid, process: Option<DiskProcess>) {
    let (stop, mut stopped) = oneshot::channel();
    let at_work = daemon.clone();
    let task = background::spawn(async move { supervise(&at_work, vbd, process, &mut stopped).await });
    daemon.plugs.served().insert(vbd, Served { stop, task });
}

/// Waits for the exit of a process that was sent a request to stop; then the VBD is unplugged.
pub fn end(daemon: &Daemon, vbd: Uuid, process: DiskProcess) {
    let (stop, mut stopped) = oneshot::channel();
    let at_work = daemon.clone();
    let task = background::spawn(async move {
        let mut process = process;
        tokio::select! {
            biased;
            _ = &mut stopped => return Some(process),
            ended = process.ended() => if let Err(problem) = ended {
                tracing::error!(%vbd, "{problem}");
                return Some(process);
            },
        }
        if let Err(problem) = cleanup::clear_and_unplug(&at_work, vbd, None).await {
            tracing::error!(%vbd, "its process exited, and it could not be unplugged: {problem}");
        }
        at_work.plugs.served().remove(&vbd);
        None
    });
    daemon.plugs.served().insert(vbd, Served { stop, task });
}

async fn supervise(
    daemon: &Daemon,
    vbd: Uuid,
    mut process: Option<DiskProcess>,
    stopped: &mut oneshot::Receiver<()>,
) -> Option<DiskProcess> {
    let mut deaths = Deaths::default();
    let place = DiskPaths::of(&daemon.config, vbd);
    let mut log_at = place.log_len();
    let (mut failed, mut since) = (None, Instant::now());
    loop {
        let died = match (&mut process, failed.take()) {
            (Some(running), _) => {
                share::send_later(daemon, vbd);
                shape::send_later(daemon, vbd);
                let subscription = space::subscribe(daemon, vbd);
                let ended = tokio::select! {
                    biased;
                    _ = &mut *stopped => return process,
                    ended = running.ended() => ended,
                };
                drop(subscription);
                daemon.disks.shares.ended(running.identity().pid);
                if let Some(next) = succeeded(daemon, vbd, running.identity(), &ended).await {
                    (process, since) = (Some(next), Instant::now());
                    continue;
                }
                let said = running.last_word().map(|error| error.message);
                died(&place, ended, said.or_else(|| place.last_panic_since(log_at)))
            }
            (None, Some(problem)) => problem,
            (None, None) => died(&place, Ok(Ended::Unknown), None),
        };
        forget_statistics(daemon, vbd).await;
        if is_done_with(daemon, vbd).await {
            // A Xen guest has released the disk or no longer exists. The unplug will find that the process has exited.
            stopped.await.ok();
            return None;
        }
        if is_unplugged(daemon, vbd).await {
            return None;
        }
        let served = if process.is_some() { since.elapsed() } else { Duration::ZERO };
        let pause = deaths.died(served);
        if let Err(problem) = record(daemon, vbd, &died, pause).await {
            tracing::error!(%vbd, "the exit of its process could not be recorded: {problem}");
        }
        match revive(daemon, vbd, pause, died, stopped).await {
            Ok(Some(another)) => {
                (process, since, log_at) = (Some(another), Instant::now(), place.log_len());
                lost::check_later(daemon, vbd);
                compare(daemon, vbd);
            }
            Ok(None) => return None,
            Err(problem) => (process, failed) = (None, Some(problem)),
        }
    }
}

/// Compares, in the background, the files opened by a newly started process with the catalogue.
fn compare(daemon: &Daemon, vbd: Uuid) {
    let daemon = daemon.clone();
    background::spawn(async move { reconcile::of_plugged(&daemon, vbd).await });
}

/// The process to which an exited process handed over its disk, at the request of another client than this daemon.
async fn succeeded(daemon: &Daemon, vbd: Uuid, before: Process, ended: &Result<Ended, Problem>) -> Option<DiskProcess> {
    if let Ok(Ended::Badly(_)) = ended {
        return None;
    }
    let next = settle::successor(daemon, vbd, before).await?;
    tracing::info!(%vbd, before = before.pid, now = next.identity().pid, "another process has taken over its disk");
    if let Err(problem) = settle::record(daemon, vbd, next.identity()).await {
        tracing::error!(%vbd, "its new process could not be recorded: {problem}");
    }
    Some(next)
}

/// Whether there is no guest left to serve.
async fn is_done_with(daemon: &Daemon, vbd: Uuid) -> bool {
    let found = daemon.catalogue.read(move |view| XenDisk::of(view, &view.vbd(vbd)?)).await;
    let done = match found {
        Ok(Some(disk)) => disk.is_done_with().await,
        Ok(None) => Ok(false),
        Err(problem) => Err(problem),
    };
    done.unwrap_or_else(|problem| {
        tracing::warn!(%vbd, "cannot tell whether its guest needs it: {problem}");
        false
    })
}

/// Whether the VBD was unplugged by other means while supervised: its repository was used by another host. The files
/// of its process are then removed; the next plug waits for that.
async fn is_unplugged(daemon: &Daemon, vbd: Uuid) -> bool {
    let now = daemon.catalogue.read(move |view| view.find_vbd(vbd)).await;
    if !matches!(now, Ok(Some(now)) if now.state == VbdState::Unplugged) {
        return false;
    }
    if let Err(problem) = clear(daemon, vbd, None).await {
        tracing::error!(%vbd, "the files of its process could not be removed: {problem}");
    }
    daemon.disks.open_files.forget(vbd);
    true
}

/// Starts another process after a pause; `None` if supervision of the VBD ended in the meantime.
async fn revive(
    daemon: &Daemon,
    vbd: Uuid,
    pause: Duration,
    died: Problem,
    stopped: &mut oneshot::Receiver<()>,
) -> Result<Option<DiskProcess>, Problem> {
    let mut process = None;
    let work = async {
        tokio::time::sleep(pause).await;
        restart(daemon, vbd, died, &mut process).await
    };
    let restarted = tokio::select! {
        biased;
        _ = &mut *stopped => None,
        restarted = work => Some(restarted),
    };
    match restarted {
        Some(Ok(())) => Ok(process),
        other => {
            clear(daemon, vbd, process).await?;
            other.map_or(Ok(None), |failed| failed.map(|()| None))
        }
    }
}

/// The problem that describes the death of a process, with the error that it reported, if any.
fn died(place: &DiskPaths, how: Result<Ended, Problem>, error: Option<String>) -> Problem {
    let how = match how {
        Ok(Ended::Well) => "exited unexpectedly".into(),
        Ok(Ended::Badly(how)) => how,
        Ok(Ended::Unknown) => "exit status unknown".into(),
        Err(problem) => problem.detail,
    };
    let error = error.map(|error| format!(": {error}")).unwrap_or_default();
    let log = place.log().display();
    Problem::new(Code::Failed, format!("the process that served the disk ended ({how}){error}; its log: {log}"))
}

/// Records a death, and the time of the restart.
async fn record(daemon: &Daemon, vbd: Uuid, died: &Problem, pause: Duration) -> Result<(), Problem> {
    tracing::error!(%vbd, ?pause, "{died}");
    let problem = if pause.is_zero() { died.clone() } else { with_next_try(died, Timestamp::now(), pause) };
    let recorded = daemon.catalogue.write(move |tx| {
        let restarts = tx.vbd(vbd)?.restarts.saturating_add(1);
        let detail = format!("{} (restarts since it was plugged: {restarts})", problem.detail);
        let problem = Problem { detail, ..problem };
        tx.set_vbd_unserved(vbd)?;
        tx.set_vbd_restarts(vbd, restarts)?;
        tx.set_vbd_state(vbd, VbdState::Restarting, Some(&problem))
    });
    recorded.await
}

/// A death's problem, with advice about the next retry.
fn with_next_try(died: &Problem, now: Timestamp, pause: Duration) -> Problem {
    let at = now.saturating_add(pause).unwrap_or(now);
    let at = at.round(TimestampRound::new().smallest(Unit::Second)).unwrap_or(at);
    let advice = died.advice.as_ref().map(|advice| format!("{advice}; ")).unwrap_or_default();
    died.clone()
        .advise(format!("{advice}it will be restarted at {at}, and retried until it serves; to retry now, plug it"))
}

/// Starts a process to replace the dead one.
async fn restart(daemon: &Daemon, vbd: Uuid, died: Problem, process: &mut Option<DiskProcess>) -> Result<(), Problem> {
    // A task that was using the dead process first determines which files the disk consists of now.
    let vdi = daemon.catalogue.read(move |view| view.vbd(vbd)).await?.vdi;
    daemon.tasks.leave(vdi).await?;
    let order = PlugSpec::of(daemon, vbd).await?;
    let _turn = daemon.plugs.restarts.acquire().await;
    if order.vbd.state == VbdState::Unplugged {
        return Err(died);
    }
    // If the files that the dead process had open differ from the catalogue, nothing is started until this is
    // resolved.
    let known = daemon.catalogue.read(move |view| view.vdi(vdi)).await?;
    if known.state == VdiState::Diverged {
        // A problem with its files is the more specific one.
        let before = daemon.disks.open_files.of(vbd);
        order.must_be_those(before.clone()).await?;
        return match order.has_names_of(&before) {
            true => Err(files::unproven(&order.vbd)),
            false => vdi::must_be_ready(&known),
        };
    }
    let mut steps = Steps::of("vbd-restart", &daemon.config, None);
    serve(daemon, &order, Incarnation::Replacement, &mut steps, process).await?;
    // The last death stays visible.
    daemon.catalogue.write(move |tx| tx.set_vbd_state(vbd, VbdState::Plugged, Some(&died))).await
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_time_of_the_next_retry_is_added_to_the_advice() {
        let died = Problem::failed("open it", "it does not exist").advise("bring it back");
        let now = "2026-11-23T05:00:00.7Z".parse().unwrap();
        let retried = with_next_try(&died, now, Duration::from_secs(30));
        assert_eq!(retried.detail, died.detail);
        assert!(retried.advice.unwrap().starts_with("bring it back; it will be restarted at 2026-11-23T05:00:31Z, "));
    }
}
