//! Monitors the steps of a task: one that makes no progress is reported, and can be abandoned.
//!
//! A step may wait for storage that never responds, in its own process or in one that it started. No time limit would
//! be right: a merge may take hours, and an NFS server may be away for as long. So an administrator decides.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use api::{Code, Problem};
use futures_util::future::BoxFuture;
use jiff::Timestamp;

use super::{Context, TaskControl, UNDO};
use crate::daemon::Daemon;
use crate::fault::{self, Planted};

impl Context {
    /// Runs a step, or an undo, after all threads and killed processes of earlier steps have ended. If it makes no
    /// progress within the storage timeout, the task's problem says so until it does; an error if the task is
    /// abandoned, and the step is then dropped.
    pub async fn attend(
        &self,
        daemon: &Daemon,
        step: &str,
        work: BoxFuture<'_, Result<(), Problem>>,
    ) -> Result<(), Problem> {
        self.progressed.send_replace(Instant::now());
        let patience = daemon.config.storage.patience();
        let mut requested = self.abandoned.clone();
        let work = async {
            if step == UNDO && fault::planted(Planted::HastyUndo) {
                return work.await;
            }
            self.started.ended().await;
            self.started.during(work).await
        };
        tokio::select! {
            biased;
            done = work => done,
            Ok(_) = requested.wait_for(|requested| *requested == TaskControl::Abandon) => {
                Err(Problem::new(Code::Cancelled, format!("the task was abandoned during its step '{step}'")))
            }
            never = self.report_silence(step, patience) => match never {},
        }
    }

    async fn report_silence(&self, step: &str, patience: Duration) -> Infallible {
        let mut progressed = self.progressed.subscribe();
        loop {
            progressed.mark_unchanged();
            if tokio::time::timeout(patience, progressed.changed()).await.is_ok() {
                continue;
            }
            let problem = self.silent(step, patience);
            tracing::warn!(task = %self.task.uuid, verb = self.task.verb, step, "{problem}");
            self.show(Some(problem)).await;
            if progressed.changed().await.is_err() {
                // Unreachable: the sender is a field of this.
                std::future::pending::<()>().await;
            }
            self.show(None).await;
        }
    }

    fn silent(&self, step: &str, patience: Duration) -> Problem {
        let since = Timestamp::now().saturating_sub(patience).unwrap_or(Timestamp::UNIX_EPOCH);
        let what = format!("the step '{step}' of {} has made no progress since {since:.0}", self.task.verb);
        Problem::new(Code::Timeout, what).advise(
            "check the storage that it works on: it continues when that responds. To give it up, cancel it; if it cannot \
             be cancelled or does not end then, abandon it",
        )
    }

    /// Records why the task does not continue, or clears that.
    pub(super) async fn show(&self, problem: Option<Problem>) {
        let uuid = self.task.uuid;
        let shown = self.catalogue.write(move |tx| tx.set_task_problem(uuid, problem.as_ref()));
        if let Err(also) = shown.await {
            tracing::error!(task = %uuid, "the reason why it does not continue could not be recorded: {also}");
        }
    }
}
