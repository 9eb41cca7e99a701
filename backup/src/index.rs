//! The index of a backup: which content its disk has, by digests in two levels.
//!
//! The index lists the digests of pages; a page lists the digests of its chunks. Holes have no digest at both levels
//! and cost nothing. Pages are stored as chunks are, so an incremental backup, or a clone, stores only those that
//! differ.
//!
//! The content digest of a backup is the digest of its size, its chunk size, its page size and its pages' digests: a
//! tree of two levels over the whole disk. Equal content of equal size on one target has the same digest.

use serde::{Deserialize, Serialize};

use crate::chunks::{Chunks, Fetched};
use crate::codec::{Codec, Kind};
use crate::error::{Error, damaged};
use crate::id::{Digest, Id};
use crate::log::Record;
use crate::name::{Name, prefix};
use crate::store::is_missing;
use crate::target::Target;

/// What a backup cost, in bytes of the disk unless noted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Statistics {
    /// Bytes of the disk that are done.
    pub done: u64,
    /// Bytes that were read from the source.
    pub read: u64,
    /// Bytes of zeroes, which are not stored.
    pub holes: u64,
    /// Bytes that were taken from the base without being read.
    pub unchanged: u64,
    /// Bytes that were read and found to be on the target.
    pub deduplicated: u64,
    /// Bytes of objects that were sent to the target.
    pub sent: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    pub record: Record,
    pub pages: Vec<Digest>,
    pub statistics: Statistics,
    /// Programs of the same version of the format that do not know the field ignore it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub properties: Option<String>,
}

impl Index {
    /// The digests of the chunks of a page; `None` if the page has no sound copy.
    pub(crate) fn page(&self, target: &Target, chunks: &Chunks, number: u64) -> Result<Option<Vec<Digest>>, Error> {
        let digest = usize::try_from(number).ok().and_then(|number| self.pages.get(number)).copied();
        let count = page_chunks(target, self.record.len, number);
        let Some(digest) = digest.filter(|digest| *digest != Digest::HOLE) else {
            return Ok(Some(vec![Digest::HOLE; count]));
        };
        match chunks.fetch(target, Kind::Page, &digest, count * 32)? {
            Fetched::Content(page) => Ok(Some(decode_page(&page))),
            Fetched::Gone | Fetched::Damaged => Ok(None),
        }
    }

    /// Reads and checks the index of a backup.
    pub fn read(target: &Target, id: Id) -> Result<Index, Error> {
        let name = Name::backup(id);
        let text = match target.unsealed(Kind::Index, &name) {
            Ok(text) => text,
            Err(Error::Store(error)) if is_missing(&error) => return Err(Error::NoBackup(id)),
            Err(error) => return Err(error),
        };
        let index: Index = serde_json::from_slice(&text).map_err(|error| damaged(&name, error.to_string()))?;
        let pages = index.record.len.div_ceil(target.page_span());
        if index.record.id != id || u64::try_from(index.pages.len()).ok() != Some(pages) {
            return Err(damaged(&name, "it is not of this backup"));
        }
        if content(&target.codec, target, index.record.len, &index.pages) != index.record.content {
            return Err(damaged(&name, "its pages are not those of its digest"));
        }
        Ok(index)
    }

    pub fn seal(&self, target: &Target) -> Result<(Name, Vec<u8>), Error> {
        let name = Name::backup(self.record.id);
        let text = serde_json::to_vec(self).map_err(|error| Error::Invalid(error.to_string()))?;
        let sealed = target.codec.seal(Kind::Index, &name, &text);
        Ok((name, sealed.map_err(|damage| Error::Invalid(format!("an index: {}", damage.0)))?))
    }
}

/// The digest of the content of a disk.
pub(crate) fn content(codec: &Codec, target: &Target, len: u64, pages: &[Digest]) -> Digest {
    let layout = target.layout();
    let mut tree = len.to_le_bytes().to_vec();
    tree.extend(layout.chunk.to_le_bytes());
    tree.extend(layout.page.to_le_bytes());
    pages.iter().for_each(|page| tree.extend(page.as_bytes()));
    codec.digest(Kind::Disk, &tree)
}

/// Number of chunks of a page.
pub(crate) fn page_chunks(target: &Target, len: u64, page: u64) -> usize {
    let begin = page * target.page_span();
    let chunks = len.saturating_sub(begin).min(target.page_span()).div_ceil(target.chunk());
    usize::try_from(chunks).unwrap_or(usize::MAX)
}

/// Number of bytes of the chunk at an offset: the last one may be shorter.
pub(crate) fn chunk_len(target: &Target, len: u64, at: u64) -> u64 {
    len.saturating_sub(at).min(target.chunk())
}

/// The bytes of a page; the second value is whether it is a hole.
pub(crate) fn encode_page(chunks: &[Digest]) -> (Vec<u8>, bool) {
    let bytes = chunks.iter().flat_map(|digest| *digest.as_bytes()).collect();
    (bytes, chunks.iter().all(|digest| *digest == Digest::HOLE))
}

/// The digests of the chunks of a page; of a length that was checked.
pub(crate) fn decode_page(bytes: &[u8]) -> Vec<Digest> {
    let digest = |bytes: &[u8]| bytes.first_chunk().map_or(Digest::HOLE, |bytes| Digest::from_bytes(*bytes));
    bytes.chunks_exact(32).map(digest).collect()
}

impl Target {
    /// All published backups, the first published one first.
    pub fn backups(&self) -> Result<Vec<Record>, Error> {
        Ok(crate::log::View::load(self)?.state.in_order())
    }

    /// What the indices on the target say, without the log: for a target whose log is damaged. Backups that were never
    /// published, or that are being removed, are among them. Also the indices that cannot be read.
    pub fn salvage(&self) -> Result<(Vec<Record>, Vec<Name>), Error> {
        let mut found = (Vec::new(), Vec::new());
        for (name, _) in self.store.list(prefix::BACKUPS)? {
            match name.backup_id().map(|id| Index::read(self, id)) {
                Some(Ok(index)) => found.0.push(index.record),
                Some(Err(Error::Store(error))) => return Err(error.into()),
                Some(Err(_)) => found.1.push(name),
                None => {}
            }
        }
        Ok((in_order(found.0), found.1))
    }

    /// What a backup cost when it was made.
    pub fn statistics(&self, backup: Id) -> Result<Statistics, Error> {
        self.details(backup).map(|(statistics, _)| statistics)
    }

    /// What a backup cost when it was made, and the properties that its maker has kept with it.
    pub fn details(&self, backup: Id) -> Result<(Statistics, Option<String>), Error> {
        Index::read(self, backup).map(|index| (index.statistics, index.properties))
    }
}

fn in_order(mut records: Vec<Record>) -> Vec<Record> {
    records.sort_by_key(|record| (record.time, record.id));
    records
}
