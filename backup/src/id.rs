//! Identities: random ids of what is created, and digests of what is stored.
//!
//! Knows nothing about keys or objects. An id is never given out twice, and neither is a name that contains one.

use std::fmt;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A random id of 128 bits, written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id([u8; 16]);

/// A digest of 256 bits, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Id {
    /// Random bits of the system; waits only while a system that has just started has none.
    pub fn random() -> Id {
        let mut bytes = [0; 16];
        random(&mut bytes);
        Id(bytes)
    }

    /// The id of whatever has this name: equal for equal names, on each host and target.
    pub fn of_name(name: &str) -> Id {
        let digest = blake3::derive_key("tapline backup 1 disk by name", name.as_bytes());
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(digest).for_each(|(byte, of_digest)| *byte = of_digest);
        Id(bytes)
    }

    /// An id of these bytes, such as those of a UUID.
    pub const fn from_bytes(bytes: [u8; 16]) -> Id {
        Id(bytes)
    }

    /// The bytes of the id.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Parses 32 hexadecimal digits in lower case.
    pub fn parse(text: &str) -> Option<Id> {
        unhex(text).map(Id)
    }
}

impl Digest {
    /// Stands for content that is all zeroes and is not stored.
    pub const HOLE: Digest = Digest([0; 32]);

    /// A digest of these bytes.
    pub const fn from_bytes(bytes: [u8; 32]) -> Digest {
        Digest(bytes)
    }

    /// The bytes of the digest.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Parses 64 hexadecimal digits in lower case.
    pub fn parse(text: &str) -> Option<Digest> {
        unhex(text).map(Digest)
    }
}

/// Fills `bytes` with random bits of the system.
pub(crate) fn random(bytes: &mut [u8]) {
    #[cfg(test)]
    if crate::test::seed::fill(bytes) {
        return;
    }
    let mut filled = 0;
    while let Some(rest) = bytes.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty()) {
            Ok(got) => filled += got,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("the system has no random bits: {errno}"),
        }
    }
}

fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * N || text.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok().filter(|pair| !pair.starts_with('+'))?, 16).ok()?;
    }
    Some(bytes)
}

macro_rules! hexadecimal {
    ($type:ty, $what:literal) => {
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(self, f)
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = String::deserialize(deserializer)?;
                Self::parse(&text).ok_or_else(|| D::Error::custom(concat!("not ", $what)))
            }
        }
    };
}

hexadecimal!(Id, "an id of 32 hexadecimal digits");
hexadecimal!(Digest, "a digest of 64 hexadecimal digits");

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn only_lower_case_digits_of_the_exact_length_are_parsed() {
        let id = Id::from_bytes([0xa5; 16]);
        assert_eq!(Id::parse(&id.to_string()), Some(id));
        assert_eq!(Id::parse(&id.to_string().to_uppercase()), None);
        assert_eq!(Id::parse(&"+a".repeat(16)), None);
        assert_eq!(Id::parse("a5"), None);
        assert_eq!(Id::parse(&"é".repeat(16)), None);
    }
}
