//! Which chunks and pages are on a target, and where: the tables of all packs.
//!
//! Knows nothing about backups. 60 bytes of memory for each chunk. A pack that is damaged, or that a prune is going to
//! delete, contributes nothing: a writer then sends its chunks again.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::codec::{Compressor, Damage, Kind};
use crate::error::Error;
use crate::id::Digest;
use crate::name::{Name, prefix};
use crate::pack::{self, Builder, Row};
use crate::planted::Bug;
use crate::store::{StoreError, is_missing};
use crate::target::Target;

/// Where a frame is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Index in [`Chunks::packs`].
    pub pack: u32,
    pub at: u32,
    pub len: u32,
    /// Length of the content.
    pub content: u32,
    pub kind: Kind,
}

/// All frames of a target.
#[derive(Default)]
pub(crate) struct Chunks {
    /// Packs that were read, in the order of names.
    pub packs: Vec<Name>,
    /// The first place of each frame.
    pub places: HashMap<Digest, Place>,
    /// Further copies: two hosts sent the same chunk, or a prune moved it.
    copies: BTreeMap<Digest, Vec<Place>>,
    /// Packs whose table is damaged or that are cut off.
    pub damaged: Vec<(Name, Damage)>,
}

impl Chunks {
    /// Reads the tables of all packs but those that are left out: the doomed ones, for writers. What is deleted
    /// meanwhile is left out, too: each pack in the result existed after the call began.
    pub fn load(target: &Target, left_out: impl Fn(&Name) -> bool) -> Result<Chunks, Error> {
        let mut chunks = Chunks::default();
        for (name, size) in target.store.list(prefix::PACKS)?.into_iter().filter(|(name, _)| name.is_pack()) {
            if left_out(&name) {
                continue;
            }
            match read_table(target, &name, size) {
                Ok(Ok(rows)) => chunks.insert(name, &rows),
                Ok(Err(damage)) => chunks.damaged.push((name, damage)),
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(chunks)
    }

    fn insert(&mut self, name: Name, rows: &[Row]) {
        let Ok(pack) = u32::try_from(self.packs.len()) else { return };
        self.packs.push(name);
        for row in rows {
            let Ok(at) = u32::try_from(row.at) else { return };
            let place = Place { pack, at, len: row.len, content: row.content, kind: row.kind };
            match self.places.entry(row.digest) {
                std::collections::hash_map::Entry::Vacant(vacant) => {
                    vacant.insert(place);
                }
                std::collections::hash_map::Entry::Occupied(_) => {
                    self.copies.entry(row.digest).or_default().push(place);
                }
            }
        }
    }

    pub fn contains(&self, digest: &Digest) -> bool {
        self.places.contains_key(digest)
    }

    /// The name of the pack of a place.
    pub fn pack(&self, place: &Place) -> Option<&Name> {
        self.packs.get(usize::try_from(place.pack).ok()?)
    }

    /// All places of a frame.
    pub fn copies<'a>(&'a self, digest: &Digest) -> impl Iterator<Item = &'a Place> + use<'a> {
        self.places.get(digest).into_iter().chain(self.copies.get(digest).into_iter().flatten())
    }

    /// Frames with more than one copy.
    pub fn copied(&self) -> impl Iterator<Item = &Digest> {
        self.copies.keys()
    }

    /// Whether a copy is sound; false if it is gone.
    pub fn is_sound(&self, target: &Target, digest: &Digest, place: &Place) -> Result<bool, Error> {
        let Some(name) = self.pack(place) else { return Ok(false) };
        let at = u64::from(place.at);
        let len = usize::try_from(place.content).unwrap_or(usize::MAX);
        match target.store.get(name, at..at + u64::from(place.len)) {
            Ok(frame) => Ok(target.codec.unframe(place.kind, digest, len, &frame).is_ok()),
            Err(error) if is_missing(&error) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The content of a frame, from the first sound copy.
    pub fn fetch(&self, target: &Target, kind: Kind, digest: &Digest, len: usize) -> Result<Fetched, Error> {
        let mut absent = Fetched::Gone;
        for place in self.copies(digest) {
            let Some(name) = self.pack(place) else { continue };
            let at = u64::from(place.at);
            match target.store.get(name, at..at + u64::from(place.len)) {
                Ok(frame) => match target.codec.unframe(kind, digest, len, &frame) {
                    Ok(content) => return Ok(Fetched::Content(content)),
                    Err(_) => absent = Fetched::Damaged,
                },
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(absent)
    }
}

/// Result of reading a frame.
pub(crate) enum Fetched {
    Content(Vec<u8>),
    /// There is no pack with it, any more or yet.
    Gone,
    /// No copy is sound.
    Damaged,
}

/// The table of a pack of this size.
pub(crate) fn read_table(target: &Target, name: &Name, size: u64) -> Result<Result<Vec<Row>, Damage>, StoreError> {
    let mut head = target.store.get(name, 0..pack::FIRST_READ)?;
    let end = match pack::table_end(&head) {
        Ok(end) if end <= size => end,
        Ok(_) => return Ok(Err(Damage("it is cut off"))),
        Err(damage) => return Ok(Err(damage)),
    };
    let read = u64::try_from(head.len()).unwrap_or(u64::MAX);
    if end > read {
        head.extend(target.store.get(name, read..end)?);
    }
    head.truncate(usize::try_from(end).unwrap_or(usize::MAX));
    Ok(pack::table(&target.codec, name, &head).and_then(|(rows, full)| {
        let is_whole = full == size || target.has(Bug::CutOffAccepted);
        if is_whole { Ok(rows) } else { Err(Damage("it is not as long as its table says")) }
    }))
}

/// A frame to be written.
pub(crate) struct Frame<'a> {
    pub kind: Kind,
    pub digest: &'a Digest,
    pub bytes: &'a [u8],
    /// Length of the content.
    pub content: u32,
}

/// Packs that are being written: frames go in, objects are put when they are full.
pub(crate) struct Packer {
    builder: Builder,
    compressor: Compressor,
    /// Frames that were pushed, not necessarily put.
    fresh: HashSet<Digest>,
    /// Packs that were put, or begun to be.
    pub written: Vec<Name>,
    pub bytes_sent: u64,
    /// A put in progress.
    putting: Option<std::thread::JoinHandle<Result<(), Error>>>,
    /// Whether to put in a thread of its own.
    is_parallel: bool,
}

impl Packer {
    pub fn new(is_parallel: bool) -> Packer {
        Packer {
            builder: Builder::default(),
            compressor: Compressor::new(),
            fresh: HashSet::new(),
            written: Vec::new(),
            bytes_sent: 0,
            putting: None,
            is_parallel,
        }
    }

    /// Adds a frame of `content` bytes, unless it was added before; returns whether.
    pub fn push(&mut self, target: &Target, frame: &Frame<'_>) -> Result<bool, Error> {
        if !self.fresh.insert(*frame.digest) {
            return Ok(false);
        }
        self.builder.push(frame.kind, frame.digest, frame.bytes, frame.content);
        let full = usize::try_from(target.layout().pack).unwrap_or(usize::MAX);
        if self.builder.len() >= full {
            self.put(target)?;
        }
        Ok(true)
    }

    /// Adds a page of an index to the pack under construction, or to the next one.
    pub fn push_page(&mut self, target: &Target, digest: &Digest, page: &[u8]) -> Result<(), Error> {
        let bytes = target.codec.frame(&mut self.compressor, Kind::Page, digest, page);
        let bytes = bytes.map_err(|damage| Error::Invalid(format!("a page of an index: {}", damage.0)))?;
        let content = u32::try_from(page.len()).unwrap_or(u32::MAX);
        self.push(target, &Frame { kind: Kind::Page, digest, bytes: &bytes, content }).map(|_| ())
    }

    /// Puts what is left; all packs are durable when it returns.
    pub fn finish(&mut self, target: &Target) -> Result<(), Error> {
        if self.builder.len() > 0 {
            self.put(target)?;
        }
        self.wait()
    }

    fn put(&mut self, target: &Target) -> Result<(), Error> {
        let packed = self.builder.finish(&target.codec);
        let (name, object) = packed.map_err(|damage| Error::Invalid(format!("a pack: {}", damage.0)))?;
        self.wait()?;
        self.bytes_sent += u64::try_from(object.len()).unwrap_or(0);
        self.written.push(name.clone());
        let store = std::sync::Arc::clone(&target.store);
        let put = move || match crate::store::put_own(&*store, &name, &object) {
            Ok(true) => Ok(()),
            Ok(false) => Err(crate::error::damaged(&name, "another object has its name")),
            Err(error) => Err(error.into()),
        };
        if self.is_parallel {
            self.putting = Some(std::thread::spawn(put));
            Ok(())
        } else {
            put()
        }
    }

    fn wait(&mut self) -> Result<(), Error> {
        match self.putting.take().map(std::thread::JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Packer {
    fn drop(&mut self) {
        // A put is never left running behind a backup that has ended; what it says does not matter any more.
        match self.putting.take().map(std::thread::JoinHandle::join) {
            None | Some(_) => {}
        }
    }
}
