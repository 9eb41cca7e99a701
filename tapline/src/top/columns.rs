//! The columns of the table: contents, sort order, and which ones fit.
//!
//! Invariant: a line is never wider than the requested width.

use std::cmp::Ordering;

use api::HealthState;
use stats::Kind;
use unicode_width::UnicodeWidthStr;

use super::rates::{Layer, Rates};
use super::rows::Row;
use super::text;
use crate::column::shortened;

/// Minimum width of the name.
const NAME_MIN: usize = 14;
/// Maximum width of the name.
const NAME_MAX: usize = 48;
/// Age in nanoseconds from which a request in flight is marked.
pub const OLD: u64 = 1_000_000_000;

/// The contents of a column.
#[derive(Clone, Copy)]
enum CellKind {
    /// A text, aligned left.
    Text(fn(&Row) -> &str),
    /// A number, aligned right, and its formatter.
    Number(fn(&Row) -> Option<f64>, fn(f64) -> String),
}

/// A column of the table.
#[derive(Clone, Copy)]
pub struct Column {
    /// The heading, by which the column is found.
    pub head: &'static str,
    /// A description, for the help.
    pub help: &'static str,
    width: usize,
    /// Columns with greater values are left out first.
    priority: u8,
    what: CellKind,
}

const fn number(head: &'static str, priority: u8, value: fn(&Row) -> Option<f64>, help: &'static str) -> Column {
    Column { head, help, width: text::WIDTH, priority, what: CellKind::Number(value, text::number) }
}

const fn duration(head: &'static str, priority: u8, value: fn(&Row) -> Option<f64>, help: &'static str) -> Column {
    Column { head, help, width: text::WIDTH, priority, what: CellKind::Number(value, text::duration) }
}

const fn count(head: &'static str, priority: u8, value: fn(&Row) -> Option<f64>, help: &'static str) -> Column {
    Column { head, help, width: text::WIDTH, priority, what: CellKind::Number(value, text::count) }
}

const fn words(head: &'static str, width: usize, priority: u8, text: fn(&Row) -> &str, help: &'static str) -> Column {
    Column { head, help, width, priority, what: CellKind::Text(text) }
}

/// All columns, in the order in which they are shown.
pub const COLUMNS: &[Column] = &[
    words("DISK", NAME_MIN, 0, |row| &row.name, "the machine and its device, the VDI, or the image"),
    words("VDI", 16, 13, |row| row.known.as_ref().map_or("", |known| &known.vdi), "the VDI, as the daemon says"),
    words("SR", 12, 14, |row| row.known.as_ref().map_or("", |known| &known.sr), "its repository, as the daemon says"),
    words("HEALTH", 11, 1, health, "whether it does its work; Enter shows why not, and what to do"),
    number("r/s", 1, |row| rate(row, Kind::Read), "reads that ended, per second"),
    number("w/s", 1, |row| rate(row, Kind::Write), "writes that ended, per second"),
    number("rMB/s", 2, |row| megabytes(row, Kind::Read), "megabytes (10^6 bytes) read, per second"),
    number("wMB/s", 2, |row| megabytes(row, Kind::Write), "megabytes (10^6 bytes) written, per second"),
    number(
        "reqKiB",
        10,
        |row| rates(row)?.average_size().map(|size| size / 1024.0),
        "average size of reads and writes",
    ),
    number("queue", 3, |row| rates(row).map(|rates| rates.all().queue), "average number of requests, until now"),
    number("q.ring", 11, |row| layer(row, Layer::Ring), "of these, in the ring or socket, not yet taken"),
    number("q.tapl", 9, |row| layer(row, Layer::Tapline), "of these, with the disk process"),
    number("q.stor", 8, |row| layer(row, Layer::Storage), "of these, with the kernel and the storage"),
    duration("p50", 7, |row| quantile(row, 0.5), "half of all requests took no longer"),
    duration("p99", 5, |row| quantile(row, 0.99), "99 of 100 requests took no longer"),
    duration("p99.9", 8, |row| quantile(row, 0.999), "999 of 1000 requests took no longer"),
    count("flight", 12, |row| Some(stats::float(row.in_flight)), "requests in flight now"),
    Column { width: text::WIDTH + 1, ..duration("oldest", 4, oldest, "the oldest of them; ! if older than 1 s") },
    count("errors", 6, |row| Some(stats::float(row.errors)), "requests that failed since the page was begun"),
];

fn health(row: &Row) -> &str {
    if row.ended { "-" } else { row.health.state.name() }
}

fn rates(row: &Row) -> Option<&Rates> {
    row.rates.as_ref()
}

fn rate(row: &Row, kind: Kind) -> Option<f64> {
    rates(row).map(|rates| rates.kind(kind).per_second)
}

fn megabytes(row: &Row, kind: Kind) -> Option<f64> {
    rates(row).map(|rates| rates.kind(kind).bytes_per_second / 1e6)
}

fn layer(row: &Row, layer: Layer) -> Option<f64> {
    rates(row).map(|rates| rates.all().layer(layer))
}

fn quantile(row: &Row, q: f64) -> Option<f64> {
    row.latency.as_ref()?.quantile(q).map(stats::float)
}

fn oldest(row: &Row) -> Option<f64> {
    row.oldest.map(stats::float)
}

/// The column with this heading.
pub fn find(head: &str) -> Option<usize> {
    COLUMNS.iter().position(|column| column.head.eq_ignore_ascii_case(head))
}

