//! `cargo xtask bench`: Tapline beside its peers, in one run.
//!
//! These machines are shared and noisy. So the servers take turns within each workload, several rounds of it, the
//! server pinned to one CPU and the client to another; what is printed are medians, and ratios of medians. Nothing
//! here passes or fails by a figure.

mod allocate;
mod api;
mod bootstorm;
mod budget;
pub mod daemon;
mod idle;
mod idle_vm;
mod live;
mod plug;
mod server;

use std::cmp::Ordering;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use server::{Kind, Server};

const USAGE: &str = "usage: cargo xtask bench vhost-user [--rounds N] [--seconds S] [--dir DIR] [--size MIB] [--json]
       cargo xtask bench depth      [--format F] [--rounds N] [--seconds S] [--dir DIR] [--json]
       cargo xtask bench allocate   [--rounds N] [--seconds S] [--dir DIR] [--json]
       cargo xtask bench budget     [--rounds N] [--seconds S] [--dir DIR] [--json]
       cargo xtask bench live       [--format F] [--rounds N] [--seconds S] [--dir DIR] [--json]
       cargo xtask bench idle       [--disks N]  [--seconds S] [--dir DIR] [--json]
       cargo xtask bench idle-vm    [--interval S] [--minutes M] [--json]
       cargo xtask bench plug       [--disks N]  [--seconds S] [--dir DIR] [--json]
       cargo xtask bench bootstorm  [--vms N] [--disks N] [--real N] [--kill] [--seed N] [--budget MIB] [--bin-dir DIR] [--dir DIR] [--json]
       cargo xtask bench api        [--vdis N] [--clients N] [--rounds N] [--bin-dir DIR] [--dir DIR] [--json]
       cargo xtask bench xen        [--rounds N] [--requests N] [--guest pv|pvh] [--backend NAME]… [--json]

vhost-user  raw, VHD and qcow2 behind `tapline serve`, raw and qcow2 behind qemu-storage-daemon, over vhost-user-blk
depth       a chain of 30 layers beside one of 1
allocate    first writes to new images, ours and the peer's
budget      random reads of a scattered qcow2 of 1 TiB, by size of the part that is read; and memory
live        what a guest notices of snapshots, clones and a merge of the live leaf
idle        memory and wake-ups of many served disks that nobody uses
idle-vm     what wakes the QEMU of a guest that does nothing, by what it emulates
plug        many VBDs plugged and unplugged by the daemon, with slow storage and without, and idle ones
api         a list of many VDIs; and plugs alone and beside many clients, with what these cost
bootstorm   many VMs cloned, booted and destroyed, while the daemon and its disk processes are killed or not; this one fails
xen         backends of a Xen guest's disks, counted in instructions: blkback, qdisk, tapline
";

/// How to run.
struct Arguments {
    rounds: usize,
    seconds: f64,
    dir: PathBuf,
    mib: u64,
    disks: usize,
    format: String,
    json: bool,
}

/// One load.
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

/// What one round saw.
#[derive(Clone, Copy, Debug)]
struct Sample {
    iops: f64,
    p50_us: f64,
    p99_us: f64,
    /// CPU time of the server, all its threads, a request.
    server_us: f64,
    /// Times the client went to sleep or looked again, a request.
    waits: f64,
}

/// Runs a benchmark.
pub fn run(arguments: &[String]) -> Result<(), String> {
    let Some((name, rest)) = arguments.split_first() else { return Err(USAGE.into()) };
    if matches!(name.as_str(), "help" | "--help" | "-h") {
        print!("{USAGE}");
        return Ok(());
    }
    if name == "xen" {
        return crate::xen::compare::run(rest);
    }
    if name == "idle-vm" {
        return idle_vm::run(rest);
    }
    if name == "api" {
        return api::run(rest);
    }
    if name == "bootstorm" {
        return bootstorm::run(rest);
    }
    let parsed = parse(rest)?;
    build()?;
    match name.as_str() {
        "vhost-user" => vhost_user(&parsed),
        "depth" => depth(&parsed),
        "allocate" => allocate::run(&parsed),
        "budget" => budget::run(&parsed),
        "live" => live::run(&parsed),
        "idle" => idle::run(&parsed),
        "plug" => plug::run(&parsed),
        _ => Err(USAGE.into()),
    }
}

