//! Finds disk processes that may hang while only their guests wait for them: those whose threads make no progress in
//! the kernel are polled ([`doubt`]).
//!
//! It reads only the kernel's view of the threads: an idle disk is not woken.

use std::collections::HashMap;
use std::fs;

use api::Problem;
use uuid::Uuid;

use super::doubt::doubt;
use crate::daemon::Daemon;
use crate::task::blocking;

/// Fields of the processor time in [`stats::thread_status`]: 14 and 15 of proc_pid_stat(5).
const TIMES: std::ops::Range<usize> = 11..13;

/// Threads that wait for storage, with the processor time each has used.
type Waiting = HashMap<u32, u64>;

/// Examines all disk processes at the interval of the storage timeout, forever.
pub async fn look_for_hung(daemon: Daemon) {
    let every = daemon.config.storage.patience();
    let mut before = HashMap::new();
    loop {
        tokio::time::sleep(every).await;
        match look(&daemon, before).await {
            Ok(now) => before = now,
            Err(problem) => {
                tracing::error!("cannot tell whether disk processes hang: {problem}");
                before = HashMap::new();
            }
        }
    }
}

/// Doubts processes with threads that have been waiting since the last look, or that were stopped.
async fn look(daemon: &Daemon, before: HashMap<Uuid, Waiting>) -> Result<HashMap<Uuid, Waiting>, Problem> {
    let plugged = daemon.catalogue.read(|view| view.plugged_processes()).await?;
    let looked = blocking("look at disk processes", move || {
        Ok(plugged.into_iter().map(|(vbd, pid)| (vbd, Threads::of(pid))).collect::<Vec<_>>())
    });
    let mut now = HashMap::new();
    for (vbd, threads) in looked.await? {
        if threads.stopped || before.get(&vbd).is_some_and(|before| is_stuck(before, &threads.waiting)) {
            doubt(daemon, vbd);
        }
        now.insert(vbd, threads.waiting);
    }
    Ok(now)
}

/// Whether a thread has not run between two looks.
fn is_stuck(before: &Waiting, now: &Waiting) -> bool {
    now.iter().any(|(thread, time)| before.get(thread) == Some(time))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Threads {
    waiting: Waiting,
    /// Whether one was stopped by a signal or a debugger.
    stopped: bool,
}

impl Threads {
    /// No threads if the process does not exist.
    fn of(pid: u32) -> Threads {
        let mut threads = Threads::default();
        let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return threads };
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for number in numbers {
            // The thread may have ended.
            let Some(stat) = stats::thread_status(pid, number) else { continue };
            match stat.chars().next() {
                Some('T' | 't') => threads.stopped = true,
                Some('D') => drop(threads.waiting.insert(number, processor_time(&stat))),
                _ => {}
            }
        }
        threads
    }
}

fn processor_time(stat: &str) -> u64 {
    let times = stat.split_whitespace().skip(TIMES.start).take(TIMES.len());
    times.filter_map(|time| time.parse::<u64>().ok()).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_stopped_process_is_noticed() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        // It may still be loading its program.
        assert!(!Threads::of(child.id()).stopped);
        let stopped = Command::new("kill").args(["-STOP", &child.id().to_string()]).status().unwrap();
        assert!(stopped.success());
        while !Threads::of(child.id()).stopped {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Threads::of(child.id()), Threads::default());
    }

    #[test]
    fn only_a_thread_that_has_not_run_in_between_is_stuck() {
        let of = |threads: &[(u32, u64)]| threads.iter().copied().collect::<Waiting>();
        assert!(is_stuck(&of(&[(1, 5), (2, 7)]), &of(&[(2, 7)])));
        assert!(!is_stuck(&of(&[(1, 5)]), &of(&[(1, 6)])));
        assert!(!is_stuck(&of(&[(1, 5)]), &of(&[(2, 5)])));
    }

    #[test]
    fn the_processor_time_is_that_of_user_and_system() {
        let stat = "D 1 2 3 4 5 6 7 8 9 10 20 3 40 50";
        assert_eq!(processor_time(stat), 23);
    }
}