/// Selects the columns that fit into a width, by their widths and priorities, with a space between columns.
pub fn fitting(columns: impl Iterator<Item = (usize, u8)>, width: usize) -> Vec<usize> {
    let mut by_priority: Vec<(usize, usize, u8)> =
        columns.enumerate().map(|(at, (width, priority))| (at, width, priority)).collect();
    by_priority.sort_by_key(|(at, _, priority)| (*priority, *at));
    let mut left = width + 1;
    let mut chosen = Vec::new();
    for (at, width, _) in by_priority {
        // Stop at the first that does not fit: a narrow one of lower priority does not take its place.
        let Some(rest) = left.checked_sub(width + 1) else { break };
        left = rest;
        chosen.push(at);
    }
    chosen.sort_unstable();
    chosen
}

/// The columns that fit a width.
#[derive(Debug)]
pub struct Table {
    shown: Vec<usize>,
    name: usize,
}

impl Table {
    /// Selects the columns that fit; all if no width is given.
    pub fn new(rows: &[Row], width: Option<usize>) -> Table {
        let has_names = rows.iter().any(|row| row.known.is_some());
        // Without a daemon these two are empty.
        let needed = |column: &Column| has_names || !["VDI", "SR"].contains(&column.head);
        let longest = rows.iter().map(|row| row.name.width()).max().unwrap_or(0).clamp(NAME_MIN, NAME_MAX);
        let width = width.unwrap_or(usize::MAX / 2);
        let usable: Vec<usize> =
            COLUMNS.iter().enumerate().filter(|(_, column)| needed(column)).map(|(at, _)| at).collect();
        // A longer name takes precedence over the last columns.
        let named = longest.min(width / 4).max(NAME_MIN);
        let sizes = usable.iter().filter_map(|at| COLUMNS.get(*at)).map(|column| (column.width, column.priority));
        let sizes = sizes.enumerate().map(|(at, (width, priority))| (if at == 0 { named } else { width }, priority));
        let shown: Vec<usize> = fitting(sizes, width).into_iter().filter_map(|at| usable.get(at).copied()).collect();
        let taken: usize = shown.iter().filter_map(|at| COLUMNS.get(*at)).map(|column| column.width + 1).sum();
        let name = longest.min(NAME_MIN + (width + 1).saturating_sub(taken)).max(NAME_MIN);
        Table { shown, name }
    }

    fn width(&self, at: usize) -> usize {
        if at == 0 { self.name } else { COLUMNS.get(at).map_or(0, |column| column.width) }
    }

    /// The headings, each with its index in [`COLUMNS`].
    pub fn heads(&self) -> Vec<(usize, String)> {
        let columns = self.shown.iter().filter_map(|at| COLUMNS.get(*at).map(|column| (*at, column)));
        columns.map(|(at, column)| (at, padded(column, column.head.to_owned(), self.width(at)))).collect()
    }

    /// The cells of a row, in the order of the headings, each with whether it is marked.
    pub fn cells(&self, row: &Row) -> Vec<(String, bool)> {
        let columns = self.shown.iter().filter_map(|at| COLUMNS.get(*at).map(|column| (*at, column)));
        columns
            .map(|(at, column)| {
                let marked = match column.head {
                    "HEALTH" => row.health.state > HealthState::Unmanaged,
                    "oldest" => row.oldest.is_some_and(|age| age > OLD),
                    "errors" => rates(row).is_some_and(|rates| rates.all().errors > 0.0),
                    _ => false,
                };
                (padded(column, cell(column, row), self.width(at)), marked)
            })
            .collect()
    }
}

fn cell(column: &Column, row: &Row) -> String {
    match column.what {
        CellKind::Text(text) => text(row).to_owned(),
        CellKind::Number(..) if row.ended && column.head == "r/s" => "ended".into(),
        CellKind::Number(value, write) => {
            let text = value(row).map_or_else(|| "-".into(), write);
            // Needed where there is no colour.
            let mark = match column.head {
                "oldest" if row.oldest.is_some_and(|age| age > OLD) => "!",
                "oldest" => " ",
                _ => "",
            };
            text + mark
        }
    }
}

fn padded(column: &Column, text: String, width: usize) -> String {
    let text = shortened(text::in_one_line(&text), Some(width));
    let space = " ".repeat(width.saturating_sub(text.width()));
    if matches!(column.what, CellKind::Text(_)) { text + &space } else { space + &text }
}

/// Sorts rows by a column: numbers in descending, texts in ascending order.
pub fn sort(rows: &mut [Row], at: usize, reverse: bool) {
    let Some(column) = COLUMNS.get(at) else { return };
    let by_name = |one: &Row, other: &Row| (&one.name, &one.pages).cmp(&(&other.name, &other.pages));
    rows.sort_by(|one, other| {
        let order = match column.what {
            CellKind::Text(text) => text(one).cmp(text(other)),
            CellKind::Number(value, _) => {
                let number = |row| value(row).filter(|value| !value.is_nan()).unwrap_or(-1.0);
                number(other).total_cmp(&number(one))
            }
        };
        let order = if reverse { order.reverse() } else { order };
        if order == Ordering::Equal { by_name(one, other) } else { order }
    });
}

/// Whether this column needs the histograms of all rows for sorting.
pub fn needs_latency(at: usize) -> bool {
    COLUMNS.get(at).is_some_and(|column| ["p50", "p99", "p99.9"].contains(&column.head))
}

#[cfg(test)]
#[path = "columns/test.rs"]
mod test;
