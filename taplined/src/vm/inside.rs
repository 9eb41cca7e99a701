//! The port into a guest: `tapline-guest` is asked there what the guest's disks do, when somebody asks the daemon.
//!
//! It knows when to ask and how long to wait; what is said is in the crate `stats`. The guest is hostile. Invariants:
//! an answer costs bounded time and memory; a guest that does not answer is waited for once, until something is heard
//! from it; nothing is read or written while nobody asks.

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

/// A guest has this long to answer. It takes a millisecond, unless the guest or the host has no processor left.
const LIMIT: Duration = Duration::from_secs(1);
/// What was said since the last question is read up to here at once. The rest is for the next one.
const BEFORE_MAX: usize = 256 << 10;

/// The port.
#[derive(Debug)]
pub struct Inside {
    port: Mutex<Port>,
}

#[derive(Debug)]
struct Port {
    stream: UnixStream,
    /// Of the last question.
    number: u64,
    /// It has not answered the last question, so it is asked again only when something was heard from it.
    silent: bool,
}

/// Why a guest's figures are not known.
#[derive(Debug, Error)]
pub enum Unknown {
    /// Nothing reads the port, or nothing that answers.
    #[error("no tapline-guest answers in the guest")]
    Silent,
    /// It does not stop.
    #[error("the guest says more than is listened to")]
    Flood,
    /// It says something else.
    #[error(transparent)]
    Bad(#[from] BadAnswer),
    /// There is no machine any more.
    #[error("the machine has closed the guest's port")]
    Closed,
    /// The connection has failed.
    #[error("cannot ask the guest: {0}")]
    Failed(#[source] io::Error),
}

impl Inside {
    /// The port that `stream` is connected to.
    pub fn of(stream: BlockingStream) -> io::Result<Inside> {
        stream.set_nonblocking(true)?;
        let port = Port { stream: UnixStream::from_std(stream)?, number: 0, silent: false };
        Ok(Inside { port: Mutex::new(port) })
    }

    /// Asks the guest what its disks do.
    pub async fn ask(&self) -> Result<GuestAnswer, Unknown> {
        // Whoever waits has waited long enough when the one before has.
        let Ok(mut port) = timeout(LIMIT, self.port.lock()).await else { return Err(Unknown::Silent) };
        if !port.hear()? && port.silent {
            return Err(Unknown::Silent);
        }
        // Also where nobody waits for the answer any more: the next question finds what was said.
        port.silent = true;
        port.number += 1;
        let question = question(port.number);
        match send(&port.stream, question.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(written) if written == question.len() => {}
            // The guest does not read: what was written of it is no question.
            Ok(_) | Err(Errno::AGAIN) => return Err(Unknown::Silent),
            Err(errno) => return Err(failed(errno.into())),
        }
        let answer = timeout(LIMIT, port.answer()).await.unwrap_or(Err(Unknown::Silent))?;
        port.silent = false;
        Ok(answer)
    }
}

impl Port {
    /// Passes over what was said since the last question; whether something was.
    fn hear(&mut self) -> Result<bool, Unknown> {
        let mut heard = 0;
        let mut bytes = [0; 4096];
        while heard < BEFORE_MAX {
            // Past the runtime, which may not have seen yet that something is there.
            match recv(&self.stream, &mut bytes, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Unknown::Closed),
                Ok((len, _)) => heard += len,
                Err(Errno::AGAIN) => return Ok(heard > 0),
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
    fn port() -> (Inside, BlockingStream) {
        let (host, guest) = BlockingStream::pair().unwrap();
        (Inside::of(host).unwrap(), guest)
    }

    /// A guest that says `answer` to so many questions, with the number of each in the place of `N`.
    fn played(guest: BlockingStream, answers: usize, answer: &'static str) -> std::thread::JoinHandle<BlockingStream> {
        std::thread::spawn(move || {
            let mut reader = BufReader::new(guest.try_clone().unwrap());
            for _ in 0..answers {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let number = line.trim_end().strip_prefix("disks ").unwrap();
                // One that was given up is not read to its end.
                (&guest).write_all(answer.replace('N', number).as_bytes()).unwrap_or_default();
            }
            guest
        })
    }

    const ANSWER: &str = "begin N\nuptime 12.00 1.00\ndisk abc 254 0 vda 1 2 3 4 5 6 7 8 9 10 11\nend N\n";

    #[tokio::test]
    async fn a_guest_is_asked_each_time_and_what_it_said_before_is_passed_over() {
        let (inside, mut guest) = port();
        guest.write_all(b"ready\nbegin 1\nuptime 1.00 1.00\nend 1\n").unwrap();
        let guest = played(guest, 2, ANSWER);
        for _ in 0..2 {
            let answer = inside.ask().await.unwrap();
            assert_eq!((answer.uptime_ns, answer.disk("abc").unwrap().counts.weighted_ms), (12_000_000_000, 11));
        }
        guest.join().unwrap();
        assert!(matches!(inside.ask().await, Err(Unknown::Closed)));
    }

    #[tokio::test]
    async fn a_silent_guest_is_waited_for_once_and_asked_again_when_it_says_something() {
        let (inside, mut guest) = port();
        assert!(matches!(inside.ask().await, Err(Unknown::Silent)));
        // It is not asked again: no question is there but the first.
        assert!(matches!(inside.ask().await, Err(Unknown::Silent)));
        let mut reader = BufReader::new(guest.try_clone().unwrap());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        assert_eq!((line.as_str(), reader.buffer()), ("disks 1\n", &b""[..]));
        guest.write_all(b"ready\n").unwrap();
        let guest = played(guest, 1, ANSWER);
        assert!(inside.ask().await.is_ok());
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
            let error = inside.ask().await.unwrap_err().to_string();
            assert!(error.contains(why), "{answer:?}: {error}");
            guest.join().unwrap();
        }
        let (inside, mut guest) = port();
        let endless = std::thread::spawn(move || while guest.write_all(b"begin 1\nuptime 1.00 1.00\n").is_ok() {});
        for _ in 0..20 {
            let error = inside.ask().await.unwrap_err();
            assert!(matches!(error, Unknown::Flood | Unknown::Bad(BadAnswer::TooLong) | Unknown::Silent), "{error}");
        }
        drop(inside);
        endless.join().unwrap();
    }
}
