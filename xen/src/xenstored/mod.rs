//! A client of xenstored, over its socket or the kernel's device.
//!
//! It knows nothing about the contents of the store. Invariant: each reply of the store is a value or an error that
//! names the request; anything else ends the connection.

mod connection;

use std::env;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use self::connection::{Connection, ExchangeError, protocol_error};
use crate::wire::{Kind, Message};
use crate::{DomId, Store, StoreError, Transaction, WatchEvent};

/// How long to wait for a reply: xenstored takes well under a millisecond, in a busy dom0 some tens.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Where xenstored listens, and the device through which the kernel forwards requests to a store in another domain.
const PATHS: [&str; 2] = ["/run/xenstored/socket", "/dev/xen/xenbus"];

/// The maximum size of a list: many times that of all disks of all guests of a host.
const LIST_MAX: usize = 1 << 20;

/// How many times to restart reading a list that changes while it is read in parts.
const LIST_ATTEMPTS_MAX: usize = 8;

/// A connection to the store.
pub struct XenstoredClient {
    connection: Connection,
    timeout: Duration,
    /// Linux forwards a watch when it is written, and returns only with the reply: see
    /// [`XenstoredClient::check_responsive`].
    is_kernel_device: bool,
}

/// A request, and how errors describe it.
#[derive(Clone, Copy)]
struct StoreRequest<'a> {
    kind: Kind,
    what: &'static str,
    path: &'a str,
    within: Option<Transaction>,
}

