//! Disks that share a storage, each with a process and a client, with shares and without, alternately.
//!
//! Two loads: all disks with equally many requests in flight; and modest ones with one request, without and with a
//! greedy one. On fast storage the processors are the bottleneck, which the kernel shares: with `--iops` the kernel
//! makes the storage slower for all of them together (cgroup blkio.throttle), which needs root.

use std::os::linux::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::options::{positive, whole_path};
use testbed::programs::released;

use super::median;
use super::server::Server;

/// Options of the benchmark.
#[derive(Debug, clap::Args)]
pub struct Options {
    #[arg(long, default_value_t = 100, value_parser = positive)]
    disks: usize,
    #[arg(long, default_value_t = 3, value_parser = positive)]
    rounds: usize,
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Directory for the images, on a file system with O_DIRECT
    #[arg(long, default_value = "/var/tmp", value_parser = whole_path)]
    dir: PathBuf,
    /// Size of a disk in MiB
    #[arg(long = "size", value_name = "MIB", default_value_t = 64)]
    mib: u64,
    /// Size of a request in bytes
    #[arg(long, default_value_t = 4096, value_parser = positive)]
    block: usize,
    /// Requests in flight of each disk if all have the same load
    #[arg(long, default_value_t = 32, value_parser = positive)]
    depth: usize,
    /// Requests in flight of all disks that share (serve --share-depth)
    #[arg(long, default_value_t = 128, value_parser = positive)]
    share_depth: usize,
    /// Limit the storage to this number of reads per second
    #[arg(long, value_name = "N")]
    iops: Option<u64>,
    /// Directory of the programs [default: optimized ones are built]
    #[arg(long, value_name = "DIR", value_parser = whole_path)]
    programs: Option<PathBuf>,
    #[arg(long)]
    json: bool,
}

/// The figures of a client.
#[derive(Clone, Copy, Debug)]
struct ClientFigures {
    iops: f64,
    p99_us: f64,
}

/// The figures of a round.
#[derive(Clone, Copy, Debug, Default)]
struct Round {
    total: f64,
    /// Rates of the slowest and the fastest disk, relative to the mean.
    least: f64,
    most: f64,
    /// Medians of the modest disks' 99th percentiles, without and with the greedy one.
    alone_us: f64,
    with_greedy_us: f64,
    greedy: f64,
}

/// Measures and prints the figures.
pub fn run(options: &Options) -> Result<(), String> {
    let programs = released(options.programs.as_deref())?;
    let room = tempfile::Builder::new().prefix("tapline-bench-").tempdir_in(&options.dir);
    let room = room.map_err(|error| format!("a directory in {}: {error}", options.dir.display()))?;
    let _throttle = options.iops.map(|iops| Throttle::new(room.path(), iops)).transpose()?;
    let bed = Bed { options, programs, room: room.path() };
    bed.make_images()?;
    let mut rounds: [Vec<Round>; 2] = Default::default();
    for round in 0..options.rounds {
        // The order alternates, so that a slow minute does not always affect the same one.
        for turn in 0..2 {
            let shares = (round + turn) % 2;
            eprint!("\rround {}, {:<20}", round + 1, ["without shares", "with shares"][shares]);
            rounds[shares].push(bed.round(shares == 1)?);
        }
    }
    eprint!("\r{:40}\r", "");
    let [without, with] = rounds.map(|rounds| medians(&rounds));
    print(options, &without, &with);
    Ok(())
}

struct Bed<'a> {
    options: &'a Options,
    programs: PathBuf,
    room: &'a Path,
}

