//! Writes a qcow2 image with compressed clusters.
//!
//! Several threads compress clusters; this one sends them clusters, receives the results in the same order, and writes
//! them consecutively ([`Appender`]). Zero clusters are left out.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use control::ImageName;
use disk::qcow2::compress::compress;
use disk::qcow2::{Appender, Compression, Content, Spec};
use disk::size::{in_memory, on_disk};
use uring::{Cache, ImageFile, OpenOptions};

use super::Copied;
use super::source::Source;
use crate::files::Files;
use crate::image::progress::Progress;
use crate::jobs::stream::{Chunk, join};
use crate::process::failure::{Failure, explain};
use crate::process::signals::Signal;
use arguments::Convert;

/// Clusters in flight for each thread: enough that no thread waits for another.
const AHEAD: usize = 4;
/// The limit in bytes for large clusters, which take memory.
const AHEAD_BYTES: usize = 128 << 20;

/// A cluster to compress, and the channel for the result.
struct Task {
    cluster: Vec<u8>,
    result: SyncSender<Compressed>,
}

/// A cluster, and its compressed form if that is smaller.
struct Compressed {
    cluster: Vec<u8>,
    compressed: Option<Vec<u8>>,
}

/// Copies a disk into the empty image `target`.
pub fn copy(
    files: &Files,
    convert: &Convert,
    source: Source,
    target: &ImageName,
    spec: &Spec,
    stop: &mut Option<Signal>,
) -> Result<Copied, Failure> {
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let file = files.open(target.path(), options).map_err(Failure::said)?;
    let appender = Appender::new(spec).map_err(|error| explain(target, error))?;
    let available = thread::available_parallelism().map_or(1, NonZero::get);
    let threads = convert.threads.map_or(available, usize::from);
    let (tasks, queue) = channel();
    let queue = Mutex::new(queue);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| compress_tasks(&queue, spec.compression));
        }
        let size = in_memory(spec.cluster_size.into());
        let mut writer = Writer {
            tasks,
            in_flight: VecDeque::new(),
            ahead: (threads * AHEAD).min(AHEAD_BYTES / size).max(threads),
            file,
            target,
            appender,
            cluster: Vec::with_capacity(size),
            size,
            received: 0,
            written: 0,
            stored: 0,
        };
        let mut progress = Progress::new(files, "converting", source.len);
        let mut lost = Vec::new();
        for chunk in source.chunks(convert, stop) {
            let chunk = chunk?;
            writer.add(&chunk)?;
            chunk.lost.iter().for_each(|&span| join(&mut lost, span));
            progress.advance(chunk.span.len);
        }
        let (written, stored) = writer.finish()?;
        progress.finish();
        Ok(Copied { written, compressed: Some(stored), lost, block: 512 })
    })
}

/// Compresses clusters until the queue is closed.
fn compress_tasks(queue: &Mutex<Receiver<Task>>, compression: Compression) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Task { cluster, result }) = next else { return };
        let compressed = compress(compression, &cluster);
        // A conversion that has failed does not receive results.
        result.send(Compressed { cluster, compressed }).unwrap_or_default();
    }
}

/// Sends clusters to the threads and writes the results.
struct Writer<'a> {
    tasks: Sender<Task>,
    /// The results to receive, in the order of the disk, with their cluster numbers.
    in_flight: VecDeque<(u64, Receiver<Compressed>)>,
    ahead: usize,
    file: ImageFile,
    target: &'a ImageName,
    appender: Appender,
    /// The received bytes of the current cluster; empty if they are all zeroes.
    cluster: Vec<u8>,
    size: usize,
    /// The number of bytes received of the disk.
    received: u64,
    written: u64,
    stored: u64,
}

impl Writer<'_> {
    /// Adds the next piece of the disk. A piece is a multiple of the cluster size, or a fraction of it.
    fn add(&mut self, chunk: &Chunk) -> Result<(), Failure> {
        let bytes = chunk.bytes.as_ref().map(|bytes| bytes.to_vec());
        let len = in_memory(chunk.span.len);
        let mut from = 0;
        while from < len {
            let in_cluster = in_memory(self.received % on_disk(self.size));
            let until = (from + self.size - in_cluster).min(len);
            let some = bytes.as_ref().and_then(|bytes| bytes.get(from..until));
            if let Some(some) = some.filter(|some| some.iter().any(|&byte| byte != 0)) {
                self.cluster.resize(in_cluster, 0);
                self.cluster.extend_from_slice(some);
            }
            self.received += on_disk(until - from);
            from = until;
            if self.received % on_disk(self.size) == 0 {
                self.submit()?;
            }
        }
        Ok(())
    }

    /// Submits the current cluster, which is complete.
    fn submit(&mut self) -> Result<(), Failure> {
        if self.cluster.is_empty() {
            return Ok(());
        }
        let mut cluster = std::mem::replace(&mut self.cluster, Vec::with_capacity(self.size));
        cluster.resize(self.size, 0);
        let (result, compressed) = sync_channel(1);
        self.tasks.send(Task { cluster, result }).map_err(|_| self.gone())?;
        self.in_flight.push_back(((self.received - 1) / on_disk(self.size), compressed));
        self.write_until(self.ahead)
    }

    /// Receives and writes results until at most `left` are in flight.
    fn write_until(&mut self, left: usize) -> Result<(), Failure> {
        while self.in_flight.len() > left {
            let Some((number, compressed)) = self.in_flight.pop_front() else { break };
            let Compressed { cluster, compressed } = compressed.recv().map_err(|_| self.gone())?;
            let content = compressed.as_deref().map_or(Content::Plain(&cluster), Content::Compressed);
            let (Content::Plain(bytes) | Content::Compressed(bytes)) = content;
            self.written += on_disk(self.size);
            self.stored += on_disk(bytes.len());
            self.appender.add(number, content);
            if let Some(write) = self.appender.take() {
                let done = self.file.write_at(write.at, &write.bytes);
                done.map_err(|error| failed(self.target, error))?;
            }
        }
        Ok(())
    }

    /// Writes the remaining clusters and makes all durable; returns the uncompressed and the compressed bytes.
    fn finish(mut self) -> Result<(u64, u64), Failure> {
        self.submit()?;
        self.write_until(0)?;
        let Writer { appender, mut file, target, written, stored, .. } = self;
        for batch in appender.finish().map_err(|error| explain(target, error))? {
            let done = batch.iter().try_for_each(|write| file.write_at(write.at, &write.bytes));
            done.and_then(|()| file.sync()).map_err(|error| failed(target, error))?;
        }
        Ok((written, stored))
    }

    fn gone(&self) -> Failure {
        Failure::new(format!("compress clusters for {}", self.target), "its threads have ended")
    }
}

fn failed(target: &ImageName, error: std::io::Error) -> Failure {
    Failure::new(format!("write {target}"), error).advise("see that there is space for it, and the kernel log")
}
