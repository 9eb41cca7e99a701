//! Limits of lengths of files and functions, of widths of comments, of short documentation and of discouraged words,
//! with recorded exceptions.
//!
//! The record is always exact: growth is a finding, and so is a reduction without lowering the record. So an exception
//! that was reduced cannot grow again unnoticed; raising a number takes an edit that a reviewer sees.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::Finding;
use super::tree::Tree;
use super::words;

/// Maximum lines of code of a file, without tests, comments and blank lines: what a reader can keep in mind.
const FILE_MAX: usize = 400;

/// Maximum lines of code of a function: two screens. The aim is 40.
const FUNCTION_MAX: usize = 70;

/// Maximum columns of a comment; for code, rustfmt ensures the same.
const COLUMNS_MAX: usize = 120;

/// Minimum length of documentation in characters: "The same." documents nothing.
const DOCUMENTATION_MIN: usize = 15;

/// A rule about something that can be counted.
struct Rule {
    /// The section of the record with its exceptions.
    section: &'static str,
    noun: &'static str,
    unit: &'static str,
    /// The limit without an exception.
    max: usize,
    advice: &'static str,
    measure: fn(&Tree) -> Measured,
}

/// Excesses by name: line, length and a hint.
pub type Measured = BTreeMap<String, (usize, usize, String)>;

const FILES: Rule = Rule {
    section: "files",
    noun: "file",
    unit: "lines of code",
    max: FILE_MAX,
    advice: "split it by its nouns",
    measure: long_files,
};

/// By `path::function`. For functions of the same name in a file, the longest counts.
const FUNCTIONS: Rule =
    Rule { section: "functions", noun: "function", max: FUNCTION_MAX, measure: long_functions, ..FILES };

const COMMENTS: Rule = Rule {
    section: "comments",
    unit: "lines of comment over 120 columns",
    max: 0,
    advice: "wrap them",
    measure: wide_comments,
    ..FILES
};

/// For public types, functions and constants. Fields are excluded.
const DOCUMENTATION: Rule = Rule {
    section: "documentation",
    unit: "comments under 15 characters on what is public",
    advice: "write for a caller who has not read the code",
    measure: short_documentation,
    ..COMMENTS
};

/// Discouraged words in comments, which users do not read (`words`).
const WORDS: Rule = Rule {
    section: "words",
    unit: "words in comments that the house does not use",
    advice: "say it otherwise",
    measure: words::in_comments,
    ..COMMENTS
};

const MESSAGES: Rule = Rule {
    section: "messages",
    unit: "words in messages that the house does not use",
    measure: words::in_messages,
    ..WORDS
};

const PAGES: Rule = Rule {
    section: "pages",
    noun: "page",
    unit: "words that the house does not use",
    measure: words::in_pages,
    ..WORDS
};

const RULES: [Rule; 7] = [FILES, FUNCTIONS, COMMENTS, DOCUMENTATION, WORDS, MESSAGES, PAGES];

/// The recorded exceptions, by section and then by what is measured.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ratchet {
    sections: BTreeMap<&'static str, BTreeMap<String, usize>>,
}

