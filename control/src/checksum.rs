//! The digest that a file must have, or where it is found: `sha256:HEX`, `sha512:HEX`, the URL of a list, or `auto`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A kind of digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-256 of FIPS 180.
    Sha256,
    /// SHA-512 of FIPS 180.
    Sha512,
}

impl Algorithm {
    /// Its name in a checksum.
    pub fn word(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }

    /// The length of its digests in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Algorithm::Sha256 => 32,
            Algorithm::Sha512 => 64,
        }
    }
}

/// A digest of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Digest {
    /// The kind of digest.
    pub algorithm: Algorithm,
    bytes: Vec<u8>,
}

impl Digest {
    /// Makes one; `None` unless the length is that of the algorithm.
    pub fn new(algorithm: Algorithm, bytes: &[u8]) -> Option<Digest> {
        (bytes.len() == algorithm.bytes()).then(|| Digest { algorithm, bytes: bytes.to_vec() })
    }

    /// Parses hexadecimal digits, whose number tells the algorithm.
    pub fn of_hex(word: &str) -> Option<Digest> {
        let algorithm = [Algorithm::Sha256, Algorithm::Sha512].into_iter().find(|of| of.bytes() * 2 == word.len())?;
        let is_hex = word.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digit = |byte: &u8| char::from(*byte).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        let pair = |pair: &[u8]| match pair {
            [high, low] => Some(digit(high)? << 4 | digit(low)?),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = word.as_bytes().chunks(2).map(pair).collect();
        bytes.filter(|_| is_hex).map(|bytes| Digest { algorithm, bytes })
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.algorithm.word())?;
        self.bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The value of `--checksum`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// This digest.
    Is(Digest),
    /// That in a list with this URL.
    In(String),
    /// That in a list next to the file.
    Auto,
}

/// The word is not a checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use sha256:HEX with 64 digits, sha512:HEX with 128 digits, the https URL of a list, or auto")]
pub struct NotAChecksum;

impl FromStr for Checksum {
    type Err = NotAChecksum;

    fn from_str(word: &str) -> Result<Checksum, NotAChecksum> {
        match word.split_once(':') {
            None if word == "auto" => Ok(Checksum::Auto),
            Some(("https" | "http", rest)) if rest.starts_with("//") => Ok(Checksum::In(word.to_owned())),
            Some((algorithm, hex)) => Digest::of_hex(hex)
                .filter(|digest| digest.algorithm.word() == algorithm)
                .map(Checksum::Is)
                .ok_or(NotAChecksum),
            None => Err(NotAChecksum),
        }
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Checksum::Is(digest) => digest.fmt(f),
            Checksum::In(url) => f.write_str(url),
            Checksum::Auto => f.write_str("auto"),
        }
    }
}

impl Serialize for Checksum {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Checksum {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Checksum, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_checksum_is_a_digest_of_its_length_a_url_or_auto() {
        let hex = "0f".repeat(32);
        let parse = |word: &str| word.parse::<Checksum>();
        assert_eq!(parse(&format!("sha256:{hex}")).unwrap().to_string(), format!("sha256:{hex}"));
        assert_eq!(parse(&format!("sha512:{hex}{hex}")).unwrap().to_string(), format!("sha512:{hex}{hex}"));
        assert_eq!(parse(&format!("sha256:{}", hex.to_uppercase())).unwrap().to_string(), format!("sha256:{hex}"));
        assert_eq!(parse("auto"), Ok(Checksum::Auto));
        assert_eq!(parse("https://host/SHA256SUMS"), Ok(Checksum::In("https://host/SHA256SUMS".into())));
        for word in [&format!("sha512:{hex}"), &format!("md5:{hex}"), &hex, "sha256:", "", "file:///a"] {
            assert_eq!(parse(word), Err(NotAChecksum), "{word}");
        }
        assert_eq!(Digest::of_hex(&"+f".repeat(32)), None);
        assert_eq!(Digest::of_hex(&"é".repeat(32)), None);
    }
}
