//! A small NBD client, with one request at a time, and the versions of all blocks of a disk to check reads.

#![allow(dead_code, reason = "each test uses its part")]

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The unit of what is written: one version a block.
pub const BLOCK: usize = 4096;

/// Whoever reads and writes a disk.
pub trait Peer {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()>;
    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>>;
    fn flush(&mut self) -> io::Result<()>;
}

/// A connection.
pub struct Nbd {
    stream: UnixStream,
    pub size: u64,
    cookie: u64,
}

impl Nbd {
    pub fn connect(path: &Path) -> io::Result<Nbd> {
        let mut stream = UnixStream::connect(path)?;
        // The time limit for a reply.
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60)))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        // Fixed newstyle without zeroes; the default export.
        stream.write_all(&[&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 1, 0, 0, 0, 0]].concat())?;
        let mut export = [0; 10];
        stream.read_exact(&mut export)?;
        let size = u64::from_be_bytes(export[..8].try_into().unwrap());
        Ok(Nbd { stream, size, cookie: 0 })
    }

    /// Asks for a write, and does not wait for the answer.
    pub fn begin_write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.send(1, at, u32::try_from(data.len()).unwrap(), data)
    }

    /// Has a range read as zero.
    pub fn zero(&mut self, at: u64, len: u32) -> io::Result<()> {
        self.ask(6, at, len, &[])
    }

    fn send(&mut self, kind: u16, at: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.cookie += 1;
        let head = [&0x2560_9513u32.to_be_bytes()[..], &[0, 0], &kind.to_be_bytes(), &self.cookie.to_be_bytes()];
        let request = [&head.concat()[..], &at.to_be_bytes(), &len.to_be_bytes(), data].concat();
        self.stream.write_all(&request)
    }

    fn ask(&mut self, kind: u16, at: u64, len: u32, data: &[u8]) -> io::Result<()> {
        self.send(kind, at, len, data)?;
        self.answer()
    }

    /// Waits for the answer to one of the requests that were only begun, all of them writes.
    pub fn answer(&mut self) -> io::Result<()> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply)?;
        match u32::from_be_bytes(reply[4..8].try_into().unwrap()) {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(i32::try_from(error).unwrap())),
        }
    }
}

impl Peer for Nbd {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        self.ask(1, at, u32::try_from(data.len()).unwrap(), data)
    }

    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        self.ask(0, at, u32::try_from(len).unwrap(), &[])?;
        let mut data = vec![0; len];
        self.stream.read_exact(&mut data)?;
        Ok(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.ask(3, 0, 0, &[])
    }
}

/// Numbers without pattern, from a seed.
pub struct Dice(pub u64);

impl Dice {
    pub fn throw(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % below
    }
}

/// The possible versions of a block: at least the last completed one, whatever has happened to the disk's process, and
/// at most the last one written.
#[derive(Clone)]
pub struct Versions {
    /// The distance of the blocks, large enough to spread them over the image.
    stride: u64,
    answered: Vec<u64>,
    asked: Vec<u64>,
    next: u64,
}

impl Versions {
    pub fn new(blocks: usize, stride: u64) -> Versions {
        let none = vec![0; blocks];
        Versions { stride, answered: none.clone(), asked: none, next: 1 }
    }

    /// Writes the next version of some block, or flushes.
    pub fn step(&mut self, peer: &mut impl Peer, dice: &mut Dice) -> io::Result<()> {
        if dice.throw(16) == 0 {
            return peer.flush();
        }
        let block = usize::try_from(dice.throw(u64::try_from(self.asked.len()).unwrap())).unwrap();
        let version = self.next;
        self.next += 1;
        self.asked[block] = version;
        peer.write(self.at(block), &version.to_ne_bytes().repeat(BLOCK / 8))?;
        self.answered[block] = version;
        Ok(())
    }

    /// Reads every block; what it holds must be of one version, and one that it may have.
    pub fn check(&mut self, peer: &mut impl Peer) {
        for block in 0..self.asked.len() {
            let found = peer.read(self.at(block), BLOCK).unwrap();
            let version = u64::from_ne_bytes(found[..8].try_into().unwrap());
            assert!(found.chunks(8).all(|word| word == version.to_ne_bytes()), "block {block} is torn");
            let may = self.answered[block]..=self.asked[block];
            assert!(may.contains(&version), "block {block} holds version {version}, not one of {may:?}");
            // From now on this is what it holds.
            (self.answered[block], self.asked[block]) = (version, version);
        }
        peer.flush().unwrap();
    }

    fn at(&self, block: usize) -> u64 {
        u64::try_from(block).unwrap() * self.stride
    }
}
