//! Random reads of a real guest with `tapline-guest` at several queue depths, compared with the counts of each layer:
//! the guest's kernel, the disk process, and its storage.
//!
//! Checks relations between layers that hold at any speed: the load is paused when the layers are read, so that all
//! have counted the same requests, and all queues are averages over one interval. Times are compared as sums only.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use stats::{DeviceCounts, Histogram, Kind, Reader, Snapshot, Stage, bucket_bounds, float, monotonic};
use vm::guest_port::GuestPort;

use super::machines::ShortWay;
use super::story::{Failure, Story};
use crate::guest::{self, Job};
use crate::tapline::Access;

const DEPTHS: [u32; 4] = [1, 4, 16, 64];
/// Reads at each depth: enough for the guest's milliseconds to be accurate if a read takes 50 µs.
const READS: u64 = 20_000;
const SIZE: u64 = 64 << 20;
/// Kernels truncate times to milliseconds, individually and in sums.
const ROUNDED_NS: f64 = 5e6;
/// Relative tolerance for comparisons by Little's law.
const LITTLE: f64 = 0.05;
/// Timeout for the page to be up to date and for the guest to open its port.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);

/// The socket of the guest's port, in the directory of the test.
const PORT: &str = "guest.sock";

/// The counters of all layers at some time.
struct Reading {
    guest: DeviceCounts,
    uptime_ns: u64,
    /// The host's clock before the request to the guest and after its response.
    requested: (u64, u64),
    page: Snapshot,
    /// Durations of reads: in total, and with the storage.
    whole: Histogram,
    storage: Histogram,
}

/// The reads between two readings, as counted by a layer.
struct Layer {
    name: &'static str,
    /// Total time of the reads in this layer and below, in nanoseconds.
    sum: f64,
    /// The same from another counter.
    other: f64,
}

/// The sources of the counters.
struct Sources {
    port: GuestPort,
    serial: String,
    page: PathBuf,
}

impl Story<'_> {
    /// Reads at each depth and compares the layers.
    pub fn layers(&mut self) -> Result<(), Failure> {
        self.progress.step("what a guest, Tapline and the storage count, at several queue depths");
        let image = self.work.join("layers.raw");
        let failed = |source| Failure::File { what: "create", path: image.clone(), source };
        File::create(&image).and_then(|file| file.set_len(SIZE)).map_err(failed)?;
        let disk = self.serve(&["raw:layers.raw"], Access::ReadWrite)?;
        let way = ShortWay::to(self.work)?;
        let mut sources = Sources {
            port: GuestPort::new(&way.0.join(PORT)),
            serial: disk.serial().to_owned(),
            page: page_of(&self.work.join(disk.socket()))?,
        };
        let depths = DEPTHS.map(|depth| depth.to_string()).join(" ");
        let job = Job {
            name: "layers",
            script: include_str!("../../guest/jobs/layers.sh"),
            parameters: vec![("DEPTHS", depths), ("READS", READS.to_string())],
        };
        let running = self.guest.boot_with(&job, self.work, |command| {
            guest::add_disk(command, 0, disk.socket());
            command.args(["-chardev", &format!("socket,id=guest,path={PORT},server=on,wait=off")]);
            command.args(["-device", "virtio-serial-pci,max_ports=2", "-device"]);
            command.arg(format!("virtserialport,chardev=guest,name={}", vm::qemu::command_line::GUEST_PORT_NAME));
        })?;
        let mut before = None;
        let mut woken = Vec::new();
        running.follow(|line| {
            match self.show(&line) {
                Some(("woken", times)) => woken.push(times.to_owned()),
                Some(("ask", what)) => match what.split_once(' ') {
                    Some(("before", _)) => before = Some(sources.read(0)?),
                    Some(("after", depth)) => {
                        let before = before.take().ok_or(Failure::Counters)?;
                        let now = sources.read(before.page.kind(Kind::Read).count() + READS)?;
                        self.judge(depth, &before, &now)?;
                    }
                    _ => {}
                },
                _ => {}
            }
            Ok::<_, Failure>(ControlFlow::Continue(()))
        })?;
        let asleep = woken.len() == DEPTHS.len() && woken.iter().all(|times| times == "0");
        self.claim("the reader in the guest sleeps between requests", asleep, || format!("{woken:?}"))?;
        disk.stop()?;
        Ok(())
    }

    fn judge(&mut self, depth: &str, before: &Reading, now: &Reading) -> Result<(), Failure> {
        let counted = now.guest.reads.count.checked_sub(before.guest.reads.count);
        let ours = now.page.kind(Kind::Read).count() - before.page.kind(Kind::Read).count();
        let merged = now.guest.reads.merged - before.guest.reads.merged;
        let all = now.guest.all().iter().map(|kind| kind.count).sum::<u64>();
        let only_reads = all - before.guest.all().iter().map(|kind| kind.count).sum::<u64>();
        self.claim(
            &format!("depth {depth}: the guest and Tapline count the same reads"),
            counted == Some(ours) && ours + merged == READS && only_reads == ours,
            || format!("{counted:?} in the guest, {merged} merged, {ours} here, {only_reads} requests of all kinds"),
        )?;
        let interval = float(now.page.read - before.page.read);
        let layers = now.layers(before);
        let queues: Vec<f64> = layers.iter().map(|layer| layer.sum / interval).collect();
        let rounded = ROUNDED_NS / interval;
        let shown = layers.iter().zip(&queues).map(|(layer, queue)| format!("{} {queue:.3}", layer.name));
        let shown = shown.collect::<Vec<_>>().join(" >= ");
        let ordered = queues.windows(2).all(|pair| matches!(pair, [above, below] if above + rounded >= *below));
        let depth_max: f64 = depth.parse().map_err(|_| Failure::Counters)?;
        let possible = queues.iter().all(|queue| *queue > 0.0 && *queue <= depth_max + rounded);
        self.claim(&format!("depth {depth}: average queue {shown}"), ordered && possible, || shown.clone())?;
        let rate = float(ours) / interval;
        for (pair, queues) in layers.windows(2).zip(queues.windows(2)) {
            let ([above, below], [more, less]) = (pair, queues) else { continue };
            let added = (above.other - below.other) / float(ours);
            let (measured, product) = (more - less, rate * added);
            self.claim(
                &format!(
                    "depth {depth}: {} has {measured:.3} more than {}: rate times the latency that it adds",
                    above.name, below.name
                ),
                is_near(measured, product, measured.max(product), rounded),
                || format!("{measured} and {product}"),
            )?;
        }
        for (layer, queue) in layers.iter().zip(&queues) {
            let product = layer.other / interval;
            let claim = format!("depth {depth}: the queue of {} is rate times latency", layer.name);
            self.claim(&claim, is_near(*queue, product, queue.max(product), rounded), || {
                format!("{queue}, {product}")
            })?;
        }
        let guest_ns = float(now.uptime_ns - before.uptime_ns);
        let (least, most) = (float(now.requested.0 - before.requested.1), float(now.requested.1 - before.requested.0));
        // The guest's clock is read in hundredths of a second, at some time between request and response.
        let is_one = guest_ns > least * (1.0 - LITTLE) - 2e7 && guest_ns < most * (1.0 + LITTLE) + 2e7;
        self.claim(&format!("depth {depth}: the guest's clock goes like the host's"), is_one, || {
            format!("{guest_ns} ns in the guest, {least} to {most} here")
        })
    }
}

