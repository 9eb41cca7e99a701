//! Cost of first writes to a growing thin image, compared with the peer's in the same format.

use std::path::{Path, PathBuf};

use super::server::{Server, ServerKind};
use super::{Arguments, client, in_turns, median, room, tapline};

/// A load of first writes, and the part of them that allocates.
struct Workload {
    name: &'static str,
    client: &'static [&'static str],
}

const WORKLOADS: &[Workload] = &[
    Workload { name: "write 64k qd8", client: &["--pattern", "write", "--block", "65536", "--depth", "8"] },
    Workload { name: "write 1M qd4", client: &["--pattern", "write", "--block", "1048576", "--depth", "4"] },
    Workload { name: "randwrite 4k qd32", client: &["--pattern", "randwrite", "--block", "4096", "--depth", "32"] },
];

/// Size of the disk: so large that no load wraps around.
const SIZE: &str = "64G";

/// A program and a format, as each of the two names it.
struct Writer {
    name: &'static str,
    format: &'static str,
    peer: Option<&'static str>,
}

const WRITERS: &[Writer] = &[
    Writer { name: "QSD qcow2", format: "qcow2", peer: Some("qcow2") },
    Writer { name: "tapline qcow2", format: "qcow2", peer: None },
    Writer { name: "QSD vpc", format: "vhd", peer: Some("vpc") },
    Writer { name: "tapline vhd", format: "vhd", peer: None },
];

/// Runs the benchmark. Each round begins with new images. Ratios are to the peer with the same format.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let mut report = Vec::new();
    for workload in WORKLOADS {
        let names: Vec<&str> = WRITERS.iter().map(|writer| writer.name).collect();
        let seen = in_turns(workload.name, &names, arguments.rounds, |which| {
            sample(&WRITERS[which], workload, work.path(), arguments.seconds)
        })?;
        let medians: Vec<f64> = seen.into_iter().map(median).collect();
        if !arguments.json {
            println!("\n{:<22}{:>10} {:>7}", workload.name, "IOPS", "ratio");
        }
        for (which, writer) in WRITERS.iter().enumerate() {
            let peer = WRITERS.iter().position(|peer| peer.format == writer.format && peer.peer.is_some()).unwrap_or(0);
            let ratio = medians[which] / medians[peer];
            if !arguments.json {
                println!("  {:<20}{:>10.0} {ratio:>6.2}x", writer.name, medians[which]);
            }
            report.push(serde_json::json!({
                "workload": workload.name, "server": writer.name, "iops": medians[which], "ratio": ratio,
            }));
        }
    }
    if arguments.json {
        println!("{}", serde_json::Value::Array(report));
    }
    Ok(())
}

fn sample(writer: &Writer, workload: &Workload, work: &Path, seconds: f64) -> Result<f64, String> {
    let image: PathBuf = work.join("new");
    match std::fs::remove_file(&image) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.to_string()),
        _ => {}
    }
    let name = format!("{}:{}", writer.format, image.display());
    tapline(&["image", "create", &name, "--size", SIZE])?;
    let kind = match writer.peer {
        Some(format) => ServerKind::qemu(writer.name, format, &image),
        None => ServerKind::tapline(writer.name, vec![name]),
    };
    let server = Server::start(&kind, work)?;
    let seconds = seconds.to_string();
    let seen = client(&server, &[workload.client, &["--warmup", "0", "--seconds", &seconds]].concat())?;
    server.stop()?;
    seen["iops"].as_f64().ok_or(format!("the client did not say iops: {seen}"))
}
