//! Contents of disks that pass through this command: from its standard input or a file into an upload, and from a
//! download to its standard output or a file.
//!
//! It knows bytes, and neither formats nor disks. Invariant: after an interrupt or an error nothing of it remains at
//! the daemon.

use std::io::{self, IsTerminal, Read};
use std::time::Instant;

use api::{Code, Download, ImageFormat, Name, Problem, Transfer, UploadCreate, VdiExport};
use control::pace::Pace;
use control::size::readable;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use uuid::Uuid;

use crate::session::Session;
use crate::wait::{Progress, figures};

/// Bytes that are sent at a time, fewer than the daemon accepts.
pub const PIECE: usize = 8 << 20;

/// What is sent to the daemon.
pub trait Source {
    /// The next bytes, in pieces of any length that is not 0; nothing at the end.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Problem>;
}

/// What a thread reads: a command that ends does not wait for it, whatever the other end of a pipe does.
pub struct Reader(mpsc::Receiver<io::Result<Vec<u8>>>);

impl Reader {
    /// Begins to read the standard input.
    pub fn of_standard_input() -> Reader {
        let (sender, receiver) = mpsc::channel(1);
        std::thread::spawn(move || {
            let mut input = io::stdin().lock();
            loop {
                let mut piece = Vec::with_capacity(PIECE);
                let read = input.by_ref().take(PIECE as u64).read_to_end(&mut piece);
                let goes_on = matches!(read, Ok(len) if len > 0);
                if sender.blocking_send(read.map(|_| piece)).is_err() || !goes_on {
                    return;
                }
            }
        });
        Reader(receiver)
    }
}

impl Source for Reader {
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Problem> {
        let piece = self.0.recv().await.transpose();
        let piece = piece.map_err(|error| Problem::failed("read the standard input", error))?;
        Ok(piece.filter(|piece| !piece.is_empty()))
    }
}

/// Sends all bytes of a source to the daemon, which has them until they are imported; returns the upload. Their number
/// is given if it is known.
pub async fn upload(
    session: &Session,
    sr: Uuid,
    name: Name,
    size: Option<u64>,
    source: &mut impl Source,
) -> Result<Uuid, Problem> {
    let shown = format!("sending {name}");
    let upload = session.client.upload_create(&UploadCreate { sr, name, size }).await?.uuid;
    let sent = unless_interrupted(send_all(session, upload, shown, size, source));
    or_remove(session, upload, sent).await.map(|()| upload)
}

/// Does something with an upload, which is removed if that fails: otherwise it would be an hour later.
pub async fn or_remove<T>(
    session: &Session,
    upload: Uuid,
    work: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let done = work.await;
    if done.is_err() {
        session.client.upload_remove(upload).await.ok();
    }
    done
}

async fn send_all(
    session: &Session,
    upload: Uuid,
    shown: String,
    size: Option<u64>,
    source: &mut impl Source,
) -> Result<(), Problem> {
    let mut shown = Shown::new(shown, size);
    let mut at = 0;
    while let Some(piece) = source.next().await? {
        let len = piece.len() as u64;
        session.client.upload_append(upload, at, false, piece.into()).await?;
        at += len;
        shown.show(at);
    }
    if at == 0 {
        return Err(Problem::new(Code::Invalid, "there is nothing to import: the input is empty"));
    }
    session.client.upload_append(upload, at, true, Vec::new().into()).await.map(drop)
}

/// Exports a disk, and fetches the file.
pub struct Fetched {
    download: Download,
}

impl Fetched {
    /// Has the daemon export a disk, which takes space in its repository until the file was fetched.
    pub async fn export(session: &Session, vdi: Uuid, format: ImageFormat) -> Result<Fetched, Problem> {
        let asked = VdiExport { path: None, download: true, format };
        let result = session.finish(session.client.vdi_export(vdi, &asked).await?).await?;
        let uuid = result.get("download").and_then(|uuid| uuid.as_str()?.parse().ok());
        let uuid = uuid.ok_or_else(|| Problem::failed("read the answer", "it names no download"))?;
        if let Some(warning) = result.get("warning").and_then(|warning| warning.as_str()) {
            crate::output::say(&format!("tapline: {warning}\n"));
        }
        Ok(Fetched { download: session.client.download(uuid).await? })
    }

