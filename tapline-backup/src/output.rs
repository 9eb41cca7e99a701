//! Results on standard output. A reader that has gone, as with `head`, is no failure.

use std::io::{self, Write};

use jiff::Timestamp;
use serde::Serialize;

use crate::failure::Failure;

/// Prints text on standard output.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::cannot("print the result", error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Prints a value as a line of JSON.
pub fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let line = serde_json::to_string(value).map_err(|error| Failure::cannot("print the result", error))?;
    print(&(line + "\n"))
}

/// A moment in UTC, to the second.
pub fn time(seconds: u64) -> String {
    let moment = i64::try_from(seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
    moment.map_or_else(|| seconds.to_string(), |moment| moment.to_string())
}

/// The time now, in seconds since 1970.
pub fn now() -> u64 {
    u64::try_from(Timestamp::now().as_second()).unwrap_or(0)
}
