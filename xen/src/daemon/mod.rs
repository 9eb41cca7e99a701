//! The store as its daemon keeps it, over the daemon's socket or the kernel's device.
//!
//! Knows nothing of what is in the store. Keeps: each answer of the store is a value or an error that names what was asked;
//! what is not an answer ends the connection.

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

use self::connection::{Connection, Silence, rubbish};
use crate::wire::{Kind, Message};
use crate::{DomId, Store, StoreError, Transaction, WatchEvent};

/// How long an answer is waited for: the daemon answers in well under a millisecond, a busy dom0 in some tens.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Where the daemon listens, and where the kernel passes questions on to a store in another domain.
const PLACES: [&str; 2] = ["/run/xenstored/socket", "/dev/xen/xenbus"];

/// Bytes of a list at most: all disks of all guests of a host, many times over.
const LIST_MAX: usize = 1 << 20;

/// How often a list that changes while it is read in parts is begun anew.
const LISTINGS: usize = 8;

/// A connection to the store.
pub struct Daemon {
    connection: Connection,
    patience: Duration,
    /// Linux passes a watch on when it is written, and comes back with the answer: see [`Daemon::heed`].
    waits_in_kernel: bool,
}

/// What is asked about what, in the words of an error.
#[derive(Clone, Copy)]
struct Question<'a> {
    kind: Kind,
    what: &'static str,
    path: &'a str,
    within: Option<Transaction>,
}

impl Daemon {
    /// Connects to the store of this machine: where XENSTORED_PATH says, or to the daemon's socket, or by the kernel's
    /// device.
    pub fn connect() -> Result<Daemon, StoreError> {
        let places = match env::var_os("XENSTORED_PATH") {
            Some(path) => vec![PathBuf::from(path)],
            None => PLACES.iter().map(PathBuf::from).collect(),
        };
        let mut result = Err(io::Error::from(io::ErrorKind::NotFound));
        for place in &places {
            result = open(place);
            // What is there but does not let us in is the one to complain about.
            if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::NotFound) {
                return result.and_then(Daemon::over).map_err(|source| unreachable_store(place.display(), source));
            }
        }
        let tried: Vec<String> = places.iter().map(|place| place.display().to_string()).collect();
        result.and_then(Daemon::over).map_err(|source| unreachable_store(tried.join(" and "), source))
    }

    /// Connects to the daemon's socket, or to the kernel's device, at `place`.
    pub fn connect_to(place: &Path) -> Result<Daemon, StoreError> {
        open(place).and_then(Daemon::over).map_err(|source| unreachable_store(place.display(), source))
    }

    /// Connects for another process, which cannot, to the store of this machine.
    pub fn connect_for_another() -> Result<OwnedFd, StoreError> {
        Daemon::connect().map(|daemon| daemon.connection.into_descriptor())
    }

    /// The store at the other end of `connection`.
    pub fn over(connection: OwnedFd) -> io::Result<Daemon> {
        let waits_in_kernel =
            FileType::from_raw_mode(rustix::fs::fstat(&connection)?.st_mode) == FileType::CharacterDevice;
        Ok(Daemon { connection: Connection::new(connection)?, patience: PATIENCE, waits_in_kernel })
    }

    /// Waits so long for an answer, instead of [`PATIENCE`].
    pub fn with_patience(self, patience: Duration) -> Daemon {
        Daemon { patience, ..self }
    }

    /// Treats the connection as the kernel's device, whatever it is: for tests, which have no such device.
    #[doc(hidden)]
    pub fn as_device(self) -> Daemon {
        Daemon { waits_in_kernel: true, ..self }
    }

    /// Sees that the store answers, before something that Linux's device waits for by itself: it would do so for ever, and
    /// cannot be interrupted (xenbus_write_watch in drivers/xen/xenbus/xenbus_dev_frontend.c). Every other question is waited
    /// for by us. A store that stops between two questions keeps us waiting still; it has answered a moment before.
    fn heed(&mut self) -> Result<(), StoreError> {
        match self.waits_in_kernel {
            true => self.read(None, "/").map(drop),
            false => Ok(()),
        }
    }

    /// Asks, and waits for the answer.
    fn ask(&mut self, question: Question<'_>, payload: Vec<u8>) -> Result<Message, StoreError> {
        let Question { kind, what, path, within } = question;
        let refused = |code: &str| StoreError::Refused { what, path: path.to_owned(), code: code.to_owned() };
        let answer = self.connection.exchange(kind, within, payload, self.patience);
        let answer = answer.map_err(|silence| self.failed(question, silence))?;
        if answer.kind != Kind::ERROR {
            return Ok(answer);
        }
        Err(match answer.words().next().unwrap_or_default() {
            b"ENOENT" => StoreError::NoEntry { path: path.to_owned() },
            b"EAGAIN" => StoreError::Again,
            code => refused(&String::from_utf8_lossy(code)),
        })
    }

    /// Asks what is said by a path alone.
    fn ask_path(&mut self, question: Question<'_>) -> Result<Message, StoreError> {
        self.ask(question, words(question, &[question.path])?)
    }

    fn failed(&mut self, question: Question<'_>, silence: Silence) -> StoreError {
        let Question { what, path, .. } = question;
        match silence {
            Silence::Late => StoreError::Mute { what, path: path.to_owned(), seconds: self.patience.as_secs() },
            Silence::Refused("ENOENT") => StoreError::NoEntry { path: path.to_owned() },
            Silence::Refused(code) => StoreError::Refused { what, path: path.to_owned(), code: code.to_owned() },
            Silence::Broken(source) => {
                self.connection.lose();
                StoreError::Lost { what, path: path.to_owned(), source }
            }
        }
    }

    /// The names of a node's children that do not fit in one message: the children's list from each offset on, with a
    /// number that changes when the node does.
    fn list_in_parts(&mut self, question: Question<'_>) -> Result<Vec<String>, StoreError> {
        let question = Question { kind: Kind::DIRECTORY_PART, ..question };
        let mut list: Vec<u8> = Vec::new();
        let mut generation: Option<Vec<u8>> = None;
        let mut begun = 0;
        while begun < LISTINGS {
            let offset = list.len().to_string();
            let answer = self.ask(question, words(question, &[question.path, &offset])?)?;
            let end = answer.payload.iter().position(|&byte| byte == 0).unwrap_or(answer.payload.len());
            let (now, part) = answer.payload.split_at(end);
            if generation.as_deref().is_some_and(|generation| generation != now) {
                (generation, begun) = (None, begun + 1);
                list.clear();
                continue;
            }
            generation = Some(now.to_vec());
            let part = part.get(1..).unwrap_or_default();
            // Behind the last name there is one that is empty.
            if let Some(last) = part.strip_suffix(&[0]).filter(|last| last.is_empty() || last.ends_with(&[0])) {
                list.extend_from_slice(last);
                return self.names(question, &Message { payload: list, ..answer });
            }
            if part.is_empty() || list.len() > LIST_MAX {
                return Err(self.failed(question, rubbish("a list that does not end").into()));
            }
            list.extend_from_slice(part);
        }
        Err(StoreError::Again)
    }

    fn names(&mut self, question: Question<'_>, answer: &Message) -> Result<Vec<String>, StoreError> {
        let names = answer.words().map(|name| std::str::from_utf8(name).map(str::to_owned));
        let names: Result<Vec<String>, _> = names.collect();
        names.map_err(|_| self.failed(question, rubbish("a name that is no text").into()))
    }
}

