//! `--end-with-input`: the program ends when the process that has started it does, as if killed.
//!
//! It knows nothing about the command, which survives that at any moment: nothing counts on a target that was not
//! published, and a restore writes to what is not in use yet.

use std::io::stdin;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::STDERR;
use crate::failure::{Exit, Failure};

/// Ends this process when its standard input is closed, whatever it is doing.
pub fn watch() -> Result<(), Failure> {
    let started = std::thread::Builder::new().name("parent".into()).spawn(|| {
        let input = stdin();
        // Only a hang-up is reported (poll(2), POLLHUP): all holders of the other end have closed it.
        let mut ends = [PollFd::new(&input, PollFlags::empty())];
        loop {
            match poll(&mut ends, None) {
                Err(Errno::INTR) => {}
                Err(errno) => return STDERR.say(format_args!("cannot watch the process that started this: {errno}")),
                Ok(_) => break,
            }
        }
        std::process::exit(Exit::Failed.number().into());
    });
    started.map(drop).map_err(|error| Failure::cannot("watch the process that started this", error))
}
