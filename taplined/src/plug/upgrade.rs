//! Replaces the process that serves a VBD while its guest keeps running: a task.
//!
//! The daemon starts the new process and notifies the old one, which hands over everything and exits. The daemon
//! ensures that exactly one is left. A process that exits in the course of this has not crashed.
//!
//! 1. The new process is started and waits for messages on its standard input. *If killed after this:* the other end
//!    is closed, and it exits by itself.
//! 2. The old process is requested to hand over the disk (docs/control.md, `upgrade`). *If killed after this:*
//!    whether it does or not, one of the two exits by itself. The next daemon waits for that and determines which one
//!    serves ([`settle`]).
//! 3. The old process responds and exits. *If killed after this:* the recorded process is gone, and the one that
//!    answers at the control socket is adopted.
//! 4. The new process is recorded.
//!
//! Any failure before the response leaves the old process as it was. Verbs that change the disk wait in the meantime; a
//! merge in progress is interrupted by the disk, and its task requests it again (`disk::live`).

use std::os::fd::OwnedFd;
use std::time::Duration;

use api::{About, Code, ObjectKind, Problem, Task, Vbd, VbdState, VbdUpgraded};
use control::ask;
use repo::catalogue::NewTask;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tokio::sync::OwnedRwLockWriteGuard;
use uuid::Uuid;

use super::handover::{self, NotDone, Outcome};
use super::operation::{Kind, Operation};
use super::plug_spec::PlugSpec;
use super::settle::{Rest, record, settle};
use super::start::{Incarnation, launch};
use super::steps::Steps;
use super::{leave, supervise};
use crate::background;
use crate::daemon::Daemon;
use crate::disk::control::problem;
use crate::disk::live;
use crate::disk::paths::DiskPaths;
use crate::disk::process::{DiskProcess, Ended};
use crate::task::Context;

/// Maximum number of concurrent upgrades: each temporarily needs twice its disk's memory, and guests wait for a
/// moment.
pub const AT_ONE_TIME: usize = 4;

/// How long a disk may take to report its version.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long to wait for events that happen at once or never: the version report of a disk that was handed over, and
/// the exit of a process that has closed its connections.
const TO_BE_SEEN: Duration = Duration::from_secs(1);

/// How long a process that is no longer needed may take to exit before it is killed.
const TO_END: Duration = Duration::from_secs(5);

/// Pauses before a busy disk is tried again.
const RESTS: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(1)];

/// Starts a task that upgrades a VBD.
pub async fn upgrade(daemon: &Daemon, vbd: Uuid) -> Result<Task, Problem> {
    let operation = daemon.plugs.operations.begin(vbd, Kind::Upgrade)?;
    let now = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
    must_be_plugged(&now)?;
    live::must_answer(&now)?;
    let about = vec![About { kind: ObjectKind::Vbd, uuid: vbd }];
    let new = NewTask { uuid: Uuid::new_v4(), verb: "vbd-upgrade", about, cancellable: true, intent: None };
    let at_work = daemon.clone();
    let work = move |context: Context| async move {
        let upgraded = Upgrade::of(&at_work, vbd, operation, context).run().await?;
        serde_json::to_value(upgraded).map_err(|error| Problem::failed("encode a VBD", error))
    };
    daemon.tasks.start(daemon, new, work).await
}

fn must_be_plugged(vbd: &Vbd) -> Result<(), Problem> {
    let refused = |what: &str, advice: &str| {
        Err(Problem::new(Code::State, format!("VBD {} cannot be upgraded: {what}", vbd.uuid)).advise(advice))
    };
    match vbd.state {
        VbdState::Plugged => Ok(()),
        VbdState::Unplugged => refused("it is not plugged", "nothing to do: the next plug uses the installed program"),
        VbdState::Restarting => {
            refused("its process died and is being restarted", "nothing to do: the restart uses the installed program")
        }
        VbdState::Plugging | VbdState::Unplugging => {
            refused("it is being plugged or unplugged", "wait for that task, then retry if it is plugged")
        }
    }
}

/// An upgrade in progress.
#[derive(Debug)]
struct Upgrade {
    daemon: Daemon,
    vbd: Uuid,
    steps: Steps,
    operation: Operation,
    context: Context,
}

impl Upgrade {
    fn of(daemon: &Daemon, vbd: Uuid, operation: Operation, context: Context) -> Upgrade {
        let steps = Steps::of("vbd-upgrade", &daemon.config, Some(context.clone()));
        Upgrade { daemon: daemon.clone(), vbd, steps, operation, context }
    }

    /// Waits for work that may be cancelled.
    async fn unless_cancelled<T>(&self, work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
        self.context.unless_cancelled(self.operation.unless_cancelled(work)).await
    }

