//! Packs: objects into which frames of chunks and pages are gathered, with a table of them in front.
//!
//! Magic, length of the sealed table, table, frames. The table is read with one call, and says how long the object is:
//! one that is cut off is noticed without reading it. Knows nothing of backups.

use crate::codec::{Codec, Damage, Kind};
use crate::id::{Digest, Id};
use crate::name::Name;

const MAGIC: [u8; 8] = *b"taplpack";
/// Magic and the length of the table.
const HEAD: usize = 12;
/// Kind, digest, length of the frame, length of its content.
const ROW: usize = 41;

/// A chunk of 4 MiB; a page has less.
const CONTENT_MAX: u32 = 4 << 20;

/// A table of 400 frames is read with the first call.
pub(crate) const FIRST_READ: u64 = 16 << 10;

/// A frame in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub kind: Kind,
    pub digest: Digest,
    /// Offset in the object.
    pub at: u64,
    pub len: u32,
    /// Length of the content.
    pub content: u32,
}

/// Gathers frames.
#[derive(Default)]
pub(crate) struct Builder {
    rows: Vec<u8>,
    frames: Vec<u8>,
}

impl Builder {
    /// Adds a frame of `content` bytes of content: at most a chunk of 4 MiB.
    pub fn push(&mut self, kind: Kind, digest: &Digest, frame: &[u8], content: u32) {
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        self.rows.push(kind.code());
        self.rows.extend(digest.as_bytes());
        self.rows.extend(len.to_le_bytes());
        self.rows.extend(content.to_le_bytes());
        self.frames.extend(frame);
    }

    /// Bytes of frames.
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// The object, under a new name; empty again afterwards.
    pub fn finish(&mut self, codec: &Codec) -> Result<(Name, Vec<u8>), Damage> {
        let name = Name::pack(Id::random());
        let table = codec.seal(Kind::Toc, &name, &std::mem::take(&mut self.rows))?;
        let len = u32::try_from(table.len()).map_err(|_| Damage("its table is too long"))?;
        let frames = std::mem::take(&mut self.frames);
        let mut object = Vec::with_capacity(HEAD + table.len() + frames.len());
        object.extend(MAGIC);
        object.extend(len.to_le_bytes());
        object.extend(table);
        object.extend(frames);
        Ok((name, object))
    }
}

/// Bytes from the start of a pack that contain its table; `head` are its first bytes.
pub(crate) fn table_end(head: &[u8]) -> Result<u64, Damage> {
    let (head, _) = head.split_first_chunk::<HEAD>().ok_or(Damage("it is cut off"))?;
    let [magic @ .., l0, l1, l2, l3] = head;
    if *magic != MAGIC {
        return Err(Damage("it does not begin as a pack"));
    }
    Ok(u64::from(u32::from_le_bytes([*l0, *l1, *l2, *l3])) + 12)
}

/// The table of a pack, from bytes up to [`table_end`], and the size that the object must have.
pub(crate) fn table(codec: &Codec, name: &Name, bytes: &[u8]) -> Result<(Vec<Row>, u64), Damage> {
    let sealed = bytes.get(HEAD..).ok_or(Damage("it is cut off"))?;
    let plain = codec.unseal(Kind::Toc, name, sealed)?;
    let mut at = u64::try_from(bytes.len()).map_err(|_| Damage("it is too long"))?;
    let invalid = Damage("its table is invalid");
    if plain.len() % ROW != 0 {
        return Err(invalid);
    }
    let mut table = Vec::with_capacity(plain.len() / ROW);
    for row in plain.chunks_exact(ROW) {
        let (kind, rest) = row.split_first().ok_or(invalid.clone())?;
        let (digest, lens) = rest.split_first_chunk::<32>().ok_or(invalid.clone())?;
        let kind = Kind::of_frame(*kind).ok_or(invalid.clone())?;
        let (len, content) = lens.split_first_chunk::<4>().ok_or(invalid.clone())?;
        let len = u32::from_le_bytes(*len);
        let content = content.first_chunk().map(|content| u32::from_le_bytes(*content));
        let content = content.filter(|&content| content <= CONTENT_MAX).ok_or(invalid.clone())?;
        table.push(Row { kind, digest: Digest::from_bytes(*digest), at, len, content });
        at += u64::from(len);
    }
    Ok((table, at))
}
