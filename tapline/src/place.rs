//! The control socket and the statistics page of a disk.
//!
//! It knows where a daemon and `serve` put them, and reads no statistics but what a page says of its disk.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use api::Vbd;
use control::{Error, Kind};
use stats::Reader;

use crate::failure::Failure;
use crate::session::{self, How, Session};
use crate::top::identity;

/// Where a disk is asked, and read.
#[derive(Debug)]
pub struct Place {
    pub control: PathBuf,
    pub page: PathBuf,
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
    // A process that has ended may have left another one.
    let pages: Vec<PathBuf> = stats::pages_in(&directory).unwrap_or_default().into_iter().filter(is_its).collect();
    match pages.iter().find(|page| is_written(page)).or(pages.first()).cloned() {
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
