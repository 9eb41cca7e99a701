//! `cargo xtask bench`: Tapline and its peers, in one run.
//!
//! The machines are shared and noisy. So the servers alternate within each workload, in several rounds, with the server
//! pinned to one CPU and the client to another; medians and ratios of medians are printed. No figure is a failure.

#![forbid(unsafe_code)]

mod allocate;
mod api;
mod budget;
mod idle;
mod idle_vm;
mod live;
mod nbd;
mod plug;
mod server;
mod shares;
mod targets;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;
use testbed::figures::median;
use testbed::options::{positive, whole_path};
use testbed::programs::{BUILT, released, root};

use server::{Server, ServerKind};

/// The benchmarks.
#[derive(Debug, clap::Subcommand)]
pub enum Bench {
    /// Raw, VHD and qcow2 behind `tapline serve`, raw and qcow2 behind qemu-storage-daemon, over vhost-user-blk
    VhostUser(Arguments),
    /// A chain of 30 layers, compared with one of 1
    Depth(Arguments),
    /// First writes to new images, compared with the peer's
    Allocate(Arguments),
    /// Random reads of a scattered qcow2 of 1 TiB, by size of the part that is read; and memory
    Budget(Arguments),
    /// Effect of snapshots, clones and a merge of the live leaf on a guest
    Live(Arguments),
    /// Memory and wake-ups of many idle disks
    Idle(Arguments),
    /// Disks with separate processes that share a storage: total and spread, and a greedy one among modest ones
    Shares(shares::Options),
    /// Wake-ups of the QEMU of an idle guest, by emulated device
    IdleVm(idle_vm::Options),
    /// Many VBDs plugged and unplugged by the daemon, with slow storage and without, and idle ones
    Plug(Arguments),
    /// A list of many VDIs; and plugs alone and with many clients, with the cost of these
    Api(api::Plan),
    /// Whole disks copied over NBD, in the clear and over TLS, from servers and by clients
    Nbd(nbd::Options),
    /// Performance targets of Tapline relative to its peers
    Targets(targets::Options),
    /// Backends of a Xen guest's disks, counted in instructions: blkback, qdisk, tapline
    Xen(testbed::xen::compare::Options),
}

/// Options of a benchmark.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    #[arg(long, default_value_t = 5, value_parser = positive)]
    rounds: usize,
    /// Duration of each measurement in seconds
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Directory for the images
    #[arg(long, default_value = "/dev/shm", value_parser = whole_path)]
    dir: PathBuf,
    /// Size of a disk in MiB
    #[arg(long = "size", value_name = "MIB", default_value_t = 1024)]
    mib: u64,
    /// Number of disks (idle, plug)
    #[arg(long, default_value_t = 20)]
    disks: usize,
    /// Format of the images (depth, live): vhd or qcow2
    #[arg(long, default_value = "vhd")]
    format: String,
    #[arg(long)]
    json: bool,
}

/// A load of the client.
struct Workload {
    name: &'static str,
    client: &'static [&'static str],
}

const WORKLOADS: &[Workload] = &[
    Workload { name: "randread 4k qd1", client: &["--pattern", "randread", "--depth", "1"] },
    Workload { name: "randread 4k qd32", client: &["--pattern", "randread", "--depth", "32"] },
    Workload { name: "randwrite 4k qd1", client: &["--pattern", "randwrite", "--depth", "1"] },
    Workload { name: "randwrite 4k qd32", client: &["--pattern", "randwrite", "--depth", "32"] },
];

/// The figures of a round.
#[derive(Clone, Copy, Debug)]
struct Sample {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    /// CPU time of all threads of the server per request.
    server_us: f64,
    /// Number of times the client slept or polled, per request.
    waits: f64,
}

/// A benchmark with the common options.
type Measure = fn(&Arguments) -> Result<(), String>;

/// Runs a benchmark.
pub fn run(bench: &Bench) -> Result<(), String> {
    let (measure, arguments): (Measure, _) = match bench {
        Bench::VhostUser(arguments) => (vhost_user, arguments),
        Bench::Depth(arguments) => (depth, arguments),
        Bench::Allocate(arguments) => (allocate::run, arguments),
        Bench::Budget(arguments) => (budget::run, arguments),
        Bench::Live(arguments) => (live::run, arguments),
        Bench::Idle(arguments) => (idle::run, arguments),
        Bench::Plug(arguments) => (plug::run, arguments),
        Bench::IdleVm(options) => return idle_vm::run(options),
        Bench::Api(plan) => return api::run(plan),
        Bench::Nbd(options) => return nbd::run(options),
        Bench::Targets(options) => return targets::run(options),
        Bench::Shares(options) => return shares::run(options),
        Bench::Xen(options) => return testbed::xen::compare::run(options),
    };
    released(None)?;
    measure(arguments)
}

fn program(name: &str) -> PathBuf {
    root().join(BUILT).join(name)
}