fn parse(arguments: &[String]) -> Result<Arguments, String> {
    let mut parsed = Arguments {
        rounds: 5,
        seconds: 2.0,
        dir: "/dev/shm".into(),
        mib: 1024,
        disks: 20,
        format: "vhd".into(),
        json: false,
    };
    let mut rest = arguments.iter();
    while let Some(name) = rest.next() {
        let mut value = || rest.next().ok_or(format!("{name} needs a value\n{USAGE}"));
        let number = |text: &String| text.parse::<f64>().map_err(|_| format!("{name}: {text} is not a number"));
        match name.as_str() {
            "--rounds" => parsed.rounds = value()?.parse().map_err(|_| USAGE.to_string())?,
            "--seconds" => parsed.seconds = number(value()?)?,
            "--size" => parsed.mib = value()?.parse().map_err(|_| USAGE.to_string())?,
            "--disks" => parsed.disks = value()?.parse().map_err(|_| USAGE.to_string())?,
            "--dir" => parsed.dir = value()?.into(),
            "--format" => parsed.format = value()?.clone(),
            "--json" => parsed.json = true,
            _ => return Err(USAGE.into()),
        }
    }
    Ok(parsed)
}

/// Release builds of both programs and of the client.
fn build() -> Result<(), String> {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--release"]);
    for program in ["tapline-disk", "tapline", "taplined", "bench-client", "bench-guest"] {
        build.args(["--bin", program]);
    }
    let built = build.status();
    match built {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("cargo build --release: {other:?}")),
    }
}

fn program(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/release").join(name)
}

/// The directory of the programs: one that is named, or that of those that are released, which are built.
fn programs(named: Option<&Path>) -> Result<PathBuf, String> {
    if let Some(directory) = named {
        return std::path::absolute(directory).map_err(|error| format!("{}: {error}", directory.display()));
    }
    build()?;
    Ok(program(""))
}

/// A directory for the images, which goes away with them.
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
        Kind::QemuStorageDaemon { name: "QSD raw", format: "raw", image: peer_raw },
        Kind::QemuStorageDaemon { name: "QSD qcow2", format: "qcow2", image: peer_qcow2 },
        Kind::Tapline { name: "tapline raw", images: vec![format!("raw:{}", raw.display())] },
        Kind::Tapline { name: "tapline vhd", images: vec![format!("vhd:{}", vhd.display())] },
        Kind::Tapline { name: "tapline qcow2", images: vec![format!("qcow2:{}", qcow2.display())] },
    ];
    fill(&kinds, work.path())?;
    compare("4 KiB on vhost-user-blk, Linux AIO on both sides", &kinds, WORKLOADS, work.path(), arguments)
}

fn depth(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let format = arguments.format.as_str();
    let single = format!("{format}:{}", work.path().join("single").display());
    tapline(&["image", "create", &single, "--size", "512M"])?;
    let alone = Kind::Tapline { name: "depth 1", images: vec![single] };
    fill(std::slice::from_ref(&alone), work.path())?;
    let whole = chain(work.path(), format, "whole", &|kind, layer| {
        // Each layer holds one block in thirty, so that the chain holds as much as the single image.
        let server = Server::start(kind, work.path())?;
        let (every, first) = (LAYERS.to_string(), layer.to_string());
        client(&server, &["--fill", "--block", "2097152", "--depth", "1", "--every", &every, "--first", &first])?;
        server.stop()
    })?;
    // The worst of chains: every 4 KiB may live in another layer than its neighbour, and the files are many times as
    // large.
    let scattered = chain(work.path(), format, "scattered", &|kind, layer| scatter(kind, work.path(), layer))?;
    let kinds = [
        alone,
        Kind::Tapline { name: "depth 30", images: whole },
        Kind::Tapline { name: "depth 30, scattered", images: scattered },
    ];
    let workloads = [
        Workload { name: "randread 4k qd1", client: &["--pattern", "randread", "--depth", "1"] },
        Workload { name: "randread 4k qd32", client: &["--pattern", "randread", "--depth", "32"] },
    ];
    compare("random 4 KiB reads of a chain", &kinds, &workloads, work.path(), arguments)
}

