//! What a partial file records about its download, in the file itself, behind the bytes of the object: which object it
//! is of, and how many bytes from its beginning are durable. It is cut off when the download is complete.
//!
//! There are two places for the record, used in turn; each has a digest of itself, so one that was torn by a power loss
//! is not taken for the latest. Invariant: what a record says is durable was synced before the record was written.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::identity::Identity;

/// The size of a place: a URL of the greatest length and a validator fit.
const PLACE: u64 = 8192;
const PLACES: u64 = 2;
const MAGIC: &[u8; 8] = b"TAPLPART";
const DIGEST: usize = 32;

/// What is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Counts the records of a file.
    number: u64,
    url: String,
    len: u64,
    validator: String,
    /// The bytes from the beginning that are durable.
    done: u64,
}

/// The record of a file that is being filled.
#[derive(Debug)]
pub(crate) struct Partial<'a> {
    file: &'a File,
    last: Record,
}

impl<'a> Partial<'a> {
    /// Takes up what the file records; empties it if that is of another object, or nothing.
    pub(crate) fn take_up(file: &'a File, url: &str, identity: &Identity) -> io::Result<Partial<'a>> {
        let (len, validator) = (identity.len, identity.validator.to_string());
        let new = Record { number: 0, url: url.to_owned(), len, validator, done: 0 };
        let found = (0..PLACES).filter_map(|place| read(file, len, place)).max_by_key(|record| record.number);
        let same = |record: &Record| {
            record.url == new.url && record.len == len && record.validator == new.validator && record.done <= len
        };
        if let Some(last) = found.filter(same) {
            return Ok(Partial { file, last });
        }
        file.set_len(0)?;
        file.set_len(place_at(len, PLACES))?;
        Ok(Partial { file, last: new })
    }

    /// The bytes from the beginning that are durable.
    pub(crate) fn done(&self) -> u64 {
        self.last.done
    }

    /// Makes the first `done` bytes durable, and records that.
    pub(crate) fn record(&mut self, done: u64) -> io::Result<()> {
        self.file.sync_data()?;
        let next = Record { number: self.last.number + 1, done, ..self.last.clone() };
        let text = serde_json::to_vec(&next)?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend(u32::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes());
        bytes.extend(&text);
        bytes.extend(digest(&SHA256, &bytes).as_ref());
        if bytes.len() > usize::try_from(PLACE).unwrap_or(usize::MAX) {
            return Err(io::Error::other("the record of a partial file is too long"));
        }
        self.file.write_all_at(&bytes, place_at(next.len, next.number % PLACES))?;
        self.file.sync_data()?;
        self.last = next;
        Ok(())
    }

    /// Makes it a complete file: durable, and without a record.
    pub(crate) fn complete(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.file.set_len(self.last.len)?;
        self.file.sync_all()
    }
}

/// Where a place begins in the file.
fn place_at(len: u64, place: u64) -> u64 {
    len.next_multiple_of(PLACE) + place * PLACE
}

fn read(file: &File, len: u64, place: u64) -> Option<Record> {
    let at = place_at(len, place);
    let mut head = [0; 12];
    file.read_exact_at(&mut head, at).ok()?;
    let (magic, size) = head.split_first_chunk::<8>()?;
    let size = u64::from(u32::from_le_bytes(size.try_into().ok()?));
    if magic != MAGIC || size > PLACE {
        return None;
    }
    let mut bytes = vec![0; head.len() + usize::try_from(size).ok()? + DIGEST];
    file.read_exact_at(&mut bytes, at).ok()?;
    let (said, of) = bytes.split_last_chunk::<DIGEST>()?;
    if digest(&SHA256, said).as_ref() != of {
        return None;
    }
    serde_json::from_slice(said.get(head.len()..)?).ok()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::identity::Validator;

    fn identity(len: u64, tag: &str) -> Identity {
        Identity { len, validator: Validator::ETag(tag.to_owned()) }
    }

    #[test]
    fn only_a_record_of_the_same_object_is_taken_up() {
        let file = tempfile::tempfile().unwrap();
        let (url, object) = ("https://host/a", identity(100_000, "\"a\""));
        let mut partial = Partial::take_up(&file, url, &object).unwrap();
        partial.record(10).unwrap();
        partial.record(20).unwrap();
        assert_eq!(Partial::take_up(&file, url, &object).unwrap().done(), 20);
        for (url, other) in
            [("https://host/b", object.clone()), (url, identity(100_000, "\"b\"")), (url, identity(100_001, "\"a\""))]
        {
            Partial::take_up(&file, "https://host/a", &object).unwrap().record(30).unwrap();
            assert_eq!(Partial::take_up(&file, url, &other).unwrap().done(), 0);
            assert_eq!(Partial::take_up(&file, "https://host/a", &object).unwrap().done(), 0, "the file was emptied");
        }
    }

    #[test]
    fn a_torn_record_leaves_the_one_before() {
        let file = tempfile::tempfile().unwrap();
        let (url, object) = ("https://host/a", identity(5000, "\"a\""));
        let mut partial = Partial::take_up(&file, url, &object).unwrap();
        partial.record(10).unwrap();
        partial.record(20).unwrap();
        file.write_all_at(b"x", place_at(5000, 0) + 40).unwrap();
        assert_eq!(Partial::take_up(&file, url, &object).unwrap().done(), 10);
    }

    #[test]
    fn a_complete_file_has_no_record() {
        let file = tempfile::tempfile().unwrap();
        let (url, object) = ("https://host/a", identity(5000, "\"a\""));
        let mut partial = Partial::take_up(&file, url, &object).unwrap();
        partial.record(5000).unwrap();
        partial.complete().unwrap();
        assert_eq!(file.metadata().unwrap().len(), 5000);
        assert_eq!(Partial::take_up(&file, url, &object).unwrap().done(), 0);
    }
}
