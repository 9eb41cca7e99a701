//! `image bench`: measures the speed of a disk for requests of one size at a queue depth.
//!
//! It measures what a job uses: image, engine and storage, without a guest and its transport. Writing replaces the
//! contents of the disk, so it must be requested explicitly.

use std::time::{Duration, Instant};

use control::size::{Size, readable};
use control::{ImageName, Kind};
use disk::size::{in_memory, on_disk};
use disk::{DiskOffset, Operation, ShapePolicy, Span, Token};
use fastrand::Rng;
use memory::Segments;
use serde::Serialize;

use crate::files::Files;
use crate::files::access;
use crate::image::chain::Layers;
use crate::image::progress::Progress;
use crate::jobs::runner::Runner;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use crate::process::signals::Signal;
use arguments::{Bench, Pattern};

/// The largest request: with 256 in flight, 4 GiB of memory.
const SIZE_MAX: u64 = 16 << 20;
/// The byte that is written: not zero, because some storage does not store zeroes.
const WRITTEN: u8 = 0x54;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Measured {
    image: String,
    /// `read` or `write`.
    operation: &'static str,
    /// `seq` or `random`.
    pattern: &'static str,
    size: u64,
    depth: u16,
    /// The sizes that transfers were split into and merged up to.
    split: Option<u64>,
    merge: Option<u64>,
    /// The number of completed requests, and their duration; for writes with a final flush.
    requests: u64,
    seconds: f64,
    requests_per_second: u64,
    bytes_per_second: u64,
    /// From submission to completion.
    latency_us: Latency,
}

/// Latencies in microseconds.
#[derive(Serialize)]
struct Latency {
    median: u64,
    p99: u64,
    max: u64,
}

/// Runs the job. A signal ends it early, with the result so far.
pub fn run(files: &Files, bench: &Bench) -> Result<Exit, Failure> {
    let mut stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    let options = access::options(bench.access, bench.overwrite_data);
    let layers = Layers::open(files, &bench.image, &bench.parents, options)?;
    let mut runner = Runner::new(layers, access::engine(bench.access))?;
    runner.set_shape(ShapePolicy { split: bench.io_split.bytes(), merge: bench.io_merge.bytes() });
    let offsets = Offsets::new(&bench.image, bench, runner.geometry().len)?;
    let mut progress = Progress::new(files, "measuring", u64::from(bench.count) * offsets.size);
    let begun = Instant::now();
    let mut latencies = run_requests(&mut runner, bench, offsets, &mut stop, &mut progress)?;
    if bench.overwrite_data {
        runner.flush()?;
    }
    let took = begun.elapsed();
    progress.finish();
    latencies.sort_unstable();
    report(bench, took, &latencies)
}

/// Keeps requests in flight until all are completed; returns their latencies.
fn run_requests(
    runner: &mut Runner,
    bench: &Bench,
    mut offsets: Offsets,
    stop: &mut Signal,
    progress: &mut Progress,
) -> Result<Vec<Duration>, Failure> {
    let operation = if bench.overwrite_data { Operation::Write { durable: false } } else { Operation::Read };
    let filled = vec![WRITTEN; in_memory(offsets.size)];
    // Each slot has its own memory, and one request at a time.
    let memories: Vec<Segments> = (0..bench.depth).map(|_| Segments::copy_of(&filled)).collect();
    let mut begun = vec![Instant::now(); memories.len()];
    let mut free: Vec<usize> = (0..memories.len()).collect();
    let mut latencies = Vec::new();
    let mut left = bench.count;
    loop {
        while let Some(slot) = if left > 0 { free.pop() } else { None } {
            let (Some(memory), Some(begun)) = (memories.get(slot), begun.get_mut(slot)) else { continue };
            *begun = Instant::now();
            let token = Token(on_disk(slot));
            runner.submit(operation, offsets.next(), memory.clone(), token)?;
            left -= 1;
        }
        if runner.in_flight() == 0 {
            return Ok(latencies);
        }
        let (Token(slot), answer) = runner.wait_for_any()?;
        answer?;
        let slot = in_memory(slot);
        latencies.extend(begun.get(slot).map(Instant::elapsed));
        free.push(slot);
        progress.advance(offsets.size);
        if stop.take() {
            left = 0;
        }
    }
}

