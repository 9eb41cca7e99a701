//! The table of what requests may cost, which is kept with the source: `instructions.tsv`.
//!
//! Compilers differ in what they make of a program, so figures are compared only with those of the same one.

use std::path::PathBuf;

use super::callgrind::{DISK, PARTS};

/// By how much the disk's part of a request of many may be above that of the table before it is an error. It is the
/// same each time.
const ALLOWED: f64 = 1.03;
/// And what is not: the parts around the disk, as requests fall into batches of other sizes, and all of a request that
/// comes alone, as the thread sleeps more or less often. They are up to a twentieth more or less.
const ALLOWED_VARYING: f64 = 1.10;

/// A load and its instructions a request: in all, and by parts.
pub struct Row {
    pub load: String,
    /// Of many at once. With one at a time the thread sleeps more or less often, as the machine is busy or not.
    pub is_batch: bool,
    pub total: f64,
    pub parts: [f64; PARTS.len()],
}

/// Figures, and the compiler of the program that they are of.
pub struct Table {
    pub compiler: String,
    pub rows: Vec<Row>,
}

/// The compiler that has compiled this.
pub fn compiler() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = std::process::Command::new(rustc).arg("--version").output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned()).unwrap_or_default()
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.tsv")
}

impl Table {
    /// The one that is kept.
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

    /// Keeps it.
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

    /// What is more than it may be, a line each.
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

/// The parts that have grown.
fn grown(kept: &Row, seen: &Row) -> String {
    let more = PARTS.iter().zip(kept.parts.iter().zip(&seen.parts)).filter(|(_, (kept, seen))| *seen - *kept >= 5.0);
    let words: Vec<String> = more.map(|(part, (kept, seen))| format!("{part} {kept:.0} to {seen:.0}")).collect();
    words.join(", ")
}
