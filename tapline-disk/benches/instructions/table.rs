//! The table of allowed instructions per request, which is kept with the source: `instructions.tsv`.
//!
//! Compilers produce different programs, so figures are only compared with those of the same compiler.

use std::path::PathBuf;

use super::callgrind::{DISK, PARTS};

/// The allowed growth of the disk's part at high queue depth. That figure is the same each time.
const ALLOWED: f64 = 1.03;
/// The allowed growth of figures that vary by up to five percent: the parts around the disk, because requests form
/// batches of other sizes, and everything of single requests, because the thread sleeps more or less often.
const ALLOWED_VARYING: f64 = 1.10;

/// A load and its instructions per request: in all, and by part.
pub struct Row {
    pub load: String,
    /// Whether many requests are in flight. With one at a time, the number of sleeps depends on the load of the
    /// machine.
    pub is_batch: bool,
    pub total: f64,
    pub parts: [f64; PARTS.len()],
}

/// Figures, and the compiler of the measured program.
pub struct Table {
    pub compiler: String,
    pub rows: Vec<Row>,
}

/// Returns the compiler of this program.
pub fn compiler() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = std::process::Command::new(rustc).arg("--version").output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.tsv")
}

impl Table {
    /// Reads the kept table.
    pub fn read() -> Result<Table, String> {
        let path = path();
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let compiler = text.lines().find_map(|line| line.strip_prefix("# compiler: ")).unwrap_or_default().to_owned();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let row = |line: &str| {
            let (load, figures) = line.split_once('\t')?;
            let figures: Vec<f64> = figures.split('\t').map(str::parse).collect::<Result<_, _>>().ok()?;
            let (&total, parts) = figures.split_first()?;
            Some(Row { load: load.to_owned(), is_batch: false, total, parts: parts.try_into().ok()? })
        };
        let rows = lines.map(|line| row(line).ok_or_else(|| format!("{}: {line:?} is no row", path.display())));
        Ok(Table { compiler, rows: rows.collect::<Result<_, _>>()? })
    }

    /// Writes the table.
    pub fn write(&self) -> Result<(), String> {
        let head = [
            "# Instructions a request, of which parts; `cargo bench -p tapline-disk -- --write` writes this."
                .to_owned(),
            format!("# compiler: {}", self.compiler),
            format!("# load\tall\t{}", PARTS.join("\t")),
        ];
        let line = |row: &Row| {
            let parts: Vec<String> = row.parts.iter().map(|part| format!("{part:.0}")).collect();
            format!("{}\t{:.0}\t{}", row.load, row.total, parts.join("\t"))
        };
        let lines: Vec<String> = head.into_iter().chain(self.rows.iter().map(line)).collect();
        std::fs::write(path(), lines.join("\n") + "\n").map_err(|error| format!("{}: {error}", path().display()))
    }

    /// Returns a line for each figure that exceeds its limit.
    pub fn exceeded(&self, seen: &[Row]) -> Vec<String> {
        let mut found = Vec::new();
        for row in seen {
            let Some(kept) = self.rows.iter().find(|kept| kept.load == row.load) else {
                found.push(format!("{}: not in the table", row.load));
                continue;
            };
            let mut of = |seen: f64, allowed: f64, most: f64, what: &str| {
                if seen <= allowed * most {
                    return;
                }
                let (load, grown, more) = (&row.load, grown(kept, row), (seen / allowed - 1.0) * 100.0);
                found.push(format!(
                    "{load}: {seen:.0} instructions{what}, {more:.1} % more than the {allowed:.0} of the table; {grown}"
                ));
            };
            if row.is_batch {
                of(row.parts[DISK], kept.parts[DISK], ALLOWED, " of the disk");
                of(row.total, kept.total, ALLOWED_VARYING, "");
            } else {
                of(row.parts[DISK], kept.parts[DISK], ALLOWED_VARYING, " of the disk");
            }
        }
        found
    }
}

/// Returns the parts that have grown.
fn grown(kept: &Row, seen: &Row) -> String {
    let more = PARTS.iter().zip(kept.parts.iter().zip(&seen.parts)).filter(|(_, (kept, seen))| *seen - *kept >= 5.0);
    let words: Vec<String> = more.map(|(part, (kept, seen))| format!("{part} {kept:.0} to {seen:.0}")).collect();
    words.join(", ")
}
