//! Exported disks that clients fetch piece by piece.
//!
//! Invariant: like an upload, a download has no name in any file system and no entry in the catalogue, so that neither
//! a client that disappears nor a killed daemon leaves one behind.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use api::{Code, DOWNLOAD_PIECE, Download, Problem};
use repo::driver::file_failed;
use uuid::Uuid;

use crate::background;
use crate::daemon::Daemon;

/// Time without a request after which a download is removed.
const IDLE: Duration = Duration::from_secs(3600);

/// Maximum number of downloads: each may take as much space as its disk.
const MAX: usize = 32;

/// The exported disks that clients may fetch.
#[derive(Debug, Default)]
pub struct Downloads(Mutex<HashMap<Uuid, Arc<Made>>>);

/// A download and its file.
#[derive(Debug)]
struct Made {
    download: Download,
    file: File,
    last: Mutex<Instant>,
}

impl Downloads {
    fn all(&self) -> MutexGuard<'_, HashMap<Uuid, Arc<Made>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, uuid: Uuid) -> Result<Arc<Made>, Problem> {
        let missing = || {
            Problem::new(Code::NotFound, format!("there is no download {uuid}"))
                .advise("a download is gone when the daemon restarts, and one hour after its last piece: export again")
        };
        self.all().get(&uuid).cloned().ok_or_else(missing)
    }

    /// Lists all downloads.
    pub fn list(&self) -> Vec<Download> {
        self.all().values().map(|made| made.download.clone()).collect()
    }

    /// The download with this UUID.
    pub fn show(&self, uuid: Uuid) -> Result<Download, Problem> {
        Ok(self.find(uuid)?.download.clone())
    }

    /// Refuses a download more than there may be.
    pub fn must_have_room(&self) -> Result<(), Problem> {
        if self.all().len() < MAX {
            return Ok(());
        }
        let what = format!("there are {MAX} downloads already");
        Err(Problem::new(Code::Overloaded, what).advise("remove some of them first, or export to files of the host"))
    }

    /// Removes a download, if it exists.
    pub fn remove(&self, uuid: Uuid) {
        self.all().remove(&uuid);
    }

    /// Removes the downloads from a repository, which is about to be detached.
    pub fn remove_of(&self, sr: Uuid) {
        self.all().retain(|_, made| made.download.sr != sr);
    }

    /// Time until a download has been idle for too long; `None` if it is gone or has been idle.
    fn left(&self, uuid: Uuid) -> Option<Duration> {
        IDLE.checked_sub(self.find(uuid).ok()?.last().elapsed())
    }
}

impl Made {
    fn last(&self) -> MutexGuard<'_, Instant> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Offers a complete file to clients.
pub fn offer(daemon: &Daemon, download: Download, file: File) {
    let uuid = download.uuid;
    let made = Made { download, file, last: Mutex::new(Instant::now()) };
    daemon.downloads.all().insert(uuid, Arc::new(made));
    background::spawn(end_when_idle(daemon.clone(), uuid));
}

async fn end_when_idle(daemon: Daemon, uuid: Uuid) {
    while let Some(left) = daemon.downloads.left(uuid) {
        tokio::time::sleep(left.max(Duration::from_secs(1))).await;
    }
    daemon.downloads.remove(uuid);
}

/// Reads a piece: from `offset` on, at most as much as a piece may have, and not beyond the end of the file.
pub async fn read(daemon: &Daemon, uuid: Uuid, offset: u64) -> Result<Vec<u8>, Problem> {
    let made = daemon.downloads.find(uuid)?;
    let Download { sr, size, .. } = made.download;
    let Some(rest) = size.checked_sub(offset) else {
        let what = format!("the download {uuid} ends at {size}, before {offset}");
        return Err(Problem::new(Code::Invalid, what).field("offset"));
    };
    let read = daemon.srs.patience.ask(sr, "read a download", move || {
        let len = usize::try_from(rest.min(DOWNLOAD_PIECE)).unwrap_or_default();
        let mut piece = vec![0; len];
        made.file.read_exact_at(&mut piece, offset).map_err(|error| file_failed("read a download", &error))?;
        *made.last() = Instant::now();
        Ok(piece)
    });
    read.await
}
