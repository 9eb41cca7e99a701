//! What a client is told about the disk: its name, size, block sizes and what it can do.

use disk::Geometry;

use super::wire;

/// Largest READ or WRITE: what clients assume where nobody tells them ("Block size constraints").
pub const REQUEST_MAX: u32 = 32 << 20;

/// The one disk that a server exports.
#[derive(Clone, Debug)]
pub struct Export {
    /// Its name; a client that names nothing gets it too, as the default export.
    pub name: String,
    /// A line for people, shown by LIST and INFO; may be empty.
    pub description: String,
    /// Size and limits.
    pub geometry: Geometry,
    /// Clients may ask which layer holds what. Of a file without metadata there is nothing to tell.
    pub layered: bool,
}

/// What both sides have agreed on for the transmission phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Agreed {
    /// Replies may be structured; those to READ must be.
    pub(super) structured: bool,
    /// `base:allocation` is asked for.
    pub(super) allocation: bool,
    /// `qemu:allocation-depth` is asked for.
    pub(super) depth: bool,
}

impl Export {
    /// Whether `name` means this export: by its name, or by none.
    pub(super) fn answers_to(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    /// "Transmission flags".
    pub(super) fn flags(&self, agreed: Agreed) -> u16 {
        // One disk serves all connections and its flush covers every write it has answered: multi-conn holds.
        let always = wire::HAS_FLAGS | wire::SEND_FLUSH | wire::CAN_MULTI_CONN | wire::SEND_CACHE;
        let changes = if self.geometry.read_only {
            wire::READ_ONLY
        } else {
            wire::SEND_FUA | wire::SEND_TRIM | wire::SEND_WRITE_ZEROES | wire::SEND_FAST_ZERO
        };
        let structured = if agreed.structured { wire::SEND_DF } else { 0 };
        always | changes | structured
    }

    /// What a request costs least to be a multiple of, told to a client that has `asked` for block sizes. To others
    /// nothing else may be told than that they may ask for single bytes, as they will ("Block size constraints"); those
    /// are served to everybody.
    pub(super) fn block_minimum(&self, asked: bool) -> u32 {
        if asked { self.geometry.block } else { 1 }
    }

    /// "Block size constraints": a power of two, at least 512, here at least a page.
    pub(super) fn block_preferred(&self) -> u32 {
        let physical = self.geometry.physical_block.max(4096);
        physical.checked_next_power_of_two().unwrap_or(REQUEST_MAX).min(REQUEST_MAX)
    }
}
