//! What is said of requests in the log. It knows nothing else of them.

use std::fmt;

use disk::{Damage, Operation, Status};

/// What whoever runs the host must hear of a failed request, for only they can help. The rest is the guest's doing.
pub(super) fn worth_a_line(status: Status) -> Option<&'static str> {
    match status {
        Status::Failed => Some(""),
        Status::NoSpace => Some(": no space is left on the image's storage; free some, and writes succeed again"),
        Status::Done | Status::Refused | Status::Unsupported => None,
    }
}

/// Damaged metadata, as what a request has failed of.
pub(super) struct Unfindable(pub Damage);

impl fmt::Display for Unfindable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Damage { file, span, at, raw } = self.0;
        write!(
            f,
            ": its bytes {} to {} cannot be found, since the entry {raw:#018x} at byte {at} of layer {} makes no sense; \
             `tapline image check IMAGE --repair` mends what can be mended",
            span.at,
            span.end().saturating_sub(1),
            file.0
        )
    }
}

/// An operation, as it is called in a line.
pub(super) fn in_words(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "a read",
        Operation::Write { .. } => "a write",
        Operation::Flush => "a flush",
        Operation::Discard => "a discard",
        Operation::WriteZeroes { .. } => "a write of zeroes",
        Operation::Extents => "a query for extents",
    }
}