    async fn run(mut self) -> Result<VbdUpgraded, Problem> {
        let (daemon, vbd) = (self.daemon.clone(), self.vbd);
        let turn = async { Ok(daemon.plugs.upgrades.acquire().await) };
        let _turn = self.unless_cancelled(turn).await?;
        let order = PlugSpec::of(&daemon, vbd).await?;
        let of_xen = order.disk.is_some();
        // The chain cannot change from here on: no operation that changes it runs until the upgrade ends.
        let closed = match of_xen {
            true => self.unless_cancelled(self.alone(order.vbd.vdi)).await?,
            false => self.unless_cancelled(async { Ok(daemon.disks.gates.of(vbd).close().await) }).await?,
        };
        let Some(old) = daemon.plugs.release(vbd).await else {
            supervise::begin(&daemon, vbd, None);
            return must_be_plugged(&Vbd { state: VbdState::Restarting, ..order.vbd }).and(Err(self.lost()));
        };
        let replaced = old.identity();
        // From here on this task alone is responsible for it: whatever happens, the remaining process is returned.
        let (process, outcome) = match of_xen {
            true => leave::replace(&daemon, vbd, &mut self.steps, old).await,
            false => self.replace(order, old).await,
        };
        supervise::begin(&daemon, vbd, process);
        drop(closed);
        let (pause_us, note) = outcome?;
        let vbd = daemon.catalogue.read(move |view| view.vbd(vbd)).await?;
        Ok(VbdUpgraded { vbd, replaced: replaced.pid, pause_us, note })
    }

    fn lost(&self) -> Problem {
        Problem::new(Code::Internal, format!("VBD {} is plugged but has no process", self.vbd))
    }

    /// Closes the gate of the disk once no task changes its chain; a merge is interrupted.
    async fn alone(&self, vdi: Uuid) -> Result<OwnedRwLockWriteGuard<()>, Problem> {
        loop {
            self.daemon.tasks.leave(vdi).await?;
            let closed = self.daemon.disks.gates.of(self.vbd).close().await;
            if self.daemon.catalogue.read(move |view| view.claimant(vdi)).await?.is_none() {
                return Ok(closed);
            }
        }
    }

    /// Makes the old process hand the disk to a new one; retries if it is temporarily busy, such as at the beginning
    /// of a merge.
    async fn replace(&mut self, order: PlugSpec, old: DiskProcess) -> Outcome {
        let mut old = old;
        for rest in RESTS {
            match self.attempt(order.clone(), old).await {
                (Some(same), Err(problem)) if problem.code == Code::Busy => {
                    old = same;
                    tracing::info!(vbd = %self.vbd, "retrying: {problem}");
                    tokio::time::sleep(rest).await;
                }
                outcome => return outcome,
            }
        }
        self.attempt(order, old).await
    }

    async fn attempt(&mut self, order: PlugSpec, old: DiskProcess) -> Outcome {
        let mut new = None;
        let started = self.start(order, &mut new).await;
        let taken = match (started, &new) {
            (Ok((ours, before)), Some(new)) => {
                self.take_over(ours, new.identity().pid).await.map(|pause| (pause, before))
            }
            (Ok(_), None) => Err(NotDone::Refused(self.lost())),
            (Err(problem), _) => Err(NotDone::Refused(problem)),
        };
        match (taken, new) {
            (Ok((pause, before)), Some(mut new)) => {
                new.serves();
                self.recorded(&new).await;
                self.end(old).await;
                let note = self.note(before).await;
                (Some(new), Ok((Some(pause), note)))
            }
            // No process can have taken over.
            (Ok(_), None) => (Some(old), Err(self.lost())),
            (Err(NotDone::Refused(problem)), new) => self.keep_old(old, new, problem).await,
            (Err(NotDone::Unknown(problem)), new) => self.determine_outcome(old, new, problem).await,
        }
    }

    /// Starts the new process. Returns our end of its standard input, and the version of the old process.
    async fn start(
        &mut self,
        order: PlugSpec,
        new: &mut Option<DiskProcess>,
    ) -> Result<(OwnedFd, Option<String>), Problem> {
        let (daemon, vbd) = (self.daemon.clone(), self.vbd);
        let work = async {
            let asked = daemon.disks.version(vbd, REPORT_TIMEOUT).await?;
            let said = daemon.disks.ask(vbd, ask::Layers {}, REPORT_TIMEOUT).await?;
            let order = order.with_names(handover::names(&said.layers)?);
            let mut words = order.words(&DiskPaths::of(&daemon.config, vbd));
            words.push("--take-over".into());
            let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
            let (ours, theirs) = pair.map_err(|errno| Problem::failed("create a socket to a disk process", errno))?;
            *new = Some(launch(&daemon, &order, &words, theirs.into(), Incarnation::Replacement)?);
            Ok((ours, asked.program))
        };
        let (context, operation) = (&self.context, &self.operation);
        context.unless_cancelled(operation.unless_cancelled(self.steps.step("start", work))).await
    }

