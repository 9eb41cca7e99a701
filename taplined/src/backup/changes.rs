//! What has changed in a VDI since its last backup.

use std::ffi::OsString;

use api::{DiskBackup, Problem};
use uuid::Uuid;

use crate::daemon::Daemon;

/// The arguments by which a backup of `snapshot`, a snapshot of `vdi`, reads only what may have changed since `last`:
/// `--since`, `--since-content` and `--changed`, all of them or none. `--since` is only given with a list that was
/// recorded without a gap from the very content of that backup on.
///
/// The daemon records no changes yet, so there are none: everything is read that is not a hole, and what the target
/// has already is not sent.
pub async fn since(
    _daemon: &Daemon,
    _vdi: Uuid,
    _snapshot: Uuid,
    _last: Option<&DiskBackup>,
) -> Result<Vec<OsString>, Problem> {
    Ok(Vec::new())
}
