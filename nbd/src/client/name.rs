//! Names of exports: their length, and the one that a server gives (NBD_INFO_NAME), as far as it identifies the disk.
//!
//! The name under which an export was requested may be that of another disk when the client connects again. A server
//! may as well give one disk several names, such as those of its image's files: only UUIDs are taken for identities.

use super::broken::Broken;
use crate::wire::STRING_MAX;

/// The name of an export is longer than the protocol allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the name of the export, or of the metadata context, has more than 4096 bytes")]
pub struct NameTooLong;

/// Fails if a name is too long for the protocol.
pub(super) fn must_fit(name: &str) -> Result<(), NameTooLong> {
    if name.len() > STRING_MAX { Err(NameTooLong) } else { Ok(()) }
}

/// The identity of an export; `None` if the server gives none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Canonical(Option<String>);

impl Canonical {
    /// That of a name, if it is a UUID.
    pub(super) fn of(name: &[u8]) -> Canonical {
        let name = std::str::from_utf8(name).ok().filter(|name| is_uuid(name));
        Canonical(name.map(str::to_owned))
    }

    /// Fails if work that was begun on this export cannot continue on the one of a later connection.
    pub(super) fn check_same(&self, next: &Canonical) -> Result<(), Broken> {
        match (&self.0, &next.0) {
            (Some(before), Some(now)) if before != now => {
                Err(Broken::Changed(format!("it was export '{before}' of the server and is '{now}' now")))
            }
            _ => Ok(()),
        }
    }

    /// Keeps the identity that was found first.
    pub(super) fn keep(&mut self, next: Canonical) {
        self.0 = self.0.take().or(next.0);
    }
}

fn is_uuid(name: &str) -> bool {
    let groups = name.split('-').map(str::len);
    groups.eq([8, 4, 4, 4, 12]) && name.bytes().all(|byte| byte == b'-' || byte.is_ascii_hexdigit())
}
