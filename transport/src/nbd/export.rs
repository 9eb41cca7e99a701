//! The properties of the export that are announced to a client: name, size, block sizes and capabilities.

use std::borrow::Cow;

use disk::Geometry;

use super::context::{ALLOCATION, BITMAP, BITMAP_NAME_MAX, BITMAPS_MAX, Context, Contexts, DEPTH};
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
    /// The names of dirty bitmaps, offered as `qemu:dirty-bitmap:NAME`: at most [`BITMAPS_MAX`], all different.
    pub bitmaps: Vec<String>,
}

/// The options negotiated for the transmission phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Negotiated {
    /// Replies may be structured; those to READ must be.
    pub(super) structured: bool,
    /// Requests and replies have extended headers; then `structured` is set, too, and all replies are chunks.
    pub(super) extended: bool,
    /// The contexts that were requested.
    pub(super) contexts: Contexts,
}

impl Export {
    /// Checks that texts and contexts do not exceed the limits of the protocol and of a handover.
    pub(super) fn check_texts(&self) -> Result<(), BindError> {
        let own = [("the name", &self.name), ("the description", &self.description)];
        let own = own.map(|(what, text)| (what, text, wire::STRING_MAX));
        let bitmaps = self.bitmaps.iter().map(|name| ("the name of a dirty bitmap", name, BITMAP_NAME_MAX));
        for (what, text, max) in own.into_iter().chain(bitmaps) {
            if text.len() > max {
                return Err(BindError::TextTooLong { what, len: text.len(), max });
            }
        }
        match self.bitmaps.len() {
            0..=BITMAPS_MAX => Ok(()),
            count => Err(BindError::TooManyBitmaps { count, max: BITMAPS_MAX }),
        }
    }

    /// Returns true if `name` is this export's name, or empty.
    pub(super) fn has_name(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    /// The contexts that the export has, with their names.
    pub(super) fn contexts(&self) -> impl Iterator<Item = (Context, Cow<'_, str>)> {
        let bitmaps = self.bitmaps.iter().take(BITMAPS_MAX).enumerate();
        let bitmaps = bitmaps.map(|(index, name)| (Context::Bitmap(index), Cow::Owned(format!("{BITMAP}{name}"))));
        let depth = self.layered.then_some((Context::Depth, Cow::Borrowed(DEPTH)));
        [(Context::Allocation, Cow::Borrowed(ALLOCATION))].into_iter().chain(depth).chain(bitmaps)
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
        let filtered =
            if negotiated.extended && !negotiated.contexts.is_empty() { wire::BLOCK_STATUS_PAYLOAD } else { 0 };
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
