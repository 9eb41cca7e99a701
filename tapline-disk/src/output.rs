//! What a command prints, in one place: a reader that goes away early is an error to be told, not a panic.

use std::io::Write;

use serde::Serialize;

use crate::failure::Failure;

/// Prints `text` as it is.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.map_err(|error| Failure::new("print the result", error))
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new("print JSON", error))?;
    print(&format!("{text}\n"))
}
