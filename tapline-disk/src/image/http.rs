//! Images at HTTP servers: files that are only read, named by a URL.
//!
//! It knows nothing about HTTP (crate `httpfile`). Invariants: a process that works on passed files reads them only if
//! it has kept the right to connect to servers; an object is opened once in a process, so that all of a job reads the
//! same state of it.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use arguments::{Arguments, Patience};
use control::{ImageName, Kind};
use disk::FileError;
use httpfile::{BadUrl, Client, HttpError, HttpErrorKind, Object, Options, Reader, Url};
use uring::{ImageFile, ReadSource};

use crate::files::Files;
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::process::signals::is_stopping;

/// How long a request is repeated to a server that is away or busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// The client of this process.
static CLIENT: OnceLock<Arc<Client>> = OnceLock::new();
static OPTIONS: OnceLock<Options> = OnceLock::new();
/// This process may connect to servers although it works on passed files.
static NETWORK: OnceLock<()> = OnceLock::new();
/// The objects that have been opened.
static OPENED: Mutex<Vec<Arc<Reader>>> = Mutex::new(Vec::new());
/// Why an object can no longer be read.
static TROUBLE: OnceLock<HttpError> = OnceLock::new();

/// An object in place of a file.
#[derive(Debug)]
struct WebFile(Arc<Reader>);

impl ReadSource for WebFile {
    fn size(&self) -> u64 {
        self.0.object().size()
    }

    fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<(), FileError> {
        self.0.read_at(at, bytes).map_err(|error| {
            TROUBLE.get_or_init(|| error);
            FileError::Failed(libc::EIO)
        })
    }

    fn is_given_up(&self) -> bool {
        is_stopping()
    }
}

/// Sets how objects are read, by the command line.
pub fn configure(arguments: &Arguments) {
    let patience = match arguments.patience {
        None => Some(PATIENCE),
        Some(Patience::For(time)) => Some(time),
        Some(Patience::Forever) => None,
    };
    let options = Options { allow_http: arguments.insecure_http, patience, stopping: is_stopping, report };
    OPTIONS.get_or_init(|| options);
}

fn report(line: &str) {
    say(line);
}

/// Keeps the right to read objects for a process that works on passed files, and reads what a confined process cannot.
pub fn keep_network() {
    NETWORK.get_or_init(|| ());
    client();
}

/// The client of this process.
pub fn client() -> &'static Arc<Client> {
    CLIENT.get_or_init(|| {
        let default = Options { allow_http: false, patience: Some(PATIENCE), stopping: is_stopping, report };
        Arc::new(Client::new(OPTIONS.get().cloned().unwrap_or(default)))
    })
}

/// A client that also reads over plain HTTP, for an object whose digest is known.
pub fn client_for_digest() -> Arc<Client> {
    Arc::new(client().allowing_http())
}

/// Parses the URL of an object, if this process may read it.
pub fn url(files: &Files, word: &str) -> Result<Url, Failure> {
    let tried = "read an object at an HTTP server";
    if files.are_handed() && NETWORK.get().is_none() {
        let why = "this process works on passed files only, and may not connect to a server";
        return Err(Failure::new(tried, why).of_kind(Kind::Invalid));
    }
    word.parse().map_err(|error: BadUrl| match error {
        // It is not shown.
        BadUrl::User | BadUrl::Secret => Failure::new(tried, format!("credentials are refused: {error}"))
            .advise("make the object readable without them, or download it: curl -fLO URL")
            .of_kind(Kind::Invalid),
        _ => Failure::new(format!("read '{word}'"), error).of_kind(Kind::Invalid),
    })
}

/// Opens an image.
pub fn open(files: &Files, name: &ImageName) -> Result<Option<ImageFile>, Failure> {
    let Some(word) = name.url() else { return Ok(None) };
    let url = url(files, word)?;
    let source = Arc::new(WebFile(reader(&url)?));
    ImageFile::of_source(name.path(), source).map(Some).map_err(Failure::said)
}

fn reader(url: &Url) -> Result<Arc<Reader>, Failure> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = opened.iter().find(|reader| reader.object().url() == url) {
        return Ok(Arc::clone(known));
    }
    let (object, first) = Object::open(client(), url).map_err(failure)?;
    let reader = Arc::new(Reader::new(object, first));
    opened.push(Arc::clone(&reader));
    Ok(reader)
}

/// The failure that an error of HTTP is.
pub fn failure(error: HttpError) -> Failure {
    let kind = match error.kind {
        HttpErrorKind::Refused => Kind::Unsupported,
        HttpErrorKind::Stopped => Kind::Cancelled,
        HttpErrorKind::Missing | HttpErrorKind::Changed | HttpErrorKind::Away => Kind::Failed,
    };
    let advice = error.advice.clone();
    advice.into_iter().fold(Failure::said(error).of_kind(kind), Failure::advise)
}

/// Replaces a failure by its cause if an object could no longer be read, or the command was interrupted while it was:
/// where the failure was met, it is only known that a read has failed.
pub fn explain(failed: Failure) -> Failure {
    let is_read = !OPENED.lock().unwrap_or_else(PoisonError::into_inner).is_empty();
    match TROUBLE.get() {
        _ if is_read && is_stopping() => Failure::new("finish this command", "interrupted by a signal"),
        Some(trouble) => failure(trouble.clone()),
        None => failed,
    }
}

/// Rejects an object where a command needs more than to read an image by itself.
pub fn refuse(tried: impl std::fmt::Display, name: &ImageName) -> Result<(), Failure> {
    if name.url().is_none() {
        return Ok(());
    }
    let why = "an image at an HTTP server is only read, by itself: it can be converted, compared, shown and measured";
    Err(Failure::new(tried, why)
        .advise(format!(
            "copy it into a file first: tapline image convert {} qcow2:FILE; or into a disk of the daemon: tapline vdi \
             import",
            vm::syntax::shell_word(&name.to_string())
        ))
        .of_kind(Kind::Invalid))
}
