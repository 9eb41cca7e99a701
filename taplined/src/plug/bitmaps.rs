//! The dirty bitmaps that a disk process offers to clients of the daemon's NBD address: what has changed in a VDI since
//! earlier snapshots of it.
//!
//! Which ones are wanted is known by [`crate::reader`]; each has the UUID of its snapshot as its name. It looks into no
//! map. Invariant: a bitmap is offered only if its maps name all changes up to the state that is served. An image job
//! verifies that first, so that the reason is known here if they do not; then the disk process does, which has the
//! image locked and reads the maps once. In any doubt the disk is served without.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use api::Problem;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::disk::handing::Handing;
use crate::vdi::begin;
use crate::vdi::maps::{History, OpenMaps};

/// Passes the maps of the wanted bitmaps of a VBD; returns the command-line arguments for those that are offered.
pub async fn offer(daemon: &Daemon, vdi: Uuid, wanted: &[Uuid], handing: &mut Handing) -> Vec<OsString> {
    if wanted.is_empty() {
        return Vec::new();
    }
    let offered = async {
        let history = History::of(daemon, vdi).await?;
        let proven = begin::proven(daemon, &history, history.earlier_of(wanted)).await;
        let Some((longest, _)) = proven.first() else { return Ok(Vec::new()) };
        words(&proven, history.open(daemon, *longest).await?, handing)
    };
    offered.await.unwrap_or_else(|problem: Problem| {
        tracing::warn!(%vdi, "its changes are not offered to a client of the NBD address: {problem}");
        Vec::new()
    })
}

/// Passes maps, and returns the command-line arguments for the bitmaps that are made of the last ones of them.
fn words(bitmaps: &[(Uuid, usize)], maps: OpenMaps, handing: &mut Handing) -> Result<Vec<OsString>, Problem> {
    let OpenMaps { files, expected } = maps;
    let mut names = Vec::new();
    for (path, file) in files {
        // Only a name for the process, which parses lists of them: the path of the repository may contain a comma.
        let name: PathBuf = Path::new("/").join(path.file_name().unwrap_or_default());
        handing.plain(&name, false, file);
        names.push(name.display().to_string());
    }
    let mut words = Vec::new();
    for (from, count) in bitmaps {
        let last = names.get(names.len().saturating_sub(*count)..).unwrap_or_default().join(",");
        words.extend(["--dirty-bitmap".into(), OsString::from(format!("{from}={last}"))]);
    }
    let expected = serde_json::to_string(&expected);
    let expected = expected.map_err(|error| Problem::failed("pass maps of changed blocks", error))?;
    words.extend(["--expect".into(), expected.into()]);
    Ok(words)
}
