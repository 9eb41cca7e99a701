//! Where tests make a request kill the process: `begin:SECTOR` when a request for that sector is about to begin,
//! `answer:SECTOR` when it is done and about to be completed.
//!
//! It knows nothing about requests otherwise. Invariant: without the environment variable it does nothing.

use std::sync::LazyLock;

use disk::{Operation, Request};

const VARIABLE: &str = "TAPLINE_DISK_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());

/// A point at which a test can make the process die of this request.
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
        // Like any of our panics, but without output.
        std::process::abort();
    }
}
