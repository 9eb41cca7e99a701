//! Prints to stdout and stderr. A closed pipe, as with `head`, is not an error.

use std::io::{self, Write};
use std::ops::ControlFlow;

/// Prints to stdout; breaks if the reader is gone, so that commands that follow events stop.
pub fn print(text: &str) -> io::Result<ControlFlow<()>> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(error) => Err(error),
    }
}

/// Prints to stdout, for commands without a daemon.
pub fn print_local(text: &str) -> Result<(), control::Error> {
    print(text).map(drop).map_err(|error| control::Error::cannot("print the result", error))
}

/// Prints a message to stderr; write errors are ignored.
pub fn say(text: &str) {
    io::stderr().write_all(api::visible(text).as_bytes()).unwrap_or_default();
}