fn is_near(one: f64, other: f64, larger: f64, rounded: f64) -> bool {
    (one - other).abs() <= (LITTLE * larger).max(rounded)
}

/// The page of the disk that is served at this socket. The process creates it soon after it listens.
fn page_of(socket: &Path) -> Result<PathBuf, Failure> {
    let quoted = format!("{:?}", socket.display().to_string());
    let is_its = |page: &PathBuf| {
        let read = Reader::open(page).and_then(|reader| reader.snapshot());
        read.is_ok_and(|snapshot| snapshot.pid.is_some() && snapshot.identity.contains(&quoted))
    };
    let until = Instant::now() + PATIENCE;
    loop {
        let pages = stats::directory().and_then(|directory| stats::pages_in(&directory).ok()).unwrap_or_default();
        match pages.into_iter().find(is_its) {
            Some(page) => return Ok(page),
            None if Instant::now() > until => return Err(Failure::NoPage(socket.display().to_string())),
            None => thread::sleep(POLL),
        }
    }
}

impl Sources {
    /// Reads the counters of all layers, once this number of reads has ended.
    fn read(&mut self, reads: u64) -> Result<Reading, Failure> {
        let until = Instant::now() + PATIENCE;
        let (answer, requested) = loop {
            let begun = monotonic();
            match self.port.ask() {
                Ok(answer) => break (answer, (begun, monotonic())),
                Err(why) if Instant::now() > until => return Err(Failure::Unasked(why)),
                Err(_) => thread::sleep(POLL),
            }
        };
        let guest = answer.disk(&self.serial).map_err(|why| Failure::Unasked(why.to_string()))?.counts;
        let unread = || Failure::NoPage(self.page.display().to_string());
        loop {
            let reader = Reader::open(&self.page).map_err(|_| unread())?;
            let page = reader.snapshot().map_err(|_| unread())?;
            let is_quiet = page.in_flight.is_empty() && !page.torn && page.kind(Kind::Read).count() >= reads;
            // On a timeout the counters are judged as they are.
            if is_quiet || Instant::now() > until {
                let histogram = |stage| reader.histogram(Kind::Read, stage).map_err(|_| unread());
                let (whole, storage) = (histogram(None)?, histogram(Some(Stage::Storage))?);
                return Ok(Reading { guest, uptime_ns: answer.uptime_ns, requested, page, whole, storage });
            }
            thread::sleep(POLL);
        }
    }
}

impl Reading {
    /// The layers from the guest down.
    fn layers(&self, before: &Reading) -> [Layer; 3] {
        let ms = |ms: u64| float(ms) * 1e6;
        let counts = self.page.kind(Kind::Read).since(&before.page.kind(Kind::Read));
        let weighted = self.guest.weighted_ms.saturating_sub(before.guest.weighted_ms);
        let of_reads = self.guest.reads.ms.saturating_sub(before.guest.reads.ms);
        let time = |now: &Histogram, before: &Histogram| total(&now.since(before));
        [
            Layer { name: "guest", sum: ms(weighted), other: ms(of_reads) },
            Layer { name: "tapline", sum: float(counts.sum_of_all()), other: time(&self.whole, &before.whole) },
            Layer {
                name: "storage",
                sum: float(counts.sum(Stage::Storage)),
                other: time(&self.storage, &before.storage),
            },
        ]
    }
}

/// The sum of all durations.
fn total(histogram: &Histogram) -> f64 {
    let middle = |(from, to): (u64, u64)| float(from + (to - from) / 2);
    histogram.buckets().iter().map(|(bucket, count)| middle(bucket_bounds(*bucket)) * float(*count)).sum()
}
