//! Exported disks that clients fetch piece by piece.
//!
//! It knows what was exported; which downloads there are, and for how long, is `transient`'s.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use api::{Code, DOWNLOAD_PIECE, Download, Problem};
use repo::driver::file_failed;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::transient::{self, MAX, Transient, Transients};

/// The exported disks that clients may fetch.
pub type Downloads = Transients<Made>;

/// A download and its file.
#[derive(Debug)]
pub struct Made {
    download: Download,
    file: File,
    last: Mutex<Instant>,
}

impl Transient for Made {
    fn sr(&self) -> Uuid {
        self.download.sr
    }

    fn last_use(&self) -> Instant {
        *self.last()
    }

    fn all_of(daemon: &Daemon) -> &Downloads {
        &daemon.downloads
    }
}

impl Downloads {
    fn known(&self, uuid: Uuid) -> Result<Arc<Made>, Problem> {
        self.find(uuid).ok_or_else(|| {
            Problem::new(Code::NotFound, format!("there is no download {uuid}"))
                .advise("a download is gone when the daemon restarts, and one hour after its last piece: export again")
        })
    }

    /// Lists all downloads.
    pub fn list(&self) -> Vec<Download> {
        self.all().iter().map(|made| made.download.clone()).collect()
    }

    /// The download with this UUID.
    pub fn show(&self, uuid: Uuid) -> Result<Download, Problem> {
        Ok(self.known(uuid)?.download.clone())
    }

    /// Refuses a download more than there may be.
    pub fn must_have_room(&self) -> Result<(), Problem> {
        if self.is_full() { Err(too_many()) } else { Ok(()) }
    }
}

fn too_many() -> Problem {
    let what = format!("there are {MAX} downloads already");
    Problem::new(Code::Overloaded, what).advise("remove some of them first, or export to files of the host")
}

impl Made {
    fn last(&self) -> MutexGuard<'_, Instant> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Offers a complete file to clients.
pub fn offer(daemon: &Daemon, download: Download, file: File) -> Result<(), Problem> {
    let uuid = download.uuid;
    let made = Made { download, file, last: Mutex::new(Instant::now()) };
    if transient::add(daemon, uuid, made) { Ok(()) } else { Err(too_many()) }
}

/// Reads a piece: from `offset` on, at most as much as a piece may have, and not beyond the end of the file.
pub async fn read(daemon: &Daemon, uuid: Uuid, offset: u64) -> Result<Vec<u8>, Problem> {
    let made = daemon.downloads.known(uuid)?;
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
