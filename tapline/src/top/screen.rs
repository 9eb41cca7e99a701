//! The screen: its contents at each size, and the effects of keys.
//!
//! It draws on a frame and does not access the terminal. Invariant: a row is a line, which is never wrapped; columns
//! that do not fit are left out.

use std::path::PathBuf;
use std::time::Duration;

use ratatui::Frame;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Wrap};

use super::columns::{self, COLUMNS, Table};
use super::detail::ViewOptions;
use super::layers::Layers;
use super::names::Names;
use super::pages::Pages;
use super::rows::{GroupBy, Row};
use super::{DiskSelection, detail, notes};

/// Width and height of the smallest terminal.
const SIZE_MIN: (u16, u16) = (60, 8);

/// The view that is shown.
#[derive(Clone, Debug, PartialEq, Eq)]
enum View {
    /// All rows.
    List,
    /// One disk, by its page.
    Detail(PathBuf),
}

/// The state of the screen.
#[derive(Debug)]
pub struct Screen {
    wanted: DiskSelection,
    interval: Duration,
    view: View,
    help: bool,
    sort: usize,
    reverse: bool,
    filter: String,
    typing: bool,
    frozen: bool,
    all_time: bool,
    colour: bool,
    /// The selected row, by its name and first page, and its last index.
    chosen: Option<(String, Option<PathBuf>)>,
    at: usize,
    scroll: u16,
    /// The rows that were drawn last.
    shown: Vec<Row>,
    page: usize,
}

/// What the caller must do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyResult {
    /// Draw the screen again.
    Draw,
    /// Leave the program.
    Quit,
}

/// The style of a marked text: bold, and coloured where there are colours.
pub fn mark(marked: bool, colour: bool, of: Color) -> Style {
    match (marked, colour) {
        (false, _) => Style::new(),
        (true, false) => Style::new().add_modifier(Modifier::BOLD),
        (true, true) => Style::new().fg(of).add_modifier(Modifier::BOLD),
    }
}

impl Screen {
    /// Creates the screen, showing the list.
    pub fn new(wanted: DiskSelection, interval: Duration, sort: usize, colour: bool) -> Screen {
        Screen {
            wanted,
            interval,
            view: View::List,
            help: false,
            sort,
            reverse: false,
            filter: String::new(),
            typing: false,
            frozen: false,
            all_time: false,
            colour,
            chosen: None,
            at: 0,
            scroll: 0,
            shown: Vec::new(),
            page: 1,
        }
    }

    /// Whether readings are suspended.
    pub fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// The page of the disk in the detail view.
    pub fn disk(&self) -> Option<&PathBuf> {
        match &self.view {
            View::Detail(page) => Some(page),
            View::List => None,
        }
    }

