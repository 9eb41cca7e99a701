//! The socket of a guest's port, through which a thread that may block queries `tapline-guest` for the counters of the
//! guest's disks.
//!
//! It knows sockets and time limits; the protocol is in the crate `stats`. The guest is hostile. Invariant: an answer
//! costs bounded time and memory, and a guest that does not answer is waited for once, until it says something.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
use stats::{GuestAnswer, Listening, question};

/// A guest has this long to answer.
const LIMIT: Duration = Duration::from_secs(1);
/// The most bytes from before the question that are skipped.
const BEFORE_MAX: usize = 256 << 10;
/// The error for a guest that does not answer.
const SILENT: &str = "no tapline-guest answers in the guest";

/// The port of one guest; it connects when it is first used.
#[derive(Debug)]
pub struct GuestPort {
    path: PathBuf,
    stream: Option<UnixStream>,
    number: u64,
    silent: bool,
}

/// Connects, without waiting for a listener that takes no client: it has one, or hangs.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

impl GuestPort {
    /// The one whose socket is at this path.
    pub fn new(path: &Path) -> GuestPort {
        GuestPort { path: path.to_owned(), stream: None, number: 0, silent: false }
    }

    /// Queries the guest, waiting a second at most; the error is the reason why there is no answer.
    pub fn ask(&mut self) -> Result<GuestAnswer, String> {
        let answer = self.try_ask();
        answer.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => SILENT.to_owned(),
            _ => {
                self.stream = None;
                format!("cannot ask the guest at {}: {error}", self.path.display())
            }
        })
    }

    fn try_ask(&mut self) -> io::Result<GuestAnswer> {
        if self.stream.is_none() {
            self.stream = Some(connect(&self.path)?);
            self.silent = false;
        }
        let Some(stream) = &mut self.stream else { return Err(ErrorKind::NotConnected.into()) };
        if !hear(stream)? && self.silent {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.silent = true;
        self.number += 1;
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(LIMIT))?;
        stream.write_all(question(self.number).as_bytes())?;
        let answer = listen(stream, self.number)?;
        self.silent = false;
        Ok(answer)
    }
}

/// Passes over what was said since the last question; whether something was.
fn hear(stream: &mut UnixStream) -> io::Result<bool> {
    stream.set_nonblocking(true)?;
    let (mut heard, mut bytes) = (0, [0; 4096]);
    while heard < BEFORE_MAX {
        match stream.read(&mut bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(len) => heard += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(heard > 0),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("it says more than is listened to"))
}

fn listen(stream: &mut UnixStream, number: u64) -> io::Result<GuestAnswer> {
    let deadline = Instant::now() + LIMIT;
    let (mut listening, mut bytes) = (Listening::to(number), [0; 4096]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let len = match stream.read(&mut bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(len) => len,
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        let answer = listening.take(bytes.get(..len).unwrap_or_default()).map_err(io::Error::other)?;
        if let Some(answer) = answer {
            return Ok(answer);
        }
    }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader};

    use super::*;

    #[test]
    fn a_socket_of_a_guest_is_asked_again_and_a_silent_one_is_waited_for_once() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("guest");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let mut socket = GuestPort::new(&path);
        let guest = std::thread::spawn(move || {
            let (mut guest, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(guest.try_clone().unwrap());
            guest.write_all(b"ready\n").unwrap();
            for answer in ["begin N\nuptime 3.00 1\nend N\n", "begin N\nuptime 4.00 1\nend N\n", "begin N\nrubbish\n"] {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let number = line.trim_end().strip_prefix("disks ").unwrap();
                guest.write_all(answer.replace('N', number).as_bytes()).unwrap();
            }
            // After rubbish the connection is another one, at which nothing is said.
            let (guest, _) = listener.accept().unwrap();
            BufReader::new(guest).lines().count()
        });
        let mut ask = || socket.ask().map(|answer| answer.uptime_ns);
        assert_eq!((ask(), ask()), (Ok(3_000_000_000), Ok(4_000_000_000)));
        assert!(ask().unwrap_err().contains("means nothing"));
        for _ in 0..3 {
            assert!(ask().unwrap_err().contains("no tapline-guest answers"));
        }
        drop(socket);
        assert_eq!(guest.join().unwrap(), 1, "one question was asked of the silent one");
    }
}
