//! Limits of a disk, each as an option of its own.

use clap::Args;
use control::Error;
use control::limits::{self, Limits};

/// Limits of a disk, by option; `None` where an option is not given.
#[derive(Clone, Copy, Debug, Default, Args)]
#[group(skip)]
pub struct LimitWords {
    /// Requests per second
    #[arg(long, value_name = "N", value_parser = iops)]
    pub iops: Option<u64>,
    /// Reads per second
    #[arg(long, value_name = "N", value_parser = iops)]
    pub read_iops: Option<u64>,
    /// Writes per second; a discard is one
    #[arg(long, value_name = "N", value_parser = iops)]
    pub write_iops: Option<u64>,
    /// Bytes per second
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    pub bandwidth: Option<u64>,
    /// Bytes read per second
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    pub read_bandwidth: Option<u64>,
    /// Bytes written per second
    #[arg(long, value_name = "SIZE", value_parser = bandwidth)]
    pub write_bandwidth: Option<u64>,
    /// How much is saved up while the disk is not used: what each limit allows in this time, 1ms to 3600s [default:
    /// 100ms]
    #[arg(long, value_name = "TIME", value_parser = burst)]
    pub burst: Option<u64>,
}

/// The names of the options that are limits, without the burst.
pub const LIMITS: [&str; 6] = ["iops", "read_iops", "write_iops", "bandwidth", "read_bandwidth", "write_bandwidth"];

impl LimitWords {
    /// The limits, if any option was given.
    pub fn limits(&self) -> Result<Option<Limits>, Error> {
        let LimitWords { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst } = *self;
        let limits =
            Limits { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, burst_ms: burst };
        limits.check()?;
        Ok((limits != Limits::default()).then_some(limits))
    }
}

fn iops(word: &str) -> Result<u64, String> {
    limits::iops(word).map_err(|error| error.message)
}

fn bandwidth(word: &str) -> Result<u64, String> {
    limits::bandwidth(word).map_err(|error| error.message)
}

fn burst(word: &str) -> Result<u64, String> {
    limits::burst(word).map_err(|error| error.message)
}
