//! The wording of log lines about requests.

use disk::{Damage, Operation, Status};

use crate::image::damage;

/// The text of a failed request that the host's administrator must know about, because only they can help. Other
/// failures are the guest's doing.
pub(super) fn worth_a_line(status: Status) -> Option<&'static str> {
    match status {
        Status::Failed => Some(""),
        Status::NoSpace => Some(": no space is left on the image's storage; writes succeed again once some is freed"),
        Status::Done | Status::Refused | Status::Unsupported => None,
    }
}

/// Damage, as what a request has failed of.
pub(super) fn of_damage(met: Damage) -> String {
    let why = damage::why_unreadable(met, format_args!("layer {}", met.file.0));
    format!(": {why}; {}", damage::advice(met, "IMAGE"))
}

/// An operation, as it is called in a line.
pub(super) fn in_words(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "a read",
        Operation::Write { .. } | Operation::Patch { .. } => "a write",
        Operation::Flush => "a flush",
        Operation::Discard => "a discard",
        Operation::WriteZeroes { .. } => "a write of zeroes",
        Operation::Extents { .. } => "an extent query",
    }
}
