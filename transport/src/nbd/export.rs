//! The properties of the export that are announced to a client: name, size, block sizes and capabilities.

use disk::Geometry;

use super::error::BindError;
use super::wire;

/// The largest READ or WRITE: the default that clients assume ("Block size constraints").
pub const REQUEST_MAX: u32 = 32 << 20;

/// The disk that a server exports.
#[derive(Clone, Debug)]
pub struct Export {
    /// Its name; it is also the default export, for clients that give no name.
    pub name: String,
    /// A human-readable description, shown by LIST and INFO; may be empty.
    pub description: String,
    /// Size and limits.
    pub geometry: Geometry,
    /// Whether `qemu:allocation-depth` is offered. Images without metadata have no layers.
    pub layered: bool,
}

/// The options negotiated for the transmission phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Negotiated {
    /// Replies may be structured; those to READ must be.
    pub(super) structured: bool,
    /// Requests and replies have extended headers; then `structured` is set, too, and all replies are chunks.
    pub(super) extended: bool,
    /// The context `base:allocation` was requested.
    pub(super) allocation: bool,
    /// The context `qemu:allocation-depth` was requested.
    pub(super) depth: bool,
}

impl Negotiated {
    /// Returns true if a context was requested.
    pub(super) fn has_contexts(self) -> bool {
        self.allocation || self.depth
    }
}

impl Export {
    /// Checks that texts do not exceed the protocol's limits.
    pub(super) fn check_texts(&self) -> Result<(), BindError> {
        for (what, text) in [("the name", &self.name), ("the description", &self.description)] {
            if text.len() > wire::STRING_MAX {
                return Err(BindError::TextTooLong { what, len: text.len(), max: wire::STRING_MAX });
            }
        }
        Ok(())
    }

    /// Returns true if `name` is this export's name, or empty.
    pub(super) fn has_name(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    /// "Transmission flags".
    pub(super) fn flags(&self, negotiated: Negotiated) -> u16 {
        // CAN_MULTI_CONN: all connections share one disk, whose flush covers every write answered before.
        let always = wire::HAS_FLAGS | wire::SEND_FLUSH | wire::CAN_MULTI_CONN | wire::SEND_CACHE;
        let changes = if self.geometry.read_only {
            wire::READ_ONLY
        } else {
            wire::SEND_FUA | wire::SEND_TRIM | wire::SEND_WRITE_ZEROES | wire::SEND_FAST_ZERO
        };
        let structured = if negotiated.structured { wire::SEND_DF } else { 0 };
        let filtered = if negotiated.extended && negotiated.has_contexts() { wire::BLOCK_STATUS_PAYLOAD } else { 0 };
        always | changes | structured | filtered
    }

    /// The minimum efficient block size, for a client that has requested block sizes. For others only 1 may be
    /// announced, as they may send requests of single bytes ("Block size constraints"), which are served anyway.
    pub(super) fn block_minimum(&self, is_requested: bool) -> u32 {
        if is_requested { self.geometry.block } else { 1 }
    }

    /// "Block size constraints": a power of two, at least 512, here at least a page.
    pub(super) fn block_preferred(&self) -> u32 {
        let physical = self.geometry.physical_block.max(4096);
        physical.checked_next_power_of_two().unwrap_or(REQUEST_MAX).min(REQUEST_MAX)
    }
}
