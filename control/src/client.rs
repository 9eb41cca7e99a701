//! A client that waits for its answers.
//!
//! It has one request under way, and passes no descriptors.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Ask, Error, Reply, Request};

/// How long a socket may refuse connections before its process counts as gone, and how often it is tried.
const REFUSES_FOR: Duration = Duration::from_millis(500);
const RETRY_EVERY: Duration = Duration::from_millis(10);

/// A connection to a disk.
#[derive(Debug)]
pub struct Client(BufReader<UnixStream>);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The disk has refused.
    #[error(transparent)]
    Refused(#[from] Error),
    /// The connection failed.
    #[error(transparent)]
    Connection(io::Error),
    /// The disk has ended.
    #[error("it exited without answering")]
    Ended,
    /// It is no line of this protocol.
    #[error("{text}")]
    Senseless {
        /// The line.
        text: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

impl Client {
    /// Connects to the disk at a control socket. One that refuses is tried again for a moment.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        let until = Instant::now() + REFUSES_FOR;
        loop {
            match UnixStream::connect(socket) {
                // Its process is about to listen there, or has just been replaced.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < until => {
                    std::thread::sleep(RETRY_EVERY);
                }
                connected => return connected.map(|stream| Client(BufReader::new(stream))),
            }
        }
    }

    /// Limits the wait for each line.
    pub fn set_patience(&self, patience: Duration) -> io::Result<()> {
        self.0.get_ref().set_read_timeout(Some(patience))
    }

    /// Sends a request.
    pub fn send(&mut self, request: &Request) -> io::Result<()> {
        self.0.get_mut().write_all(request.line()?.as_bytes())
    }

    /// Waits for the next line.
    pub fn line(&mut self) -> Result<String, ClientError> {
        let mut text = String::new();
        match self.0.read_line(&mut text) {
            Ok(0) => Err(ClientError::Ended),
            Ok(_) => Ok(text),
            Err(error) => Err(ClientError::Connection(error)),
        }
    }

    /// Sends a verb and waits for its answer, whatever comes before that.
    pub fn ask<V: Ask>(&mut self, verb: V) -> Result<V::Answer, ClientError> {
        self.send(&Request::of(verb)).map_err(ClientError::Connection)?;
        loop {
            let text = self.line()?;
            match Reply::<V::Answer, serde::de::IgnoredAny>::parse(text.as_bytes()) {
                Ok(Reply::Ok(answer)) => return Ok(answer),
                Ok(Reply::Error(error)) => return Err(error.into()),
                Ok(Reply::Event(_)) => {}
                Err(source) => return Err(ClientError::Senseless { text, source }),
            }
        }
    }
}
