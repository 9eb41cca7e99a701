//! `--end-with-input`: a job, or a disk that is served for one, exits when its parent process does.
//!
//! It knows nothing about the job, which ends as if killed; every job survives that. The daemon that has exited held
//! the other end of our standard input; its successor repeats or rolls back the job from its journal, and needs the
//! image's lock for that.

use std::io::stdin;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::process::failure::{Exit, Failure};
use crate::process::log::say;

/// Makes this process exit when its standard input is closed, whatever it is doing.
pub fn enable() -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("parent".into());
    let started = thread.spawn(|| {
        let input = stdin();
        // Only a hang-up is reported (poll(2), POLLHUP); for a socket that means that all holders of the other end have
        // closed it.
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
