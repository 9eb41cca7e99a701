//! The wording of log lines about requests.

use disk::{Damage, Operation, Status};

use crate::image::damage;

/// Returns the text for a failed request if the host's administrator must know about it, because only they can help.
/// Other failures are caused by the guest.
pub(super) fn worth_a_line(status: Status) -> Option<&'static str> {
    match status {
        Status::Failed => Some(""),
        Status::NoSpace => Some(": no space is left on the image's storage; writes succeed again once some is freed"),
        Status::Done | Status::Refused | Status::Unsupported => None,
    }
}

/// Describes damage, as the cause of a failure.
pub(super) fn of_damage(met: Damage) -> String {
    let why = damage::why_unreadable(met, format_args!("layer {}", met.file.0));
    format!(": {why}; {}", damage::advice(met, "IMAGE"))
}

/// Returns the name of an operation for a log line.
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
