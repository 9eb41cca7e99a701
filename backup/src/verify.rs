//! Verification: every byte of every pack and index is read and proven, and damage is named by the backups that it
//! costs.
//!
//! Nothing is written. May run during backups and prunes: what appears meanwhile is read too, because a prune may have
//! moved chunks there, and what disappears with a prune is no damage.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::chunks::Chunks;
use crate::error::Error;
use crate::id::Digest;
use crate::index::{Index, Statistics};
use crate::log::{Record, View};
use crate::name::{Name, prefix};
use crate::pack::{self, Row};
use crate::store::is_missing;
use crate::target::Target;
use crate::writer::Control;

/// Result of a verification.
#[derive(Debug, Default)]
pub struct Verified {
    /// Published backups that were checked.
    pub backups: u64,
    /// Objects with chunks that were read.
    pub packs: u64,
    /// Bytes that were read.
    pub bytes: u64,
    /// Damaged objects, with the damage. If no backup refers to it, an object may be here and cost nothing.
    pub damaged: Vec<(Name, String)>,
    /// Backups that cannot be restored in full, the oldest first.
    pub lost: Vec<BackupDamage>,
}

/// What damage costs one backup.
#[derive(Debug)]
pub struct BackupDamage {
    /// The backup: its disk and its moment.
    pub record: Record,
    /// Ranges of the disk without a sound copy: all of it if the index is damaged.
    pub ranges: Vec<Range<u64>>,
}

impl Verified {
    /// Whether each backup can be restored in full, and no object is damaged.
    pub fn is_clean(&self) -> bool {
        self.damaged.is_empty() && self.lost.is_empty()
    }
}

/// Damage of one pack, and the digests of its sound frames.
type Proven = (u64, Vec<String>, Vec<Digest>);

impl Target {
    /// Reads and proves everything. Memory: for each thread a pack, and 100 bytes for each chunk on the target.
    pub fn verify(&self, threads: usize, control: &mut Control<'_>) -> Result<Verified, Error> {
        let view = View::load(self)?;
        let mut verified = Verified::default();
        let (mut read, mut sound) = (HashSet::new(), HashSet::new());
        let chunks = loop {
            self.verify_packs(threads.max(1), control, &mut verified, (&mut read, &mut sound))?;
            let chunks = Chunks::load(self, |_| false)?;
            if chunks.packs.iter().all(|name| read.contains(name)) {
                break chunks;
            }
        };
        let mut pages = HashMap::new();
        for record in view.state.backups.values() {
            control.check()?;
            verified.backups += 1;
            let index = match Index::read(self, record.id) {
                Ok(index) if index.record == *record => Ok(index),
                Ok(_) => Err("it is of another backup".to_owned()),
                Err(Error::NoBackup(_)) => Err("it does not exist".to_owned()),
                Err(Error::Damaged { what, .. }) => Err(what),
                Err(error) => return Err(error),
            };
            let ranges = match index {
                Ok(index) => self.lost_ranges(&index, &chunks, &sound, &mut pages)?,
                Err(what) => {
                    verified.damaged.push((Name::backup(record.id), what));
                    std::iter::once(0..record.len).collect()
                }
            };
            if !ranges.is_empty() {
                verified.lost.push(BackupDamage { record: record.clone(), ranges });
            }
        }
        self.forget_removed(&mut verified)?;
        verified.lost.sort_by_key(|damage| (damage.record.time, damage.record.id));
        Ok(verified)
    }

    /// What a prune has removed meanwhile is not lost.
    fn forget_removed(&self, verified: &mut Verified) -> Result<(), Error> {
        if !verified.is_clean() {
            let now = View::load(self)?;
            verified.lost.retain(|damage| now.state.backups.contains_key(&damage.record.id));
            let is_removed = |name: &Name| name.backup_id().is_some_and(|id| !now.state.backups.contains_key(&id));
            verified.damaged.retain(|(name, _)| !is_removed(name) && !now.state.doomed.contains(name));
        }
        Ok(())
    }

