//! Repairs what a [check](super::check()) finds: refcounts, the marks "copied", and the bits that say that an image was
//! not closed or is damaged.
//!
//! Never touches a byte of the guest, and writes nothing itself: what it finds out is a list of batches, each to be
//! made in any order and followed by a sync. The file can be left after any sector of them:
//!
//! 1. Autoclear bits that we do not know are cleared, since we write. *Reopened here:* as before.
//! 2. Refcounts that are too low are raised. *Reopened here:* what is in use is safe from being used again; the rest is
//!    wrong still. Where the table or a block cannot be repaired in place, all refcounts are rebuilt behind everything
//!    that is in use. *Reopened here:* as before, nothing refers to them.
//! 3. Entries that can be repaired one by one are. *Reopened here:* the disk shows what it did, or what could not be
//!    read; a place that an entry has lost is a leak. Clusters of the disk that lie where a structure is, copied to
//!    places of their own before step 2, are referred to there. *Reopened here:* the disk shows what it did.
//! 4. Marks "copied" on what has several references are cleared. *Reopened here:* such clusters are not written to in
//!    place any more.
//! 5. Refcounts that are too high are lowered; or the header gets the new table, in one sector.
//! 6. Marks "copied" on what has one reference are set. *Reopened here, or before:* a cluster that lacks its mark is
//!    copied when it is written to, which costs time only.
//! 7. The header: not dirty, not corrupt, and without bitmaps that are out of date. Only now the image counts as
//!    sound.
//!
//! Where references cannot be made out, steps 2 and 3 are all that is done: what looks unused may be what they refer
//! to. And not even that, if refcounts would have to be rebuilt and a reference leads there, behind the end of the
//! file: it would read them as what it refers to. Memory: one new refcount block for each that changes, and 512 bytes
//! for each sector of entries with a wrong mark.

mod apart;
mod header;
mod rebuilt;
mod single;

use super::check::Survey;
use super::check::copied;
use super::cluster::{HostCluster, run};
use super::layout::{COPIED, SECTOR, index, length, set_entry};
use crate::redo::{Owed, Patched};
use crate::{FileOffset, ImageError, MetaWrite, Source};
use apart::Apart;
use header::HeaderSector;
use rebuilt::{RebuiltRefcounts, lay_out};
use single::Single;

/// The writes that repair an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repair {
    /// Writes, in any order within a batch; a sync behind each batch. Empty: there is nothing to repair.
    pub batches: Vec<Vec<MetaWrite>>,
    /// The repairs, a sentence each without a full stop, and what cannot be repaired.
    pub what: Vec<String>,
    /// The length that the file is to have before the first write, if it has to grow.
    pub new_len: Option<u64>,
}

impl Repair {
    fn batch(&mut self, writes: Vec<MetaWrite>) {
        if !writes.is_empty() {
            self.batches.push(writes);
        }
    }

    fn say(&mut self, count: u64, one: &str, many: &str) {
        match count {
            0 => {}
            1 => self.what.push(format!("1 {one}")),
            _ => self.what.push(format!("{count} {many}")),
        }
    }
}

/// Finds out how to repair an image. An error means that it cannot be read as a qcow2 image at all.
pub fn repair(source: &mut dyn Source) -> Result<Repair, ImageError> {
    let len = source.len();
    let mut survey = Survey::of(source)?;
    let single = Single::find(source, &survey)?;
    let alone = (!single.writes.is_empty()).then(|| Owed::about_to_be(&single.writes));
    let mut source = Patched::new(source, alone.as_ref());
    if alone.is_some() {
        survey = Survey::of(&mut source)?;
    }
    let apart = Apart::find(&mut source, &survey)?;
    let mut repair = if apart.copies.is_empty() {
        plan(&mut source, survey, single, apart)?
    } else {
        let owed = Owed::about_to_be(apart.writes());
        let mut written = Patched::new(&mut source, Some(&owed));
        let survey = Survey::of(&mut written)?;
        plan(&mut written, survey, single, apart)?
    };
    // The last structure of a file need not be there in full.
    let ends = repair.batches.iter().flatten().map(|write| write.at.saturating_add(length(write.bytes.len())));
    repair.new_len = ends.max().map(|end| end.0).filter(|&end| end > len);
    Ok(repair)
}