impl Store for Daemon {
    fn read(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let question = Question { kind: Kind::READ, what: "reading", path, within };
        if_there(self.ask_path(question).map(|answer| answer.payload))
    }

    fn list(&mut self, within: Option<Transaction>, path: &str) -> Result<Option<Vec<String>>, StoreError> {
        let question = Question { kind: Kind::DIRECTORY, what: "listing", path, within };
        let names = match self.ask_path(question) {
            Ok(answer) => self.names(question, &answer),
            Err(StoreError::Refused { code, .. }) if code == "E2BIG" => self.list_in_parts(question),
            Err(error) => Err(error),
        };
        if_there(names)
    }

    fn write(&mut self, within: Option<Transaction>, path: &str, value: &[u8]) -> Result<(), StoreError> {
        let question = Question { kind: Kind::WRITE, what: "writing", path, within };
        let mut payload = words(question, &[path])?;
        payload.extend_from_slice(value);
        self.ask(question, payload).map(drop)
    }

    fn remove(&mut self, within: Option<Transaction>, path: &str) -> Result<(), StoreError> {
        let question = Question { kind: Kind::RM, what: "removing", path, within };
        if_there(self.ask_path(question)).map(drop)
    }

    fn set_permissions(&mut self, within: Option<Transaction>, path: &str, who: &[&str]) -> Result<(), StoreError> {
        let question = Question { kind: Kind::SET_PERMS, what: "setting the permissions of", path, within };
        let mut payload = words(question, &[path])?;
        payload.extend(words(question, who)?);
        self.ask(question, payload).map(drop)
    }

    fn begin(&mut self) -> Result<Transaction, StoreError> {
        let question =
            Question { kind: Kind::TRANSACTION_START, what: "beginning", path: "a transaction", within: None };
        let answer = self.ask(question, vec![0])?;
        let number = answer.words().next().and_then(|word| std::str::from_utf8(word).ok()?.parse().ok());
        let number = number.ok_or_else(|| self.failed(question, rubbish("a transaction without a number").into()))?;
        Ok(Transaction(number))
    }

