//! An NBD client that outlives its server: a request may be sent without waiting for what comes of it, and a connection
//! that ends is an answer like others.

pub mod wire;

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

pub use wire::Command;
use wire::{Connection, FUA, request, wrong};

/// A connection with a negotiated export.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    /// Size of the disk.
    pub size: u64,
    cookie: u64,
    unanswered: BTreeSet<u64>,
}

impl Client {
    /// Connects to a disk.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        let mut connection = Connection::greeted(socket)?;
        let size = connection.go()?;
        Ok(Client { connection, size, cookie: 0, unanswered: BTreeSet::new() })
    }

    /// Sends a request ("Request message").
    pub fn send(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.send_with(0, command, at, len, data)
    }

    fn send_with(&mut self, flags: u16, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        self.unanswered.insert(self.cookie);
        let len = u32::try_from(len).map_err(io::Error::other)?;
        self.connection.send(&[&request(command, flags, self.cookie, at, len), data].concat())
    }

    /// Waits for the answer to one of the requests that were sent ("Simple reply message"): the data if it was a
    /// read. A failure that the disk reports is an error with its number.
    pub fn answer(&mut self, len: u64) -> io::Result<Vec<u8>> {
        match self.connection.simple_reply()? {
            (_, cookie) if !self.unanswered.remove(&cookie) => Err(wrong("another request is answered")),
            (0, _) => self.connection.receive(usize::try_from(len).unwrap_or(usize::MAX)),
            (error, _) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(error.to_ne_bytes()))),
        }
    }

    /// Sends a request and waits for its answer.
    pub fn ask(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        self.send(command, at, len, data)?;
        self.answer(if command == Command::Read { len } else { 0 })
    }

    /// Reads `len` bytes from `at`.
    pub fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.ask(Command::Read, at, length(len), &[])
    }

    /// Writes these bytes at `at`.
    pub fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.ask(Command::Write, at, length(data.len()), data).map(drop)
    }

    /// Writes bytes, which are durable when it returns.
    pub fn write_durably(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.send_with(FUA, Command::Write, at, length(data.len()), data)?;
        self.answer(0).map(drop)
    }

    /// Makes durable what was answered.
    pub fn flush(&mut self) -> io::Result<()> {
        self.ask(Command::Flush, 0, 0, &[]).map(drop)
    }
}

fn length(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