impl Ratchet {
    /// Reads the record; a missing file is an empty record.
    pub fn read(place: &Path) -> Result<Ratchet, String> {
        match std::fs::read_to_string(place) {
            Ok(text) => Ratchet::parse(&text).map_err(|why| format!("{}: {why}", place.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Ratchet::default()),
            Err(error) => Err(format!("cannot read {}: {error}", place.display())),
        }
    }

    fn parse(text: &str) -> Result<Ratchet, String> {
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
        let mut ratchet = Ratchet::default();
        for Rule { section, .. } in RULES {
            for (key, value) in table.get(section).and_then(toml::Value::as_table).into_iter().flatten() {
                let limit = value.as_integer().and_then(|limit| usize::try_from(limit).ok());
                let limit = limit.ok_or(format!("{section}.\"{key}\" is not a number"))?;
                ratchet.sections.entry(section).or_default().insert(key.clone(), limit);
            }
        }
        Ok(ratchet)
    }

    /// Number of exceptions.
    pub fn len(&self) -> usize {
        self.sections.values().map(BTreeMap::len).sum()
    }

    /// Finds excesses beyond rules and record, and outdated records.
    pub fn check(&self, tree: &Tree, record: &Path) -> Vec<Finding> {
        let none = BTreeMap::new();
        let recorded = |rule: &Rule| self.sections.get(rule.section).unwrap_or(&none);
        RULES.iter().flat_map(|rule| judge(rule, &(rule.measure)(tree), recorded(rule), record)).collect()
    }

    /// The record with every number lowered to the present value, and without unnecessary entries.
    pub fn tightened(&self, tree: &Tree) -> Ratchet {
        let mut sections = BTreeMap::new();
        for rule in RULES {
            let measured = (rule.measure)(tree);
            let recorded = self.sections.get(rule.section).into_iter().flatten();
            let kept: BTreeMap<_, _> = recorded
                .filter_map(|(key, &limit)| measured.get(key).map(|&(_, now, _)| (key.clone(), limit.min(now))))
                .collect();
            if !kept.is_empty() {
                sections.insert(rule.section, kept);
            }
        }
        Ratchet { sections }
    }
}

fn long_files(tree: &Tree) -> Measured {
    let lines =
        tree.sources.iter().map(|source| (source.path.display().to_string(), (1, source.lines(), String::new())));
    lines.filter(|(_, (_, lines, _))| *lines > FILE_MAX).collect()
}

fn long_functions(tree: &Tree) -> Measured {
    let mut found = Measured::new();
    for source in &tree.sources {
        for function in source.functions().into_iter().filter(|function| function.lines > FUNCTION_MAX) {
            let key = format!("{}::{}", source.path.display(), function.name);
            let longest = found.entry(key).or_insert((function.line, function.lines, String::new()));
            if function.lines > longest.1 {
                *longest = (function.line, function.lines, String::new());
            }
        }
    }
    found
}

/// Files with comments that are too wide: the first line, and their number.
fn wide_comments(tree: &Tree) -> Measured {
    let mut found = Measured::new();
    for source in &tree.sources {
        let lines = source.text.lines().zip(source.code.lines()).zip(1..);
        let wide = lines.filter(|((text, code), _)| text.chars().count() > COLUMNS_MAX && code.trim().is_empty());
        for (_, line) in wide {
            found.entry(source.path.display().to_string()).or_insert((line, 0, String::new())).1 += 1;
        }
    }
    found
}

/// Files with documentation that is too short: the first line, and their number.
fn short_documentation(tree: &Tree) -> Measured {
    const ITEMS: &[&str] = &["fn", "async", "const", "unsafe", "struct", "enum", "trait", "type", "static"];
    let is_item = |line: &str| line.strip_prefix("pub ").is_some_and(|item| ITEMS.contains(&first_word(item)));
    let mut found = Measured::new();
    for source in &tree.sources {
        let lines: Vec<&str> = source.text.lines().map(str::trim_start).collect();
        let mut at = 0;
        for (number, (line, whole)) in lines.iter().zip(source.text.split_inclusive('\n')).enumerate() {
            let is_test = source.is_test(at);
            at += whole.len();
            let follows = number.checked_sub(1).and_then(|before| lines.get(before));
            let begins = !follows.is_some_and(|before| before.starts_with("///"));
            let Some(text) = line.strip_prefix("/// ").filter(|_| begins && !is_test) else { continue };
            let mut behind = lines.iter().skip(number + 1).skip_while(|line| line.starts_with("#["));
            if text.chars().count() < DOCUMENTATION_MIN && behind.next().is_some_and(|line| is_item(line)) {
                found.entry(source.path.display().to_string()).or_insert((number + 1, 0, String::new())).1 += 1;
            }
        }
    }
    found
}

fn first_word(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()
}

fn judge(rule: &Rule, measured: &Measured, recorded: &BTreeMap<String, usize>, record: &Path) -> Vec<Finding> {
    let Rule { noun, unit, max, advice, .. } = rule;
    let mut findings = Vec::new();
    for (key, (line, now, hint)) in measured {
        let path = Path::new(key.split("::").next().unwrap_or(key));
        let hint = if hint.is_empty() { String::new() } else { format!("; the first is {hint}") };
        match recorded.get(key) {
            None => findings.push(Finding::new(
                path,
                *line,
                format!("{noun} of {now} {unit}, {max} are allowed: {advice} ({key}){hint}"),
            )),
            Some(limit) if now > limit => findings.push(Finding::new(
                path,
                *line,
                format!("{noun} has grown from {limit} to {now} {unit}; it may only shrink ({key}){hint}"),
            )),
            Some(limit) if now < limit => findings.push(Finding::new(
                record,
                1,
                format!("{key} has shrunk from {limit} to {now}: run `cargo xtask tidy --tighten`"),
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
            "# What tidy does not allow: long files and functions, in lines of code; lines of comment that are too"
        )?;
        writeln!(
            f,
            "# wide and documentation that is too short, by file; and words (xtask/src/tidy/words.rs) in comments,"
        )?;
        writeln!(
            f,
            "# messages and pages. A number may only shrink; `cargo xtask tidy --tighten` lowers what has become less."
        )?;
        for Rule { section, .. } in RULES {
            writeln!(f, "\n[{section}]")?;
            for (key, limit) in self.sections.get(section).into_iter().flatten() {
                writeln!(f, "\"{key}\" = {limit}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use std::path::PathBuf;

    use super::super::source::Source;
    use super::*;

    /// A file with one function of `lines` lines of code.
    fn one_function(lines: usize) -> Tree {
        let body = "    g();\n".repeat(lines - 2);
        one_file(format!("//! Head.\n\nfn long() {{\n{body}}}\n"))
    }

    fn one_file(text: String) -> Tree {
        Tree { sources: vec![Source::new(PathBuf::from("a/src/x.rs"), text)], ..Tree::default() }
    }

    #[test]
    fn short_documentation_counts_on_public_items_only() {
        let text = [
            "//! Head.\n\n/// The same.\n#[inline]\npub fn one() {}\n",
            "/// The number of requests.\npub fn two() {}\n",
            "/// Its name.\nfn three() {}\n",
            "/// Longer than one\n/// line.\npub struct Four {\n    /// Its name.\n    pub name: u8,\n}\n",
        ];
        let tree = one_file(text.join("\n"));
        assert_eq!(short_documentation(&tree).into_values().collect::<Vec<_>>(), [(3, 1, String::new())]);
    }

    fn findings(record: &str, tree: &Tree) -> Vec<String> {
        let ratchet = Ratchet::parse(record).unwrap();
        ratchet.check(tree, Path::new("record.toml")).iter().map(Finding::to_string).collect()
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
        let sources = one_file(text);
        assert!(findings("", &sources)[0].starts_with("a/src/x.rs:1: file of 401 lines of code, 400 are allowed"));
        assert!(findings("[files]\n\"a/src/x.rs\" = 401\n", &sources).is_empty());
    }

    #[test]
    fn a_wide_comment_is_found_and_a_wide_string_is_not() {
        let wide = "x ".repeat(60);
        let text = format!("//! Head.\n\n// {wide}\n/// {wide}y\nconst A: &str = \"{wide}\";\n");
        let sources = one_file(text);
        let found = findings("", &sources);
        let expected = "a/src/x.rs:3: file of 2 lines of comment over 120 columns, 0 are allowed: wrap them";
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with(expected), "{found:?}");
        assert!(findings("[comments]\n\"a/src/x.rs\" = 2\n", &sources).is_empty());
        assert!(findings("[comments]\n\"a/src/x.rs\" = 1\n", &sources)[0].contains("has grown from 1 to 2"));
    }

    #[test]
    fn a_word_is_found_with_a_better_one() {
        let tree = one_file("//! Head.\n\n/// It is told.\nfn f() {}\n".to_owned());
        let expected = "a/src/x.rs:3: file of 1 words in comments that the house does not use, 0 are allowed: say it \
                        otherwise (a/src/x.rs); the first is 'told': sent, notified, printed, given";
        assert_eq!(findings("", &tree), [expected]);
        assert!(findings("[words]\n\"a/src/x.rs\" = 1\n", &tree).is_empty());
        assert!(findings("[messages]\n\"a/src/x.rs\" = 1\n", &tree).len() == 2);
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
