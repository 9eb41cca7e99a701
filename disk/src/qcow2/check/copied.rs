//! The marks "copied" of the active disk (bit 63 of both levels): set where the refcount is one, and only there.
//!
//! Knows nothing of how to count. Which entries are marked wrongly depends on the refcounts to compare with, those that
//! the image has (a check) or those that it should have (a repair), so the caller supplies them.

use std::collections::BTreeSet;

use super::Findings;
use super::ledger::Ledger;
use super::shape::{Shape, Table, entries, read_padded};
use crate::qcow2::cluster::HostCluster;
use crate::qcow2::layout::{COPIED, OFFSET_MASK, SECTOR, index, length};
use crate::{DATA_FILE, FileOffset, ImageError, Severity, Source};

/// A piece of a table of the active disk with entries that are marked wrongly.
pub struct Wrong<'a> {
    /// Its offset in the file.
    pub at: FileOffset,
    /// Its bytes, in whole sectors.
    pub bytes: &'a [u8],
    /// Which 64-bit words of it, and what they are.
    pub entries: Vec<(usize, u64)>,
}

/// Calls `each` with every piece that has wrong marks; `single` says whether a cluster has one reference.
pub fn find(
    source: &mut dyn Source,
    shape: &Shape,
    ledger: &Ledger,
    single: impl Fn(HostCluster) -> bool,
    mut each: impl FnMut(Wrong<'_>),
) -> Result<(), ImageError> {
    // Nothing in a data file has more than one reference.
    let is_wrong =
        |bits: u64, at: FileOffset| (at >= DATA_FILE || single(shape.cluster_of(at))) != (bits & COPIED != 0);
    let mut second = shape.piece();
    // A table that two entries have is looked at once: there may be as many such entries as there is room for.
    let mut seen = BTreeSet::new();
    let mut first = 0;
    while let Some((at, count, piece)) = l1_piece(source, shape.l1, first)? {
        let wrong =
            |&(_, bits): &(usize, u64)| bits & OFFSET_MASK != 0 && is_wrong(bits, FileOffset(bits & OFFSET_MASK));
        tell(at, &piece, entries(&piece).take(count).enumerate().filter(wrong), &mut each);
        let tables = entries(&piece).take(count).map(|bits| FileOffset(bits & OFFSET_MASK));
        for table_at in tables.filter(|&at| at.0 != 0 && shape.is_aligned(at)) {
            let shared = ledger.is_shared(shape.cluster_of(table_at));
            if table_at.0 >= source.len() || shared && !seen.insert(table_at) {
                continue;
            }
            read_padded(source, table_at, &mut second)?;
            let format = shape.header.entries();
            let wrong = format.entries(&second).filter_map(|(word, raw)| {
                let at = format.decode(raw).cluster_place()?;
                is_wrong(raw.descriptor, at).then_some((word, raw.descriptor))
            });
            tell(table_at, &second, wrong, &mut each);
        }
        first = first.saturating_add(Table::PIECE);
    }
    Ok(())
}

/// A piece of the first-level table in whole sectors: its place, and how many entries of the table it has.
fn l1_piece(
    source: &mut dyn Source,
    l1: Table,
    first: u64,
) -> Result<Option<(FileOffset, usize, Vec<u8>)>, ImageError> {
    let count = index(l1.entries.saturating_sub(first).min(Table::PIECE));
    let at = l1.entry_at(first);
    if count == 0 || at.0 >= source.len() {
        return Ok(None);
    }
    let mut bytes = vec![0; count.saturating_mul(8).next_multiple_of(index(SECTOR))];
    read_padded(source, at, &mut bytes)?;
    Ok(Some((at, count, bytes)))
}

fn tell(at: FileOffset, bytes: &[u8], wrong: impl Iterator<Item = (usize, u64)>, each: &mut impl FnMut(Wrong<'_>)) {
    let entries: Vec<_> = wrong.collect();
    if !entries.is_empty() {
        each(Wrong { at, bytes, entries });
    }
}

/// Names the marks that do not agree with the refcounts that the image keeps.
pub(super) fn judge(
    source: &mut dyn Source,
    shape: &Shape,
    ledger: &Ledger,
    findings: &mut Findings,
) -> Result<(), ImageError> {
    find(
        source,
        shape,
        ledger,
        |cluster| ledger.is_single(cluster),
        |wrong| {
            let count = wrong.entries.len();
            let Some(&(index, bits)) = wrong.entries.first() else { return };
            let at = wrong.at.saturating_add(length(index).saturating_mul(8));
            let are =
                if count == 1 { "entry is".to_owned() } else { format!("entries from here on, {count} of them, are") };
            let how = if bits & COPIED != 0 { "marked as copied, with" } else { "not marked as copied, without" };
            findings.add(Severity::Repairable, at, format!("the {are} {how} other references to the same cluster"));
        },
    )
}
