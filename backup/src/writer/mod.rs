//! A backup: from a source to the log.
//!
//! 1. Read the log and the tables of packs. A crash leaves nothing.
//! 2. Put packs with chunks and pages that are not there. A crash leaves orphans: the next backup uses them, or a prune
//!    removes them.
//! 3. Put the index. A crash leaves an orphan.
//! 4. Check that nothing that the index refers to was given up meanwhile; if so, begin again with 1.
//! 5. Append the backup to the log. From here on it counts.
//!
//! Why 4 and 5 are enough against prunes of other hosts is at the head of `log.rs`.

mod changed;
mod pass;

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::chunks::Chunks;
use crate::error::Error;
use crate::id::{Digest, Id};
use crate::index::{Index, Statistics};
use crate::log::{Appended, Change, MachineMoment, Record, View};
use crate::name::{Name, prefix};
use crate::planted::Bug;
use crate::source::Source;
use crate::store::is_missing;
use crate::target::Target;

use changed::Changed;
use pass::Pass;

/// Each repetition needs a prune of another host that gives up chunks of this very backup.
const PASSES: u32 = 8;

/// Each repetition means that another host has published a backup at that moment.
const APPENDS: u32 = 1000;

/// A backup to be made.
pub struct Job<'a> {
    /// The disk, such as by its UUID.
    pub disk: Id,
    /// The name of the disk, for lists.
    pub label: &'a str,
    /// The moment of the content, in seconds since 1970.
    pub time: u64,
    /// The moment that it is a part of, with backups of other disks.
    pub moment: Option<MachineMoment>,
    /// Text of the caller that is kept with the backup and returned with its details, such as what a machine needs
    /// besides the content of its disk. On an encrypted target it is encrypted.
    pub properties: Option<&'a str>,
    /// The disk at that moment.
    pub source: &'a dyn Source,
    /// For an incremental backup.
    pub base: Option<Base>,
    /// Threads for digests and compression; 1 does all in the caller's.
    pub threads: usize,
    /// Packs that a verification found damaged: their chunks are sent again.
    pub avoided: HashSet<Name>,
}

impl fmt::Debug for Job<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("disk", &self.disk).field("label", &self.label).finish_non_exhaustive()
    }
}

/// The backup on which an incremental one is based.
#[derive(Clone, Debug)]
pub struct Base {
    /// The backup.
    pub backup: Id,
    /// The digest of its content, recorded with the start of the list of changes: proves that the list belongs to it.
    pub content: Digest,
    /// Every range of the disk that may have changed since the moment of the base, in any order. Only these are read.
    pub changed: Vec<Range<u64>>,
}

/// How a caller follows and ends a long operation.
pub struct Control<'a> {
    /// Once true, the operation ends with [`Error::Cancelled`] after at most a few MiB.
    pub cancel: &'a AtomicBool,
    /// Called every few MiB.
    pub progress: &'a mut dyn FnMut(&Statistics),
}

impl fmt::Debug for Control<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control").field("cancel", &self.cancel).finish_non_exhaustive()
    }
}

impl Control<'_> {
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.cancel.load(Ordering::Relaxed) { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// A pass over the source that is complete on the target but not published.
struct Finished {
    index: Index,
    /// Packs that the index refers to.
    used: Vec<Name>,
}

impl Target {
    /// Makes a backup. It counts when this returns, and not before; after an error of the last step it may count.
    ///
    /// Memory: for each thread 8 windows of 1 MiB (or of a chunk, if that is larger), three packs, and 60 bytes for
    /// each chunk on the target.
    pub fn back_up(&self, job: &Job<'_>, control: &mut Control<'_>) -> Result<Record, Error> {
        for _ in 0..PASSES {
            let view = View::load(self)?;
            let base = job.base.as_ref().map(|base| self.check_base(job, base, &view)).transpose()?;
            let left_out = |name: &Name| view.state.doomed.contains(name) || job.avoided.contains(name);
            let chunks = Chunks::load(self, left_out)?;
            let changed = job.base.as_ref().map(|base| Changed::new(&base.changed));
            let mut pass = Pass::new(self, job, &chunks, base.zip(changed));
            pass.run(control)?;
            let late = if self.has(Bug::PublishedBeforeChunks) { None } else { Some(()) };
            if late.is_some() {
                pass.packer.finish(self)?;
            }
            let finished = pass.index();
            if let Some(record) = self.publish(finished, view, control)? {
                if late.is_none() {
                    pass.packer.finish(self)?;
                }
                return Ok(record);
            }
        }
        Err(Error::Contended(PASSES, "make a backup"))
    }

    /// The index of the base, if the changes can be of it.
    fn check_base(&self, job: &Job<'_>, base: &Base, view: &View) -> Result<Index, Error> {
        let wrong = |what: &str| Error::WrongBase { backup: base.backup, what: what.to_owned() };
        let record = view.state.backups.get(&base.backup).ok_or_else(|| wrong("it is not on the target"))?;
        if !self.has(Bug::AnyBase) {
            if record.disk != job.disk {
                return Err(wrong("it is of another disk"));
            }
            if record.content != base.content {
                return Err(wrong("the changes were recorded since another content"));
            }
        }
        if record.len != job.source.len() {
            return Err(wrong("the disk has another size now"));
        }
        let index = match Index::read(self, base.backup) {
            Err(Error::NoBackup(_)) => return Err(wrong("it is being removed")),
            other => other?,
        };
        if index.record != *record {
            return Err(wrong("its index is of another backup"));
        }
        Ok(index)
    }

    /// Puts the index and appends the backup to the log; `None` if something it refers to was given up.
    fn publish(&self, finished: Finished, begun: View, control: &mut Control<'_>) -> Result<Option<Record>, Error> {
        let (name, bytes) = finished.index.seal(self)?;
        if !crate::store::put_own(&*self.store, &name, &bytes)? {
            return Err(crate::error::damaged(&name, "another object has its name"));
        }
        let used = [finished.used.as_slice(), &[name]].concat();
        let mut checked: Option<View> = None;
        let mut view = begun;
        for _ in 0..APPENDS {
            control.check()?;
            let is_checked = checked.as_ref().is_some_and(|checked| checked.has_state_of(&view));
            if !is_checked && !self.has(Bug::PacksTrusted) && !self.all_there(&used, &view, checked.is_some())? {
                return Ok(None);
            }
            let change = Change::Publish(finished.index.record.clone());
            match view.append(self, change)? {
                Appended::Done(_) => return Ok(Some(finished.index.record)),
                Appended::Lost(now) => checked = Some(std::mem::replace(&mut view, *now)),
            }
        }
        Err(Error::Contended(APPENDS, "publish a backup"))
    }

    /// Whether all these objects are on the target and not doomed. While no prune has appended a state, the listing is
    /// enough; after one, each is looked at by name.
    fn all_there(&self, used: &[Name], view: &View, by_name: bool) -> Result<bool, Error> {
        if used.iter().any(|name| view.state.doomed.contains(name)) {
            return Ok(false);
        }
        let mut listed = HashSet::new();
        if !by_name {
            listed.extend(self.store.list(prefix::PACKS)?.into_iter().map(|(name, _)| name));
        }
        for name in used.iter().filter(|name| !listed.contains(*name)) {
            match self.store.size(name) {
                Ok(_) => {}
                Err(error) if is_missing(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}
