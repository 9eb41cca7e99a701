//! Clients that read and write a disk, and the versions of all blocks of the disk to check reads.

#![allow(dead_code, reason = "each test uses its part")]

use std::io;

use fastrand::Rng;

pub use testkit::nbd::Client as Nbd;

/// The unit of writes: one version per block.
pub const BLOCK: usize = 4096;

/// A client that reads and writes a disk.
pub trait Peer {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()>;
    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>>;
    fn flush(&mut self) -> io::Result<()>;
}

impl Peer for Nbd {
    fn write(&mut self, at: u64, data: &[u8]) -> io::Result<()> {
        Nbd::write(self, at, data)
    }

    fn read(&mut self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        Nbd::read(self, at, len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Nbd::flush(self)
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
    pub fn step(&mut self, peer: &mut impl Peer, random: &mut Rng) -> io::Result<()> {
        if random.u64(..16) == 0 {
            return peer.flush();
        }
        let block = random.usize(..self.asked.len());
        let version = self.next;
        self.next += 1;
        self.asked[block] = version;
        peer.write(self.at(block), &version.to_ne_bytes().repeat(BLOCK / 8))?;
        self.answered[block] = version;
        Ok(())
    }

    /// Reads every block, and checks that its contents are one possible version.
    pub fn check(&mut self, peer: &mut impl Peer) {
        for block in 0..self.asked.len() {
            let found = peer.read(self.at(block), BLOCK).unwrap();
            let version = u64::from_ne_bytes(found[..8].try_into().unwrap());
            assert!(found.chunks(8).all(|word| word == version.to_ne_bytes()), "block {block} is torn");
            let may = self.answered[block]..=self.asked[block];
            assert!(may.contains(&version), "block {block} holds version {version}, not one of {may:?}");
            // From now on this is its only possible version.
            (self.answered[block], self.asked[block]) = (version, version);
        }
        peer.flush().unwrap();
    }

    fn at(&self, block: usize) -> u64 {
        u64::try_from(block).unwrap() * self.stride
    }
}
