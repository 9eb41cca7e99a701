//! Files that clients send piece by piece, to be imported.
//!
//! It knows pieces; which uploads there are, and for how long, is `transient`'s. Invariant: received data is never
//! overwritten.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use api::{AbsolutePath, Code, Problem, Upload, UploadCreate};
use axum::body::Bytes;
use jiff::Timestamp;
use repo::driver::file_failed;
use uuid::Uuid;

use crate::daemon::Daemon;
use crate::transient::{self, MAX, Transient, Transients};

/// All uploads in progress.
pub type Uploads = Transients<Sent>;

/// An upload and its file.
#[derive(Debug)]
pub struct Sent {
    /// The upload as created.
    upload: Upload,
    file: File,
    arrived: Mutex<Arrived>,
    /// Held by the thread that writes a piece, even when no request waits for that thread any more.
    turn: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug)]
struct Arrived {
    bytes: u64,
    /// The length of the whole file, once it is known.
    size: Option<u64>,
    last: Instant,
}

impl Transient for Sent {
    fn sr(&self) -> Uuid {
        self.upload.sr
    }

    fn last_use(&self) -> Instant {
        self.arrived().last
    }

    fn all_of(daemon: &Daemon) -> &Uploads {
        &daemon.uploads
    }
}

impl Uploads {
    fn known(&self, uuid: Uuid) -> Result<Arc<Sent>, Problem> {
        self.find(uuid).ok_or_else(|| {
            Problem::new(Code::NotFound, format!("there is no upload {uuid}"))
                .advise("an upload is gone when it has been imported, and one hour after its last piece: begin again")
        })
    }

    /// Lists all uploads.
    pub fn list(&self) -> Vec<Upload> {
        self.all().iter().map(|sent| sent.shown()).collect()
    }

    /// The upload with this UUID.
    pub fn show(&self, uuid: Uuid) -> Result<Upload, Problem> {
        Ok(self.known(uuid)?.shown())
    }

    /// The path of an upload in messages.
    pub fn path(&self, uuid: Uuid) -> Result<AbsolutePath, Problem> {
        let Upload { name, .. } = &self.known(uuid)?.upload;
        let path = format!("/upload/{}", name.as_str().replace('/', "_"));
        path.parse().map_err(|why| Problem::new(Code::Invalid, format!("{path}: {why}")))
    }

    /// The file of an upload, for reading. Fails until all of it has arrived.
    pub fn arrived(&self, uuid: Uuid) -> Result<File, Problem> {
        let sent = self.known(uuid)?;
        let Upload { received, size, .. } = sent.shown();
        if size != Some(received) {
            let whole = size.map_or_else(|| "an unknown number of".to_owned(), |size| size.to_string());
            let what = format!("only {received} of {whole} bytes of the upload {uuid} have arrived");
            return Err(Problem::new(Code::State, what).field("upload").advise("send the rest first"));
        }
        // Reopened for reading only; the file has no other name.
        let again = File::open(format!("/proc/self/fd/{}", sent.file.as_raw_fd()));
        again.map_err(|error| Problem::failed("open an upload", error))
    }
}

impl Sent {
    fn arrived(&self) -> MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shown(&self) -> Upload {
        let Arrived { bytes, size, .. } = *self.arrived();
        Upload { received: bytes, size, ..self.upload.clone() }
    }

    /// Refuses a piece that does not begin at the end of the previous one, or exceeds the size, or is the `last` before
    /// it.
    fn expect(&self, offset: u64, len: usize, last: bool) -> Result<(), Problem> {
        let Upload { received, size, uuid, .. } = self.shown();
        let wrong = |what: String| Err(Problem::new(Code::State, what).field("offset"));
        if offset != received {
            return wrong(format!("the next piece of the upload {uuid} begins at {received}, not at {offset}"));
        }
        match (u64::try_from(len).ok().and_then(|len| offset.checked_add(len)), size) {
            (Some(_), None) => Ok(()),
            (Some(end), Some(size)) if end < size && last => {
                wrong(format!("the upload {uuid} ends at {size}, and its last piece at {end}"))
            }
            (Some(end), Some(size)) if end <= size => Ok(()),
            (_, size) => {
                let size = size.unwrap_or(u64::MAX);
                wrong(format!("a piece of {len} bytes at {offset} passes the end of the upload {uuid}, at {size}"))
            }
        }
    }
}

/// Creates an upload, if the repository has enough space.
pub async fn create(daemon: &Daemon, asked: UploadCreate) -> Result<Upload, Problem> {
    let UploadCreate { sr, name, size } = asked;
    if size == Some(0) {
        return Err(Problem::new(Code::Invalid, "an empty file is no disk image").field("size"));
    }
    daemon.catalogue.read(move |view| view.attached_sr(sr)).await.map_err(|problem| problem.field("sr"))?;
    daemon.srs.room(sr, size.unwrap_or_default()).await?;
    let directory = daemon.srs.directory(sr).await?;
    let file = daemon.srs.patience.ask(sr, "create a file for an upload", move || directory.scratch()).await?;
    let upload = Upload { uuid: Uuid::new_v4(), sr, name, size, received: 0, created: Timestamp::now() };
    let arrived = Mutex::new(Arrived { bytes: 0, size, last: Instant::now() });
    let sent = Sent { upload: upload.clone(), file, arrived, turn: Arc::default() };
    if !transient::add(daemon, upload.uuid, sent) {
        let what = format!("there are {MAX} uploads already");
        return Err(Problem::new(Code::Overloaded, what).advise("import or remove some of them first"));
    }
    Ok(upload)
}

/// Writes the next piece of an upload, which begins at `offset`; the file ends with the `last` one.
pub async fn append(daemon: &Daemon, uuid: Uuid, offset: u64, last: bool, piece: Bytes) -> Result<Upload, Problem> {
    let sent = daemon.uploads.known(uuid)?;
    // Also refused while an earlier piece is still being written whose request has ended.
    let Ok(turn) = sent.turn.clone().try_lock_owned() else {
        let what = format!("a piece of the upload {uuid} is being written");
        return Err(Problem::new(Code::Busy, what).advise("send one piece after the other"));
    };
    sent.expect(offset, piece.len(), last)?;
    if sent.shown().size.is_none() {
        daemon.srs.room(sent.upload.sr, piece.len() as u64).await?;
    }
    let (sr, at_work) = (sent.upload.sr, sent.clone());
    let written = daemon.srs.patience.ask(sr, "write a piece of an upload", move || {
        let _turn = turn;
        at_work.file.write_all_at(&piece, offset).map_err(|error| file_failed("write a piece of an upload", &error))?;
        let mut arrived = at_work.arrived();
        arrived.bytes = offset + piece.len() as u64;
        if last {
            arrived.size = Some(arrived.bytes);
        }
        arrived.last = Instant::now();
        Ok(())
    });
    written.await?;
    Ok(sent.shown())
}
