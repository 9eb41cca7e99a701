//! The table of internal snapshots ("Snapshots"): where the first-level table of each is.
//!
//! Knows nothing of what they hold. The table has no length of its own: it ends where its last entry does.

use zerocopy::FromBytes;

use super::shape::{Table, read_padded};
use super::walk::Walk;
use crate::qcow2::layout::L1_BYTES_MAX;
use crate::qcow2::snapshots::{COUNT_MAX, EXTRA_MAX, EXTRA_MIN, RawSnapshot, TABLE_MAX};
use crate::{FileOffset, ImageError, Source};

/// Entries of all their first-level tables, at most: 2000 snapshots of a disk of 16 TiB. A sparse file could have any
/// number of them.
const ENTRIES_MAX: u64 = 64 << 20;

/// Counts the snapshot table; the first-level tables that can be walked.
pub fn tables(walk: &mut Walk<'_>, source: &mut dyn Source) -> Result<Vec<Table>, ImageError> {
    let raw = &walk.shape.header.raw;
    let (count, start) = (raw.snapshots.get(), FileOffset(raw.snapshots_at.get()));
    let version = raw.version.get();
    let mut tables = Vec::new();
    if count == 0 {
        return Ok(tables);
    }
    if count > COUNT_MAX || !walk.shape.is_aligned(start) || start.0 == 0 {
        walk.damage(FileOffset(60), format!("{count} snapshots at byte {start} cannot be"));
        return Ok(tables);
    }
    let mut at = start;
    let mut entries: u64 = 0;
    for _ in 0..count {
        let mut bytes = [0; size_of::<RawSnapshot>()];
        read_padded(source, at, &mut bytes)?;
        let Ok(snapshot) = RawSnapshot::read_from_bytes(&bytes) else { break };
        let end = at.saturating_add(snapshot.len());
        if end.0 > walk.shape.file_len || end - start > TABLE_MAX {
            walk.damage(at, "the table of snapshots is damaged, or longer than the file");
            break;
        }
        if snapshot.extra_len.get() > EXTRA_MAX {
            walk.damage(at, "a snapshot has more extra data than 1024 bytes");
        }
        if version >= 3 && snapshot.extra_len.get() < EXTRA_MIN {
            walk.damage(at, "a snapshot lacks what version 3 says of the size of its disk");
        }
        let table = Table { at: FileOffset(snapshot.l1_at.get()), entries: snapshot.l1_entries.get().into() };
        entries = entries.saturating_add(table.entries);
        if !walk.shape.is_aligned(table.at) || table.at.0 == 0 || table.len() > L1_BYTES_MAX || entries > ENTRIES_MAX {
            walk.damage(
                at,
                format!(
                    "the first-level table of a snapshot has {} entries at byte {}, which cannot be",
                    table.entries, table.at
                ),
            );
        } else {
            tables.push(table);
        }
        at = end;
    }
    walk.refer_alone(start, at - start, "the table of snapshots")?;
    Ok(tables)
}
