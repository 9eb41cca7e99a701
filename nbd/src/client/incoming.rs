//! Received bytes that are not yet a whole message, and big-endian numbers in them.
//!
//! Invariant: it keeps no more than the caller of [`Incoming::push`] adds to an incomplete message, whose length the
//! parsers check as soon as its header is there.

/// The bytes received and not yet parsed.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    bytes: Vec<u8>,
    /// The bytes before this were parsed.
    start: usize,
}

impl Incoming {
    /// Appends received bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.drop_parsed();
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends what `fill` writes into a buffer of `most` bytes; it returns how many those are.
    pub(super) fn push_by<E>(
        &mut self,
        most: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<(), E> {
        self.drop_parsed();
        let before = self.bytes.len();
        self.bytes.resize(before + most, 0);
        let filled = fill(self.bytes.get_mut(before..).unwrap_or_default());
        self.bytes.truncate(before + filled.as_ref().map_or(0, |&len| len));
        filled.map(drop)
    }

    fn drop_parsed(&mut self) {
        self.bytes.drain(..self.start);
        self.start = 0;
    }

    /// Whether all bytes were parsed.
    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    /// The next `len` bytes, if they have arrived. They stay.
    pub(super) fn peek(&self, len: usize) -> Option<&[u8]> {
        self.bytes.get(self.start..)?.get(..len)
    }

    /// Takes the next `len` bytes, if they have arrived.
    pub(super) fn take(&mut self, len: usize) -> Option<&[u8]> {
        let taken = self.bytes.get(self.start..)?.get(..len)?;
        self.start += len;
        Some(taken)
    }

    /// Drops everything, memory included.
    pub(super) fn clear(&mut self) {
        *self = Incoming::default();
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.get(..N)?.try_into().ok()
}

/// The number at offset `at`, if the bytes reach that far.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

/// The number at offset `at`, if the bytes reach that far.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

/// The number at offset `at`, if the bytes reach that far.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}
