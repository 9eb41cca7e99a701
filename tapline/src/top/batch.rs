//! `tapline top --batch`: samples as text, as JSON or as xsiostat prints them.
//!
//! It needs no terminal. Invariant: in JSON, each sample is one line.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use api::Problem;
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use stats::{Kind, Stage};

use super::columns::{self, Table};
use super::layer_table;
use super::layers::Layers;
use super::names::Names;
use super::pages::{Disk, Pages};
use super::rates::{KindRates, Layer};
use super::rows::Row;
use super::{DiskSelection, notes, text};
use crate::{output, session};

/// The format of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A table for each sample.
    Text,
    /// A line of JSON for each sample.
    Json,
    /// The format of xsiostat.
    Xsiostat,
}

/// The format, number and interval of samples.
#[derive(Debug)]
pub struct Batch {
    /// The format of the samples.
    pub form: Form,
    /// Time between two samples.
    pub interval: Duration,
    /// Number of samples; `None`: until interrupted.
    pub count: Option<u64>,
    /// The column by which rows are sorted.
    pub sort: usize,
}

/// How long to wait for the layers around the disks.
const LAYERS_WAITED: Duration = Duration::from_secs(3);

/// The sources of samples.
pub struct Sources<'a> {
    /// The statistics pages.
    pub pages: &'a mut Pages,
    /// The daemon's names of their disks.
    pub names: &'a mut Names,
    /// The layers around the disks.
    pub layers: &'a mut Layers,
}

/// Writes samples until there are enough, or their reader is gone.
pub fn run(batch: &Batch, wanted: &DiskSelection, from: Sources<'_>) -> Result<(), Problem> {
    let Sources { pages, names, layers } = from;
    let mut noted = BTreeSet::new();
    // The baseline for the first sample.
    pages.round();
    let mut rows = wanted.rows(pages, names);
    rows.iter_mut().for_each(|row| row.read_latency(pages));
    read_layers(batch.form, &rows, pages, layers);
    let mut next = Instant::now();
    let mut written = 0;
    while batch.count.is_none_or(|count| written < count) {
        for note in notes(pages) {
            if noted.insert(note.clone()) {
                output::say(&format!("tapline: {note}\n"));
            }
        }
        next += batch.interval;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        pages.round();
        names.take();
        let mut rows = wanted.rows(pages, names);
        rows.iter_mut().for_each(|row| row.read_latency(pages));
        read_layers(batch.form, &rows, pages, layers);
        columns::sort(&mut rows, batch.sort, false);
        let text = match batch.form {
            Form::Text => table(&rows),
            Form::Json => format!("{}\n", sample(&rows, pages, layers)),
            Form::Xsiostat => xsiostat(&rows, pages),
        };
        if session::print_while_read(&text)? == ControlFlow::Break(()) {
            return Ok(());
        }
        written += 1;
    }
    Ok(())
}

/// Reads the layers around the disks, which only JSON has.
fn read_layers(form: Form, rows: &[Row], pages: &Pages, layers: &mut Layers) {
    let single: Vec<_> = rows.iter().filter(|row| !row.is_sum).flat_map(|row| row.pages.clone()).collect();
    // A reply that was too late for its own sample is not used for this one.
    layers.take();
    if form == Form::Json && !single.is_empty() && layers.ask(pages, &single) {
        layers.wait(LAYERS_WAITED);
    }
}

fn table(rows: &[Row]) -> String {
    let table = Table::new(rows, None);
    let line = |cells: Vec<String>| format!("{}\n", cells.join(" ").trim_end());
    let heads = line(table.heads().into_iter().map(|(_, head)| head).collect());
    let rows = rows.iter().map(|row| line(table.cells(row).into_iter().map(|(cell, _)| cell).collect()));
    format!("{:.0}\n{heads}{}\n", Timestamp::now(), rows.collect::<String>())
}

/// A sample as JSON. The fields of a row are documented in docs/statistics.md.
fn sample(rows: &[Row], pages: &Pages, layers: &Layers) -> Value {
    let unread = pages.unread.iter().map(|(path, unread)| json!({ "path": path, "why": unread.why }));
    json!({
        "time": Timestamp::now(),
        "disks": rows.iter().map(|row| object(row, pages, layers)).collect::<Vec<_>>(),
        "not_read": unread.collect::<Vec<_>>(),
    })
}