    /// Verifies the packs that were not read yet; adds them to `read`, and the digests of what is sound to `sound`.
    fn verify_packs(
        &self,
        threads: usize,
        control: &mut Control<'_>,
        verified: &mut Verified,
        (read, sound): (&mut HashSet<Name>, &mut HashSet<Digest>),
    ) -> Result<(), Error> {
        let mut progress = Statistics::default();
        let mut packs = self.store.list(prefix::PACKS)?;
        packs.retain(|(name, _)| name.is_pack() && read.insert(name.clone()));
        for batch in packs.chunks(threads) {
            control.check()?;
            let results: Vec<Result<Option<Proven>, Error>> = match batch {
                [(name, _)] => vec![self.verify_pack(name)],
                _ => std::thread::scope(|scope| {
                    let readers: Vec<_> =
                        batch.iter().map(|(name, _)| scope.spawn(|| self.verify_pack(name))).collect();
                    let join = |reader: std::thread::ScopedJoinHandle<'_, _>| {
                        reader.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                    };
                    readers.into_iter().map(join).collect()
                }),
            };
            for ((name, _), result) in batch.iter().zip(results) {
                let Some((bytes, damage, digests)) = result? else { continue };
                verified.packs += 1;
                verified.bytes += bytes;
                verified.damaged.extend(damage.into_iter().map(|what| (name.clone(), what)));
                sound.extend(digests);
            }
            progress.done = verified.bytes;
            progress.read = verified.bytes;
            (control.progress)(&progress);
        }
        Ok(())
    }

    /// `None` if a prune has deleted the pack.
    fn verify_pack(&self, name: &Name) -> Result<Option<Proven>, Error> {
        let bytes = match crate::store::get_all(&*self.store, name) {
            Ok(bytes) => bytes,
            Err(error) if is_missing(&error) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let len = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        let damaged = |what: &str| Ok(Some((len, vec![what.to_owned()], Vec::new())));
        let end = match pack::table_end(&bytes) {
            Ok(end) if end <= len => usize::try_from(end).unwrap_or(usize::MAX),
            Ok(_) => return damaged("it is cut off"),
            Err(damage) => return damaged(damage.0),
        };
        let (rows, full) = match pack::table(&self.codec, name, bytes.get(..end).unwrap_or_default()) {
            Ok(table) => table,
            Err(damage) => return damaged(damage.0),
        };
        if full != len {
            return damaged("it is not as long as its table says");
        }
        let (mut bad, mut sound) = (Vec::new(), Vec::new());
        for row in &rows {
            match self.prove(row, &bytes) {
                Ok(()) => sound.push(row.digest),
                Err(what) => bad.push(format!("at {}: {what}", row.at)),
            }
        }
        Ok(Some((len, bad, sound)))
    }

    fn prove(&self, row: &Row, pack: &[u8]) -> Result<(), &'static str> {
        let begin = usize::try_from(row.at).ok();
        let end = begin.zip(usize::try_from(row.len).ok()).and_then(|(begin, len)| begin.checked_add(len));
        let frame = begin.zip(end).and_then(|(begin, end)| pack.get(begin..end)).ok_or("a chunk is cut off")?;
        let len = usize::try_from(row.content).unwrap_or(usize::MAX);
        self.codec.unframe(row.kind, &row.digest, len, frame).map(|_| ()).map_err(|damage| damage.0)
    }

    /// Ranges of a backup without a sound copy.
    fn lost_ranges(
        &self,
        index: &Index,
        chunks: &Chunks,
        sound: &HashSet<Digest>,
        pages: &mut HashMap<Digest, Option<Vec<u64>>>,
    ) -> Result<Vec<Range<u64>>, Error> {
        let mut lost: Vec<Range<u64>> = Vec::new();
        let mut add = |range: Range<u64>| match lost.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => lost.push(range),
        };
        for (number, digest) in (0..).zip(&index.pages) {
            let begin = number * self.page_span();
            let end = (begin + self.page_span()).min(index.record.len);
            if !pages.contains_key(digest) {
                let is_bad = |digest: &Digest| *digest != Digest::HOLE && !sound.contains(digest);
                let bad = index.page(self, chunks, number)?.map(|digests| {
                    (0..).zip(&digests).filter(|(_, digest)| is_bad(digest)).map(|(chunk, _)| chunk).collect()
                });
                pages.insert(*digest, bad);
            }
            match pages.get(digest) {
                Some(Some(bad)) => bad.iter().for_each(|chunk| {
                    let at = begin + chunk * self.chunk();
                    add(at..(at + self.chunk()).min(end));
                }),
                _ => add(begin..end),
            }
        }
        Ok(lost)
    }
}