impl XenstoredClient {
    /// Connects to the store of this machine: at XENSTORED_PATH if it is set, otherwise at xenstored's socket or the
    /// kernel's device.
    pub fn connect() -> Result<XenstoredClient, StoreError> {
        let paths = match env::var_os("XENSTORED_PATH") {
            Some(path) => vec![PathBuf::from(path)],
            None => PATHS.iter().map(PathBuf::from).collect(),
        };
        let mut result = Err(io::Error::from(io::ErrorKind::NotFound));
        for place in &paths {
            result = open(place);
            // Report the error of a path that exists but cannot be opened.
            if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::NotFound) {
                return result
                    .and_then(XenstoredClient::from_fd)
                    .map_err(|source| unreachable_store(place.display(), source));
            }
        }
        let tried: Vec<String> = paths.iter().map(|place| place.display().to_string()).collect();
        result.and_then(XenstoredClient::from_fd).map_err(|source| unreachable_store(tried.join(" and "), source))
    }

    /// Connects to xenstored's socket, or to the kernel's device, at `place`.
    pub fn connect_to(place: &Path) -> Result<XenstoredClient, StoreError> {
        open(place).and_then(XenstoredClient::from_fd).map_err(|source| unreachable_store(place.display(), source))
    }

    /// Opens a connection to the store of this machine for a process that cannot do so itself.
    pub fn connect_fd() -> Result<OwnedFd, StoreError> {
        XenstoredClient::connect().map(|daemon| daemon.connection.into_fd())
    }

    /// Uses an existing connection.
    pub fn from_fd(connection: OwnedFd) -> io::Result<XenstoredClient> {
        let is_kernel_device =
            FileType::from_raw_mode(rustix::fs::fstat(&connection)?.st_mode) == FileType::CharacterDevice;
        Ok(XenstoredClient { connection: Connection::new(connection)?, timeout: TIMEOUT, is_kernel_device })
    }

    /// Sets how long to wait for a reply, instead of [`TIMEOUT`].
    pub fn with_timeout(self, timeout: Duration) -> XenstoredClient {
        XenstoredClient { timeout, ..self }
    }

    /// Treats the connection as the kernel's device, whatever it is: for tests, which have no such device.
    #[doc(hidden)]
    pub fn as_device(self) -> XenstoredClient {
        XenstoredClient { is_kernel_device: true, ..self }
    }

    /// Checks that the store replies, before a request for which Linux's device waits by itself: it would wait forever,
    /// and cannot be interrupted (xenbus_write_watch in drivers/xen/xenbus/xenbus_dev_frontend.c). For every other
    /// request the waiting is ours. A store that stops between the two requests still blocks us; it did reply a moment
    /// before.
    fn check_responsive(&mut self) -> Result<(), StoreError> {
        match self.is_kernel_device {
            true => self.read(None, "/").map(drop),
            false => Ok(()),
        }
    }

    /// Sends a request and waits for the reply.
    fn call(&mut self, request: StoreRequest<'_>, payload: Vec<u8>) -> Result<Message, StoreError> {
        let StoreRequest { kind, what, path, within } = request;
        let refused = |code: &str| StoreError::Refused { what, path: path.to_owned(), code: code.to_owned() };
        let answer = self.connection.exchange(kind, within, payload, self.timeout);
        let answer = answer.map_err(|error| self.failed(request, error))?;
        if answer.kind != Kind::ERROR {
            return Ok(answer);
        }
        Err(match answer.words().next().unwrap_or_default() {
            b"ENOENT" => StoreError::NoEntry { path: path.to_owned() },
            b"EAGAIN" => StoreError::Again,
            code => refused(&String::from_utf8_lossy(code)),
        })
    }

    /// Sends a request whose payload is just the path.
    fn call_path(&mut self, request: StoreRequest<'_>) -> Result<Message, StoreError> {
        self.call(request, words(request, &[request.path])?)
    }

    fn failed(&mut self, request: StoreRequest<'_>, error: ExchangeError) -> StoreError {
        let StoreRequest { what, path, .. } = request;
        match error {
            ExchangeError::TimedOut => {
                StoreError::TimedOut { what, path: path.to_owned(), seconds: self.timeout.as_secs() }
            }
            ExchangeError::Refused("ENOENT") => StoreError::NoEntry { path: path.to_owned() },
            ExchangeError::Refused(code) => StoreError::Refused { what, path: path.to_owned(), code: code.to_owned() },
            ExchangeError::Broken(source) => {
                self.connection.mark_lost();
                StoreError::Lost { what, path: path.to_owned(), source }
            }
        }
    }

    /// The names of a node's children that do not fit in one message: reads the list from each offset on, with a
    /// generation number that changes when the node does.
    fn list_in_parts(&mut self, request: StoreRequest<'_>) -> Result<Vec<String>, StoreError> {
        let request = StoreRequest { kind: Kind::DIRECTORY_PART, ..request };
        let mut list: Vec<u8> = Vec::new();
        let mut generation: Option<Vec<u8>> = None;
        let mut restarts = 0;
        while restarts < LIST_ATTEMPTS_MAX {
            let offset = list.len().to_string();
            let answer = self.call(request, words(request, &[request.path, &offset])?)?;
            let end = answer.payload.iter().position(|&byte| byte == 0).unwrap_or(answer.payload.len());
            let (now, part) = answer.payload.split_at(end);
            if generation.as_deref().is_some_and(|generation| generation != now) {
                (generation, restarts) = (None, restarts + 1);
                list.clear();
                continue;
            }
            generation = Some(now.to_vec());
            let part = part.get(1..).unwrap_or_default();
            // After the last name there is an empty one.
            if let Some(last) = part.strip_suffix(&[0]).filter(|last| last.is_empty() || last.ends_with(&[0])) {
                list.extend_from_slice(last);
                return self.names(request, &Message { payload: list, ..answer });
            }
            if part.is_empty() || list.len() > LIST_MAX {
                return Err(self.failed(request, protocol_error("a list without an end").into()));
            }
            list.extend_from_slice(part);
        }
        Err(StoreError::Again)
    }

    fn names(&mut self, request: StoreRequest<'_>, answer: &Message) -> Result<Vec<String>, StoreError> {
        let names = answer.words().map(|name| std::str::from_utf8(name).map(str::to_owned));
        let names: Result<Vec<String>, _> = names.collect();
        names.map_err(|_| self.failed(request, protocol_error("a name that is not UTF-8").into()))
    }
}

