//! The load: a queue, a region of memory, and requests that are resubmitted when they complete.

use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, ReqFlags};
use fastrand::Rng;
use hdrhistogram::Histogram;

use crate::{Arguments, Pattern};

/// A connected client with its queue.
struct Client {
    queue: Blkioq,
    /// Address of the memory that is shared with the server.
    memory: usize,
    blocks: u64,
    arguments: Arguments,
    random: Rng,
    next: u64,
}

/// Runs the load; returns a line of JSON.
pub fn run(arguments: &Arguments) -> Result<serde_json::Value, String> {
    let said = |what: &str, error: blkio::Error| format!("{what} {}: {}", arguments.socket, error.message());
    let mut driver = Blkio::new("virtio-blk-vhost-user").map_err(|error| said("driver for", error))?;
    driver.set_str("path", &arguments.socket).map_err(|error| said("path", error))?;
    driver.connect().map_err(|error| said("connect to", error))?;
    let capacity = driver.get_u64("capacity").map_err(|error| said("capacity of", error))?;
    let (queues, poll_queues) = if arguments.poll { (0, 1) } else { (1, 0) };
    driver.set_i32("num-queues", queues).map_err(|error| said("queues of", error))?;
    driver.set_i32("num-poll-queues", poll_queues).map_err(|error| said("queues of", error))?;
    let mut started = driver.start().map_err(|error| said("start", error))?;
    let len = arguments.depth * arguments.block;
    let region = driver.alloc_mem_region(len.next_multiple_of(2 << 20)).map_err(|error| said("memory for", error))?;
    driver.map_mem_region(&region).map_err(|error| said("memory for", error))?;
    let mut queue = if arguments.poll { started.poll_queues.remove(0) } else { started.queues.remove(0) };
    queue.set_completion_fd_enabled(false);
    let mut client = Client {
        queue,
        memory: region.addr,
        blocks: arguments.span.unwrap_or(capacity).min(capacity) / arguments.block as u64,
        arguments: arguments.clone(),
        random: Rng::with_seed(arguments.seed),
        next: 0,
    };
    match arguments.rate {
        _ if arguments.hold => hold(),
        _ if arguments.fill => client.fill(),
        Some(rate) => client.pace(rate),
        None => client.measure(),
    }
}

/// Reports that it is connected, and waits until standard input ends.
fn hold() -> Result<serde_json::Value, String> {
    println!("{}", serde_json::json!({ "connected": true }));
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).map_err(|error| format!("standard input: {error}"))?;
    Ok(serde_json::json!({}))
}

/// Counts of a load.
struct Counts {
    done: u64,
    /// Number of times the client slept or polled.
    waits: u64,
    /// CPU time of the client in nanoseconds.
    cpu: u64,
    seconds: f64,
}

fn report(histogram: &Histogram<u64>, counts: &Counts) -> serde_json::Value {
    let micros = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1000.0;
    serde_json::json!({
        "iops": counts.done as f64 / counts.seconds,
        "p50_us": micros(0.5), "p99_us": micros(0.99), "p999_us": micros(0.999),
        "waits": counts.waits, "requests": counts.done, "client_cpu_us": counts.cpu as f64 / 1000.0,
    })
}

/// CPU time of this thread in nanoseconds.
fn cpu_time() -> Result<u64, String> {
    let path = "/proc/thread-self/schedstat";
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    let first = text.split(' ').next().and_then(|word| word.parse().ok());
    first.ok_or_else(|| format!("{path} holds no number: {text}"))
}

impl Client {
    fn measure(&mut self) -> Result<serde_json::Value, String> {
        let depth = self.arguments.depth;
        let mut histogram: Histogram<u64> = Histogram::new(3).map_err(|error| error.to_string())?;
        let mut issued = vec![Instant::now(); depth];
        for (slot, at) in issued.iter_mut().enumerate() {
            *at = Instant::now();
            self.put(slot);
        }
        let begin = Instant::now() + Duration::from_secs_f64(self.arguments.warmup);
        let end = begin + Duration::from_secs_f64(self.arguments.seconds);
        let stop = end + Duration::from_secs_f64(self.arguments.cooldown);
        let (mut done, mut waits) = (0u64, 0u64);
        let mut in_flight = depth;
        let mut cpu_before = None;
        while in_flight > 0 {
            let slots = self.wait(depth)?;
            let now = Instant::now();
            waits += u64::from(now >= begin);
            if cpu_before.is_none() && now >= begin {
                cpu_before = Some(cpu_time()?);
            }
            for slot in slots {
                if now >= begin && now < end {
                    done += 1;
                    let nanos = u64::try_from((now - issued[slot]).as_nanos()).unwrap_or(u64::MAX);
                    histogram.record(nanos.max(1)).map_err(|error| error.to_string())?;
                }
                if now < stop {
                    issued[slot] = Instant::now();
                    self.put(slot);
                } else {
                    in_flight -= 1;
                }
            }
        }
        // The last requests are waited for and not counted: microseconds out of seconds.
        let cpu = cpu_time()?.saturating_sub(cpu_before.unwrap_or_default());
        let counts = Counts { done, waits, cpu, seconds: self.arguments.seconds };
        Ok(report(&histogram, &counts))
    }