    /// Handles a pressed key.
    pub fn key(&mut self, key: KeyEvent) -> KeyResult {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c' | 'd') if control => return KeyResult::Quit,
            _ if self.typing => self.type_in(key.code),
            KeyCode::Char('q') => return KeyResult::Quit,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => {
                self.help = !self.help;
                self.scroll = 0;
            }
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Enter if self.help => self.help = false,
            code if self.help => self.scroll_by(code),
            KeyCode::Char(' ' | 'f') => self.frozen = !self.frozen,
            code if self.view == View::List => self.list_key(code),
            code => self.detail_key(code),
        }
        KeyResult::Draw
    }

    fn type_in(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(char) if !char.is_control() && self.filter.len() < 64 => self.filter.push(char),
            _ => {}
        }
    }

    fn list_key(&mut self, code: KeyCode) {
        let last = self.shown.len().saturating_sub(1);
        match code {
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('>' | 's') | KeyCode::Right => self.sort = (self.sort + 1) % COLUMNS.len(),
            KeyCode::Char('<' | 'S') | KeyCode::Left => {
                self.sort = (self.sort + COLUMNS.len() - 1) % COLUMNS.len();
            }
            KeyCode::Char('b') => {
                self.wanted.by = match self.wanted.by {
                    GroupBy::Disk => GroupBy::Vm,
                    GroupBy::Vm => GroupBy::Sr,
                    GroupBy::Sr => GroupBy::Disk,
                };
            }
            KeyCode::Down | KeyCode::Char('j') => self.choose((self.at + 1).min(last)),
            KeyCode::Up | KeyCode::Char('k') => self.choose(self.at.saturating_sub(1)),
            KeyCode::PageDown => self.choose((self.at + self.page).min(last)),
            KeyCode::PageUp => self.choose(self.at.saturating_sub(self.page)),
            KeyCode::Home | KeyCode::Char('g') => self.choose(0),
            KeyCode::End | KeyCode::Char('G') => self.choose(last),
            KeyCode::Enter => self.enter(),
            _ => {}
        }
    }

    fn detail_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Enter | KeyCode::Left => self.view = View::List,
            KeyCode::Char('t') => self.all_time = !self.all_time,
            code => self.scroll_by(code),
        }
    }

    fn scroll_by(&mut self, code: KeyCode) {
        match code {
            KeyCode::Down | KeyCode::Char('j') => self.scroll = self.scroll.saturating_add(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::PageDown => self.scroll = self.scroll.saturating_add(10),
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(10),
            KeyCode::Home => self.scroll = 0,
            _ => {}
        }
    }

    fn choose(&mut self, at: usize) {
        self.at = at;
        self.chosen = self.shown.get(at).map(key_of);
    }

    /// Shows the details of the selected disk, or the disks of the selected group.
    fn enter(&mut self) {
        let Some(row) = self.shown.get(self.at) else { return };
        match (self.wanted.by, row.pages.first()) {
            (GroupBy::Disk, Some(page)) => {
                self.view = View::Detail(page.clone());
                self.scroll = 0;
            }
            _ if !row.name.starts_with('(') => {
                self.filter.clone_from(&row.name);
                self.wanted.by = GroupBy::Disk;
            }
            _ => {}
        }
    }

    /// Draws the current view.
    pub fn draw(&mut self, frame: &mut Frame<'_>, pages: &mut Pages, names: &Names, layers: &Layers) {
        let area = frame.area();
        if (area.width, area.height) < SIZE_MIN || area.width < SIZE_MIN.0 || area.height < SIZE_MIN.1 {
            let (width, height) = SIZE_MIN;
            let text = format!(
                "This terminal is too small: {}x{}. tapline top needs {width}x{height}; q quits.",
                area.width, area.height
            );
            return frame.render_widget(Paragraph::new(text).wrap(Wrap { trim: true }), area);
        }
        let (lines, foot) = if self.help {
            let (lines, _) = self.detail(("tapline top: keys and columns".to_owned(), help()), area);
            (lines, " Esc back  Up/Down scroll  q quit".to_owned())
        } else {
            let detail = match &self.view {
                View::Detail(page) => pages.disks.get_mut(page).map(|disk| {
                    let name = names.of(disk.vbd);
                    let look = ViewOptions { width: area.width.into(), all_time: self.all_time, colour: self.colour };
                    (detail::title(disk, name), detail::lines(disk, name, layers.of(page), look))
                }),
                View::List => None,
            };
            match detail {
                Some(detail) => self.detail(detail, area),
                None => {
                    // The disk may have disappeared while it was shown.
                    self.view = View::List;
                    self.list(pages, names, area)
                }
            }
        };
        let body = Rect { height: area.height - 1, ..area };
        frame.render_widget(Paragraph::new(lines), body);
        let foot_area = Rect { y: area.y + area.height - 1, height: 1, ..area };
        frame.render_widget(Paragraph::new(foot).style(Style::new().add_modifier(Modifier::REVERSED)), foot_area);
    }

    fn list(&mut self, pages: &mut Pages, names: &Names, area: Rect) -> (Vec<Line<'static>>, String) {
        let mut rows = self.wanted.rows(pages, names);
        let all = rows.len();
        rows.retain(|row| self.is_in_filter(row));
        if columns::needs_latency(self.sort) {
            rows.iter_mut().for_each(|row| row.read_latency(pages));
        }
        columns::sort(&mut rows, self.sort, self.reverse);
        self.at = self
            .chosen
            .as_ref()
            .and_then(|chosen| rows.iter().position(|row| key_of(row) == *chosen))
            .unwrap_or(self.at)
            .min(rows.len().saturating_sub(1));
        let width = usize::from(area.width);
        let notes = notes(pages);
        let noted = notes.len().min(3);
        self.page = usize::from(area.height).saturating_sub(3 + noted).max(1);
        let first = (self.at + 1).saturating_sub(self.page);
        let table = Table::new(&rows, Some(width));
        let mut lines = vec![self.title(all, rows.len()), self.heads(&table)];
        for (at, row) in rows.iter_mut().enumerate().skip(first).take(self.page) {
            row.read_latency(pages);
            lines.push(self.row(&table, row, at == self.at));
        }
        if rows.is_empty() && all > 0 {
            lines.push(Line::raw("No disk matches the filter; Esc shows all."));
        }
        lines.extend(
            notes.into_iter().take(noted).map(|note| Line::styled(note, mark(true, self.colour, Color::Yellow))),
        );
        self.shown = rows;
        let foot = match self.typing {
            true => format!(" filter: {}_", self.filter),
            false => " q quit  ? help  / filter  <> sort  r reverse  b sums  Enter".to_owned(),
        };
        (lines, foot)
    }

    fn is_in_filter(&self, row: &Row) -> bool {
        let text = self.filter.to_lowercase();
        let known = row.known.iter().flat_map(|known| [&known.vdi, &known.sr]);
        known.chain([&row.name, &row.image]).any(|name| name.to_lowercase().contains(&text))
    }

    fn title(&self, all: usize, shown: usize) -> Line<'static> {
        let what = match (self.wanted.by, all) {
            (GroupBy::Disk, 1) => "disk",
            (GroupBy::Disk, _) => "disks",
            (GroupBy::Vm, 1) => "VM",
            (GroupBy::Vm, _) => "VMs",
            (GroupBy::Sr, 1) => "repository",
            (GroupBy::Sr, _) => "repositories",
        };
        let count = if all == shown { format!("{all} {what}") } else { format!("{shown} of {all} {what}") };
        let every = self.interval.as_secs_f64();
        let sort = COLUMNS.get(self.sort).map_or("", |column| column.head);
        let order = if self.reverse { " reversed" } else { "" };
        let frozen = if self.frozen { "  FROZEN" } else { "" };
        let filter = if self.filter.is_empty() { String::new() } else { format!("  filter: {}", self.filter) };
        Line::raw(format!("tapline top  {count}  every {every} s  by {sort}{order}{frozen}{filter}"))
    }

    fn heads(&self, table: &Table) -> Line<'static> {
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let mut spans = Vec::new();
        for (at, head) in table.heads() {
            let style = if at == self.sort { bold.add_modifier(Modifier::UNDERLINED) } else { bold };
            spans.extend([Span::styled(head, style), Span::raw(" ")]);
        }
        Line::from(spans)
    }

    fn row(&self, table: &Table, row: &Row, is_chosen: bool) -> Line<'static> {
        let base = match (is_chosen, row.ended) {
            (true, _) => Style::new().add_modifier(Modifier::REVERSED),
            (false, true) => Style::new().add_modifier(Modifier::DIM),
            (false, false) => Style::new(),
        };
        let mut spans = Vec::new();
        for (cell, is_marked) in table.cells(row) {
            spans.push(Span::styled(cell, mark(is_marked, self.colour, Color::Red)));
            spans.push(Span::raw(" "));
        }
        Line::from(spans).style(base)
    }

    fn detail(&mut self, shown: (String, Vec<Line<'static>>), area: Rect) -> (Vec<Line<'static>>, String) {
        let (title, lines) = shown;
        let room = usize::from(area.height).saturating_sub(2);
        let last = u16::try_from(lines.len().saturating_sub(room)).unwrap_or(u16::MAX);
        self.scroll = self.scroll.min(last);
        let frozen = if self.frozen { "  FROZEN" } else { "" };
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let shown = lines.into_iter().skip(self.scroll.into());
        let lines = std::iter::once(Line::styled(format!("{title}{frozen}"), bold)).chain(shown).collect();
        (lines, " Esc back  t all time  Up/Down scroll  f freeze  q quit".into())
    }
}

fn key_of(row: &Row) -> (String, Option<PathBuf>) {
    match row.is_sum {
        true => (row.name.clone(), None),
        // Without the name, which may arrive later than the disk.
        false => (String::new(), row.pages.first().cloned()),
    }
}

fn help() -> Vec<Line<'static>> {
    let keys = [
        ("Up Down PgUp PgDn Home End", "choose a row"),
        ("Enter", "the disk: stages, layers, requests in flight"),
        ("< > or Left Right", "sort by another column"),
        ("r", "reverse the order"),
        ("/", "filter by text; Esc shows all"),
        ("b", "a row for each disk, VM, or repository"),
        ("Space or f", "freeze, and continue"),
        ("t", "in a disk: the last interval, or all time"),
        ("q or Ctrl-C", "quit"),
    ];
    let line = |(word, text): (&str, &str)| Line::raw(format!("{word:<27} {text}"));
    let columns = COLUMNS.iter().map(|column| Line::raw(format!("{:<8} {}", column.head, column.help)));
    keys.map(line).into_iter().chain([Line::default()]).chain(columns).collect()
}

#[cfg(test)]
#[path = "screen/test.rs"]
mod test;