    /// Length of the file in bytes.
    pub fn size(&self) -> u64 {
        self.download.size
    }

    /// Writes the whole file, and removes it at the daemon. `seen` gets each piece.
    pub async fn write_to(
        self,
        session: &Session,
        shown: &str,
        target: &mut (impl AsyncWrite + Unpin),
        seen: impl FnMut(&[u8]),
    ) -> Result<(), Problem> {
        let written = unless_interrupted(self.fetch_all(session, shown, target, seen)).await;
        let removed = session.client.download_remove(self.download.uuid).await;
        written.and(removed)
    }

    async fn fetch_all(
        &self,
        session: &Session,
        shown: &str,
        target: &mut (impl AsyncWrite + Unpin),
        mut seen: impl FnMut(&[u8]),
    ) -> Result<(), Problem> {
        let Download { uuid, size, .. } = self.download;
        let failed = |error| Problem::failed("write the exported disk", error);
        let mut shown = Shown::new(shown.to_owned(), Some(size));
        let mut at = 0;
        while at < size {
            let piece = session.client.download_read(uuid, at).await?;
            if piece.is_empty() {
                let what = format!("the download {uuid} ends at {at} of {size} bytes");
                return Err(Problem::failed("fetch the exported disk", what));
            }
            seen(&piece);
            target.write_all(&piece).await.map_err(failed)?;
            at += piece.len() as u64;
            shown.show(at);
        }
        target.flush().await.map_err(failed)
    }
}

/// Refuses to write an image to a terminal.
pub fn must_not_be_terminal(output: &impl IsTerminal) -> Result<(), Problem> {
    if !output.is_terminal() {
        return Ok(());
    }
    let what = "the standard output is a terminal, to which nothing is exported";
    Err(Problem::new(Code::Invalid, what).advise("send it to a file or another command: … >FILE, … | ssh HOST …"))
}

/// Runs `work`, unless the user interrupts it or the terminal is closed.
async fn unless_interrupted<T>(work: impl Future<Output = Result<T, Problem>>) -> Result<T, Problem> {
    let listen = |kind| signal(kind).map_err(|error| Problem::failed("handle an interrupt", error));
    let (mut interrupts, mut ends) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let mut hangups = listen(SignalKind::hangup())?;
    tokio::select! {
        done = work => done,
        _ = interrupts.recv() => Err(interrupted()),
        _ = ends.recv() => Err(interrupted()),
        _ = hangups.recv() => Err(interrupted()),
    }
}

fn interrupted() -> Problem {
    Problem::new(Code::Cancelled, "interrupted")
}

/// How much has been transferred, on stderr.
struct Shown {
    what: String,
    /// Of an unknown length it never reaches the end.
    pace: Pace,
    is_known: bool,
    begun: Instant,
    progress: Progress,
}

impl Shown {
    fn new(what: String, size: Option<u64>) -> Shown {
        let pace = Pace::new(size.unwrap_or(u64::MAX));
        Shown { what, pace, is_known: size.is_some(), begun: Instant::now(), progress: Progress::new() }
    }

    fn show(&mut self, done: u64) {
        // Lines in a log would be one per piece.
        if !io::stderr().is_terminal() {
            return;
        }
        self.pace.reach(done);
        self.pace.sample(self.begun.elapsed());
        let left = self.pace.left().filter(|_| self.is_known);
        let transfer = Transfer { done, rate: self.pace.rate(), left, ..Transfer::default() };
        let share = f64::from(u32::try_from(self.pace.share(1000)).unwrap_or(1000)) / 1000.0;
        self.progress.show_share(format!("{}: {}{}", self.what, readable(done), figures(&transfer)), share);
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.progress.finish();
    }
}
