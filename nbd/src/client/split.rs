//! The requests of an operation.
//!
//! It knows nothing about connections. Invariant: each request lies inside of the export, and is a multiple of its unit
//! of at most its maximum.

use disk::{Action, FileError, FileOp};
use memory::Segments;
use memory::size::on_disk;

use super::piece::{Kind, Owner, Piece, cut};
use super::{Client, Export, FAILED, INVALID, READ_ONLY};

/// Larger transfers are split: this size, times the number in flight, is the memory for their payload.
pub(super) const PIECE: u64 = 1 << 20;
/// Larger zeroes are split: they have no payload, but a server must end each of them.
pub(super) const ZERO_PIECE: u64 = 1 << 30;

impl Client {
    /// The requests of an operation.
    pub(super) fn split(&self, op: &FileOp, export: &Export, key: u64) -> Result<Vec<Piece>, FileError> {
        let unit = u64::from(export.block_min);
        let most = PIECE.min(u64::from(export.block_max) / unit.max(512) * unit.max(512));
        let owner = Owner::Op(key);
        let check_write = |at: u64, len: u64, error| match () {
            () if !self.write => Err(READ_ONLY),
            () if self.flush_failed => Err(FAILED),
            () if at.checked_add(len).is_none_or(|end| end > export.size) => Err(error),
            () => Ok(()),
        };
        match &op.action {
            Action::Read { at, into } => {
                let inside = export.size.saturating_sub(at.0).min(on_disk(into.len()));
                let rest = into.slice(memory::size::in_memory(inside), into.len() - memory::size::in_memory(inside));
                rest.fill_zero();
                cut(owner, Kind::Read, (at.0, inside), into, (most, unit))
            }
            Action::Write { at, from } => {
                let len = on_disk(from.len());
                check_write(at.0, len, FileError::NoSpace)?;
                cut(owner, Kind::Write, (at.0, len), from, (most, unit))
            }
            Action::Deallocate { at, len } => {
                check_write(at.0, *len, INVALID)?;
                let fits = export.can_zero && at.0 % unit == 0 && len % unit == 0;
                match fits {
                    true => cut(owner, Kind::Zero, (at.0, *len), &Segments::empty(), (ZERO_PIECE, unit)),
                    false => Err(FileError::Unsupported),
                }
            }
            Action::SyncData if self.flush_failed => Err(FAILED),
            Action::SyncData if !self.write => Ok(Vec::new()),
            Action::SyncData => Ok(vec![Piece::new(owner, Kind::Flush, 0, 0)]),
        }
    }
}
