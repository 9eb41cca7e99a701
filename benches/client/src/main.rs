//! `bench-client`: keeps a number of requests in flight on a vhost-user-blk server and reports figures.
//!
//! The client is the crate `blkio`, which shares no code with the server. It sleeps on the completion eventfd, as a
//! guest does, unless polling is requested. Latency is measured from just before a request is put into the ring until
//! the client has seen its completion.

mod load;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};

/// The pattern of a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pattern {
    /// Random reads.
    Randread,
    /// Random writes.
    Randwrite,
    /// Sequential reads.
    Read,
    /// Sequential writes.
    Write,
}

/// Keep requests in flight on a vhost-user-blk server and print a line of JSON about it.
#[derive(Clone, Debug, Parser)]
pub struct Arguments {
    /// Path of the server's socket.
    pub socket: String,
    /// The pattern of the load.
    #[arg(long, value_enum, default_value = "randread")]
    pub pattern: Pattern,
    /// Size of a request in bytes.
    #[arg(long, default_value_t = 4096)]
    pub block: usize,
    /// Requests in flight.
    #[arg(long, default_value_t = 32)]
    pub depth: usize,
    /// Duration of the measurement in seconds.
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Seconds before the measurement.
    #[arg(long, default_value_t = 0.5)]
    pub warmup: f64,
    /// Send this number of requests per second, one at a time, instead of keeping the depth.
    #[arg(long, value_name = "IOPS", value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: Option<u32>,
    /// Seconds after the measurement.
    #[arg(long, default_value_t = 0.0)]
    pub cooldown: f64,
    /// Poll for completions instead of sleeping.
    #[arg(long)]
    pub poll: bool,
    /// Seed of the random offsets.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Use only this number of bytes at the beginning of the disk.
    #[arg(long)]
    pub span: Option<u64>,
    /// Send no requests: stay connected until standard input ends.
    #[arg(long, conflicts_with = "fill")]
    pub hold: bool,
    /// Write every block of the disk once, and exit.
    #[arg(long)]
    pub fill: bool,
    /// Fill only every nth block.
    #[arg(long, default_value_t = 1, requires = "fill")]
    pub every: u64,
    /// Begin to fill at this block.
    #[arg(long, default_value_t = 0, requires = "fill")]
    pub first: u64,
}

fn main() -> ExitCode {
    match load::run(&Arguments::parse()) {
        Ok(report) => {
            // The reader of a benchmark may have gone.
            writeln!(std::io::stdout(), "{report}").ok();
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("bench-client: {why}");
            ExitCode::FAILURE
        }
    }
}
