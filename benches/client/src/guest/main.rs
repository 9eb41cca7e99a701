//! `bench-guest`: does what a booting guest does, without a guest: it reads the golden image, writes, flushes, and
//! remembers what its disks must contain.
//!
//! The client is the crate `blkio`, which shares no code with the server. It reads a [`Job`] from its standard input,
//! uses a thread for each disk, and prints the results. The promises for a disk are kept in a file: the next run with
//! the same disk begins with checking them.

mod device;
mod disk;
mod pattern;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// The job of the program.
#[derive(Debug, Deserialize)]
struct Job {
    /// Rounds of writes, each followed by a flush. With zero, the disks are only checked.
    rounds: u32,
    /// Blocks written per round.
    blocks: u32,
    disks: Vec<Disk>,
}

/// A disk, and the process that serves it.
#[derive(Clone, Debug, Deserialize)]
struct Disk {
    /// The path of the socket.
    socket: String,
    /// The pid of the server. If it has exited, the disk is gone.
    pid: u32,
    /// The file with the expected content of the disk.
    memory: PathBuf,
    /// Seed of the content, different for each disk.
    seed: u64,
    /// The line of which the block at [`pattern::MARKER_AT`] consists, written by another guest.
    marker: Option<String>,
}

/// The result for a disk.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
enum Outcome {
    /// The content was correct, and everything is written.
    Done { requests: u64 },
    /// The server has exited.
    Gone { requests: u64 },
    /// The content is wrong, or a request failed.
    Failed { why: String },
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let done = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["golden", path] => golden(Path::new(path)),
        [] => run(),
        _ => Err("usage: bench-guest < JOB, or bench-guest golden FILE".to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("bench-guest: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the golden image as a raw file.
fn golden(path: &Path) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = File::create_new(path).map_err(failed)?;
    pattern::golden(&mut BufWriter::new(&file)).and_then(|()| file.set_len(pattern::SIZE)).map_err(failed)
}

fn run() -> Result<(), String> {
    let job: Job = serde_json::from_reader(std::io::stdin()).map_err(|error| format!("the job: {error}"))?;
    let (rounds, blocks) = (job.rounds, job.blocks);
    let threads: Vec<_> = job
        .disks
        .into_iter()
        .map(|disk| {
            std::thread::spawn(move || disk::boot(&disk, rounds, blocks).unwrap_or_else(|why| Outcome::Failed { why }))
        })
        .collect();
    let outcomes: Vec<Outcome> = threads
        .into_iter()
        .map(|thread| {
            thread.join().unwrap_or_else(|_| Outcome::Failed { why: "a thread of the guest has panicked".to_owned() })
        })
        .collect();
    println!("{}", serde_json::json!(outcomes));
    Ok(())
}