impl Bed<'_> {
    fn image(&self, number: usize) -> PathBuf {
        self.room.join(format!("{number}.raw"))
    }

    /// Creates fully written images: reads of holes would not reach the storage.
    fn make_images(&self) -> Result<(), String> {
        let bytes = vec![7; 1 << 20];
        for number in 0..self.options.disks {
            let path = self.image(number);
            let failed = |error: std::io::Error| format!("{}: {error}", path.display());
            let mut file = std::fs::File::create(&path).map_err(failed)?;
            for _ in 0..self.options.mib {
                std::io::Write::write_all(&mut file, &bytes).map_err(failed)?;
            }
            file.sync_all().map_err(failed)?;
        }
        Ok(())
    }

    fn serve(&self, number: usize, shares: bool) -> Result<Server, String> {
        let socket = self.room.join(format!("{number}.sock"));
        let mut command = Command::new(self.programs.join("tapline-disk"));
        command.arg("serve").arg(format!("raw:{}", self.image(number).display()));
        command.arg("--vhost-user").arg(&socket).args(["--polling", "off"]);
        if shares {
            command.arg("--share").arg(self.room.join("page"));
            command.args(["--share-depth", &self.options.share_depth.to_string()]);
        }
        Server::begin(command, socket, "tapline")
    }

    fn round(&self, shares: bool) -> Result<Round, String> {
        let servers = (0..self.options.disks).map(|number| self.serve(number, shares));
        let servers: Vec<Server> = servers.collect::<Result<_, _>>()?;
        let all = self.drive(&servers, &vec![self.options.depth; servers.len()])?;
        let mut depths = vec![1; servers.len().max(2) - 1];
        let alone = self.drive(&servers, &depths)?;
        depths.push(128);
        let with_greedy = self.drive(&servers, &depths)?;
        servers.into_iter().try_for_each(Server::stop)?;
        let total: f64 = all.iter().map(|seen| seen.iops).sum();
        let mean = total / all.len() as f64;
        let by_mean = all.iter().map(|seen| seen.iops / mean);
        let p99 = |seen: &[ClientFigures]| median(seen.iter().map(|seen| seen.p99_us));
        let (greedy, modest) = with_greedy.split_last().ok_or("no disk was driven")?;
        Ok(Round {
            total,
            least: by_mean.clone().fold(f64::INFINITY, f64::min),
            most: by_mean.fold(0.0, f64::max),
            alone_us: p99(&alone),
            with_greedy_us: p99(modest),
            greedy: greedy.iops,
        })
    }

    /// Drives the first disks concurrently, with this number of requests each.
    fn drive(&self, servers: &[Server], depths: &[usize]) -> Result<Vec<ClientFigures>, String> {
        let settling = Duration::from_millis(1000 + 50 * depths.len() as u64);
        let begin = Instant::now() + settling;
        let client = |(server, depth): (&Server, &usize)| {
            let mut command = Command::new(self.programs.join("bench-client"));
            command.arg(server.socket()).args(["--pattern", "randread", "--depth", &depth.to_string()]);
            command.args(["--block", &self.options.block.to_string()]);
            // All measure during the same time, when all are running; late ones measure a little later.
            let warmup = begin.saturating_duration_since(Instant::now()).as_secs_f64();
            command.args(["--warmup", &warmup.to_string(), "--seconds", &self.options.seconds.to_string()]);
            command.args(["--cooldown", &settling.as_secs_f64().to_string()]);
            let spawned = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn();
            spawned.map_err(|error| format!("bench-client: {error}"))
        };
        let clients: Vec<Child> = servers.iter().zip(depths).map(client).collect::<Result<_, _>>()?;
        let mut seen = Vec::new();
        for client in clients {
            let output = client.wait_with_output().map_err(|error| format!("bench-client: {error}"))?;
            let said: Value =
                serde_json::from_slice(&output.stdout).map_err(|error| format!("bench-client: {error}"))?;
            let number = |name: &str| said[name].as_f64().ok_or(format!("the client did not say {name}: {said}"));
            seen.push(ClientFigures { iops: number("iops")?, p99_us: number("p99_us")? });
        }
        Ok(seen)
    }
}

