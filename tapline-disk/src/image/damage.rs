//! Describes damage that requests have found in an image.
//!
//! It knows nothing about requests or readers.

use std::fmt::Display;

use disk::{Damage, Damaged};

/// Returns why bytes of a disk cannot be read, with the name of the damaged layer.
pub fn why_unreadable(damage: Damage, layer: impl Display) -> String {
    let Damage { span, at, .. } = damage;
    let (first, last) = (span.at, span.end().0.saturating_sub(1));
    match damage.what {
        Damaged::Entry(raw) => format!(
            "its bytes {first} to {last} cannot be located: the entry {raw:#018x} at byte {at} of {layer} is invalid"
        ),
        Damaged::Missing(has) => format!(
            "its bytes {first} to {last} are missing: they, or the table that says where they are, should be at byte \
             {at} of {layer}, which has only {has} bytes (was it copied whole?)"
        ),
        Damaged::Compressed => format!(
            "its bytes {first} to {last} cannot be read: the compressed cluster at byte {at} of {layer} does not \
             decompress to a cluster with these bytes"
        ),
    }
}

/// Returns what can be done about the damage.
pub fn advice(damage: Damage, layer: impl Display) -> String {
    match damage.what {
        Damaged::Entry(_) => format!(
            "`tapline image check {layer} --repair` repairs what can be repaired; the rest is to be restored from a backup"
        ),
        Damaged::Missing(_) => "copy the file again; else restore it from a backup".to_owned(),
        Damaged::Compressed => "its data is lost unless it can be restored from a backup".to_owned(),
    }
}
