//! The send queue of one client: replies in order, each with the data of a read.
//!
//! It knows nothing about sockets. Invariant: a reply is kept, and counted by [`Outgoing::held`], until its last byte
//! is reported as sent.

use std::collections::VecDeque;

use memory::{Piece, Segments};
use smallvec::SmallVec;

use super::spare_memory::SpareMemory;

/// The bytes of a reply before the data of a read: usually a header and an offset, which need no heap memory.
pub(super) type Head = SmallVec<[u8; 40]>;

/// The most replies that are sent with one system call.
const TOGETHER: usize = 32;

/// Replies that have not been sent completely.
#[derive(Debug, Default)]
pub struct Outgoing {
    replies: VecDeque<Reply>,
    /// Bytes of the first reply that have been sent.
    sent: usize,
    held: usize,
    /// Memory of sent replies.
    spare: SpareMemory,
}

#[derive(Debug)]
struct Reply {
    head: Head,
    data: Segments,
}

impl Reply {
    fn len(&self) -> usize {
        self.head.len() + self.data.len()
    }
}

impl Outgoing {
    pub(super) fn push(&mut self, head: impl Into<Head>, data: Segments) {
        let head = head.into();
        if head.is_empty() {
            return;
        }
        let reply = Reply { head, data };
        self.held += reply.len();
        self.replies.push_back(reply);
    }

    /// Returns true if all replies have been sent.
    pub fn is_empty(&self) -> bool {
        self.replies.is_empty()
    }

    /// The total size of the replies that have not been sent completely.
    pub fn held(&self) -> usize {
        self.held
    }

    pub(super) fn replies(&self) -> usize {
        self.replies.len()
    }

    /// The memory of sent replies, kept for further requests.
    pub(super) fn spare(&self) -> &SpareMemory {
        &self.spare
    }

    pub(super) fn spare_mut(&mut self) -> &mut SpareMemory {
        &mut self.spare
    }

    /// The next bytes to send: those of as many replies as one system call takes.
    pub(super) fn pieces(&self) -> SmallVec<[Piece<'_>; 2 * TOGETHER]> {
        let mut skip = self.sent;
        let mut pieces = SmallVec::new();
        for reply in self.replies.iter().take(TOGETHER) {
            let from = skip.saturating_sub(reply.head.len());
            pieces.push(Piece::Bytes(reply.head.get(skip..).unwrap_or_default()));
            skip = 0;
            if let Some(rest) = reply.data.len().checked_sub(from).filter(|rest| *rest > 0) {
                pieces.push(Piece::Memory(reply.data.slice(from, rest)));
            }
        }
        pieces
    }

    /// Copies the next bytes to send to the front of `bytes`; returns their number.
    pub fn fill(&self, bytes: &mut [u8]) -> usize {
        let mut room = bytes;
        let mut filled: usize = 0;
        let mut skip = self.sent;
        for reply in &self.replies {
            let head = reply.head.get(skip..).unwrap_or_default();
            let from = skip.saturating_sub(reply.head.len());
            skip = 0;
            let take = head.len().min(room.len());
            let (now, later) = room.split_at_mut(take);
            now.copy_from_slice(head.get(..take).unwrap_or_default());
            filled += take;
            room = later;
            let take = reply.data.len().saturating_sub(from).min(room.len());
            let (now, later) = room.split_at_mut(take);
            reply.data.slice(from, take).copy_to(now);
            filled += take;
            room = later;
            if room.is_empty() {
                break;
            }
        }
        filled
    }

    /// A copy of all unsent bytes.
    pub(super) fn unsent(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.held - self.sent];
        let len = self.fill(&mut bytes);
        bytes.truncate(len);
        bytes
    }

    /// Records that `len` bytes returned by `fill` have been sent.
    pub fn sent(&mut self, len: usize) {
        self.sent += len;
        while let Some(reply) = self.replies.front() {
            let len = reply.len();
            let Some(rest) = self.sent.checked_sub(len) else { return };
            self.sent = rest;
            self.held -= len;
            if let Some(Reply { data, .. }) = self.replies.pop_front() {
                self.spare.keep(data);
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn two_replies() -> Outgoing {
        let mut outgoing = Outgoing::default();
        outgoing.push(b"head".to_vec(), Segments::copy_of(b"data"));
        outgoing.push(b"HEAD".to_vec(), Segments::empty());
        outgoing
    }

    #[test]
    fn bytes_are_in_order_for_every_chunk_size() {
        for room in 1..=13 {
            let mut outgoing = two_replies();
            let mut all = Vec::new();
            while !outgoing.is_empty() {
                let mut bytes = vec![0; room];
                let len = outgoing.fill(&mut bytes);
                // Half of it, as a full socket would accept.
                let taken = len.div_ceil(2);
                all.extend_from_slice(&bytes[..taken]);
                outgoing.sent(taken);
            }
            assert_eq!(all, b"headdataHEAD", "with room for {room}");
        }
    }

    #[test]
    fn a_reply_is_held_until_its_last_byte_is_sent() {
        let mut outgoing = two_replies();
        outgoing.sent(7);
        assert_eq!(outgoing.held(), 12);
        outgoing.sent(1);
        assert_eq!(outgoing.held(), 4);
        outgoing.sent(4);
        assert_eq!(outgoing.held(), 0);
    }
}
