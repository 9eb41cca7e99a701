//! Plugs or unplugs several VBDs in one task, for the start and shutdown of a VM.

use api::{About, Code, ObjectKind, Problem, Task};
use repo::catalogue::NewTask;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use uuid::Uuid;

use super::begin::{PlugReason, begin, finish};
use super::unplug;
use crate::daemon::Daemon;
use crate::task::Context;

/// Maximum number of problems quoted in a task's own problem; each VBD has its own.
const QUOTED_MAX: usize = 3;

/// The outcome for each VBD.
type Outcomes = Vec<(Uuid, Result<(), Problem>)>;

/// Starts a task that plugs VBDs, done when all are plugged.
pub async fn plug_many(daemon: &Daemon, vbds: Vec<Uuid>) -> Result<Task, Problem> {
    let at_work = daemon.clone();
    let new = new("vbd-plug", &vbds);
    let work = move |context: Context| async move { plug_each(&at_work, vbds, PlugReason::Request, &context).await };
    daemon.tasks.start(daemon, new, work).await
}

/// Plugs the VBDs of a VM, in the task that starts it.
pub async fn plug_all(daemon: &Daemon, vbds: Vec<Uuid>, context: &Context) -> Result<(), Problem> {
    plug_each(daemon, vbds, PlugReason::VmStart, context).await.map(drop)
}

async fn plug_each(daemon: &Daemon, vbds: Vec<Uuid>, reason: PlugReason, context: &Context) -> Result<Value, Problem> {
    let one = |vbd| {
        let (daemon, context) = (daemon.clone(), context.clone());
        async move {
            let begun = begin(&daemon, vbd, reason).await?;
            finish(&daemon, begun, &context, false).await.map(drop)
        }
    };
    sum("plugged", each(vbds, context, one).await)
}

/// Unplugs the VBDs of a VM that has ended. Those that are already being unplugged are skipped.
pub async fn unplug_all(daemon: &Daemon, vbds: Vec<Uuid>, context: &Context) -> Result<(), Problem> {
    let mut outcomes = unplug_each(daemon, vbds, false, context).await;
    outcomes.retain(|(_, outcome)| outcome.as_ref().err().is_none_or(|problem| problem.code != Code::Busy));
    sum("unplugged", outcomes).map(drop)
}

/// Starts a task that unplugs VBDs, done when all are unplugged.
pub async fn unplug_many(daemon: &Daemon, vbds: Vec<Uuid>, force: bool) -> Result<Task, Problem> {
    let at_work = daemon.clone();
    let new = new("vbd-unplug", &vbds);
    let work =
        move |context: Context| async move { sum("unplugged", unplug_each(&at_work, vbds, force, &context).await) };
    daemon.tasks.start(daemon, new, work).await
}

/// Unplugs VBDs, in a task of the caller.
pub async fn unplug_each(daemon: &Daemon, vbds: Vec<Uuid>, force: bool, context: &Context) -> Outcomes {
    let work = |vbd| {
        let (daemon, context) = (daemon.clone(), context.clone());
        async move { unplug::run(&daemon, vbd, force, &context, false).await.map(drop) }
    };
    each(vbds, context, work).await
}

fn new(verb: &'static str, vbds: &[Uuid]) -> NewTask {
    let about = vbds.iter().map(|uuid| About { kind: ObjectKind::Vbd, uuid: *uuid }).collect();
    NewTask { uuid: Uuid::new_v4(), verb, about, cancellable: true, intent: None }
}

/// Futures that complete even if the caller is dropped. An unplug dropped midway would forget a process that it has
/// not stopped yet.
struct Concurrently<T: 'static>(JoinSet<T>);

impl<T: 'static> Drop for Concurrently<T> {
    fn drop(&mut self) {
        self.0.detach_all();
    }
}

/// Runs the work of all VBDs concurrently, to completion even if the caller is dropped; the queue limits the
/// concurrency.
async fn each<W, F>(vbds: Vec<Uuid>, context: &Context, work: W) -> Outcomes
where
    W: Fn(Uuid) -> F,
    F: Future<Output = Result<(), Problem>> + Send + 'static,
{
    let mut running = Concurrently(JoinSet::new());
    for (at, vbd) in vbds.iter().copied().enumerate() {
        let one = work(vbd);
        running.0.spawn(async move { (at, vbd, one.await) });
    }
    let mut outcomes = Vec::with_capacity(vbds.len());
    while let Some(ended) = running.0.join_next().await {
        match ended {
            Ok(outcome) => outcomes.push(outcome),
            Err(error) => tracing::error!("one of several VBDs was not handled: {error}"),
        }
        let (done, all) = (u32::try_from(outcomes.len()), u32::try_from(vbds.len()));
        context.progress(f64::from(done.unwrap_or(0)) / f64::from(all.unwrap_or(1)));
    }
    outcomes.sort_by_key(|(at, _, _)| *at);
    outcomes.into_iter().map(|(_, vbd, outcome)| (vbd, outcome)).collect()
}

/// The result of a task with several VBDs: those done, or an error.
fn sum(done: &str, outcomes: Outcomes) -> Result<Value, Problem> {
    let failed: Vec<&Problem> = outcomes.iter().filter_map(|(_, outcome)| outcome.as_ref().err()).collect();
    let Some(first) = failed.first() else {
        let vbds: Vec<Uuid> = outcomes.iter().map(|(vbd, _)| *vbd).collect();
        return Ok(json!({ done: vbds }));
    };
    // Hundreds may fail for the same reason.
    let mut reasons: Vec<&str> = Vec::new();
    for problem in &failed {
        if !reasons.contains(&problem.detail.as_str()) {
            reasons.push(&problem.detail);
        }
    }
    let more = if reasons.len() > QUOTED_MAX { "; …" } else { "" };
    reasons.truncate(QUOTED_MAX);
    let what = format!("{} of {} VBDs were not {done}: {}{more}", failed.len(), outcomes.len(), reasons.join("; "));
    let code = if failed.iter().all(|problem| problem.code == first.code) { first.code } else { Code::Failed };
    let problem = Problem::new(code, what);
    Err(match &first.advice {
        Some(advice) => problem.advise(advice.clone()),
        None => problem,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn work_completes_even_if_its_caller_is_dropped() {
        let (ended, waiting) = tokio::sync::oneshot::channel();
        let mut running = Concurrently(JoinSet::new());
        running.0.spawn(async move {
            tokio::task::yield_now().await;
            ended.send(()).unwrap();
        });
        drop(running);
        waiting.await.unwrap();
    }

    #[test]
    fn a_shared_reason_is_quoted_once() {
        let failed = |why: &str| (Uuid::new_v4(), Err(Problem::new(Code::Failed, why)));
        let outcomes = vec![failed("no memory"), failed("no memory"), failed("no file"), (Uuid::new_v4(), Ok(()))];
        assert_eq!(sum("plugged", outcomes).unwrap_err().detail, "3 of 4 VBDs were not plugged: no memory; no file");
        let outcomes = (0..5).map(|number| failed(&number.to_string())).collect();
        assert_eq!(sum("plugged", outcomes).unwrap_err().detail, "5 of 5 VBDs were not plugged: 0; 1; 2; …");
    }
}
