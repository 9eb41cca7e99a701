//! The only place where commands print. A closed pipe is not an error, and the command ends as usual; any other failure
//! to print is an error.

use std::io::{self, Write};

pub use control::printable;
use control::{Id, Reply};
use serde::Serialize;

use crate::process::failure::Failure;

/// Prints `text` unchanged.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(|error| Failure::new("print the result", error)),
    }
}

/// Sends the failure to the process that has passed its files to this one: as the last line, in the format of the
/// control socket.
pub fn send_failure(failure: &Failure) {
    let line = Reply::<()>::Error(failure.clone().into()).line(&Id::default());
    // It is on stderr as well, and the parent need not read it here.
    print(&line).unwrap_or_default();
}

/// Prints a value as JSON.
pub fn json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new("print JSON", error))?;
    print(&format!("{text}\n"))
}
