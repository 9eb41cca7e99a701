//! A fault in the daemon: told with what it was at, and the end of the process (crate `logging`).
//!
//! It knows nothing of what tasks and requests are. Invariant: it is told in the log, and where that is a file on
//! standard error too; what standard error does not take goes to the file that the log would be. The process ends by a
//! signal, at which the service manager starts it again: disks go on meanwhile, and the journal has what was under way.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};

use logging::panics::{self, Panic};

use crate::log;

/// Tasks under way.
static TASKS: AtomicUsize = AtomicUsize::new(0);

tokio::task_local! {
    /// What the present task of tokio's is for.
    static AT: String;
}

/// From now on a panic is told and ends the process, also in what others would go on without.
pub fn abort_on_panic() {
    panics::abort_on_panic(|panic| log::say_last(&told(panic)));
}

/// Does something that has a name.
pub fn during<F: Future>(name: String, work: F) -> impl Future<Output = F::Output> {
    AT.scope(name, work)
}

/// So many tasks are under way.
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
