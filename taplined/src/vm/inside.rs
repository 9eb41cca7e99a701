//! The port into a guest: `tapline-guest` is queried there about the guest's disks, when a client requests that.
//!
//! It decides when to query and how long to wait; the messages are in the crate `stats`. The guest is hostile.
//! Invariants: a response costs bounded time and memory; a guest that does not respond is waited for once, until it
//! sends something; the port is idle while no client queries it.

use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream as BlockingStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use stats::{BadAnswer, GuestAnswer, Listening, question};
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

/// Time limit for a response. It takes a millisecond, unless the guest or the host is overloaded.
const LIMIT: Duration = Duration::from_secs(1);
/// Maximum bytes of stale output that are skipped before a query; more is an error.
const BEFORE_MAX: usize = 256 << 10;

/// The port of a guest.
#[derive(Debug)]
pub struct GuestPort {
    port: Mutex<Port>,
}

#[derive(Debug)]
struct Port {
    stream: UnixStream,
    /// The number of the last query.
    number: u64,
    /// The last query was not answered; no other is sent until the guest sends something.
    silent: bool,
}

/// Why a guest's statistics are unknown.
#[derive(Debug, Error)]
pub enum Unknown {
    /// Nothing in the guest reads the port or responds.
    #[error("no tapline-guest answers in the guest")]
    Silent,
    /// The guest sends without end.
    #[error("the guest says more than is listened to")]
    Flood,
    /// The response is invalid.
    #[error(transparent)]
    Bad(#[from] BadAnswer),
    /// The machine has ended.
    #[error("the machine has closed the guest's port")]
    Closed,
    /// The connection has failed.
    #[error("cannot ask the guest: {0}")]
    Failed(#[source] io::Error),
}

impl GuestPort {
    /// Creates the port on its connected `stream`.
    pub fn of(stream: BlockingStream) -> io::Result<GuestPort> {
        stream.set_nonblocking(true)?;
        let port = Port { stream: UnixStream::from_std(stream)?, number: 0, silent: false };
        Ok(GuestPort { port: Mutex::new(port) })
    }

    /// Queries the guest about its disks.
    pub async fn query(&self) -> Result<GuestAnswer, Unknown> {
        // While another query runs: its time limit is long enough for this one too.
        let Ok(mut port) = timeout(LIMIT, self.port.lock()).await else { return Err(Unknown::Silent) };
        if !port.skip_stale()? && port.silent {
            return Err(Unknown::Silent);
        }
        // Also if the caller is dropped: the next query skips a late response.
        port.silent = true;
        port.number += 1;
        let question = question(port.number);
        match send(&port.stream, question.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(written) if written == question.len() => {}
            // The guest does not read: a partial query is invalid.
            Ok(_) | Err(Errno::AGAIN) => return Err(Unknown::Silent),
            Err(errno) => return Err(failed(errno.into())),
        }
        let answer = timeout(LIMIT, port.answer()).await.unwrap_or(Err(Unknown::Silent))?;
        port.silent = false;
        Ok(answer)
    }
}

impl Port {
    /// Skips output since the last query; returns whether there was any.
    fn skip_stale(&mut self) -> Result<bool, Unknown> {
        let mut skipped = 0;
        let mut bytes = [0; 4096];
        while skipped < BEFORE_MAX {
            // Bypasses the runtime, which may not have noticed yet that data is available.
            match recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Unknown::Closed),
                Ok((len, _)) => skipped += len,
                Err(Errno::AGAIN) => return Ok(skipped > 0),
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        Err(Unknown::Flood)
    }

    async fn answer(&mut self) -> Result<GuestAnswer, Unknown> {
        let mut listening = Listening::to(self.number);
        let mut bytes = [0; 4096];
        loop {
            self.stream.readable().await.map_err(Unknown::Failed)?;
            match self.stream.try_read(&mut bytes) {
                Ok(0) => return Err(Unknown::Closed),
                Ok(len) => {
                    if let Some(answer) = listening.take(bytes.get(..len).unwrap_or_default())? {
                        return Ok(answer);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

fn failed(error: io::Error) -> Unknown {
    match error.kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Unknown::Closed,
        _ => Unknown::Failed(error),
    }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead, BufReader, Write};

    use super::*;

    /// A port, and the guest's end of it.
    fn port() -> (GuestPort, BlockingStream) {
        let (host, guest) = BlockingStream::pair().unwrap();
        (GuestPort::of(host).unwrap(), guest)
    }

    /// A guest that responds with `answer` to the given number of queries, replacing `N` by the query's number.
    fn played(guest: BlockingStream, answers: usize, answer: &'static str) -> std::thread::JoinHandle<BlockingStream> {
        std::thread::spawn(move || {
            let mut reader = BufReader::new(guest.try_clone().unwrap());
            for _ in 0..answers {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let number = line.trim_end().strip_prefix("disks ").unwrap();
                // An abandoned query is not read to its end.
                (&guest).write_all(answer.replace('N', number).as_bytes()).unwrap_or_default();
            }
            guest
        })
    }

    const ANSWER: &str = "begin N\nuptime 12.00 1.00\ndisk abc 254 0 vda 1 2 3 4 5 6 7 8 9 10 11\nend N\n";

    #[tokio::test]
    async fn stale_output_is_skipped_before_each_query() {
        let (inside, mut guest) = port();
        guest.write_all(b"ready\nbegin 1\nuptime 1.00 1.00\nend 1\n").unwrap();
        let guest = played(guest, 2, ANSWER);
        for _ in 0..2 {
            let answer = inside.query().await.unwrap();
            assert_eq!((answer.uptime_ns, answer.disk("abc").unwrap().counts.weighted_ms), (12_000_000_000, 11));
        }
        guest.join().unwrap();
        assert!(matches!(inside.query().await, Err(Unknown::Closed)));
    }

    #[tokio::test]
    async fn a_silent_guest_is_queried_again_only_after_it_sends_something() {
        let (inside, mut guest) = port();
        assert!(matches!(inside.query().await, Err(Unknown::Silent)));
        // It is not queried again: only the first query is in the port.
        assert!(matches!(inside.query().await, Err(Unknown::Silent)));
        let mut reader = BufReader::new(guest.try_clone().unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!((line.as_str(), reader.buffer()), ("disks 1\n", &b""[..]));
        guest.write_all(b"ready\n").unwrap();
        let guest = played(guest, 1, ANSWER);
        assert!(inside.query().await.is_ok());
        drop(guest.join().unwrap());
    }

    #[tokio::test]
    async fn a_hostile_guest_costs_no_more_than_a_wrong_answer() {
        for (answer, why) in [
            ("begin N\nrubbish\n", "means nothing"),
            ("begin N\nend N\n", "no uptime"),
            ("begin 9\nuptime 1.00 1.00\nend 9\n", "no tapline-guest answers"),
            ("begin N\nuptime 1.00 1.00\n", "no tapline-guest answers"),
        ] {
            let (inside, guest) = port();
            let guest = played(guest, 1, answer);
            let error = inside.query().await.unwrap_err().to_string();
            assert!(error.contains(why), "{answer:?}: {error}");
            guest.join().unwrap();
        }
        let (inside, mut guest) = port();
        let endless = std::thread::spawn(move || while guest.write_all(b"begin 1\nuptime 1.00 1.00\n").is_ok() {});
        for _ in 0..20 {
            let error = inside.query().await.unwrap_err();
            assert!(matches!(error, Unknown::Flood | Unknown::Bad(BadAnswer::TooLong) | Unknown::Silent), "{error}");
        }
        drop(inside);
        endless.join().unwrap();
    }
}
