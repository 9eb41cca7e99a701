//! An NBD client that outlives its server: a request may be sent without waiting for what comes of it, and a connection
//! that ends is an answer like others.
//!
//! The sections named are those of the NBD protocol.

use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take; a disk that needs so long is stuck.
const PATIENCE: Duration = Duration::from_secs(120);

const OPTION_GO: u32 = 7;

/// NBD_CMD_FLAG_FUA.
const FUA: u16 = 1;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Bytes.
    Read = 0,
    /// Other bytes.
    Write = 1,
    /// What was answered to be durable.
    Flush = 3,
    /// That the bytes are not needed.
    Trim = 4,
    /// Zeros.
    Zeroes = 6,
}

/// A connection.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// What the disk is said to have.
    pub size: u64,
    cookie: u64,
    unanswered: BTreeSet<u64>,
}

impl Client {
    /// Connects to a disk ("Fixed newstyle negotiation").
    pub fn connect(socket: &Path) -> io::Result<Client> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut hello = [0; 18];
        stream.read_exact(&mut hello)?;
        stream.write_all(&3_u32.to_be_bytes())?;
        stream.write_all(&[b"IHAVEOPT", &OPTION_GO.to_be_bytes()[..], &6_u32.to_be_bytes(), &[0; 6]].concat())?;
        let mut size = 0;
        loop {
            let mut head = [0; 20];
            stream.read_exact(&mut head)?;
            let [.., a, b, c, d, e, f, g, h] = head;
            let kind = u32::from_be_bytes([a, b, c, d]);
            let len = u32::from_be_bytes([e, f, g, h]);
            let mut data = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
            stream.read_exact(&mut data)?;
            match (kind, data.as_slice()) {
                // NBD_REP_ACK.
                (1, _) => return Ok(Client { stream, size, cookie: 0, unanswered: BTreeSet::new() }),
                // NBD_REP_INFO with NBD_INFO_EXPORT.
                (3, [0, 0, rest @ ..]) => size = rest.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
                (refused, _) if refused >= 1 << 31 => return Err(wrong(format!("it is refused: {refused:#x}"))),
                _ => {}
            }
        }
    }

    /// Sends a request ("Request message").
    pub fn send(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.send_with(0, command, at, len, data)
    }

    fn send_with(&mut self, flags: u16, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        self.unanswered.insert(self.cookie);
        let len = u32::try_from(len).map_err(io::Error::other)?;
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &flags.to_be_bytes(),
            &(command as u16).to_be_bytes(),
            &self.cookie.to_be_bytes(),
            &at.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        self.stream.write_all(&[&head.concat(), data].concat())
    }

    /// Waits for the answer to one of the requests that were sent ("Simple reply message"): so many bytes if it was a
    /// read. What the disk says has failed is an error by its number.
    pub fn answer(&mut self, len: u64) -> io::Result<Vec<u8>> {
        let mut answer = [0; 16];
        self.stream.read_exact(&mut answer)?;
        let [m0, m1, m2, m3, e0, e1, e2, e3, cookie @ ..] = answer;
        if [m0, m1, m2, m3] != 0x6744_6698_u32.to_be_bytes() || !self.unanswered.remove(&u64::from_be_bytes(cookie)) {
            return Err(wrong("another request is answered".into()));
        }
        match i32::from_be_bytes([e0, e1, e2, e3]) {
            0 => {
                let mut data = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
                self.stream.read_exact(&mut data)?;
                Ok(data)
            }
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        self.send(command, at, len, data)?;
        self.answer(if command == Command::Read { len } else { 0 })
    }

    /// Reads bytes.
    pub fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.ask(Command::Read, at, length(len), &[])
    }

    /// Writes bytes.
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

/// What no server may say.
fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
