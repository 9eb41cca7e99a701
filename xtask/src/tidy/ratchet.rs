//! How long files and functions and how wide comments may be, and the recorded exceptions.
//!
//! The record is always exact: what grows is a finding, and so is what has shrunk without its record being
//! lowered. So an exception, once smaller, cannot grow back unseen; raising a number takes an edit that a
//! reviewer sees.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::Finding;
use super::source::Source;

/// Lines of code of a file, without tests, comments and blank lines: what one can keep in mind.
const FILE_MAX: usize = 400;

/// Lines of code of a function: two screens. The aim is 40.
const FUNCTION_MAX: usize = 70;

/// Columns of a line of comment, as of code, which rustfmt holds.
const COLUMNS_MAX: usize = 120;

/// A rule about something that can be counted.
struct Rule {
    noun: &'static str,
    unit: &'static str,
    /// So many are allowed.
    max: usize,
    advice: &'static str,
}

const FILES: Rule = Rule { noun: "file", unit: "lines of code", max: FILE_MAX, advice: "split it by its nouns" };
const FUNCTIONS: Rule = Rule { noun: "function", max: FUNCTION_MAX, ..FILES };
const COMMENTS: Rule = Rule { unit: "lines of comment over 120 columns", max: 0, advice: "wrap them", ..FILES };

/// The recorded exceptions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ratchet {
    /// Lines of code, by `path`.
    files: BTreeMap<String, usize>,
    /// Lines of code, by `path::function`. The longest of a name counts for all of that name in a file.
    functions: BTreeMap<String, usize>,
    /// Lines of comment that are too wide, by `path`.
    comments: BTreeMap<String, usize>,
}

/// What is longer than it may be: its line and its length.
type Measured = BTreeMap<String, (usize, usize)>;

impl Ratchet {
    /// Reads the record; a missing one holds no exception.
    pub fn read(place: &Path) -> Result<Ratchet, String> {
        match std::fs::read_to_string(place) {
            Ok(text) => Ratchet::parse(&text).map_err(|why| format!("{}: {why}", place.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Ratchet::default()),
            Err(error) => Err(format!("cannot read {}: {error}", place.display())),
        }
    }

    fn parse(text: &str) -> Result<Ratchet, String> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
        let section = |name: &str| -> Result<BTreeMap<String, usize>, String> {
            let entries = table.get(name).and_then(toml::Value::as_table).into_iter().flatten();
            entries
                .map(|(key, value)| {
                    let lines = value.as_integer().and_then(|lines| usize::try_from(lines).ok());
                    lines.map(|lines| (key.clone(), lines)).ok_or(format!("{name}.\"{key}\" is not a number of lines"))
                })
                .collect()
        };
        Ok(Ratchet { files: section("files")?, functions: section("functions")?, comments: section("comments")? })
    }

    /// Number of exceptions.
    pub fn len(&self) -> usize {
        self.files.len() + self.functions.len() + self.comments.len()
    }

    /// What is longer than the rule and the record allow, and what of the record is out of date.
    pub fn check(&self, sources: &[Source], record: &Path) -> Vec<Finding> {
        let mut findings = judge(&FILES, &long_files(sources), &self.files, record);
        findings.extend(judge(&FUNCTIONS, &long_functions(sources), &self.functions, record));
        findings.extend(judge(&COMMENTS, &wide_comments(sources), &self.comments, record));
        findings
    }

    /// The record with every number lowered to the present length, and without what has become short enough.
    pub fn tightened(&self, sources: &[Source]) -> Ratchet {
        let lower = |recorded: &BTreeMap<String, usize>, measured: &Measured| {
            let kept = recorded
                .iter()
                .filter_map(|(key, &limit)| measured.get(key).map(|&(_, lines)| (key.clone(), limit.min(lines))));
            kept.collect()
        };
        Ratchet {
            files: lower(&self.files, &long_files(sources)),
            functions: lower(&self.functions, &long_functions(sources)),
            comments: lower(&self.comments, &wide_comments(sources)),
        }
    }
}

fn long_files(sources: &[Source]) -> Measured {
    let lines = sources.iter().map(|source| (source.path.display().to_string(), (1, source.lines())));
    lines.filter(|&(_, (_, lines))| lines > FILE_MAX).collect()
}

fn long_functions(sources: &[Source]) -> Measured {
    let mut found = Measured::new();
    for source in sources {
        for function in source.functions().into_iter().filter(|function| function.lines > FUNCTION_MAX) {
            let key = format!("{}::{}", source.path.display(), function.name);
            let longest = found.entry(key).or_insert((function.line, function.lines));
            if function.lines > longest.1 {
                *longest = (function.line, function.lines);
            }
        }
    }
    found
}

/// The first such line of a file, and how many there are.
fn wide_comments(sources: &[Source]) -> Measured {
    let mut found = Measured::new();
    for source in sources {
        let lines = source.text.lines().zip(source.code.lines()).zip(1..);
        let wide = lines.filter(|((text, code), _)| text.chars().count() > COLUMNS_MAX && code.trim().is_empty());
        for (_, line) in wide {
            found.entry(source.path.display().to_string()).or_insert((line, 0)).1 += 1;
        }
    }
    found
}