/// Formats a row as JSON.
pub fn object(row: &Row, pages: &Pages, layers: &Layers) -> Value {
    let mut fields = Map::new();
    let mut add = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    add("name", json!(row.name));
    add("pages", json!(row.pages));
    add("state", json!(if row.ended { "ended" } else { "serving" }));
    add("health", json!(row.health));
    let rates = row.rates.as_ref();
    add("interval_seconds", json!(rates.map(|rates| rates.seconds)));
    let of = |kind: Kind| rates.map(|rates| rates.kind(kind));
    let (reads, writes, all) = (of(Kind::Read), of(Kind::Write), rates.map(|rates| rates.all()));
    add("reads_per_second", json!(reads.map(|reads| reads.per_second)));
    add("writes_per_second", json!(writes.map(|writes| writes.per_second)));
    add("read_bytes_per_second", json!(reads.map(|reads| reads.bytes_per_second)));
    add("write_bytes_per_second", json!(writes.map(|writes| writes.bytes_per_second)));
    add("average_request_bytes", json!(rates.and_then(|rates| rates.average_size())));
    add("queue_size", json!(all.map(|all| all.queue)));
    for (name, layer) in [("ring", Layer::Ring), ("tapline", Layer::Tapline), ("storage", Layer::Storage)] {
        add(&format!("queue_size_{name}"), json!(all.map(|all| all.layer(layer))));
    }
    for (name, q) in [("p50_ns", 0.5), ("p99_ns", 0.99), ("p99_9_ns", 0.999)] {
        add(name, json!(row.latency.as_ref().and_then(|latency| latency.quantile(q))));
    }
    add("in_flight", json!(row.in_flight));
    add("oldest_in_flight_ns", json!(row.oldest));
    add("errors", json!(row.errors));
    let disk = row.pages.first().filter(|_| !row.is_sum).and_then(|page| pages.disks.get(page));
    if let Some(disk) = disk {
        add_disk(&mut fields, row, disk);
        let around = layers.of(&disk.path);
        fields.insert("guest".into(), layer_table::guest(around));
        fields.insert("host".into(), layer_table::host(around));
    }
    Value::Object(fields)
}

/// Adds the fields that only a single disk has.
fn add_disk(fields: &mut Map<String, Value>, row: &Row, disk: &Disk) {
    let known = row.known.as_ref();
    let identity = &disk.identity;
    let mut add = |name: &str, value: Value| drop(fields.insert(name.into(), value));
    add("vbd", json!(disk.vbd));
    add("vm", json!(known.and_then(|known| known.vm.as_ref())));
    add("device", json!(known.map(|known| &known.device)));
    add("vdi", json!(known.map(|known| &known.vdi)));
    add("sr", json!(known.map(|known| &known.sr)));
    add("image", json!(identity.image));
    add("transport", json!(identity.transport));
    add("at", json!(identity.at));
    add("control", json!(identity.control));
    add("program", json!(identity.program));
    add("pid", json!(disk.now.pid));
    let kinds = Kind::ALL.into_iter().map(|kind| {
        let rates = row.rates.as_ref().map(|rates| rates.kind(kind));
        (kind.name().replace('-', "_"), of_kind(kind, rates, disk))
    });
    add("kinds", Value::Object(kinds.collect()));
}

fn of_kind(kind: Kind, rates: Option<KindRates>, disk: &Disk) -> Value {
    let counts = disk.now.kind(kind);
    let stages = Stage::ALL.into_iter().map(|stage| {
        let queue = rates.map(|rates| rates.stage(stage));
        (stage.name().to_owned(), json!({ "sum_ns": counts.sum(stage), "queue_size": queue }))
    });
    json!({
        "count": counts.count(),
        "bytes": counts.bytes(),
        "errors": counts.all_errors(),
        "longest_ns": counts.longest(),
        "per_second": rates.map(|rates| rates.per_second),
        "bytes_per_second": rates.map(|rates| rates.bytes_per_second),
        "queue_size": rates.map(|rates| rates.queue),
        "in_flight": disk.now.in_flight(kind),
        "oldest_in_flight_ns": disk.now.oldest(kind),
        "stages": stages.collect::<Map<_, _>>(),
    })
}

/// Formats a sample as xsiostat does. A disk that is not Xen's has no domain; it is named by its page.
fn xsiostat(rows: &[Row], pages: &Pages) -> String {
    let mut text = format!("{}\n  DOM   VBD         r/s        w/s    rMB/s    wMB/s rAvgQs wAvgQs\n", "-".repeat(70));
    for row in rows {
        let disk = row.pages.first().and_then(|page| pages.disks.get(page));
        let (domain, device) = disk.map_or_else(|| ("-".into(), row.name.clone()), |disk| place(row, disk));
        let of = |kind| row.rates.as_ref().map(|rates| rates.kind(kind)).unwrap_or_default();
        let (reads, writes) = (of(Kind::Read), of(Kind::Write));
        // xsiostat's megabytes have 2^20 bytes.
        let megabytes = |rates: KindRates| rates.bytes_per_second / f64::from(1 << 20);
        text.push_str(&format!(
            "{domain:>5},{device:>5}: {:10.2} {:10.2} {:8.2} {:8.2} {:6.2} {:6.2}\n",
            reads.per_second,
            writes.per_second,
            megabytes(reads),
            megabytes(writes),
            reads.queue,
            writes.queue
        ));
    }
    text + "\n"
}

/// The Xen domain and the device number, or `-` and the disk's name.
fn place(row: &Row, disk: &Disk) -> (String, String) {
    let xen = || {
        let (domain, vdev) = disk.identity.at.rsplit_once('/')?;
        let vdev: vm::xen::vdev::Vdev = vdev.parse().ok()?;
        Some((text::in_one_line(domain), vdev.number().to_string()))
    };
    let other = || ("-".to_owned(), row.name.replace(char::is_whitespace, "_"));
    if disk.identity.transport == "blkif" { xen().unwrap_or_else(other) } else { other() }
}

#[cfg(test)]
#[path = "batch/test.rs"]
mod test;
