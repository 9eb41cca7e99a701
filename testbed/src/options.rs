//! Options and parsers that several chores share.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// Returns a random seed.
pub fn any_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::from(now.subsec_nanos())
}

/// Parses a number of at least 1.
pub fn positive(text: &str) -> Result<usize, String> {
    let number = text.parse::<NonZeroUsize>().map_err(|error| error.to_string())?;
    Ok(number.get())
}

/// Parses a path and makes it absolute, because programs run in other directories.
pub fn whole_path(text: &str) -> Result<PathBuf, String> {
    std::path::absolute(text).map_err(|error| error.to_string())
}

/// Parses words into options, for tests; the error is the message for users.
pub fn parse<T: clap::Args>(words: &[&str]) -> Result<T, String> {
    let command = T::augment_args(clap::Command::new("chore").no_binary_name(true));
    let matches = command.try_get_matches_from(words).map_err(|error| error.to_string())?;
    T::from_arg_matches(&matches).map_err(|error| error.to_string())
}
