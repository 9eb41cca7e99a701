//! Effects of changes of the chain on a guest: the pause of a snapshot, and the latency of writes while the live leaf
//! is merged.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::server::{Server, ServerKind};
use super::{Arguments, client, median, program, room, tapline};

/// Size of the disk, and of the part of it that the guest uses.
const SIZE: &str = "100G";
const PART: u64 = 1 << 30;

/// Measures and prints the effects.
pub fn run(arguments: &Arguments) -> Result<(), String> {
    let work = room(arguments)?;
    let format = arguments.format.as_str();
    let base = format!("{format}:{}", work.path().join("base").display());
    tapline(&["image", "create", &base, "--size", SIZE])?;
    let mut chain = vec![base];
    let pauses = snapshots(&mut chain, work.path(), arguments)?;
    let clones = clones(&chain, work.path(), arguments)?;
    let merge = merge(work.path(), arguments)?;
    let report = json!({ "format": format, "snapshot_pause_us": pauses, "clone": clones, "merge": merge });
    if arguments.json {
        println!("{report}");
        return Ok(());
    }
    println!("a {format} disk of 100 GiB, a guest that writes 4 KiB at depth 1 to 1 GiB of it");
    println!(
        "  pause of a snapshot         {} us median, {} us longest of {}",
        median(pauses.iter().copied()),
        longest(&pauses),
        pauses.len()
    );
    println!("  a clone: work               {} us median", median(clones.iter().map(|&(work, _)| work)));
    println!("  a clone: fsync              {} us median", median(clones.iter().map(|&(_, sync)| sync)));
    println!("merge of the live leaf, the guest overwriting at random, depth 8");
    for name in [
        "seconds",
        "copied_mib",
        "leaf_mib",
        "p50_us_before",
        "p50_us_during",
        "p99_us_before",
        "p99_us_during",
        "p99_ratio",
        "iops_before",
        "iops_during",
    ] {
        println!("  {name:<27} {:.1}", merge[name].as_f64().unwrap_or(f64::NAN));
    }
    Ok(())
}

/// Takes snapshots under load; returns the pauses in microseconds. The chain grows with each.
fn snapshots(chain: &mut Vec<String>, work: &Path, arguments: &Arguments) -> Result<Vec<u64>, String> {
    let server = Server::start(&ServerKind::tapline("tapline", chain.clone()), work)?;
    let span = PART.to_string();
    client(&server, &["--fill", "--block", "1048576", "--depth", "4", "--span", &span])?;
    let mut load =
        background(&server, &["--pattern", "randwrite", "--depth", "1", "--span", &span, "--seconds", "600"])?;
    let mut pauses = Vec::new();
    for round in 0..arguments.rounds.max(3) {
        std::thread::sleep(Duration::from_millis(500));
        let leaf = format!("{}:{}", arguments.format, work.join(format!("leaf{round}")).display());
        let said = ask(&server, json!({ "verb": "snapshot", "to": leaf, "method": "chain" }), |_| {})?;
        pauses.push(said["pause_us"].as_u64().ok_or(format!("no pause_us: {said}"))?);
        chain.insert(0, leaf);
    }
    load.kill().and_then(|()| load.wait()).map_err(|error| error.to_string())?;
    server.stop()?;
    Ok(pauses)
}

/// Clones a layer repeatedly; returns the microseconds of work, and of waiting for the storage.
fn clones(chain: &[String], work: &Path, arguments: &Arguments) -> Result<Vec<(u64, u64)>, String> {
    let server = Server::start(&ServerKind::tapline("tapline", chain.to_vec()), work)?;
    let mut seen = Vec::new();
    for round in 0..arguments.rounds.max(3) {
        let to = format!("{}:{}", arguments.format, work.join(format!("clone{round}")).display());
        let said = ask(&server, json!({ "verb": "clone", "of": 1, "to": to }), |_| {})?;
        let number = |name: &str| said[name].as_u64().ok_or(format!("no {name}: {said}"));
        seen.push((number("work_us")?, number("sync_us")?));
    }
    server.stop()?;
    Ok(seen)
}

