//! `image fetch`: downloads a file from an HTTP server, verified by its digest if that is known.
//!
//! Until it is complete the file has another name, which a later command continues. Invariant: the file has its final
//! name only if it is complete, durable, and has the digest, if there is one; the digest is computed from what the file
//! reads as.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arguments::{Convert, Fetch};
use control::checksum::{Checksum, Digest};
use control::size::readable;
use control::{ImageName, Kind};
use httpfile::{DownloadError, Object, digest_of, download, find};
use serde::Serialize;
use uring::{Cache, FileOpenError, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::http;
use crate::image::progress::Progress;
use crate::process::failure::{Exit, Failure};
use crate::process::output as printed;
use crate::process::signals::{Signal, is_stopping};

/// Behind the name of a file that is not complete; a dot is in front.
const UNFINISHED: &str = ".tapline-part";

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Fetched {
    url: String,
    file: String,
    size: u64,
    /// Bytes that an earlier command had downloaded.
    continued_at: u64,
    /// The digest that was verified.
    digest: Option<String>,
    /// What the server calls this state of the file.
    validator: String,
}

/// Runs `image fetch`.
pub fn run(files: &Files, fetch: &Fetch) -> Result<Exit, Failure> {
    let _stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    if files.is_taken(&fetch.file) {
        return Err(FileOpenError::Exists { path: fetch.file.clone() }.into());
    }
    let part = if files.are_handed() { fetch.file.clone() } else { unfinished(&fetch.file)? };
    let whole = Whole::fetch(files, &fetch.url, fetch.checksum.as_ref(), fetch.expect_size, &part)?;
    if !files.are_handed() {
        files.name_new(&part, &fetch.file)?;
        files.sync_directory(&fetch.file)?;
    }
    let file = fetch.file.display().to_string();
    if fetch.json {
        let Whole { size, continued_at, digest, validator, .. } = whole;
        let digest = digest.map(|digest| digest.to_string());
        printed::json(&Fetched { url: fetch.url.clone(), file, size, continued_at, digest, validator })?;
    } else {
        let verified = whole.digest.map(|digest| format!(", verified {digest}")).unwrap_or_default();
        printed::print(&format!("downloaded {file}: {}{verified}\n", readable(whole.size)))?;
    }
    Ok(Exit::Done)
}

/// Downloads the source of a conversion next to its target, verifies it, and runs `convert` on it.
pub fn before_conversion(
    files: &Files,
    convert: &Convert,
    checksum: &Checksum,
    run: impl FnOnce(&Convert) -> Result<Exit, Failure>,
) -> Result<Exit, Failure> {
    let Convert { source, target, .. } = convert;
    let refuse = |why: &str, advice: &str| {
        let failure = Failure::new(format!("convert {source} to {target}"), why);
        Err(failure.advise(advice).of_kind(Kind::Invalid))
    };
    let Some(url) = source.url() else {
        return refuse("--checksum is for images at HTTP servers", "verify a file by sha256sum -c");
    };
    let is_file = !target.is_stream() && !target.is_at_server();
    if !is_file || target.path().metadata().is_ok_and(|found| !found.is_file()) {
        let why = "--checksum downloads the source next to the target, which must be a file";
        return refuse(why, "download it first: tapline image fetch URL FILE --checksum");
    }
    if !convert.force && files.is_taken(target.path()) {
        return Err(FileOpenError::Exists { path: target.path().to_owned() }.into());
    }
    let _stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    let part = unfinished(target.path())?;
    let _whole = Whole::fetch(files, url, Some(checksum), None, &part)?;
    let local = ImageName { format: source.format, path: part.clone(), data_file: None };
    let exit = run(&Convert { source: local, checksum: None, ..convert.clone() })?;
    files.remove_new(&part).map_err(|error| Failure::new(format!("remove {}", part.display()), error))?;
    Ok(exit)
}

/// A file that has been downloaded; until this is dropped, no other process may write to it.
struct Whole {
    size: u64,
    continued_at: u64,
    digest: Option<Digest>,
    validator: String,
    _locked: ImageFile,
}

impl Whole {
    /// Downloads the object into the file `part`, or what is missing there.
    fn fetch(
        files: &Files,
        word: &str,
        checksum: Option<&Checksum>,
        expected: Option<u64>,
        part: &Path,
    ) -> Result<Whole, Failure> {
        let url = http::url(files, word)?;
        let digest =
            checksum.map(|checksum| find(http::client(), &url, checksum)).transpose().map_err(http::failure)?;
        // A digest proves what TLS would.
        let client = if digest.is_some() { http::client_for_digest() } else { Arc::clone(http::client()) };
        let (object, _) = Object::open(&client, &url).map_err(http::failure)?;
        if let Some(expected) = expected.filter(|expected| *expected != object.size()) {
            let why = format!("it has {} bytes, and had {expected} when its space was reserved", object.size());
            return Err(Failure::new(format!("download {url}"), why).advise("it was replaced: try again"));
        }
        let locked = open(files, part)?;
        let file = File::from(locked.try_clone_fd().map_err(Failure::said)?);
        let (size, validator) = (object.size(), object.identity().validator.to_string());
        let continued_at = match is_complete(files, &file, size, digest.as_ref())? {
            true => size,
            false => fill(files, object, &file, part)?,
        };
        if let Some(digest) = &digest {
            let found = verify(files, &file, size, digest)?;
            if found != *digest {
                let removed = files.remove_new(part).map_or("remove it", |()| files.removal_note());
                let why = format!("its digest is {found}, not {digest}");
                return Err(Failure::new(format!("use what was downloaded from {url}"), why).advise(format!(
                    "{removed}; try again later if the server or its mirror has just been updated; otherwise do not \
                     trust that file"
                )));
            }
        }
        // Still locked, but no longer against those who read it, such as a conversion.
        let locked = if files.are_handed() { locked } else { locked.reopen_read_only().map_err(Failure::said)? };
        Ok(Whole { size, continued_at, digest, validator, _locked: locked })
    }
}

/// Whether the file is a complete download of an earlier command, as its digest proves.
fn is_complete(files: &Files, file: &File, size: u64, digest: Option<&Digest>) -> Result<bool, Failure> {
    match digest {
        Some(digest) if file.metadata().is_ok_and(|found| found.len() == size) => {
            verify(files, file, size, digest).map(|found| found == *digest)
        }
        _ => Ok(false),
    }
}

fn fill(files: &Files, object: Object, file: &File, part: &Path) -> Result<u64, Failure> {
    let mut progress = Progress::new(files, "downloading", object.size());
    let filled = download(&Arc::new(object), file, &mut |done| progress.reach(done));
    progress.finish();
    filled.map_err(|error| match error {
        DownloadError::Http(error) => {
            let failure = http::failure(error);
            let advice = failure.advice().map(|advice| format!("{advice}; ")).unwrap_or_default();
            failure.advise(format!("{advice}what has arrived is kept, and the same command continues"))
        }
        DownloadError::File(error) => Failure::new(format!("write {}", part.display()), error)
            .advise("what has arrived is kept, and the same command continues"),
    })
}

fn verify(files: &Files, file: &File, size: u64, digest: &Digest) -> Result<Digest, Failure> {
    let mut progress = Progress::new(files, "verifying", size);
    let found = digest_of(file, size, digest.algorithm, &mut |done| {
        progress.reach(done);
        !is_stopping()
    });
    progress.finish();
    found.map_err(|error| match is_stopping() {
        true => Failure::new("verify what was downloaded", "interrupted by a signal"),
        false => Failure::new("read what was downloaded", error),
    })
}

/// Opens the file for what is downloaded, and locks it.
fn open(files: &Files, part: &Path) -> Result<ImageFile, Failure> {
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    if files.are_handed() {
        return files.open(part, options).map_err(Failure::said);
    }
    match part.symlink_metadata() {
        Ok(found) if found.is_file() => files.open(part, options).map_err(Failure::said),
        Ok(_) => Err(FileOpenError::Exists { path: part.to_owned() }.into()),
        Err(_) => files.create_new(part, options).map_err(Failure::said),
    }
}

/// The name of a file that is not complete.
fn unfinished(path: &Path) -> Result<PathBuf, Failure> {
    let Some(name) = path.file_name() else {
        let failure = Failure::new(format!("create {}", path.display()), "it is not the name of a file");
        return Err(failure.of_kind(Kind::Invalid));
    };
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(UNFINISHED);
    Ok(path.with_file_name(hidden))
}