/// The same of a file as it is when single entries are repaired, and the clusters that lie over structures have places
/// of their own.
fn plan(source: &mut dyn Source, mut survey: Survey, single: Single, apart: Apart) -> Result<Repair, ImageError> {
    let mut repair = Repair::default();
    let sound = !survey.unresolved;
    if !sound {
        let lasting = "some references are damaged and stay so, since nothing says what they should be: restore what they \
                       refer to from a backup, or copy what can be read: `tapline image convert --salvage`";
        repair.what.push(lasting.into());
        repair.what.push("nothing that looks unused is given back: a damaged reference may be to it".into());
    }
    let replace = survey.refcounts.replace;
    let rebuilt = if replace { lay_out(source, &mut survey, sound)? } else { None };
    if replace && rebuilt.is_none() {
        repair
            .what
            .push("the refcounts stay damaged: there is no room for new ones, since the file was cut short".into());
    }
    let refcounts = if replace { InPlace::default() } else { InPlace::find(source, &survey, sound)? };
    let marks = if sound { Marks::find(source, &survey)? } else { Marks::default() };
    repair.say(
        single.displaced,
        "entry that reads as zero has lost its place, which cannot be",
        "entries that read as zero have lost their places, which cannot be",
    );
    repair.say(single.cleared, "entry has lost its reserved bits", "entries have lost their reserved bits");
    repair.say(refcounts.raised, "refcount is raised", "refcounts are raised");
    repair.say(
        survey.shared,
        "cluster stays in two places of the disk",
        "clusters stay in two places of the disk each",
    );
    if survey.shared > 0 {
        repair
            .what
            .push("of two places with one cluster, one has lost its content: which, the image does not say".into());
        repair.what.push("the first write to one of two such places gives it a cluster of its own".into());
    }
    repair.say(refcounts.lowered, "refcount is lowered", "refcounts are lowered");
    repair.say(marks.count, "mark \"copied\" is corrected", "marks \"copied\" are corrected");
    let mut header = HeaderSector::read(source, &survey.shape)?;
    let begin = header.forget_unknown();
    let mut raise = refcounts.raise;
    let mut lower = refcounts.lower;
    if let Some(RebuiltRefcounts { table_at, table_clusters, writes }) = rebuilt {
        repair.what.push(format!("all refcounts are rebuilt at byte {table_at}"));
        raise.extend(writes);
        lower.push(header.set_refcount_table(table_at, table_clusters));
    }
    repair.say(
        length(apart.copies.len()),
        "cluster that lay where a structure is has a place of its own, and shows what it did",
        "clusters that lay where structures are have places of their own, and show what they did",
    );
    repair.batch(apart.copies);
    repair.batch(raise);
    repair.batch(single.writes);
    repair.batch(apart.entries);
    repair.batch(marks.clear);
    repair.batch(lower);
    repair.batch(marks.set);
    if sound {
        repair.what.extend(header.close(source, &survey.shape)?);
        repair.batch(header.changed());
    }
    if let Some(begin) = begin.filter(|_| survey.shape.claims_raw_data() || !repair.batches.is_empty()) {
        repair.batches.insert(0, vec![begin]);
        repair.what.insert(0, "autoclear bits of other programs are cleared".into());
    }
    Ok(repair)
}

/// Refcounts that are repaired in place.
#[derive(Default)]
struct InPlace {
    raise: Vec<MetaWrite>,
    lower: Vec<MetaWrite>,
    raised: u64,
    lowered: u64,
}

impl InPlace {
    fn find(source: &mut dyn Source, survey: &Survey, sound: bool) -> Result<InPlace, ImageError> {
        let Survey { shape, ledger, refcounts, .. } = survey;
        let mut found = InPlace::default();
        let width = refcounts.width;
        let per_block = width.in_block(shape.cluster);
        let end = shape.end().max(ledger.end());
        let mut block = shape.piece();
        for (number, &at) in (0..).zip(&refcounts.blocks).filter(|&(_, &at)| at.0 != 0) {
            refcounts.read_block(source, number, &mut block)?;
            let mut high = block.clone();
            let mut right = block.clone();
            let first = HostCluster(number.saturating_mul(per_block));
            for (place, cluster) in (0..).zip(run(first..end.min(HostCluster(first.0.saturating_add(per_block))))) {
                let kept = width.get(&block, place);
                let counted = ledger.references(cluster).min(width.max());
                if kept < counted {
                    found.raised += 1;
                    width.set(&mut high, place, counted);
                    width.set(&mut right, place, counted);
                } else if kept > counted && sound {
                    found.lowered += 1;
                    width.set(&mut right, place, counted);
                }
            }
            found.raise.extend(changes(at, &block, &high));
            found.lower.extend(changes(at, &high, &right));
        }
        Ok(found)
    }
}

/// Marks that are to be corrected.
#[derive(Default)]
struct Marks {
    clear: Vec<MetaWrite>,
    set: Vec<MetaWrite>,
    count: u64,
}

impl Marks {
    fn find(source: &mut dyn Source, survey: &Survey) -> Result<Marks, ImageError> {
        let Survey { shape, ledger, .. } = survey;
        let mut marks = Marks::default();
        copied::find(
            source,
            shape,
            ledger,
            |cluster| ledger.references(cluster) == 1,
            |wrong| {
                let mut cleared = wrong.bytes.to_vec();
                for &(index, bits) in &wrong.entries {
                    set_entry(&mut cleared, index, bits & !COPIED);
                }
                let mut right = cleared.clone();
                for &(index, bits) in &wrong.entries {
                    set_entry(&mut right, index, bits ^ COPIED);
                }
                marks.count += length(wrong.entries.len());
                marks.clear.extend(changes(wrong.at, wrong.bytes, &cleared));
                marks.set.extend(changes(wrong.at, &cleared, &right));
            },
        )?;
        Ok(marks)
    }
}

/// The sectors in which `new` differs from `old`; both stand at `at`.
fn changes(at: FileOffset, old: &[u8], new: &[u8]) -> Vec<MetaWrite> {
    let sector = index(SECTOR);
    let mut writes: Vec<MetaWrite> = Vec::new();
    let sectors = old.chunks(sector).zip(new.chunks(sector)).zip(0..);
    for ((_, new), number) in sectors.filter(|((old, new), _)| old != new) {
        let at = at.saturating_add(SECTOR.saturating_mul(number));
        match writes.last_mut() {
            Some(last) if last.at.saturating_add(length(last.bytes.len())) == at => last.bytes.extend_from_slice(new),
            _ => writes.push(MetaWrite { at, bytes: new.to_vec() }),
        }
    }
    writes
}
