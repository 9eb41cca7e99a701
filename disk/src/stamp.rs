//! The stamp of an image: a value in its file that distinguishes one state of its metadata from every other.
//!
//! A redo log says what follows a state of the file. A path, an inode number, a device number and a time are all given
//! out again, and a file can be restored in place, so none of them proves that a file is in that state. A stamp does: a
//! new one is written to the file before the first change that only the log has, and the log records it.
//!
//! Knows nothing about logs. Invariant: no two stamps that are ever written are equal, because each process draws a
//! session of its own at random and counts within it.

/// Bytes of a stamp in a file.
pub const STAMP_LEN: usize = 24;

/// Identifies a state of an image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Random bytes of the process that wrote it.
    pub session: [u8; 16],
    /// Its number within the session.
    pub number: u64,
}

impl Stamp {
    /// As it stands in a file.
    pub fn to_bytes(self) -> [u8; STAMP_LEN] {
        let mut bytes = [0; STAMP_LEN];
        let parts = self.session.into_iter().chain(self.number.to_be_bytes());
        bytes.iter_mut().zip(parts).for_each(|(place, byte)| *place = byte);
        bytes
    }

    /// As read from a file; `None` if the length is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Option<Stamp> {
        let (session, number) = bytes.split_first_chunk()?;
        Some(Stamp { session: *session, number: u64::from_be_bytes(number.try_into().ok()?) })
    }
}
