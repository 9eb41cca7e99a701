//! How objects are shown: as table rows with one line each, or a single object with all its fields.
//!
//! A noun declares its columns once, the most important first, and both views are made from them. This module knows
//! text and widths, but no noun.

use std::cmp::Ordering;
use std::collections::HashMap;

use api::{Code, Problem};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};
use uuid::Uuid;

/// The shortest length that a text is cut to. Texts longer than a third of the terminal's width are cut.
const LONGEST_MIN: usize = 20;

/// The number of spaces between two columns.
const GAP: u16 = 2;

/// A column that shows a property of an object of type `T`.
pub struct Column<T> {
    head: &'static str,
    visibility: Visibility,
    align: CellAlignment,
    cell: fn(&T, Uuids<'_>) -> String,
}

/// In which views a column is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visibility {
    /// Shown in every table.
    Table,
    /// Shown in a table if it fits, and in wide tables.
    Room,
    /// Shown in wide tables only.
    Wide,
    /// Shown only in the view of a single object.
    Alone,
}

/// Names of objects to which others refer.
pub type Names = HashMap<Uuid, String>;

/// How UUIDs are shown.
#[derive(Clone, Copy, Debug)]
pub struct Uuids<'a> {
    whole: bool,
    names: Option<&'a Names>,
}

impl Uuids<'_> {
    /// UUIDs by their first digits, usually enough to tell objects apart, and accepted on the command line.
    pub const SHORT: Uuids<'static> = Uuids { whole: false, names: None };
    /// UUIDs in their full length.
    pub const WHOLE: Uuids<'static> = Uuids { whole: true, names: None };

    /// Formats a UUID: in full, or its first eight digits.
    pub fn show(self, uuid: Uuid) -> String {
        let whole = uuid.to_string();
        if self.whole { whole } else { whole.chars().take(8).collect() }
    }

    /// Formats a UUID that may be missing.
    pub fn show_some(self, uuid: Option<Uuid>) -> String {
        uuid.map(|uuid| self.show(uuid)).unwrap_or_default()
    }

    /// The name of another object if it is known here, else its UUID.
    pub fn named(self, uuid: Uuid) -> String {
        self.names.and_then(|names| names.get(&uuid)).cloned().unwrap_or_else(|| self.show(uuid))
    }
}

/// The columns of a table and the order of its rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout<'a> {
    /// All columns, with whole UUIDs, whatever the width.
    pub wide: bool,
    /// Columns that do not fit this width are left out, the last ones first.
    pub width: Option<u16>,
    /// These columns, by their headings, instead of all that fit.
    pub columns: &'a [String],
    /// The heading of the column to sort by; a leading `-` sorts in descending order.
    pub sort: Option<&'a str>,
    /// Names to be shown instead of UUIDs.
    pub names: Option<&'a Names>,
    /// Prints the headings in bold.
    pub bold: bool,
}

impl<T> Column<T> {
    /// A column that is shown in every table.
    pub const fn new(head: &'static str, cell: fn(&T, Uuids<'_>) -> String) -> Column<T> {
        Column { head, visibility: Visibility::Table, align: CellAlignment::Left, cell }
    }

    /// The cell's text for an object. Invisible characters in names are made visible.
    fn show(&self, object: &T, uuids: Uuids<'_>) -> String {
        api::visible(&(self.cell)(object, uuids)).into_owned()
    }

    fn is_shown(&self, wide: bool) -> bool {
        match self.visibility {
            Visibility::Table | Visibility::Room => true,
            Visibility::Wide => wide,
            Visibility::Alone => false,
        }
    }

    /// Right-aligns the column, for values compared by their last digit.
    pub const fn right(self) -> Column<T> {
        Column { align: CellAlignment::Right, ..self }
    }

    /// Shows the column only if it fits.
    pub const fn if_room(self) -> Column<T> {
        Column { visibility: Visibility::Room, ..self }
    }

    /// Shows the column in wide tables only.
    pub const fn wide(self) -> Column<T> {
        Column { visibility: Visibility::Wide, ..self }
    }

    /// Shows the column only in the view of a single object.
    pub const fn alone(self) -> Column<T> {
        Column { visibility: Visibility::Alone, ..self }
    }
}

