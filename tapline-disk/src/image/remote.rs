//! Images at servers: raw disks at NBD servers, named by a URI, and through [`http`] files at HTTP servers.
//!
//! It knows nothing about the protocols. Invariants: a process opens them only if it works on the file system, not on
//! passed files, because connecting again needs rights that such a process has given up; a connection is used by one
//! disk at a time, and again when that is done, because some servers end with their last client.

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use arguments::Patience;
use control::{FormatName, ImageName, Kind};
use nbd::uri::{BadUri, Place, Uri};
use uring::{Cache, ImageFile, OpenOptions, Remote, RemoteOptions};
use vm::syntax::shell_word;

use crate::files::Files;
use crate::files::identity::FileIdentity;
use crate::image::http;
use crate::process::failure::Failure;
use crate::process::log::say;
use crate::process::signals::is_stopping;

/// How long a job waits for a server that is away: long enough for a restart of the server or of its host's network.
const OF_JOBS: Duration = Duration::from_secs(60);
/// How long a guest waits: also for a restart of the server's host.
const OF_GUESTS: Duration = Duration::from_secs(300);

/// The patience of the command line.
static PATIENCE: OnceLock<Patience> = OnceLock::new();

/// Connections of this process, in use and not.
static CONNECTIONS: Mutex<Vec<Connected>> = Mutex::new(Vec::new());

struct Connected {
    uri: Uri,
    write: bool,
    remote: Remote,
}

/// What opens an image at a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    /// A job, which may wait for the server, and fails if that is away for too long.
    Job,
    /// A served disk, whose thread never waits.
    Served,
}

impl User {
    fn patience(self) -> Option<Duration> {
        match (PATIENCE.get(), self) {
            (Some(Patience::Forever), _) => None,
            (Some(Patience::For(time)), _) => Some(*time),
            (None, User::Job) => Some(OF_JOBS),
            (None, User::Served) => Some(OF_GUESTS),
        }
    }
}

/// Sets how long requests wait for servers that are away, before any is opened.
pub fn set_patience(patience: Patience) {
    PATIENCE.get_or_init(|| patience);
}

/// Opens an image at a server; returns `None` if the image is a file.
pub fn open(files: &Files, name: &ImageName, write: bool, user: User) -> Result<Option<ImageFile>, Failure> {
    if user == User::Served {
        http::refuse(format!("serve {name}"), name)?;
    }
    let Some(word) = name.uri() else { return http::open(files, name) };
    let failed = |why: String| Failure::new(format!("open {name}"), why).of_kind(Kind::Invalid);
    if files.are_handed() {
        return Err(failed("this process works on passed files only, and may not connect to a server".to_owned()));
    }
    let uri: Uri = word.parse().map_err(|error: BadUri| match error {
        // The name has the token.
        BadUri::Token => Failure::new("open a disk at an NBD server", error).of_kind(Kind::Invalid),
        _ => failed(error.to_string()),
    })?;
    let remote = match user {
        User::Job => connected(&uri, write)?,
        User::Served => connect(&uri, write, user)?,
    };
    let options = OpenOptions { write, cache: Cache::Writeback, lock: false };
    ImageFile::of_remote(name.path(), remote, options).map(Some).map_err(Failure::said)
}

/// Returns a connection that is not in use, or a new one. One for writing also serves for reading: a server that takes
/// one client would not answer a second connection.
fn connected(uri: &Uri, write: bool) -> Result<Remote, Failure> {
    let mut connections = CONNECTIONS.lock().unwrap_or_else(PoisonError::into_inner);
    let idle = connections
        .iter()
        .find(|other| &other.uri == uri && (other.write || !write) && !other.remote.is_shared())
        .map(|idle| idle.remote.clone());
    if let Some(remote) = idle {
        return Ok(remote);
    }
    let remote = connect(uri, write, User::Job)?;
    connections.push(Connected { uri: uri.clone(), write, remote: remote.clone() });
    Ok(remote)
}

fn connect(uri: &Uri, write: bool, user: User) -> Result<Remote, Failure> {
    let tls = uri.tls.as_ref().map(nbd::tls::directory::of_client).transpose()?;
    let advice = || format!("check that its server runs and has this export: nbdinfo {}", shell_word(&uri.to_string()));
    let (patience, may_wait) = (user.patience(), user == User::Job);
    Remote::open(uri, RemoteOptions { write, tls, patience, may_wait, stopping: is_stopping, report })
        .map_err(|error| Failure::said(error).advise(advice()))
}