    /// Sends requests at a rate per second: each when its time has come and the previous one has completed.
    fn pace(&mut self, rate: u32) -> Result<serde_json::Value, String> {
        let mut histogram: Histogram<u64> = Histogram::new(3).map_err(|error| error.to_string())?;
        let apart = Duration::from_secs(1) / rate;
        let mut due = Instant::now();
        let begin = due + Duration::from_secs_f64(self.arguments.warmup);
        let end = begin + Duration::from_secs_f64(self.arguments.seconds);
        let (mut done, mut before) = (0, None);
        while due < end {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if before.is_none() && due >= begin {
                before = Some(cpu_time()?);
            }
            let issued = Instant::now();
            self.put(0);
            self.wait(1)?;
            if due >= begin {
                done += 1;
                let nanos = u64::try_from(issued.elapsed().as_nanos()).unwrap_or(u64::MAX);
                histogram.record(nanos.max(1)).map_err(|error| error.to_string())?;
            }
            due += apart;
        }
        let cpu = cpu_time()?.saturating_sub(before.unwrap_or_default());
        let counts = Counts { done, waits: done, cpu, seconds: begin.elapsed().as_secs_f64() };
        Ok(report(&histogram, &counts))
    }

    /// Writes every block once (or every nth), so that thin images are allocated.
    fn fill(&mut self) -> Result<serde_json::Value, String> {
        let block = self.arguments.block;
        let (mut next, mut in_flight) = (self.arguments.first, 0);
        let mut free: Vec<usize> = (0..self.arguments.depth).collect();
        while next < self.blocks || in_flight > 0 {
            while next < self.blocks {
                let Some(slot) = free.pop() else { break };
                self.queue.write(next * block as u64, self.buffer(slot), block, slot, ReqFlags::empty());
                next += self.arguments.every.max(1);
                in_flight += 1;
            }
            let done = self.wait(in_flight)?;
            in_flight -= done.len();
            free.extend(done);
        }
        self.queue.flush(0, ReqFlags::empty());
        self.wait(1)?;
        Ok(serde_json::json!({ "filled": next }))
    }

    fn buffer(&self, slot: usize) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.memory + slot * self.arguments.block)
    }

    fn put(&mut self, slot: usize) {
        let block = self.arguments.block;
        let number = match self.arguments.pattern {
            Pattern::Read | Pattern::Write => {
                self.next += 1;
                self.next % self.blocks
            }
            Pattern::Randread | Pattern::Randwrite => self.random.u64(..self.blocks),
        };
        let (at, buffer) = (number * block as u64, self.buffer(slot));
        match self.arguments.pattern {
            Pattern::Randwrite | Pattern::Write => self.queue.write(at, buffer, block, slot, ReqFlags::empty()),
            Pattern::Randread | Pattern::Read => self.queue.read(at, buffer, block, slot, ReqFlags::empty()),
        }
    }

    /// The slots of at least one completed request.
    fn wait(&mut self, most: usize) -> Result<Vec<usize>, String> {
        let mut completions: Vec<MaybeUninit<Completion>> = (0..most).map(|_| MaybeUninit::uninit()).collect();
        let count = self.queue.do_io(&mut completions, 1, None, None).map_err(|error| error.message().to_string())?;
        let mut slots = Vec::with_capacity(count);
        for completion in completions.into_iter().take(count) {
            // SAFETY: `do_io` has initialised the first `count` of them.
            let completion = unsafe { completion.assume_init() };
            if completion.ret != 0 {
                return Err(format!("a request failed with errno {}", -completion.ret));
            }
            slots.push(completion.user_data);
        }
        Ok(slots)
    }
}
