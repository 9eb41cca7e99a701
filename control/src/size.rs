//! Sizes as people write and read them: `10G`, `512M`, `1.5 GiB`; always powers of two.

use std::fmt;
use std::str::FromStr;

const UNITS: [(char, u32); 5] = [('K', 10), ('M', 20), ('G', 30), ('T', 40), ('P', 50)];

/// A number of bytes given on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// Why a word is not a size.
#[derive(Debug, PartialEq, Eq)]
pub enum NotASize {
    /// It is not written as one.
    Malformed(String),
    /// Its unit, as `GB`, means a power of ten to some and a power of two to others.
    Ambiguous(String),
    /// It is more than 64 bits count.
    TooLarge(String),
}

impl std::error::Error for NotASize {}

impl fmt::Display for NotASize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotASize::Malformed(word) => {
                write!(f, "'{word}' is not a size; use a whole number with K, M, G, T or P, as in 512M or 10G")
            }
            NotASize::Ambiguous(word) => {
                let short = word.to_ascii_uppercase();
                let short = short.trim_end_matches('B');
                write!(f, "'{word}' is ambiguous: sizes are powers of two; use {short}, which is {short}iB")
            }
            NotASize::TooLarge(word) => write!(f, "'{word}' is too large; no size is more than 16383P"),
        }
    }
}

impl FromStr for Size {
    type Err = NotASize;

    fn from_str(word: &str) -> Result<Size, NotASize> {
        let (number, shift) = parse(word).ok_or_else(|| match is_ambiguous(word) {
            true => NotASize::Ambiguous(word.to_owned()),
            false => NotASize::Malformed(word.to_owned()),
        })?;
        let bytes = number.and_then(|number| number.checked_mul(1 << shift));
        bytes.map(Size).ok_or_else(|| NotASize::TooLarge(word.to_owned()))
    }
}

/// `10G`, `10g` and `10GiB` are the same; a bare number is bytes. `10GB` is refused: it means something else to
/// half of those who write it. The number, if 64 bits hold it, and the unit's power of two.
fn parse(word: &str) -> Option<(Option<u64>, u32)> {
    let digits = word.find(|c: char| !c.is_ascii_digit()).unwrap_or(word.len());
    let (number, unit) = word.split_at_checked(digits)?;
    if number.is_empty() {
        return None;
    }
    // All are digits: it can only be too large.
    let number = number.parse::<u64>().ok();
    if unit.is_empty() || unit == "B" {
        return Some((number, 0));
    }
    let mut letters = unit.chars();
    let letter = letters.next()?.to_ascii_uppercase();
    if !matches!(letters.as_str(), "" | "iB") {
        return None;
    }
    let (_, shift) = UNITS.into_iter().find(|&(known, _)| known == letter)?;
    Some((number, shift))
}

/// Whether it is a number with a unit such as `GB`.
fn is_ambiguous(word: &str) -> bool {
    let unit = word.trim_start_matches(|c: char| c.is_ascii_digit());
    let mut letters = unit.chars();
    let is_unit = letters.next().is_some_and(|first| UNITS.iter().any(|(unit, _)| first.to_ascii_uppercase() == *unit));
    unit.len() < word.len() && is_unit && matches!(letters.as_str(), "B" | "b")
}

/// A number of bytes in the unit that suits it, with at most one decimal: `10 GiB`, `1.5 MiB`, `511 B`.
///
/// From a TiB on, a whole number of GiB is printed in GiB: 2040 GiB, the limit of VHD, is not 1.9 TiB.
pub fn readable(bytes: u64) -> String {
    let whole_gib = bytes % (1 << 30) == 0 && bytes % (1 << 40) != 0;
    let mut units = UNITS.into_iter().rev().filter(|&(_, shift)| !whole_gib || shift <= 30);
    let suits = units.find(|&(_, shift)| bytes >= 1 << shift);
    let Some((letter, shift)) = suits else { return format!("{bytes} B") };
    let unit = 1u64 << shift;
    let tenths = (bytes % unit) * 10 / unit;
    match tenths {
        0 => format!("{} {letter}iB", bytes / unit),
        _ => format!("{}.{tenths} {letter}iB", bytes / unit),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sizes_are_powers_of_two() {
        assert_eq!("512M".parse(), Ok(Size(512 << 20)));
        assert_eq!("10g".parse(), Ok(Size(10 << 30)));
        assert_eq!("2TiB".parse(), Ok(Size(2 << 40)));
        assert_eq!("1048576".parse(), Ok(Size(1 << 20)));
        assert_eq!("511B".parse(), Ok(Size(511)));
    }

    #[test]
    fn a_decimal_unit_is_refused_with_the_binary_one() {
        for word in ["10GB", "10gb", "10Gb"] {
            let error = word.parse::<Size>().unwrap_err();
            assert_eq!(error, NotASize::Ambiguous(word.to_owned()));
            let expected = format!("'{word}' is ambiguous: sizes are powers of two; use 10G, which is 10GiB");
            assert_eq!(error.to_string(), expected);
        }
        for word in ["GB", "10XB", "10B B", "10iB", "10GiBB", "10éB"] {
            assert_eq!(word.parse::<Size>(), Err(NotASize::Malformed(word.to_owned())));
        }
    }

    #[test]
    fn ambiguous_and_too_large_sizes_are_refused() {
        for word in ["", "G", "10GB", "1.5G", "-1", "10 G", "99999999P", "10Gi", "é", "1é"] {
            assert!(word.parse::<Size>().is_err(), "{word}");
        }
        for word in ["99999P", "18446744073709551616", "16384P"] {
            assert_eq!(word.parse::<Size>(), Err(NotASize::TooLarge(word.to_owned())));
        }
        assert_eq!("16383P".parse(), Ok(Size(16383 << 50)));
    }

    #[test]
    fn readable_sizes_round_down_to_a_tenth() {
        assert_eq!(readable(0), "0 B");
        assert_eq!(readable(511), "511 B");
        assert_eq!(readable(1536), "1.5 KiB");
        assert_eq!(readable(10 << 30), "10 GiB");
        assert_eq!(readable(2040 << 30), "2040 GiB");
        assert_eq!(readable(2 << 40), "2 TiB");
        assert_eq!(readable((10 << 30) - 1), "9.9 GiB");
        assert_eq!(readable(u64::MAX), "16383.9 PiB");
    }
}
