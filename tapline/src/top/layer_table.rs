//! The table of a disk's layers: the figures of its guest, of Tapline, of the storage, and of the host's device.
//!
//! It formats them as lines and as JSON. Invariant: an unknown layer has a reason instead of figures.

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use serde_json::{Value, json};
use stats::{Kind, Stage, differs};
use unicode_width::UnicodeWidthStr;

use super::columns::fitting;
use super::detail::product;
use super::layers::{Device, DiskLayers};
use super::pages::{Disk, Histograms};
use super::text::{self, duration, number};
use crate::column::shortened;

/// The columns: heading, width, and priority.
const COLUMNS: [(&str, usize, u8); 8] = [
    ("LAYER", 24, 0),
    ("r/s", text::WIDTH, 2),
    ("w/s", text::WIDTH, 3),
    ("rMB/s", text::WIDTH, 5),
    ("wMB/s", text::WIDTH, 6),
    ("avg", text::WIDTH, 4),
    ("queue", text::WIDTH, 1),
    ("rate*lat", 9, 1),
];

/// The figures of a layer; `None` if not known yet.
struct Figures {
    reads: Option<f64>,
    writes: Option<f64>,
    read_bytes: Option<f64>,
    write_bytes: Option<f64>,
    latency_ns: Option<f64>,
    queue: Option<f64>,
    /// Rate times latency, and whether the queue differs from it.
    little: Option<(f64, bool)>,
}

/// The lines of the table. `around` is `None` until the first reply about the disk.
pub fn lines(
    disk: &Disk,
    histograms: Option<&Histograms>,
    around: Option<&DiskLayers>,
    width: usize,
    colour: bool,
) -> Vec<Line<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let shown = fitting(COLUMNS.iter().map(|(_, width, priority)| (*width, *priority)), width);
    let heads = shown.iter().filter_map(|at| COLUMNS.get(*at)).map(|(head, width, _)| cell(head, *width));
    let mut lines = vec![
        Line::styled("LAYERS: requests of all kinds, from the guest down", bold),
        Line::raw(heads.collect::<Vec<_>>().join(" ")),
    ];
    let unknown = |layer: &str, why: &str| {
        let text = format!("{layer:<8} unknown: {}", text::in_one_line(why));
        Line::raw(shortened(text, Some(width)))
    };
    const UNANSWERED: &str = "not answered yet";
    match around.map_or_else(|| Err(UNANSWERED.to_owned()), |around| around.guest.clone()) {
        Ok(device) => lines.push(of_device(&device).line(&named("guest", &device.name), &shown, colour)),
        Err(why) => lines.push(unknown("guest", &why)),
    }
    lines.push(ours(disk, histograms, None).line("tapline", &shown, colour));
    lines.push(ours(disk, histograms, Some(Stage::Storage)).line("storage", &shown, colour));
    match around.map_or_else(|| Err(UNANSWERED.to_owned()), |around| around.host.clone()) {
        Ok(devices) => {
            for (depth, device) in devices.iter().enumerate() {
                let whole = if depth == 0 { "" } else { " (whole)" };
                let name = named("host", &format!("{}{whole}", device.name));
                lines.push(of_device(device).line(&name, &shown, colour));
            }
            let shared_by = around.map_or(0, |around| around.shared_by);
            lines.extend(devices.first().filter(|_| shared_by > 1).map(|device| {
                let text = format!("{}, shared by {shared_by} disks: not a sum of theirs", named("", &device.name));
                Line::raw(shortened(text, Some(width)))
            }));
        }
        Err(why) => lines.push(unknown("host", &why)),
    }
    lines
}

fn named(layer: &str, name: &str) -> String {
    format!("{layer:<8} {}", text::in_one_line(name))
}

/// A cell; the first column is aligned left.
fn cell(text: &str, width: usize) -> String {
    let space = " ".repeat(width.saturating_sub(text.width()));
    if width == COLUMNS[0].1 { format!("{text}{space}") } else { format!("{space}{text}") }
}

fn of_device(device: &Device) -> Figures {
    let rates = device.rates.as_ref();
    Figures {
        reads: rates.map(|rates| rates.reads),
        writes: rates.map(|rates| rates.writes),
        read_bytes: rates.map(|rates| rates.read_bytes),
        write_bytes: rates.map(|rates| rates.write_bytes),
        latency_ns: rates.and_then(|rates| rates.latency_ns),
        queue: rates.map(|rates| rates.queue),
        little: rates.map(stats::DeviceRates::little),
    }
}

