//! How objects are shown: as table rows with one line each, or a single object with all its fields.
//!
//! A noun declares its columns once, the most important first, and both views are made from them. This module knows
//! text and widths, but no noun.

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use uuid::Uuid;

/// The number of spaces between two columns.
const GAP: u16 = 2;

/// A column that shows a property of an object of type `T`.
pub struct Column<T> {
    head: &'static str,
    visibility: Visibility,
    align: CellAlignment,
    cell: fn(&T, Uuids) -> String,
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

/// How much of a UUID is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uuids {
    /// The first digits, usually enough to tell objects apart, and accepted on the command line.
    Short,
    /// The full UUID.
    Whole,
}

impl Uuids {
    /// Formats a UUID.
    pub fn show(self, uuid: Uuid) -> String {
        let whole = uuid.to_string();
        match self {
            Uuids::Whole => whole,
            Uuids::Short => whole.chars().take(8).collect(),
        }
    }

    /// Formats a UUID that may be missing.
    pub fn show_some(self, uuid: Option<Uuid>) -> String {
        uuid.map(|uuid| self.show(uuid)).unwrap_or_default()
    }
}

impl<T> Column<T> {
    /// A column that is shown in every table.
    pub const fn new(head: &'static str, cell: fn(&T, Uuids) -> String) -> Column<T> {
        Column { head, visibility: Visibility::Table, align: CellAlignment::Left, cell }
    }

    /// The cell's text for an object. Invisible characters in names are made visible.
    fn show(&self, object: &T, uuids: Uuids) -> String {
        api::visible(&(self.cell)(object, uuids)).into_owned()
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

/// A table of objects. If `width` is given, columns that do not fit are left out, starting with the last.
pub fn table<T>(objects: &[T], columns: &[Column<T>], wide: bool, width: Option<u16>) -> String {
    let uuids = if wide { Uuids::Whole } else { Uuids::Short };
    let mut shown: Vec<&Column<T>> = columns
        .iter()
        .filter(|column| match column.visibility {
            Visibility::Table | Visibility::Room => true,
            Visibility::Wide => wide,
            Visibility::Alone => false,
        })
        .collect();
    let mut table = draw(objects, &shown, uuids);
    while let Some(last) = too_wide(&table, &shown, width.filter(|_| !wide)) {
        shown.remove(last);
        table = draw(objects, &shown, uuids);
    }
    format!("{}\n", table.trim_fmt())
}

/// The column to leave out, if the table is too wide and a column can be left out.
fn too_wide<T>(table: &Table, shown: &[&Column<T>], width: Option<u16>) -> Option<usize> {
    let gaps = GAP.saturating_mul(u16::try_from(shown.len().saturating_sub(1)).unwrap_or(u16::MAX));
    let needed = table.column_max_content_widths().into_iter().fold(gaps, u16::saturating_add);
    width.filter(|width| needed > *width)?;
    shown.iter().rposition(|column| column.visibility == Visibility::Room)
}

fn draw<T>(objects: &[T], shown: &[&Column<T>], uuids: Uuids) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(shown.iter().map(|column| column.head.to_uppercase()));
    for object in objects {
        table.add_row(shown.iter().map(|column| column.show(object, uuids)));
    }
    for (place, column) in shown.iter().enumerate() {
        if let Some(drawn) = table.column_mut(place) {
            drawn.set_padding((0, GAP)).set_cell_alignment(column.align);
        }
    }
    table
}

/// A single object with all its fields, one per line.
pub fn alone<T>(object: &T, columns: &[Column<T>]) -> String {
    let cells = columns.iter().map(|column| (column.head, column.show(object, Uuids::Whole)));
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

    type Shown = Column<Thing>;

    const COLUMNS: &[Shown] = &[
        Shown::new("uuid", |thing, uuids| uuids.show(thing.uuid)),
        Shown::new("name", |thing, _| thing.name.into()),
        Shown::new("size", |thing, _| thing.name.len().to_string()).right().if_room(),
        Shown::new("note", |_, _| "seldom seen".into()).if_room(),
        Shown::new("of", |thing, uuids| uuids.show(thing.uuid)).wide(),
        Shown::new("text", |thing, _| thing.name.replace(' ', "\n")).alone(),
    ];

    fn things() -> Vec<Thing> {
        let uuid = Uuid::from_u128(0x9b1d_eb4d_3b7d_4bad_9bdd_2b0d_7b3d_cb6d);
        vec![Thing { uuid, name: "root" }, Thing { uuid: Uuid::nil(), name: "データ 2 of them" }]
    }

    #[test]
    fn columns_are_aligned_even_with_wide_characters() {
        let text = "UUID      NAME              SIZE  NOTE\n\
                    9b1deb4d  root                 4  seldom seen\n\
                    00000000  データ 2 of them    19  seldom seen\n";
        assert_eq!(table(&things(), COLUMNS, false, None), text);
        assert_eq!(table(&things(), COLUMNS, false, Some(45)), text);
    }

    #[test]
    fn columns_that_do_not_fit_are_dropped_from_the_right() {
        let text = "UUID      NAME              SIZE\n\
                    9b1deb4d  root                 4\n\
                    00000000  データ 2 of them    19\n";
        assert_eq!(table(&things(), COLUMNS, false, Some(44)), text);
        assert!(table(&things(), COLUMNS, false, Some(3)).starts_with("UUID      NAME\n"));
    }

    #[test]
    fn a_wide_table_has_whole_uuids_and_is_never_cut() {
        let text = table(&things(), COLUMNS, true, Some(3));
        assert!(text.contains("9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d  root"), "{text}");
        assert!(text.contains("SIZE  NOTE         OF"), "{text}");
    }

    #[test]
    fn an_empty_table_has_headings() {
        assert_eq!(table(&[], COLUMNS, false, None), "UUID  NAME  SIZE  NOTE\n");
    }

    #[test]
    fn bidirectional_control_characters_are_escaped() {
        let thing = Thing { uuid: Uuid::nil(), name: "a\u{202e}b" };
        assert!(table(&[thing], COLUMNS, false, None).contains("00000000  a\\u{202e}b "));
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
