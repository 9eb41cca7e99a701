//! Verbs of a plugged VDI, which its disk process carries out while the guest keeps running (docs/control.md).

use std::time::Duration;

use ::control::{Ask, Kind, Request, answer, ask};
use api::{Code, HealthState, ObjectKind, Problem, Vbd};
use tokio::sync::broadcast::error::RecvError;
use uuid::Uuid;

use super::control::{self, PassedFile, PendingVerb, Refused};
use super::doubt::doubt;
use super::names::ServedLayer;
use crate::daemon::Daemon;

/// Time limit for a verb that briefly holds requests.
const TO_CHANGE: Duration = Duration::from_secs(120);

/// Time limit for a merge: a disk that makes no progress for this long never will.
const TO_MERGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// How long a disk may take to report its version.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Refuses a verb on a stuck disk: it would stay in the socket of the process, and be carried out long after the
/// caller gave up.
pub fn must_answer(vbd: &Vbd) -> Result<(), Problem> {
    if vbd.health.state != HealthState::Stuck {
        return Ok(());
    }
    let reason = vbd.health.reason.as_deref().unwrap_or_default();
    let what = format!("the disk of VBD {} is stuck, so that nothing was sent to it: {reason}", vbd.uuid);
    let name = vbd.uuid.to_string();
    let explain = format!("see: tapline explain {}", name.get(..8).unwrap_or_default());
    let advice = match &vbd.health.advice {
        Some(advice) => format!("{advice}; {explain}"),
        None => explain,
    };
    Err(Problem::new(Code::Timeout, what).advise(advice))
}

/// Refuses a verb on a disk that is stuck now.
pub async fn must_answer_now(daemon: &Daemon, vbd: Uuid) -> Result<(), Problem> {
    daemon.catalogue.read(move |view| view.find_vbd(vbd)).await?.as_ref().map_or(Ok(()), must_answer)
}

/// Waits for `work`, which only queries the disk of a VBD, unless that is or becomes stuck.
pub async fn unless_stuck<T>(
    daemon: &Daemon,
    vbd: Uuid,
    work: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let mut events = daemon.catalogue.subscribe();
    must_answer_now(daemon, vbd).await?;
    let stuck = async {
        loop {
            match events.recv().await {
                Ok(event) if (event.kind, event.uuid) != (ObjectKind::Vbd, vbd) => continue,
                Ok(_) | Err(RecvError::Lagged(_)) => must_answer_now(daemon, vbd).await?,
                // The daemon exits.
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    };
    tokio::select! {
        biased;
        done = work => done,
        stuck = stuck => stuck,
    }
}

/// Sends a verb to the disk process of a VBD. Waits while the process is being replaced.
pub async fn ask<V: Ask>(daemon: &Daemon, vbd: Uuid, verb: V, files: Vec<PassedFile>) -> Result<V::Answer, Refused> {
    ask_with(daemon, vbd, verb, files, Vec::new()).await
}

/// Like [`ask`], with files that are not images too.
pub async fn ask_with<V: Ask>(
    daemon: &Daemon,
    vbd: Uuid,
    verb: V,
    images: Vec<PassedFile>,
    others: Vec<PassedFile>,
) -> Result<V::Answer, Refused> {
    let mut files = daemon.tool.redo.with_logs(images)?;
    files.extend(others);
    hand(daemon, vbd, verb, files).await
}

/// Like [`ask`], with files that are not images.
pub async fn hand<V: Ask>(daemon: &Daemon, vbd: Uuid, verb: V, files: Vec<PassedFile>) -> Result<V::Answer, Refused> {
    let gate = daemon.disks.gates.of(vbd);
    let _inside = gate.enter().await;
    let answer = control::ask(&daemon.disks.socket(vbd), verb, files, TO_CHANGE).await;
    poll_if_silent(daemon, vbd, answer)
}

/// Grows a disk; the caller then records its new size.
pub async fn resize(daemon: &Daemon, vbd: Uuid, size: u64) -> Result<(), Refused> {
    ask(daemon, vbd, ask::Resize { size, recorded: true }, Vec::new()).await.map(drop)
}

/// Starts polling a disk that has not responded in time.
fn poll_if_silent<T>(daemon: &Daemon, vbd: Uuid, answer: Result<T, Refused>) -> Result<T, Refused> {
    if matches!(&answer, Err(Refused::Unanswered(problem)) if problem.code == Code::Timeout) {
        doubt(daemon, vbd);
    }
    answer
}

/// Runs a merge in the disk process of a VBD and reports its progress. An upgrade interrupts it; the new process gets
/// the request again, with newly opened files.
pub async fn follow<F>(
    daemon: &Daemon,
    vbd: Uuid,
    verb: ask::Merge,
    files: impl Fn() -> F,
    mut on_progress: impl FnMut(answer::Merge) + Send,
) -> Result<answer::Merge, Problem>
where
    F: Future<Output = Result<Vec<PassedFile>, Problem>>,
{
    let gate = daemon.disks.gates.of(vbd);
    loop {
        let (pending, before) = {
            let _inside = gate.enter().await;
            let files = daemon.tool.redo.with_logs(files().await?)?;
            let request = Request::of(verb.clone());
            let pending = PendingVerb::<ask::Merge>::with_files(&daemon.disks.socket(vbd), request, files).await?;
            (pending, gate.count())
        };
        let answered = tokio::time::timeout(TO_MERGE, pending.answer(&mut on_progress)).await;
        let answered =
            answered.map_err(|_| Problem::new(Code::Timeout, format!("the disk of VBD {vbd} does not finish it")))?;
        match answered {
            // Or the process had not yet received it when its connections were closed.
            Err(why) if is_replaced(&why) || gate.count() != before => {
                tracing::info!(%vbd, "repeating the request to its new process: {why}");
            }
            answered => return answered.map_err(Problem::from),
        }
    }
}

/// Whether a disk process is being replaced, and its unfinished request must be repeated.
fn is_replaced(why: &Refused) -> bool {
    matches!(why, Refused::Disk(error) if error.kind == Kind::Replaced)
}

/// The layers of a VBD's disk process, from the leaf down; `None` if the process no longer exists.
pub async fn layers(daemon: &Daemon, vbd: Uuid) -> Result<Option<Vec<ServedLayer>>, Problem> {
    let reported = daemon.disks.ask(vbd, ask::Layers {}, REPORT_TIMEOUT).await;
    match poll_if_silent(daemon, vbd, reported.map_err(Refused::from)).map_err(Problem::from) {
        Ok(said) => said
            .layers
            .into_iter()
            .map(ServedLayer::of)
            .collect::<Option<_>>()
            .map(Some)
            .ok_or_else(|| Problem::failed(format_args!("list the layers of VBD {vbd}"), "a layer has no file")),
        // No process listens any more, or it has just exited. A merely slow one may still be writing.
        Err(problem) if problem.code == Code::Failed => Ok(None),
        Err(problem) => Err(problem),
    }
}
