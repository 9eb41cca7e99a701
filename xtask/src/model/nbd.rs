//! An NBD client that outlives its server: a request may be sent without waiting for what comes of it, and a connection
//! that ends is an answer like others.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// How long an answer may take; a disk that needs so long is stuck.
const PATIENCE: Duration = Duration::from_secs(120);

const OPTION_GO: u32 = 7;

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
    handle: u64,
    /// What the disk is said to have.
    pub size: u64,
}

impl Client {
    /// Connects to a disk that is plugged.
    pub fn connect(socket: &Path) -> io::Result<Client> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        // NBD protocol, "Fixed newstyle negotiation".
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
                (1, _) => return Ok(Client { stream, handle: 0, size }),
                // NBD_REP_INFO with NBD_INFO_EXPORT.
                (3, [0, 0, rest @ ..]) => size = rest.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte)),
                (refused, _) if refused >= 1 << 31 => return Err(wrong(format!("it is refused: {refused:#x}"))),
                _ => {}
            }
        }
    }

    /// Sends a request.
    pub fn send(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<()> {
        self.handle += 1;
        let len = u32::try_from(len).map_err(io::Error::other)?;
        let head = [
            &0x2560_9513_u32.to_be_bytes()[..],
            &0_u16.to_be_bytes(),
            &(command as u16).to_be_bytes(),
            &self.handle.to_be_bytes(),
            &at.to_be_bytes(),
            &len.to_be_bytes(),
        ];
        self.stream.write_all(&[&head.concat(), data].concat())
    }

    /// Waits for the answer to the request that was sent last: bytes if it was a read.
    pub fn answer(&mut self, len: u64) -> io::Result<Vec<u8>> {
        let mut answer = [0; 16];
        self.stream.read_exact(&mut answer)?;
        let (head, handle) = answer.split_at(8);
        if handle != self.handle.to_be_bytes() || head.get(..4) != Some(&0x6744_6698_u32.to_be_bytes()) {
            return Err(wrong("another request is answered".into()));
        }
        if head.get(4..) != Some(&[0; 4]) {
            return Err(wrong(format!("it has failed: {head:?}")));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    /// Asks, and waits for the answer.
    pub fn ask(&mut self, command: Command, at: u64, len: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        self.send(command, at, len, data)?;
        self.answer(if command == Command::Read { len } else { 0 })
    }
}

/// What no server may say.
fn wrong(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
