//! Measures the store on this machine: backup, verification and restore of an image, and what further images cost.
//!
//! `cargo run -p backup --example measure -- DIR CHUNK_KIB THREADS none|key IMAGE...`; the directory must exist and be
//! empty. Prints bytes and rates; nothing is judged.

#![allow(clippy::cast_precision_loss, clippy::print_stdout, reason = "a program that prints figures")]

use std::collections::HashSet;
use std::error::Error;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use backup::{Control, Directory, Id, Job, Key, Layout, RawFile, Reader, Sink, Source, Target};

struct Nowhere(u64);

impl Sink for Nowhere {
    fn write(&mut self, _: u64, bytes: &[u8]) -> io::Result<()> {
        self.0 += u64::try_from(bytes.len()).map_err(io::Error::other)?;
        Ok(())
    }

    fn zero(&mut self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }
}

fn rate(bytes: u64, since: Instant) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    format!("{mib:9.1} MiB  {:8.0} MiB/s", mib / since.elapsed().as_secs_f64())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [place, chunk, threads, key, images @ ..] = arguments.as_slice() else {
        return Err("usage: DIR CHUNK_KIB THREADS none|key IMAGE...".into());
    };
    let (chunk, threads): (u32, usize) = (chunk.parse()?, threads.parse()?);
    let key = (key == "key").then(Key::random);
    let layout = Layout { chunk: chunk << 10, ..Layout::default() };
    let target = Target::create(Arc::new(Directory::open(Path::new(place))?), layout, key.as_ref())?;
    let cancel = AtomicBool::new(false);
    let mut control = Control { cancel: &cancel, progress: &mut |_| {} };
    let mut last = None;
    for image in images {
        let source = RawFile::new(File::open(image)?)?;
        let begun = Instant::now();
        let job = Job {
            disk: Id::random(),
            label: image,
            time: 0,
            properties: None,
            moment: None,
            source: &source,
            base: None,
            threads,
            avoided: HashSet::new(),
        };
        let record = target.back_up(&job, &mut control)?;
        let cost = target.statistics(record.id)?;
        println!("backup   {}  of {} MiB, {} bytes sent", rate(cost.read, begun), source.len() >> 20, cost.sent);
        last = Some(record.id);
    }
    let begun = Instant::now();
    let verified = target.verify(threads, &mut control)?;
    println!("verify   {}  of {} packs", rate(verified.bytes, begun), verified.packs);
    if let Some(backup) = last {
        let begun = Instant::now();
        let mut sink = Nowhere(0);
        Reader::open(&target, backup, 64 << 20)?.restore(&mut sink, threads, &mut control)?;
        println!("restore  {}", rate(sink.0, begun));
    }
    Ok(())
}
