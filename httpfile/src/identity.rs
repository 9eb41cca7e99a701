//! The identity of an object: its length, and the validator with which its server names this very state of it (RFC
//! 9110, section 8.8). And the part of an object that an answer has.
//!
//! A strong ETag changes with every byte. A date of the last modification has a resolution of one second and is said to
//! be weaker; with the length it is what servers without ETags have. A weak ETag (`W/`) says nothing about bytes and is
//! not used.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use ureq::http::HeaderMap;

use crate::error::Fault;

/// No server's validators are as long.
const VALIDATOR_MAX: usize = 1024;

/// Names a state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Validator {
    /// A strong ETag, with its quotes.
    ETag(String),
    /// The date of the last modification, as the server writes it.
    Modified(String),
}

/// A state of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The length in bytes.
    pub len: u64,
    /// Its validator.
    pub validator: Validator,
}

impl Validator {
    /// The validator in an answer.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Validator> {
        let value = |name| text(headers, name).filter(|value| value.len() <= VALIDATOR_MAX);
        let tag = value("etag").filter(|tag| tag.len() > 2 && tag.starts_with('"') && tag.ends_with('"'));
        match tag {
            Some(tag) => Some(Validator::ETag(tag.to_owned())),
            None => value("last-modified").filter(|date| !date.is_empty()).map(|date| Validator::Modified(date.into())),
        }
    }

    /// The header of a request that must not be carried out on another state (RFC 9110, sections 13.1.1 and 13.1.4).
    pub(crate) fn condition(&self) -> (&'static str, &str) {
        match self {
            Validator::ETag(tag) => ("if-match", tag),
            Validator::Modified(date) => ("if-unmodified-since", date),
        }
    }

    /// Whether it changes with every byte.
    pub fn is_strong(&self) -> bool {
        matches!(self, Validator::ETag(_))
    }

    /// Fails unless an answer is of this state.
    pub(crate) fn check(&self, headers: &HeaderMap) -> Result<(), Fault> {
        let (name, expected) = match self {
            Validator::ETag(tag) => ("etag", tag),
            Validator::Modified(date) => ("last-modified", date),
        };
        match text(headers, name) {
            Some(found) if found == expected => Ok(()),
            Some(found) => {
                let found: String = found.chars().take(VALIDATOR_MAX).collect();
                Err(Fault::changed(format!(
                    "it has changed while it was read: its {name} was {expected} and is {found}"
                )))
            }
            None => Err(Fault::refused(format!("an answer lacks the {name} by which the object is recognized"))),
        }
    }
}

impl fmt::Display for Validator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Validator::ETag(tag) => write!(f, "etag {tag}"),
            Validator::Modified(date) => write!(f, "last-modified {date}"),
        }
    }
}

impl FromStr for Validator {
    type Err = ();

    fn from_str(word: &str) -> Result<Validator, ()> {
        match word.split_once(' ') {
            Some(("etag", tag)) => Ok(Validator::ETag(tag.to_owned())),
            Some(("last-modified", date)) => Ok(Validator::Modified(date.to_owned())),
            _ => Err(()),
        }
    }
}

/// A header that occurs once, as text.
pub(crate) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    value.to_str().ok().map(str::trim)
}

/// The part of an object that an answer has: `Content-Range` (RFC 9110, section 14.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) range: Range<u64>,
    /// The length of the object.
    pub(crate) len: u64,
}

impl Part {
    pub(crate) fn of(headers: &HeaderMap) -> Result<Part, Fault> {
        let Some(word) = text(headers, "content-range") else {
            return Err(Fault::refused("an answer with a part of the object lacks Content-Range, or has several"));
        };
        Part::parse(word).ok_or_else(|| {
            let word: String = word.chars().take(100).collect();
            Fault::refused(format!("the Content-Range '{word}' is not that of one range of an object of known length"))
        })
    }

    fn parse(word: &str) -> Option<Part> {
        let (unit, rest) = word.split_once(' ')?;
        let (range, len) = rest.trim().split_once('/')?;
        let (first, last) = range.split_once('-')?;
        let (first, last, len) = (number(first)?, number(last)?, number(len)?);
        let end = last.checked_add(1)?;
        let fits = unit.eq_ignore_ascii_case("bytes") && first < end && end <= len;
        fits.then_some(Part { range: first..end, len })
    }
}

/// A number of nothing but digits.
pub(crate) fn number(word: &str) -> Option<u64> {
    let is_number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| word.parse().ok()).flatten()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_content_range_is_of_one_range_within_a_known_length() {
        assert_eq!(Part::parse("bytes 0-9/10"), Some(Part { range: 0..10, len: 10 }));
        assert_eq!(Part::parse("bytes 5-5/10"), Some(Part { range: 5..6, len: 10 }));
        for wrong in [
            "bytes 0-10/10",
            "bytes 5-4/10",
            "bytes 0-9/*",
            "bytes */10",
            "bytes 0-9",
            "items 0-9/10",
            "bytes +0-9/10",
            "bytes 0-18446744073709551615/18446744073709551615",
            "bytes 0-99999999999999999999/99999999999999999999",
            "",
        ] {
            assert_eq!(Part::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_a_strong_etag_is_preferred_to_a_date() {
        let of = |pairs: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.append(*name, value.parse().unwrap());
            }
            Validator::of(&headers)
        };
        let date = "Sat, 01 Aug 2026 10:00:00 GMT";
        assert_eq!(of(&[("etag", "\"a\""), ("last-modified", date)]), Some(Validator::ETag("\"a\"".into())));
        assert_eq!(of(&[("etag", "W/\"a\""), ("last-modified", date)]), Some(Validator::Modified(date.into())));
        assert_eq!(of(&[("etag", "W/\"a\"")]), None);
        assert_eq!(of(&[("etag", "\"a\""), ("etag", "\"b\"")]), None);
        assert_eq!(of(&[("etag", &format!("\"{}\"", "a".repeat(2000)))]), None);
        for validator in [Validator::ETag("\"a b\"".into()), Validator::Modified(date.into())] {
            assert_eq!(validator.to_string().parse(), Ok(validator));
        }
    }
}
