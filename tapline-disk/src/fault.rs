//! Where tests have the process die of a request: `begin:SECTOR` when a request for that sector is about to be begun,
//! `answer:SECTOR` when it has been done and is about to be answered.
//!
//! Knows nothing about what is done there. Invariant: without the variable in the environment it does nothing.

use std::sync::LazyLock;

use disk::{Operation, Request};

const VARIABLE: &str = "TAPLINE_DISK_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());

/// The process is at a point at which it may be told to die of this request.
#[inline]
pub fn point(name: &str, request: &Request) {
    if let Some(wanted) = WANTED.as_deref() {
        die_if(wanted, name, request);
    }
}

#[cold]
fn die_if(wanted: &str, name: &str, request: &Request) {
    let sector = request.span().at / 512;
    if request.operation() != Operation::Flush && wanted == format!("{name}:{sector}") {
        // As any fault of ours ends it, without a word.
        std::process::abort();
    }
}
