//! Where tests kill the daemon: before and after every step of every journalled task, and every append to an inventory.

use std::sync::LazyLock;

/// `VERB:STEP` or `VERB:STEP:after`, in the environment of a daemon that is to die there; `VERB:STEP:panic` of one that
/// is to find a fault in itself.
const VARIABLE: &str = "TAPLINED_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| std::env::var(VARIABLE).ok());

/// The daemon is at a point at which it may be killed.
pub fn point(verb: &str, step: &str, after: bool) {
    let Some(wanted) = WANTED.as_deref() else { return };
    assert!(after || wanted != format!("{verb}:{step}:panic"), "a fault that a test asked for");
    let suffix = if after { ":after" } else { "" };
    if wanted == format!("{verb}:{step}{suffix}") {
        // As kill -9 would, without a word.
        std::process::abort();
    }
}
