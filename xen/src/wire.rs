//! Messages to and from the store, as bytes (Xen, docs/misc/xenstore.txt and public/io/xs_wire.h).
//!
//! It knows nothing about sockets or the meaning of replies. Invariant: whatever is received, it buffers at most one
//! message and the last chunk.

/// The maximum payload size (XENSTORE_PAYLOAD_MAX).
pub const PAYLOAD_MAX: usize = 4096;

/// Size of the header: four 32-bit numbers in native byte order.
pub const HEADER: usize = 16;

/// The type of a message (enum xsd_sockmsg_type).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(pub u32);

impl Kind {
    /// List a node's children.
    pub const DIRECTORY: Kind = Kind(1);
    /// Read a node's value.
    pub const READ: Kind = Kind(2);
    /// Watch a node and everything below it.
    pub const WATCH: Kind = Kind(4);
    /// Remove a watch.
    pub const UNWATCH: Kind = Kind(5);
    /// Start a transaction.
    pub const TRANSACTION_START: Kind = Kind(6);
    /// End a transaction.
    pub const TRANSACTION_END: Kind = Kind(7);
    /// Set a node's value.
    pub const WRITE: Kind = Kind(11);
    /// Remove a node and everything below it.
    pub const RM: Kind = Kind(13);
    /// Set a node's permissions.
    pub const SET_PERMS: Kind = Kind(14);
    /// An unsolicited watch event.
    pub const WATCH_EVENT: Kind = Kind(15);
    /// An error reply: its payload is the name of an error.
    pub const ERROR: Kind = Kind(16);
    /// Whether the store serves a domain.
    pub const IS_DOMAIN_INTRODUCED: Kind = Kind(17);
    /// Part of a list of children that is too long for one message.
    pub const DIRECTORY_PART: Kind = Kind(22);
}

/// A message in either direction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type.
    pub kind: Kind,
    /// The request id; repeated in the reply.
    pub request: u32,
    /// The transaction, or 0.
    pub transaction: u32,
    /// The payload, whose format depends on the type.
    pub payload: Vec<u8>,
}

impl Message {
    /// Encodes it. `None` if the payload exceeds the maximum.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if self.payload.len() > PAYLOAD_MAX {
            return None;
        }
        let len = u32::try_from(self.payload.len()).ok()?;
        let mut bytes = Vec::with_capacity(HEADER + self.payload.len());
        for number in [self.kind.0, self.request, self.transaction, len] {
            bytes.extend_from_slice(&number.to_ne_bytes());
        }
        bytes.extend_from_slice(&self.payload);
        Some(bytes)
    }

    /// The words of a payload that is a list of NUL-terminated words; the last NUL may be missing.
    pub fn words(&self) -> impl Iterator<Item = &[u8]> {
        let payload = self.payload.strip_suffix(&[0]).unwrap_or(&self.payload);
        let nothing = self.payload.is_empty();
        payload.split(|&byte| byte == 0).filter(move |_| !nothing)
    }
}

/// A message whose length field exceeds the maximum: the stream cannot be parsed further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a store message of {len} bytes; the maximum is {PAYLOAD_MAX}")]
pub struct TooLong {
    /// Its length field.
    pub len: u32,
}

/// Assembles messages from a byte stream, however it is split.
#[derive(Default)]
pub struct Receiver {
    bytes: Vec<u8>,
    /// Offset of the first byte not yet parsed.
    at: usize,
}

impl Receiver {
    /// Appends received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// The next complete message.
    pub fn next_message(&mut self) -> Result<Option<Message>, TooLong> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let Some((header, behind)) = rest.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [kind, request, transaction, len] = numbers(header);
        let payload_len = usize::try_from(len).unwrap_or(usize::MAX);
        if payload_len > PAYLOAD_MAX {
            return Err(TooLong { len });
        }
        let Some(payload) = behind.get(..payload_len) else { return Ok(None) };
        let message = Message { kind: Kind(kind), request, transaction, payload: payload.to_vec() };
        self.at += HEADER + payload_len;
        Ok(Some(message))
    }
}

fn numbers(header: &[u8; HEADER]) -> [u32; 4] {
    let mut numbers = [0; 4];
    for (number, bytes) in numbers.iter_mut().zip(header.chunks_exact(4)) {
        *number = bytes.try_into().map(u32::from_ne_bytes).unwrap_or_default();
    }
    numbers
}

#[cfg(test)]
mod test {
    use super::*;

    fn message(kind: Kind, request: u32, payload: &[u8]) -> Message {
        Message { kind, request, transaction: 7, payload: payload.to_vec() }
    }

    /// All messages of `pieces`, pushed one by one.
    fn received(pieces: &[&[u8]]) -> Vec<Message> {
        let mut receiver = Receiver::default();
        let mut messages = Vec::new();
        for piece in pieces {
            receiver.push(piece);
            while let Some(message) = receiver.next_message().unwrap() {
                messages.push(message);
            }
        }
        messages
    }

    #[test]
    fn the_header_matches_the_specification() {
        let bytes = message(Kind::READ, 3, b"a\0").encode().unwrap();
        let mut expected = Vec::new();
        for number in [2u32, 3, 7, 2] {
            expected.extend_from_slice(&number.to_ne_bytes());
        }
        expected.extend_from_slice(b"a\0");
        assert_eq!(bytes, expected);
    }

    /// Scope: three messages, one of them empty, split at every pair of positions.
    #[test]
    fn every_split_of_the_input_yields_the_same_messages() {
        let sent = [
            message(Kind::READ, 1, b"value"),
            message(Kind::WATCH_EVENT, 0, b""),
            message(Kind::ERROR, u32::MAX, b"ENOENT\0"),
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(|message| message.encode().unwrap()).collect();
        for first in 0..=bytes.len() {
            for second in first..=bytes.len() {
                let pieces = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                assert_eq!(received(&pieces), sent, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn a_payload_of_the_maximum_length_is_accepted_and_a_longer_one_refused() {
        let longest = message(Kind::WRITE, 1, &[b'x'; PAYLOAD_MAX]);
        assert_eq!(received(&[&longest.encode().unwrap()]), [longest]);
        assert_eq!(message(Kind::WRITE, 1, &[b'x'; PAYLOAD_MAX + 1]).encode(), None);

        let mut receiver = Receiver::default();
        receiver.push(&[0; 12]);
        receiver.push(&4097u32.to_ne_bytes());
        assert_eq!(receiver.next_message(), Err(TooLong { len: 4097 }));
    }

    #[test]
    fn words_end_with_nul_or_with_the_payload() {
        let words = |payload: &[u8]| -> Vec<Vec<u8>> {
            message(Kind::DIRECTORY, 1, payload).words().map(<[u8]>::to_vec).collect()
        };
        assert_eq!(words(b""), Vec::<Vec<u8>>::new());
        assert_eq!(words(b"a\0bc\0"), [b"a".to_vec(), b"bc".to_vec()]);
        assert_eq!(words(b"a\0bc"), [b"a".to_vec(), b"bc".to_vec()]);
        assert_eq!(words(b"a\0\0"), [b"a".to_vec(), b"".to_vec()]);
    }
}