/// Tapline's figures: of one stage, or of the whole time.
fn ours(disk: &Disk, histograms: Option<&Histograms>, stage: Option<Stage>) -> Figures {
    let rates = disk.rates.as_ref().filter(|_| disk.ended.is_none());
    let all = rates.map(super::rates::Rates::all);
    let of = |kind| rates.map(|rates| rates.kind(kind));
    let (reads, writes) = (of(Kind::Read), of(Kind::Write));
    let sum = all.map(|all| stage.map_or_else(|| all.sums.iter().sum(), |stage| all.sum(stage)));
    let queue = all.map(|all| stage.map_or(all.queue, |stage| all.stage(stage)));
    let product = rates.zip(histograms).map(|(rates, histograms)| {
        Kind::ALL.iter().map(|kind| product(disk, &rates.kind(*kind), histograms.get(&(*kind, stage)))).sum::<f64>()
    });
    Figures {
        reads: reads.map(|reads| reads.per_second),
        writes: writes.map(|writes| writes.per_second),
        read_bytes: reads.map(|reads| reads.bytes_per_second),
        write_bytes: writes.map(|writes| writes.bytes_per_second),
        latency_ns: all.zip(sum).filter(|(all, _)| all.ended > 0.0).map(|(all, sum)| sum / all.ended),
        queue,
        little: queue.zip(product).map(|(queue, product)| (product, differs(queue, product))),
    }
}

impl Figures {
    fn line(&self, name: &str, shown: &[usize], colour: bool) -> Line<'static> {
        let figure = |value: Option<f64>, shown: fn(f64) -> String| value.map_or_else(|| "-".into(), shown);
        let megabytes = |bytes: Option<f64>| figure(bytes.map(|bytes| bytes / 1e6), number);
        let is_marked = self.little.is_some_and(|(_, differs)| differs);
        let mut spans = Vec::new();
        for (head, width, _) in shown.iter().filter_map(|at| COLUMNS.get(*at)) {
            let text = match *head {
                "LAYER" => shortened(name.to_owned(), Some(*width)),
                "r/s" => figure(self.reads, number),
                "w/s" => figure(self.writes, number),
                "rMB/s" => megabytes(self.read_bytes),
                "wMB/s" => megabytes(self.write_bytes),
                "avg" => figure(self.latency_ns, duration),
                "queue" => figure(self.queue, number),
                _ => format!(
                    "{}{}",
                    figure(self.little.map(|(product, _)| product), number),
                    if is_marked { " !" } else { "  " }
                ),
            };
            let mark = super::screen::mark(is_marked && *head == "rate*lat", colour, Color::Yellow);
            spans.extend([Span::styled(cell(&text, *width), mark), Span::raw(" ")]);
        }
        Line::from(spans)
    }
}

/// The guest's layer as JSON.
pub fn guest(around: Option<&DiskLayers>) -> Value {
    match around.map(|around| &around.guest) {
        Some(Ok(device)) => object(device),
        Some(Err(why)) => json!({ "unknown": why }),
        None => json!({ "unknown": "not answered in time" }),
    }
}

/// The host's layer as JSON.
pub fn host(around: Option<&DiskLayers>) -> Value {
    match around.map(|around| (&around.host, around.shared_by)) {
        Some((Ok(devices), shared_by)) => {
            let devices: Vec<Value> = devices.iter().map(object).collect();
            json!({ "devices": devices, "shared_by": shared_by })
        }
        Some((Err(why), _)) => json!({ "unknown": why }),
        None => json!({ "unknown": "not answered in time" }),
    }
}

fn object(device: &Device) -> Value {
    let Figures { reads, writes, read_bytes, write_bytes, latency_ns, queue, little } = of_device(device);
    let all = device.counts.all();
    json!({
        "device": device.name,
        "interval_seconds": device.rates.map(|rates| rates.seconds),
        "reads_per_second": reads,
        "writes_per_second": writes,
        "read_bytes_per_second": read_bytes,
        "write_bytes_per_second": write_bytes,
        "average_latency_ns": latency_ns,
        "queue_size": queue,
        "rate_times_latency": little.map(|(product, _)| product),
        "queue_differs": little.map(|(_, differs)| differs),
        "in_flight": device.counts.in_flight,
        "completed": all.iter().fold(0, |sum, kind| kind.count.saturating_add(sum)),
    })
}