/// The offsets of requests.
struct Offsets {
    size: u64,
    /// The number of requests that cover the disk.
    count: u64,
    pattern: Pattern,
    /// The number of the next sequential request.
    next: u64,
    random: Rng,
}

impl Offsets {
    fn new(image: &ImageName, bench: &Bench, len: u64) -> Result<Offsets, Failure> {
        let Size(size) = bench.size;
        let refuse = |why: String| Err(Failure::new(format!("measure {image}"), why).of_kind(Kind::Invalid));
        if size == 0 || size % 512 != 0 || size > SIZE_MAX {
            return refuse(format!("requests of {size} bytes are not whole sectors, up to 16 MiB"));
        }
        if size > len {
            return refuse(format!("requests of {size} bytes are larger than the disk, which has {len}"));
        }
        let random = Rng::with_seed(bench.seed);
        Ok(Offsets { size, count: len / size, pattern: bench.pattern, next: 0, random })
    }

    fn next(&mut self) -> Span {
        let number = match self.pattern {
            Pattern::Seq => {
                let number = self.next;
                self.next = (number + 1) % self.count;
                number
            }
            Pattern::Random => self.random.u64(..self.count),
        };
        Span { at: DiskOffset(number * self.size), len: self.size }
    }
}

fn report(bench: &Bench, took: Duration, latencies: &[Duration]) -> Result<Exit, Failure> {
    let Size(size) = bench.size;
    let requests = on_disk(latencies.len());
    let per_second = |count: u64| {
        let nanoseconds = took.as_nanos().max(1);
        let per = u128::from(count) * 1_000_000_000 / nanoseconds;
        u64::try_from(per).unwrap_or(u64::MAX)
    };
    let measured = Measured {
        image: bench.image.to_string(),
        operation: if bench.overwrite_data { "write" } else { "read" },
        pattern: if bench.pattern == Pattern::Random { "random" } else { "seq" },
        size,
        depth: bench.depth,
        split: bench.io_split.bytes(),
        merge: bench.io_merge.bytes(),
        requests,
        seconds: took.as_secs_f64(),
        requests_per_second: per_second(requests),
        bytes_per_second: per_second(requests * size),
        latency_us: Latency {
            median: percentile(latencies, 50),
            p99: percentile(latencies, 99),
            max: percentile(latencies, 100),
        },
    };
    if bench.json {
        output::json(&measured)?;
        return Ok(Exit::Done);
    }
    let Measured { image, operation, pattern, depth, seconds, latency_us, .. } = &measured;
    let (rate, bytes) = (measured.requests_per_second, readable(measured.bytes_per_second));
    let Latency { median, p99, max } = latency_us;
    output::print(&format!(
        "{image}: {requests} {pattern} {operation}s of {} at depth {depth} in {seconds:.2} s\n  {rate} requests/s, \
         {bytes}/s; latency: median {median} µs, 99 % {p99} µs, longest {max} µs\n",
        readable(size)
    ))?;
    Ok(Exit::Done)
}

/// Returns a percentile of sorted latencies, in microseconds.
fn percentile(latencies: &[Duration], percent: usize) -> u64 {
    let number = (latencies.len() * percent).div_ceil(100).saturating_sub(1);
    latencies.get(number).map_or(0, |latency| u64::try_from(latency.as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_percentile_is_the_latency_that_this_share_does_not_exceed() {
        let latencies: Vec<Duration> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!(
            (percentile(&latencies, 50), percentile(&latencies, 99), percentile(&latencies, 100)),
            (100, 198, 200)
        );
        assert_eq!((percentile(&latencies[..1], 50), percentile(&[], 99)), (1, 0));
    }

    #[test]
    fn offsets_are_multiples_of_the_size_within_the_disk() {
        let offsets = |size, count, pattern| Offsets { size, count, pattern, next: 0, random: Rng::with_seed(1) };
        let at = |mut offsets: Offsets, count| (0..count).map(|_| offsets.next().at.0).collect::<Vec<_>>();
        assert_eq!(at(offsets(4096, 3, Pattern::Seq), 5), [0, 4096, 8192, 0, 4096]);
        let found = at(offsets(512, 10, Pattern::Random), 200);
        assert!(found.iter().all(|at| at % 512 == 0 && *at < 5120));
        assert!((0..10).all(|number| found.contains(&(number * 512))));
    }
}
