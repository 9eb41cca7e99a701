//! The view of one disk: stages, Little's law, requests in flight, and the history of the last intervals.
//!
//! It formats lines and knows neither keys nor terminals.

use api::HealthState;
use jiff::Timestamp;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use stats::{Count, Histogram, InFlight, Kind, Stage, bucket_bounds, differs, float};
use unicode_width::UnicodeWidthStr;

use crate::column::shortened;
use crate::health::in_words;
use crate::wrap::wrapped;

use super::columns::{OLD, fitting};
use super::layer_table;
use super::layers::DiskLayers;
use super::names::Name;
use super::pages::{Disk, Histograms};
use super::rates::KindRates;
use super::rows;
use super::text::{self, duration, number};

/// Maximum number of requests in flight that are listed.
const LISTED: usize = 64;

/// Columns of the table of stages: heading, width, and priority.
const STAGE_COLUMNS: [(&str, usize, u8); 9] = [
    ("STAGE", 10, 0),
    ("sum", text::WIDTH, 6),
    ("avg", text::WIDTH, 1),
    ("p50", text::WIDTH, 4),
    ("p99", text::WIDTH, 2),
    ("p99.9", text::WIDTH, 5),
    ("max", text::WIDTH, 4),
    ("queue", text::WIDTH, 3),
    ("rate*lat", 9, 3),
];

/// A row of the table of stages.
struct StageRow {
    name: &'static str,
    ended: f64,
    sum: f64,
    histogram: Option<Histogram>,
    /// The longest duration, if known exactly.
    longest: Option<f64>,
    /// The measured queue and the requests per second; `None` since the beginning of the page.
    queue: Option<(f64, f64)>,
}

/// Options of the view.
#[derive(Clone, Copy, Debug)]
pub struct ViewOptions {
    /// The width in columns of the terminal.
    pub width: usize,
    /// Show figures since the beginning of the page, not those of the last interval.
    pub all_time: bool,
    /// Use colours.
    pub colour: bool,
}

/// The lines of the view. The disk's histograms must have been read in this round.
pub fn lines(
    disk: &mut Disk,
    name: Option<&Name>,
    around: Option<&DiskLayers>,
    look: ViewOptions,
) -> Vec<Line<'static>> {
    let ViewOptions { width, all_time, colour } = look;
    let since = disk.stages().cloned();
    let layers = layer_table::lines(disk, since.as_ref(), around, width, colour);
    let histograms = if all_time { disk.stages_of_all_time().cloned() } else { since };
    let mut lines = head(disk, name, width);
    lines.extend(health(disk, name, width, colour));
    lines.extend(history(disk, width));
    lines.extend(warnings(disk));
    let span = match (&disk.rates, all_time) {
        (_, true) => {
            let age = disk.now.read.saturating_sub(disk.now.created);
            format!("since the page was begun, {} ago", duration(float(age)).trim())
        }
        (Some(rates), false) => format!("in the last {:.2} s", rates.seconds),
        (None, false) => "no interval has passed yet".into(),
    };
    let bold = Style::new().add_modifier(Modifier::BOLD);
    for kind in Kind::ALL.into_iter().filter(|kind| disk.now.kind(*kind).count() > 0) {
        lines.push(Line::default());
        lines.push(Line::styled(of_kind(disk, kind, all_time, &span), bold));
        lines.extend(stages(disk, kind, histograms.as_ref(), width, all_time, colour));
    }
    lines.push(Line::default());
    lines.extend(layers);
    lines.push(Line::default());
    lines.extend(in_flight(disk, colour));
    lines
}

fn head(disk: &Disk, name: Option<&Name>, width: usize) -> Vec<Line<'static>> {
    let identity = &disk.identity;
    let shown = text::in_one_line;
    let mut lines = Vec::new();
    if let Some(Name { vdi, sr, .. }) = name {
        lines.push(format!("VDI {} in {}", shown(vdi), shown(sr)));
    }
    lines.push(format!("image {}", shown(&identity.image)));
    lines.push(format!("{} at {}", shown(&identity.transport), shown(&identity.at)));
    let process = disk.now.pid.filter(|_| disk.ended.is_none());
    let process = process.map_or_else(|| "its process has ended".into(), |pid| format!("process {pid}"));
    let of = disk.now.incarnation;
    lines.push(format!("{process}, number {of} of this page, version {}", shown(&identity.program)));
    lines.push(format!("page {}", shown(&disk.path.to_string_lossy())));
    lines.into_iter().map(|line| Line::raw(shortened(line, Some(width)))).collect()
}

/// The health of the disk, with reason and advice unless it is healthy.
fn health(disk: &Disk, name: Option<&Name>, width: usize, colour: bool) -> Vec<Line<'static>> {
    let health = rows::health(disk, name);
    let is_bad = health.state > HealthState::Unmanaged;
    let state = in_words(&health, Timestamp::now());
    let first = health.reason.as_ref().map_or_else(|| state.clone(), |reason| format!("{state}: {reason}"));
    let text = wrapped("", &text::in_one_line(&first), width);
    let advice = health.advice.map(|advice| wrapped("  ", &text::in_one_line(&advice), width)).unwrap_or_default();
    let style = super::screen::mark(is_bad, colour, Color::Red);
    text.lines().chain(advice.lines()).map(|line| Line::styled(line.to_owned(), style)).collect()
}