fn report(line: &str) {
    say(line);
}

/// Refuses to write to an export at the server of a source. Another export there may be the same disk: many servers
/// give a disk several names, at least an empty one.
pub fn must_differ(files: &Files, target: &ImageName, source: &ImageName) -> Result<(), Failure> {
    let uri = |name: &ImageName| name.uri()?.parse().ok();
    let (Some(there), Some(from)) = (uri(target), uri(source)) else { return Ok(()) };
    let (there, from): (Uri, Uri) = (there, from);
    if !is_same(files, &there.place, &from.place) {
        return Ok(());
    }
    let why = match there.export == from.export {
        true => format!("it is the export of {source} itself"),
        false => format!("it is at the server of {source}, which may have given one disk both names"),
    };
    Err(Failure::new(format!("write to {target}"), why)
        .advise(format!("copy into a file first: tapline image convert {source} qcow2:FILE"))
        .of_kind(Kind::Invalid))
}

/// Returns whether two places have the same server, as far as the names tell: a server may also listen at several.
fn is_same(files: &Files, one: &Place, other: &Place) -> bool {
    match (one, other) {
        _ if one == other => true,
        (Place::Unix(one), Place::Unix(other)) => {
            let socket = FileIdentity::of_path(files, one);
            socket.is_some() && socket == FileIdentity::of_path(files, other)
        }
        (Place::Tcp(one, port), Place::Tcp(other, other_port)) => {
            // Without an answer neither can be connected to.
            let resolve = |host: &str, port: u16| (host, port).to_socket_addrs().map_or(Vec::new(), Iterator::collect);
            let addresses: Vec<SocketAddr> = resolve(one, *port);
            resolve(other, *other_port).iter().any(|address| addresses.contains(address))
        }
        (Place::Unix(_), Place::Tcp(..)) | (Place::Tcp(..), Place::Unix(_)) => false,
    }
}

/// Rejects an image at a server where a command needs a file.
pub fn refuse<'a>(names: impl IntoIterator<Item = &'a ImageName>) -> Result<(), Failure> {
    match names.into_iter().find(|name| name.is_at_server()) {
        None => Ok(()),
        Some(name) => {
            http::refuse(format!("use {name} here"), name)?;
            let why = "an image at an NBD server can only be converted, compared, shown, measured and served, and be \
                       the parent of a qcow2 image";
            Err(Failure::new(format!("use {name} here"), why)
                .advise(format!("copy it into a file first: tapline image convert {name} qcow2:FILE"))
                .of_kind(Kind::Invalid))
        }
    }
}

/// Rejects chains in which an image at a server is not the last parent, below an image that can record its URI.
pub fn refuse_in_chain(names: &[&ImageName]) -> Result<(), Failure> {
    if names.len() > 1 {
        names.iter().try_for_each(|name| http::refuse(format!("use {name} in a chain"), name))?;
    }
    let Some(depth) = names.iter().position(|name| name.uri().is_some()) else { return Ok(()) };
    let Some(name) = names.get(depth).filter(|_| names.len() > 1) else { return Ok(()) };
    let child = depth.checked_sub(1).and_then(|above| names.get(above));
    let why = match child {
        _ if depth + 1 < names.len() => "an image at an NBD server has no parent",
        None => return Ok(()),
        Some(child) => return refuse_child(child, name),
    };
    Err(Failure::new(format!("use {name} in a chain"), why)
        .advise(format!("copy it into a file first: tapline image convert {name} {}:FILE", FormatName::Qcow2))
        .of_kind(Kind::Invalid))
}

/// Rejects a child that cannot record the URI of its parent.
pub fn refuse_child(child: &ImageName, parent: &ImageName) -> Result<(), Failure> {
    if parent.uri().is_none() || child.format == FormatName::Qcow2 {
        return Ok(());
    }
    let why = format!("only qcow2 can record a parent at an NBD server, not {}", child.format);
    Err(Failure::new(format!("use {parent} as the parent of {child}"), why)
        .advise("create a qcow2 image on it, or copy it into a file first: tapline image convert")
        .of_kind(Kind::Invalid))
}
