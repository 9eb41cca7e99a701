//! A panic in this program is reported with the number of requests in flight, and aborts the process (crate `logging`).
//!
//! Of disks it knows only these numbers. After the abort nothing more is written, flushed or completed. The kernel
//! releases the locks, and another process takes over the sockets and the disk.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use logging::panics::{self, Panic};

use crate::process::log;

/// The number of requests in flight, as last counted by the event loop.
static IN_FLIGHT: AtomicUsize = AtomicUsize::new(0);
/// The verb in progress.
static VERB: Mutex<Option<&'static str>> = Mutex::new(None);

/// Makes every panic print a report and abort the process from now on.
pub fn abort_on_panic() {
    // It does not wait for a reader of the log: the guest is waiting for the next process.
    panics::abort_on_panic(|panic| log::say(report(panic)));
}

/// Sets the number of requests in flight.
#[inline]
pub fn in_flight(requests: usize) {
    IN_FLIGHT.store(requests, Ordering::Relaxed);
}

/// Sets the verb in progress.
pub fn under_way(verb: Option<&'static str>) {
    // Only a panic reads this, so the lock is free.
    if let Ok(mut under_way) = VERB.try_lock() {
        *under_way = verb;
    }
}

fn report(panic: &Panic<'_>) -> String {
    let requests = IN_FLIGHT.load(Ordering::Relaxed);
    // The panicking thread may hold the lock.
    let verb = VERB.try_lock().ok().and_then(|verb| *verb).map(|verb| {
        let article = if verb.starts_with('u') { "an" } else { "a" };
        format!(", {article} {verb} was in progress")
    });
    let verb = verb.unwrap_or_default();
    panic.during(format_args!(
        "{requests} requests were in flight{verb}; the process exits, and another one can take over its disk"
    ))
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output, Stdio};

    use super::*;

    const ENVIRONMENT: &str = "TAPLINE_TEST_PANIC";

    fn panics(log: Stdio) -> Output {
        // It aborts the process, so the test runs it in a child process.
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside
            .args(["--exact", "process::panics::test::inside", "--nocapture"])
            .env(ENVIRONMENT, "1")
            .env("RUST_BACKTRACE", "0");
        inside.stdout(Stdio::piped()).stderr(log).spawn().unwrap().wait_with_output().unwrap()
    }

    #[test]
    fn a_panic_reports_requests_in_flight_and_aborts() {
        let ended = panics(Stdio::piped());
        let log = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.signal(), Some(6), "{log}");
        assert!(log.starts_with("tapline-disk: PANIC") && log.contains("src/process/panics.rs:"), "{log}");
        assert!(log.contains(": too much: 3; 7 requests were in flight, a snapshot was in progress; "), "{log}");
    }

    #[test]
    fn a_panic_aborts_even_if_stderr_cannot_be_written() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(panics(full.into()).status.signal(), Some(6));
    }

    /// The part of the other tests that runs in a child process; without the variable it does nothing.
    #[test]
    fn inside() {
        if std::env::var_os(ENVIRONMENT).is_none() {
            return;
        }
        abort_on_panic();
        in_flight(7);
        under_way(Some("snapshot"));
        // It aborts in any thread.
        std::thread::spawn(|| panic!("too much: {}", 3)).join().unwrap();
    }
}
