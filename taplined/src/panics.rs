//! A panic in the daemon is reported with what it was doing, and aborts the process (crate `logging`).
//!
//! It knows nothing about tasks and requests. Invariant: it is reported in the log, and also on standard error if the
//! log is a file; what standard error does not accept goes to the file that the log would be. The process is ended by a
//! signal, after which the service manager restarts it: disks keep running, and the journal has all unfinished work.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use logging::panics::{self, Panic};

use crate::log;

/// Tasks under way.
static TASKS: AtomicUsize = AtomicUsize::new(0);

tokio::task_local! {
    /// The purpose of the current tokio task.
    static AT: String;
}

/// Makes every panic print a report and abort the process from now on, including panics that libraries would catch.
pub fn abort_on_panic() {
    panics::abort_on_panic(|panic| log::say_last(&told(panic)));
}

/// Does something that has a name.
pub fn during<F: Future>(name: String, work: F) -> impl Future<Output = F::Output> {
    AT.scope(name, work)
}

/// Records the number of unfinished tasks.
pub fn tasks(count: usize) {
    TASKS.store(count, Ordering::Relaxed);
}

fn told(panic: &Panic<'_>) -> String {
    let thread = std::thread::current();
    let at = AT.try_with(|at| format!("during {at}"));
    let at = at.unwrap_or_else(|_| format!("in the thread {}", thread.name().unwrap_or("without a name")));
    let tasks = TASKS.load(Ordering::Relaxed);
    panic.during(format_args!(
        "{at}; tasks in progress: {tasks}; the daemon stops, disks keep running, and the journal has all unfinished \
         work"
    ))
}