/// A temporary directory for the images.
fn room(arguments: &Arguments) -> Result<TempDir, String> {
    let room = tempfile::Builder::new().prefix("tapline-bench-").tempdir_in(&arguments.dir);
    room.map_err(|error| format!("a directory in {}: {error}", arguments.dir.display()))
}

fn vhost_user(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let size = format!("{}M", arguments.mib);
    let raw = work.path().join("disk.raw");
    let vhd = work.path().join("disk.vhd");
    let qcow2 = work.path().join("disk.qcow2");
    let peer_raw = work.path().join("peer.raw");
    let peer_qcow2 = work.path().join("peer.qcow2");
    let images = [("raw", &raw), ("raw", &peer_raw), ("vhd", &vhd), ("qcow2", &qcow2), ("qcow2", &peer_qcow2)];
    for (format, path) in images {
        tapline(&["image", "create", &format!("{format}:{}", path.display()), "--size", &size])?;
    }
    let kinds = [
        ServerKind::qemu("QSD raw", "raw", &peer_raw),
        ServerKind::qemu("QSD qcow2", "qcow2", &peer_qcow2),
        ServerKind::tapline("tapline raw", vec![format!("raw:{}", raw.display())]),
        ServerKind::tapline("tapline vhd", vec![format!("vhd:{}", vhd.display())]),
        ServerKind::tapline("tapline qcow2", vec![format!("qcow2:{}", qcow2.display())]),
    ];
    fill(&kinds, work.path())?;
    compare("4 KiB on vhost-user-blk, Linux AIO on both sides", &kinds, WORKLOADS, work.path(), arguments)
}

fn depth(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let format = arguments.format.as_str();
    let single = format!("{format}:{}", work.path().join("single").display());
    tapline(&["image", "create", &single, "--size", "512M"])?;
    let alone = ServerKind::tapline("depth 1", vec![single]);
    fill(std::slice::from_ref(&alone), work.path())?;
    let whole = chain(work.path(), format, ("whole", "512M"), &|kind, layer| {
        // Each layer contains one block in thirty, so that the chain contains as much as the single image.
        let server = Server::start(kind, work.path())?;
        let (every, first) = (LAYERS.to_string(), layer.to_string());
        client(&server, &["--fill", "--block", "2097152", "--depth", "1", "--every", &every, "--first", &first])?;
        server.stop()
    })?;
    // The worst case: neighbouring 4 KiB blocks may be in different layers, and the files are many times as large.
    let scattered =
        chain(work.path(), format, ("scattered", "512M"), &|kind, layer| scatter(kind, work.path(), layer))?;
    let kinds = [alone, ServerKind::tapline("depth 30", whole), ServerKind::tapline("depth 30, scattered", scattered)];
    let workloads = [
        Workload { name: "randread 4k qd1", client: &["--pattern", "randread", "--depth", "1"] },
        Workload { name: "randread 4k qd32", client: &["--pattern", "randread", "--depth", "32"] },
    ];
    compare("random 4 KiB reads of a chain", &kinds, &workloads, work.path(), arguments)
}

/// Layers of a deep chain: the maximum of the Xen tools.
const LAYERS: usize = 30;

/// Creates a chain of images, leaf first; `write` writes to each while it is the leaf.
fn chain(
    work: &Path,
    format: &str,
    (name, size): (&str, &str),
    write: &dyn Fn(&ServerKind, usize) -> Result<(), String>,
) -> Result<Vec<String>, String> {
    let mut chain: Vec<String> = Vec::new();
    for layer in 0..LAYERS {
        let path = format!("{format}:{}", work.join(format!("{name}{layer}")).display());
        let mut create = vec!["image", "create", &path];
        match chain.first() {
            None => create.extend(["--size", size]),
            Some(parent) => create.extend(["--parent", parent.as_str()]),
        }
        tapline(&create)?;
        chain.insert(0, path.clone());
        write(&ServerKind::tapline("layer", chain.clone()), layer)?;
    }
    Ok(chain)
}

/// Writes every block, so that thin images are allocated as raw ones are.
fn fill(kinds: &[ServerKind], work: &Path) -> Result<(), String> {
    for kind in kinds {
        let server = Server::start(kind, work)?;
        client(&server, &["--fill", "--block", "1048576", "--depth", "4"])?;
        server.stop()?;
    }
    Ok(())
}

/// Writes to random offsets of the disk for a moment.
fn scatter(kind: &ServerKind, work: &Path, seed: usize) -> Result<(), String> {
    let server = Server::start(kind, work)?;
    let seed = (seed + 1).to_string();
    client(&server, &["--pattern", "randwrite", "--depth", "8", "--seconds", "0.2", "--warmup", "0", "--seed", &seed])?;
    server.stop()
}

