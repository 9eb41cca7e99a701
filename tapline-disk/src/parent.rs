//! `--end-with-input`: a job ends when whoever has started it does.
//!
//! It knows nothing of the job: its end is as if it was killed, which every job survives. The daemon that has gone kept
//! the other end of our standard input; the one after it does or undoes from its journal what was begun, and needs the
//! image's lock for that.

use std::io::stdin;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::failure::{Exit, Failure};
use crate::log::say;

/// From now on this process ends with its standard input, in the middle of whatever it does.
pub fn end_with() -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("parent".into());
    let started = thread.spawn(|| {
        let input = stdin();
        // Nothing but its end is told (poll(2), POLLHUP); of a socket that is the end of all who have the other side.
        let mut ends = [PollFd::new(&input, PollFlags::empty())];
        loop {
            match poll(&mut ends, None) {
                Err(Errno::INTR) => {}
                Err(errno) => return say(format_args!("cannot watch the process that started this job: {errno}")),
                Ok(_) => break,
            }
        }
        say("the process that started this job has exited; stopping");
        std::process::exit(Exit::Failed.code().into());
    });
    started.map(drop).map_err(|error| Failure::new("watch the parent process", error))
}
