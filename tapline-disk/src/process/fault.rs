//! Where tests make a request kill the process: `begin:SECTOR` when a request for that sector is about to begin,
//! `answer:SECTOR` when it is done and about to be completed.
//!
//! And faults that can be put in, to check that rounds of replaced images find them (`cargo xtask replaced --planted`).
//!
//! It knows nothing about requests otherwise. Invariant: without the environment variables it does nothing, and
//! released programs do not read them.

use std::sync::LazyLock;

use disk::{Operation, Request};

const VARIABLE: &str = "TAPLINE_DISK_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| for_tests(VARIABLE));

/// Whether this program is built for tests: one that is released must not do what an environment says.
const TESTABLE: bool = cfg!(any(debug_assertions, feature = "planted"));

/// A variable of the environment by which a test controls the process; none in a released program.
pub fn for_tests(name: &str) -> Option<String> {
    if TESTABLE { std::env::var(name).ok() } else { None }
}

/// A point at which a test can make the process die of this request.
#[inline]
pub fn point(name: &str, request: &Request) {
    if let Some(wanted) = WANTED.as_deref().filter(|_| TESTABLE) {
        die_if(wanted, name, request);
    }
}

#[cold]
fn die_if(wanted: &str, name: &str, request: &Request) {
    let sector = request.span().at / 512;
    if request.operation() != Operation::Flush && wanted == format!("{name}:{sector}") {
        // Like any of our panics, but without output.
        std::process::abort();
    }
}

/// A fault that can be put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A redo log is taken for that of an image although the image has another stamp.
    AnyStamp,
    /// An image that was modified after its process was killed is refused.
    TimeDecides,
    /// A redo log is only found as long as its image has no further name.
    LinkDecides,
    /// Who only reads an image does not read its redo log.
    ReaderIgnoresLog,
}

/// Whether a fault is put in. Only programs built for that have any.
#[cfg(not(feature = "planted"))]
pub const fn planted(_: Planted) -> bool {
    false
}

/// Whether a fault is put in, according to the environment.
#[cfg(feature = "planted")]
pub fn planted(which: Planted) -> bool {
    let name = match which {
        Planted::AnyStamp => "any-stamp",
        Planted::TimeDecides => "time-decides",
        Planted::LinkDecides => "link-decides",
        Planted::ReaderIgnoresLog => "reader-ignores-log",
    };
    std::env::var("TAPLINE_DISK_PLANTED").is_ok_and(|named| named == name)
}