fn history(disk: &Disk, width: usize) -> Vec<Line<'static>> {
    let bars = |name: &str, values: Vec<f64>| {
        let room = width.saturating_sub(24);
        let shown = values.get(values.len().saturating_sub(room)..).unwrap_or_default();
        let most = shown.iter().copied().fold(0.0, f64::max);
        Line::raw(format!("{name:<11}{} up to {}", sparkline(shown, most), number(most)))
    };
    vec![
        bars("requests/s", disk.history.iter().map(|(requests, _)| *requests).collect()),
        bars("queue", disk.history.iter().map(|(_, queue)| *queue).collect()),
    ]
}

/// Draws a bar for each value, relative to `most`.
fn sparkline(values: &[f64], most: f64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let bar = |value: &f64| {
        let steps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];
        let height = steps.iter().filter(|step| most > 0.0 && value / most * 8.0 > **step).count();
        BARS.get(height).copied().unwrap_or(' ')
    };
    values.iter().map(bar).collect()
}

fn warnings(disk: &Disk) -> Vec<Line<'static>> {
    let now = &disk.now;
    let mut warnings = Vec::new();
    if now.slow_clock {
        warnings.push("the CPU's counter is no clock here: each time costs a call of the kernel".to_owned());
    }
    if now.torn {
        warnings.push("the counters were read while they were written, and may be of two moments".to_owned());
    }
    for (count, what) in [
        (Count::NotInSlot, "requests in flight cannot be seen: there are too many"),
        (Count::NotInHistogram, "durations are in no histogram: the file system of the page was full"),
    ] {
        if now.count(count) > 0 {
            warnings.push(format!("{} {what}", now.count(count)));
        }
    }
    warnings.extend(limited(disk));
    warnings.extend(shared(disk));
    warnings.into_iter().map(Line::raw).collect()
}

/// Requests held back by a limit of the disk.
fn limited(disk: &Disk) -> Option<String> {
    let (throttled, held) = (disk.now.count(Count::Throttled), disk.now.count(Count::ThrottledNs));
    let mean = float(held) / float(throttled).max(1.0);
    let text = format!("a limit has held {throttled} requests back, {} each on average", duration(mean).trim());
    (throttled > 0).then_some(text)
}

/// Requests that have waited for the disk's share of its storage.
fn shared(disk: &Disk) -> Option<String> {
    let (waited, held) = (disk.now.count(Count::Shared), disk.now.count(Count::SharedNs));
    let mean = float(held) / float(waited).max(1.0);
    let text = format!("{waited} requests have waited for the disk's share, {} each on average", duration(mean).trim());
    (waited > 0).then_some(text)
}

fn of_kind(disk: &Disk, kind: Kind, all_time: bool, span: &str) -> String {
    let counts = disk.now.kind(kind);
    let rates = disk.rates.as_ref().map(|rates| rates.kind(kind)).unwrap_or_default();
    let (ended, bytes, errors) = match all_time {
        true => (float(counts.count()), float(counts.bytes()), float(counts.all_errors())),
        false => (rates.ended, rates.bytes, rates.errors),
    };
    let name = kind.name().to_uppercase();
    format!("{name}: {ended:.0} requests, {} MB, {errors:.0} errors, {span}", number(bytes / 1e6))
}

fn stages(
    disk: &Disk,
    kind: Kind,
    histograms: Option<&Histograms>,
    width: usize,
    all_time: bool,
    colour: bool,
) -> Vec<Line<'static>> {
    let shown = fitting(STAGE_COLUMNS.iter().map(|(_, width, priority)| (*width, *priority)), width);
    let rates = disk.rates.as_ref().map(|rates| rates.kind(kind));
    let counts = disk.now.kind(kind);
    let is_complete = disk.now.count(Count::NotInHistogram) == 0;
    let of = |stage: Option<Stage>| {
        let (ended, sums): (f64, Vec<f64>) = match all_time {
            true => (float(counts.count()), Stage::ALL.map(|stage| float(counts.sum(stage))).to_vec()),
            false => rates.map_or((0.0, Vec::new()), |rates| (rates.ended, rates.sums.to_vec())),
        };
        let sum = match stage {
            Some(stage) => sums.get(stage as usize).copied().unwrap_or(0.0),
            None => sums.iter().sum(),
        };
        let queue = |rates: KindRates| (stage.map_or(rates.queue, |stage| rates.stage(stage)), rates.per_second);
        StageRow {
            name: stage.map_or("whole", Stage::name),
            ended,
            sum,
            histogram: histograms
                .and_then(|all| all.get(&(kind, stage)))
                .map(|found| with_zeroes(found, ended, is_complete)),
            longest: (all_time && stage.is_none()).then(|| float(counts.longest())),
            queue: rates.filter(|_| !all_time).map(queue),
        }
    };
    let heads = shown.iter().filter_map(|at| STAGE_COLUMNS.get(*at)).map(|(head, width, _)| cell(head, *width));
    let mut lines = vec![Line::raw(heads.collect::<Vec<_>>().join(" "))];
    lines.extend(Stage::ALL.into_iter().map(Some).chain([None]).map(|stage| of(stage).line(&shown, colour)));
    lines
}

