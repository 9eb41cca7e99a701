//! Measures a load through a server, or by fio alone.

use std::path::Path;
use std::process::{Command, Stdio};

use super::hogs::Hogs;
use super::images::Room;
use super::{Image, Load};
use crate::server::{Server, ServerKind};
use crate::{client, on_server};

/// The figures of one measurement.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredFigures {
    pub(super) iops: f64,
    /// Median latency in microseconds.
    pub(super) p50: f64,
    /// CPU seconds of the server per second.
    pub(super) server_cpu: f64,
    /// Number of times the client slept or polled, per request.
    pub(super) waits: f64,
    /// CPU time of the client per request, in microseconds.
    pub(super) client_cpu: f64,
    /// Part of the server's CPU that the competing process got.
    pub(super) hog_cpu: f64,
}

/// Measures through a server, with the client for its protocol.
pub(super) fn served(load: &Load, kind: &ServerKind, work: &Path, seconds: f64) -> Result<MeasuredFigures, String> {
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
        let hog = hogs.map_or(Ok(0.0), |hogs| hogs.on_servers_cpu())?;
        Ok(MeasuredFigures { hog_cpu: hog / seconds, ..seen })
    };
    let (seen, cpu) = on_server(kind, work, warm_up, measured)?;
    Ok(MeasuredFigures { server_cpu: cpu / seconds, ..seen })
}

/// Measures with fio, on the file that our server also uses.
pub(super) fn fio_alone(load: &Load, room: &Room, seconds: f64) -> Result<MeasuredFigures, String> {
    let image = if load.fresh { Image::Sparse } else { Image::Raw };
    let file = format!("--filename={}", room.ours(image)?.display());
    let size = format!("--size={}M", room.mib());
    // Otherwise fio would allocate a sparse file first, and write to each block only once.
    let as_it_is = ["--fallocate=none", "--norandommap"];
    fio(load, seconds, &[&[room.fio_engine(), "--direct=1", &file, &size], &as_it_is[..]].concat())
}

fn of_client(load: &Load, server: &Server, seconds: f64) -> Result<MeasuredFigures, String> {
    let (block, depth, seconds) = (load.block.to_string(), load.depth.to_string(), seconds.to_string());
    let rate = load.rate.map(|rate| rate.to_string());
    let mut arguments = vec!["--pattern", load.pattern, "--block", &block, "--depth", &depth];
    // The server's CPU time is for the requests that the client counts.
    arguments.extend(["--warmup", "0", "--seconds", &seconds]);
    arguments.extend(rate.iter().flat_map(|rate| ["--rate", rate.as_str()]));
    if load.spins {
        arguments.push("--poll");
    }
    let said = client(server, &arguments)?;
    let number = |name: &str| said[name].as_f64().ok_or(format!("the client did not say {name}: {said}"));
    let requests = number("requests")?;
    Ok(MeasuredFigures {
        iops: number("iops")?,
        p50: number("p50_us")?,
        server_cpu: 0.0,
        waits: number("waits")? / requests,
        client_cpu: number("client_cpu_us")? / requests,
        hog_cpu: 0.0,
    })
}

fn fio_nbd(load: &Load, server: &Server, seconds: f64) -> Result<MeasuredFigures, String> {
    let uri = format!("--uri=nbd+unix:///?socket={}", server.socket().display());
    fio(load, seconds, &["--ioengine=nbd", &uri])
}

fn fio(load: &Load, seconds: f64, more: &[&str]) -> Result<MeasuredFigures, String> {
    let mut command = Command::new("taskset");
    command.args(["-c", "1", "fio", "--name=load", "--time_based", "--output-format=json", "--randrepeat=0"]);
    command.arg(format!("--rw={}", load.pattern)).arg(format!("--bs={}", load.block));
    command.arg(format!("--iodepth={}", load.depth)).arg(format!("--runtime={:.0}ms", seconds * 1000.0)).args(more);
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("fio: {error}"))?;
    if !output.status.success() {
        return Err(format!("{command:?}: {}", output.status));
    }
    // fio's NBD engine first prints to which server it has connected.
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').and_then(|begin| text.get(begin..)).unwrap_or_default();
    let said: serde_json::Value = serde_json::from_str(json).map_err(|error| format!("fio: {error}: {text}"))?;
    let direction = if load.pattern.ends_with("read") { "read" } else { "write" };
    let of = &said["jobs"][0][direction];
    let number = |value: &serde_json::Value| value.as_f64().ok_or(format!("fio did not say it of {direction}: {of}"));
    let p50 = number(&of["clat_ns"]["percentile"]["50.000000"])? / 1000.0;
    Ok(MeasuredFigures {
        iops: number(&of["iops"])?,
        p50,
        server_cpu: 0.0,
        waits: f64::NAN,
        client_cpu: f64::NAN,
        hog_cpu: 0.0,
    })
}
