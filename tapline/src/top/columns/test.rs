//! Selection of columns that fit, and sorting of rows.

use unicode_width::UnicodeWidthStr;

use super::super::names::Name;
use super::super::rates::{KindRates, Rates};
use super::*;

fn row(name: &str, reads: f64) -> Row {
    let mut rates = Rates { seconds: 1.0, ..Rates::default() };
    rates.kinds[0] = KindRates { per_second: reads, ..KindRates::default() };
    Row { name: name.into(), rates: Some(rates), ..Row::default() }
}

fn heads(rows: &[Row], width: usize) -> Vec<String> {
    Table::new(rows, Some(width)).heads().into_iter().map(|(_, head)| head.trim().to_owned()).collect()
}

#[test]
fn no_line_is_wider_than_the_terminal_and_columns_go_by_priority() {
    let mut named = row("a machine with a very long name that goes on and on/vda", 1e30);
    named.known =
        Some(Name { vdi: "数据库的磁盘与一个很长的名字".into(), sr: "fast".into(), ..Name::default() });
    named.oldest = Some(u64::MAX);
    named.errors = u64::MAX;
    let rows = [named, row("b", 0.0)];
    let mut before = 0;
    for width in 60..=220 {
        let table = Table::new(&rows, Some(width));
        let line = |cells: Vec<String>| cells.join(" ").width();
        assert!(line(table.heads().into_iter().map(|(_, head)| head).collect()) <= width);
        for row in &rows {
            let cells: Vec<String> = table.cells(row).into_iter().map(|(cell, _)| cell).collect();
            assert!(line(cells.clone()) <= width, "{width}: {cells:?}");
        }
        let count = table.heads().len();
        assert!(count >= before, "a wider terminal shows no fewer columns: {width}");
        before = count;
    }
    assert_eq!(before, COLUMNS.len());
    assert_eq!(heads(&rows, 60), ["DISK", "HEALTH", "r/s", "w/s", "rMB/s", "wMB/s"]);
}

#[test]
fn without_a_daemon_there_are_no_columns_for_its_names() {
    let heads = heads(&[row("a", 1.0)], 220);
    assert!(!heads.contains(&"SR".to_owned()) && heads.len() == COLUMNS.len() - 2, "{heads:?}");
}

#[test]
fn rows_are_sorted_by_each_column_and_reversed() {
    let mut rows = [row("b", 1.0), row("c", 3.0), row("a", 1.0), Row { name: "d".into(), ..Row::default() }];
    let mut names = |head: &str, reverse: bool| {
        sort(&mut rows, find(head).unwrap(), reverse);
        rows.iter().map(|row| row.name.as_str()).collect::<String>()
    };
    assert_eq!(names("disk", false), "abcd");
    assert_eq!(names("DISK", true), "dcba");
    assert_eq!(names("r/s", false), "cabd", "the greatest first, equal ones by name, and unknown ones last");
    assert_eq!(names("r/s", true), "dabc");
    assert_eq!(find("nothing"), None);
}

#[test]
fn control_characters_in_names_do_not_reach_the_terminal() {
    let bad = row("a\u{1b}[2Jb\nc", 0.0);
    let table = Table::new(std::slice::from_ref(&bad), Some(80));
    let line: String = table.cells(&bad).into_iter().map(|(cell, _)| cell).collect();
    assert!(!line.contains('\u{1b}'), "{line:?}");
}