fn medians(rounds: &[Round]) -> Round {
    let of = |column: fn(&Round) -> f64| median(rounds.iter().map(column));
    Round {
        total: of(|round| round.total),
        least: of(|round| round.least),
        most: of(|round| round.most),
        alone_us: of(|round| round.alone_us),
        with_greedy_us: of(|round| round.with_greedy_us),
        greedy: of(|round| round.greedy),
    }
}

fn print(options: &Options, without: &Round, with: &Round) {
    let Options { disks, rounds, seconds, depth, share_depth, block, .. } = options;
    if options.json {
        let of = |round: &Round| {
            let Round { total, least, most, alone_us, with_greedy_us, greedy } = *round;
            json!({
                "total_iops": total, "least": least, "most": most, "modest_p99_us": alone_us,
                "modest_p99_us_beside_greedy": with_greedy_us, "greedy_iops": greedy,
            })
        };
        println!("{}", json!({ "disks": disks, "without": of(without), "with": of(with) }));
        return;
    }
    let slow = options.iops.map(|iops| format!(", storage of {iops} reads/s")).unwrap_or_default();
    let what = format!("random reads of {block} bytes, share depth {share_depth}{slow}");
    println!("{disks} disks, {what}: {rounds} rounds of {seconds} s, medians");
    println!("{:<44}{:>12}{:>12}", "", "without", "with shares");
    let row = |what: String, without: f64, with: f64, digits: usize| {
        println!("  {what:<42}{without:>12.digits$}{with:>12.digits$}");
    };
    row(format!("total IOPS, all at depth {depth}"), without.total, with.total, 0);
    row("slowest disk, by the mean".into(), without.least, with.least, 3);
    row("fastest disk, by the mean".into(), without.most, with.most, 3);
    row("p99 us, modest disks at depth 1".into(), without.alone_us, with.alone_us, 0);
    row("p99 us, beside one at depth 128".into(), without.with_greedy_us, with.with_greedy_us, 0);
    row(
        "  how many times as long".into(),
        without.with_greedy_us / without.alone_us,
        with.with_greedy_us / with.alone_us,
        2,
    );
    row("IOPS of the greedy one".into(), without.greedy, with.greedy, 0);
}

/// A cgroup for which the kernel throttles a device: this process and its children.
struct Throttle {
    group: PathBuf,
    before: PathBuf,
}

impl Throttle {
    fn new(directory: &Path, iops: u64) -> Result<Throttle, String> {
        let device = std::fs::metadata(directory).map_err(|error| error.to_string())?.st_dev();
        let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let name = format!("tapline-bench-{}", std::process::id());
        let (v1, v2) = (Path::new("/sys/fs/cgroup/blkio"), Path::new("/sys/fs/cgroup"));
        let is_v1 = v1.join("blkio.throttle.read_iops_device").exists();
        let root = if is_v1 { v1 } else { v2 };
        let throttle = Throttle { group: root.join(name), before: root.to_owned() };
        std::fs::create_dir(&throttle.group).map_err(|error| format!("{}: {error}", throttle.group.display()))?;
        match is_v1 {
            true => write(&throttle.group.join("blkio.throttle.read_iops_device"), &format!("{device} {iops}"))?,
            false => {
                write(&root.join("cgroup.subtree_control"), "+io")?;
                write(&throttle.group.join("io.max"), &format!("{device} riops={iops}"))?;
            }
        }
        write(&throttle.group.join("cgroup.procs"), &std::process::id().to_string())?;
        Ok(throttle)
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("write '{text}' to {}: {error}", path.display()))
}

impl Drop for Throttle {
    fn drop(&mut self) {
        let back = write(&self.before.join("cgroup.procs"), &std::process::id().to_string());
        let removed = std::fs::remove_dir(&self.group).map_err(|error| error.to_string());
        if let Err(why) = back.and(removed) {
            eprintln!("the group {} is left: {why}", self.group.display());
        }
    }
}
