//! `bench-client`: keeps a number of requests in flight on a vhost-user-blk server and says what it saw.
//!
//! The client is the crate `blkio`, which shares no code with the server. It sleeps on the completion eventfd, as
//! a guest does, unless told to poll. Latency is measured from just before a request is put into the ring to the
//! moment at which the client has seen its answer.

mod load;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Reads at random places.
    Randread,
    /// Writes at random places.
    Randwrite,
    /// Reads one after the other.
    Read,
    /// Writes one after the other.
    Write,
}

/// Keep requests in flight on a vhost-user-blk server and print a line of JSON about it.
#[derive(Clone, Debug, Parser)]
pub struct Arguments {
    /// Socket of the server.
    pub socket: String,
    /// What to do.
    #[arg(long, value_enum, default_value = "randread")]
    pub pattern: Pattern,
    /// Bytes a request.
    #[arg(long, default_value_t = 4096)]
    pub block: usize,
    /// Requests in flight.
    #[arg(long, default_value_t = 32)]
    pub depth: usize,
    /// Seconds that are measured.
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Seconds before that, which are not.
    #[arg(long, default_value_t = 0.5)]
    pub warmup: f64,
    /// Ask for so many requests a second, one at a time, instead of keeping the depth.
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// Seconds after that, which are not either.
    #[arg(long, default_value_t = 0.0)]
    pub cooldown: f64,
    /// Spin for answers instead of sleeping.
    #[arg(long)]
    pub poll: bool,
    /// Seed of the places.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Only the first so many bytes of the disk.
    #[arg(long)]
    pub span: Option<u64>,
    /// Ask for nothing: stay connected until standard input ends.
    #[arg(long, conflicts_with = "fill")]
    pub hold: bool,
    /// Write every block of the disk once, and end.
    #[arg(long)]
    pub fill: bool,
    /// Fill only each so-manieth block.
    #[arg(long, default_value_t = 1, requires = "fill")]
    pub every: u64,
    /// Begin to fill at this block.
    #[arg(long, default_value_t = 0, requires = "fill")]
    pub first: u64,
}

fn main() -> ExitCode {
    match load::run(&Arguments::parse()) {
        Ok(report) => {
            // A benchmark that has seen enough does not read it any more.
            writeln!(std::io::stdout(), "{report}").ok();
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-client: {why}");
            ExitCode::FAILURE
        }
    }
}
