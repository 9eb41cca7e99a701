//! Ring entries and responses of a front end. The offsets are from io/blkif.h, independent of the server's.

#![allow(dead_code, reason = "each test uses only part of it")]
#![allow(clippy::cast_possible_truncation, reason = "the test's own numbers are small")]
#![allow(clippy::len_without_is_empty, reason = "an entry is never empty")]

use memory::Shared;
use xen::GrantRef;

pub const READ: u8 = 0;
pub const WRITE: u8 = 1;
pub const INDIRECT: u8 = 6;

/// The compiler ABI of the front end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Abi {
    Native,
    X86_32,
    X86_64,
}

impl Abi {
    pub fn protocol(self) -> Option<&'static str> {
        match self {
            Abi::Native => None,
            Abi::X86_32 => Some("x86_32-abi"),
            Abi::X86_64 => Some("x86_64-abi"),
        }
    }

    /// Size of an entry.
    pub fn len(self) -> usize {
        if self == Abi::X86_32 { 108 } else { 112 }
    }

    /// Size of a response.
    pub fn response_len(self) -> usize {
        if self == Abi::X86_32 { 12 } else { 16 }
    }

    /// Number of entries in a ring of `pages` pages.
    pub fn slots(self, pages: usize) -> u32 {
        1 << ((pages * 4096 - 64) / self.len()).ilog2()
    }

    /// Offset in the ring of the entry with this index.
    pub fn offset(self, slots: u32, index: u32) -> usize {
        64 + (index & (slots - 1)) as usize * self.len()
    }

    /// Writes an entry at offset `at`, for 64-bit compilers with padding before `id`.
    pub fn write(self, ring: &Shared, at: usize, entry: &Entry) {
        if self == Abi::X86_32 {
            return ring.write(at, *entry).unwrap();
        }
        let mut bytes = [0; 112];
        bytes[..4].copy_from_slice(&entry[..4]);
        bytes[8..].copy_from_slice(&entry[4..]);
        ring.write(at, bytes).unwrap();
    }
}

/// An entry in 32-bit layout; the padding is inserted when it is written.
pub type Entry = [u8; 108];

fn entry(head: [u8; 4], id: u64, sector: u64, rest: &[u8]) -> Entry {
    let mut entry = [0; 108];
    entry[..4].copy_from_slice(&head);
    entry[4..12].copy_from_slice(&id.to_le_bytes());
    entry[12..20].copy_from_slice(&sector.to_le_bytes());
    entry[20..20 + rest.len()].copy_from_slice(rest);
    entry
}

pub fn segments(segments: &[(GrantRef, u8, u8)]) -> Vec<u8> {
    let one = |&(page, first, last): &(GrantRef, u8, u8)| {
        let [a, b, c, d] = page.0.to_le_bytes();
        [a, b, c, d, first, last, 0, 0]
    };
    segments.iter().flat_map(one).collect()
}

pub fn transfer(operation: u8, id: u64, sector: u64, parts: &[(GrantRef, u8, u8)]) -> Entry {
    entry([operation, parts.len() as u8, 0, 0], id, sector, &segments(parts))
}

pub fn discard(flag: u8, id: u64, sector: u64, count: u64) -> Entry {
    entry([5, flag, 0, 0], id, sector, &count.to_le_bytes())
}

pub fn indirect(operation: u8, id: u64, sector: u64, page: GrantRef, count: u16) -> Entry {
    let [low, high] = count.to_le_bytes();
    let mut rest = vec![0; 4];
    rest.extend(page.0.to_le_bytes());
    entry([6, operation, low, high], id, sector, &rest)
}

/// A response: id, operation, status.
pub type Response = (u64, u8, i16);

pub fn parse_response(bytes: &[u8; 12]) -> Response {
    (u64::from_le_bytes(bytes[..8].try_into().unwrap()), bytes[8], i16::from_le_bytes([bytes[10], bytes[11]]))
}

/// The ring configuration of a front end.
#[derive(Clone, Copy, Debug)]
pub struct Rings {
    pub abi: Abi,
    pub order: u32,
    pub queues: u32,
    pub persistent: bool,
}

impl Default for Rings {
    fn default() -> Rings {
        Rings { abi: Abi::X86_64, order: 0, queues: 1, persistent: false }
    }
}
