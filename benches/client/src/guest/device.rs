//! A vhost-user-blk disk accessed through `blkio`, with batches of requests.
//!
//! If a server dies, its client would wait forever; so waiting checks periodically whether the process still runs.

use std::fs;
use std::mem::MaybeUninit;
use std::time::{Duration, Instant};

use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// Maximum number of requests in flight.
pub const DEPTH: usize = 16;

/// Maximum size of a request in bytes.
const SLOT: usize = 64 << 10;

/// Interval for checking whether the server runs.
const LOOK_AFTER: Duration = Duration::from_millis(100);

/// Timeout after which a request counts as lost.
const PATIENCE: Duration = Duration::from_secs(120);

/// The reason why a request was not done.
#[derive(Debug)]
pub enum Failure {
    /// The server has exited.
    Gone,
    /// An error that must not happen.
    Wrong(String),
}

/// A request to the disk.
pub enum Op {
    /// Writes; with `durable`, the response promises that the data survives.
    Write { at: u64, bytes: Vec<u8>, durable: bool },
    /// Makes earlier answered writes durable.
    Flush,
}

/// A connected disk.
pub struct Device {
    queue: Blkioq,
    /// Address of the memory that is shared with the server.
    memory: usize,
    server: u32,
    requests: u64,
    /// Kept alive for the queue.
    _driver: Blkio,
}

impl Device {
    /// Connects to the server with pid `server`.
    pub fn connect(socket: &str, server: u32) -> Result<Device, Failure> {
        let said = |error: blkio::Error| match lives(server) {
            true => Failure::Wrong(format!("cannot connect: {}", error.message())),
            false => Failure::Gone,
        };
        let mut driver = Blkio::new("virtio-blk-vhost-user").map_err(said)?;
        driver.set_str("path", socket).map_err(said)?;
        driver.connect().map_err(said)?;
        driver.set_i32("num-queues", 1).map_err(said)?;
        let mut started = driver.start().map_err(said)?;
        let region = driver.alloc_mem_region((DEPTH * SLOT).next_multiple_of(2 << 20)).map_err(said)?;
        driver.map_mem_region(&region).map_err(said)?;
        let mut queue = started.queues.remove(0);
        queue.set_completion_fd_enabled(false);
        Ok(Device { queue, memory: region.addr, server, requests: 0, _driver: driver })
    }

    /// Number of requests that were answered.
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Reads at most [`DEPTH`] pieces; returns their bytes in order.
    pub fn read(&mut self, pieces: &[(u64, usize)]) -> Result<Vec<u8>, Failure> {
        for (slot, (at, len)) in pieces.iter().enumerate() {
            let buffer = self.slot(slot, *len);
            self.queue.read(*at, buffer, *len, slot, ReqFlags::empty());
        }
        self.wait(pieces.len())?;
        let mut read = Vec::new();
        for (slot, (_, len)) in pieces.iter().enumerate() {
            let buffer = self.slot(slot, *len);
            // SAFETY: the region lives as long as the driver, the length of the slot was checked, and no request uses
            // it now.
            read.extend_from_slice(unsafe { std::slice::from_raw_parts(buffer, *len) });
        }
        Ok(read)
    }

    /// Submits at most [`DEPTH`] requests and waits for all of them.
    pub fn submit(&mut self, ops: &[Op]) -> Result<(), Failure> {
        for (slot, op) in ops.iter().enumerate() {
            match op {
                Op::Flush => self.queue.flush(slot, ReqFlags::empty()),
                Op::Write { at, bytes, durable } => {
                    let buffer = self.slot(slot, bytes.len());
                    // SAFETY: as in `read`.
                    unsafe { std::slice::from_raw_parts_mut(buffer, bytes.len()) }.copy_from_slice(bytes);
                    let flags = if *durable { ReqFlags::FUA } else { ReqFlags::empty() };
                    self.queue.write(*at, buffer, bytes.len(), slot, flags);
                }
            }
        }
        self.wait(ops.len())
    }

    /// The memory of a slot.
    fn slot(&self, slot: usize, len: usize) -> *mut u8 {
        assert!(slot < DEPTH && len <= SLOT, "{len} bytes in slot {slot}");
        std::ptr::with_exposed_provenance_mut(self.memory + slot * SLOT)
    }

    fn wait(&mut self, mut left: usize) -> Result<(), Failure> {
        let begin = Instant::now();
        while left > 0 {
            let mut completions: Vec<MaybeUninit<Completion>> = (0..left).map(|_| MaybeUninit::uninit()).collect();
            let mut look_after = LOOK_AFTER;
            let count = match self.queue.do_io(&mut completions, 1, Some(&mut look_after), None) {
                Ok(count) => count,
                Err(_) if !lives(self.server) => return Err(Failure::Gone),
                Err(error) if error.errno() == blkio::Errno::TIME && begin.elapsed() < PATIENCE => 0,
                Err(error) => {
                    return Err(Failure::Wrong(format!("{left} requests are not answered: {}", error.message())));
                }
            };
            for completion in completions.into_iter().take(count) {
                // SAFETY: `do_io` has initialised the first `count` of them.
                let completion = unsafe { completion.assume_init() };
                if completion.ret != 0 {
                    return Err(Failure::Wrong(format!("a request failed with errno {}", -completion.ret)));
                }
            }
            left -= count;
            self.requests += count as u64;
        }
        Ok(())
    }
}

/// Whether a process is running.
fn lives(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name in parentheses; a killed process is a zombie until it is waited for.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}
