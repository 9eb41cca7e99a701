//! Clients of the API that never cease to ask: some list, some look at one object, some hold a stream of events. They
//! read what they get, or, if told so, ask for the list and never read it.
//!
//! They know HTTP as far as the daemon speaks it, and nothing of what is in an answer but its length.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Stack of a client: there are a thousand.
const STACK: usize = 128 << 10;

/// Between an answer and the next question: programs that look all the time look so often.
const REST: Duration = Duration::from_millis(100);

/// How long a client may wait for a byte.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// Asks for the list of VDIs.
    List,
    /// Asks for one of them.
    Show,
    /// Holds a stream of events.
    Follow,
    /// Asks for the list, and does not read it.
    Ignore,
}

/// What clients have seen.
#[derive(Debug, Default)]
pub struct Seen {
    pub answers: AtomicU64,
    pub refused: AtomicU64,
    pub events: AtomicU64,
    pub failed: AtomicU64,
}

/// Clients at work; they end with the value.
pub struct Clients {
    pub seen: Arc<Seen>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    /// Begins: `habit` says what the client of a number does.
    pub fn begin(socket: &Path, vdi: &str, count: usize, habit: impl Fn(usize) -> Habit) -> io::Result<Clients> {
        let mut clients = Clients { seen: Arc::default(), over: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let client = Client {
                socket: socket.to_owned(),
                vdi: vdi.to_owned(),
                habit: habit(number),
                seen: clients.seen.clone(),
                over: clients.over.clone(),
            };
            clients.threads.push(thread::Builder::new().stack_size(STACK).spawn(move || client.live())?);
        }
        Ok(clients)
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // One that has panicked has counted no answer.
            thread.join().ok();
        }
    }
}

struct Client {
    socket: PathBuf,
    vdi: String,
    habit: Habit,
    seen: Arc<Seen>,
    over: Arc<AtomicBool>,
}

impl Client {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    fn live(&self) {
        while !self.is_over() {
            if self.connect().is_err() && !self.is_over() {
                self.seen.failed.fetch_add(1, Ordering::Relaxed);
                thread::sleep(REST);
            }
        }
    }

    /// One connection.
    fn connect(&self) -> io::Result<()> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let path = match self.habit {
            Habit::List | Habit::Ignore => "/v1/vdis".to_owned(),
            Habit::Show => format!("/v1/vdis/{}", self.vdi),
            Habit::Follow => "/v1/events".to_owned(),
        };
        let mut reader = BufReader::with_capacity(64 << 10, stream.try_clone()?);
        while !self.is_over() {
            (&stream).write_all(format!("GET {path} HTTP/1.1\r\nhost: t\r\n\r\n").as_bytes())?;
            match self.habit {
                Habit::Ignore => self.wait(),
                Habit::Follow => return self.follow(&stream, &mut reader),
                Habit::List | Habit::Show => {
                    let counted = if answer(&mut reader)? { &self.seen.answers } else { &self.seen.refused };
                    counted.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(REST);
                }
            }
        }
        Ok(())
    }

    fn wait(&self) {
        while !self.is_over() {
            thread::sleep(REST);
        }
    }

    /// Counts events until it is over.
    fn follow(&self, stream: &UnixStream, reader: &mut BufReader<UnixStream>) -> io::Result<()> {
        stream.set_read_timeout(Some(REST))?;
        let mut line = String::new();
        while !self.is_over() {
            match reader.read_line(&mut line) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {
                    if line.starts_with("id:") {
                        self.seen.events.fetch_add(1, Ordering::Relaxed);
                    }
                    line.clear();
                }
                // Nothing happens; what has come of a line is kept.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads an answer; whether it is none that refuses.
fn answer(reader: &mut impl BufRead) -> io::Result<bool> {
    let (mut len, mut done, mut line) = (0, None, String::new());
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        match line.trim_end().split_once(": ") {
            _ if line == "\r\n" => break,
            Some(("content-length", value)) => len = value.parse().map_err(io::Error::other)?,
            _ if done.is_none() => done = Some(line.contains(" 200 ")),
            _ => {}
        }
    }
    if io::copy(&mut reader.take(len), &mut io::sink())? < len {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(done == Some(true))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_answer_is_read_to_its_end_and_no_further() {
        let mut two = io::Cursor::new(
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabcHTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n",
        );
        assert!(answer(&mut two).unwrap());
        assert!(!answer(&mut two).unwrap());
        assert!(answer(&mut two).is_err());
    }
}
