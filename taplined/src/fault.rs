//! Points at which tests kill the daemon: before and after every step of every journalled task, and every append to
//! an inventory.

use std::sync::LazyLock;

/// The environment variable that makes the daemon die at a point: `VERB:STEP` or `VERB:STEP:after`, or panic there:
/// `VERB:STEP:panic`.
const VARIABLE: &str = "TAPLINED_ABORT_AT";

static WANTED: LazyLock<Option<String>> = LazyLock::new(|| for_tests(VARIABLE));

/// The value of an environment variable by which a test controls the daemon; `None` in release builds, which must not
/// obey their environment.
pub fn for_tests(name: &str) -> Option<String> {
    if cfg!(any(debug_assertions, feature = "planted")) { std::env::var(name).ok() } else { None }
}

/// Marks a point at which a test may kill the daemon.
pub fn point(verb: &str, step: &str, after: bool) {
    let Some(wanted) = WANTED.as_deref() else { return };
    assert!(after || wanted != format!("{verb}:{step}:panic"), "a fault injected by a test");
    let suffix = if after { ":after" } else { "" };
    if wanted == format!("{verb}:{step}{suffix}") {
        // Like kill -9, without any output.
        std::process::abort();
    }
}

/// A fixed bug that can be reintroduced, to check that the model finds it (`cargo xtask model --planted all`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// A merge of the leaf itself that has just ended when the daemon dies is forgotten.
    ForgottenMerge,
    /// A forgotten repository is introduced without its inventory.
    ForgottenNames,
    /// A catalogue that is older than its repositories and running disks is trusted.
    OldCatalogue,
    /// A process that the catalogue does not know is killed when the daemon starts.
    KilledStrays,
    /// A disk that has died five times is not started again.
    StaysDown,
    /// A chain may become longer than a disk can be served from.
    DeepChain,
    /// Schedules destroy snapshots that a person has taken.
    TakenByHand,
    /// A process whose supervision begins is not sent its weight.
    UntoldWeight,
    /// A destroy that is cancelled before its first step destroys nevertheless.
    DeafDestroy,
    /// A job that waits before its first step when the daemon dies is resumed in that step.
    NothingIsBegun,
    /// A pause or resume that QEMU has not answered in time counts as not done.
    LateIsNever,
    /// An undo does not wait for what the undone step has started.
    HastyUndo,
    /// A second name of a file is added as a second disk.
    HardLink,
    /// Whether a clone is based on a snapshot is decided by the number of its children.
    CountedChildren,
    /// Schedules trust a clock that has jumped.
    JumpedClock,
}

/// Whether a bug is reintroduced; only in daemons built with the feature.
#[cfg(not(feature = "planted"))]
pub const fn planted(_: Planted) -> bool {
    false
}

/// Whether a bug is reintroduced, according to the environment.
#[cfg(feature = "planted")]
pub fn planted(which: Planted) -> bool {
    let name = match which {
        Planted::ForgottenMerge => "forgotten-merge",
        Planted::ForgottenNames => "forgotten-names",
        Planted::OldCatalogue => "old-catalogue",
        Planted::KilledStrays => "killed-strays",
        Planted::StaysDown => "stays-down",
        Planted::DeepChain => "deep-chain",
        Planted::TakenByHand => "taken-by-hand",
        Planted::UntoldWeight => "untold-weight",
        Planted::DeafDestroy => "deaf-destroy",
        Planted::NothingIsBegun => "nothing-is-begun",
        Planted::LateIsNever => "late-is-never",
        Planted::HastyUndo => "hasty-undo",
        Planted::HardLink => "hard-link",
        Planted::CountedChildren => "counted-children",
        Planted::JumpedClock => "jumped-clock",
    };
    std::env::var("TAPLINED_PLANTED").is_ok_and(|named| named == name)
}