    fn end(&mut self, transaction: Transaction, commit: bool) -> Result<(), StoreError> {
        let within = Some(transaction);
        let question = Question { kind: Kind::TRANSACTION_END, what: "ending", path: "a transaction", within };
        self.ask(question, if commit { b"T\0".to_vec() } else { b"F\0".to_vec() }).map(drop)
    }

    fn watch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let question = Question { kind: Kind::WATCH, what: "watching", path, within: None };
        let payload = words(question, &[path, token])?;
        if self.connection.pending.watches().iter().any(|watch| (watch.0.as_str(), watch.1.as_str()) == (path, token)) {
            return Err(StoreError::Refused { what: question.what, path: path.to_owned(), code: "EEXIST".to_owned() });
        }
        self.heed()?;
        // The first event may come before the answer.
        self.connection.pending.watch(path, token);
        let result = self.ask(question, payload).map(drop);
        if result.is_err() {
            self.connection.pending.unwatch(path, token).map_err(|error| self.failed(question, error.into()))?;
        }
        result
    }

    fn unwatch(&mut self, path: &str, token: &str) -> Result<(), StoreError> {
        let question = Question { kind: Kind::UNWATCH, what: "no longer watching", path, within: None };
        let payload = words(question, &[path, token])?;
        self.heed()?;
        match self.connection.pending.unwatch(path, token).map_err(|error| self.failed(question, error.into()))? {
            true => self.ask(question, payload).map(drop),
            // The kernel's device would not tell.
            false => Err(StoreError::NoEntry { path: path.to_owned() }),
        }
    }

    fn is_introduced(&mut self, domain: DomId) -> Result<bool, StoreError> {
        let number = domain.to_string();
        let what = "looking for domain";
        let question = Question { kind: Kind::IS_DOMAIN_INTRODUCED, what, path: &number, within: None };
        let answer = self.ask_path(question)?;
        match answer.words().next() {
            Some(b"T") => Ok(true),
            Some(b"F") => Ok(false),
            _ => Err(self.failed(question, rubbish("neither yes nor no").into())),
        }
    }

    fn take_event(&mut self) -> Result<Option<WatchEvent>, StoreError> {
        let question = Question { kind: Kind::WATCH_EVENT, what: "waiting for", path: "events", within: None };
        self.connection.take_event().map_err(|error| self.failed(question, error.into()))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

/// Connects to a socket, in bounded time: a daemon that hangs lets only so many wait for it, and the next would wait for them.
fn connect(place: &Path, patience: Duration) -> io::Result<OwnedFd> {
    let until = Instant::now() + patience;
    let address = SocketAddrUnix::new(place)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    loop {
        match net::connect(&socket, &address) {
            // Nothing tells when there is room.
            Err(Errno::AGAIN) if Instant::now() < until => thread::sleep(Duration::from_millis(20)),
            Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
            connected => return connected.map(|()| socket).map_err(io::Error::from),
        }
    }
}

fn open(place: &Path) -> io::Result<OwnedFd> {
    if fs::metadata(place)?.file_type().is_socket() {
        return connect(place, PATIENCE);
    }
    let flags = i32::try_from(OFlags::NONBLOCK.bits()).map_err(io::Error::other)?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(place)?.into())
}

fn unreachable_store(tried: impl ToString, source: io::Error) -> StoreError {
    let advice = match source.kind() {
        io::ErrorKind::NotFound => {
            "this is not a Xen domain, or its store does not run; XENSTORED_PATH names another place"
        }
        io::ErrorKind::PermissionDenied => "only root may use it",
        io::ErrorKind::ConnectionRefused => "its daemon does not run any more",
        io::ErrorKind::TimedOut => "its daemon hangs: it lets nobody in, in 5 s",
        _ => "it cannot be used",
    };
    StoreError::Unreachable { tried: tried.to_string(), advice, source }
}

/// A payload of words. None may contain the byte that ends it.
fn words(question: Question<'_>, words: &[&str]) -> Result<Vec<u8>, StoreError> {
    let mut payload = Vec::new();
    for word in words {
        if word.contains('\0') {
            let code = "EINVAL".to_owned();
            return Err(StoreError::Refused { what: question.what, path: question.path.to_owned(), code });
        }
        payload.extend_from_slice(word.as_bytes());
        payload.push(0);
    }
    Ok(payload)
}

/// That there is no such node is an answer.
fn if_there<T>(answer: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
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
    fn a_store_that_lets_nobody_in_is_waited_for_a_bounded_time() {
        let place = env::temp_dir().join(format!("tapline-store-{}", std::process::id()));
        let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&listener, &SocketAddrUnix::new(&place).unwrap()).unwrap();
        net::listen(&listener, 0).unwrap();
        let patience = Duration::from_millis(50);
        let _waits = connect(&place, patience).unwrap();
        let refused = connect(&place, patience);
        fs::remove_file(&place).unwrap();
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
