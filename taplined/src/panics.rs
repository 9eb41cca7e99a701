//! Reports a panic in the daemon with the current operation, and aborts the process (crate `logging`).
//!
//! It knows nothing about tasks and requests. Invariant: the panic is reported in the log, and also on standard error
//! if the log is a file; if standard error fails, the report goes to the path of the log file. The process aborts by
//! a signal, after which the service manager restarts it: disks keep running, and the journal has all unfinished
//! work.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use logging::panics::{self, Panic};

use crate::log;

/// Number of unfinished tasks.
static TASKS: AtomicUsize = AtomicUsize::new(0);

tokio::task_local! {
    /// The purpose of the current tokio task.
    static AT: String;
}

/// Makes every panic from now on print a report and abort the process, including panics that libraries would catch.
pub fn abort_on_panic() {
    panics::abort_on_panic(|panic| log::say_last(&report(panic)));
}

/// Runs `work` under a name that a panic report quotes.
pub fn during<F: Future>(name: String, work: F) -> impl Future<Output = F::Output> {
    AT.scope(name, work)
}

/// Records the number of unfinished tasks.
pub fn tasks(count: usize) {
    TASKS.store(count, Ordering::Relaxed);
}

fn report(panic: &Panic<'_>) -> String {
    let thread = std::thread::current();
    let at = AT.try_with(|at| format!("during {at}"));
    let at = at.unwrap_or_else(|_| format!("in the thread {}", thread.name().unwrap_or("without a name")));
    let tasks = TASKS.load(Ordering::Relaxed);
    panic.during(format_args!(
        "{at}; tasks in progress: {tasks}; the daemon stops, disks keep running, and the journal has all unfinished \
         work"
    ))
}
