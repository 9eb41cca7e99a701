//! The value of `--patience`.

use std::str::FromStr;
use std::time::Duration;

/// How long requests wait for a server that is away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// As long as it is away.
    Forever,
    /// Then they fail.
    For(Duration),
}

/// The word is neither a number of seconds nor `forever`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use a number of seconds up to 31536000, or 'forever'")]
pub struct NotPatience;

/// A year: more is meant to be forever.
const SECONDS_MAX: u64 = 365 * 24 * 60 * 60;

impl FromStr for Patience {
    type Err = NotPatience;

    fn from_str(word: &str) -> Result<Patience, NotPatience> {
        if word == "forever" {
            return Ok(Patience::Forever);
        }
        let seconds = word.parse().ok().filter(|&seconds: &u64| seconds <= SECONDS_MAX).ok_or(NotPatience)?;
        Ok(Patience::For(Duration::from_secs(seconds)))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn patience_is_a_number_of_seconds_or_forever() {
        assert_eq!("forever".parse(), Ok(Patience::Forever));
        assert_eq!("0".parse(), Ok(Patience::For(Duration::ZERO)));
        assert_eq!("90".parse(), Ok(Patience::For(Duration::from_secs(90))));
        for word in ["", "-1", "1s", "31536001", "Forever"] {
            assert_eq!(word.parse::<Patience>(), Err(NotPatience), "{word}");
        }
    }
}
