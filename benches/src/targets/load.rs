//! One measurement: a load through a server, or by fio alone.

use std::path::Path;
use std::process::{Command, Stdio};

use super::hogs::Hogs;
use super::images::Room;
use super::{Image, Load};
use crate::server::{Kind, Server};
use crate::{client, on_server};

/// What one measurement saw.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) iops: f64,
    /// Microseconds.
    pub(super) p50: f64,
    /// CPU seconds of the server a second.
    pub(super) server_cpu: f64,
    /// Times the client went to sleep or looked again, a request.
    pub(super) waits: f64,
    /// Microseconds of the client's CPU time, a request.
    pub(super) client_cpu: f64,
    /// Of the server's CPU, the part that a process got which wants all of it.
    pub(super) hog_cpu: f64,
}

/// Through a server, with the client that belongs to its protocol.
pub(super) fn served(load: &Load, kind: &Kind, work: &Path, seconds: f64) -> Result<Seen, String> {
    let run = |server: &Server, seconds: f64| {
        if kind.is_nbd() { fio_nbd(load, server, seconds) } else { of_client(load, server, seconds) }
    };
    let warm_up = |server: &Server| match load {
        Load { cold: true, .. } => kind.evict(),
        Load { fresh: true, .. } => Ok(()),
        // The first run warms up: chains are folded and files cached.
        _ => run(server, 1.0).map(drop),
    };
    let measured = |server: &Server| {
        let hogs = if load.hogs { Some(Hogs::start()?) } else { None };
        let seen = run(server, seconds)?;
        let hog = hogs.map_or(Ok(0.0), |hogs| hogs.beside_server())?;
        Ok(Seen { hog_cpu: hog / seconds, ..seen })
    };
    let (seen, cpu) = on_server(kind, work, warm_up, measured)?;
    Ok(Seen { server_cpu: cpu / seconds, ..seen })
}

/// By fio, on the file that our server has as well.
pub(super) fn fio_alone(load: &Load, room: &Room, seconds: f64) -> Result<Seen, String> {
    let image = if load.fresh { Image::Sparse } else { Image::Raw };
    let file = format!("--filename={}", room.ours(image)?.display());
    let size = format!("--size={}M", room.mib());
    // It would give a sparse file its blocks before it begins, and write to each only once.
    let as_it_is = ["--fallocate=none", "--norandommap"];
    fio(load, seconds, &[&[room.fio_engine(), "--direct=1", &file, &size], &as_it_is[..]].concat())
}

fn of_client(load: &Load, server: &Server, seconds: f64) -> Result<Seen, String> {
    let (block, depth, seconds) = (load.block.to_string(), load.depth.to_string(), seconds.to_string());
    let rate = load.rate.map(|rate| rate.to_string());
    let mut arguments = vec!["--pattern", load.pattern, "--block", &block, "--depth", &depth];
    // The server's CPU time is of the same requests as the client's count.
    arguments.extend(["--warmup", "0", "--seconds", &seconds]);
    arguments.extend(rate.iter().flat_map(|rate| ["--rate", rate.as_str()]));
    if load.spins {
        arguments.push("--poll");
    }
    let said = client(server, &arguments)?;
    let number = |name: &str| said[name].as_f64().ok_or(format!("the client did not say {name}: {said}"));
    let requests = number("requests")?;
    Ok(Seen {
        iops: number("iops")?,
        p50: number("p50_us")?,
        server_cpu: 0.0,
        waits: number("waits")? / requests,
        client_cpu: number("client_cpu_us")? / requests,
        hog_cpu: 0.0,
    })
}

fn fio_nbd(load: &Load, server: &Server, seconds: f64) -> Result<Seen, String> {
    let uri = format!("--uri=nbd+unix:///?socket={}", server.socket().display());
    fio(load, seconds, &["--ioengine=nbd", &uri])
}

fn fio(load: &Load, seconds: f64, more: &[&str]) -> Result<Seen, String> {
    let mut command = Command::new("taskset");
    command.args(["-c", "1", "fio", "--name=load", "--time_based", "--output-format=json", "--randrepeat=0"]);
    command.arg(format!("--rw={}", load.pattern)).arg(format!("--bs={}", load.block));
    command.arg(format!("--iodepth={}", load.depth)).arg(format!("--runtime={:.0}ms", seconds * 1000.0)).args(more);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("fio: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", output.status));
    }
    // Its NBD engine says first to which server it has connected.
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').and_then(|begin| text.get(begin..)).unwrap_or_default();
    let said: serde_json::Value = serde_json::from_str(json).map_err(|error| format!("fio: {error}: {text}"))?;
    let direction = if load.pattern.ends_with("read") { "read" } else { "write" };
    let of = &said["jobs"][0][direction];
    let number = |value: &serde_json::Value| value.as_f64().ok_or(format!("fio did not say it of {direction}: {of}"));
    let p50 = number(&of["clat_ns"]["percentile"]["50.000000"])? / 1000.0;
    Ok(Seen { iops: number(&of["iops"])?, p50, server_cpu: 0.0, waits: f64::NAN, client_cpu: f64::NAN, hog_cpu: 0.0 })
}
