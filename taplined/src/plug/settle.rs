//! Determines which of several processes serves a VBD, if one was replacing another and the outcome was not observed.
//!
//! It knows processes and which of them answers at the control socket, but not how a disk is handed over. Invariant:
//! at most one of the processes is left, and that one serves, or is the only one that ever did. All others have
//! exited when this returns, so that another may be started; except with [`Rest::Left`], which returns `None` only if
//! none runs.
//!
//! A process that never took over exits by itself, because the one that would have handed over the disk has exited or
//! given up; one that has handed over its disk exits by itself too. So at first both are only waited for.

use std::time::{Duration, Instant};

use api::Problem;
use repo::catalogue::Process;
use uuid::Uuid;

use crate::catalogue;
use crate::daemon::Daemon;
use crate::disk::process::DiskProcess;
use crate::disk::{Disks, serving};

/// How long two processes of one disk may coexist: many times as long as a handover takes.
const TO_SETTLE: Duration = Duration::from_secs(10);

/// How long a disk may take to report the serving process. No response arrives while only a process that has not
/// taken over holds the socket.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// Pause before checking again which processes remain.
const LOOK_AFTER: Duration = Duration::from_millis(20);

/// The treatment of processes that do not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// They are killed: the catalogue is certain about their purpose.
    Killed,
    /// They are not touched: the catalogue is older than they are, and one that does not answer may serve a guest.
    Left,
}

/// The process that serves a VBD, among the recorded one and others that were started for it; `None` if none serves.
pub async fn settle(
    disks: &Disks,
    vbd: Uuid,
    recorded: Option<DiskProcess>,
    others: Vec<DiskProcess>,
    rest: Rest,
) -> Result<Option<DiskProcess>, Problem> {
    settle_in(disks, vbd, recorded, others, rest, TO_SETTLE).await
}

async fn settle_in(
    disks: &Disks,
    vbd: Uuid,
    recorded: Option<DiskProcess>,
    others: Vec<DiskProcess>,
    rest: Rest,
    patience: Duration,
) -> Result<Option<DiskProcess>, Problem> {
    let known = recorded.as_ref().map(DiskProcess::identity);
    let others = others.into_iter().filter(|process| Some(process.identity()) != known);
    let mut all: Vec<DiskProcess> = recorded.into_iter().chain(others).collect();
    let begun = Instant::now();
    let mut answers = None;
    loop {
        reap_dead(&mut all).await?;
        match all.as_slice() {
            [] => return Ok(None),
            [alone] if Some(alone.identity()) == known || rest == Rest::Left => return Ok(all.pop()),
            _ => {}
        }
        answers = responding_pid(disks, vbd).await.or(answers);
        let found = all.iter().position(|process| Some(process.identity().pid) == answers);
        if let (1, Some(_)) = (all.len(), found) {
            return Ok(all.pop());
        }
        if begun.elapsed() >= patience {
            let stays = found.or_else(|| all.iter().position(|process| Some(process.identity()) == known));
            return match rest {
                Rest::Killed => end_all_but(vbd, all, stays).await,
                Rest::Left => Ok(leave_all_but(vbd, all, stays)),
            };
        }
        tokio::time::sleep(LOOK_AFTER).await;
    }
}

/// Drops the processes that have exited.
async fn reap_dead(all: &mut Vec<DiskProcess>) -> Result<(), Problem> {
    while let Some(at) = all.iter().position(DiskProcess::has_ended) {
        // Children are reaped.
        all.swap_remove(at).ended().await?;
    }
    Ok(())
}

async fn end_all_but(vbd: Uuid, all: Vec<DiskProcess>, stays: Option<usize>) -> Result<Option<DiskProcess>, Problem> {
    let mut left = None;
    for (at, mut process) in all.into_iter().enumerate() {
        if Some(at) == stays {
            left = Some(process);
        } else {
            tracing::warn!(%vbd, pid = process.identity().pid, "killing a process that does not serve its disk");
            process.kill().await?;
        }
    }
    Ok(left)
}

/// The process that stays. If none answers, this is the oldest: the others were started to replace it.
fn leave_all_but(vbd: Uuid, mut all: Vec<DiskProcess>, stays: Option<usize>) -> Option<DiskProcess> {
    let oldest = || (0..all.len()).min_by_key(|at| all.get(*at).map(|process| process.identity().started));
    let left = all.swap_remove(stays.or_else(oldest)?);
    for process in all {
        let pid = process.identity().pid;
        tracing::error!(%vbd, pid, "not touching a process that does not serve its disk; if it stays, kill it");
    }
    Some(left)
}

/// The pid reported at a disk's control socket; `None` without a response.
async fn responding_pid(disks: &Disks, vbd: Uuid) -> Option<u32> {
    disks.version(vbd, REPORT_TIMEOUT).await.inspect_err(|problem| tracing::debug!(%vbd, "{problem}")).ok()?.pid
}

/// The process that serves a VBD although the recorded one has exited: another client upgraded it.
pub async fn successor(daemon: &Daemon, vbd: Uuid, ended: Process) -> Option<DiskProcess> {
    let pid = responding_pid(&daemon.disks, vbd).await?;
    let found = serving::one(&daemon.config, vbd, pid).unwrap_or_else(|problem| {
        tracing::warn!(%vbd, pid, "cannot find which process has replaced it: {problem}");
        None
    });
    found.filter(|found| found.identity() != ended)
}