fn compare(
    title: &str,
    kinds: &[ServerKind],
    workloads: &[Workload],
    work: &Path,
    arguments: &Arguments,
) -> Result<(), String> {
    let mut report = Vec::new();
    if !arguments.json {
        println!(
            "{title}: {} rounds of {} s, medians; server on CPU 0, client on CPU 1",
            arguments.rounds, arguments.seconds
        );
    }
    for workload in workloads {
        let names: Vec<&str> = kinds.iter().map(ServerKind::name).collect();
        let samples = in_turns(workload.name, &names, arguments.rounds, |which| {
            sample(&kinds[which], workload, work, arguments.seconds)
        })?;
        let rows: Vec<Sample> = samples.iter().map(|samples| medians(samples)).collect();
        if !arguments.json {
            print_rows(workload.name, kinds, &rows);
        }
        for (kind, row) in kinds.iter().zip(&rows) {
            report.push(serde_json::json!({
                "workload": workload.name, "server": kind.name(), "iops": row.iops, "ratio": row.iops / rows[0].iops,
                "p50_us": row.p50_us, "p99_us": row.p99_us, "server_cpu_us_per_io": row.server_us, "client_waits_per_io": row.waits,
            }));
        }
    }
    if arguments.json {
        println!("{}", serde_json::Value::Array(report));
    }
    Ok(())
}

fn print_rows(workload: &str, kinds: &[ServerKind], rows: &[Sample]) {
    println!(
        "\n{workload:<22}{:>10} {:>7} {:>9} {:>9} {:>12} {:>10}",
        "IOPS", "ratio", "p50 us", "p99 us", "CPU us/IO", "waits/IO"
    );
    for (kind, row) in kinds.iter().zip(rows) {
        println!(
            "  {:<20}{:>10.0} {:>6.2}x {:>9.1} {:>9.1} {:>12.2} {:>10.2}",
            kind.name(),
            row.iops,
            row.iops / rows[0].iops,
            row.p50_us,
            row.p99_us,
            row.server_us,
            row.waits
        );
    }
}

/// Measures several items alternately in several rounds; returns the results of each. Another item begins each round,
/// so that a slow minute does not always affect the same one.
fn in_turns<T>(
    what: &str,
    names: &[&str],
    rounds: usize,
    mut measure: impl FnMut(usize) -> Result<T, String>,
) -> Result<Vec<Vec<T>>, String> {
    let mut samples: Vec<Vec<T>> = names.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for turn in 0..names.len() {
            let which = (round + turn) % names.len();
            eprint!("\r{what}: round {}, {:<24}", round + 1, names[which]);
            samples[which].push(measure(which)?);
        }
    }
    eprint!("\r{:60}\r", "");
    Ok(samples)
}

/// Runs a load on a new server, which is warmed up first; returns the result, and the CPU seconds of the server.
fn on_server<T>(
    kind: &ServerKind,
    work: &Path,
    warm_up: impl FnOnce(&Server) -> Result<(), String>,
    load: impl FnOnce(&Server) -> Result<T, String>,
) -> Result<(T, f64), String> {
    let server = Server::start(kind, work)?;
    warm_up(&server)?;
    let before = server.cpu_seconds()?;
    let seen = load(&server)?;
    let cpu = server.cpu_seconds()? - before;
    server.stop()?;
    Ok((seen, cpu))
}

fn sample(kind: &ServerKind, workload: &Workload, work: &Path, seconds: f64) -> Result<Sample, String> {
    // No warm-up in the client, so that the server's CPU time is for the requests that the client counts.
    let run = |server: &Server, seconds: &str| {
        client(server, &[workload.client, &["--warmup", "0", "--seconds", seconds]].concat())
    };
    // The first run warms up: chains are folded and files cached.
    let warm_up = |server: &Server| run(server, "1.5").map(drop);
    let (seen, cpu) = on_server(kind, work, warm_up, |server| run(server, &seconds.to_string()))?;
    let number = |name: &str| seen[name].as_f64().ok_or(format!("the client did not say {name}: {seen}"));
    let requests = number("requests")?;
    Ok(Sample {
        iops: number("iops")?,
        p50_us: number("p50_us")?,
        p99_us: number("p99_us")?,
        server_us: cpu * 1e6 / requests,
        waits: number("waits")? / requests,
    })
}

fn client(server: &Server, arguments: &[&str]) -> Result<serde_json::Value, String> {
    let output = Command::new("taskset")
        .args(["-c", "1"])
        .arg(program("bench-client"))
        .arg(server.socket())
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("taskset bench-client: {error}"))?;
    if !output.status.success() {
        return Err(format!("bench-client {arguments:?} on {}: {}", server.socket().display(), output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("bench-client: {error}"))
}

fn tapline(arguments: &[&str]) -> Result<(), String> {
    let output =
        Command::new(program("tapline")).args(arguments).output().map_err(|error| format!("tapline: {error}"))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(format!("tapline {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)))
    }
}

/// The median of each column separately.
fn medians(samples: &[Sample]) -> Sample {
    let of = |column: fn(&Sample) -> f64| median(samples.iter().map(column));
    Sample {
        iops: of(|sample| sample.iops),
        p50_us: of(|sample| sample.p50_us),
        p99_us: of(|sample| sample.p99_us),
        server_us: of(|sample| sample.server_us),
        waits: of(|sample| sample.waits),
    }
}
