//! The log of a VHDX: whether it holds an entry ([MS-VHDX] 2.3).
//!
//! A header names the log of a writer before anything is logged, and still names it when all entries are applied. An
//! entry is valid if it carries that name, and its checksum is right. Nothing is replayed here.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::super::{corrupt, read};
use super::{MIB, RawHeader, is_sound};
use crate::size::in_memory;
use crate::{ImageError, Source};

/// Entries begin at, and have, a multiple of this many bytes.
const SECTOR: u64 = 4096;
/// Hyper-V and QEMU have logs of 1 MiB; one as large as this is no more than a second's work.
const LOG_MAX: u64 = 64 << 20;

/// 2.3.1.1, "Entry Header".
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, KnownLayout, Immutable, Unaligned)]
struct RawEntry {
    signature: [u8; 4],
    checksum: U32,
    len: U32,
    tail: U32,
    sequence: U64,
    descriptors: U32,
    reserved: U32,
    log: [u8; 16],
    flushed_len: U64,
    last_len: U64,
}

const _: () = assert!(size_of::<RawEntry>() == 64);

/// Whether the log that `header` names holds a valid entry. One that would take too long to check is taken for valid.
pub(super) fn holds_entry(source: &mut dyn Source, header: &RawHeader) -> Result<bool, ImageError> {
    let (at, len) = (header.log_at.get(), u64::from(header.log_len.get()));
    if at < MIB || at % MIB != 0 || len == 0 || len % MIB != 0 || len > LOG_MAX {
        return corrupt(at, "the log is not where it can be");
    }
    let log = read(source, at, in_memory(len), "log")?;
    // Each byte is checked once in a log that a program wrote.
    let mut left = 2 * log.len();
    for first in (0..log.len()).step_by(in_memory(SECTOR)) {
        let entry = log.get(first..).and_then(|rest| RawEntry::read_from_prefix(rest).ok());
        let Some((entry, _)) = entry else { continue };
        let len = in_memory(entry.len.get().into());
        let is_one = entry.signature == *b"loge" && entry.log == header.log && entry.sequence.get() > 0;
        if !is_one || len == 0 || len % in_memory(SECTOR) != 0 || len > log.len() {
            continue;
        }
        let Some(rest) = left.checked_sub(len) else { return Ok(true) };
        left = rest;
        // 2.3: the log is circular.
        let bytes: Vec<u8> = log.iter().cycle().skip(first).take(len).copied().collect();
        if is_sound(&bytes) {
            return Ok(true);
        }
    }
    Ok(false)
}