/// A cell; the first column is aligned left.
fn cell(text: &str, width: usize) -> String {
    let space = " ".repeat(width.saturating_sub(text.width()));
    if width == STAGE_COLUMNS[0].1 { format!("{text}{space}") } else { format!("{space}{text}") }
}

impl StageRow {
    fn line(&self, shown: &[usize], colour: bool) -> Line<'static> {
        let time = |ns: Option<f64>| ns.map_or_else(|| "-".into(), duration);
        let quantile = |q| time(self.histogram.as_ref().and_then(|histogram| histogram.quantile(q)).map(float));
        let little = self.little();
        let mut spans = Vec::new();
        for (head, width, _) in shown.iter().filter_map(|at| STAGE_COLUMNS.get(*at)) {
            let text = match *head {
                "STAGE" => self.name.to_owned(),
                "sum" => duration(self.sum),
                "avg" => time((self.ended > 0.0).then(|| self.sum / self.ended)),
                "p50" => quantile(0.5),
                "p99" => quantile(0.99),
                "p99.9" => quantile(0.999),
                "max" => time(self.longest.or(self.histogram.as_ref().and_then(Histogram::max).map(float))),
                "queue" => self.queue.map_or_else(|| "-".into(), |(queue, _)| number(queue)),
                _ => little.map_or_else(
                    || "- ".into(),
                    |(product, differs)| format!("{}{}", number(product), if differs { " !" } else { "  " }),
                ),
            };
            let is_marked = *head == "rate*lat" && little.is_some_and(|(_, differs)| differs);
            spans.push(Span::styled(cell(&text, *width), super::screen::mark(is_marked, colour, Color::Yellow)));
            spans.push(Span::raw(" "));
        }
        Line::from(spans)
    }

    /// Rate times latency, and whether the measured queue differs from it. The latency is the mean of the histogram,
    /// which is counted independently of the sums that yield the queue.
    fn little(&self) -> Option<(f64, bool)> {
        let (queue, per_second) = self.queue?;
        let product = per_second * mean(self.histogram.as_ref()?) / 1e9;
        Some((product, differs(queue, product)))
    }
}

/// Adds the requests that spent no time in a stage to its histogram, which does not count them. If others are missing
/// as well, the histogram is returned unchanged.
fn with_zeroes(histogram: &Histogram, ended: f64, is_complete: bool) -> Histogram {
    let counted = float(histogram.count());
    if !is_complete || counted >= ended {
        return histogram.clone();
    }
    // Both are whole numbers, and the greater one comes from a counter.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let zeroes = (ended - counted) as u64;
    histogram.with(&Histogram::of([(0, zeroes)]))
}

/// Rate times latency of a kind of requests in a stage or in all, with the mean of `histogram` as the latency.
pub fn product(disk: &Disk, rates: &KindRates, histogram: Option<&Histogram>) -> f64 {
    let is_complete = disk.now.count(Count::NotInHistogram) == 0;
    histogram.map_or(0.0, |found| rates.per_second * mean(&with_zeroes(found, rates.ended, is_complete)) / 1e9)
}

fn mean(histogram: &Histogram) -> f64 {
    let count = histogram.count();
    let sum = histogram.buckets().iter().map(|(bucket, count)| {
        let (from, to) = bucket_bounds(*bucket);
        // A bucket of one nanosecond has this value exactly.
        float(from + (to - from) / 2) * float(*count)
    });
    if count == 0 { 0.0 } else { sum.sum::<f64>() / float(count) }
}

fn in_flight(disk: &Disk, colour: bool) -> Vec<Line<'static>> {
    let now = &disk.now;
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut lines = vec![Line::styled(format!("IN FLIGHT: {}, the oldest first", now.in_flight.len()), bold)];
    if !now.in_flight.is_empty() {
        lines.push(Line::raw("   AGE  KIND          STAGE    OFFSET          LENGTH"));
    }
    for request in now.in_flight.iter().take(LISTED) {
        let (InFlight { kind, at, len, taken, .. }, stage) = (*request, request.stage().name());
        let age = now.read.saturating_sub(taken);
        let mark = if age > OLD { '!' } else { ' ' };
        let text = format!("{:>6}{mark} {:<13} {stage:<8} {at:<15} {len}", duration(float(age)), kind.name());
        lines.push(Line::styled(text, super::screen::mark(age > OLD, colour, Color::Red)));
    }
    if now.in_flight.len() > LISTED {
        lines.push(Line::raw(format!("and {} more", now.in_flight.len() - LISTED)));
    }
    lines
}

/// The title of the view: the name of the disk.
pub fn title(disk: &Disk, name: Option<&Name>) -> String {
    rows::name(disk, name)
}

#[cfg(test)]
#[path = "detail/test.rs"]
mod test;
