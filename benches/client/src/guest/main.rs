//! `bench-guest`: what a guest does that boots, without a guest: it reads what the golden image holds, writes here and
//! there, flushes, and knows ever after what its disks must hold.
//!
//! The client is the crate `blkio`, which shares no code with the server. It reads a [`Job`] from its standard input,
//! has a thread for each disk, and prints what came of each. What was promised of a disk is kept in a file: the next
//! one that has the same disk begins with looking whether that is so.

mod device;
mod disk;
mod pattern;

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use serde::{Deserialize, Serialize};

/// What is to be done.
#[derive(Debug, Deserialize)]
struct Job {
    /// Rounds of writes, each with a flush behind it. None: it is only looked whether all is there.
    rounds: u32,
    /// Blocks that are written in a round.
    blocks: u32,
    disks: Vec<Disk>,
}

/// A disk, and by whom it is served.
#[derive(Clone, Debug, Deserialize)]
struct Disk {
    /// The socket.
    socket: String,
    /// The number of the process behind it. When that is gone, so is the disk.
    pid: u32,
    /// Where it is kept what the disk must hold.
    memory: PathBuf,
    /// What tells its contents from those of others.
    seed: u64,
    /// The line of which the block at [`pattern::MARKER_AT`] consists, which another guest has written.
    marker: Option<String>,
}

/// What came of a disk.
#[derive(Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
enum Outcome {
    /// All was as it should be, and all is written.
    Done { requests: u64 },
    /// Its process has ended.
    Gone { requests: u64 },
    /// Something is not as it should be.
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

/// Writes the golden image, raw.
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
