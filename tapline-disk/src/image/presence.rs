//! Which ranges of the disk are allocated in a single file, regardless of its parents.
//!
//! It reads the metadata of an image that its caller has locked, and none of its data. Writes to the image while this
//! is open may or may not be visible: query a range before writing there.

use control::ImageName;
use disk::size::in_memory;
use disk::{
    Damage, Damaged, FileId, FileOffset, Format, Image, Mapping, MetaBlock, ReadFault, RedoLog, Source, Span, Wait,
};
use uring::{ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::chain::open_through;
use crate::image::damage::why_unreadable;
use crate::image::replay_redo;
use crate::process::failure::Failure;

/// Where the data of an extent comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentSource {
    /// The file contains its data.
    Data,
    /// The file marks it as zero.
    Zero,
    /// It comes from the parent; without one it is zero.
    Parent,
}

/// The metadata of one image.
pub struct Presence {
    name: ImageName,
    file: ImageFile,
    image: Image,
    /// The redo log of its last process, if the image is only read.
    log: Option<RedoLog>,
}

impl Presence {
    /// Opens an image that is already locked. `options` decide whether metadata is read through the page cache.
    pub fn of(files: &Files, name: &ImageName, options: OpenOptions) -> Result<Presence, Failure> {
        let options = OpenOptions { write: false, lock: false, ..options };
        let (mut file, log) = replay_redo::to_read(files, name, options)?;
        let image = open_through(files, name, &mut file, log.as_ref())?;
        Ok(Presence { name: name.clone(), file, image, log })
    }

    /// Returns the extents of all of `window`, in order; adjacent ones of the same kind are merged.
    pub fn runs(&mut self, window: Span) -> Result<Vec<(Span, ExtentSource)>, Failure> {
        let mut runs: Vec<(Span, ExtentSource)> = Vec::new();
        let mut at = window.at;
        while at < window.end() {
            let left = Span { at, len: window.end() - at };
            let place = self.place(left)?;
            let len = place.len().min(left.len);
            if len == 0 {
                return Err(self.failed("its format gave no answer"));
            }
            let holds = match place {
                Mapping::Data { .. } | Mapping::Compressed { .. } | Mapping::Shared { .. } => ExtentSource::Data,
                Mapping::Damaged { at, raw, .. } => return Err(self.damaged(at, raw)),
                Mapping::Missing { at: place, has, len } => {
                    let (span, what) = (Span { at, len: len.min(left.len) }, Damaged::Missing(has));
                    let why = why_unreadable(Damage { file: FileId(0), span, at: place, what }, &self.name);
                    return Err(self
                        .failed(why)
                        .advise("copy the file again, or what can be read of it: `tapline image convert --salvage`"));
                }
                Mapping::Zero { .. } => ExtentSource::Zero,
                Mapping::Parent { .. } => ExtentSource::Parent,
            };
            match runs.last_mut() {
                Some((last, kind)) if *kind == holds => last.len += len,
                _ => runs.push((Span { at, len }, holds)),
            }
            at += len;
        }
        Ok(runs)
    }

    fn place(&mut self, span: Span) -> Result<Mapping, Failure> {
        loop {
            match self.image.map(span) {
                Ok(place) => return Ok(place),
                Err(Wait::Load(block)) => self.load(block)?,
                Err(Wait::Busy(_) | Wait::Round | Wait::NoSpace | Wait::Damaged(_)) => {
                    return Err(self.failed("its format would have to write"));
                }
            }
        }
    }

    fn load(&mut self, block: MetaBlock) -> Result<(), Failure> {
        let mut bytes = vec![0; in_memory(block.len.into())];
        let here = Source::len(&self.file).saturating_sub(block.at.0);
        let here = in_memory(here).min(bytes.len());
        // Like an engine, it reads zeroes beyond the end of the file.
        let (found, _) = bytes.split_at_mut(here);
        let read: Result<(), ReadFault> = self.file.read_at(block.at, found);
        read.map_err(|error| self.failed(error))?;
        if let Some(owed) = self.log.as_ref().and_then(RedoLog::owed) {
            owed.patch(block.at, &mut bytes);
        }
        self.image.load(block, &bytes).map_err(|corrupt| {
            self.failed(format!("the metadata at byte {} of the file is invalid", corrupt.at))
                .advise(format!("`tapline image check {}` lists the problems", self.name))
        })
    }

    fn damaged(&self, at: FileOffset, raw: u64) -> Failure {
        self.failed(format!("the entry {raw:#018x} at byte {at} of the file is invalid"))
            .advise(format!("`tapline image check {}` lists the problems", self.name))
    }

    fn failed(&self, why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Failure {
        Failure::new(format!("look up the allocation of {}", self.name), why)
    }
}
