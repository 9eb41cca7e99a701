//! `backup mount`: serves a backup over NBD until it is interrupted.
//!
//! A thread for each client, and one that accepts them. Knows nothing of the protocol. Invariant: a client that is not
//! accepted any more costs nothing, and no client can end the program.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arguments::backup::BackupMount;
use backup::Reader;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::Mode;
use rustix::io::Errno;
use serde_json::json;
use transport::BoundPath;
use transport::unix_socket::{self, MAX_PATH, NotListening};

use crate::STDERR;
use crate::failure::{Exit, Failure};
use crate::output::{print, print_json};
use crate::serve::Exported;
use crate::stop::Wake;
use crate::target::{self, find};

/// Clients at a time. Each may make this process hold 64 MiB; QEMU has one connection, nbdcopy 4.
const CLIENTS_MAX: usize = 16;
/// Bytes of chunks and pages that are kept in memory.
const CACHE: usize = 256 << 20;
/// A client that sends nothing for this long before it has negotiated is disconnected: it takes the place of another.
const SILENT: Duration = Duration::from_secs(30);
/// A client that takes nothing of its answers for this long is disconnected.
const STUCK: Duration = Duration::from_secs(300);

/// Runs the command.
pub fn run(mount: &BackupMount) -> Result<Exit, Failure> {
    let failed = |error: io::Error| Failure::cannot("wait for clients", error);
    let wake = Wake::new().map_err(failed)?;
    let target = target::open(&mount.at)?.target;
    let record = find(&target.backups()?, &mount.id)?;
    let exported = Arc::new(Exported::new(Reader::open(&target, record.id, CACHE)?));
    let listener = Listener::bind(&mount.nbd)?;
    let uri = listener.uri().map_err(failed)?;
    match mount.at.json {
        true => print_json(&json!({ "uri": uri, "id": record.id, "size": record.len }))?,
        false => print(&format!("{uri}\n"))?,
    }
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let mut ends = [PollFd::new(&wake, PollFlags::IN), PollFd::new(&listener, PollFlags::IN)];
        match poll(&mut ends, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno.into())),
        }
        if !ends.first().is_none_or(|end| end.revents().is_empty()) {
            return Ok(Exit::Done);
        }
        match listener.accept() {
            Ok(Some(stream)) => admit(stream, &exported, &clients),
            Ok(None) => {}
            Err(error) => {
                STDERR.say(format_args!("cannot accept a client: {error}"));
                // Until descriptors or memory are there again.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

fn admit(stream: Stream, exported: &Arc<Exported>, clients: &Arc<AtomicUsize>) {
    if clients.load(Ordering::Relaxed) >= CLIENTS_MAX {
        return STDERR.say(format_args!("a client was refused: {CLIENTS_MAX} are connected"));
    }
    clients.fetch_add(1, Ordering::Relaxed);
    let (exported, own) = (Arc::clone(exported), Arc::clone(clients));
    let started = std::thread::Builder::new().name("client".into()).spawn(move || {
        let mut stream = stream;
        if let Err(error) = stream.limit().and_then(|()| exported.converse(&mut stream)) {
            if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) {
                STDERR.say(format_args!("a client was disconnected: {error}"));
            }
        }
        own.fetch_sub(1, Ordering::Relaxed);
    });
    if let Err(error) = started {
        clients.fetch_sub(1, Ordering::Relaxed);
        STDERR.say(format_args!("a client was refused: {error}"));
    }
}

/// A listening socket.
enum Listener {
    /// The path is removed when it is dropped.
    Unix(UnixListener, #[expect(dead_code, reason = "held for its drop")] BoundPath),
    Tcp(TcpListener),
}

/// A client's socket.
enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl Listener {
    fn bind(word: &str) -> Result<Listener, Failure> {
        let failed = |error: io::Error| Failure::cannot(format_args!("listen at {word}"), error);
        if let Ok(address) = word.parse::<SocketAddr>() {
            let listener = TcpListener::bind(address).map_err(failed)?;
            listener.set_nonblocking(true).map_err(failed)?;
            return Ok(Listener::Tcp(listener));
        }
        if !word.contains('/') && (word.contains(':') || word.parse::<u16>().is_ok()) {
            return Err(Failure::new(Exit::Usage, format!("'{word}' is neither the path of a socket nor an address"))
                .advise("give a path with a slash, such as ./backup.sock, or an address, such as 127.0.0.1:10809"));
        }
        let path = std::path::absolute(word).map_err(failed)?;
        unix_socket::listen(&path, Some(Mode::from_raw_mode(0o600)))
            .map(|(listener, bound)| Listener::Unix(listener, bound))
            .map_err(|why| refused(&path, why))
    }

    fn accept(&self) -> io::Result<Option<Stream>> {
        let accepted = match self {
            Listener::Unix(listener, _) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
            Listener::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
        };
        match accepted {
            Ok(stream) => Ok(Some(stream)),
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn uri(&self) -> io::Result<String> {
        match self {
            Listener::Unix(listener, _) => {
                let address = listener.local_addr()?;
                let path = address.as_pathname().unwrap_or(Path::new(""));
                Ok(format!("nbd+unix:///?socket={}", path.display()))
            }
            Listener::Tcp(listener) => Ok(format!("nbd://{}", listener.local_addr()?)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }
}

fn refused(path: &Path, why: NotListening) -> Failure {
    let path = path.display();
    match why {
        NotListening::PathTooLong(len) => {
            let what = format!("the path of the socket has {len} bytes; at most {MAX_PATH} are possible");
            Failure::new(Exit::Usage, what).advise("choose a shorter path")
        }
        NotListening::InUse => {
            Failure::new(Exit::Conflict, format!("another process listens at {path}")).advise("choose another path")
        }
        NotListening::NotASocket => {
            Failure::new(Exit::Conflict, format!("{path} exists and is not a socket")).advise("choose another path")
        }
        NotListening::Failed { what, source } => Failure::cannot(format_args!("{what} the socket {path}"), source),
    }
}

impl Stream {
    fn limit(&self) -> io::Result<()> {
        match self {
            Stream::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(SILENT))?;
                stream.set_write_timeout(Some(STUCK))
            }
            Stream::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(SILENT))?;
                rustix::net::sockopt::set_socket_keepalive(stream, true)?;
                stream.set_write_timeout(Some(STUCK))
            }
        }
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.read(bytes),
            Stream::Tcp(stream) => stream.read(bytes),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Unix(stream) => stream.write(bytes),
            Stream::Tcp(stream) => stream.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
