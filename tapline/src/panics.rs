//! Reports a panic in this program with the command that was running, and aborts the process (crate `logging`).
//!
//! Invariant: only the noun and the verb are reported, because other arguments may be secret.

use std::sync::OnceLock;

use logging::Stderr;
use logging::panics::{self, Panic};

static STDERR: Stderr = Stderr::of("tapline");

/// Called before a panic is reported.
static BEFORE: OnceLock<fn()> = OnceLock::new();

/// From now on every panic prints a report and aborts the process. `before` is called first, to restore the terminal;
/// it must not wait for a lock.
pub fn abort_on_panic(before: fn()) {
    BEFORE.get_or_init(|| before);
    panics::abort_on_panic(|panic| {
        if let Some(before) = BEFORE.get() {
            before();
        }
        STDERR.say_last(report(panic));
    });
}

fn report(panic: &Panic<'_>) -> String {
    let words = std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned());
    let command: Vec<String> = words.take_while(|word| !word.starts_with('-')).take(2).collect();
    panic.during(format_args!(
        "the command was '{}'; requests already sent continue in the daemon: see 'tapline task list'",
        command.join(" ")
    ))
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output, Stdio};

    use super::*;

    const ENVIRONMENT: &str = "TAPLINE_TEST_PANIC";

    fn panics(stderr: Stdio) -> Output {
        // A panic aborts the process, so the test runs it in a child process.
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside.args(["panics::test::inside", "--exact", "--nocapture"]);
        inside.env(ENVIRONMENT, "1").env("RUST_BACKTRACE", "0");
        inside.stdout(Stdio::piped()).stderr(stderr).spawn().unwrap().wait_with_output().unwrap()
    }

    #[test]
    fn a_panic_report_contains_no_secrets_and_aborts() {
        let ended = panics(Stdio::piped());
        let report = String::from_utf8(ended.stderr).unwrap();
        // SIGABRT.
        assert_eq!(ended.status.signal(), Some(6), "{report}");
        assert!(report.starts_with("tapline: PANIC") && report.contains("src/panics.rs:"), "{report}");
        assert!(report.contains(": too much: 3; the command was 'panics::test::inside'; "), "{report}");
        let full = File::options().write(true).open("/dev/full").unwrap();
        assert_eq!(panics(full.into()).status.signal(), Some(6));
    }

    /// Panics in the child process of the other test; does nothing otherwise.
    #[test]
    fn inside() {
        if std::env::var_os(ENVIRONMENT).is_none() {
            return;
        }
        abort_on_panic(|| ());
        // A panic in any thread aborts.
        std::thread::spawn(|| panic!("too much: {}", 3)).join().unwrap();
    }
}
