//! Performance when the metadata of a disk exceeds its memory budget.
//!
//! The image is the worst case: 1 TiB of clusters in random order, so that no two neighbours form a run. Its data are
//! holes; only the metadata (128 MiB of L2 tables) takes space.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use fastrand::Rng;

use super::server::{Server, ServerKind};
use super::{Arguments, client, median, room};

const TIB: u64 = 1 << 40;
/// Sizes of the parts of the disk that are read, in GiB.
const PARTS: [u64; 8] = [4, 16, 32, 64, 128, 256, 512, 1024];

/// Measures and prints the curve.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let image = work.path().join("scattered.qcow2");
    scattered(&image)?;
    let ours = ServerKind::tapline("tapline qcow2", vec![format!("qcow2:{}", image.display())]);
    let peer = ServerKind::qemu("QSD qcow2", "qcow2", &image);
    let mut report = Vec::new();
    if !arguments.json {
        println!("random 4 KiB reads at depth 32 of the first part of a scattered qcow2 of 1 TiB, clusters of 64 KiB");
        println!("{:>8} {:>14} {:>10} {:>14} {:>10}", "part", "tapline IOPS", "PSS", "QSD IOPS", "PSS");
    }
    for part in PARTS {
        let mut rows = Vec::new();
        for kind in [&ours, &peer] {
            rows.push(measure(kind, part << 30, work.path(), arguments)?);
        }
        let [(iops, pss), (peer_iops, peer_pss)] = rows[..] else { unreachable!("two servers, two rows") };
        if !arguments.json {
            println!("{part:>4} GiB {iops:>14.0} {pss:>6} KiB {peer_iops:>14.0} {peer_pss:>6} KiB");
        }
        report.push(serde_json::json!({
            "part_gib": part, "iops": iops, "pss_kib": pss, "peer_iops": peer_iops, "peer_pss_kib": peer_pss,
        }));
    }
    if arguments.json {
        println!("{}", serde_json::Value::Array(report));
    }
    Ok(())
}

/// Requests per second and the server's memory, after the part was read at random for a while.
fn measure(kind: &ServerKind, span: u64, work: &Path, arguments: &Arguments) -> Result<(f64, u64), String> {
    let server = Server::start(kind, work)?;
    let (span, seconds) = (span.to_string(), arguments.seconds.to_string());
    let load = ["--pattern", "randread", "--depth", "32", "--span", &span, "--warmup", "0"];
    // Long enough to read every cluster of a small part, and to fill the caches with a large one.
    client(&server, &[&load[..], &["--seconds", "4", "--seed", "7"]].concat())?;
    let mut seen = Vec::new();
    for round in 0..arguments.rounds {
        let seed = (round + 11).to_string();
        let said = client(&server, &[&load[..], &["--seconds", &seconds, "--seed", &seed]].concat())?;
        seen.push(said["iops"].as_f64().ok_or(format!("the client did not say iops: {said}"))?);
    }
    let pss = testbed::process::pss_kib(server.pid())?;
    server.stop()?;
    Ok((median(seen), pss))
}

/// Creates an image of 1 TiB with all clusters allocated, in random order.
fn scattered(path: &Path) -> Result<(), String> {
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
        .arg(path)
        .arg(TIB.to_string())
        .status();
    if !made.as_ref().is_ok_and(std::process::ExitStatus::success) {
        return Err(format!("qemu-img create: {made:?}"));
    }
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let file = File::options().read(true).write(true).open(path).map_err(failed)?;
    let read = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        file.read_exact_at(&mut bytes, at).map(|()| bytes).map_err(failed)
    };
    // qcow2 specification, "Header": l1_size at byte 36, l1_table_offset at 40; clusters of 64 KiB by default.
    let header = read(0, 48)?;
    let entries = u32::from_be_bytes([header[36], header[37], header[38], header[39]]);
    let l1 = read(number(&header[40..48]), entries as usize * 8)?;
    let tables: Vec<u64> = l1.chunks(8).map(|entry| number(entry) & 0x00ff_ffff_ffff_fe00).collect();
    let mut clusters = Vec::new();
    for &table in &tables {
        clusters.extend(read(table, 1 << 16)?.chunks(8).map(number));
    }
    Rng::with_seed(1).shuffle(&mut clusters);
    for (table, entries) in tables.iter().zip(clusters.chunks(1 << 13)) {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
        file.write_all_at(&bytes, *table).map_err(failed)?;
    }
    Ok(())
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| (number << 8) | u64::from(*byte))
}
