//! Aborts that tests request for one request: `begin:SECTOR` before a request for that sector starts, `answer:SECTOR`
//! when it is done and about to be completed.
//!
//! And planted faults, to check that the explorer of replaced images finds them (`cargo xtask replaced --planted`).
//!
//! Invariant: without the environment variables it does nothing, and released programs do not read them.

use std::sync::LazyLock;

use disk::{Operation, Request};

const VARIABLE: &str = "TAPLINE_DISK_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| for_tests(VARIABLE));

/// True in programs that are built for tests. A released program must not obey these environment variables.
const TESTABLE: bool = cfg!(any(debug_assertions, feature = "planted"));

/// Reads an environment variable by which a test controls the process; returns `None` in a released program.
pub fn for_tests(name: &str) -> Option<String> {
    if TESTABLE { std::env::var(name).ok() } else { None }
}

/// Aborts the process here if a test has requested it for this request.
#[inline]
pub fn point(name: &str, request: &Request) {
    if let Some(wanted) = WANTED.as_deref().filter(|_| TESTABLE) {
        abort_if(wanted, name, request);
    }
}

#[cold]
fn abort_if(wanted: &str, name: &str, request: &Request) {
    let sector = request.span().at / 512;
    if request.operation() != Operation::Flush && wanted == format!("{name}:{sector}") {
        // Ends like a panic, but without output.
        std::process::abort();
    }
}

/// A fault that can be planted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A redo log is applied to an image that has another stamp.
    AnyStamp,
    /// An image that was modified after its process was killed is refused.
    TimeDecides,
    /// A redo log is only found while its image has a single name.
    LinkDecides,
    /// Readers of an image ignore its redo log.
    ReaderIgnoresLog,
}

/// Returns whether a fault is planted; never in programs that are not built for it.
#[cfg(not(feature = "planted"))]
pub const fn planted(_: Planted) -> bool {
    false
}

/// Returns whether the environment plants this fault.
#[cfg(feature = "planted")]
pub fn planted(fault: Planted) -> bool {
    let name = match fault {
        Planted::AnyStamp => "any-stamp",
        Planted::TimeDecides => "time-decides",
        Planted::LinkDecides => "link-decides",
        Planted::ReaderIgnoresLog => "reader-ignores-log",
    };
    std::env::var("TAPLINE_DISK_PLANTED").is_ok_and(|named| named == name)
}