fn judge(rule: &Rule, measured: &Measured, recorded: &BTreeMap<String, usize>, record: &Path) -> Vec<Finding> {
    let Rule { noun, unit, max, advice } = rule;
    let mut findings = Vec::new();
    for (key, &(line, lines)) in measured {
        let path = Path::new(key.split("::").next().unwrap_or(key));
        match recorded.get(key) {
            None => findings.push(Finding::new(
                path,
                line,
                format!("{noun} of {lines} {unit}, {max} are allowed: {advice} ({key})"),
            )),
            Some(&limit) if lines > limit => findings.push(Finding::new(
                path,
                line,
                format!("{noun} has grown from {limit} to {lines} {unit}; it may only shrink ({key})"),
            )),
            Some(&limit) if lines < limit => findings.push(Finding::new(
                record,
                1,
                format!("{key} has shrunk from {limit} to {lines}: run `cargo xtask tidy --tighten`"),
            )),
            Some(_) => {}
        }
    }
    for key in recorded.keys().filter(|key| !measured.contains_key(*key)) {
        let what = format!("{key} needs no exception any more: run `cargo xtask tidy --tighten`");
        findings.push(Finding::new(record, 1, what));
    }
    findings
}

impl fmt::Display for Ratchet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Files and functions that are longer than tidy allows, in lines of code; and files with lines of"
        )?;
        writeln!(
            f,
            "# comment that are wider than it allows, so many. A number here may only shrink; `cargo xtask tidy"
        )?;
        writeln!(f, "# --tighten` lowers what has become shorter.")?;
        for (section, entries) in [("files", &self.files), ("functions", &self.functions), ("comments", &self.comments)]
        {
            writeln!(f, "\n[{section}]")?;
            for (key, lines) in entries {
                writeln!(f, "\"{key}\" = {lines}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use std::path::PathBuf;

    use super::*;

    /// A file with one function of `lines` lines of code.
    fn one_function(lines: usize) -> Vec<Source> {
        let body = "    g();\n".repeat(lines - 2);
        vec![Source::new(PathBuf::from("a/src/x.rs"), format!("//! Head.\n\nfn long() {{\n{body}}}\n"))]
    }

    fn findings(record: &str, sources: &[Source]) -> Vec<String> {
        let ratchet = Ratchet::parse(record).unwrap();
        ratchet.check(sources, Path::new("record.toml")).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn a_new_function_over_the_limit_is_found_and_one_at_the_limit_is_not() {
        assert!(findings("", &one_function(FUNCTION_MAX)).is_empty());
        let found = findings("", &one_function(FUNCTION_MAX + 1));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("a/src/x.rs:3: function of 71 lines of code, 70 are allowed"), "{found:?}");
    }

    #[test]
    fn a_recorded_function_may_stay_but_not_grow() {
        let record = "[functions]\n\"a/src/x.rs::long\" = 80\n";
        assert!(findings(record, &one_function(80)).is_empty());
        assert!(findings(record, &one_function(81))[0].contains("has grown from 80 to 81"));
    }

    #[test]
    fn a_recorded_function_that_shrinks_must_shrink_its_record() {
        let record = "[functions]\n\"a/src/x.rs::long\" = 80\n";
        assert!(findings(record, &one_function(75))[0].starts_with("record.toml:1: a/src/x.rs::long has shrunk"));
        assert!(findings(record, &one_function(10))[0].contains("needs no exception any more"));
    }

    #[test]
    fn a_file_over_the_limit_is_found() {
        let text = format!("//! Head.\n{}", "const A: u8 = 1;\n".repeat(FILE_MAX + 1));
        let sources = vec![Source::new(PathBuf::from("a/src/x.rs"), text)];
        assert!(findings("", &sources)[0].starts_with("a/src/x.rs:1: file of 401 lines of code, 400 are allowed"));
        assert!(findings("[files]\n\"a/src/x.rs\" = 401\n", &sources).is_empty());
    }

    #[test]
    fn a_wide_comment_is_found_and_a_wide_string_is_not() {
        let wide = "x ".repeat(60);
        let text = format!("//! Head.\n\n// {wide}\n/// {wide}y\nconst A: &str = \"{wide}\";\n");
        let sources = vec![Source::new(PathBuf::from("a/src/x.rs"), text)];
        let found = findings("", &sources);
        let expected = "a/src/x.rs:3: file of 2 lines of comment over 120 columns, 0 are allowed: wrap them";
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with(expected), "{found:?}");
        assert!(findings("[comments]\n\"a/src/x.rs\" = 2\n", &sources).is_empty());
        assert!(findings("[comments]\n\"a/src/x.rs\" = 1\n", &sources)[0].contains("has grown from 1 to 2"));
    }

    #[test]
    fn tightening_lowers_and_removes_but_never_raises_or_adds() {
        let record = Ratchet::parse("[files]\n\"gone.rs\" = 500\n[functions]\n\"a/src/x.rs::long\" = 80\n").unwrap();
        let lowered = record.tightened(&one_function(75));
        assert_eq!(lowered, Ratchet::parse("[functions]\n\"a/src/x.rs::long\" = 75\n").unwrap());
        assert_eq!(lowered.tightened(&one_function(90)), lowered);
        assert_eq!(Ratchet::parse(&lowered.to_string()).unwrap(), lowered);
        assert_eq!(Ratchet::default().tightened(&one_function(90)).len(), 0);
    }
}