    /// Requests the handover; returns how long the guest's requests waited, in microseconds.
    async fn take_over(&mut self, ours: OwnedFd, new: u32) -> Result<u64, NotDone> {
        let socket = self.daemon.disks.socket(self.vbd);
        let limit = self.steps.limit();
        let pause_max = Duration::from_millis(self.daemon.config.upgrade_pause_max.into());
        let asked = self.steps.last_step("ask", handover::ask(&socket, ours, pause_max)).await;
        let answer = handover::answer(asked.map_err(NotDone::Refused)?, new, limit).await;
        self.steps.done("answer");
        answer
    }

    /// Records the new process. It serves even if that fails.
    async fn recorded(&mut self, new: &DiskProcess) {
        let (daemon, vbd) = (self.daemon.clone(), self.vbd);
        if let Err(problem) = self.steps.last_step("record", record(&daemon, vbd, new.identity())).await {
            tracing::error!(%vbd, "its new process could not be recorded: {problem}");
        }
    }

    /// Waits for the exit of a process that has handed over its disk.
    async fn end(&self, mut old: DiskProcess) {
        let (vbd, pid) = (self.vbd, old.identity().pid);
        match tokio::time::timeout(TO_END, old.ended()).await {
            Ok(Ok(Ended::Badly(how))) => {
                tracing::warn!(%vbd, pid, how, "a process that had handed over its disk did not exit cleanly");
            }
            Ok(_) => {}
            Err(_) => {
                tracing::warn!(%vbd, pid, "killing a process that has handed over its disk but does not exit");
                // This may take as long as storage that does not answer.
                background::spawn(async move { old.kill().await });
            }
        }
        self.daemon.disks.shares.ended(pid);
        self.steps.done("end");
    }

    /// A note on a successful upgrade, if any.
    async fn note(&self, before: Option<String>) -> Option<String> {
        let now = self.daemon.disks.version(self.vbd, TO_BE_SEEN).await.ok()?.program?;
        (Some(&now) == before.as_ref()).then(|| format!("the previous process had the same version {now}"))
    }

    /// Handles a failed handover: the old process continues, and the new one is not needed.
    async fn keep_old(&self, old: DiskProcess, new: Option<DiskProcess>, why: Problem) -> Outcome {
        if why.code == Code::Cancelled {
            // It never received a request to exit.
            self.kill(new).await;
            return (Some(old), Err(why));
        }
        let (ended, said) = match new {
            Some(mut new) => match tokio::time::timeout(TO_END, new.ended()).await {
                Ok(ended) => (ended.ok(), new.last_word().map(problem)),
                Err(_) => {
                    self.kill(Some(new)).await;
                    (None, None)
                }
            },
            None => (None, None),
        };
        (Some(old), Err(handover::cause(self.vbd, why, ended, said)))
    }

    async fn kill(&self, process: Option<DiskProcess>) {
        let Some(mut process) = process else { return };
        if let Err(problem) = process.kill().await {
            tracing::error!(vbd = %self.vbd, "{problem}");
        }
    }

    /// Handles a handover with unknown result.
    async fn determine_outcome(&mut self, mut old: DiskProcess, new: Option<DiskProcess>, why: Problem) -> Outcome {
        tracing::warn!(vbd = %self.vbd, "finding out which process serves it: {why}");
        let known = new.as_ref().map(DiskProcess::identity);
        // The connection closes slightly before the process has exited.
        let (old, dead) = match tokio::time::timeout(TO_BE_SEEN, old.ended()).await {
            Ok(_) => (None, Some(old)),
            Err(_) => (Some(old), None),
        };
        match settle(&self.daemon.disks, self.vbd, old, Vec::from_iter(new), Rest::Killed).await {
            Ok(Some(serves)) if Some(serves.identity()) == known => {
                self.recorded(&serves).await;
                let note = format!("the old process exited without reporting how long requests waited: {why}");
                (Some(serves), Ok((None, Some(note))))
            }
            // If both have exited, the exit of the old one is the one to report.
            Ok(left) => (left.or(dead), Err(why)),
            Err(problem) => {
                tracing::error!(vbd = %self.vbd, "{problem}");
                (None, Err(why))
            }
        }
    }
}