/// Records the process that serves a VBD.
pub async fn record(daemon: &Daemon, vbd: Uuid, process: Process) -> Result<(), Problem> {
    catalogue::record(&daemon.catalogue, move |tx| tx.set_vbd_process(vbd, process)).await
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use serde_json::json;

    use super::*;
    use crate::config::Config;
    use crate::disk::paths::{self, DiskPaths};

    /// A listener at a disk's control socket, and processes that could be the disk.
    struct Bed {
        _room: tempfile::TempDir,
        disks: Disks,
        vbd: Uuid,
        place: DiskPaths,
    }

    fn bed() -> Bed {
        let room = tempfile::tempdir().unwrap();
        let config = Config { run_directory: room.path().to_owned(), ..Config::default() };
        let (disks, vbd) = (Disks::of(&config), Uuid::new_v4());
        std::fs::create_dir_all(paths::all(&config).join(vbd.to_string())).unwrap();
        Bed { place: DiskPaths::of(&config, vbd), _room: room, disks, vbd }
    }

    impl Bed {
        /// Makes a process with the returned pid respond from now on; none while it is 0.
        fn answer(&self) -> Arc<AtomicU32> {
            let listener = UnixListener::bind(self.place.control()).unwrap();
            let who = Arc::new(AtomicU32::new(0));
            let says = who.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    let mut line = String::new();
                    BufReader::new(&stream).read_line(&mut line).unwrap();
                    if let pid @ 1.. = says.load(Ordering::SeqCst) {
                        // The client may have disconnected.
                        (&stream).write_all(json!({ "id": 1, "ok": { "pid": pid } }).to_string().as_bytes()).ok();
                        (&stream).write_all(b"\n").ok();
                    }
                }
            });
            who
        }

        async fn settle(&self, recorded: Option<DiskProcess>, others: Vec<DiskProcess>, patience: u64) -> Option<u32> {
            self.settle_with(recorded, others, Rest::Killed, patience).await
        }

        async fn settle_with(
            &self,
            recorded: Option<DiskProcess>,
            others: Vec<DiskProcess>,
            rest: Rest,
            patience: u64,
        ) -> Option<u32> {
            let settled = settle_in(&self.disks, self.vbd, recorded, others, rest, Duration::from_millis(patience));
            settled.await.unwrap().map(|process| process.identity().pid)
        }
    }

    /// A process that exits when its standard input is closed, or only when it is killed.
    fn process() -> (DiskProcess, Child) {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let found = DiskProcess::with_words(child.id(), |_| true).unwrap().unwrap();
        (found, child)
    }

    const LONG: u64 = 60_000;

    #[tokio::test]
    async fn a_single_recorded_process_is_accepted_without_a_query() {
        let bed = bed();
        let (recorded, mut child) = process();
        assert_eq!(bed.settle(Some(recorded), Vec::new(), LONG).await, Some(child.id()));
        assert_eq!(bed.settle(None, Vec::new(), LONG).await, None);
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_replacement_that_never_took_over_is_awaited_and_the_old_process_stays() {
        let bed = bed();
        let ((old, mut child), (new, mut other)) = (process(), process());
        bed.answer().store(child.id(), Ordering::SeqCst);
        let ends = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            drop(other.stdin.take());
            other.wait().unwrap()
        });
        assert_eq!(bed.settle(Some(old), vec![new], LONG).await, Some(child.id()));
        assert!(ends.join().unwrap().success(), "it was killed");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn a_replacement_that_took_over_is_recognized_by_its_answer() {
        let bed = bed();
        let (new, mut child) = process();
        let who = bed.answer();
        let (answers, pid) = (who.clone(), child.id());
        let takes_over = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            answers.store(pid, Ordering::SeqCst);
        });
        assert_eq!(bed.settle(None, vec![new], LONG).await, Some(pid));
        takes_over.join().unwrap();
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[tokio::test]
    async fn processes_that_do_not_serve_are_killed_eventually() {
        let bed = bed();
        let ((old, mut first), (new, mut second)) = (process(), process());
        let who = bed.answer();
        who.store(second.id(), Ordering::SeqCst);
        assert_eq!(bed.settle(Some(old), vec![new], 50).await, Some(second.id()));
        assert!(!first.wait().unwrap().success());
        // No process responds: the recorded one may only be slow, and no other has taken over.
        who.store(0, Ordering::SeqCst);
        let ((old, mut third), again) = (process(), DiskProcess::with_words(second.id(), |_| true).unwrap().unwrap());
        assert_eq!(bed.settle(Some(old), vec![again], 50).await, Some(third.id()));
        assert!(!second.wait().unwrap().success());
        let again = DiskProcess::with_words(third.id(), |_| true).unwrap().unwrap();
        assert_eq!(bed.settle(None, vec![again], 50).await, None);
        assert!(!third.wait().unwrap().success());
    }
    #[tokio::test]
    async fn without_certainty_no_process_is_killed() {
        let bed = bed();
        let (silent, mut first) = process();
        assert_eq!(bed.settle_with(None, vec![silent], Rest::Left, LONG).await, Some(first.id()));
        let again = DiskProcess::with_words(first.id(), |_| true).unwrap().unwrap();
        let (other, mut second) = process();
        assert!(bed.settle_with(None, vec![other, again], Rest::Left, 50).await.is_some());
        bed.answer().store(second.id(), Ordering::SeqCst);
        let find = |child: &Child| DiskProcess::with_words(child.id(), |_| true).unwrap().unwrap();
        let settled = bed.settle_with(Some(find(&first)), vec![find(&second)], Rest::Left, 50);
        assert_eq!(settled.await, Some(second.id()));
        for child in [&mut first, &mut second] {
            assert!(child.try_wait().unwrap().is_none());
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
