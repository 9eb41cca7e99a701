//! Verbs that are answered at once: the version, the statistics, the layers.

use std::os::fd::AsFd;

use disk::Format;
use serde_json::{Value, json};
use uring::ImageFile;

use super::protocol::{VERBS, VERSION};
use super::work::{Work, absolute, format_of};
use crate::stats::Condition;

/// `version`.
pub fn version() -> Value {
    json!({ "version": VERSION, "program": env!("CARGO_PKG_VERSION"), "verbs": VERBS, "pid": std::process::id() })
}

/// `stats`: what is written as a line elsewhere.
pub fn stats(work: &Work<'_>) -> Value {
    let line = work.stats.line(work.polling.looks(), work.condition());
    serde_json::from_str(&line).unwrap_or(Value::Null)
}

/// `layers`. The size is that which is served: one that has grown, and could not be made durable, is as it was for its
/// peers.
pub fn layers(work: &Work<'_>) -> Value {
    let layers = work.disk.layers().iter().enumerate().map(|(depth, layer)| {
        let file = work.engine.file(layer.file);
        let stat = file.and_then(|file| rustix::fs::fstat(file.as_fd()).ok());
        let data_file = file.and_then(|file| file.data_file());
        let data_stat = data_file.and_then(|file| rustix::fs::fstat(file.as_fd()).ok());
        let blocks = [stat, data_stat].into_iter().flatten().map(|stat| u64::try_from(stat.st_blocks).unwrap_or(0));
        let blocks: u64 = blocks.sum();
        let path = |file: &ImageFile| absolute(file.path()).display().to_string();
        json!({
            "layer": depth,
            "format": format_of(&layer.format).to_string(),
            "path": file.map(path),
            "data_file": data_file.map(path),
            "size": if depth == 0 { work.geometry.len } else { layer.format.geometry().len },
            // stat(2): units of 512 bytes, whatever the file system's block.
            "allocated": stat.map(|_| blocks.saturating_mul(512)),
            // By which its file is known from another one that has its name.
            "device": stat.map(|stat| stat.st_dev),
            "inode": stat.map(|stat| stat.st_ino),
            "writable": file.is_some_and(|file| file.options().write),
        })
    });
    let geometry = work.disk.geometry();
    let Condition { broken, full, waiting, fatal } = work.condition();
    json!({
        "size": work.geometry.len,
        "read_only": geometry.read_only,
        "broken": broken,
        "full": full,
        "waiting": waiting,
        "fatal": fatal,
        "peers": work.server.peers(),
        // What becomes of requests in flight when this process dies; null where no ring of a vhost-user guest runs.
        "inflight": work.server.records_in_flight().map(|recorded| if recorded { "recorded" } else { "in order" }),
        "layers": layers.collect::<Vec<Value>>(),
    })
}
