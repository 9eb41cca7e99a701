//! The control socket and the statistics page of a disk.
//!
//! It knows where a daemon and `serve` put them, and reads no statistics but what a page says of its disk.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use api::Vbd;
use control::{Error, Kind, ask};
use stats::{ReadError, Reader};

use crate::disk::ask_within;
use crate::failure::Failure;
use crate::session::{self, How, Session};
use crate::top::identity;

/// The time to start in: a process that is given its socket and its files takes milliseconds.
const TO_START: Duration = Duration::from_secs(3);

/// Where a disk is asked, and read.
#[derive(Debug)]
pub struct Place {
    pub control: PathBuf,
    pub page: PathBuf,
}

impl Place {
    /// Opens the page, once a process that is starting has initialized it.
    pub fn open(&self) -> Result<Reader, ReadError> {
        match Reader::open(&self.page) {
            Err(ReadError::NotStarted) if is_started(&self.control) => Reader::open(&self.page),
            opened => opened,
        }
    }

    /// The error for a page that cannot be read.
    pub fn unreadable(&self, why: ReadError) -> Error {
        let (kind, advice) = match why {
            ReadError::Failed(_) => (Kind::Failed, Some("a page of the daemon's disk is readable by root")),
            ReadError::NotStarted => (Kind::State, Some("see what the process has logged, or serve the disk again")),
            ReadError::NotAPage | ReadError::Version(_) => (Kind::State, None),
        };
        let error = Error::cannot(format!("read the statistics page {}", self.page.display()), why).of_kind(kind);
        match advice {
            Some(advice) => error.advise(advice),
            None => error,
        }
    }
}

/// Whether the process with this control socket serves its disk: it listens first, then initializes its page, then
/// answers.
fn is_started(control: &Path) -> bool {
    matches!(ask_within(control, ask::Watch {}, TO_START), Ok(Some(_)))
}

/// A disk, as the user has named it.
#[derive(Debug)]
pub enum Named {
    /// By the control socket of its process.
    Socket(PathBuf),
    /// By something that the daemon knows.
    Vbd(Box<Vbd>),
}

/// The disk of this name: the path of a control socket, or a name or UUID that the daemon of this host knows.
pub fn named(disk: &str, how: How) -> Result<Named, Failure> {
    let path = Path::new(disk);
    let is_socket = path.metadata().is_ok_and(|metadata| metadata.file_type().is_socket());
    if is_socket || disk.contains('/') && path.exists() || disk.ends_with(".sock") {
        return Ok(Named::Socket(path.to_owned()));
    }
    Ok(Named::Vbd(Box::new(vbd(disk, how)?)))
}

/// The place of a disk that is served: named by its control socket, or known to the daemon of this host.
pub fn find(disk: &str, how: How) -> Result<Place, Failure> {
    match named(disk, how)? {
        Named::Socket(path) => Ok(of_socket(&path)?),
        Named::Vbd(vbd) => of_vbd(&vbd).ok_or_else(|| {
            let advice = format!("plug it: tapline vbd plug {}", vbd.uuid);
            let tried = format!("trace VBD {}", vbd.uuid);
            Error::cannot(tried, "it is not plugged").of_kind(Kind::State).advise(advice).into()
        }),
    }
}

/// The place of a VBD; `None` if no process serves it now.
pub fn of_vbd(vbd: &Vbd) -> Option<Place> {
    let directory = Path::new(vbd.socket.as_ref()?.as_str()).parent().unwrap_or(Path::new("/")).to_owned();
    Some(Place { control: directory.join("control.sock"), page: stats::of_daemon(&directory) })
}

/// The page of the disk whose control socket that is.
pub fn of_socket(control: &Path) -> Result<Place, Error> {
    let control = std::path::absolute(control)
        .map_err(|error| Error::cannot(format!("resolve the path of {}", control.display()), error))?;
    let of_daemon = control.parent().map(stats::of_daemon).filter(|page| page.exists());
    if let Some(page) = of_daemon {
        return Ok(Place { control, page });
    }
    let directory = stats::directory().ok_or_else(|| {
        Error::cannot("find the disk's statistics page", "XDG_RUNTIME_DIR is not set")
            .advise("serve the disk with --stats-page statistics.page next to its control socket")
    })?;
    let is_its = |page: &PathBuf| {
        let known =
            Reader::open(page).and_then(|reader| reader.snapshot()).map(|snapshot| identity(&snapshot.identity));
        known.ok().and_then(|known| known.control).is_some_and(|known| Path::new(&known) == control)
    };
    let pages = || stats::pages_in(&directory).unwrap_or_default().into_iter().filter(is_its);
    let written = || pages().find(|page| is_written(page));
    // A process that has ended may have left another one.
    let found = written().or_else(|| is_started(&control).then(written).flatten()).or_else(|| pages().next());
    match found {
        Some(page) => Ok(Place { control, page }),
        None => {
            let why = format!("none in {} is of the disk at {}", directory.display(), control.display());
            Err(Error::cannot("find the disk's statistics page", why)
                .of_kind(Kind::State)
                .advise("give the control socket of a disk that is being served, without --stats-page"))
        }
    }
}

fn is_written(page: &Path) -> bool {
    let now = Reader::open(page).and_then(|reader| reader.snapshot());
    now.is_ok_and(|now| !now.writer_has_ended(page))
}

/// The VBD of that name.
fn vbd(text: &str, how: How) -> Result<Vbd, Failure> {
    let (runtime, session) = (session::runtime()?, Session::new(how)?);
    let find = async { session.client.vbd(session.vbd(text).await?).await };
    Ok(runtime.block_on(session.explaining(find))?)
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;

    use control::{Id, Reply, answer};

    use super::*;
    use crate::top::fixture::{Written, open};

    #[test]
    fn the_page_of_a_process_that_is_starting_is_opened_once_it_is_initialized() {
        let room = tempfile::tempdir().unwrap();
        let place = Place { control: room.path().join("control.sock"), page: room.path().join("statistics.page") };
        drop(open(&place.page));
        assert!(matches!(place.open(), Err(ReadError::NotStarted)), "no process listens");
        let listener = UnixListener::bind(&place.control).unwrap();
        let page = place.page.clone();
        let process = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().unwrap();
            BufReader::new(client.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
            let written = Written::at(page, "a.raw");
            let answer = Reply::<_, ()>::Ok(answer::Condition::default());
            client.write_all(answer.line(&Id::default()).as_bytes()).unwrap();
            written
        });
        assert!(place.open().is_ok());
        drop(process.join().unwrap());
    }
}
