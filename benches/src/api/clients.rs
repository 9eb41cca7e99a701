//! Clients of the API that send requests continuously: some list, some show one object, some follow events. They read
//! the responses or, on request, ask for the list and never read it.
//!
//! They parse only as much of HTTP as necessary, and only the length of a response.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Stack size of a client: there are a thousand.
const STACK: usize = 128 << 10;

/// Pause between a response and the next request, as of programs that poll.
const REST: Duration = Duration::from_millis(100);

/// Timeout of a client for a byte.
const PATIENCE: Duration = Duration::from_secs(120);

/// The behaviour of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Behaviour {
    /// Lists the VDIs repeatedly.
    List,
    /// Shows one VDI repeatedly.
    Show,
    /// Follows a stream of events.
    Follow,
    /// Requests the list without reading it.
    Ignore,
}

/// Counts of all clients.
#[derive(Debug, Default)]
pub struct ClientCounts {
    pub answers: AtomicU64,
    pub refused: AtomicU64,
    pub events: AtomicU64,
    pub failed: AtomicU64,
}

/// Running clients; they end on drop.
pub struct Clients {
    pub seen: Arc<ClientCounts>,
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Clients {
    /// Starts the clients; `behaviour` determines the behaviour of each by its number.
    pub fn begin(
        socket: &Path,
        vdi: &str,
        count: usize,
        behaviour: impl Fn(usize) -> Behaviour,
    ) -> io::Result<Clients> {
        let mut clients = Clients { seen: Arc::default(), over: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let client = Client {
                socket: socket.to_owned(),
                vdi: vdi.to_owned(),
                behaviour: behaviour(number),
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
            // A client that has panicked has counted no response.
            thread.join().ok();
        }
    }
}

struct Client {
    socket: PathBuf,
    vdi: String,
    behaviour: Behaviour,
    seen: Arc<ClientCounts>,
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

    /// Runs one connection.
    fn connect(&self) -> io::Result<()> {
        let stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let path = match self.behaviour {
            Behaviour::List | Behaviour::Ignore => "/v1/vdis".to_owned(),
            Behaviour::Show => format!("/v1/vdis/{}", self.vdi),
            Behaviour::Follow => "/v1/events".to_owned(),
        };
        let mut reader = BufReader::with_capacity(64 << 10, stream.try_clone()?);
        while !self.is_over() {
            (&stream).write_all(format!("GET {path} HTTP/1.1\r\nhost: t\r\n\r\n").as_bytes())?;
            match self.behaviour {
                Behaviour::Ignore => self.wait(),
                Behaviour::Follow => return self.follow(&stream, &mut reader),
                Behaviour::List | Behaviour::Show => {
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

    /// Counts events until the end.
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
                // A timeout; the part of a line that was received is kept.
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Reads a response; returns whether it is a success.
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
