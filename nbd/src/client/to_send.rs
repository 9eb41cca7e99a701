//! Bytes to send, and requests as bytes.

use zerocopy::IntoBytes;

use super::piece::{Kind, Piece};
use crate::wire::{self, RequestHeader};

/// No request is added to more bytes than this.
const FULL: usize = 4 << 20;

/// The bytes that were not sent yet.
#[derive(Debug, Default)]
pub(super) struct ToSend {
    bytes: Vec<u8>,
    /// The bytes before this were sent.
    start: usize,
}

impl ToSend {
    /// Where the negotiation appends its bytes.
    pub(super) fn bytes(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    pub(super) fn unsent(&self) -> &[u8] {
        self.bytes.get(self.start..).unwrap_or_default()
    }

    pub(super) fn sent(&mut self, len: usize) {
        self.start = (self.start + len).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
            // An idle disk keeps no buffer of the size of its largest burst.
            self.bytes.shrink_to(64 << 10);
        } else if self.start > FULL {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.bytes.len() - self.start > FULL
    }

    pub(super) fn clear(&mut self) {
        *self = ToSend::default();
    }

    /// Appends a request.
    pub(super) fn request(&mut self, piece: &Piece, cookie: u64) {
        let kind = match piece.kind {
            Kind::Read => wire::CMD_READ,
            Kind::Write => wire::CMD_WRITE,
            Kind::Zero => wire::CMD_WRITE_ZEROES,
            Kind::Flush => wire::CMD_FLUSH,
            Kind::Status => wire::CMD_BLOCK_STATUS,
        };
        let header = RequestHeader {
            magic: wire::REQUEST_MAGIC.into(),
            flags: 0.into(),
            kind: kind.into(),
            cookie: cookie.into(),
            at: piece.at.into(),
            len: memory::size::in_32_bits(piece.len, "the length of a request").into(),
        };
        self.bytes.extend_from_slice(header.as_bytes());
        if let (Kind::Write, Some(bytes)) = (piece.kind, &piece.bytes) {
            self.bytes.extend_from_slice(bytes);
        }
    }
}
