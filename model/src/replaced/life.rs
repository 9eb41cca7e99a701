//! Serves an image, writes to it, and kills or stops the process.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use sim::random::Random;
use testkit::nbd::{Client, Command};

use super::image::Image;
use super::oracle::Oracle;
use super::program::Programs;
use super::site::Site;
use crate::content::{Range, UNIT, bytes_of};

/// Number of units of a disk.
pub const UNITS: u64 = 1024;

/// Number of parts of a disk; each has at most one request of a burst.
const PARTS: u64 = 8;

/// Bytes of a read.
const READ_LEN: usize = 1 << 20;

/// A disk process that serves an image; killed on drop.
#[derive(Debug)]
pub struct Served {
    child: Child,
    log: BufReader<ChildStderr>,
    /// The NBD connection to it.
    pub client: Client,
}

impl Served {
    /// Serves an image; an error contains why it was not served.
    pub fn start(
        programs: &Programs,
        site: &Site,
        image: &Image,
        read_only: bool,
    ) -> Result<Result<Served, String>, String> {
        let socket = site.room.join("nbd");
        let mut command = programs.disk(site);
        command.args(["serve", &image.name()]).args(image.parent_words()).arg("--nbd").arg(&socket);
        command.arg("--stats-page").arg(site.room.join("stats"));
        if read_only {
            command.arg("--read-only");
        }
        let mut child =
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
        let mut log = BufReader::new(child.stderr.take().ok_or("no log")?);
        let mut said = String::new();
        loop {
            let begin = said.len();
            let len = log.read_line(&mut said).map_err(|error| error.to_string())?;
            if len == 0 {
                child.wait().map_err(|error| error.to_string())?;
                return Ok(Err(said));
            }
            if said.get(begin..).is_some_and(|line| line.contains("serving ")) {
                break;
            }
        }
        let client = Client::connect(&socket).map_err(|error| format!("{}: {error}", socket.display()))?;
        Ok(Ok(Served { child, log, client }))
    }

    /// Reads this number of units from the beginning.
    pub fn read(&mut self, units: u64) -> std::io::Result<Vec<u8>> {
        let len = usize::try_from((units * UNIT).min(self.client.size)).unwrap_or(0);
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let at = u64::try_from(bytes.len()).unwrap_or(0);
            bytes.extend(self.client.read(at, READ_LEN.min(len - bytes.len()))?);
        }
        Ok(bytes)
    }

    /// Kills the process with SIGKILL.
    pub fn kill(mut self) -> Result<(), String> {
        self.child.kill().map_err(|error| error.to_string())?;
        self.child.wait().map(drop).map_err(|error| error.to_string())
    }

    /// Stops the process with SIGTERM.
    pub fn stop(mut self) -> Result<(), String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).ok_or("no process")?;
        kill_process(pid, Signal::TERM).map_err(|error| error.to_string())?;
        let mut said = String::new();
        self.log.read_to_string(&mut said).map_err(|error| error.to_string())?;
        let status = self.child.wait().map_err(|error| error.to_string())?;
        if status.success() { Ok(()) } else { Err(format!("stopped, {status}: {said}")) }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Still running only after a failure.
        self.child.kill().unwrap_or_default();
        self.child.wait().map(drop).unwrap_or_default();
    }
}

/// When a copy of a served image is taken.
pub enum CopyTime {
    /// After a flush, without requests in flight.
    Quiet,
    /// At any time, as an atomic copy.
    Any,
}

/// Called to take a copy, with what the disk may show at that time.
pub type Copier<'a> = dyn FnMut(&Oracle) -> Result<(), String> + 'a;

/// Sends requests until the process is to be killed or stopped. `copy` is called at a random time if it is given.
pub fn live(
    served: &mut Served,
    oracle: &mut Oracle,
    random: &mut Random,
    stamps: &mut u64,
    mut copy: Option<(CopyTime, &mut Copier<'_>)>,
) -> Result<(), String> {
    let count = 3 + random.below(20);
    let copied_at = random.below(count);
    for request in 0..count {
        if request == copied_at {
            if let Some((moment, copy)) = &mut copy {
                if matches!(moment, CopyTime::Quiet) {
                    served.client.flush().map_err(|error| error.to_string())?;
                    oracle.flushed();
                }
                copy(oracle)?;
            }
        }
        write(&mut served.client, oracle, random, stamps)?;
    }
    Ok(())
}

/// Sends a random request that changes the disk, or a flush.
pub fn write(client: &mut Client, oracle: &mut Oracle, random: &mut Random, stamps: &mut u64) -> Result<(), String> {
    let at = random.below(UNITS);
    let len = match random.below(3) {
        0 => 1,
        1 => 16,
        _ => 1 + random.below(40),
    };
    let range = Range { at, len: len.min(UNITS - at) };
    *stamps += 1;
    let stamp = *stamps;
    let (at, len) = (range.at * UNIT, range.len * UNIT);
    let done = match random.below(20) {
        0..=1 => client.ask(Command::Trim, at, len, &[]).map(|_| oracle.set_perhaps(range, 0)),
        2..=3 => client.ask(Command::Zeroes, at, len, &[]).map(|_| oracle.set(range, 0)),
        4..=5 => client.flush().map(|()| oracle.flushed()),
        6..=7 => client.write_durably(at, &bytes_of(range, stamp)).map(|()| oracle.set_durably(range, stamp)),
        _ => client.write(at, &bytes_of(range, stamp)).map(|()| oracle.set(range, stamp)),
    };
    done.map_err(|error| format!("a request of a served disk: {error}"))
}

/// Sends a burst of requests and kills the process while they are in flight.
pub fn kill(mut served: Served, oracle: &mut Oracle, random: &mut Random, stamps: &mut u64) -> Result<(), String> {
    for part in 0..random.below(PARTS) {
        let units = UNITS / PARTS;
        let len = 1 + random.below(20);
        let range = Range { at: part * units + random.below(units - len), len };
        *stamps += 1;
        let bytes = bytes_of(range, *stamps);
        let sent = served.client.send(Command::Write, range.at * UNIT, range.len * UNIT, &bytes);
        sent.map_err(|error| error.to_string())?;
        oracle.set_perhaps(range, *stamps);
    }
    // The time is random, and the only part of a round that a seed does not reproduce.
    let begun = Instant::now();
    let wait = Duration::from_micros(random.below(800));
    while begun.elapsed() < wait {
        std::hint::spin_loop();
    }
    served.kill()
}