impl Store for XenstoredClient {
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let request = StoreRequest { kind: Kind::READ, what: "reading", path, within };
        none_if_missing(self.call_path(request).map(|answer| answer.payload))
    }

    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        let request = StoreRequest { kind: Kind::DIRECTORY, what: "listing", path, within };
        let names = match self.call_path(request) {
            Ok(answer) => self.names(request, &answer),
            Err(StoreError::Refused { code, .. }) if code == "E2BIG" => self.list_in_parts(request),
            Err(error) => Err(error),
        };
        none_if_missing(names)
    }

    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError> {
        let request = StoreRequest { kind: Kind::WRITE, what: "writing", path, within };
        let mut payload = words(request, &[path])?;
        payload.extend_from_slice(value);
        self.call(request, payload).map(drop)
    }

    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError> {
        let request = StoreRequest { kind: Kind::RM, what: "removing", path, within };
        none_if_missing(self.call_path(request)).map(drop)
    }

    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError> {
        let request = StoreRequest { kind: Kind::SET_PERMS, what: "setting the permissions of", path, within };
        let mut payload = words(request, &[path])?;
        payload.extend(words(request, who)?);
        self.call(request, payload).map(drop)
    }

    fn begin(&mut self) -> Result<Transaction, StoreError> {
        let request =
            StoreRequest { kind: Kind::TRANSACTION_START, what: "beginning", path: "a transaction", within: None };
        let answer = self.call(request, vec![0])?;
        let number = answer.words().next().and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        let number =
            number.ok_or_else(|| self.failed(request, protocol_error("a transaction without an id").into()))?;
        Ok(Transaction(number))
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError> {
        let within = Some(transaction);
        let request = StoreRequest { kind: Kind::TRANSACTION_END, what: "ending", path: "a transaction", within };
        self.call(request, if commit { b"T\0".to_vec() } else { b"F\0".to_vec() }).map(drop)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let request = StoreRequest { kind: Kind::WATCH, what: "watching", path, within: None };
        let payload = words(request, &[path, token])?;
        if self.connection.pending.watches().iter().any(|watch| (watch.0.as_str(), watch.1.as_str()) == (path, token)) {
            return Err(StoreError::Refused { what: request.what, path: path.to_owned(), code: "EEXIST".to_owned() });
        }
        self.check_responsive()?;
        // The first event may come before the reply.
        self.connection.pending.watch(path, token);
        let result = self.call(request, payload).map(drop);
        if result.is_err() {
            self.connection.pending.unwatch(path, token).map_err(|error| self.failed(request, error.into()))?;
        }
        result
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let request = StoreRequest { kind: Kind::UNWATCH, what: "no longer watching", path, within: None };
        let payload = words(request, &[path, token])?;
        self.check_responsive()?;
        match self.connection.pending.unwatch(path, token).map_err(|error| self.failed(request, error.into()))? {
            true => self.call(request, payload).map(drop),
            // The kernel's device would not report this.
            false => Err(StoreError::NoEntry { path: path.to_owned() }),
        }
    }

    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        let number = domain.to_string();
        let what = "looking for domain";
        let request = StoreRequest { kind: Kind::IS_DOMAIN_INTRODUCED, what, path: &number, within: None };
        let answer = self.call_path(request)?;
        match answer.words().next() {
            Some(b"T") => Ok(true),
            Some(b"F") => Ok(false),
            _ => Err(self.failed(request, protocol_error("neither T nor F").into())),
        }
    }

    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        let request = StoreRequest { kind: Kind::WATCH_EVENT, what: "waiting for", path: "events", within: None };
        self.connection.take_event().map_err(|error| self.failed(request, error.into()))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Connects to a socket, in bounded time: if xenstored hangs, its backlog fills up, and connecting would block.
fn connect(place: &Path, timeout: Duration) -> io::Result<OwnedFd> {
    let until = Instant::now() + timeout;
    let address = SocketAddrUnix::new(place)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match net::connect(&socket, &address) {
            // There is no notification when the backlog has room.
            Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(Duration::from_millis(20)),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            connected => return connected.map(|()| socket).map_err(io::Error::from),
        }
    }
}

fn open(place: &Path) -> io::Result<OwnedFd> {
    if fs::metadata(place)?.file_type().is_socket() {
        return connect(place, TIMEOUT);
    }
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(place)?.into())
}

fn unreachable_store(tried: impl ToString, source: io::Error) -> StoreError {
    let advice = match source.kind() {
        io::ErrorKind::NotFound => {
            "this is not a Xen domain, or xenstored is not running; set XENSTORED_PATH to use another path"
        }
        io::ErrorKind::PermissionDenied => "only root may use it",
        io::ErrorKind::ConnectionRefused => "xenstored is no longer running",
        io::ErrorKind::TimedOut => "xenstored hangs: it accepted no connection within 5 s",
        _ => "cannot connect",
    };
    StoreError::Unreachable { tried: tried.to_string(), advice, source }
}

/// A payload of NUL-terminated words. A word must not contain NUL.
fn words(request: StoreRequest<'_>, words: &[&str]) -> Result<Vec<u8>, StoreError> {
    let mut payload = Vec::new();
    for word in words {
        if word.contains('\0') {
            let code = "EINVAL".to_owned();
            return Err(StoreError::Refused { what: request.what, path: request.path.to_owned(), code });
        }
        payload.extend_from_slice(word.as_bytes());
        payload.push(0);
    }
    Ok(payload)
}

/// Maps a missing node to `None`.
fn none_if_missing<T>(answer: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(StoreError::NoEntry { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn connecting_to_a_hung_store_times_out() {
        let place = env::temp_dir().join(format!("tapline-store-{}", std::process::id()));
        let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&listener, &SocketAddrUnix::new(&place).unwrap()).unwrap();
        net::listen(&listener, 0).unwrap();
        let timeout = Duration::from_millis(50);
        let _waits = connect(&place, timeout).unwrap();
        let refused = connect(&place, timeout);
        fs::remove_file(&place).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
