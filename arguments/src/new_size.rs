//! The new size of a disk, as it is typed.

use std::str::FromStr;

use control::size::{NotASize, Size};

/// The new size of a disk: `40G`, or `+10G` for 10 GiB more than now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// This many bytes.
    To(u64),
    /// This many bytes more.
    By(u64),
}

impl NewSize {
    /// The new size in bytes of a disk of `current` bytes; `None` if 64 bits cannot hold it.
    #[must_use]
    pub fn from(self, current: u64) -> Option<u64> {
        match self {
            NewSize::To(size) => Some(size),
            NewSize::By(more) => current.checked_add(more),
        }
    }
}

impl FromStr for NewSize {
    type Err = NotASize;

    fn from_str(word: &str) -> Result<NewSize, NotASize> {
        let (number, kind): (&str, fn(u64) -> NewSize) = match word.strip_prefix('+') {
            Some(more) => (more, NewSize::By),
            None => (word, NewSize::To),
        };
        number.parse().map(|Size(bytes)| kind(bytes))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_plus_adds_to_the_current_size() {
        assert_eq!("40G".parse(), Ok(NewSize::To(40 << 30)));
        assert_eq!("+10G".parse::<NewSize>().unwrap().from(1 << 30), Some(11 << 30));
        assert_eq!(NewSize::By(1).from(u64::MAX), None);
        for wrong in ["", "+", "++1G", "-1G", "+1GB"] {
            assert!(wrong.parse::<NewSize>().is_err(), "{wrong}");
        }
    }
}