/// Layers of a deep chain: the most that the Xen tools make.
const LAYERS: usize = 30;

/// A chain of images, leaf first; `write` writes to each while it is the leaf.
fn chain(
    work: &Path,
    format: &str,
    name: &str,
    write: &dyn Fn(&Kind, usize) -> Result<(), String>,
) -> Result<Vec<String>, String> {
    let mut chain: Vec<String> = Vec::new();
    for layer in 0..LAYERS {
        let path = format!("{format}:{}", work.join(format!("{name}{layer}")).display());
        let mut create = vec!["image", "create", &path];
        match chain.first() {
            None => create.extend(["--size", "512M"]),
            Some(parent) => create.extend(["--parent", parent.as_str()]),
        }
        tapline(&create)?;
        chain.insert(0, path.clone());
        write(&Kind::Tapline { name: "layer", images: chain.clone() }, layer)?;
    }
    Ok(chain)
}

/// Writes every block, so that thin images are allocated as raw ones are.
fn fill(kinds: &[Kind], work: &Path) -> Result<(), String> {
    for kind in kinds {
        let server = Server::start(kind, work)?;
        client(&server, &["--fill", "--block", "1048576", "--depth", "4"])?;
        server.stop()?;
    }
    Ok(())
}

/// Writes random places of the disk for a moment.
fn scatter(kind: &Kind, work: &Path, seed: usize) -> Result<(), String> {
    let server = Server::start(kind, work)?;
    let seed = (seed + 1).to_string();
    client(&server, &["--pattern", "randwrite", "--depth", "8", "--seconds", "0.2", "--warmup", "0", "--seed", &seed])?;
    server.stop()
}

fn compare(
    title: &str,
    kinds: &[Kind],
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
        let mut samples: Vec<Vec<Sample>> = vec![Vec::new(); kinds.len()];
        for round in 0..arguments.rounds {
            // Another one begins each round, so that a slow minute does not always meet the same server.
            for turn in 0..kinds.len() {
                let which = (round + turn) % kinds.len();
                eprint!("\r{}: round {}, {:<24}", workload.name, round + 1, kinds[which].name());
                samples[which].push(sample(&kinds[which], workload, work, arguments.seconds)?);
            }
        }
        eprint!("\r{:60}\r", "");
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

fn print_rows(workload: &str, kinds: &[Kind], rows: &[Sample]) {
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

fn sample(kind: &Kind, workload: &Workload, work: &Path, seconds: f64) -> Result<Sample, String> {
    let server = Server::start(kind, work)?;
    let seconds_text = seconds.to_string();
    let mut arguments = workload.client.to_vec();
    // No warm-up in the client: the server's CPU time is of the same requests as the client's count.
    arguments.extend(["--warmup", "0", "--seconds", &seconds_text]);
    // The first run warms up: chains are folded and files cached.
    client(&server, &[workload.client, &["--warmup", "0", "--seconds", "1.5"]].concat())?;
    let before = server.cpu_seconds()?;
    let seen = client(&server, &arguments)?;
    let cpu = server.cpu_seconds()? - before;
    server.stop()?;
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

/// The median of each column by itself.
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

/// The upper one of the two in the middle, where there are two; of nothing, zero.
fn median<T: PartialOrd + Copy + Default>(values: impl IntoIterator<Item = T>) -> T {
    let mut sorted: Vec<T> = values.into_iter().collect();
    sorted.sort_by(|one, other| one.partial_cmp(other).unwrap_or(Ordering::Equal));
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
