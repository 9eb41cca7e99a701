//! The values of options, one word each.

use sim::sector::SECTOR;
use sim::subject::LARGE;

/// The words that are left.
pub(super) struct Values<'a> {
    pub(super) words: std::slice::Iter<'a, String>,
}

impl Values<'_> {
    pub(super) fn positive<T: std::str::FromStr + Default + PartialEq>(&mut self, option: &str) -> Result<T, String>
    where
        T::Err: std::fmt::Display,
    {
        let value = self.parse(option)?;
        if value == T::default() { Err(format!("{option} must be at least 1")) } else { Ok(value) }
    }

    pub(super) fn unit(&mut self, option: &str) -> Result<u64, String> {
        let unit = self.parse(option)?;
        let known = [SECTOR, LARGE].contains(&unit);
        if known { Ok(unit) } else { Err(format!("{option} {unit}: drives have sectors of {SECTOR} or {LARGE} bytes")) }
    }

    pub(super) fn parse<T: std::str::FromStr>(&mut self, option: &str) -> Result<T, String>
    where
        T::Err: std::fmt::Display,
    {
        let word = self.words.next().ok_or_else(|| format!("{option} needs a value"))?;
        word.parse().map_err(|error| format!("{option} {word}: {error}"))
    }
}