/// A table of objects.
pub fn table<T>(objects: &[T], columns: &[Column<T>], layout: &Layout<'_>) -> Result<String, Problem> {
    let uuids = Uuids { whole: layout.wide, names: layout.names.filter(|_| !layout.wide) };
    let objects = sorted(objects, columns, layout.sort, uuids)?;
    let mut shown: Vec<&Column<T>> = match layout.columns {
        [] => columns.iter().filter(|column| column.is_shown(layout.wide)).collect(),
        named => named.iter().map(|head| find(columns, head)).collect::<Result<_, _>>()?,
    };
    let width = layout.width.filter(|_| !layout.wide && layout.columns.is_empty());
    let longest = width.map(|width| usize::from(width / 3).max(LONGEST_MIN));
    let mut table = draw(&objects, &shown, uuids, longest);
    let all = shown.len();
    while let Some(last) = too_wide(&table, &shown, width, shown.len() < all) {
        shown.remove(last);
        table = draw(&objects, &shown, uuids, longest);
    }
    let text = table.trim_fmt();
    let (heads, rows) =
        text.split_once('\n').map_or((text.as_str(), String::new()), |(heads, rows)| (heads, format!("{rows}\n")));
    // Marks that columns were left out: `-o wide` shows all.
    let more = if shown.len() < all { " …" } else { "" };
    let heads = format!("{}{more}", heads.trim_end());
    Ok(if layout.bold { format!("\x1b[1m{heads}\x1b[0m\n{rows}") } else { format!("{heads}\n{rows}") })
}

/// The column with this heading; dashes stand for its blanks.
fn find<'a, T>(columns: &'a [Column<T>], head: &str) -> Result<&'a Column<T>, Problem> {
    let plain = |text: &str| text.trim().to_lowercase().replace(['-', '_'], " ");
    let found = columns.iter().find(|column| plain(column.head) == plain(head));
    found.ok_or_else(|| {
        let heads: Vec<String> = columns.iter().map(|column| column.head.replace(' ', "-")).collect();
        Problem::new(Code::Invalid, format!("there is no column '{head}' here"))
            .advise(format!("the columns are {}", heads.join(", ")))
    })
}

/// The objects in the order of a column.
fn sorted<'a, T>(
    objects: &'a [T],
    columns: &[Column<T>],
    by: Option<&str>,
    uuids: Uuids<'_>,
) -> Result<Vec<&'a T>, Problem> {
    let Some(by) = by else { return Ok(objects.iter().collect()) };
    let (head, falling) = by.strip_prefix('-').map_or((by, false), |head| (head, true));
    let column = find(columns, head)?;
    let mut keyed: Vec<(String, &T)> = objects.iter().map(|object| (column.show(object, uuids), object)).collect();
    keyed.sort_by(|(one, _), (other, _)| {
        let order = compare(one, other);
        if falling { order.reverse() } else { order }
    });
    Ok(keyed.into_iter().map(|(_, object)| object).collect())
}

/// Compares numbers and sizes by value; they sort before words.
fn compare(one: &str, other: &str) -> Ordering {
    match (value(one), value(other)) {
        (Some(one), Some(other)) => one.total_cmp(&other),
        (Some(_), None) => Ordering::Less,
        (None, Some(_)) => Ordering::Greater,
        (None, None) => one.to_lowercase().cmp(&other.to_lowercase()),
    }
}