/// Merges a full leaf under load.
fn merge(work: &Path, arguments: &Arguments) -> Result<Value, String> {
    let image = |name: &str| format!("{}:{}", arguments.format, work.join(name).display());
    let (base, leaf) = (image("under"), image("over"));
    tapline(&["image", "create", &base, "--size", SIZE])?;
    let span = PART.to_string();
    let fill = ["--fill", "--block", "1048576", "--depth", "4", "--span", &span];
    let server = Server::start(&ServerKind::tapline("tapline", vec![base.clone()]), work)?;
    client(&server, &fill)?;
    server.stop()?;
    tapline(&["image", "create", &leaf, "--parent", &base])?;
    let server = Server::start(&ServerKind::tapline("tapline", vec![leaf, base]), work)?;
    client(&server, &fill)?;
    let load = ["--pattern", "randwrite", "--depth", "8", "--span", &span, "--warmup", "0.5", "--seconds"];
    let seconds = arguments.seconds.max(3.0).to_string();
    let before = client(&server, &[&load[..], &[&seconds]].concat())?;
    // The guest continues longer than the merge takes; only its figures during the merge are used.
    let begun = Instant::now();
    let (socket, request) = (server.control(), json!({ "verb": "merge", "from": 0, "into": 1, "follow": true }));
    let merging = std::thread::spawn(move || {
        let said = converse(&socket, request, |_| {});
        (said, begun.elapsed())
    });
    let mut during: Vec<Value> = Vec::new();
    while !merging.is_finished() {
        during.push(client(
            &server,
            &["--pattern", "randwrite", "--depth", "8", "--span", &span, "--warmup", "0", "--seconds", "1"],
        )?);
    }
    let (said, took) = merging.join().map_err(|_| "the merge was not followed to its end")?;
    let said = said?;
    server.stop()?;
    // The last second is only partly the merge's.
    if during.len() > 1 {
        during.pop();
    }
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    let middle = |name: &str| median(during.iter().map(|value| number(value, name)));
    Ok(json!({
        "seconds": took.as_secs_f64(), "copied_mib": number(&said, "copied") / f64::from(1 << 20), "leaf_mib": PART >> 20,
        "p50_us_before": number(&before, "p50_us"), "p50_us_during": middle("p50_us"),
        "p99_us_before": number(&before, "p99_us"), "p99_us_during": middle("p99_us"),
        "p99_ratio": middle("p99_us") / number(&before, "p99_us"),
        "iops_before": number(&before, "iops"), "iops_during": middle("iops"),
        "said": said,
    }))
}

fn background(server: &Server, arguments: &[&str]) -> Result<Child, String> {
    let mut command = Command::new("taskset");
    command.args(["-c", "1"]).arg(program("bench-client")).arg(server.socket()).args(arguments);
    command.stdout(Stdio::null()).spawn().map_err(|error| format!("taskset bench-client: {error}"))
}

fn ask(server: &Server, request: Value, on_event: impl FnMut(&Value)) -> Result<Value, String> {
    converse(&server.control(), request, on_event)
}

/// Sends a request and waits for its response; `on_event` is called for events before that.
fn converse(socket: &Path, mut request: Value, mut on_event: impl FnMut(&Value)) -> Result<Value, String> {
    request["version"] = json!(1);
    let failed = |error: std::io::Error| format!("{}: {error}", socket.display());
    let mut stream = UnixStream::connect(socket).map_err(failed)?;
    stream.write_all(format!("{request}\n").as_bytes()).map_err(failed)?;
    for line in BufReader::new(stream).lines() {
        let mut said: Value = serde_json::from_str(&line.map_err(failed)?).map_err(|error| error.to_string())?;
        match (said["ok"].take(), said["error"].take()) {
            (Value::Null, Value::Null) => on_event(&said),
            (ok, Value::Null) => return Ok(ok),
            (_, error) => return Err(format!("{request}: {error}")),
        }
    }
    Err(format!("{request}: no answer"))
}

fn longest(values: &[u64]) -> u64 {
    values.iter().copied().max().unwrap_or(0)
}