/// Parses a number with or without a unit, as `readable` writes it; a factor; or a duration.
fn value(text: &str) -> Option<f64> {
    if text == "now" {
        return Some(0.0);
    }
    if let Some(factor) = text.strip_suffix('x') {
        return factor.parse().ok();
    }
    let (number, unit) = text.split_once(' ').unwrap_or((text, ""));
    let factor = match unit {
        "" | "B" | "%" => 1.0,
        "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        "KiB" => f64::from(1 << 10),
        "MiB" => f64::from(1 << 20),
        "GiB" => f64::from(1 << 30),
        "TiB" => f64::from(1 << 20) * f64::from(1 << 20),
        "PiB" => f64::from(1 << 20) * f64::from(1 << 30),
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

/// Index of the column to remove if the table is too wide. If columns were removed already (`marked`), the mark that
/// reports it needs room, too.
fn too_wide<T>(table: &Table, shown: &[&Column<T>], width: Option<u16>, marked: bool) -> Option<usize> {
    let gaps = GAP.saturating_mul(u16::try_from(shown.len().saturating_sub(1)).unwrap_or(u16::MAX));
    let mark = if marked { GAP } else { 0 };
    let needed = table.column_max_content_widths().into_iter().fold(gaps + mark, u16::saturating_add);
    width.filter(|width| needed > *width)?;
    shown.iter().rposition(|column| column.visibility == Visibility::Room)
}

/// Shortens a text to `longest` columns of the terminal by replacing its middle with `…`, because names of snapshots of
/// a disk differ at their end.
pub fn shortened(text: String, longest: Option<usize>) -> String {
    let Some(longest) = longest.filter(|longest| text.width() > *longest) else { return text };
    let end: String = within(text.chars().rev(), (longest - 1) / 2).chars().rev().collect();
    let beginning = within(text.chars(), longest - 1 - end.width());
    format!("{beginning}…{end}")
}

/// As many of the first characters as fit into `longest` columns.
fn within(text: impl Iterator<Item = char>, longest: usize) -> String {
    let mut left = longest;
    let fits = |char: &char| match left.checked_sub(char.width().unwrap_or(0)) {
        Some(rest) => {
            left = rest;
            true
        }
        None => false,
    };
    text.take_while(fits).collect()
}

fn draw<T>(objects: &[&T], shown: &[&Column<T>], uuids: Uuids<'_>, longest: Option<usize>) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(shown.iter().map(|column| column.head.to_uppercase()));
    for object in objects {
        table.add_row(shown.iter().map(|column| shortened(column.show(object, uuids), longest)));
    }
    for (place, column) in shown.iter().enumerate() {
        if let Some(drawn) = table.column_mut(place) {
            drawn.set_padding((0, GAP)).set_cell_alignment(column.align);
        }
    }
    table
}

/// Formats a single object with all its non-empty fields, one per line.
pub fn alone<T>(object: &T, columns: &[Column<T>]) -> String {
    let cells = columns.iter().map(|column| (column.head, column.show(object, Uuids::WHOLE)));
    let known: Vec<(&str, String)> = cells.filter(|(_, cell)| !cell.is_empty()).collect();
    let widest = known.iter().map(|(head, _)| head.len()).max().unwrap_or(0);
    // Further lines of a multi-line value are aligned below its first line.
    let indent = format!("\n{:1$}", "", widest + 2);
    known.iter().map(|(head, cell)| format!("{head:>widest$}: {}\n", cell.replace('\n', &indent))).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    struct Thing {
        uuid: Uuid,
        name: &'static str,
    }

    type ThingColumn = Column<Thing>;

    const COLUMNS: &[ThingColumn] = &[
        ThingColumn::new("uuid", |thing, uuids| uuids.show(thing.uuid)),
        ThingColumn::new("name", |thing, _| thing.name.into()),
        ThingColumn::new("size", |thing, _| thing.name.len().to_string()).right().if_room(),
        ThingColumn::new("note", |_, _| "seldom seen".into()).if_room(),
        ThingColumn::new("of", |thing, uuids| uuids.show(thing.uuid)).wide(),
        ThingColumn::new("text", |thing, _| thing.name.replace(' ', "\n")).alone(),
    ];

    fn things() -> Vec<Thing> {
        let uuid = Uuid::from_u128(0x9b1d_eb4d_3b7d_4bad_9bdd_2b0d_7b3d_cb6d);
        vec![Thing { uuid, name: "root" }, Thing { uuid: Uuid::nil(), name: "データ 2 of them" }]
    }

    fn drawn(layout: &Layout<'_>) -> String {
        table(&things(), COLUMNS, layout).unwrap()
    }

    fn fits(width: u16) -> Layout<'static> {
        Layout { width: Some(width), ..Layout::default() }
    }

    #[test]
    fn columns_are_aligned_even_with_wide_characters() {
        let text = "UUID      NAME              SIZE  NOTE\n\
                    9b1deb4d  root                 4  seldom seen\n\
                    00000000  データ 2 of them    19  seldom seen\n";
        assert_eq!(drawn(&Layout::default()), text);
        assert_eq!(drawn(&fits(45)), text);
    }

    #[test]
    fn columns_that_do_not_fit_are_dropped_from_the_right_with_a_mark() {
        let text = "UUID      NAME              SIZE …\n\
                    9b1deb4d  root                 4\n\
                    00000000  データ 2 of them    19\n";
        assert_eq!(drawn(&fits(44)), text);
        assert!(drawn(&fits(3)).starts_with("UUID      NAME …\n"));
    }

    #[test]
    fn long_texts_are_shortened_in_their_middle() {
        let short = |text: &str| shortened(text.into(), Some(9));
        assert_eq!(short("web-root"), "web-root");
        assert_eq!(short("web@2026-11-23T02:07"), "web@…2:07");
        assert_eq!(short("データデータデータ"), "デー…ータ");
    }

    #[test]
    fn a_wide_table_has_whole_uuids_and_is_never_cut() {
        let text = drawn(&Layout { wide: true, ..fits(3) });
        assert!(text.contains("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d  root"), "{text}");
        assert!(text.contains("SIZE  NOTE         OF"), "{text}");
    }

    #[test]
    fn columns_are_chosen_by_their_headings() {
        let chosen = ["name".to_owned(), "OF".to_owned()];
        let text = drawn(&Layout { columns: &chosen, ..fits(3) });
        assert_eq!(text, "NAME              OF\nroot              9b1deb4d\nデータ 2 of them  00000000\n");
        let unknown = ["colour".to_owned()];
        let problem = table(&things(), COLUMNS, &Layout { columns: &unknown, ..Layout::default() }).unwrap_err();
        assert_eq!(problem.detail, "there is no column 'colour' here");
        assert_eq!(problem.advice.unwrap(), "the columns are uuid, name, size, note, of, text");
    }

    #[test]
    fn rows_are_sorted_by_value_or_by_word() {
        let first = |sort| drawn(&Layout { sort: Some(sort), ..Layout::default() }).lines().nth(1).unwrap().to_owned();
        assert!(first("size").contains("root") && first("-size").contains("データ"));
        assert!(first("name").contains("root") && first("-name").contains("データ"));
        assert_eq!(compare("2 GiB", "1000 MiB"), Ordering::Greater);
        assert_eq!(compare("10", "9"), Ordering::Greater);
        assert_eq!(compare("10.0x", "1.4x"), Ordering::Greater);
        assert_eq!(compare("3 d", "40 h"), Ordering::Greater);
        assert_eq!((compare("now", "5 min"), compare("3 d", "-")), (Ordering::Less, Ordering::Less));
        assert_eq!(compare("9", "nine"), Ordering::Less);
    }

    #[test]
    fn names_stand_for_uuids_but_in_a_wide_table() {
        let names = Names::from([(Uuid::nil(), "fast".to_owned())]);
        let uuids = Uuids { whole: false, names: Some(&names) };
        assert_eq!((uuids.named(Uuid::nil()), uuids.show(Uuid::nil())), ("fast".into(), "00000000".into()));
        assert_eq!(uuids.named(things()[0].uuid), "9b1deb4d");
    }

    #[test]
    fn an_empty_table_has_headings() {
        assert_eq!(table(&[], COLUMNS, &Layout::default()).unwrap(), "UUID  NAME  SIZE  NOTE\n");
    }

    #[test]
    fn bidirectional_control_characters_are_escaped() {
        let thing = Thing { uuid: Uuid::nil(), name: "a\u{202e}b" };
        assert!(table(&[thing], COLUMNS, &Layout::default()).unwrap().contains("00000000  a\\u{202e}b "));
    }

    #[test]
    fn a_single_object_is_shown_with_all_fields() {
        let text = "uuid: 00000000-0000-0000-0000-000000000000\n\
                    name: データ 2 of them\n\
                    size: 19\n\
                    note: seldom seen\n  \
                      of: 00000000-0000-0000-0000-000000000000\n\
                    text: データ\n      2\n      of\n      them\n";
        assert_eq!(alone(&things()[1], COLUMNS), text);
    }
}
